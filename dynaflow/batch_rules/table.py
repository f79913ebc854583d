"""Which rule answers for which op.

A rule is a function of one `Call`. It returns the batch axis of the outputs (an int for all of them, or a tuple with one
entry per output tensor, None for an output that does not depend on the batch), or a reason why the op must see the whole
batch. What it claims is checked against the shapes afterwards; a wrong claim counts as a refusal.
"""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Sequence

import torch

from dynaflow.batch_rules.call import DIFFERENT_ROWS, STATE, Call, Rule, Verdict
from dynaflow.errors import OptionError


class Entry(NamedTuple):
    rule: Rule
    # arguments that are sizes: they may contain the batch size, other numbers may not
    sizes: frozenset[str] = frozenset()
    # a user's rule also answers for what the op writes; ours have that checked
    answers_for_writes: bool = False
    # tokens of the state that the op uses beside its arguments
    uses: Callable[[Call], Sequence[str]] | None = None


_ours: dict[str, Entry] = {}
_users: dict[str, Entry] = {}


def register_split_rule(op: Any, rule: Rule, *, sizes: tuple[str, ...] = (), uses: Callable[[Call], Sequence[str]] | None = None) -> None:
    """Say how an op behaves on a slice of the batch.

        register_split_rule(torch.ops.mylib.norm, rowwise)
        register_split_rule(torch.ops.mylib.attend, lambda call: call.axis(call["query"]))

    `op` is an overload, all overloads (`torch.ops.mylib.norm`), what `torch.library.custom_op` made, or a higher-order op. `rule(call)`
    returns the batch axis of the outputs or a reason to refuse; `sizes` names the arguments that are sizes. An accepting rule also
    promises that whatever the op writes may be written part by part: in any order of parts, but never two parts at once.

    `uses(call)` names state that the op reads or changes and that is no argument of it (a serving engine's KV cache of one layer).
    Who uses the same state keeps program order, and parts of one op run in the order of their rows, unless a call says that they touch
    nothing in common (the tag `apart`). The name `group:<name>` is that of a process group: its users run in one order on all ranks.
    """
    op = getattr(op, "_opoverload", op)  # what torch.library.custom_op returns
    if not isinstance(op, (torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._ops.HigherOrderOperator)):
        raise OptionError(
            f"register_split_rule got {op!r}, which is no op.", fix="give torch.ops.mylib.norm, or what torch.library.custom_op made")
    if not callable(rule):
        raise OptionError(f"register_split_rule got {rule!r} as its rule.", fix="give df.rowwise, or a function of the call")
    _users[_key(op)] = Entry(rule, frozenset(sizes), True, uses)


def rowwise(call: Call) -> Verdict:
    """Every tensor that carries the batch carries it in dim 0, outputs do, and rows do not know of each other."""
    if any(call.axis(t) not in (0, None) for t in call.tensors):
        return DIFFERENT_ROWS
    if any(call.axis(t) is None for t in call.written):
        return STATE
    return 0


def find(func: Any) -> Entry | None:
    """The entry for an op that was called; in-place ops share the rule of the op they are named after."""
    key = _key(func)
    name, _, _ = key.partition(".")
    if key in _users or name in _users:
        return _users.get(key) or _users[name]
    if torch.Tag.pointwise in getattr(func, "tags", ()):
        return _ours["aten::clone"]
    if name in _ours or not name.endswith("_") or name.endswith("__"):
        return _ours.get(name)
    packet = getattr(getattr(torch.ops, func.namespace), func._opname.removesuffix("_"), None)
    same = getattr(packet, func._overloadname, None)
    return _ours.get(name.removesuffix("_")) if same is None or torch.Tag.pointwise not in same.tags else _ours["aten::clone"]


def is_users(func: Any) -> bool:
    """Whether a rule that was registered answers for an op."""
    key = _key(func)
    return key in _users or key.partition(".")[0] in _users


def rules(*names: str, sizes: tuple[str, ...] = ()) -> Callable[[Rule], Rule]:
    """Ours: `@rules("mm", "_int_mm")` for aten ops, or `"namespace::name"`."""

    def add(rule: Rule) -> Rule:
        for name in names:
            _ours[name if "::" in name else f"aten::{name}"] = Entry(rule, frozenset(sizes))
        return rule

    return add


def _key(op: Any) -> str:
    if isinstance(op, torch._ops.OpOverload):
        return f"{op._schema.name}.{op._overloadname}"
    if isinstance(op, torch._ops.OpOverloadPacket):
        return op._qualified_op_name
    return f"higher_order::{op.name()}"
