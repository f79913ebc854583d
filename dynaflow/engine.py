"""A captured graph under plans: plan once per context, bind once per sizes, run on every call.

1. `CapturedGraph(...)` analyses and partitions the graph, at capture. Where nothing is to be planned (the strategy is Sequential and
   nothing is recorded, or gradients are needed) the graph is compiled as a whole instead, as torch.compile would.
2. A call looks up its sizes and tags. Known: the bound plan runs. New sizes: a plan whose looks hold is bound to them. Else the
   strategy runs, and its plan is synchronised, fused, placed and verified before anything is launched.
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
from torch._dynamo.exc import exceptions_allowed_to_be_fallback
from torch._inductor.output_code import CompiledFxGraph

from dynaflow import errors
from dynaflow.batching import Facts, analyse
from dynaflow.contest import LATER, contest, is_measuring
from dynaflow.context import ALL, current_tags
from dynaflow.inductor.entries import Inductor, compile_captured
from dynaflow.inductor.structure import NotCompiled
from dynaflow.inductor.units import ALIGNMENT
from dynaflow.ir import Part, Plan, evaluate
from dynaflow.ongoing import Ongoing, is_serialised, ongoing
from dynaflow.partition import partition
from dynaflow.planned import Fallback, Planned, finish_plan
from dynaflow.planner import sequential_plan
from dynaflow.planning import Planning
from dynaflow.recorded import Padding, PlanBody, streams_for, why_between
from dynaflow.region import Region
from dynaflow.runtime import cuda, fake, generated, graphs, threads
from dynaflow.runtime.binder import Binder
from dynaflow.runtime.lanes import Run, is_profiling, part_contexts
from dynaflow.runtime.program import Bound
from dynaflow.runtime.ranks import announce
from dynaflow.settings import Settings, why_uncompiled
from dynaflow.sources import ITEM, Sources, Unplannable
from dynaflow.strategies import Sequential
from dynaflow.units import Built, build
from dynaflow.verify import verify_memory

log = logging.getLogger("dynaflow")

# bound plans that are kept per graph; the oldest goes first
MAX_BOUND = 1024

_NOTHING = nullcontext()


class Rows(NamedTuple):
    """A part as a `part_context` function sees it: which rows of this call's batch."""

    part: Part
    start: int
    stop: int


_NEEDS_GRAD = Fallback("gradients are needed: the sequential graph runs under autograd")
_ALIASED = Fallback("inputs share memory that were separate when the graph was captured")


class CapturedGraph:
    """One graph that Dynamo captured. Callable with the graph's inputs."""

    # whether graphs of this class are made to be looked at
    inspects = False

    def __init__(
        self, gm: fx.GraphModule, inputs: Sequence[Any], axes: Mapping[str, int], symbols: set[Any], fixed: int | None, settings: Settings
    ):
        self.gm, self.settings = gm, settings
        self._captured = (tuple(inputs), dict(axes), set(symbols))
        # the batch size, where Dynamo made it a constant
        self.fixed_batch = fixed
        self.refusal: Fallback | None = None
        self.is_empty = not any(n.op.startswith("call_") for n in gm.graph.nodes)
        # `with torch.enable_grad()` inside the model
        self._enables_grad = any(n.target is torch._C._set_grad_enabled and n.args[0] for n in gm.graph.nodes)
        self._recordings: graphs.Recordings | None = None
        # sizes whose plan is replayed, whatever the tags are
        self._steady: dict[tuple[Any, ...], Bound] = {}
        self._is_analysed = False
        self.compiler: Inductor | None = None
        # contexts whose plans are still to be measured
        self._unmeasured: set[Any] = set()
        # tags that a plan looked at: others do not tell contexts apart
        self._tags_read: tuple[str, ...] = ()
        self._bound: dict[Any, Bound | Fallback] = {}
        # id of a plan -> the plan, and the binder of its serialised twin
        self._serial: dict[int, tuple[Plan, Binder]] = {}
        self._sequential_binder: Binder | None = None
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
            self._compile_whole(inputs)
        if is_run_whole and not self.inspects:
            announce(settings.name, self.gm.graph)
        settings.count(captures=1)

    def _compile_whole(self, inputs: Sequence[Any]) -> None:
        began = time.perf_counter()
        captured, self.gm = self.gm, copy.deepcopy(self.gm)
        self._whole = self.gm.forward
        try:
            self._whole = compile_captured(captured, inputs, self.settings.inductor_options, self._region if self.has_kernels else None)
        except exceptions_allowed_to_be_fallback:
            raise  # Dynamo breaks the graph there, and captures what is before and behind
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
            is_wanted = isinstance(error, Unplannable) and isinstance(settings.strategy, Sequential)
            self.refusal = Fallback(str(error), error, is_wanted)
        except Exception as error:
            self.refusal = self._our_bug("analysed", error)

    def _our_bug(self, what: str, error: Exception) -> Fallback:
        log.exception("dynaflow: a graph of %s could not be %s", self.settings.name, what)
        unplannable = Unplannable(f"the graph could not be {what}: {type(error).__name__}: {error}", fix="report this: it is our bug")
        unplannable.__cause__ = error
        return Fallback(str(unplannable), unplannable)

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
        self._order = tuple(self.built.sizes[s] for s in flow.symbols)
        self._batch_at = [i for i, s in enumerate(flow.symbols) if s in flow.batch]
        self._names = [(i, name) for i, name in enumerate(self.built.inputs) if name is not None]
        self._mutated = {flow.value[v].storage for op in flow.ops for v in op.mutates if flow.value[v].role in ("input", "param")}
        (output,) = [n for n in self.gm.graph.nodes if n.op == "output"]
        self._output_axes = [self.facts.axis[a] if isinstance(a, fx.Node) else None for a in output.args[0]]
        devices = {x.device for x in self.facts.fake.values() if isinstance(x, torch.Tensor)}
        self.device = next((d for d in sorted(devices, key=str) if d.type == "cuda"), self.device)
        # the caller's own tensors, parameters that nobody changes aside: argument and storage; and those that are changed in place
        self._inputs = [(i, s) for i, name in self._names if (s := flow.value[name].storage) in self._mutated
                        or flow.value[name].role == "input"]  # fmt: skip
        self.changed = [i for i, name in self._names if flow.value[name].storage in self._mutated]
        self._output_names = tuple(name for name in dict.fromkeys(flow.outputs) if flow.value[name].role == "output")
        self._epilogue: Callable[..., Any] = getattr(self.built.epilogue.fn, "forward", self.built.epilogue.fn)
        self._plain_outputs = self.built.plain_outputs(self._output_names)
        self._is_in_order = self._plain_outputs is not None and list(self._plain_outputs) == list(range(len(self._output_names)))
        self._bodies: WeakKeyDictionary[Bound, PlanBody] = WeakKeyDictionary()
        is_recorded, options = self.settings.runtime == "graph", self.settings.inductor_options
        self.compiler = Inductor(flow, self.built.program.layouts, is_recorded, options) if self.is_compiled else None
        self.planning = Planning(self.gm.graph, self.built, self.compiler, self.settings, self.device)
        if is_recorded:
            self._recordings = graphs.Recordings(self.settings.name, self.device, self.settings.pool, self.settings.borrow)
            self._padding = Padding(flow, self.built, self.settings.buckets)
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
        sizes, tags = self.read_sizes(args), current_tags()
        bound = self._known(sizes, tags)
        if bound is None:
            bound = self._prepare(sizes, tags, args)
        is_counted = isinstance(bound, Fallback) and not bound.is_wanted
        if isinstance(bound, Fallback):
            self._note(bound)
            if is_profiling() and bound.error is None:
                bound = self._op_by_op(sizes)
            elif bound.bound is None:
                return self._whole(*args)
            else:
                bound = bound.bound
        if self.settings.align is not None:
            try:
                bound = self._moved(bound, sizes)
            except errors.BatchTooSmall as error:
                return self._fall_back(Fallback(str(error), error), args)
        if is_serialised():
            bound = self._serial_bound(bound, sizes)
        elif self._recordings is not None and self.settings.part_context is None and not is_profiling():
            padded = self._padding.sizes(sizes)
            wider = bound if padded == sizes else self._at(padded, tags, args)
            if wider is None:
                padded, wider = sizes, bound
            given = list(args)
            outputs = self._recordings.replay(wider, given)
            if outputs is None and self._has_captured_aliases(args) and self._is_bound_aligned(args):
                outputs = self._recordings.record(wider, given, lambda: self._padding.slots(self, given, padded), self._body(wider))
            if outputs is not None:
                is_steady = padded == sizes and self._plain_outputs is not None and not is_counted
                if is_steady and not self._tags_read and sizes not in self._unmeasured:
                    self._steady[sizes] = wider
                return self._hand_out(wider, sizes, args, outputs if padded == sizes else self._padding.cut(wider, outputs, sizes))
        if not self._has_captured_aliases(args):
            return self._fall_back(_ALIASED, args, self.gm.forward)
        try:
            aligned = self._aligned(args)
        except errors.Misaligned as error:
            return self._fall_back(Fallback(str(error), error), args, self.gm.forward)
        with torch.no_grad() if torch.is_grad_enabled() else _NOTHING:
            return self._hand_out(bound, sizes, args, self._issue(bound, aligned))

    def _replayed(self, args: Sequence[Any]) -> Any:
        """A call like one that was replayed before: nothing but what must happen anew. None where it is not."""
        if is_serialised() or is_profiling():
            return None
        bound = self._steady.get(self.read_sizes(args) if self._order else ())
        outputs = self._recordings.replay(bound, args) if bound is not None and self._recordings is not None else None
        if outputs is None or bound is None:
            return None
        self.settings.count_planned(bound.num_launches, bound.num_part_launches, num_calls=1)
        if self.changed:
            torch._C._increment_version([args[i] for i in self.changed])  # see _hand_out
        assert self._plain_outputs is not None
        results = outputs if self._is_in_order else [outputs[i] for i in self._plain_outputs]
        if (call := ongoing.get()) is not None:
            call.num_graphs += 1
            self._tell(call, results)
        return results

    def _tell(self, call: Ongoing, results: Sequence[Any]) -> None:
        """A later graph of the same call may take these as inputs, and be captured: it must know where the batch is."""
        for output, axis in zip(results, self._output_axes):
            if isinstance(output, torch.Tensor):
                call.add(output, -1 if axis is None else axis)

    def _at(self, sizes: tuple[Any, ...], tags: Mapping[str, Any], args: Sequence[Any]) -> Bound | None:
        """The plan for sizes that a call is padded to; None where they cannot be planned."""
        ready = self._known(sizes, tags) or self._prepare(sizes, tags, args)
        if isinstance(ready, Fallback):
            self._note(ready)
            return ready.bound
        return ready

    def _body(self, bound: Bound) -> PlanBody:
        if bound not in self._bodies:
            flow, built, device = self.flow, self.built, self.device
            weights = [i for i, name in self._names if flow.value[name].role == "param"] if self.settings.fixed_weights else []
            self._bodies[bound] = PlanBody(
                bound, self._names, self.changed, device, lambda op: why_between(flow.op(op), built, device), weights)
        return self._bodies[bound]

    def slots(self, args: Sequence[Any], sizes: tuple[Any, ...]) -> dict[int, tuple[int, int] | None]:
        """Arguments that a recording for these sizes copies, and with how many rows."""
        return {} if self._recordings is None else self._padding.slots(self, args, sizes)

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
            replay = self._recordings.trial(aligned, self._body(bound))
            if replay is not None:
                return replay, True
        return lambda: self._issue(bound, aligned), False

    def read_sizes(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """The values of the flow's symbols in this call."""
        return tuple([args[i] if d is None else args[i].item() if d == ITEM else args[i].shape[d] for i, d in self._order])

    def _key(self, sizes: tuple[Any, ...], tags: Mapping[str, Any]) -> Any:
        if not self._tags_read:
            return sizes
        if ALL in self._tags_read:
            return (sizes, *sorted(tags.items()))
        return (sizes, *[tags.get(name) for name in self._tags_read])

    def _prepare(self, sizes: tuple[Any, ...], tags: Mapping[str, Any], args: Sequence[Any]) -> Bound | Fallback:
        """What runs for sizes and tags that are seen for the first time."""
        with self.settings.lock:
            bound = self._known(sizes, tags)
            if bound is None:
                try:
                    bound = self._bind(sizes, tags, args)
                except errors.DynaFlowError as error:
                    # what a rank runs that did not plan with this one, nobody knows: any collective may be the wrong one
                    if self.settings.strict or isinstance(error, errors.RankMissing):
                        raise
                    is_plannable = not isinstance(error, (errors.AmbiguousBatch, Unplannable))
                    bound = Fallback(str(error), error, bound=self._as_one(sizes) if is_plannable else None)
                except Exception as error:
                    if self.settings.strict:
                        raise
                    bound = self._our_bug("planned", error)
                self._keep(self._key(sizes, tags), bound)
            return bound

    def _keep(self, key: Any, bound: Bound | Fallback) -> None:
        if len(self._bound) >= MAX_BOUND:
            oldest = next(iter(self._bound))
            self._forget(self._bound.pop(oldest))
            self._steady.pop(oldest, None)
            self._unmeasured.discard(oldest)
        if key in self._bound:
            self._forget(self._bound[key])  # it was measured since, and is not the fastest
        self._bound[key] = bound

    def _forget(self, bound: Bound | Fallback) -> None:
        if self._recordings is not None and isinstance(bound, Bound):
            self._recordings.forget(bound)

    def _known(self, sizes: tuple[Any, ...], tags: Mapping[str, Any]) -> Bound | Fallback | None:
        """What runs for sizes and tags that were seen before; None where that is to be measured first."""
        key = self._key(sizes, tags)
        return None if self._unmeasured and key in self._unmeasured and is_measuring(self.device) else self._bound.get(key)

    def _bind(self, sizes: tuple[int, ...], tags: Mapping[str, Any], args: Sequence[Any]) -> Bound | Fallback:
        batch_sizes = {sizes[i] for i in self._batch_at}
        if len(batch_sizes) > 1:
            raise errors.AmbiguousBatch(
                f"the batch has several sizes in one call: {sorted(batch_sizes)}.", why="inputs that were one batch at capture differ now",
                fix="pass batch={argument: dim} to df.compile")  # fmt: skip
        numbers = dict(zip(self.flow.symbols, sizes))
        if batch_sizes == {1} and any(copied.is_view(numbers) for copied in self.built.loose_copies):
            raise Unplannable("the batch has one row, and a copy of it is changed in place.", why="of one row, torch makes a view instead")
        facts = self.call_facts(args, next(iter(batch_sizes), self.fixed_batch or 1), tags)
        if (planned := self.planning.known(facts)) is None:
            planned = self.planning.plan_with_all_ranks(facts, numbers)
            looks = [look for p in (planned, *planned.rivals) for look in p.looks]
            read = [look.name.removeprefix("tag.") for look in looks if look.name.startswith("tag.")]
            self._tags_read = tuple(dict.fromkeys((*self._tags_read, *read)))
            if read:
                self._steady.clear()
        bounds = self._bounds(planned, numbers)
        if not bounds:
            is_wanted, why = isinstance(self.settings.strategy, Sequential), planned.why(bool(batch_sizes or self.fixed_batch))
            return Fallback(why, None, is_wanted, bound=self._as_one(sizes))
        bound, key = bounds[0], self._key(sizes, tags)
        self._unmeasured.discard(key)
        # what is padded runs under the plan of the size that it is padded to
        is_padded = self._recordings is not None and self._padding.sizes(sizes) != sizes
        outcome = contest(self, bounds, self._as_one(sizes), sizes, args) if self.settings.never_slower and not is_padded else None
        if outcome is LATER:
            self._unmeasured.add(key)
        elif outcome is not None:
            log.info("%s: plans for sizes %s were measured: %s", self.settings.name, sizes, outcome)
            if outcome.winner is None:
                return Fallback(f"no plan is faster than the sequential one: {outcome}", is_choice=True, bound=self._as_one(sizes))
            bound = bounds[outcome.winner]
        self.settings.count(binds=1)
        self.settings.note_peak(bound.peak_bytes)
        return bound

    def _bounds(self, planned: Planned, sizes: Mapping[str, Any]) -> list[Bound]:
        """The plan for these sizes, then its rivals, as far as they can be had."""
        found: list[Bound] = []
        for each in (planned, *planned.rivals):
            if each.binder is None:
                continue
            try:
                bound = each.binder.bind(sizes)
                verify_memory(self.flow, bound.plan, bound.memory)
            except errors.DynaFlowError as error:
                if each is planned:
                    raise
                log.info("%s: an option of its strategy is left out: %s", self.settings.name, error)
            else:
                found.append(bound)
        return found

    def call_facts(self, args: Sequence[Any], batch_size: int, tags: Mapping[str, Any]) -> dict[str, Any]:
        """What a strategy may look at."""
        facts: dict[str, Any] = {"batch_size": batch_size, "device": str(self.device), "needs_grad": False}
        for i, name in self._names:
            if self.flow.value[name].role == "input":
                facts[f"shape.{name}"] = tuple(int(d) for d in args[i].shape)
                facts[f"dtype.{name}"] = str(args[i].dtype).removeprefix("torch.")
        facts.update((f"tag.{name}", value) for name, value in tags.items())
        for group in ("shape.", "dtype.", "tag."):
            facts[group + ALL] = tuple(sorted(name for name in facts if name.startswith(group)))
        return facts

    def _serial_bound(self, bound: Bound, sizes: tuple[Any, ...]) -> Bound:
        with self.settings.lock:
            plan, binder = self._serial.get(id(bound.plan), (None, None))
            if plan is not bound.plan or binder is None:
                binder = Binder(bound.plan.serialised(), bound.program)
                self._serial[id(bound.plan)] = (bound.plan, binder)
            return binder.bind(dict(zip(self.flow.symbols, sizes)), cuts=bound.cuts)

    def _moved(self, bound: Bound, sizes: tuple[Any, ...]) -> Bound:
        """The same plan, cut where this call may be cut."""
        cuts, align = bound.cuts, self.settings.align
        if align is None or not cuts:
            return bound
        moved = tuple(align(cuts))
        if len(moved) != len(cuts) or any(a > b for a, b in zip((0, *moved), (*moved, bound.batch_size))):
            raise errors.OptionError(
                f"align moved the cuts at rows {list(cuts)} to {list(moved)}.", why=f"the batch has {bound.batch_size} rows",
                fix="return as many rows, in order")  # fmt: skip
        if moved == cuts:
            return bound
        with self.settings.lock:
            there = self._bound.get((bound, moved))
            if there is None:
                binder = next(p.binder for p in self.planning.plans if p.binder is not None and p.plan is bound.plan)
                there = binder.bind(bound.sizes, bound.memory, moved)
                self._keep((bound, moved), there)
                self.settings.count(binds=1)
            assert isinstance(there, Bound)
            return there

    def _op_by_op(self, sizes: tuple[int, ...]) -> Bound:
        """The sequential plan op by op, for `df.profile()`: the graph as a whole has no launches to show."""
        plan = finish_plan(self.flow, sequential_plan(self.flow, "profiled"))
        return Binder(plan, self.built.program).bind(dict(zip(self.flow.symbols, sizes)))

    def _as_one(self, sizes: tuple[int, ...]) -> Bound | None:
        """The sequential plan in as few launches as it takes, where that is better than the graph as it was captured."""
        if self.compiler is None and self._recordings is None:
            return None
        numbers = dict(zip(self.flow.symbols, sizes))
        if self._sequential_binder is None:
            self._sequential_binder = self.planning.finish(sequential_plan(self.flow, "sequential"), {}, numbers)
        return self._sequential_binder.bind(numbers)

    # -- 3. runs

    def _hand_out(self, bound: Bound, sizes: tuple[Any, ...], args: Sequence[Any], outputs: Sequence[torch.Tensor]) -> Any:
        """The graph's outputs from the plan's: views of them, and of inputs, as the graph has them."""
        self.settings.count_planned(bound.num_launches, bound.num_part_launches)
        if self.changed:
            # compiled code and recordings change tensors behind autograd's back; what was saved for a backward must be seen to be stale
            torch.autograd.graph.increment_version([args[i] for i in self.changed])
        if self._plain_outputs is not None:
            return [outputs[i] for i in self._plain_outputs]
        values = {name: args[i] for i, name in self._names}
        values.update(zip(self._output_names, outputs))
        numbers = dict(zip(self.flow.symbols, sizes))
        epilogue = self.built.epilogue
        with torch.no_grad() if torch.is_grad_enabled() else _NOTHING:
            return self._epilogue(*[values[a] if isinstance(a, str) else evaluate(a.text, numbers) for a in epilogue.args])

    def _issue(self, bound: Bound, args: Sequence[Any]) -> Sequence[torch.Tensor]:
        values = {name: args[i] for i, name in self._names}
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

    def _is_bound_aligned(self, args: Sequence[Any]) -> bool:
        """Whether what a recording would bind by address may be read by compiled code where it lies."""
        if self.compiler is None or self.device.type != "cuda":
            return True
        copied = self._padding.slots(self, args, self.read_sizes(args))
        return not any(args[i].data_ptr() % ALIGNMENT for i, _ in self._names if i not in copied)

    def _aligned(self, args: Sequence[Any]) -> Sequence[Any]:
        """Compiled code assumes that its inputs are aligned. Views of the caller's may not be."""
        if self.compiler is None or self.device.type != "cuda":
            return args
        odd = [i for i, _ in self._names if args[i].data_ptr() % ALIGNMENT]
        if not odd:
            return args
        changed = [self.flow.value[name].name for i, name in self._names if i in odd and self.flow.value[name].storage in self._mutated]
        if changed:
            raise errors.Misaligned(
                f"{', '.join(changed)} is changed in place, and does not start at a multiple of {ALIGNMENT} bytes.",
                why="compiled kernels read and write 16 bytes at a time",
                fix="pass a tensor that is no slice of another, or compiler='eager'")  # fmt: skip
        return [a.clone() if i in odd else a for i, a in enumerate(args)]

    def _part_contexts(self, bound: Bound) -> list[Any]:
        function = self.settings.part_context
        return [] if function is None else part_contexts(function, [Rows(*row) for row in bound.rows])

    def _has_captured_aliases(self, args: Sequence[Any]) -> bool:
        """No input that the graph changes shares its storage with another one, unless it did so at capture."""
        if not self._mutated:
            return True
        owner: dict[int, str] = {}
        for i, mine in self._inputs:
            if pointer := args[i].untyped_storage().data_ptr():
                other = owner.setdefault(pointer, mine)
                if other != mine and (mine in self._mutated or other in self._mutated):
                    return False
        return True

    # -- 4. fall back

    def _fall_back(self, why: Fallback, args: Sequence[Any], whole: Callable[..., Any] | None = None) -> Any:
        self._note(why)
        return (whole or self._whole)(*args)

    def _note(self, why: Fallback) -> None:
        """Say it once, count it; raise it when strict."""
        if why.is_wanted or (isinstance(self.settings.strategy, Sequential) and self._recordings is None):
            return  # nothing was asked for that is not done
        if self.settings.strict and not why.is_choice:
            raise why.error or errors.FellBack(
                f"{self.settings.name} would fall back to the sequential graph: {why.reason}.",
                fix="strict=False runs the sequential graph instead, and counts it")  # fmt: skip
        if self.settings.count_fallback(why.reason):
            log.warning("%s falls back to the sequential graph: %s", self.settings.name, why.reason)
