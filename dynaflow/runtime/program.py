"""What it takes to run a plan: the ops as functions, and where their tensors lie.

`Program` belongs to a flow. `bind` fixes a plan to sizes: it resolves parts to rows, values to views and steps to a flat list of
instructions. `Bound.tensors` makes the views for one call; a runtime then issues the instructions and decides nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Callable, Mapping, NamedTuple, Sequence

import torch

from dynaflow import errors
from dynaflow.ir import CALLER, SIZE_FUNCTIONS, WHOLE, Flow, Launch, Part, Plan, Record, covers
from dynaflow.memory import Memory, bind_memory
from dynaflow.runtime.compose import compose
from dynaflow.runtime.loose import Keep, keep, narrow_views

LAUNCH, RECORD, WAIT = 0, 1, 2


class Expr(NamedTuple):
    """A size that a unit takes as an argument: an expression over the flow's symbols, evaluated per part."""

    text: str


@dataclass(frozen=True, slots=True)
class Unit:
    """An op as a function: takes `args` (value names and sizes), returns one tensor per name in `outs`."""

    fn: Callable[..., Sequence[Any]]
    args: tuple[str | Expr, ...]
    outs: tuple[str, ...]


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


class View(NamedTuple):
    """A part of a value, as a runtime needs it."""

    value: str
    part: Part


class Instruction(NamedTuple):
    """code, stream index, and: a Call to launch, or an event's name."""

    code: int
    stream: int
    what: Any


class Call:
    """One launch, resolved: `fn` on `args`, results copied to the tensors at `outs`, or kept as they are (`keeps`)."""

    __slots__ = ("fn", "args", "outs", "label", "where", "part", "mutates", "kind", "keeps")

    def __init__(
        self, fn: Callable[..., Any], args: list[tuple[int, Any]], outs: list[int], launch: Launch, mutates: list[str], kind: str,
        keeps: tuple[Keep, ...] = (),
    ):  # fmt: skip
        # args: (number of the view, None), (number of the view, strides that the op expects) or (-1, a size)
        self.fn, self.args, self.mutates, self.kind, self.keeps = fn, args, mutates, kind, keeps
        # -1: the result is not copied
        self.outs = [-1 if any(k.result == n for k in keeps) else i for n, i in enumerate(outs)] if keeps else outs
        self.label, self.where = launch.label, launch.where
        # None: the launch spans several parts
        self.part = launch.calls[0][1] if len({part for _, part in launch.calls}) == 1 else None

    def __call__(self, tensors: list[Any]) -> None:
        args = [x if i < 0 else tensors[i] if x is None else _relaid(tensors[i], x) for i, x in self.args]
        results = self.fn(*args)
        for i, result in zip(self.outs, results):
            if i >= 0:
                tensors[i].copy_(result)
        if self.keeps:
            keep(self.keeps, results, args, tensors)


def _relaid(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """A copy with the given strides; expanded dims (stride 0) stay expanded."""
    if tensor.stride() == stride:
        return tensor
    shape = [1 if step == 0 else size for size, step in zip(tensor.shape, stride)]
    small = tensor.as_strided(shape, tensor.stride(), tensor.storage_offset())
    return torch.empty_strided(shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(small).expand(tensor.shape)


@dataclass(frozen=True, eq=False)
class Bound:
    """A plan for given sizes."""

    plan: Plan
    program: Program
    sizes: Mapping[str, int]
    batch_size: int
    memory: Memory
    instructions: tuple[Instruction, ...]
    streams: tuple[Any, ...]
    # index -> view of a value; tensors[i] of a call
    views: tuple[View, ...]
    # (index, value, offset in elements, shape, stride) of views into the arena and into outputs
    placed: tuple[tuple[int, str, int, tuple[int, ...], tuple[int, ...]], ...]
    # (index, name, axis, start, length) of parts of inputs; axis -1: the whole input
    given: tuple[tuple[int, str, int, int, int], ...]
    # outputs the engine allocates per call: (name, shape, stride)
    outputs: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    num_launches: int
    num_part_launches: int

    @property
    def rows(self) -> list[tuple[Part, int, int]]:
        return [(part, *part.bounds(self.batch_size)) for part in self.plan.parts]

    def tensors(self, inputs: Mapping[str, torch.Tensor], *, poison: bool = False) -> tuple[list[Any], dict[str, torch.Tensor]]:
        """The views for one call, over a fresh arena and fresh outputs, and the outputs by name."""
        layouts = self.program.layouts
        table: list[Any] = [None] * len(self.views)
        for i, name, axis, start, length in self.given:
            table[i] = inputs[name] if axis < 0 else inputs[name].narrow(axis, start, length)
        flats: dict[Any, torch.Tensor] = {}
        outputs: dict[str, torch.Tensor] = {}
        for name, shape, stride in self.outputs:
            layout = layouts[name]
            output = outputs[name] = flats[name] = torch.empty_strided(shape, stride, dtype=layout.dtype, device=layout.device)
            if poison:
                output.fill_(float("nan") if output.is_floating_point() or output.is_complex() else -1)
        for i, name, offset, shape, stride in self.placed:
            flat = flats[name] if name in flats else self._arena(layouts[name], flats, poison)
            table[i] = torch.as_strided(flat, shape, stride, offset)
        return table, outputs

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


def bind(plan: Plan, program: Program, sizes: Mapping[str, int], memory: Memory | None = None) -> Bound:
    """Fix `plan` to `sizes`.

    Raises BatchTooSmall when a part would have no row.
    """
    return Binder(plan, program).bind(sizes, memory)


class Binder:
    """The part of binding that does not depend on sizes: which views and instructions a plan needs. Made once per plan.

    What does depend on sizes is one generated function: expressions over the flow's symbols, evaluated in one go.
    """

    def __init__(self, plan: Plan, program: Program):
        self.plan, self.program = plan, program
        flow = self.flow = program.flow
        self._index: dict[View, int] = {}
        self._relaid: dict[tuple[View, tuple[str, ...]], int] = {}
        self._exprs: dict[tuple[str, Part], int] = {}
        self._loose = frozenset(plan.loose)
        self._loose_views: set[int] = set()
        self._read_outside = _readers(flow)
        stream_index = {CALLER: 0, **{s.name: i for i, s in enumerate(plan.streams, 1)}}
        self._num_launches = len(plan.launches)
        self._num_part_launches = sum(not part.is_whole for launch in plan.launches for _, part in launch.calls)
        self._instructions: list[Instruction] = []
        # launches that take a size or another layout, or keep a result, are made anew for every binding:
        # (number, launch, function, args, outs, mutates)
        self._sized: list[tuple[int, Launch, Any, list[tuple[int, Any]], list[int], list[str]]] = []
        for number, step in enumerate(plan.steps):
            s = stream_index[step.stream]
            if isinstance(step, Launch):
                fn, args, outs, mutates = self._resolve(step)
                if any(i < 0 or x is not None for i, x in args) or not self._loose_views.isdisjoint(outs):
                    self._sized.append((number, step, fn, args, outs, mutates))
                self._instructions.append(Instruction(LAUNCH, s, self._call(fn, args, outs, step, mutates)))
            else:
                self._instructions.append(Instruction(RECORD if type(step) is Record else WAIT, s, step.event))
        for name in dict.fromkeys(flow.outputs):
            self._view(name, WHOLE)
        self._views = tuple(self._index)
        self._written = [i for launch in self._sized for i in launch[4] if i in self._loose_views]
        self._sizes = self._compile_sizes()

    # -- which tensors a launch takes and gives

    def _resolve(self, launch: Launch) -> tuple[Callable[..., Any], list[tuple[int, Any]], list[int], list[str]]:
        flow, program = self.flow, self.program
        mutates = [v for op, _ in launch.calls for v in flow.op(op).mutates if flow.value[v].role in ("input", "param")]
        if not launch.replace:
            part = launch.calls[0][1]
            unit = self._unit(launch)
            args: list[tuple[int, Any]] = []
            for arg in unit.args:
                if isinstance(arg, Expr):
                    args.append((-1, self._exprs.setdefault((arg.text, part), len(self._exprs))))
                else:
                    args.append(self._argument(arg, part))
            outs = [self._view(v, part) if v else -1 for v in unit.outs]
            return unit.fn, args, outs, mutates
        inputs, outputs = external_values(flow, launch, self._read_outside)
        function = program.functions.get(launch.replace)
        if function is None:
            raise errors.ContextMismatch(
                f"the plan calls {launch.replace}, and no function of that name was given.",
                fix="pass functions={'name': fn} with the plan, or plan again from the strategy")  # fmt: skip
        args = [self._argument(value, part) for value, part in inputs]
        return _as_tuple(function), args, [self._view(value, part) for value, part in outputs], mutates

    def _unit(self, launch: Launch) -> Unit:
        """The op's unit; of fused ops, the units one after the other."""
        units = [self.program.units[name] for name, _ in launch.calls]
        if len(units) == 1:
            return units[0]
        needed = {value for value, _ in external_values(self.flow, launch, self._read_outside)[1]}
        return compose(units, needed)

    def _view(self, name: str, part: Part) -> int:
        value = self.flow.value[name]
        view = View(name, part if value.axis is not None else WHOLE)
        index = self._index.setdefault(view, len(self._index))
        if name in self._loose:
            self._loose_views.add(index)
        return index

    def _argument(self, name: str, part: Part) -> tuple[int, int | None]:
        """(number of the view, number of the strides that it must be copied to first)"""
        index, layout = self._view(name, part), self.program.layouts.get(name)
        is_as_expected = part.is_whole and name not in self._loose  # a loose tensor has the strides that its op gave it
        if layout is None or layout.expected is None or (is_as_expected and layout.expected == layout.stride):
            return index, None
        view = View(name, part if self.flow.value[name].axis is not None else WHOLE)
        return index, self._relaid.setdefault((view, layout.expected), len(self._relaid))

    # -- sizes

    def _compile_sizes(self) -> Callable[..., Any]:
        """One function of (symbols..., offsets, rows): every shape, stride and offset that the plan needs."""
        flow, layouts = self.flow, self.program.layouts
        symbols = flow.symbols
        parts = list(dict.fromkeys([WHOLE, *(v.part for v in self._index), *(p for _, p in self._exprs)]))
        lines = [f"def bind({', '.join((*symbols, '_batch', '_offset'))}):"]
        for k, part in enumerate(parts):
            lines.append(f"  _lo{k}, _hi{k} = _batch * {part.lo} // {part.of}, _batch * {part.hi} // {part.of}")
            if not part.is_whole:
                lines.append(f"  if _hi{k} <= _lo{k}: raise _Empty({k})")
        at = {part: k for k, part in enumerate(parts)}

        def in_part(expression: str, k: int) -> str:
            if expression.isdigit() or not flow.batch:
                return expression
            return _substitute(expression, flow.batch, f"(_hi{k} - _lo{k})")

        placed, given, outputs = [], [], []
        for view, i in self._index.items():
            value, k = flow.value[view.value], at[view.part]
            if view.value in self._loose:
                continue
            if value.role in ("input", "param"):
                if value.axis is None or view.part.is_whole:
                    given.append(f"({i}, {view.value!r}, -1, 0, 0)")
                else:
                    size = value.shape[value.axis]
                    per_row = f"({size}) // _batch"
                    given.append(f"({i}, {view.value!r}, {value.axis}, _lo{k} * ({per_row}), (_hi{k} - _lo{k}) * ({per_row}))")
                continue
            layout = layouts[view.value]
            shape = _tuple(in_part(d, k) for d in value.shape)
            stride = _tuple(layout.stride)
            itemsize = layout.dtype.itemsize
            base = f"_offset[{view.value!r}][0] // {itemsize}" if value.role == "temp" else "0"
            rows = ""
            if value.axis is not None and not view.part.is_whole:
                rows = f" + _lo{k} * (({value.shape[value.axis]}) // _batch) * ({layout.stride[value.axis]})"
            placed.append(f"({i}, {view.value!r}, {base}{rows}, {shape}, {stride})")
            if value.role == "output" and view.part.is_whole:
                outputs.append(f"({view.value!r}, {shape}, {stride})")
        relaid = [_tuple(in_part(e, at[view.part]) for e in expected) for view, expected in self._relaid]
        sizes = [in_part(text, at[part]) for text, part in self._exprs]
        narrow = [f"({i}, {_tuple(entries)})" for i, entries in narrow_views(flow, self._views, self._written, at)]
        tables = {"placed": placed, "given": given, "outputs": outputs, "relaid": relaid, "sizes": sizes, "narrow": narrow}
        lines.extend(f"  _{name} = {_tuple(entries)}" for name, entries in tables.items())
        lines.append(f"  return {', '.join(f'_{name}' for name in tables)}")
        scope: dict[str, Any] = {**SIZE_FUNCTIONS, "_Empty": _Empty}
        exec("\n".join(lines), scope)  # noqa: S102 (generated from our own records)
        self._parts = parts
        return scope["bind"]

    def bind(self, sizes: Mapping[str, int], memory: Memory | None = None) -> Bound:
        flow, plan = self.flow, self.plan
        batch_size = sizes[flow.batch[0]] if flow.batch else 1
        memory = memory or bind_memory(flow, plan, sizes)
        try:
            placed, given, outputs, relaid, numbers, narrow = self._sizes(*[sizes[s] for s in flow.symbols], batch_size, memory.offsets)
        except _Empty as empty:
            raise errors.BatchTooSmall(
                f"the batch of {batch_size} rows is smaller than the plan's parts: part {self._parts[empty.args[0]]} has no row.",
                fix="let the strategy fall back: `if flow.context.batch_size < n: return flow.sequential(...)`") from None  # fmt: skip
        instructions, inside = list(self._instructions), dict(narrow)
        for number, launch, fn, args, outs, mutates in self._sized:
            resolved = [(-1, numbers[x]) if i < 0 else (i, None if x is None else relaid[x]) for i, x in args]
            keeps = tuple(Keep(n, i, inside[i]) for n, i in enumerate(outs) if i in inside)
            instructions[number] = instructions[number]._replace(what=self._call(fn, resolved, outs, launch, mutates, keeps))
        return Bound(plan, self.program, sizes, batch_size, memory, tuple(instructions), plan.streams, self._views, placed, given, outputs,
                     self._num_launches, self._num_part_launches)  # fmt: skip

    def _call(
        self, fn: Callable[..., Any], args: list[tuple[int, Any]], outs: list[int], launch: Launch, mutates: list[str],
        keeps: tuple[Keep, ...] = (),
    ) -> Call:  # fmt: skip
        return Call(fn, args, outs, launch, mutates, self.flow.op(launch.calls[0][0]).kind, keeps)


class _Empty(Exception):
    pass


def _tuple(items: Any) -> str:
    items = list(items)
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})"


def _substitute(expression: str, symbols: Sequence[str], by: str) -> str:
    return re.sub(rf"\b({'|'.join(map(re.escape, symbols))})\b", by, expression)


def _as_tuple(function: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    def call(*args: Any) -> tuple[Any, ...]:
        result = function(*args)
        return result if isinstance(result, tuple) else tuple(result) if isinstance(result, list) else (result,)

    return call


def _readers(flow: Flow) -> dict[str, set[str]]:
    table: dict[str, set[str]] = {}
    for op in flow.ops:
        for value in (*op.reads, *op.mutates):
            table.setdefault(value, set()).add(op.name)
    return table


def external_values(
    flow: Flow, launch: Launch, readers: Mapping[str, set[str]] | None = None
) -> tuple[list[tuple[str, Part]], list[tuple[str, Part]]]:
    """A group's inputs, in order of first use, and outputs, in order: what crosses the border of a replacement."""
    readers = _readers(flow) if readers is None else readers

    def rows(value: str, part: Part) -> Part:
        return part.lowest_terms if flow.value[value].axis is not None else WHOLE

    made: dict[str, list[Part]] = {}
    used: dict[tuple[str, str], list[Part]] = {}
    inputs: dict[tuple[str, Part], None] = {}
    for name, part in launch.calls:
        op = flow.op(name)
        for value in (*op.reads, *(m for m in op.mutates if m not in op.reads)):
            used.setdefault((value, name), []).append(part)
            if not covers(made.get(value, ()), rows(value, part)):
                inputs[value, rows(value, part)] = None
        for value in op.writes:
            made.setdefault(value, []).append(rows(value, part))
    outputs: dict[tuple[str, Part], None] = {}
    for name, part in launch.calls:
        for value in flow.op(name).writes:
            mine = rows(value, part)
            is_read_outside = any(not covers(used.get((value, reader), ()), mine) for reader in readers.get(value, ()))
            if flow.value[value].role == "output" or is_read_outside:
                outputs[value, mine] = None
    return list(inputs), list(outputs)


__all__ = ["Binder", "Bound", "Call", "Expr", "Instruction", "Layout", "Program", "Unit", "View", "bind", "external_values"]
