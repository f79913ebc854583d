"""Collectives. Ranks exchange whole rows: elementwise ones keep the batch, the others work along dim 0."""

from __future__ import annotations

from typing import Any

from dynaflow.batch_rules.call import Call, Verdict
from dynaflow.batch_rules.table import rules

_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd")


def _each(*names: str) -> list[str]:
    return [f"{namespace}::{name}" for namespace in _NAMESPACES for name in names]


@rules(*_each("all_reduce", "all_reduce_coalesced", "broadcast", "wait_tensor"))
def keeps(call: Call) -> Verdict:
    return tuple(call.axis(t) for t in call.tensors)


@rules(*_each("all_gather_into_tensor", "all_gather_into_tensor_coalesced", "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced"))
@rules(*_each("all_to_all_single"), sizes=("output_split_sizes", "input_split_sizes"))
def along_dim_0(call: Call) -> Verdict:
    """(With what torch puts around it, it may be an exchange along another dim: `exchange.py`.)"""
    axes = tuple(call.axis(t) for t in call.tensors)
    is_cut = call.sizes.has_batch((call.get("output_split_sizes"), call.get("input_split_sizes")))
    return "exchanges rows between ranks" if 0 in axes or is_cut else axes


def groups(arguments: dict[str, Any]) -> tuple[str, ...]:
    """Tokens of the process groups among an op's arguments: by name, or the group object itself."""
    found = [value for name, value in arguments.items() if name == "group_name" and isinstance(value, str)]
    objects = [arguments.get("process_group"), arguments.get("group")]
    found += [getattr(group, "group_name", "?") for group in objects if group is not None]
    return tuple(f"group:{name}" for name in found)
