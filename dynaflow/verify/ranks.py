"""Do all ranks call their collectives in the same order?

Contract: the launches that use a process group, in host order, are the same sequence of (op, rows) on every rank. A rank that
calls them in another order would wait for the others forever.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from math import gcd

from dynaflow import errors
from dynaflow.ir import Flow, Part, Plan

Collective = tuple[str, tuple[int, int, int, int], str]


def verify_ranks(plans: Sequence[Plan], flows: Flow | Sequence[Flow]) -> None:
    """`plans[r]` is rank r's plan, `flows[r]` its flow (one Flow: the same on every rank)."""
    per_rank = [flows] * len(plans) if isinstance(flows, Flow) else list(flows)
    if len(per_rank) != len(plans):
        raise errors.RankMismatch(f"{len(plans)} plans and {len(per_rank)} flows.", fix="pass one flow per rank, or one for all")
    verify_orders([collectives(plan, flow) for plan, flow in zip(plans, per_rank, strict=True)])


def verify_orders(orders: Sequence[Sequence[Collective]], ranks: Sequence[int] | None = None, reasons: Sequence[str] = ()) -> None:
    """`orders[i]` is what `collectives` says of rank `ranks[i]` (of rank i, where no ranks are given); `reasons[i]`: why that rank has no
    plan of its strategy's, empty where it has one."""
    first, ranks = orders[0] if orders else [], ranks or range(len(orders))
    gave_up = {rank: reason.splitlines()[0] for rank, reason in zip(ranks, reasons) if reason}
    for rank, here in zip(ranks, orders):
        for number, (a, b) in enumerate(zip_longest(first, here)):
            if a is None or b is None or a[0] != b[0] or tuple(a[1]) != tuple(b[1]):
                raise errors.RankMismatch(
                    f"collective {number} is {_name(a)} on rank {ranks[0]} and {_name(b)} on rank {rank}.",
                    where=b[2] if b else a[2] if a else "",
                    why="; ".join(["each rank would wait for the other", *(f"rank {r} has no plan: {gave_up[r]}"
                                                                           for r in (ranks[0], rank) if r in gave_up)]),
                    fix="use one strategy on all ranks, and let it look at what is the same on all",
                    picture=_side_by_side(first, here, number, ranks[0], rank))  # fmt: skip


def collectives(plan: Plan, flow: Flow) -> list[Collective]:
    """(op, rows, where) of every call that uses a process group, in host order; of one in a function's place, the function too: one that
    sends in chunks must do so in as many on every rank."""
    users = {op.name for op in flow.ops if any(token.startswith("group:") for token in op.uses)}
    calls = [(launch, name, part) for launch in plan.launches for name, part in launch.calls if name in users]
    return [(f"{launch.replace}[{name}]" if launch.replace else name, _rows(part), launch.where) for launch, name, part in calls]


def _rows(part: Part) -> tuple[int, int, int, int]:
    """Both ends as reduced fractions: 1/2 and 2:4/4 are the same rows."""
    a, b = gcd(part.lo, part.of), gcd(part.hi, part.of)
    return part.lo // a, part.of // a, part.hi // b, part.of // b


def _name(collective: Collective | None) -> str:
    if collective is None:
        return "missing"
    lo, lo_of, hi, hi_of = collective[1]
    return f"'{collective[0]}'" if (lo, hi) == (0, hi_of) else f"'{collective[0]}' over rows {lo}/{lo_of} to {hi}/{hi_of}"


def _side_by_side(first: Sequence[Collective], here: Sequence[Collective], number: int, one: int, other: int) -> str:
    start = max(0, number - 2)
    rows = [(f"rank {one}", f"rank {other}")]
    rows += [(_name(first[i] if i < len(first) else None), _name(here[i] if i < len(here) else None)) for i in range(start, number + 1)]
    width = max(len(left) for left, _ in rows)
    lines = [f"{left.ljust(width)}  {right}" for left, right in rows]
    return "\n".join([*lines[:-1], lines[-1] + "  <-- here"])
