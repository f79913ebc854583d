"""Split rules for ops of a system that DynaFlow works inside of. They are named by text: not every build of it has all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

import dynaflow as df
from dynaflow.batch_rules.call import DIFFERENT_ROWS, Call, Rule, Verdict


def find_op(name: str) -> Any:
    """An op ("mylib.norm"), or one overload of it ("mylib.norm.default"), where this build has it; else None."""
    namespace, op, *overload = name.split(".")
    found = getattr(getattr(torch.ops, namespace), op, None)
    return getattr(found, overload[0]) if found is not None and overload else found


def by_rows(call: Call) -> Verdict:
    """`df.rowwise`, also where tokens lie in dim 1 of one sequence: dims of size 1 before the batch leave rows where they are in memory.
    What an op works along is its last dim."""
    for tensor in call.tensors:
        axis = call.axis(tensor)
        if axis and (axis == tensor.ndim - 1 or any(not isinstance(n, int) or n != 1 for n in tensor.shape[:axis])):
            return DIFFERENT_ROWS
    axes = {call.axis(tensor) for tensor in (*call.outs, *call.written)}
    return axes.pop() if len(axes) == 1 and axes != {None} else df.rowwise(call)


def tell_split_rules(names: Iterable[str], rule: Rule = by_rows, uses: Callable[[Call], Sequence[str]] | None = None) -> None:
    """`df.register_split_rule`, for those of the named ops that this build has."""
    for name in names:
        if (op := find_op(name)) is not None:
            df.register_split_rule(op, rule, uses=uses)
