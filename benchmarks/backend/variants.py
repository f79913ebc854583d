"""The variants of a case: plain torch.compile, the same in a CUDA Graph, and DynaFlow's plans."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

import dynaflow as df
from benchmarks import variants
from benchmarks.backend.models import Case
from benchmarks.cases import Call
from benchmarks.variants import NotAvailable, compiled, entry, graphed


def df_compile(module: Any, **options: Any) -> Any:
    """df.compile, or a clear refusal where the installed one is older than an option."""
    known = inspect.signature(df.compile).parameters
    missing = sorted(name for name in options if name not in known)
    if missing:
        raise NotAvailable(f"df.compile of this version has no {', '.join(f'{m}=' for m in missing)}")
    return df.compile(module, **options)


class Parts(df.Strategy):
    """n equal parts, one after the other, on the caller's stream: the price of splitting, nothing won back.

    caller | A0 B0 C0  A1 B1 C1  M  D0 E0  D1 E1      (M cannot be split: it runs once, merged)
    """

    def __init__(self, num_parts: int):
        self.num_parts = num_parts

    def schedule(self, flow: Any) -> None:
        flow.split(self.num_parts)
        at = {op.name: i for i, op in enumerate(flow.ops)}
        while ready := flow.get_ready_ops():
            # merged ops as soon as possible, but those that nobody waits for (a cache's length) at the end
            turn = {r: 1 if not r.part.is_whole else 0 if r.height else 2 for r in ready}
            flow.execute(min(ready, key=lambda r: (turn[r], r.part, at[r.name])), stream="caller")


class Interleaved(df.Strategy):
    """Two parts, layer by layer, changing sides: every layer waits for the other stream, so that the plan is cut per layer.

    left  | A0 B1 C0 D1 ...
    right | A1 B0 C1 D0 ...
    """

    def schedule(self, flow: Any) -> None:
        flow.split(2)
        at = {op.name: i for i, op in enumerate(flow.ops)}
        while ready := flow.get_ready_ops():
            r = min(ready, key=lambda r: (at[r.name], r.part))
            flow.execute(r, stream="caller" if r.part.is_whole else ("left", "right")[(at[r.name] + r.part.lo) % 2])


def do_nothing(gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    """A backend that runs the graph once and returns the same result ever after: what is left is Dynamo's own time."""
    kept: list[Any] = []

    def run(*args: Any) -> Any:
        if not kept:
            kept.append(gm(*args))
        return kept[0]

    return run


# -- one builder per variant: (case, options for every df.compile) -> a function of the step's number


def _guards(case: Case, _: Mapping[str, Any]) -> Call:
    fast = torch.compile(entry(case.module), backend=do_nothing)
    return lambda number: fast(**case.args(number))


def _dynaflow(**wanted: Any) -> Callable[[Case, Mapping[str, Any]], Call]:
    def build(case: Case, options: Mapping[str, Any]) -> Call:
        partition = case.row.partition if not isinstance(wanted["strategy"], str) else "auto"
        fast = df_compile(case.module, partition=partition, **{**options, **wanted})

        def call(number: int) -> Any:
            return fast(**case.args(number))

        call.fast = fast  # type: ignore[attr-defined]
        return call

    return build


COMPILE, COMPILE_GRAPH, REPLAY = "torch.compile", "torch.compile+graph", "torch.compile+graph, no input copies"
# a split plan serves all batch sizes from one capture, as this does
COMPILE_DYNAMIC = "torch.compile, dynamic"
GUARDS = "Dynamo's guards"
BARE = "Dynamo's guards, then torch.compile+graph"
OURS, OURS_GRAPH, OURS_BORROW = "dynaflow", "dynaflow graph", "dynaflow graph borrow"
OURS_FIXED = "dynaflow graph borrow, fixed weights"
SPLITS = {n: (f"split {n}", f"split {n} graph") for n in (2, 4)}
TWO_BATCH, TWO_BATCH_GRAPH = "TwoBatch", "TwoBatch graph"
EAGER_SPLIT = "split 2 eager ops"

BUILDERS: dict[str, Any] = {
    COMPILE: compiled(),
    COMPILE_DYNAMIC: compiled(dynamic=True),
    COMPILE_GRAPH: graphed(),
    GUARDS: _guards,
    OURS: _dynaflow(strategy="sequential"),
    OURS_GRAPH: _dynaflow(strategy="sequential", runtime="graph"),
    OURS_BORROW: _dynaflow(strategy="sequential", runtime="graph", borrow=True),
    OURS_FIXED: _dynaflow(strategy="sequential", runtime="graph", borrow=True, fixed_weights=True),
    TWO_BATCH: _dynaflow(strategy=df.TwoBatch()),
    TWO_BATCH_GRAPH: _dynaflow(strategy=df.TwoBatch(), runtime="graph", borrow=True),
    EAGER_SPLIT: _dynaflow(strategy=Parts(2), compiler="eager"),
    **{names[0]: _dynaflow(strategy=Parts(n)) for n, names in SPLITS.items()},
    **{names[1]: _dynaflow(strategy=Parts(n), runtime="graph", borrow=True) for n, names in SPLITS.items()},
}


class Variants(variants.Variants):
    builders = BUILDERS
    on_cuda_only = frozenset({COMPILE_GRAPH})
