"""Check a replacement function before it is planned: on fakes, its outputs must be those of the ops that it stands in for."""

from __future__ import annotations

from typing import Any, Callable, Mapping, Sequence

import torch
from torch._subclasses import FakeTensorMode

from dynaflow.errors import ReplacementMismatch
from dynaflow.ir import Flow, Launch, Part
from dynaflow.runtime.binder import external_values


def check_replacement(
    flow: Flow, fakes: Mapping[str, torch.Tensor], function: Callable[..., Any], calls: Sequence[tuple[str, Part]], where: str
) -> None:
    """`fakes` are the values at the sizes of the capture; parts of them have at least one row."""
    inputs, outputs = external_values(flow, Launch(tuple(calls), "check", "check"))
    names = ", ".join(f"{op} {part}".rstrip() for op, part in calls)
    given = [_rows(fakes[v], flow.value[v].axis, part) for v, part in inputs]
    wanted = [_describe(*_rows(fakes[v], flow.value[v].axis, part)) for v, part in outputs]
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():  # it may hold parameters of its own
            result = function(*[torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in given])
    except Exception as error:
        raise ReplacementMismatch(
            f"the replacement for {names} raised {type(error).__name__}: {error}", where=where,
            why=f"it was called with {', '.join(_describe(*g) for g in given)}",
            fix="it gets the group's external inputs in order of first use") from error  # fmt: skip
    results = list(result) if isinstance(result, (tuple, list)) else [result]
    got = [_describe(tuple(r.shape), r.dtype, r.device) if isinstance(r, torch.Tensor) else repr(r) for r in results]
    if got != wanted:
        raise ReplacementMismatch(
            f"the replacement for {names} returns other outputs than the ops.", where=where,
            why=f"expected {', '.join(wanted) or 'nothing'}; got {', '.join(got) or 'nothing'}",
            fix="return the group's external outputs, in order, with the same shapes, dtypes and devices")  # fmt: skip


def _rows(fake: torch.Tensor, axis: int | None, part: Part) -> tuple[tuple[int, ...], torch.dtype, torch.device]:
    shape = [d if isinstance(d, int) else int(d.node.hint) for d in fake.shape]
    if axis is not None and not part.is_whole:
        shape[axis] = max(shape[axis] * (part.hi - part.lo) // part.of, 1)
    return tuple(shape), fake.dtype, fake.device


def _describe(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)} on {device.type}"
