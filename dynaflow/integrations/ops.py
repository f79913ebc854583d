"""Split rules for ops of a system that DynaFlow works inside of. They are named by text: not every build of it has all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

import dynaflow as df
from dynaflow.batch_rules.call import Call, Rule


def find_op(name: str) -> Any:
    """An op ("mylib.norm"), or one overload of it ("mylib.norm.default"), where this build has it; else None."""
    namespace, op, *overload = name.split(".")
    found = getattr(getattr(torch.ops, namespace), op, None)
    return getattr(found, overload[0]) if found is not None and overload else found


def tell_split_rules(names: Iterable[str], rule: Rule = df.rowwise, uses: Callable[[Call], Sequence[str]] | None = None) -> None:
    """`df.register_split_rule`, for those of the named ops that this build has."""
    for name in names:
        if (op := find_op(name)) is not None:
            df.register_split_rule(op, rule, uses=uses)
