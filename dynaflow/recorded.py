"""A captured graph's plans as recordings: what is issued, what must stay between recordings, and which sizes share one.

Padding: a call of b rows runs the recording of the next larger bucket, where that cannot show. Every op must treat rows apart, nothing
that is changed in place may carry the batch, and inputs and outputs must have the batch outermost. Otherwise sizes are recorded as they
are.
"""

from __future__ import annotations

import logging
import re
import weakref
from bisect import bisect_left
from typing import Any, Callable, Iterable, Mapping, Sequence

import torch

from dynaflow.boundary import Boundary
from dynaflow.ir import Flow, Op, Value, evaluate
from dynaflow.runtime import cuda, generated
from dynaflow.runtime.graphs import Between, capture_stream
from dynaflow.runtime.program import Bound, Expr, Layout, scratch
from dynaflow.runtime.workspaces import make_workspace
from dynaflow.units import Built

log = logging.getLogger("dynaflow")

# launches of one plan that may turn out to be unrecordable, before we give up
MAX_LEARNED = 16

# aten ops that make the host wait for the device, or whose results have a size that only the device knows
_WAITING = ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.unique", "aten._unique", "aten.item", "aten.equal.")


def why_unrecordable(calls: Sequence[str]) -> str:
    """Why an op that comes down to these calls cannot be part of a CUDA Graph; empty when nothing speaks against it."""
    for name in calls:
        if name.startswith(_WAITING):
            return f"{name} makes the host wait"
        overload = _overload(name)
        if overload is not None and torch.Tag.cudagraph_unsafe in overload.tags:
            return f"{name} is tagged cudagraph_unsafe"
    return ""


def touches_host(flow: Flow, op: Op, layouts: Mapping[str, Layout], device: torch.device) -> bool:
    """Whether an op reads or writes memory of the host or of another device: a recording on `device` would do that once and for all."""
    here = (device.type, device.index or 0)
    devices = [layouts[flow.home(value)].device for value in (*op.reads, *op.writes, *op.mutates)]
    return any((d.type, d.index or 0) != here for d in devices)


def why_between(op: Op, built: Built, device: torch.device) -> str:
    """Why an op is launched between recordings; empty when nothing speaks against recording it."""
    if op.name in built.unrecordable:
        return "recordable=False in the partition"
    if why := why_unrecordable(built.calls[op.name]):
        return why
    program = built.program
    if program.units[op.name].into is not None:
        return ""  # a copy from where the caller's weights lie is recorded like a kernel that reads them
    return "it touches memory of the host, or of another device" if touches_host(program.flow, op, program.layouts, device) else ""


def _overload(name: str) -> Any:
    parts = name.split(".")
    found: Any = torch.ops
    for part in parts:
        found = getattr(found, part, None)
        if found is None:
            return None
    return found if isinstance(found, torch._ops.OpOverload) else None


def streams_for(device: torch.device | None, bound: Bound) -> Any:
    """What generated code takes for streams: CUDA's on a device, none on the CPU."""
    return generated.NoStreams(len(bound.streams) + 1) if device is None else cuda.CudaStreams(device, bound)


class PlanBody:
    """Issues a bound plan for a recording."""

    def __init__(
        self, bound: Bound, names: Sequence[tuple[int, str]], changed: Iterable[int], device: torch.device, why: Callable[[str], str],
        promised: Iterable[int] = (), saved: Iterable[int] = (), copied: Sequence[int] = (),
    ):  # fmt: skip
        """`names`: position and value of the tensors among the arguments. `why` says of an op why it must stay between recordings.
        `promised`: arguments that stay where they are. `saved`: outputs that nobody but a backward gets. `copied`: those of which the
        caller gets copies."""
        # bodies are kept as long as their plan lives, which they must not decide
        self._names, self._device, self._bound = names, device, weakref.ref(bound)
        self.changed: Sequence[int] = sorted(changed)
        self.promised: Sequence[int] = sorted(set(promised) - set(self.changed))
        self.saved: Sequence[int] = sorted(saved)
        self.copied = copied
        # launches between recordings, and why
        whys = ((number, (why(op) for op, _ in launch.calls)) for number, launch in enumerate(bound.plan.launches))
        self.reasons = {number: reason for number, reasons in whys if (reason := next(filter(None, reasons), ""))}
        self.eager = frozenset(self.reasons)
        self._num_learned = 0

    def __call__(self, given: Sequence[Any], between: Between, outputs: Sequence[torch.Tensor] | None) -> Sequence[torch.Tensor]:
        bound = self._plan()
        values = {name: given[i] for i, name in self._names}
        device = self._device if self._device.type == "cuda" else None
        with torch.no_grad():
            return generated.run(bound, values, streams_for(device, bound), between, self.eager, outputs)

    @property
    def allocates(self) -> bool:
        return not self.eager and self._plan().is_one_unit

    def prepare(self) -> None:
        if self._device.type != "cuda":
            return
        bound = self._plan()
        cuda.side_streams(self._device, bound.streams, bound.product_streams, is_recorded=True)
        if self.has_products:
            make_workspace(capture_stream(self._device), is_recorded=True)

    @property
    def has_products(self) -> bool:
        return self._plan().program.may_multiply

    def make_outputs(self) -> list[torch.Tensor]:
        return [scratch(geometry) for geometry in self._plan().output_geometries]

    def _plan(self) -> Bound:
        bound = self._bound()
        assert bound is not None, "who records a plan holds it"
        return bound

    def has_steps(self) -> bool:
        return bool(self.eager)

    def learn(self, error: BaseException) -> bool:
        bound = self._plan()
        if isinstance(error, torch.OutOfMemoryError) or "previous error during capture" in str(error):
            return False  # another thread made the recording void, or there was no room for it: no launch is to blame
        number = generated.code_of(bound, self.eager).failed_launch(error)
        if number is None or number in self.eager or self._num_learned >= MAX_LEARNED:
            return False
        launches, why = bound.plan.launches, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        ops = [op for op, _ in launches[number].calls]
        learned = [n for n, launch in enumerate(launches) if [op for op, _ in launch.calls] == ops]  # its other parts, too
        self.reasons.update(dict.fromkeys(learned, why))
        self.eager = frozenset(self.reasons)
        self._num_learned += 1
        log.warning("'%s' cannot be recorded in a CUDA Graph, and is launched between recordings: %s", bound.calls[number].label, why)
        return True


class Padding:
    def __init__(self, flow: Flow, built: Built, buckets: str | Sequence[int] | None):
        self._flow, self._built = flow, built
        self._at = [i for i, s in enumerate(flow.symbols) if s in flow.batch]
        self._buckets = buckets if isinstance(buckets, str) or buckets is None else sorted(buckets)
        # why sizes are recorded as they are
        self.refusal = "" if buckets is None else why_unpadded(flow, built)
        if self.refusal:
            log.warning("%s: buckets= has no effect, sizes are recorded as they are: %s", flow.name, self.refusal)

    def __str__(self) -> str:
        if self._buckets is None or self.refusal:
            return f"sizes are recorded as they are: {self.refusal or 'no buckets= are given'}"
        if not self._at:
            return "sizes are recorded as they are: no size is the batch"
        buckets = "powers of two" if isinstance(self._buckets, str) else ", ".join(map(str, self._buckets))
        return f"the batch is padded to {buckets}"

    def sizes(self, sizes: tuple[Any, ...]) -> tuple[Any, ...]:
        """The sizes whose recording serves these."""
        if self._buckets is None or self.refusal or not self._at:
            return sizes
        rows = self.bucket(sizes[self._at[0]])
        return tuple(rows if i in self._at else size for i, size in enumerate(sizes))

    def bucket(self, rows: int) -> int:
        if not rows:
            return rows  # there is no row that could be repeated
        if isinstance(self._buckets, str):
            return 1 << max(rows - 1, 0).bit_length()
        assert self._buckets is not None
        at = bisect_left(self._buckets, rows)
        return self._buckets[at] if at < len(self._buckets) else rows

    def slots(self, boundary: Boundary, args: Sequence[Any], padded: tuple[Any, ...]) -> dict[int, tuple[int, int] | None]:
        """Which arguments get slots, and with how many rows."""
        flow, numbers = self._flow, dict(zip(self._flow.symbols, padded))
        found: dict[int, tuple[int, int] | None] = {}
        for i, name in boundary.names:
            value = flow.value[name]
            if value.role != "input" or i in boundary.changed or not is_dense(args[i]):
                continue
            found[i] = None if value.axis is None else (value.axis, evaluate(value.shape[value.axis], numbers))
        return found

    def cut(self, bound: Bound, outputs: Sequence[torch.Tensor], sizes: tuple[Any, ...]) -> list[torch.Tensor]:
        """The rows that the caller asked for."""
        numbers = dict(zip(self._flow.symbols, sizes))
        values = [self._flow.value[name] for name, _ in bound.outputs]
        return [
            tensor if value.axis is None else tensor.narrow(value.axis, 0, evaluate(value.shape[value.axis], numbers))
            for value, tensor in zip(values, outputs)
        ]


def why_unpadded(flow: Flow, built: Built) -> str:
    """Why extra rows would show; empty when they would not."""
    if not flow.batch:
        return "no dim of its inputs is the batch"
    batch = re.compile(rf"\b({'|'.join(map(re.escape, flow.batch))})\b")
    for op in flow.ops:
        for name in op.mutates:
            if flow.value[name].axis is not None:
                return f"{op.name} changes {name} in place, which carries the batch"
        touched = any(flow.value[name].axis is not None for name in (*op.reads, *op.writes))
        unit = built.program.units[op.name]
        counts = any(isinstance(arg, Expr) and batch.search(arg.text) for arg in unit.args)
        if op.unsplittable and (touched or counts):
            return f"{op.name}: {op.unsplittable}"
    for value in flow.values:
        if value.axis is not None and value.role in ("input", "output"):
            stride = built.program.layouts[value.name].stride
            if any(step == "0" and size != "1" for size, step in zip(value.shape, stride)):
                return f"its {value.role} {value.name} is expanded"
            if any(batch.search(step) for step in stride) or _is_inside(value, stride, flow):
                return f"the batch is not the outermost dim of its {value.role} {value.name}"
    return ""


def _is_inside(value: Value, stride: Sequence[str], flow: Flow) -> bool:
    """Whether more rows would run into what lies behind them: steps along another dim are longer."""
    assert value.axis is not None
    steps = [evaluate(step, flow.nominal_sizes) for step in stride]
    return any(step > steps[value.axis] for size, step in zip(value.shape, steps) if size != "1")


def is_dense(tensor: torch.Tensor) -> bool:
    return all(step > 0 for size, step in zip(tensor.shape, tensor.stride()) if size > 1)
