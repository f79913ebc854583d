"""A bound plan as one straight-line Python function: what runs in the steady state.

Streams, events, views and calls are resolved; nothing is looked up and nothing is decided. One source serves all sizes whose
launches have the same form: `make(...)` takes the numbers of a binding and returns `run(inputs, streams, between, outputs)`.

    def run(inputs, streams, between, outputs):
        caller, comm = streams
        x = inputs['x']
        arena = empty(arena_bytes, torch.uint8, 'cuda:0')
        ...
        # layers.0.attn 0/2
        unit3([x_0of2, w, layers_0_attn_0_0of2])
        e0 = Event(); e0.record(caller)
        # layers.0.reduce 0/2 @ comm
        set_stream(comm); comm.wait_event(e0)
        ...

Launches in `eager` cannot be part of a recording. Around each, all streams join the caller's; the launch itself goes through
`between(step)`, which ends one recording, runs the step, and begins the next. What the step allocated comes back through `between`,
which keeps it at one address.

Where parts have contexts, a launch of one is `with inside[n]: ...`.
"""

from __future__ import annotations

import hashlib
import keyword
import linecache
import re
from functools import lru_cache
from pathlib import Path
from typing import Any, Callable, Mapping, NamedTuple, Sequence

import torch

from dynaflow import disk
from dynaflow.ir import Part
from dynaflow.runtime.lanes import Inside, story, without_autocast_cache
from dynaflow.runtime.program import COPIED, KEPT, LAUNCH, PLACED, RECORD, Arg, Bound, Call, Out, copy_as_it_lies, relaid, scratch

# names of the generated function that no value may take
_OWN_NAMES = ("caller", "inputs", "streams", "between", "torch", "Event", "set_stream", "copy_as_it_lies", "relaid", "scratch",
              "empty_strided", "view", "fork", "join", "results", "calls", "placed", "given", "allocated", "arena_bytes", "make", "run",
              "outputs", "inside")  # fmt: skip

# functions that are kept by their source, the oldest dropped first
MAX_SOURCES = 1024
# forms of launches that a plan's bindings share code by: as many as there are patterns of what is aligned
MAX_FORMS = 64
_sources: dict[str, Callable[..., Any]] = {}


class Code(NamedTuple):
    """A plan's function for one binding."""

    run: Callable[..., Sequence[torch.Tensor]]
    source: str
    # where the source was saved
    path: str
    # line of the source -> number of the launch
    launch_at: Mapping[int, int]

    def failed_launch(self, error: BaseException) -> int | None:
        """The number of the launch that raised."""
        trace, found = error.__traceback__, None
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == self.path:
                # a line behind a launch (its results are put in place) belongs to it
                found = max(((line, n) for line, n in self.launch_at.items() if line <= trace.tb_lineno), default=(0, None))[1]
            trace = trace.tb_next
        return found


class _Form(NamedTuple):
    """What the bindings of a plan share whose launches have the same form."""

    make: Callable[..., Any]
    source: str
    path: str
    launch_at: Mapping[int, int]


def generate(bound: Bound, eager: frozenset[int] = frozenset(), has_contexts: bool = False) -> Code:
    key = (eager, has_contexts, *(call.form for call in bound.calls))
    form = bound.forms.get(key)
    if form is None:
        while len(bound.forms) >= MAX_FORMS:
            bound.forms.pop(next(iter(bound.forms)), None)
        form = bound.forms[key] = _written(bound, eager, has_contexts)
    run = form.make(bound.calls, bound.placed, bound.given, bound.allocated, bound.memory.arena_bytes)
    return Code(run, form.source, form.path, form.launch_at)


def _written(bound: Bound, eager: frozenset[int], has_contexts: bool) -> _Form:
    writer = _Writer(bound, eager, has_contexts)
    source = writer.write()
    make = _sources.get(source)
    path = str(disk.directory("plans") / f"{_safe(bound.plan.flow)}-{hashlib.sha256(source.encode()).hexdigest()[:12]}.py")
    if make is None:
        _save(path, source)
        _save(path.removesuffix(".py") + ".plan", str(bound.plan))
        scope: dict[str, Any] = {
            "torch": torch, "copy_as_it_lies": copy_as_it_lies, "relaid": relaid, "scratch": scratch, "empty_strided": torch.empty_strided,
            "view": torch.as_strided,
        }  # fmt: skip
        exec(compile(source, path, "exec"), scope)  # noqa: S102 (generated from our own records)
        make = _sources[source] = scope["make"]
        while len(_sources) > MAX_SOURCES:
            _sources.pop(next(iter(_sources)))
    return _Form(make, source, path, writer.launch_at)


def _save(path: str, text: str) -> None:
    """For the curious, and for tracebacks."""
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    disk.save(Path(path), text)


class _Writer:
    def __init__(self, bound: Bound, eager: frozenset[int], has_contexts: bool):
        self.bound, self.eager = bound, eager
        # by the number of its context
        self._inside = {part: n for n, (part, _, _) in enumerate(bound.rows)} if has_contexts else {}
        self.head: list[str] = []
        self.body: list[str] = []
        self.launch_at: dict[int, int] = {}
        self._names: dict[int, str] = {}
        self._taken = {*keyword.kwlist, *_OWN_NAMES, *(what for code, _, what in bound.instructions if code == RECORD)}
        self._streams = ["caller", *(self._unique(s.name) for s in bound.streams)]
        self._arenas: dict[Any, str] = {}
        self._placed = {p[0]: k for k, p in enumerate(bound.placed)}
        self._given = {g[0]: (k, g) for k, g in enumerate(bound.given)}
        self._allocated = {a[0]: k for k, a in enumerate(bound.allocated)}
        self._returned = {i for _, i in bound.outputs}
        self._output_of = {a[1]: a[0] for a in bound.allocated}
        self._current = 0
        self._live: set[int] = set()
        # outputs that a plan of one unit leaves to the unit to allocate
        is_alone = bound.is_one_unit and not eager
        self._unit_allocates = {out.view for out in bound.calls[0].outs if out.how == PLACED} if is_alone else set()

    def write(self) -> str:
        bound = self.bound
        self.line(f"{', '.join(self._streams)}, = streams.all")
        self.line("set_stream, Event = streams.set_stream, streams.Event")
        for i, _, _, _ in bound.allocated:
            if i not in bound.late_outputs:
                self.output(i)
        self._number = 0
        self._known: set[str] = set()
        self._forked = set(range(len(self._streams)))
        self._used: set[int] = set()
        for code, s, what in bound.instructions:
            if code == LAUNCH:
                self.launch(what, s)
                self._number += 1
            elif code == RECORD:
                self.enter(s)
                self._known.add(what)
                self.line(f"{what} = Event(); {what}.record({self._streams[s]})")
            elif what in self._known:
                self.enter(s)
                self.line(f"{self._streams[s]}.wait_event({what})")
        self.switch(0)
        outputs = "".join(f"{self.name(i)}, " for _, i in bound.outputs)
        self.line(f"return ({outputs})")
        plan = bound.plan
        top = [
            f"# {plan.flow}: {bound.num_launches} launches on {len(self._streams)} streams",
            "def make(calls, placed, given, allocated, arena_bytes):",
            *(f"    {line}" for line in self.head),
            f"    def run(inputs, streams, between=None, outputs=None{', inside=()' if self._inside else ''}):",
        ]
        self.launch_at = {line + len(top): number for line, number in self.launch_at.items()}
        return "\n".join([*top, *(f"        {line}" for line in self.body), "    return run", ""])

    # -- lines

    def line(self, text: str) -> None:
        self.body.append(text)

    def constant(self, wanted: str, value: str) -> str:
        name = self._unique(wanted)
        self.head.append(f"{name} = {value}")
        return name

    def _unique(self, wanted: str) -> str:
        base = _safe(wanted)
        name, number = base, 1
        while name in self._taken:
            number += 1
            name = f"{base}_{number}"
        self._taken.add(name)
        return name

    # -- streams

    def enter(self, s: int) -> None:
        """Before the first thing on a stream behind a barrier: it starts after the caller's."""
        if s not in self._forked:
            self._forked.add(s)
            self.line(f"fork = Event(); fork.record(caller); {self._streams[s]}.wait_event(fork)")
        if s:
            self._used.add(s)

    def switch(self, s: int) -> None:
        if s != self._current:
            self.line(f"set_stream({self._streams[s]})")
            self._current = s

    def barrier(self) -> None:
        for s in sorted(self._used):
            self.line(f"join = Event(); join.record({self._streams[s]}); caller.wait_event(join)")
        self._used.clear()
        self._known.clear()
        self._forked = {0}
        self.switch(0)

    # -- launches

    def launch(self, call: Call, s: int) -> None:
        k = self._number
        is_eager = k in self.eager
        for i in self.bound.drops[k]:
            if i in self._live:
                self._live.discard(i)
                self.line(f"del {self._names[i]}")
        self.late_outputs([i for i, first in self.bound.late_outputs.items() if first == k])
        stream = "" if s == 0 else f" @ {self._streams[s]}"
        self.line(f"# {call.label}{stream}" + (": not recorded" if is_eager else ""))
        if is_eager:
            self.barrier()
        else:
            self.enter(s)
        args = [self.argument(k, j, arg) for j, arg in enumerate(call.args)]
        if call.entry.inputs is not None:
            args = [
                args[x] if isinstance(x, int) else self.constant(f"c{k}_{j}", f"calls[{k}].entry.inputs[{j}][0]")
                for j, x in enumerate(call.entry.inputs)
            ]
        for j, (out, own) in enumerate(zip(call.outs, call.entry.own)):
            if not own:
                place = self.constant(f"geometry{k}_{j}", f"calls[{k}].outs[{j}].scratch") if out.scratch else ""
                args.append(f"scratch({place})" if place else self.name(out.view))
        if not is_eager:
            self.switch(s)
        unit = self.constant(f"unit{k}", f"calls[{k}].entry.call")
        # (place in `results`, place among the launch's outs, out)
        held = [(j, j, out) for j, out in enumerate(call.outs) if out.how in (COPIED, KEPT) or out.view in self._unit_allocates]
        text = f"{unit}([{', '.join(args)}])"
        if is_eager:
            defaults = ", ".join(f"a{j}={text}" for j, text in enumerate(args))
            results = "".join(f"r[{j}], " for _, j, _ in held)
            text = f"between(lambda {defaults}: (lambda r: ({results}))({unit}([{', '.join(f'a{j}' for j in range(len(args)))}])))"
            held = [(n, j, out) for n, (_, j, out) in enumerate(held)]
        inside = f"with inside[{self._inside[call.part]}]: " if call.part in self._inside else ""
        self.launch_at[len(self.body) + 1] = k
        if not held:
            self.line(f"{inside}{text}")
            return
        self.line(f"{inside}results = {text}")
        for n, j, out in held:
            if out.how == COPIED:
                self.line(f"{self.name(out.view)}.copy_(results[{n}])")
            elif out.how == PLACED:
                self.line(f"if outputs is None: {self.name(out.view)} = results[{n}]")
            else:
                self.keep(f"results[{n}]", k, j, out, is_side=s != 0 and not is_eager)
        self.line("del results")

    def keep(self, result: str, k: int, j: int, out: Out, is_side: bool) -> None:
        name = self._names[out.view] = self._unique(self._label(out.view))
        stride = self.constant(f"stride{k}_{j}", f"calls[{k}].outs[{j}].stride")
        self.line(f"{name} = relaid({result}{'.clone()' if out.reason else ''}, {stride})")
        if is_side and not self._returned.isdisjoint((out.view, *(i for i, *_ in out.inside))):
            self.line(f"streams.keep({name})")
        self._live.add(out.view)
        for n, (i, axis, _, _) in enumerate(out.inside):
            rows = self.constant(f"rows{k}_{j}_{n}", f"calls[{k}].outs[{j}].inside[{n}][2:]")
            inner = self._names[i] = self._unique(self._label(i))
            self._live.add(i)
            self.line(f"{inner} = {name}.narrow({axis}, *{rows})")

    def argument(self, k: int, j: int, arg: Arg) -> str:
        if arg.view < 0:
            return self.constant(f"n{k}_{j}", f"calls[{k}].args[{j}].number")
        text = self.name(arg.view)
        if arg.stride is not None:
            text = f"relaid({text}, {self.constant(f'layout{k}_{j}', f'calls[{k}].args[{j}].stride')})"
        return f"copy_as_it_lies({text})" if arg.is_cloned else text

    # -- tensors

    def _label(self, i: int) -> str:
        value, part = self.bound.views[i]
        return value if part.is_whole else f"{value}_{_rows(part)}"

    def name(self, i: int) -> str:
        if i not in self._names:
            name = self._names[i] = self._unique(self._label(i))
            if i in self._given:
                self.input(i, name)
            else:
                self.place(i, name)
        return self._names[i]

    def input(self, i: int, name: str) -> None:
        k, (_, value, axis, _, _) = self._given[i]
        if axis < 0:
            self.line(f"{name} = inputs[{value!r}]")
        else:
            rows = self.constant(f"rows_{i}", f"given[{k}][3:]")
            self.line(f"{name} = inputs[{value!r}].narrow({axis}, *{rows})")

    def place(self, i: int, name: str) -> None:
        value = self.bound.views[i].value
        at = self.constant(f"at_{i}", f"placed[{self._placed[i]}][2:]")
        base = self._names[self._output_of[value]] if value in self._output_of else self.arena(value)
        self.line(f"{name} = view({base}, {at}[1], {at}[2], {at}[0])")

    def output(self, i: int) -> None:
        layout = self.bound.program.layouts[self.bound.views[i].value]
        name = self._names[i] = self._unique(self._label(i))
        geometry = self.constant(f"geometry_{i}", f"allocated[{self._allocated[i]}][2:]")
        place = [view for _, view in self.bound.outputs].index(i)
        new = "None" if i in self._unit_allocates else f"empty_strided(*{geometry}, dtype={layout.dtype}, device={str(layout.device)!r})"
        self.line(f"{name} = {new} if outputs is None else outputs[{place}]")

    def late_outputs(self, new: Sequence[int]) -> None:
        """The caller's memory, for those streams that touch it."""
        if not new:
            return
        for i in new:
            self.switch(0)
            self.output(i)
        launched = [s for code, s, _ in self.bound.instructions if code == LAUNCH]
        for s in sorted({launched[n] for i in new for n in self.bound.touching[i]} - {0}):
            self._forked.discard(s)
            self.enter(s)

    def arena(self, value: str) -> str:
        layout = self.bound.program.layouts[value]
        key = (layout.device, layout.dtype)
        if key not in self._arenas:
            if layout.device not in self._arenas:
                name = self._arenas[layout.device] = self._unique("arena")
                # allocated first, on the caller's stream
                self.body.insert(2, f"{name} = torch.empty(arena_bytes, dtype=torch.uint8, device={str(layout.device)!r})")
                self.launch_at = {line + 1: number for line, number in self.launch_at.items()}
            name = self._arenas[key] = self._unique(f"arena_{str(layout.dtype).removeprefix('torch.')}")
            self.line(f"{name} = {self._arenas[layout.device]}.view({layout.dtype})")
        return self._arenas[key]


def run(
    bound: Bound, inputs: Mapping[str, Any], streams: Any, between: Any = None, eager: frozenset[int] = frozenset(),
    outputs: Sequence[torch.Tensor] | None = None, contexts: Sequence[Any] = (),
) -> Sequence[torch.Tensor]:  # fmt: skip
    """Issue everything; the outputs in the order of `bound.outputs`: new tensors, or those given. What a launch allocates itself is
    copied into the one given. An error says which launch raised it, one of a step that is done again too. `contexts`: one manager per
    part, in the order of `bound.rows`, entered around each of its launches."""
    code = code_of(bound, eager, bool(contexts))

    def outside(step: Callable[[], Any]) -> Any:
        def told() -> Any:
            try:
                return step()
            except BaseException as error:
                _tell(bound, code, error)
                raise

        return between(told)

    try:
        with without_autocast_cache():
            results = code.run(inputs, streams, outside, outputs, *([[Inside(c) for c in contexts]] if contexts else ()))
        streams.leave()
        for mine, result in zip(outputs or (), results):
            if mine is not result:
                mine.copy_(result)
        return outputs if outputs is not None else results
    except BaseException as error:
        streams.join()
        _tell(bound, code, error)
        raise


def _tell(bound: Bound, code: Code, error: BaseException) -> None:
    number = code.failed_launch(error)
    if number is None:
        return
    calls = bound.calls
    written: dict[str, list[str]] = {}
    for call in calls[: number + 1]:
        for name in call.mutates:
            written.setdefault(name, []).append(call.label)
    note = story(bound, calls[number], written)
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def code_of(bound: Bound, eager: frozenset[int] = frozenset(), has_contexts: bool = False) -> Code:
    codes = bound.__dict__.setdefault("_codes", {})
    if (eager, has_contexts) not in codes:
        codes[eager, has_contexts] = generate(bound, eager, has_contexts)
    code: Code = codes[eager, has_contexts]
    return code


class NoStreams:
    """Streams of a machine that has one: launches run in host order."""

    class Event:
        def record(self, stream: Any) -> None:
            pass

    class _Stream:
        def wait_event(self, event: Any) -> None:
            pass

    def __init__(self, num_streams: int):
        self.all = (self._Stream(),) * num_streams

    def set_stream(self, stream: Any) -> None:
        pass

    def join(self) -> None:
        pass

    def keep(self, result: torch.Tensor) -> None:
        pass

    def leave(self) -> None:
        pass


def _rows(part: Part) -> str:
    return f"{part.lo}of{part.of}" if part.hi == part.lo + 1 else f"{part.lo}to{part.hi}of{part.of}"


@lru_cache(4096)
def _safe(name: str) -> str:
    text = re.sub(r"\W+", "_", name).strip("_") or "value"
    return f"v_{text}" if text[0].isdigit() else text
