"""`df.explain`: what a strategy would do with a model, before anything of it runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Mapping, Sequence

import torch
from torch.utils import _pytree as pytree

from dynaflow.capture import Compiled
from dynaflow.context import current_tags
from dynaflow.engine import CapturedGraph
from dynaflow.errors import OptionError
from dynaflow.explain_kernels import InspectedRegions
from dynaflow.ir import Flow, Plan, evaluate
from dynaflow.memory import bind_memory
from dynaflow.ongoing import ongoing
from dynaflow.planned import finish_plan
from dynaflow.planner import sequential_plan
from dynaflow.runtime import generated
from dynaflow.runtime.program import Bound, Copy
from dynaflow.settings import read_settings
from dynaflow.strategies import Sequential
from dynaflow.verify import counted, verify


@dataclass(frozen=True)
class Explained:
    """One captured graph."""

    flow: Flow
    plan: Plan
    verdict: str
    arena_bytes: int
    sequential_bytes: int
    # who compiles: "eager", "inductor"; and why nobody does, where Inductor was to
    compiler: str = "eager"
    why_eager: str = ""
    # bytes moved on behalf of splitting and merging
    copies: tuple[Copy, ...] = ()
    # ops and units that Inductor does not compile, and why
    eager: tuple[tuple[str, str], ...] = ()
    # values that stay in the memory in which their ops returned them, with their bytes
    loose: tuple[tuple[str, int], ...] = ()
    # arena, outputs, and the most that units allocate beside; None where the graph runs as a whole
    peak_bytes: int | None = None
    # where the plan's generated code is
    path: str = ""
    # what a recording cannot hold, and why; and which sizes share one. None: nothing is recorded
    unrecorded: tuple[tuple[str, str], ...] = ()
    padding: str | None = None
    # ops whose CUDA kernels add in no fixed order, with the aten op that does
    unrepeatable: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        lines = [*self._partition(), "", *self._plan(), "", *self._units(), *self._memory(), *self._recording()]
        lines.append(f"verify     {self.verdict}")
        lines.extend(f"           {op}: on CUDA, {call} adds in no fixed order: its bits may vary" for op, call in self.unrepeatable)
        return "\n".join(lines)

    def _partition(self) -> list[str]:
        flow = self.flow
        batch = f"batch {' = '.join(flow.batch)}" if flow.batch else "no batch axis"
        lines = [f"flow {flow.label}: {len(flow.ops)} ops, {batch}"]
        width = max((len(op.name) for op in flow.ops), default=0)
        for op in flow.ops:
            values = [v for v in op.reads if flow.value[v].role != "param"]
            num_params = len(op.reads) - len(values)
            reads = ", ".join([*values, *([f"{num_params} params"] if num_params else [])]) or "-"
            line = f"  {op.name:<{width}}  {op.kind:<8} reads {reads} | writes {', '.join(op.writes) or '-'}"
            if op.mutates:
                line += f" | mutates {', '.join(op.mutates)}"
            if op.uses:
                line += f" | uses {', '.join(op.uses)}"
            lines.append(line)
        whole = [op for op in flow.ops if op.unsplittable]
        lines.append(f"  {len(flow.ops) - len(whole)} ops can be split; {len(whole)} run over the whole batch" + (":" if whole else ""))
        lines.extend(f"    {op.name:<{width}}  {op.unsplittable}" for op in whole)
        return lines

    def _plan(self) -> list[str]:
        plan = self.plan
        held = ((len(plan.launches), "launch", "es"), (len(plan.streams), "stream", "s"), (len(plan.waits), "wait", "s"))
        head = f"plan       {', '.join(counted(*each) for each in held)}"
        if plan.context:
            head += f", where {' and '.join(plan.context)}"
        if plan.reason:
            return [f"plan       sequential: {plan.reason}"]
        rows = [f"rows       {i}/{len(plan.rows)} has {'the rest' if n == '-1' else n}" for i, n in enumerate(plan.rows)]
        return [head, *rows, plan.grid().rstrip()]

    def _units(self) -> list[str]:
        if self.compiler == "eager":
            lines = ["compiler   eager: ops run as they are" + (f": {self.why_eager}" if self.why_eager else "")]
        elif self.peak_bytes is None:
            lines = ["compiler   inductor: the graph as a whole, as torch.compile would"]
        else:
            lines = [f"compiler   inductor: {len(self.plan.launches)} launches" + (", but eagerly:" if self.eager else "")]
            lines.extend(f"           {name}: {why}" for name, why in self.eager)
        if self.path:
            lines.append(f"code       {self.path}")
        return lines

    def _memory(self) -> list[str]:
        ratio = f" ({self.arena_bytes / self.sequential_bytes:.2f}x)" if self.sequential_bytes else ""
        op_by_op = "" if self.compiler == "eager" else " op by op"
        lines = [f"place      arena {_bytes(self.arena_bytes)}, sequential{op_by_op} {_bytes(self.sequential_bytes)}{ratio}"]
        if self.peak_bytes is not None:
            lines.append(f"           peak {_bytes(self.peak_bytes)}: arena, outputs, and the most that launches allocate while they run;"
                         " without workspaces of libraries and what eager ops allocate inside")  # fmt: skip
        if self.loose:
            names = _few([f"{name} {_bytes(n)}" for name, n in self.loose])
            lines.append(f"           {_bytes(sum(n for _, n in self.loose))} stay where their ops made them: {names}")
        reasons: dict[str, list[Copy]] = {}
        for copy in self.copies:
            reasons.setdefault(copy.reason, []).append(copy)
        for reason, copies in reasons.items():
            names = _few([f"{c.value} of {c.launch} {_bytes(c.nbytes)}" for c in copies])
            lines.append(f"copied     {_bytes(sum(c.nbytes for c in copies))}: {reason}: {names}")
        return lines

    def _recording(self) -> list[str]:
        if self.padding is None:
            return []
        return [f"record     {self.padding}", *(f"           not recorded: {name}: {why}" for name, why in self.unrecorded)]


def _few(items: Sequence[str], most: int = 4) -> str:
    return ", ".join([*items[:most], *([f"{len(items) - most} more"] if len(items) > most else [])])


@dataclass(frozen=True)
class Explanation:
    """What `df.explain` returns: print it. `flow` and `plan` are the first graph's."""

    graphs: tuple[Any, ...]  # Explained, or ExplainedKernels

    @property
    def flow(self) -> Flow:
        flow: Flow = self.graphs[0].flow
        return flow

    @property
    def plan(self) -> Plan:
        plan: Plan = self.graphs[0].plan
        return plan

    def __str__(self) -> str:
        breaks = f"{len(self.graphs)} graphs (the model breaks the graph {len(self.graphs) - 1} times)\n" if len(self.graphs) > 1 else ""
        return breaks + "\n\n".join(map(str, self.graphs))


# aten ops whose CUDA kernels use atomic additions on floats, or (cuDNN's attention, seen on an H200) do not repeat for other reasons
_ATOMIC = (
    "aten.index_add", "aten.scatter_add", "aten.scatter_reduce", "aten.index_put", "aten.histc", "aten.bincount", "aten.put_",
    "aten._scaled_dot_product_cudnn_attention",
)  # fmt: skip


def _bytes(n: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.2f} GiB"


class InspectedGraph(CapturedGraph):
    """Plans on every call, raising a strategy's mistakes; computes with the sequential graph and undoes what that changed."""

    inspects = True

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._ensure_analysed()
        self.settings.graphs.append(self)
        self.explained: list[Explained] = []
        # what the strategy's plan puts in the place of ops
        self.functions: Mapping[str, Any] = {}

    def __call__(self, *args: Any) -> Any:
        self.settings.count_call()
        if (call := ongoing.get()) is not None:
            call.num_graphs += 1
        if self.refusal is not None:
            raise self.refusal.error or AssertionError(self.refusal.reason)
        self.inspect(args, self.boundary.numbers(self.boundary.read_sizes(args)))
        changed = [args[i] for i in self.boundary.changed]
        before = [t.clone() for t in changed]
        with torch.no_grad():
            result = self.gm(*args)
            for tensor, old in zip(changed, before):
                tensor.copy_(old)
        return result

    def inspect(self, args: Sequence[Any], sizes: Mapping[str, int]) -> None:
        batch_size = sizes[self.flow.batch[0]] if self.flow.batch else self.fixed_batch or 1
        facts = self.boundary.facts(args, batch_size, self.device, current_tags())
        planned = self.planning.plan(facts, sizes)
        planned.raise_error()
        self.functions = planned.binder.program.functions if planned.binder is not None else {}
        reference = finish_plan(self.flow, sequential_plan(self.flow, "reference"))
        bound = planned.bind(sizes, facts)
        flow = self.flow if bound is None else bound.program.flow
        is_whole = isinstance(self.settings.strategy, Sequential) and self.settings.runtime != "graph"
        if bound is None and not is_whole:
            bound = self.bindings.as_one(tuple(sizes[s] for s in self.flow.symbols))
        plan = finish_plan(self.flow, planned.plan) if bound is None else replace(bound.plan, reason=planned.plan.reason)
        self.explained.append(Explained(
            flow, plan, str(verify(plan, flow)), bind_memory(flow, plan, sizes).arena_bytes,
            bind_memory(self.flow, reference, sizes).arena_bytes, "eager" if self.compiler is None else "inductor", self.why_eager,
            unrepeatable=tuple((op, call) for op, calls in self.built.calls.items() for call in calls if call.startswith(_ATOMIC)),
            **({} if bound is None else self._bound_facts(bound)),
        ))  # fmt: skip

    def _bound_facts(self, bound: Bound) -> dict[str, Any]:
        """What only sizes tell."""
        plan, facts = bound.plan, dict[str, Any]()
        eager: frozenset[int] = frozenset()
        if self.padding is not None:
            body = self.body_of(bound)
            eager, labels = body.eager, [call.label for call in bound.calls]
            facts.update(padding=str(self.padding), unrecorded=tuple((labels[n], why) for n, why in body.reasons.items()))
        loose = tuple((name, evaluate(self.flow.value[name].nbytes, bound.sizes)) for name in plan.loose)
        return {
            "copies": tuple(bound.copies), "eager": tuple(self.compiler.eager.items()) if self.compiler is not None else (),
            "loose": loose, "peak_bytes": bound.peak_bytes, "path": generated.code_of(bound, eager).path, **facts,
        }  # fmt: skip


def inspected(model: Any, inputs: tuple[tuple[Any, ...], dict[str, Any]], graph: type[CapturedGraph], **options: Any) -> list[Any]:
    """Call `model` once with every captured graph made by `graph`; the graphs in order of capture."""
    if not callable(model):
        raise OptionError(f"{model!r} cannot be called.", fix="give a module or a function, then its inputs: df.explain(model, inputs)")
    name = type(model).__name__ if isinstance(model, torch.nn.Module) else getattr(model, "__name__", "function")
    settings = read_settings(name=name, strict=graph is not InspectedRegions, **options)
    args, kwargs = inputs
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        Compiled(model, settings, graph)(*args, **kwargs)
    return settings.graphs


def read_inputs(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """One argument, a tuple of arguments, or a mapping of keyword arguments."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, (tuple, list)) else ((inputs,), {})


def _device_of(model: Any, given: tuple[tuple[Any, ...], dict[str, Any]]) -> torch.device:
    """CUDA, if anything that the call touches is there."""
    leaves = [*pytree.tree_leaves(given), *(model.parameters() if isinstance(model, torch.nn.Module) else ())]
    devices = [leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return next((d for d in devices if d.type == "cuda"), torch.device("cpu"))


def explain(
    model: Any, inputs: Any, strategy: Any = "auto", *, partition: Any = "auto", batch: int | Mapping[str, int] | None = None,
    compiler: str = "auto", mode: str = "default", runtime: str = "auto", buckets: str | Sequence[int] | None = None,
) -> Explanation:  # fmt: skip
    """The partition, what each op reads, writes and mutates, what cannot be split and why, the plan, its waits, its memory against
    the sequential plan's, what is copied, what is not compiled or not recorded and why, and the verifier's verdict. Mistakes of the
    strategy are raised. The model's Python code runs once, on the given inputs; tensors that it changes (inputs, parameters, buffers)
    and the random state are put back.

    Where ops are the kernels that Inductor makes (partition="kernels", or nothing asked for) it says per region what was chosen and why,
    with the times that were measured; the model is called twice for that.

    `inputs` is one argument, a tuple of arguments, or a dict of keyword arguments. `compiler`, `mode`, `runtime` and `buckets` are
    df.compile's: what Inductor compiles is compiled for this, and kept for df.compile.
    """
    options = {"strategy": strategy, "partition": partition, "batch": batch, "compiler": compiler, "mode": mode, "runtime": runtime,
               "buckets": buckets}  # fmt: skip
    given = read_inputs(inputs)
    has_kernels = read_settings(**options).has_kernels(_device_of(model, given))
    graphs = inspected(model, given, InspectedRegions if has_kernels else InspectedGraph, **options)
    return Explanation(tuple(e for g in graphs for e in g.explained))
