"""A captured graph under plans: plan once per context, bind once per sizes, run on every call.

1. `CapturedGraph(...)` analyses and partitions the graph, at capture. Where nothing is to be planned (the strategy is Sequential and
   nothing is recorded, or gradients are needed) the graph is compiled as a whole instead, as torch.compile would.
2. A call reads its sizes (`Boundary`), and finds what runs for them (`Bindings`).
3. A bound plan runs as its generated function, as recordings of it, or (other runtimes, profiling) step by step.
4. Whatever cannot be planned runs as the sequential graph: said once in the log, counted, raised instead when strict.
"""

from __future__ import annotations

import copy
import logging
import time
from contextlib import nullcontext
from typing import Any, Callable, Mapping, NamedTuple, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import fx
from torch._dynamo.exc import RestartAnalysis, SkipFrame, exceptions_allowed_to_be_fallback
from torch._inductor.output_code import CompiledFxGraph

from dynaflow import errors
from dynaflow.batching import Facts, analyse
from dynaflow.bindings import Bindings
from dynaflow.boundary import Boundary
from dynaflow.contest import contest
from dynaflow.context import current_tags
from dynaflow.inductor.entries import Inductor, compile_captured
from dynaflow.inductor.structure import NotCompiled
from dynaflow.ir import Part
from dynaflow.ongoing import Ongoing, is_serialised, ongoing
from dynaflow.partition import partition
from dynaflow.planned import Fallback, our_bug
from dynaflow.planning import Planning
from dynaflow.recorded import Padding, PlanBody, streams_for, why_between
from dynaflow.region import Region
from dynaflow.runtime import cuda, fake, generated, graphs, threads
from dynaflow.runtime.lanes import Run, is_profiling, part_contexts
from dynaflow.runtime.program import Bound
from dynaflow.runtime.ranks import announce
from dynaflow.settings import Settings, why_uncompiled
from dynaflow.sources import Sources
from dynaflow.strategies import Sequential
from dynaflow.units import Built, build

log = logging.getLogger("dynaflow")

_NOTHING = nullcontext()


class Rows(NamedTuple):
    """A part as a `part_context` function sees it: which rows of this call's batch."""

    part: Part
    start: int
    stop: int


_NEEDS_GRAD = Fallback("gradients are needed: the sequential graph runs under autograd")
_ALIASED = Fallback("inputs share memory that were separate when the graph was captured")
_MEETING = Fallback("rows of an input that is changed are other rows of another input")


class CapturedGraph:
    """One graph that Dynamo captured. Callable with the graph's inputs."""

    # whether graphs of this class are made to be looked at
    inspects = False

    def __init__(
        self, gm: fx.GraphModule, inputs: Sequence[Any], axes: Mapping[str, int], symbols: set[Any], fixed: int | None, settings: Settings,
        examples: Sequence[Any],
    ):  # fmt: skip
        """`inputs`: Dynamo's fakes, which by now have what the graph does to them: what it changes may require gradients. `examples`:
        what Dynamo gives a compiler, as they were."""
        self.gm, self.settings = gm, settings
        self._captured = (tuple(inputs), dict(axes), set(symbols))
        # the batch size, where Dynamo made it a constant
        self.fixed_batch = fixed
        self.refusal: Fallback | None = None
        self.is_empty = not any(n.op.startswith("call_") for n in gm.graph.nodes)
        # `with torch.enable_grad()` inside the model
        self._enables_grad = any(n.target is torch._C._set_grad_enabled and n.args[0] for n in gm.graph.nodes)
        self._is_analysed = False
        self.compiler: Inductor | None = None
        self._recordings: graphs.Recordings | None = None
        self.padding: Padding | None = None
        # sizes whose plan is replayed: `Bindings.steady`, once there are bindings
        self._steady: dict[tuple[Any, ...], Bound] = {}
        devices = {x.device for x in inputs if isinstance(x, torch.Tensor)}
        self.device = next((d for d in sorted(devices, key=str) if d.type == "cuda"), torch.device("cpu"))
        # what a compiler would compile for
        target = next((d for d in sorted(devices, key=str) if d.type not in ("cpu", "cuda")), self.device)
        self.is_compiled = settings.wants_inductor(target)
        # what runs for the graph as a whole
        self._whole: Callable[..., Any] = gm.forward
        is_grad = torch.is_grad_enabled() or self._enables_grad
        self._needs_grad = is_grad and any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs)
        # nothing is to be planned
        self.has_kernels = settings.has_kernels(target) and not self.inspects
        self.is_whole = self.has_kernels or (
            isinstance(settings.strategy, Sequential) and settings.runtime != "graph" and not self.inspects)
        # why the graph runs as it was captured, where it would have been compiled
        self.why_eager = why_uncompiled(target) if settings.is_open and not self.is_compiled else ""
        if self.why_eager and not self.inspects:
            log.info("%s runs as it was captured: %s", settings.name, self.why_eager)
        # what Inductor compiled of it, under plans of the kernels
        self.regions: list[Region] = []
        if not self.is_whole and not self._needs_grad:
            self._ensure_analysed()
        is_run_whole = self.is_whole or self._needs_grad or self.refusal is not None
        if self.is_compiled and is_run_whole and not self.is_empty and not self.inspects:
            self._compile_whole(examples)
        if is_run_whole and not self.inspects:
            announce(settings.name, self.gm.graph)
        settings.count(captures=1)

    def _compile_whole(self, examples: Sequence[Any]) -> None:
        began = time.perf_counter()
        captured, self.gm = self.gm, copy.deepcopy(self.gm)
        self._whole = self.gm.forward
        try:
            self._whole = compile_captured(captured, examples, self.settings.inductor_options, self._region if self.has_kernels else None)
        except (*exceptions_allowed_to_be_fallback, RestartAnalysis, SkipFrame):
            raise  # Dynamo breaks the graph there, and captures what is before and behind; or captures anew, floats as constants, say
        except Exception as error:
            if self.settings.strict:
                raise
            self.why_eager = f"Inductor cannot compile it: {type(error).__name__}: {error}"
            log.warning("%s runs as it was captured: %s", self.settings.name, self.why_eager)
            return
        log.info("compiled a graph of %s as a whole: %d nodes in %.1f s", self.settings.name, len(self.gm.graph.nodes),
                 time.perf_counter() - began)  # fmt: skip

    def _region(self, compiled: CompiledFxGraph, is_backward: bool, static: Sequence[int]) -> Any:
        name = f"{self.settings.name}.{'backward' if is_backward else 'kernels'}{len(self.regions) or ''}"
        try:
            self.regions.append(Region(name, compiled, self.settings, static, is_backward))
        except NotCompiled as error:
            log.warning("%s runs as Inductor has it: %s", self.settings.name, error)
            return compiled.current_callable
        return self.regions[-1]

    def _ensure_analysed(self) -> None:
        """What planning needs to know; once, and only where something is planned (or asked: explain, check, profile)."""
        if self._is_analysed:
            return
        self._is_analysed = True
        settings = self.settings
        try:
            self._analyse(*self._captured)
        except errors.DynaFlowError as error:
            # the sequential graph is what Sequential asks for, whether a plan could be made or not
            is_wanted = isinstance(error, errors.Unplannable) and isinstance(settings.strategy, Sequential)
            self.refusal = Fallback.of(error, is_wanted=is_wanted)
        except Exception as error:
            self.refusal = Fallback.of(our_bug(settings.name, "analysed", error))

    # -- 1. capture

    def _analyse(self, inputs: Sequence[Any], axes: Mapping[str, int], symbols: set[Any]) -> None:
        began = time.perf_counter()
        with torch.no_grad():
            self.facts: Facts = analyse(self.gm, inputs, axes, symbols)
        sources = Sources(self.gm.graph, self.facts)
        groups = partition(self.gm.graph, self.facts, sources, self.settings.partition)
        self.built: Built = build(self.gm, self.facts, sources, groups, sorted(map(str, symbols)),
                                  self.settings.name, self.settings.parameters)  # fmt: skip
        flow = self.flow = self.built.program.flow
        self.boundary = Boundary(self.gm.graph, self.facts, self.built)
        devices = {x.device for x in self.facts.fake.values() if isinstance(x, torch.Tensor)}
        self.device = next((d for d in sorted(devices, key=str) if d.type == "cuda"), self.device)
        is_recorded, options = self.settings.runtime == "graph", self.settings.inductor_options
        self.compiler = Inductor(flow, self.built.program.layouts, is_recorded, options) if self.is_compiled else None
        if is_recorded:
            self._recordings = graphs.Recordings(self.settings.name, self.device, self.settings.pool, self.settings.borrow)
            self.padding = Padding(flow, self.built, self.settings.buckets)
        self.planning = Planning(self.gm.graph, self.built, self.compiler, self.settings, self.device)
        self.bindings = Bindings(self.planning, self.boundary, self.fixed_batch, self._recordings, self.padding)
        self._steady = self.bindings.steady
        self._bodies: WeakKeyDictionary[Bound, PlanBody] = WeakKeyDictionary()
        if self.fixed_batch is not None and not isinstance(self.settings.strategy, Sequential):
            # a call of ours marks the batch; under torch.compile, sizes are constants until they change
            why = ("because the model's code asks for it (TORCH_LOGS=dynamic says where)" if ongoing.get() is not None
                   else "as torch.compile does until it changes (dynamic=True and df.compile do not)")  # fmt: skip
            log.warning("%s: Dynamo fixed the batch size at %d, %s; nothing of this graph can be split",
                        self.settings.name, self.fixed_batch, why)  # fmt: skip
        num_whole = sum(bool(op.unsplittable) for op in flow.ops)
        self.settings.stats.num_ops, self.settings.stats.num_unsplittable = len(flow.ops), num_whole
        log.info("captured %s: %d nodes, %d ops (%d only over the whole batch) in %.0f ms", flow.label, len(self.gm.graph.nodes),
                 len(flow.ops), num_whole, (time.perf_counter() - began) * 1e3)  # fmt: skip

    # -- 2. calls

    def __call__(self, *args: Any) -> Any:
        if self._steady and (results := self._replayed(args)) is not None:
            return results
        settings, call = self.settings, ongoing.get()
        settings.count_call()
        if call is not None:
            call.num_graphs += 1
        if self.is_empty:
            return self.gm.forward(*args)  # the model returned what it was given: there is nothing to plan
        if self._needs_grad:
            if not self.has_kernels:
                self._note(_NEEDS_GRAD)
            return self._whole(*args)
        if self.is_whole:
            if settings.partition == "kernels" or not is_profiling():
                return self._whole(*args)
            self._ensure_analysed()
        result = self._planned(args)
        if call is not None and self.refusal is None:
            self._tell(call, result)
        return result

    def _planned(self, args: Sequence[Any]) -> Any:
        if self.refusal is not None:
            return self._fall_back(self.refusal, args)
        bindings, sizes = self.bindings, self.boundary.read_sizes(args)
        ready = self._ready(sizes, args)
        bound = ready.bound if isinstance(ready, Fallback) else ready
        if isinstance(ready, Fallback):
            self._note(ready)
            if is_profiling() and ready.error is None:
                bound = bindings.op_by_op(sizes)
        if bound is None:
            return self._whole(*args)
        try:
            bound = bindings.moved(bound)
        except errors.BatchTooSmall as error:
            return self._fall_back(Fallback.of(error), args)
        if is_serialised():
            bound = bindings.serialised(bound, sizes)
        elif self._recordings is not None and self.settings.part_context is None and not is_profiling():
            results = self._recorded(bound, sizes, args, can_be_steady=not isinstance(ready, Fallback) or ready.is_wanted)
            if results is not None:
                return results
        if (why := self._shares(bound, args)) is not None:
            return self._fall_back(why, args, self.gm.forward)
        try:
            aligned = self._aligned(args)
        except errors.Misaligned as error:
            return self._fall_back(Fallback.of(error), args, self.gm.forward)
        with torch.no_grad() if torch.is_grad_enabled() else _NOTHING:
            return self._hand_out(bound, sizes, args, self._issue(bound, aligned))

    def _shares(self, bound: Bound, args: Sequence[Any]) -> Fallback | None:
        """Why memory that these arguments share is in the way of a plan; None if it is not."""
        if not self.boundary.has_captured_aliases(args):
            return _ALIASED
        return None if not bound.num_part_launches or self.boundary.rows_are_apart(args) else _MEETING

    def _ready(self, sizes: tuple[Any, ...], args: Sequence[Any]) -> Bound | Fallback:
        """What runs for these sizes, planned and bound where they are new."""
        tags = current_tags()
        found = self.bindings.known(sizes, tags)
        if found is None:
            found = self.bindings.prepare(sizes, tags, args, lambda bounds, sequential: contest(self, bounds, sequential, sizes, args))
        return found

    def _recorded(self, bound: Bound, sizes: tuple[Any, ...], args: Sequence[Any], can_be_steady: bool) -> Any:
        """What a recording returns, padded where that serves more sizes; None where there is none and none can be made."""
        recordings, padding, boundary = self._recordings, self.padding, self.boundary
        assert recordings is not None and padding is not None
        padded = padding.sizes(sizes)
        wider = bound if padded == sizes else self._padded(padded, args)
        if wider is None:
            padded, wider = sizes, bound
        given = list(args)
        outputs = recordings.replay(wider, given)
        if outputs is None and self._shares(wider, args) is None and self._is_bound_aligned(args, sizes):
            outputs = recordings.record(wider, given, lambda: padding.slots(boundary, given, padded), self.body_of(wider))
        if outputs is None:
            return None
        if padded == sizes and boundary.plain_outputs is not None and can_be_steady:
            self.bindings.keep_steady(sizes, wider)
        return self._hand_out(wider, sizes, args, outputs if padded == sizes else padding.cut(wider, outputs, sizes))

    def _padded(self, sizes: tuple[Any, ...], args: Sequence[Any]) -> Bound | None:
        """The plan for sizes that a call is padded to; None where they cannot be planned."""
        ready = self._ready(sizes, args)
        if isinstance(ready, Fallback):
            self._note(ready)
            return ready.bound
        return ready

    def _replayed(self, args: Sequence[Any]) -> Any:
        """A call like one that was replayed before: nothing but what must happen anew. None where it is not."""
        if is_serialised() or is_profiling():
            return None
        boundary = self.boundary
        bound = self._steady.get(boundary.read_sizes(args))
        outputs = self._recordings.replay(bound, args) if bound is not None and self._recordings is not None else None
        if outputs is None or bound is None:
            return None
        self.settings.count_planned(bound.num_launches, bound.num_part_launches, num_calls=1)
        boundary.note_changes(args)
        assert boundary.plain_outputs is not None
        results = outputs if boundary.is_in_order else [outputs[i] for i in boundary.plain_outputs]
        if (call := ongoing.get()) is not None:
            call.num_graphs += 1
            self._tell(call, results)
        return results

    def _tell(self, call: Ongoing, results: Sequence[Any]) -> None:
        """A later graph of the same call may take these as inputs, and be captured: it must know where the batch is."""
        for output, axis in zip(results, self.boundary.output_axes):
            if isinstance(output, torch.Tensor):
                call.add(output, -1 if axis is None else axis)

    def slots(self, args: Sequence[Any], sizes: tuple[Any, ...]) -> dict[int, tuple[int, int] | None]:
        """Arguments that a recording for these sizes copies, and with how many rows."""
        return {} if self.padding is None else self.padding.slots(self.boundary, args, sizes)

    def repeatable(self, bound: Bound | None, given: list[Any], put_back: Callable[[], None]) -> tuple[Callable[[], Any], bool]:
        """(a plan on given arguments, as calls run it; whether it is recorded). None stands for the graph as it was captured. It runs
        here, too; `put_back` is called before each time."""
        if bound is None:
            return lambda: self._whole(*given), False
        aligned = list(self._aligned(given))
        put_back()
        self._issue(bound, aligned)  # kernels load, libraries make their workspaces
        if self._recordings is not None:
            put_back()
            replay = self._recordings.trial(aligned, self.body_of(bound))
            if replay is not None:
                return replay, True
        return lambda: self._issue(bound, aligned), False

    # -- 3. runs

    def _hand_out(self, bound: Bound, sizes: tuple[Any, ...], args: Sequence[Any], outputs: Sequence[torch.Tensor]) -> Any:
        self.settings.count_planned(bound.num_launches, bound.num_part_launches)
        self.boundary.note_changes(args)
        return self.boundary.results(sizes, args, outputs)

    def body_of(self, bound: Bound) -> PlanBody:
        """What recordings issue for a plan."""
        if bound not in self._bodies:
            flow, built, device, boundary = self.flow, self.built, self.device, self.boundary
            weights = [i for i, name in boundary.names if boundary.role(name) == "param"] if self.settings.fixed_weights else []
            self._bodies[bound] = PlanBody(
                bound, boundary.names, boundary.changed, device, lambda op: why_between(flow.op(op), built, device), weights)
        return self._bodies[bound]

    def _issue(self, bound: Bound, args: Sequence[Any]) -> Sequence[torch.Tensor]:
        values = self.boundary.values(args)
        runtime, _, order = self.settings.runtime.partition(":")
        is_cuda = self.device.type == "cuda" and runtime not in ("threads", "serial", "fake")
        contexts = self._part_contexts(bound)
        if not is_profiling() and (is_cuda or runtime == "serial" or (runtime != "fake" and not bound.streams)):
            is_elsewhere = is_cuda and self.device.index not in (None, torch.cuda.current_device())
            with torch.cuda.device(self.device) if is_elsewhere else _NOTHING:
                return generated.run(bound, values, streams_for(self.device if is_cuda else None, bound), contexts=contexts)
        tensors = bound.tensors(values, poison=runtime == "fake")
        run = Run(bound, tensors, {part: context for (part, _, _), context in zip(bound.rows, contexts)})
        if is_cuda:
            with torch.cuda.device(self.device):
                cuda.issue(bound, run, self.device)
        elif runtime in ("fake", "serial"):
            fake.issue(bound, run, int(order) if order.isdigit() else order or "issue")
        else:
            threads.issue(bound, run)
        return list(bound.results(tensors).values())

    def _aligned(self, args: Sequence[Any]) -> Sequence[Any]:
        return self.boundary.aligned(args) if self._wants_alignment else args

    def _is_bound_aligned(self, args: Sequence[Any], sizes: tuple[Any, ...]) -> bool:
        """Whether what a recording would bind by address may be read by compiled code where it lies."""
        return not self._wants_alignment or self.slots(args, sizes).keys() >= {*self.boundary.misaligned(args)}

    @property
    def _wants_alignment(self) -> bool:
        return self.compiler is not None and self.device.type == "cuda"

    def _part_contexts(self, bound: Bound) -> list[Any]:
        function = self.settings.part_context
        return [] if function is None else part_contexts(function, [Rows(*row) for row in bound.rows])

    # -- 4. fall back

    def _fall_back(self, why: Fallback, args: Sequence[Any], whole: Callable[..., Any] | None = None) -> Any:
        self._note(why)
        return (whole or self._whole)(*args)

    def _note(self, why: Fallback) -> None:
        """Say it once, count it; raise it when strict."""
        if why.is_wanted or (isinstance(self.settings.strategy, Sequential) and self._recordings is None):
            return  # nothing was asked for that is not done
        if self.settings.strict and not why.is_choice:
            error = why.error or errors.FellBack(
                f"{self.settings.name} would fall back to the sequential graph: {why.reason}.",
                fix="strict=False runs the sequential graph instead, and counts it")  # fmt: skip
            raise error.bare() from None
        if self.settings.count_fallback(why.reason):
            log.warning("%s falls back to the sequential graph: %s", self.settings.name, why.reason)
