"""What it takes to run a plan: the ops as functions, and where their tensors lie.

`Program` belongs to a flow. A `Binder` fixes a plan to sizes: it resolves parts to rows, values to views and steps to a flat list of
instructions. `Bound.tensors` makes the views for one call; a runtime then issues the instructions and decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Callable, Mapping, NamedTuple, Protocol, Sequence

import torch

from dynaflow.ir import Flow, Launch, Part, Plan, Stream, evaluate
from dynaflow.memory import Memory
from dynaflow.runtime.ranks import uses_groups

LAUNCH, RECORD, WAIT = 0, 1, 2


class Expr(NamedTuple):
    """A size that a unit takes as an argument: an expression over the flow's symbols, evaluated per part."""

    text: str


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Unit:
    """An op as a function: takes `args` (value names and sizes), returns one tensor per name in `outs`."""

    fn: Callable[..., Sequence[Any]]
    args: tuple[str | Expr, ...]
    outs: tuple[str, ...]
    # the outs whose result is sure to be memory of its own; others might, for some sizes, be an argument or a view of one
    fresh: frozenset[str] = frozenset()
    # the flow's ops that it is made of
    ops: tuple[str, ...] = ()
    # the same as a function that takes `args`, then a destination for each out, and writes there
    into: Callable[..., None] | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """A unit for given sizes: what to call, and what becomes of its results."""

    # takes `inputs`, then a destination for each out that has no reason in `own`; returns one tensor per out
    call: Callable[[list[Any]], Sequence[Any]]
    # per out: why it comes back as a tensor that the unit allocated; "" where it is written straight into its destination
    own: tuple[str, ...]
    # what `call` takes: the number of an argument, or a constant in a tuple of one. None: the arguments as they are
    inputs: tuple[int | tuple[Any], ...] | None = None
    # per out: the strides that it is written with; None: the destination's own
    strides: tuple[tuple[int, ...] | None, ...] | None = None
    # bytes that every tensor that goes in must be aligned to
    alignment: int = 1
    # what it allocates besides its outs, at its peak
    peak_bytes: int = 0
    # the generated code behind it, and where it is; empty for eager ops
    source: str = ""
    path: str = ""
    # whether None will do for each destination: it then allocates, as late as it can
    allocates: bool = False
    # per out: whether it comes back in memory of an argument, of a constant or of another out, where the unit makes it; empty: none does
    shared: tuple[bool, ...] = ()


class Compiler(Protocol):
    """Makes entries of units; None where the unit runs eagerly."""

    def entry(self, unit: Unit, sizes: Mapping[str, Any]) -> Entry | None: ...


@dataclass(frozen=True, slots=True)
class Layout:
    """How a value that the engine allocates lies in memory."""

    dtype: torch.dtype
    device: torch.device
    # strides in elements of the whole buffer
    stride: tuple[str, ...]
    # strides that ops expect of what they read; where a part of the buffer has others (the batch is not the outermost dim), or the
    # whole has, the read makes a copy. None: views will do.
    expected: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Program:
    flow: Flow
    units: Mapping[str, Unit]
    layouts: Mapping[str, Layout]
    # replacement functions by qualified name
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    compiler: Compiler | None = None
    # ops that cuBLAS runs, which keeps a workspace for every stream that it runs on; None: nobody knows, any may be one
    products: frozenset[str] | None = None

    @property
    def may_multiply(self) -> bool:
        return self.products is None or bool(self.products)


class View(NamedTuple):
    """A part of a value, as a runtime needs it."""

    value: str
    part: Part


class Instruction(NamedTuple):
    """code, stream index, and: a Call to launch, or an event's name."""

    code: int
    stream: int
    what: Any


MISALIGNED = "rows that are not aligned to 16 bytes"

# What becomes of a result: written into its place by the unit; copied there; kept as it is, in the place of a view.
PLACED, COPIED, KEPT = "placed", "copied", "kept"


class Geometry(NamedTuple):
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Out(NamedTuple):
    """One result of a launch."""

    # number of the view
    view: int
    how: str
    # strides that what is kept must have
    stride: tuple[int, ...] = ()
    # (number, axis, start, length) of the views inside a kept result
    inside: tuple[tuple[int, int, int, int], ...] = ()
    # for a unit that writes to its destination, where the place itself will not do: a new one of this geometry
    scratch: Geometry | None = None
    # why it is copied, if it is
    reason: str = ""


class Arg(NamedTuple):
    """One argument of a launch: a view, perhaps copied to other strides first; or a number."""

    # -1: `number` it is
    view: int
    # strides that the unit expects
    stride: tuple[int, ...] | None = None
    # the view lies where the unit cannot read it: a copy goes in
    is_cloned: bool = False
    number: Any = None


class Call:
    """One launch, resolved."""

    __slots__ = ("entry", "args", "outs", "label", "where", "part", "mutates", "kind")

    def __init__(self, entry: Entry, args: tuple[Arg, ...], outs: tuple[Out, ...], launch: Launch, mutates: tuple[str, ...], kind: str):
        self.entry, self.args, self.outs, self.mutates, self.kind = entry, args, outs, mutates, kind
        self.label, self.where = launch.label, launch.where
        # None: the launch spans several parts
        self.part = launch.calls[0][1] if len({part for _, part in launch.calls}) == 1 else None

    @property
    def form(self) -> tuple[Any, ...]:
        """What generated code for a launch of this plan depends on, numbers (sizes, strides, rows) aside."""
        inputs = self.entry.inputs
        return (
            None if inputs is None else tuple([x if isinstance(x, int) else None for x in inputs]),
            tuple([bool(own) for own in self.entry.own]), self.entry.allocates,
            tuple([(arg.view, arg.stride is None, arg.is_cloned) for arg in self.args]),
            tuple([(out.view, out.how, out.scratch is None, bool(out.reason), tuple([(r, axis) for r, axis, _, _ in out.inside]))
                   for out in self.outs]),
        )  # fmt: skip

    def __call__(self, tensors: list[Any]) -> None:
        args = [self._argument(a, tensors) for a in self.args]
        if self.entry.inputs is not None:
            args = [args[x] if isinstance(x, int) else x[0] for x in self.entry.inputs]
        for out, own in zip(self.outs, self.entry.own):
            if not own:
                args.append(tensors[out.view] if out.scratch is None else scratch(out.scratch))
        for out, result in zip(self.outs, self.entry.call(args)):
            if out.how == COPIED:
                tensors[out.view].copy_(result)
            elif out.how == KEPT:
                tensors[out.view] = kept = relaid(result.clone() if out.reason else result, out.stride)
                for i, axis, start, length in out.inside:
                    tensors[i] = kept.narrow(axis, start, length)

    @staticmethod
    def _argument(arg: Arg, tensors: list[Any]) -> Any:
        if arg.view < 0:
            return arg.number
        tensor = tensors[arg.view] if arg.stride is None else relaid(tensors[arg.view], arg.stride)
        return copy_as_it_lies(tensor) if arg.is_cloned else tensor


def relaid(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """The tensor with the given strides, copied if it has others; expanded dims (stride 0) stay expanded."""
    if same_stride(tensor.shape, tensor.stride(), stride):
        return tensor
    shape = [1 if step == 0 else size for size, step in zip(tensor.shape, stride)]
    small = tensor.as_strided(shape, tensor.stride(), tensor.storage_offset())
    return torch.empty_strided(shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(small).expand(tensor.shape)


def copy_as_it_lies(tensor: torch.Tensor) -> torch.Tensor:
    """A copy at an address of its own, with the same strides, and with nothing of what lies before or behind it: compiled code was made
    for those strides, and `clone` closes gaps."""
    if not tensor.numel():
        return tensor.clone()
    length = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride()))
    return tensor.as_strided((length,), (1,)).clone().as_strided(tensor.shape, tensor.stride(), 0)


def same_stride(shape: Sequence[int], one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Steps along dims of one element do not count."""
    return one == other or all(a == b or size == 1 for a, b, size in zip(one, other, shape))


def scratch(geometry: Geometry) -> torch.Tensor:
    return torch.empty_strided(geometry.shape, geometry.stride, dtype=geometry.dtype, device=geometry.device)


class Copy(NamedTuple):
    """Bytes that a launch moves besides its work."""

    launch: str
    value: str
    nbytes: int
    reason: str


@dataclass(frozen=True, eq=False)
class Bound:
    """A plan for given sizes."""

    plan: Plan
    program: Program
    sizes: Mapping[str, int]
    batch_size: int
    # the rows between parts, in order; and the first row of each part, with that behind its last
    cuts: tuple[int, ...]
    rows_of: Mapping[Part, tuple[int, int]]
    memory: Memory
    instructions: tuple[Instruction, ...]
    streams: tuple[Stream, ...]
    # index -> view of a value; tensors[i] of a call
    views: tuple[View, ...]
    # (index, value, offset in elements, shape, stride) of views into the arena and into outputs
    placed: tuple[tuple[int, str, int, tuple[int, ...], tuple[int, ...]], ...]
    # (index, name, axis, start, length) of parts of inputs; axis -1: the whole input
    given: tuple[tuple[int, str, int, int, int], ...]
    # outputs that the engine allocates per call: (index, name, shape, stride); others are kept as their launch returns them
    allocated: tuple[tuple[int, str, tuple[int, ...], tuple[int, ...]], ...]
    # every output that a launch makes, and the number of its view
    outputs: tuple[tuple[str, int], ...]
    # per launch, and once more for the end: views of kept results that are dropped before it
    drops: tuple[tuple[int, ...], ...]
    num_launches: int
    num_part_launches: int
    # generated code by the form of its launches, shared by all bindings of the plan
    forms: dict[Any, Any]

    @cached_property
    def is_waited_for(self) -> bool:
        """Whether other ranks could wait for what it does."""
        return uses_groups(self.program.flow)

    @property
    def rows(self) -> list[tuple[Part, int, int]]:
        return [(part, *self.rows_of[part]) for part in self.plan.parts]

    @cached_property
    def output_geometries(self) -> list[Geometry]:
        """Of the outputs, in order: of those that the engine allocates, and of those that a launch does."""
        flow, layouts = self.program.flow, self.program.layouts
        kept = {out.view: out.stride for call in self.calls for out in call.outs if out.how == KEPT}
        placed = {i: (shape, stride) for i, _, shape, stride in self.allocated}
        found = []
        for name, i in self.outputs:
            shape = tuple(evaluate(size, self.sizes) for size in flow.value[name].shape)
            shape, stride = placed[i] if i in placed else (shape, kept[i])
            found.append(Geometry(shape, stride, layouts[name].dtype, layouts[name].device))
        return found

    @property
    def calls(self) -> list[Call]:
        return [what for code, _, what in self.instructions if code == LAUNCH]

    @cached_property
    def is_one_unit(self) -> bool:
        """Whether it is one launch of compiled code that can allocate its outputs itself: as late as it can, where memory is free again."""
        launches = [(s, what) for code, s, what in self.instructions if code == LAUNCH]
        # on the caller's stream: others read what is allocated there
        return len(launches) == 1 and launches[0][0] == 0 and launches[0][1].entry.allocates and not self.program.flow.pieces

    @cached_property
    def product_streams(self) -> frozenset[Stream]:
        """Its side streams that products run on, or may."""
        flow, products = self.program.flow, self.program.products

        def may_be(op: str) -> bool:
            return op in products if products is not None else flow.op(op).kind not in ("network", "copy")

        names = {launch.stream for launch in self.plan.launches if any(may_be(op) for op, _ in launch.calls)}
        return frozenset(s for s in self.streams if s.name in names)

    @cached_property
    def inside(self) -> dict[int, tuple[int, ...]]:
        """Kept result -> the views inside it."""
        return {out.view: tuple(r[0] for r in out.inside) for call in self.calls for out in call.outs if out.how == KEPT}

    @cached_property
    def touched(self) -> list[list[int]]:
        """Per launch: the kept results that it makes or reads, by the number of their view. For runtimes that run ahead of the host."""
        root = {i: view for view, inside in self.inside.items() for i in (view, *inside)}
        outputs = {i for _, i in self.outputs}
        views = [{a.view for a in call.args} | {o.view for o in call.outs} for call in self.calls]
        return [sorted({root[i] for i in numbers if i in root} - outputs) for numbers in views]

    def bytes_of(self, view: int) -> int:
        """Of the rows that a view shows."""
        value, part = self.views[view]
        lo, hi = self.rows_of[part]
        return self.nbytes(value) * (hi - lo) // self.batch_size if self.batch_size else 0

    def nbytes(self, value: str) -> int:
        if value not in self._nbytes:
            self._nbytes[value] = evaluate(self.program.flow.value[value].nbytes, self.sizes)
        return self._nbytes[value]

    @cached_property
    def _nbytes(self) -> dict[str, int]:
        return {}

    @cached_property
    def _placed_stride(self) -> dict[int, tuple[int, ...]]:
        return {i: stride for i, _, _, _, stride in self.placed}

    def _why_read_copied(self, arg: Arg) -> str:
        if arg.is_cloned:
            return MISALIGNED
        is_relaid = arg.stride is not None and self._placed_stride.get(arg.view, arg.stride) != arg.stride
        return "the batch is not the outermost dim of what it reads" if is_relaid else ""

    @property
    def copies(self) -> list[Copy]:
        """Bytes that are moved on behalf of splitting and merging, launch by launch."""
        found = []
        for call in self.calls:
            views = [(arg.view, self._why_read_copied(arg)) for arg in call.args] + [(out.view, out.reason) for out in call.outs]
            found += [Copy(call.label, self.views[i].value, self.bytes_of(i), why) for i, why in views if why]
        return found

    @cached_property
    def peak_bytes(self) -> int:
        """The most that a call holds at once: the arena, outputs from when they are allocated, kept results until they are dropped, and
        what launches allocate while they run (with what they copy). Streams run side by side: of the others, the largest launch so far
        counts. Not known, so not counted: workspaces of libraries, and what eager ops allocate inside.
        """
        flow = self.program.flow
        outputs = {name for name, _ in self.outputs if flow.value[name].role == "output"}
        sizes = {i: evaluate(flow.value[name].nbytes, self.sizes) for name, i in self.outputs if name in outputs}
        alive = most = 0
        beside: dict[int, int] = {}
        late: dict[int, int] = {}
        for i, first in self.late_outputs.items():
            late[first] = late.get(first, 0) + sizes.get(i, 0)
        returned = sum(nbytes for i, nbytes in sizes.items() if i not in self.late_outputs)
        launches = [(s, what) for code, s, what in self.instructions if code == LAUNCH]
        for number, ((s, call), drops) in enumerate(zip(launches, self.drops)):
            returned += late.get(number, 0)
            for i in drops:
                alive -= self.bytes_of(i) if i in self.inside else 0
            for out in call.outs:
                alive += self.bytes_of(out.view) if out.how == KEPT and self.views[out.view].value not in outputs else 0
            mine = self._beside(call)
            most = max(most, returned + alive + mine + sum([largest for other, largest in beside.items() if other != s]))
            beside[s] = max(beside.get(s, 0), mine)
        return int(self.memory.arena_bytes + max(most, returned))

    @cached_property
    def late_outputs(self) -> dict[int, int]:
        """Outputs that generated code allocates right before the launch that first touches them: view -> number of the launch.

        What is allocated is the caller's memory, and may be what work on the caller's stream has just given back: who touches it from
        another stream must wait for that work. So that this costs nothing, nothing of the plan may run on the caller's stream before;
        or else all that touches the output must. Other outputs are allocated at the start.
        """
        streams = [s for code, s, _ in self.instructions if code == LAUNCH]
        first_of_caller = streams.index(0) if 0 in streams else len(streams)
        return {i: numbers[0] for i, numbers in self.touching.items() if numbers
                and (numbers[0] <= first_of_caller or not any(streams[n] for n in numbers))}  # fmt: skip

    @cached_property
    def touching(self) -> dict[int, list[int]]:
        """Outputs that the engine allocates -> the launches that read or write them."""
        base = {i: name for i, name, _, _, _ in self.placed} | {i: name for i, name, _, _ in self.allocated}
        touched = [{base.get(i) for i in (*(a.view for a in call.args), *(o.view for o in call.outs))} for call in self.calls]
        return {i: [n for n, names in enumerate(touched) if name in names] for i, name, _, _ in self.allocated}

    def _beside(self, call: Call) -> int:
        """What a launch holds at its peak that is gone, or kept as a result, behind it; results that are kept count elsewhere."""
        is_compiled = bool(call.entry.source)
        copied = mine = kept = 0
        for arg in call.args:
            if (arg.is_cloned or arg.stride is not None) and self._why_read_copied(arg):
                copied += self.bytes_of(arg.view)
        for out in call.outs:
            if out.how == COPIED or out.reason:
                mine += self.bytes_of(out.view) if out.scratch is not None or not is_compiled else 0
            elif out.how == KEPT and out.scratch is None and is_compiled:
                kept += self.bytes_of(out.view)
        return copied + mine + max(call.entry.peak_bytes - kept, 0)

    def tensors(self, inputs: Mapping[str, torch.Tensor], *, poison: bool = False) -> list[Any]:
        """The views for one call, over a fresh arena and fresh outputs."""
        layouts = self.program.layouts
        table: list[Any] = [None] * len(self.views)
        for i, name, axis, start, length in self.given:
            table[i] = inputs[name] if axis < 0 else inputs[name].narrow(axis, start, length)
        flats: dict[Any, torch.Tensor] = {}
        for i, name, shape, stride in self.allocated:
            layout = layouts[name]
            output = flats[name] = table[i] = torch.empty_strided(shape, stride, dtype=layout.dtype, device=layout.device)
            if poison:
                output.fill_(float("nan") if output.is_floating_point() or output.is_complex() else -1)
        for i, name, offset, shape, stride in self.placed:
            if table[i] is None:
                flat = flats[name] if name in flats else self._arena(layouts[name], flats, poison)
                table[i] = torch.as_strided(flat, shape, stride, offset)
        return table

    def results(self, tensors: list[Any]) -> dict[str, torch.Tensor]:
        """The outputs by name, once everything has been launched."""
        return {name: tensors[i] for name, i in self.outputs}

    def _arena(self, layout: Layout, flats: dict[Any, torch.Tensor], poison: bool) -> torch.Tensor:
        """The arena on a device as one flat tensor of a dtype; allocated at first use."""
        key = (layout.device, layout.dtype)
        if key not in flats:
            if layout.device not in flats:
                flats[layout.device] = torch.empty(self.memory.arena_bytes, dtype=torch.uint8, device=layout.device)
                if poison:
                    flats[layout.device].fill_(0xFF)
            flats[key] = flats[layout.device].view(layout.dtype)
        return flats[key]
