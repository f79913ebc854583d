"""Calls that add to what is there, `y += f(x)`, taken apart.

Such a call waits for y, though f does not look at it: the second product of a LoRA adapter waits for the product of the layer it belongs
to. Apart, f(x) goes into memory of its own, and may run beside what makes y; an addition follows.

    torch.ops.vllm.lora_expand.default(buf3, [arg5_1], buf2, ..., True)

    buf9 = empty_strided_cuda((s0, 6144), (6144, 1), torch.bfloat16)
    buf9.zero_()
    torch.ops.vllm.lora_expand.default(buf3, [arg5_1], buf9, ..., False)
    torch.ops.aten.add_.Tensor(buf2, buf9)
    del buf9

Contract: the text that comes back computes what the given one does, bit for bit where the op rounds what it adds to y's type before it
adds it (but for -0.0, which becomes 0.0). Calls whose y is not known to be allocated there stay as they are.
"""

from __future__ import annotations

import ast
import functools
import re
from typing import Any, Iterator, Mapping, NamedTuple, Sequence

import torch

from dynaflow.inductor.source import NotUnderstood, Statement, read


class Accumulates(NamedTuple):
    """An op's arguments: what it adds to, and what says that it adds."""

    output: str
    flag: str


def apart(text: str, ops: Mapping[str, Accumulates]) -> str:
    """A wrapper's text. `ops`: by what the wrapper calls them. A form that is not known is left for those who need to know it."""
    try:
        wrapper = read(text)
    except NotUnderstood:
        return text
    raw, at = text.encode(), 0
    numbers = [int(n) for s in wrapper.statements for n in re.findall(r"^buf(\d+)$", s.makes)]
    number, pieces = max(numbers, default=-1), []
    for call, s, allocation in _found(raw, wrapper.statements, ops):
        begin, end = s.span
        indent = raw[:begin].rpartition(b"\n")[2].decode()
        if indent.strip():
            continue  # another statement stands before it in its line
        number += 1
        mine, theirs = f"buf{number}", _argument(call, s.target, ops[s.target].output)
        assert theirs is not None
        lines = [
            f"{mine} = {allocation}", f"{mine}.zero_()", _changed(call, s.target, ops[s.target], mine),
            f"torch.ops.aten.add_.Tensor({ast.unparse(theirs)}, {mine})", f"del {mine}",
        ]  # fmt: skip
        pieces += [raw[at:begin], f"\n{indent}".join(lines).encode()]
        at = end
    return b"".join([*pieces, raw[at:]]).decode()


def _found(
    raw: bytes, statements: Sequence[Statement], ops: Mapping[str, Accumulates]
) -> Iterator[tuple[ast.Call, Statement, str]]:
    """Calls that add, with how memory like theirs is allocated."""
    # by name: shape, stride, dtype, device
    lies: dict[str, tuple[tuple[str, ...], tuple[str, ...], str, str]] = {}
    for s in statements:
        if s.kind == "allocate" and s.shape is not None and s.stride is not None:
            lies[s.makes] = (s.shape, s.stride, s.dtype, s.device)
        elif s.kind == "alias" and s.uses[0] in lies:
            base = lies[s.uses[0]]
            lies[s.makes] = base if s.shape is None or s.stride is None else (s.shape, s.stride, *base[2:])
        elif s.kind == "extern" and s.target in ops and set(ops[s.target]) <= set(_names(s.target)):
            call = ast.parse(raw[s.span[0] : s.span[1]].decode(), mode="eval").body
            assert isinstance(call, ast.Call)
            output, flag = (_argument(call, s.target, name) for name in ops[s.target])
            adds = isinstance(flag, ast.Constant) and flag.value is True
            if adds and isinstance(output, ast.Name) and output.id in lies:
                shape, stride, dtype, device = lies[output.id]
                yield call, s, f"empty_strided_{device}({_tuple(shape)}, {_tuple(stride)}, {dtype})"


def _argument(call: ast.Call, target: str, name: str) -> ast.expr | None:
    position = _names(target).index(name)
    by_name = [k.value for k in call.keywords if k.arg == name]
    return by_name[0] if by_name else call.args[position] if position < len(call.args) else None


def _changed(call: ast.Call, target: str, op: Accumulates, mine: str) -> str:
    new: dict[str, ast.expr] = {op.output: ast.Name(mine), op.flag: ast.Constant(False)}
    args = [new.get(name, arg) for name, arg in zip(_names(target), call.args)]
    keywords = [ast.keyword(k.arg, new.get(str(k.arg), k.value)) for k in call.keywords]
    return ast.unparse(ast.Call(call.func, args, keywords))


def _names(target: str) -> list[str]:
    """Of an op's arguments, in their order; none where it is no op that is known here."""
    try:
        overload: Any = functools.reduce(getattr, target.removeprefix("torch.").split("."), torch)
    except AttributeError:
        return []
    return [argument.name for argument in overload._schema.arguments]


def _tuple(items: Sequence[str]) -> str:
    return f"({''.join(f'{item}, ' for item in items)})"
