"""Replacement functions: what they can be made of, and a check before they are planned.

`body` is what ops do, as a function. `check_replacement` calls a function on fakes: its outputs must be those of the ops that it stands
in for.
"""

from __future__ import annotations

import re
from typing import Any, Callable, Mapping, Sequence

import torch
from torch._subclasses import FakeTensorMode

from dynaflow.errors import ReplacementMismatch
from dynaflow.ir import Flow, Launch, Part, evaluate
from dynaflow.runtime.binder import changed_in_place, external_values
from dynaflow.runtime.compose import compose
from dynaflow.runtime.program import Expr, Program, Unit


class Body:
    """What a group of ops does on one part: takes its external inputs in order of first use, returns its external outputs in order.

    `in_axes`, `out_axes`: the dim of each that the batch is cut along, or None. `rows_at`: an input, and the dim of it whose size is the
    number of rows; or None.
    """

    def __init__(self, flow: Flow, unit: Unit, inputs: Sequence[str], symbols: Mapping[str, tuple[int, int]]):
        self.unit, self.inputs, self._symbols = unit, tuple(inputs), dict(symbols)
        self.in_axes = tuple(flow.value[v].axis for v in inputs)
        self.out_axes = tuple(flow.value[v].axis for v in unit.outs)
        self.rows_at = next((symbols[s] for s in flow.batch if s in symbols), None)
        self._args = tuple(a if isinstance(a, Expr) else self.inputs.index(a) for a in unit.args)

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sizes = {symbol: tensors[i].shape[dim] for symbol, (i, dim) in self._symbols.items()}
        return tuple(self.unit.fn(*[evaluate(a.text, sizes) if isinstance(a, Expr) else tensors[a] for a in self._args]))


def body(program: Program, calls: Sequence[tuple[str, Part]]) -> Body | None:
    """None where ops are on several parts, touch pieces, or take a size that no input of theirs has."""
    flow, ops = program.flow, [program.flow.op(name) for name, _ in calls]
    touched = [v for op in ops for v in (*op.reads, *op.mutates, *op.writes)]
    if len({part for _, part in calls}) > 1 or any(flow.value[v].home or v in flow.pieces for v in touched):
        return None
    inputs, outputs = external_values(flow, Launch(tuple(calls), "body", "body"))
    unit = compose([program.units[name] for name, _ in calls], [v for v, _ in outputs])
    names = [v for v, _ in inputs]
    symbols: dict[str, tuple[int, int]] = {}  # where each can be read; the number of rows only where the batch is cut
    for i, value in enumerate(flow.value[name] for name in names):
        for dim, size in enumerate(value.shape):
            if size in flow.symbols and (size not in flow.batch or dim == value.axis):
                symbols.setdefault(size, (i, dim))
    needed = {s for arg in unit.args if isinstance(arg, Expr) for s in flow.symbols if re.search(rf"\b{s}\b", arg.text)}
    return Body(flow, unit, names, symbols) if needed <= set(symbols) else None


def check_replacement(
    flow: Flow, fakes: Mapping[str, torch.Tensor], function: Callable[..., Any], calls: Sequence[tuple[str, Part]], where: str
) -> None:
    """`fakes` are the values at the sizes of the capture; parts of them have at least one row."""
    inputs, outputs = external_values(flow, Launch(tuple(calls), "check", "check"))
    names = ", ".join(f"{op} {part}".rstrip() for op, part in calls)
    given = [_rows(fakes[v], flow.value[v].axis, part) for v, part in inputs]
    wanted = [_describe(*_rows(fakes[v], flow.value[v].axis, part)) for v, part in outputs]
    given_names = [f"{v} {_describe(*g)}" for (v, _), g in zip(inputs, given)]
    fake_inputs: list[torch.Tensor] = []
    try:
        # It may hold parameters of its own. Tensors of inference mode do not say that they were changed.
        with torch.inference_mode(False), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            fake_inputs += [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in given]
            result = function(*fake_inputs)
    except Exception as error:
        raise ReplacementMismatch(
            f"the replacement for {names} raised {type(error).__name__}: {error}", where=where,
            why=f"it was called with {_few(given_names)}",
            fix="it gets the group's external inputs in order of first use") from error  # fmt: skip
    may_change = {flow.value[v].storage for name, _ in calls for v in changed_in_place(flow, name)}
    for fake, (value, _) in zip(fake_inputs, inputs):
        if fake._version and flow.value[value].storage not in may_change:
            raise ReplacementMismatch(
                f"the replacement for {names} changes '{value}' in place.", where=where, why="the ops that it stands in for only read it",
                fix="compute on a copy: x + y instead of x += y")  # fmt: skip
    results = list(result) if isinstance(result, (tuple, list)) else [result]
    got = [_describe(tuple(r.shape), r.dtype, r.device) if isinstance(r, torch.Tensor) else repr(r) for r in results]
    if got != wanted:
        raise ReplacementMismatch(
            f"the replacement for {names} returns other outputs than the ops.", where=where,
            why=f"expected {_few([f'{v} {text}' for (v, _), text in zip(outputs, wanted)])}; got {_few(got)}",
            fix="return the group's external outputs, in order, with the same shapes, dtypes and devices")  # fmt: skip


def _rows(fake: torch.Tensor, axis: int | None, part: Part) -> tuple[tuple[int, ...], torch.dtype, torch.device]:
    shape = [d if isinstance(d, int) else int(d.node.hint) for d in fake.shape]
    if axis is not None and not part.is_whole:
        shape[axis] = max(shape[axis] * (part.hi - part.lo) // part.of, 1)
    return tuple(shape), fake.dtype, fake.device


def _few(items: Sequence[str], most: int = 8) -> str:
    return ", ".join([*items[:most], *([f"{len(items) - most} more"] if len(items) > most else [])]) or "nothing"


def _describe(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)} on {device.type}"
