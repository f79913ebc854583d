"""Plan + program -> a plan for given sizes.

A `Binder` holds what does not depend on sizes: which views and launches a plan needs. Made once per plan. What does depend on sizes
is one generated function (expressions over the flow's symbols, evaluated in one go) and, where units are compiled, their entries.

1. Launches: the unit behind each, its arguments and results as numbered views.
2. Sizes: every shape, stride and offset.
3. Results: a unit writes into the place it is given, where it can; else what it allocated is kept, where nothing but views of it is
   read; else it is copied. Bytes that must be copied are listed with their reason.
"""

from __future__ import annotations

import re
from collections import Counter
from fractions import Fraction
from typing import Any, Callable, Iterable, Mapping, NamedTuple, Sequence

from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from dynaflow import errors
from dynaflow.ir import CALLER, SIZE_FUNCTIONS, WHOLE, Flow, Launch, Part, Plan, Record, covers, evaluate
from dynaflow.memory import Memory, bind_memory, drop_points
from dynaflow.runtime.compose import compose
from dynaflow.runtime.program import (
    COPIED,
    KEPT,
    LAUNCH,
    MISALIGNED,
    PLACED,
    RECORD,
    WAIT,
    Arg,
    Bound,
    Call,
    Entry,
    Expr,
    Geometry,
    Instruction,
    Layout,
    Out,
    Program,
    Unit,
    View,
    same_stride,
)  # fmt: skip


def bind(plan: Plan, program: Program, sizes: Mapping[str, int], memory: Memory | None = None) -> Bound:
    """Fix `plan` to `sizes`.

    Raises BatchTooSmall when a part would have no row.
    """
    return Binder(plan, program).bind(sizes, memory)


class _Arg(NamedTuple):
    # view and number of the strides it must be copied to; or (-1, number of the size)
    view: int
    number: int | None


class _Work(NamedTuple):
    """A launch before its sizes are known."""

    launch: Launch
    unit: Unit
    args: tuple[_Arg, ...]
    # numbers of the views of its results
    outs: tuple[int, ...]
    mutates: tuple[str, ...]
    kind: str
    # replacement functions are the user's: they are called as they are
    is_compiled: bool
    # arguments that it changes in place, or that share memory with such; the homes of pieces that it writes are among them
    changed: tuple[int, ...] = ()
    # results of which it writes pieces alone: it must write them where they lie
    in_pieces: tuple[int, ...] = ()


class Binder:
    def __init__(self, plan: Plan, program: Program, like: Binder | None = None):
        """`like`: of a plan with the same launches, whose fused units it takes over, with all that was compiled of them."""
        self.plan, self.program = plan, program
        flow = self.flow = program.flow
        self._index: dict[View, int] = {}
        self._relaid: dict[tuple[View, tuple[str, ...]], int] = {}
        self._exprs: dict[tuple[str, Part], int] = {}
        self._readers = _readers(flow)
        stream_index = {CALLER: 0, **{s.name: i for i, s in enumerate(plan.streams, 1)}}
        self._num_part_launches = sum(any(not part.is_whole for _, part in launch.calls) for launch in plan.launches)
        self.loose = frozenset(plan.loose)
        self._units: dict[tuple[str, ...], Unit] = {} if like is None else like._units
        # 1. launches
        self._steps: list[tuple[int, int, Any]] = []
        works: list[_Work] = []
        for step in plan.steps:
            s = stream_index[step.stream]
            if isinstance(step, Launch):
                works.append(self._resolve(step))
                self._steps.append((LAUNCH, s, works[-1]))
            else:
                self._steps.append((RECORD if type(step) is Record else WAIT, s, step.event))
        made = [name for name in dict.fromkeys(flow.outputs) if flow.value[name].role == "output"]  # an input may be returned, too
        self._outputs = tuple((name, self._view(name, WHOLE)) for name in made)
        self._views = tuple(self._index)
        self._written = Counter(i for work in works for i in work.outs)
        # outputs that one launch makes as a whole, and nobody in pieces: its result can be handed out as it is
        self.whole_outputs = {i for name, i in self._outputs if self._written[i] == 1 and name not in flow.pieces}
        self._inside = self._views_inside()
        self._drops = self._number_drops()
        self._sizes = self._compile_sizes()
        # calls that are the same for all sizes
        self.fixed: dict[int, Call] = {}
        self.forms: dict[Any, Any] = {}

    # -- 1. which tensors a launch takes and gives

    def _resolve(self, launch: Launch) -> _Work:
        flow, program = self.flow, self.program
        mutates = tuple(v for op, _ in launch.calls for v in flow.op(op).mutates if flow.value[v].role in ("input", "param"))
        kind = flow.op(launch.calls[0][0]).kind
        if launch.replace:
            inputs, outputs = external_values(flow, launch, self._readers)
            function = program.functions.get(launch.replace)
            if function is None:
                raise errors.ContextMismatch(
                    f"the plan calls {launch.replace}, and no function of that name was given.",
                    fix="pass functions={'name': fn} with the plan, or plan again from the strategy")  # fmt: skip
            into = _into(function, len(inputs)) if getattr(function, "takes_outs", False) else None
            unit = Unit(_as_tuple(function), tuple(v for v, _ in inputs), tuple(v for v, _ in outputs), into=into)
            args = tuple(self._argument(value, part) for value, part in inputs)
            return _Work(launch, unit, args, tuple(self._view(v, p) for v, p in outputs), mutates, kind, False)
        part = launch.calls[0][1]
        unit = self._unit(launch)
        args = tuple(
            _Arg(-1, self._exprs.setdefault((a.text, part), len(self._exprs))) if isinstance(a, Expr) else self._argument(a, part)
            for a in unit.args
        )
        if len(launch.calls) == 1:
            for v in flow.op(launch.calls[0][0]).writes:
                if v in self.loose and v in unit.args:
                    raise _not_loose(launch, launch.calls[0][0], v)
        storages = {flow.value[v].storage for op, _ in launch.calls for v in changed_in_place(flow, op)}
        changed = tuple(a.view for a, name in zip(args, unit.args) if isinstance(name, str) and flow.value[name].storage in storages)
        outs = tuple(self._view(v, part) for v in unit.outs)
        in_pieces = tuple(i for i, v in zip(outs, unit.outs) if all(v not in flow.op(op).writes for op, _ in launch.calls))
        return _Work(launch, unit, args, outs, mutates, kind, True, changed, in_pieces)

    def _unit(self, launch: Launch) -> Unit:
        names = tuple(name for name, _ in launch.calls)
        if len(names) == 1:
            return self.program.units[names[0]]
        for name in names:
            if any(out not in self.flow.op(name).writes for out in self.program.units[name].outs):
                raise _not_in_place(launch, name, "what is fused passes its results on, and writes them at its end")
        outs = tuple(v for v, _ in external_values(self.flow, launch, self._readers)[1])
        key = (*names, "->", *outs)
        if key not in self._units:
            self._units[key] = compose([self.program.units[name] for name in names], outs)
        return self._units[key]

    def _view(self, name: str, part: Part) -> int:
        return self._index.setdefault(self._rows(name, part), len(self._index))

    def _rows(self, name: str, part: Part) -> View:
        """The same rows are the same view, however they are written: 2:4/4 is 1/2."""
        return View(name, part.lowest_terms if self.flow.value[name].axis is not None else WHOLE)

    def _argument(self, name: str, part: Part) -> _Arg:
        index, layout = self._view(name, part), self.program.layouts.get(name)
        expected = None if layout is None else layout.expected or self._compiled_strides(name, part, layout)
        if layout is None or expected is None or (part.is_whole and name not in self.loose and expected == layout.stride):
            return _Arg(index, None)
        return _Arg(index, self._relaid.setdefault((self._rows(name, part), expected), len(self._relaid)))

    def _compiled_strides(self, name: str, part: Part, layout: Layout) -> tuple[str, ...] | None:
        """Eager ops take rows of any strides. Compiled ones want those of a tensor of that many rows: where the batch is not the
        outermost dim, rows have others. What is changed in place is not copied: no op changes such rows (it is not splittable)."""
        is_rows = not part.is_whole and self.flow.value[name].axis is not None
        if self.program.compiler is None or not is_rows or not any(self._mentions_batch(s) for s in layout.stride):
            return None
        return layout.stride

    def _mentions_batch(self, expression: str) -> bool:
        return not expression.isdigit() and any(name in self.flow.batch for name in re.findall(r"[A-Za-z_]\w*", expression))

    def _views_inside(self) -> list[tuple[int, int]]:
        """(written view, narrower view) of values that may be kept as they were made."""
        outputs = {name for name, _ in self._outputs}
        candidates: dict[str, list[int]] = {}
        for view, i in self._index.items():
            if view.value in self.loose or view.value in outputs:
                candidates.setdefault(view.value, []).append(i)
        found = []
        for numbers in candidates.values():
            for w in numbers:
                if w in self._written:
                    whole = self._views[w].part
                    found += [(w, r) for r in numbers if r not in self._written and covers([whole], self._views[r].part)]
        return found

    def _number_drops(self) -> tuple[tuple[int, ...], ...]:
        inside: dict[int, list[int]] = {}
        for w, r in self._inside:
            inside.setdefault(w, []).append(r)
        table = []
        for dropped in drop_points(self.flow, self.plan):
            numbers = [self._index[view] for value, part in dropped if (view := self._rows(value, part)) in self._index]
            table.append(tuple(i for w in numbers for i in (w, *inside.get(w, ()))))
        return tuple(table)

    # -- 2. sizes

    def _compile_sizes(self) -> Callable[..., Any]:
        """One function of (symbols..., batch, rows where parts begin and end, offsets): every shape, stride and offset of the plan."""
        flow, layouts = self.flow, self.program.layouts
        launched = (part for launch in self.plan.launches for _, part in launch.calls)
        parts = list(dict.fromkeys([WHOLE, *launched, *(v.part for v in self._index), *(p for _, p in self._exprs)]))
        # where parts begin and end, as shares of the batch
        shares = sorted({Fraction(n, part.of) for part in parts for n in (part.lo, part.hi)})
        self._shares = [(share.numerator, share.denominator) for share in shares]
        # each part, and which of them it lies between
        self._between = [(part, shares.index(Fraction(part.lo, part.of)), shares.index(Fraction(part.hi, part.of))) for part in parts]
        lines = [f"def bind({', '.join((*flow.symbols, '_batch', '_row', '_offset'))}):"]
        for k, (part, lo, hi) in enumerate(self._between):
            lines.append(f"  _lo{k}, _hi{k} = _row[{lo}], _row[{hi}]")
            if not part.is_whole:
                lines.append(f"  if _hi{k} <= _lo{k}: raise _Empty({k})")
        at = {part: k for k, part in enumerate(parts)}

        def in_part(expression: str, k: int) -> str:
            if expression.isdigit() or not flow.batch:
                return expression
            return _substitute(expression, flow.batch, f"(_hi{k} - _lo{k})")

        placed, given, allocated = [], [], []
        for view, i in self._index.items():
            value, k = flow.value[view.value], at[view.part]
            if value.role in ("input", "param"):
                if value.axis is None or view.part.is_whole:
                    given.append(f"({i}, {view.value!r}, -1, 0, 0)")
                else:
                    per_row = f"({value.shape[value.axis]}) // _batch"
                    given.append(f"({i}, {view.value!r}, {value.axis}, _lo{k} * ({per_row}), (_hi{k} - _lo{k}) * ({per_row}))")
                continue
            layout = layouts[view.value]
            shape = _tuple(in_part(d, k) for d in value.shape)
            stride = _tuple(layout.stride)
            base = f"_offset[{view.value!r}][0] // {layout.dtype.itemsize}" if value.role == "temp" else "0"
            rows = ""
            if view.value in self.loose:
                base, stride = "0", _tuple(in_part(d, k) for d in layout.expected or layout.stride)
            elif value.axis is not None and not view.part.is_whole:
                rows = f" + _lo{k} * (({value.shape[value.axis]}) // _batch) * ({layout.stride[value.axis]})"
            placed.append(f"({i}, {view.value!r}, {base}{rows}, {shape}, {stride})")
            if value.role == "output" and view.part.is_whole:
                allocated.append(f"({i}, {view.value!r}, {shape}, {stride})")
        inside = []
        for w, r in self._inside:
            value, outer, inner = flow.value[self._views[w].value], at[self._views[w].part], at[self._views[r].part]
            per_row = f"(({value.shape[value.axis or 0]}) // _batch)"
            inside.append(f"({w}, {r}, {value.axis}, (_lo{inner} - _lo{outer}) * {per_row}, (_hi{inner} - _lo{inner}) * {per_row})")
        relaid = [_tuple(in_part(e, at[view.part]) for e in expected) for view, expected in self._relaid]
        sizes = [in_part(text, at[part]) for text, part in self._exprs]
        tables = (("placed", placed), ("given", given), ("allocated", allocated), ("inside", inside), ("relaid", relaid), ("sizes", sizes))
        for name, entries in tables:
            lines.append(f"  _{name} = {_tuple(entries)}")
        lines.append(f"  return {', '.join('_' + name for name, _ in tables)}")
        scope: dict[str, Any] = {**SIZE_FUNCTIONS, "_Empty": _Empty}
        exec("\n".join(lines), scope)  # noqa: S102 (generated from our own records)
        self._parts = parts
        return scope["bind"]

    def made_of(self, cuts: Sequence[int]) -> list[int]:
        """Of the rows between the parts 0/n, 1/n, ..., those at which this plan has a cut."""
        return [cuts[(len(cuts) + 1) * numerator // denominator - 1] for numerator, denominator in self._shares[1:-1]]

    def bind(self, sizes: Mapping[str, int], memory: Memory | None = None, cuts: Sequence[int] | None = None) -> Bound:
        """`cuts`: the rows at which parts begin and end, where they are not those of the parts' shares; as many, in order."""
        flow, plan = self.flow, self.plan
        batch_size = sizes[flow.batch[0]] if flow.batch else 1
        memory = memory or bind_memory(flow, plan, sizes)
        rows = [batch_size * numerator // denominator for numerator, denominator in self._shares]
        if cuts is not None:
            assert len(cuts) == len(rows) - 2
            rows[1:-1] = cuts
        try:
            placed, given, allocated, inside, relaid, numbers = self._sizes(
                *[sizes[s] for s in flow.symbols], batch_size, rows, memory.offsets)  # fmt: skip
        except _Empty as empty:
            raise errors.BatchTooSmall(
                f"the batch of {batch_size} rows is smaller than the plan's parts: part {self._parts[empty.args[0]]} has no row.",
                fix="let the strategy fall back: `if flow.context.batch_size < n: return flow.sequential(...)`") from None  # fmt: skip
        rows_of = {part: (rows[lo], rows[hi]) for part, lo, hi in self._between}
        one = _Binding(self, sizes, rows_of, placed, given, inside, relaid, numbers)
        instructions = tuple(Instruction(code, s, one.call(what) if code == LAUNCH else what) for code, s, what in self._steps)
        if one.kept:
            allocated = tuple(a for a in allocated if a[0] not in one.kept)
            placed = tuple(p for p in placed if p[0] not in one.kept)
        return Bound(plan, self.program, sizes, batch_size, tuple(rows[1:-1]), rows_of, memory, instructions, plan.streams, self._views,
                     placed, given, allocated, self._outputs, self._drops, len(plan.launches), self._num_part_launches,
                     self.forms)  # fmt: skip


class _Binding:
    """3. One binding under way: entries for its sizes, and what becomes of each result."""

    def __init__(self, binder: Binder, sizes: Mapping[str, int], rows_of: Mapping[Part, tuple[int, int]], placed: Any, given: Any,
                 inside: Any, relaid: Any, numbers: Any):  # fmt: skip
        self._binder, self._sizes, self._rows_of = binder, sizes, rows_of
        self._placed = {p[0]: p for p in placed}
        self._given = {g[0]: g for g in given}
        self._inside: dict[int, list[tuple[int, int, int, int]]] = {}
        # bytes from the beginning of a loose tensor to rows inside of it
        self._rows_at: dict[int, int] = {}
        for w, r, axis, start, length in inside:
            self._inside.setdefault(w, []).append((r, axis, start, length))
            _, name, _, _, stride = self._placed[w]
            self._rows_at[r] = start * stride[axis] * binder.program.layouts[name].dtype.itemsize if name in binder.loose else 0
        self._relaid, self._numbers = relaid, numbers
        self._entries: dict[tuple[int, Part], Entry] = {}
        # views of results that are kept as they are made
        self.kept: set[int] = set()

    def call(self, work: _Work) -> Call:
        fixed = self._binder.fixed.get(id(work))
        if fixed is not None:
            return fixed
        entry = self._entry(work)
        args = tuple([self._arg(a, entry) for a in work.args])
        outs = tuple([self._out(i, k, entry, work) for k, i in enumerate(work.outs)])
        for out in outs:
            if out.view in work.in_pieces and out.how != PLACED:
                raise _not_in_place(work.launch, work.launch.calls[0][0], out.reason)
        call = Call(entry, args, outs, work.launch, work.mutates, work.kind)
        is_eager = entry.inputs is None and (self._binder.program.compiler is None or not work.is_compiled)
        if is_eager and all(a.view >= 0 and a.stride is None for a in args) and all(o.how == COPIED for o in outs):
            self._binder.fixed[id(work)] = call  # the same for all sizes
        return call

    def _entry(self, work: _Work) -> Entry:
        part = work.launch.calls[0][1]
        key = (id(work.unit), part)
        if key not in self._entries:
            self._entries[key] = self._make_entry(work, part)
        return self._entries[key]

    def _make_entry(self, work: _Work, part: Part) -> Entry:
        binder = self._binder
        compiler = binder.program.compiler
        if (into := work.unit.into) is not None:
            num_args = len(work.args)
            return Entry(lambda args: (into(*args), args[num_args:])[1], ("",) * len(work.outs))
        if compiler is not None and work.is_compiled:
            lo, hi = self._rows_of[part]
            entry = compiler.entry(work.unit, {**self._sizes, **dict.fromkeys(binder.flow.batch, hi - lo)})
            # what is changed in place cannot be copied to where the unit could take it
            if entry is not None and all(self._is_aligned(i, entry.alignment) for i in work.changed):
                return entry
        # forward itself: calling a module takes 3 us more
        _LazyGraphModule.force_recompile(work.unit.fn)  # type: ignore[arg-type]
        fn = work.unit.fn.forward if isinstance(work.unit.fn, fx.GraphModule) else work.unit.fn
        return Entry(lambda args: fn(*args), ("eager ops allocate their results",) * len(work.outs))

    def _arg(self, arg: _Arg, entry: Entry) -> Arg:
        if arg.view < 0:
            return Arg(-1, number=self._numbers[arg.number])
        stride = None if arg.number is None else self._relaid[arg.number]
        return Arg(arg.view, stride, not self._is_aligned(arg.view, entry.alignment))

    def _out(self, i: int, k: int, entry: Entry, work: _Work) -> Out:
        binder, own = self._binder, entry.own[k]
        _, name, _, shape, stride = self._placed[i]
        # a compiler may see that what the unit makes is what it was given (x + 0)
        is_loose, is_fresh = name in binder.loose, name in work.unit.fresh and not (entry.shared and entry.shared[k])
        if is_loose or (own and is_fresh and i in binder.whole_outputs):
            inside = tuple(self._inside.get(i, ()))
            self.kept.update((i, *(r for r, *_ in inside)))
            return Out(i, KEPT, stride, inside, None if own else self._scratch(i, k, entry), own if own and not is_fresh else "")
        if own:
            return Out(i, COPIED, reason=own)
        if not self._is_aligned(i, entry.alignment):
            return Out(i, COPIED, scratch=self._scratch(i, k, entry), reason=MISALIGNED)
        if not same_stride(shape, stride, self._scratch(i, k, entry).stride):
            return Out(i, COPIED, scratch=self._scratch(i, k, entry), reason="the batch is not the outermost dim of what it makes")
        return Out(i, PLACED)

    def _scratch(self, i: int, k: int, entry: Entry) -> Geometry:
        """A destination as the unit wants it."""
        _, name, _, shape, stride = self._placed[i]
        layout = self._binder.program.layouts[name]
        return Geometry(shape, (entry.strides[k] if entry.strides else None) or stride, layout.dtype, layout.device)

    def _is_aligned(self, i: int, alignment: int) -> bool:
        """Of views into memory that starts aligned, as arenas, outputs and (checked per call) inputs do."""
        if alignment == 1:
            return True
        layouts = self._binder.program.layouts
        if self._rows_at.get(i, 0) % alignment:
            return False
        if i in self._placed:
            _, name, offset, _, _ = self._placed[i]
            return bool(offset * layouts[name].dtype.itemsize % alignment == 0)
        _, name, axis, start, _ = self._given[i]
        if axis < 0 or start == 0:
            return True
        layout = layouts[name]
        return bool(start * evaluate(layout.stride[axis], self._sizes) * layout.dtype.itemsize % alignment == 0)


class _Empty(Exception):
    pass


def _tuple(items: Iterable[str]) -> str:
    items = list(items)
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})"


def _substitute(expression: str, symbols: Sequence[str], by: str) -> str:
    return re.sub(rf"\b({'|'.join(map(re.escape, symbols))})\b", by, expression)


def _as_tuple(function: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    def call(*args: Any) -> tuple[Any, ...]:
        result = function(*args)
        return result if isinstance(result, tuple) else tuple(result) if isinstance(result, list) else (result,)

    return call


def _into(function: Callable[..., Any], num_inputs: int) -> Callable[..., None]:
    """A replacement function that leaves its results where it is told, as `Unit.into`."""

    def call(*args: Any) -> None:
        function(*args[:num_inputs], outs=args[num_inputs:])

    return call


def _not_in_place(launch: Launch, op: str, why: str) -> errors.MalformedPlan:
    return errors.MalformedPlan(
        f"in '{launch.label}', '{op}' writes a piece, and cannot write it where it lies.", where=launch.where, why=why,
        fix="launch it by itself, with a unit that writes to the place it is given or changes an argument")  # fmt: skip


def _not_loose(launch: Launch, op: str, value: str) -> errors.MalformedPlan:
    return errors.MalformedPlan(
        f"'{value}' cannot be loose.", where=launch.where, why=f"'{op}' does not allocate it, and writes it where it is told",
        fix="take it off the 'loose' line; df.place(flow, plan) gives the slots")  # fmt: skip


def changed_in_place(flow: Flow, name: str) -> list[str]:
    """What an op changes in the memory where it lies: what it mutates, and the homes of pieces that it writes."""
    op = flow.op(name)
    return [*map(flow.home, op.mutates), *(home for v in op.writes if (home := flow.value[v].home))]


def _readers(flow: Flow) -> dict[str, set[str]]:
    """Who reads a piece reads its home."""
    table: dict[str, set[str]] = {}
    for op in flow.ops:
        for value in (*op.reads, *op.mutates):
            table.setdefault(flow.home(value), set()).add(op.name)
    return table


def external_values(
    flow: Flow, launch: Launch, readers: Mapping[str, set[str]] | None = None
) -> tuple[list[tuple[str, Part]], list[tuple[str, Part]]]:
    """A group's inputs, in order of first use, and outputs, in order: what crosses the border of a replacement. A piece that is read
    comes as its home; one that is written is no output: that happens where it lies."""
    readers = _readers(flow) if readers is None else readers

    def rows(value: str, part: Part) -> Part:
        return part.lowest_terms if flow.value[value].axis is not None else WHOLE

    made: dict[str, list[Part]] = {}
    used: dict[tuple[str, str], list[Part]] = {}
    inputs: dict[tuple[str, Part], None] = {}
    for name, part in launch.calls:
        op = flow.op(name)
        for value in dict.fromkeys(map(flow.home, (*op.reads, *op.mutates))):
            used.setdefault((value, name), []).append(part)
            if not covers(made.get(value, ()), rows(value, part)):
                inputs[value, rows(value, part)] = None
        for value in op.writes:
            if not flow.value[value].home:
                made.setdefault(value, []).append(rows(value, part))
    outputs: dict[tuple[str, Part], None] = {}
    for name, part in launch.calls:
        for value in flow.op(name).writes:
            if flow.value[value].home:
                continue
            mine = rows(value, part)
            is_read_outside = any(not covers(used.get((value, reader), ()), mine) for reader in readers.get(value, ()))
            if flow.value[value].role == "output" or value in flow.pieces or is_read_outside:
                outputs[value, mine] = None
    return list(inputs), list(outputs)


