"""A captured graph under plans: plan once per context, bind once per sizes, run on every call.

1. `CapturedGraph(...)` analyses and partitions the graph, at capture.
2. A call looks up its sizes and tags. Known: the bound plan runs. New sizes: a plan whose looks hold is bound to them. Else the
   strategy runs, and its plan is synchronised, placed and verified before anything is launched.
3. Whatever cannot be planned runs as the sequential graph: said once in the log, counted, raised instead when strict.
"""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Iterator, Mapping, NamedTuple, Sequence

import torch
from torch import fx

from dynaflow import errors
from dynaflow.batching import Facts, analyse
from dynaflow.context import ALL, Context, Look, current_tags
from dynaflow.ir import Flow, Part, Plan, evaluate
from dynaflow.memory import place
from dynaflow.ongoing import ongoing
from dynaflow.partition import partition
from dynaflow.planner import run_strategy, sequential_plan
from dynaflow.replacement import check_replacement
from dynaflow.runtime import cuda, fake, graphs, threads
from dynaflow.runtime.lanes import Run, is_profiling
from dynaflow.runtime.program import Binder, Bound, Program
from dynaflow.runtime.ranks import agree
from dynaflow.runtime.sm_shares import check_shares
from dynaflow.settings import Settings
from dynaflow.sources import ITEM, Sources, Unplannable
from dynaflow.strategies import Sequential
from dynaflow.sync import synchronise
from dynaflow.units import Built, build
from dynaflow.verify import verify, verify_memory

log = logging.getLogger("dynaflow")

# bound plans that are kept per graph; the oldest goes first
MAX_BOUND = 1024

_NOTHING = nullcontext()
_serialised: ContextVar[bool] = ContextVar("dynaflow_serialised", default=False)


@contextmanager
def serialised() -> Iterator[None]:
    """Calls inside run the same plans on one stream."""
    token = _serialised.set(True)
    try:
        yield
    finally:
        _serialised.reset(token)


class Rows(NamedTuple):
    """A part as a `part_context` function sees it: which rows of this call's batch."""

    part: Part
    start: int
    stop: int


@dataclass(frozen=True)
class Planned:
    """A strategy's plan for one context. `binder` is None when the strategy gave up."""

    plan: Plan
    looks: tuple[Look, ...]
    binder: Binder | None

    def holds(self, facts: Mapping[str, Any]) -> bool:
        return all(look.holds(facts) for look in self.looks)


@dataclass(frozen=True)
class Fallback:
    """Why a context runs the sequential graph."""

    reason: str
    error: errors.DynaFlowError | None = None
    # the strategy is Sequential: nothing was given up
    is_wanted: bool = False


def finish_plan(flow: Flow, plan: Plan) -> Plan:
    """synchronise, place, verify: what stands between a strategy's launches and a plan that may run."""
    plan = place(flow, synchronise(flow, plan))
    verify(plan, flow)
    return plan


class CapturedGraph:
    """One graph that Dynamo captured. Callable with the graph's inputs."""

    def __init__(
        self, gm: fx.GraphModule, inputs: Sequence[Any], axes: Mapping[str, int], symbols: set[Any], fixed: int | None, settings: Settings
    ):
        self.gm, self.settings = gm, settings
        # the batch size, where Dynamo made it a constant
        self.fixed_batch = fixed
        self.refusal: Fallback | None = None
        self.is_empty = not any(n.op.startswith("call_") for n in gm.graph.nodes)
        # `with torch.enable_grad()` inside the model
        self._enables_grad = any(n.target is torch._C._set_grad_enabled and n.args[0] for n in gm.graph.nodes)
        self._recordings: graphs.Recordings | None = None
        # tags that a plan looked at: others do not tell contexts apart
        self._tags_read: tuple[str, ...] = ()
        self.plans: list[Planned] = []
        self._bound: dict[Any, Bound | Fallback] = {}
        # id of a plan (plans live as long as this) -> the binder of its serialised twin
        self._serial: dict[int, Binder] = {}
        try:
            self._analyse(inputs, axes, symbols)
        except errors.DynaFlowError as error:
            # the sequential graph is what Sequential asks for, whether a plan could be made or not
            is_wanted = isinstance(error, Unplannable) and isinstance(settings.strategy, Sequential)
            self.refusal = Fallback(str(error), error, is_wanted)
        except Exception as error:
            self.refusal = self._our_bug("analysed", error)
        settings.count(captures=1)

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
        self.device = next((d for d in sorted(devices, key=str) if d.type == "cuda"), torch.device("cpu"))
        if self.settings.runtime == "graph":
            record = graphs.record_cuda if self.device.type == "cuda" else graphs.record_nothing
            self._recordings = graphs.Recordings(self.settings.name, record)
        if self.fixed_batch is not None and not isinstance(self.settings.strategy, Sequential):
            log.warning("%s: Dynamo fixed the batch size at %d, because the model's code asks for it (TORCH_LOGS=dynamic says where); "
                        "nothing of this graph can be split", self.settings.name, self.fixed_batch)  # fmt: skip
        num_whole = sum(bool(op.unsplittable) for op in flow.ops)
        self.settings.stats.num_ops, self.settings.stats.num_unsplittable = len(flow.ops), num_whole
        log.info("captured %s: %d nodes, %d ops (%d only over the whole batch) in %.0f ms", flow.label, len(self.gm.graph.nodes),
                 len(flow.ops), num_whole, (time.perf_counter() - began) * 1e3)  # fmt: skip

    # -- 2. calls

    def __call__(self, *args: Any) -> Any:
        result = self._call(*args)
        call = ongoing.get()
        if call is not None:
            call.num_graphs += 1
        if call is not None and self.refusal is None:
            # A later graph of the same call may take these as inputs, and be captured: it must know where the batch is.
            for output, axis in zip(result, self._output_axes):
                if isinstance(output, torch.Tensor):
                    call.add(output, -1 if axis is None else axis)
        return result

    def _call(self, *args: Any) -> Any:
        self.settings.count_call()
        if self.is_empty:
            return self.gm.forward(*args)  # the model returned what it was given: there is nothing to plan
        is_grad = torch.is_grad_enabled() or self._enables_grad
        if is_grad and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
            return self._fall_back(Fallback("gradients are needed: the sequential graph runs under autograd"), args)
        if self.refusal is not None:
            return self._fall_back(self.refusal, args)
        sizes = self.read_sizes(args)
        tags = current_tags()
        bound = self._bound.get(self._key(sizes, tags))
        if bound is None:
            bound = self._prepare(sizes, tags, args)
        if isinstance(bound, Fallback):
            if not is_profiling() or bound.error is not None:
                return self._fall_back(bound, args)
            self._note(bound)
            bound = self._sequential(sizes)
        elif self._mutated and not self._aliases_as_captured(args):
            return self._fall_back(Fallback("inputs share memory that were separate when the graph was captured"), args)
        elif _serialised.get():
            bound = self._serial_bound(bound, sizes)
        return self._run(bound, args)

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
            bound = self._bound.get(self._key(sizes, tags))
            if bound is None:
                try:
                    bound = self._bind(sizes, tags, args)
                except errors.DynaFlowError as error:
                    if self.settings.strict:
                        raise
                    bound = Fallback(str(error), error)
                except Exception as error:
                    if self.settings.strict:
                        raise
                    bound = self._our_bug("planned", error)
                if len(self._bound) >= MAX_BOUND:
                    self._bound.pop(next(iter(self._bound)))
                self._bound[self._key(sizes, tags)] = bound
            return bound

    def _bind(self, sizes: tuple[int, ...], tags: Mapping[str, Any], args: Sequence[Any]) -> Bound | Fallback:
        batch_sizes = {sizes[i] for i in self._batch_at}
        if len(batch_sizes) > 1:
            raise errors.AmbiguousBatch(
                f"the batch has several sizes in one call: {sorted(batch_sizes)}.", why="inputs that were one batch at capture differ now",
                fix="pass batch={argument: dim} to df.compile")  # fmt: skip
        if batch_sizes == {1} and self.built.may_alias:
            raise Unplannable("the batch has one row, and a copy of it is changed in place.", why="of one row, torch makes a view instead")
        facts = self.call_facts(args, next(iter(batch_sizes), self.fixed_batch or 1), tags)
        planned = next((p for p in self.plans if p.holds(facts)), None)
        if planned is None:
            planned = self._plan_with_all_ranks(facts)
            self.plans.append(planned)
            read = [look.name.removeprefix("tag.") for look in planned.looks if look.name.startswith("tag.")]
            self._tags_read = tuple(dict.fromkeys((*self._tags_read, *read)))
        if planned.binder is None:
            return Fallback(planned.plan.reason, is_wanted=isinstance(self.settings.strategy, Sequential))
        bound = planned.binder.bind(dict(zip(self.flow.symbols, sizes)))
        verify_memory(self.flow, planned.plan, bound.memory)
        self.settings.count(binds=1)
        return bound

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

    def plan(self, facts: Mapping[str, Any]) -> Planned:
        """Run the strategy in this context; synchronise, place and verify what it did."""
        began = time.perf_counter()
        context = Context(facts)
        planner = run_strategy(
            self.flow, self.settings.strategy, context,
            check_replacement=lambda function, calls, where: check_replacement(self.flow, self.built.fakes, function, calls, where),
        )  # fmt: skip
        plan = planner.finish()
        self.settings.count(plans=1)
        if plan.reason:
            return Planned(plan, context.looks, None)
        plan = finish_plan(self.flow, plan)
        check_shares(plan.streams, self.device)
        program = self.built.program
        binder = Binder(plan, Program(program.flow, program.units, program.layouts, planner.functions))
        log.info("planned %s: %d launches on %d streams in %.1f ms | %d waits | %d slots | verified", self.flow.label, len(plan.launches),
                 len(plan.streams), (time.perf_counter() - began) * 1e3, len(plan.waits), len({s for _, s in plan.slots}))  # fmt: skip
        return Planned(plan, context.looks, binder)

    def _plan_with_all_ranks(self, facts: Mapping[str, Any]) -> Planned:
        """Every rank says what it would do, a rank without a plan too: all run plans, or all run the sequential graph."""
        try:
            planned = self.plan(facts)
        except errors.DynaFlowError:
            with suppress(errors.RankMismatch):  # the others are told; here the first error is the one to show
                agree(self.flow, sequential_plan(self.flow, "refused"))
            raise
        agree(self.flow, planned.plan)
        return planned

    def _serial_bound(self, bound: Bound, sizes: tuple[Any, ...]) -> Bound:
        with self.settings.lock:
            if id(bound.plan) not in self._serial:
                self._serial[id(bound.plan)] = Binder(bound.plan.serialised(), bound.program)
            return self._serial[id(bound.plan)].bind(dict(zip(self.flow.symbols, sizes)))

    def _sequential(self, sizes: tuple[int, ...]) -> Bound:
        """The sequential plan op by op, for `df.profile()`: the graph as a whole has no launches to show."""
        plan = finish_plan(self.flow, sequential_plan(self.flow, "profiled"))
        return Binder(plan, self.built.program).bind(dict(zip(self.flow.symbols, sizes)))

    def _run(self, bound: Bound, args: Sequence[Any]) -> Any:
        settings, built = self.settings, self.built
        values = {name: args[i] for i, name in self._names}
        outputs = None
        with torch.no_grad() if torch.is_grad_enabled() else _NOTHING:
            if self._recordings is not None and settings.part_context is None and not is_profiling():
                outputs = self._recordings.run(bound, values, self._issue)
            if outputs is None:
                tensors, outputs = bound.tensors(values, poison=settings.runtime.startswith("fake"))
                self._issue(bound, Run(bound, tensors, self._part_contexts(bound)))
            settings.count_planned(bound.num_launches, bound.num_part_launches)
            values.update(outputs)
            epilogue = built.epilogue
            return epilogue.fn(*[values[a] if isinstance(a, str) else evaluate(a.text, bound.sizes) for a in epilogue.args])

    def _issue(self, bound: Bound, run: Run) -> None:
        runtime, _, order = self.settings.runtime.partition(":")
        if runtime == "fake":
            fake.issue(bound, run, int(order) if order.isdigit() else order or "issue")
        elif runtime == "serial":
            fake.issue(bound, run)
        elif self.device.type == "cuda" and runtime != "threads":
            cuda.issue(bound, run, self.device)
        else:
            threads.issue(bound, run)

    def _part_contexts(self, bound: Bound) -> dict[Part, Any]:
        function = self.settings.part_context
        if function is None:
            return {}
        rows = [Rows(*row) for row in bound.rows]
        managers = list(function(rows)) if rows else []
        if len(managers) != len(rows):
            raise errors.OptionError(
                f"part_context returned {len(managers)} context managers for {len(rows)} parts.", fix="return one per part, in order")
        return {row.part: manager for row, manager in zip(rows, managers)}

    def _aliases_as_captured(self, args: Sequence[Any]) -> bool:
        """No input that the graph changes shares its storage with another one, unless it did so at capture."""
        owner: dict[int, str] = {}
        value = self.flow.value
        for i, name in self._names:
            if value[name].role == "input" and (pointer := args[i].untyped_storage().data_ptr()):
                mine = value[name].storage
                other = owner.setdefault(pointer, mine)
                if other != mine and (mine in self._mutated or other in self._mutated):
                    return False
        return True

    # -- 3. fall back

    def _fall_back(self, why: Fallback, args: Sequence[Any]) -> Any:
        self._note(why)
        return self.gm.forward(*args)

    def _note(self, why: Fallback) -> None:
        """Say it once, count it; raise it when strict."""
        if why.is_wanted:
            return
        if self.settings.strict:
            raise why.error or errors.FellBack(
                f"{self.settings.name} would fall back to the sequential graph: {why.reason}.",
                fix="strict=False runs the sequential graph instead, and counts it")  # fmt: skip
        if self.settings.count_fallback(why.reason):
            log.warning("%s falls back to the sequential graph: %s", self.settings.name, why.reason)
