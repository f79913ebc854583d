"""What `flow.split` was asked for -> the parts that it makes, or PartsDoNotTile."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import accumulate
from operator import index
from typing import Any, Sequence

from dynaflow.context import Context
from dynaflow.errors import PartsDoNotTile
from dynaflow.ir import Part, equal_parts, tiles


def rows_by_tag(into: Any) -> tuple[str, ...]:
    """How many rows each part has, where tags of the call say so: `["num_prefill", -1]`; else ()."""
    is_by_tag = isinstance(into, Sequence) and not isinstance(into, str) and any(isinstance(n, str) for n in into)
    return tuple(map(str, into)) if is_by_tag else ()


def parts_of(into: Any, context: Context, where: str) -> tuple[Part, ...]:
    if isinstance(into, str) or not hasattr(into, "__iter__"):
        num_parts = _count(into, into, where)
        if num_parts < 1:
            raise PartsDoNotTile(f"flow.split({into}) makes no part.", where=where, fix="split into 1 part or more")
        return equal_parts(num_parts)
    if rows := rows_by_tag(into):
        missing = [n for n in into if isinstance(n, str) and context.count(n) is None]
        if missing or rows.count("-1") != 1:
            raise PartsDoNotTile(
                f"flow.split({into!r}) does not tile the batch.", where=where,
                why=f"the context has no tag {missing[0]}" if missing else "one part must be the rest",
                fix="name tags that the call has (df.context), and give -1 once")  # fmt: skip
        return equal_parts(len(rows))
    numbers = list(into)
    if any(isinstance(n, float) for n in numbers):
        return _by_shares(numbers, where)
    of, sizes = int(context.batch_size), [_count(n, into, where) for n in numbers]
    if sizes and sizes[0] == 0:
        marks = sizes
    else:
        if sizes.count(-1) == 1:
            sizes[sizes.index(-1)] = of - (sum(sizes) + 1)
        marks = [0, *accumulate(sizes)]
    parts = tuple(Part(a, b, of) for a, b in zip(marks, marks[1:]))
    if not parts or not tiles(parts):
        raise PartsDoNotTile(
            f"flow.split({into!r}) does not tile the batch of {of} rows.", where=where,
            why=f"the parts would be {', '.join(f'[{p.lo}, {p.hi})' for p in parts) or 'none'}",
            fix="give sizes that add up to the batch size, or rising boundaries from 0 to it")  # fmt: skip
    return parts


def _by_shares(shares: Sequence[Any], where: str) -> tuple[Part, ...]:
    is_positive = all(isinstance(n, (int, float)) and math.isfinite(n) and n > 0 for n in shares)
    ends = [Fraction(n).limit_denominator(10_000) for n in accumulate(shares)] if is_positive else []
    if not ends or ends[-1] != 1:
        raise PartsDoNotTile(
            f"the shares {shares} do not tile the batch.", where=where,
            why=f"they add up to {sum(shares):g}" if is_positive else "not all of them are positive numbers",
            fix="give positive shares that add up to 1")  # fmt: skip
    of = math.lcm(*(end.denominator for end in ends))
    marks = [0, *(int(end * of) for end in ends)]
    return tuple(Part(a, b, of) for a, b in zip(marks, marks[1:]))


def _count(number: Any, into: Any, where: str) -> int:
    try:
        return index(number)
    except TypeError:
        raise PartsDoNotTile(
            f"flow.split({into!r}) says no parts.", where=where, why=f"{number!r} is no whole number",
            fix="give how many parts, or a list of shares, sizes, boundaries or tags: split(2), split([0.6, 0.4]), split([3, -1])",
        ) from None  # fmt: skip
