"""The verdict on one op: may it run on a slice of the batch, and if not, why.

 1. Whatever the rule would say: random numbers, tensors that cannot be cut, bodies that are not seen.
 2. An op that meets nothing of the batch gives the same in every part, unless it changes what was there before.
 3. A batch size among the arguments must be a size, not a number that is computed with.
 4. The op's rule decides.
 5. What the rule claims must agree with the shapes, and what is written must have rows to write.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Iterable

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dynaflow.batch_rules.call import REDUCES, STATE, Call
from dynaflow.batch_rules.contract import matmul
from dynaflow.batch_rules.table import find


@dataclass
class Memory:
    """What is known of storages and tensors, so far."""

    # number of every storage that a node has handed out
    ids: dict[Any, int] = field(default_factory=dict)
    # storages in which some tensor carries the batch
    with_batch: set[Any] = field(default_factory=set)
    # ids of tensors that carry the batch, but not where their shape says
    opaque: set[int] = field(default_factory=set)


def judge(call: Call, memory: Memory) -> tuple[str, bool]:
    """(why the op needs the whole batch, whether that is only because it changes state)."""
    reason, is_state = _reason(call, memory)
    return (reason if not reason or reason.startswith("no rule for") else f"{reason} ({call.func})"), is_state


def _reason(call: Call, memory: Memory) -> tuple[str, bool]:
    sizes, tags = call.sizes, getattr(call.func, "tags", ())

    # 1
    if is_random(call):
        return "random", False
    for tensor in (*call.tensors, *call.outs):
        if is_traceable_wrapper_subclass(tensor):
            return f"works on {type(tensor).__name__}", False
    if any(id(t) in memory.opaque or sizes.is_whole(t) for t in call.tensors):
        return "reads a tensor that cannot be cut by rows", False
    if call.is_opaque:
        return f"no rule for {call.func.name()}", False
    if torch.Tag.inplace_view in tags:  # a part's view would change, and not what it is a view of
        return "changes a shape in place", False
    if call.func.namespace == "streams":
        return "orders streams by itself", False

    # 2
    numbers = {name for name, value in call.arguments.items() if sizes.has_batch(value)}
    if not numbers and not call.batched(*call.tensors):
        existing = {storage_key(t) for t in call.written} & memory.ids.keys()
        if existing & memory.with_batch:
            return "changes some rows of the batch", False
        return (STATE, True) if existing else ("", False)

    # 3
    entry = find(call.func)
    if entry is None:
        is_known = torch.Tag.dynamic_output_shape in tags
        return "has an output size that depends on the data" if is_known else f"no rule for {str(call.func).rpartition('.')[0]}", False
    if numbers - entry.sizes:
        return "uses the batch size as a number", False

    # 4
    try:
        verdict = entry.rule(call)
    except Exception as error:  # a rule that fails does not accept
        return f"the rule failed with {type(error).__name__}", False
    if not entry.answers_for_writes and any(call.axis(t) is None for t in call.written) and verdict != REDUCES:
        return STATE, False
    if isinstance(verdict, str):
        return verdict, False

    # 5
    claimed = verdict if isinstance(verdict, tuple) else (verdict,) * len(call.outs)
    if claimed != tuple(call.axis(t) for t in call.outs) or any(sizes.is_whole(t) for t in call.outs):
        return "mixes rows of the batch", False
    if any(_shares_rows(t, call.axis(t)) for t in call.written):
        return "writes rows that share their memory", False
    return "", False


def survives(reasons: Iterable[str], call: Call) -> bool:
    """Whether a product that is rowwise as a whole was only refused for how it is computed."""
    name = getattr(call.func, "__name__", str(call.func))
    if name not in ("linear", "matmul") or not all(reason.startswith("interleaves") for reason in reasons):
        return False
    return call.axis(call.outs[0]) is not None and matmul(call) == call.axis(call.outs[0])


def is_random(call: Call) -> bool:
    """Tagged ops include attention and dropout, which draw nothing when the probability is 0 or the model in eval mode."""
    is_off = call.get("dropout_p") == 0 or call.get("train") is False or call.get("training") is False
    return torch.Tag.nondeterministic_seeded in getattr(call.func, "tags", ()) and not is_off


def storage_key(tensor: torch.Tensor) -> Any:
    """Equal for tensors in one storage, as long as both are alive."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    try:
        return tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):  # sparse, or a subclass without storage
        return ("tensor", id(tensor))


def _shares_rows(tensor: torch.Tensor, axis: int | None) -> bool:
    """An expanded tensor has one row in memory for all rows of the batch."""
    stride = tensor.stride(axis) if axis is not None else None
    return isinstance(stride, int) and stride == 0
