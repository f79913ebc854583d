"""The variants of a case: plain torch.compile, the same in a CUDA Graph, and DynaFlow's plans.

Each variant has a code object of its own, so that Dynamo's guards of one are never checked for another. Building one measures what it
holds of the device's memory in the steady state.
"""

from __future__ import annotations

import gc
import inspect
import logging
import time
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

import dynaflow as df
from benchmarks.backend.models import Case

MIB = 2**20
Call = Callable[[int], Any]


class NotAvailable(Exception):
    """This variant cannot be made here; the message says why."""


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


def entry(module: Any) -> Callable[..., Any]:
    """A function with a code object of its own around the module."""

    def call(**kwargs: Any) -> Any:
        return module(**kwargs)

    return types.FunctionType(call.__code__.replace(), call.__globals__, "call", None, call.__closure__)


def do_nothing(gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    """A backend that runs the graph once and returns the same result ever after: what is left is Dynamo's own time."""
    kept: list[Any] = []

    def run(*args: Any) -> Any:
        if not kept:
            kept.append(gm(*args))
        return kept[0]

    return run


# -- one builder per variant: (case, options for every df.compile) -> a function of the step's number


def _compiled(case: Case, _: Mapping[str, Any]) -> Call:
    fast = torch.compile(entry(case.module))
    return lambda number: fast(**case.args(number))


def _guards(case: Case, _: Mapping[str, Any]) -> Call:
    fast = torch.compile(entry(case.module), backend=do_nothing)
    return lambda number: fast(**case.args(number))


def _graphed(case: Case, _: Mapping[str, Any], with_copies: bool = True) -> Call:
    """torch.compile inside one torch.cuda.graph, over static inputs."""
    fast = torch.compile(entry(case.module))
    static = {name: x.clone() for name, x in case.sets[0].items()}
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            case.reset()
            fast(**static, **case.state)
    torch.cuda.current_stream().wait_stream(side)
    case.reset()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = fast(**static, **case.state)

    def replay(number: int) -> Any:
        if with_copies:
            inputs = case.sets[number % len(case.sets)]
            for name, slot in static.items():
                slot.copy_(inputs[name], non_blocking=True)
        graph.replay()
        return result

    replay.without_copies = lambda number: graph.replay()  # type: ignore[attr-defined]
    return replay


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
GUARDS = "Dynamo's guards"
OURS, OURS_GRAPH, OURS_BORROW = "dynaflow", "dynaflow graph", "dynaflow graph borrow"
SPLITS = {n: (f"split {n}", f"split {n} graph") for n in (2, 4)}
TWO_BATCH, TWO_BATCH_GRAPH = "TwoBatch", "TwoBatch graph"
EAGER_SPLIT = "split 2 eager ops"

BUILDERS: dict[str, Callable[[Case, Mapping[str, Any]], Call]] = {
    COMPILE: _compiled,
    COMPILE_GRAPH: _graphed,
    GUARDS: _guards,
    OURS: _dynaflow(strategy="sequential"),
    OURS_GRAPH: _dynaflow(strategy="sequential", runtime="graph"),
    OURS_BORROW: _dynaflow(strategy="sequential", runtime="graph", borrow=True),
    TWO_BATCH: _dynaflow(strategy=df.TwoBatch()),
    TWO_BATCH_GRAPH: _dynaflow(strategy=df.TwoBatch(), runtime="graph", borrow=True),
    EAGER_SPLIT: _dynaflow(strategy=Parts(2), compiler="eager"),
    **{names[0]: _dynaflow(strategy=Parts(n)) for n, names in SPLITS.items()},
    **{names[1]: _dynaflow(strategy=Parts(n), runtime="graph", borrow=True) for n, names in SPLITS.items()},
}
ON_CUDA_ONLY = {COMPILE_GRAPH}


@dataclass
class Variant:
    name: str
    call: Call
    # until the fourth call returned
    build_s: float
    # above what was there before, in the steady state; None on the CPU
    allocated_mib: float | None = None
    reserved_mib: float | None = None
    # what the engine warned of while it was built, and calls that fell back
    warnings: list[str] = field(default_factory=list)

    @property
    def stats(self) -> Any:
        fast = getattr(self.call, "fast", None)
        return None if fast is None else df.stats(fast)


class _Listening(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage().splitlines()[0][:300]
        if text not in self.heard:
            self.heard.append(text)


_kept_for_good: list[Any] = []


def _load_libraries() -> None:
    """Let cuBLAS make its workspace for the stream that torch.cuda.graph records on: no variant is to pay for all of them."""
    if _kept_for_good:
        return
    graph, x = torch.cuda.CUDAGraph(), torch.randn(64, 64, device="cuda", dtype=torch.bfloat16)
    x @ x
    with torch.cuda.graph(graph):
        y = x @ x
    _kept_for_good.extend((graph, x, y))


class Variants:
    """The variants of one case, each built when it is first asked for."""

    def __init__(self, case: Case, device: str, options: Mapping[str, Any] | None = None):
        self.case, self.device, self.options = case, device, dict(options or {})
        self.is_cuda = device.startswith("cuda")
        self._made: dict[str, Variant] = {}
        # variant -> why there is none
        self.missing: dict[str, str] = {}
        case.run(case.sets[0])
        if self.is_cuda:
            _load_libraries()

    def get(self, name: str) -> Variant | None:
        if name in self.missing:
            return None
        if name not in self._made:
            try:
                if name in ON_CUDA_ONLY and not self.is_cuda:
                    raise NotAvailable("needs CUDA")
                self._made[name] = self._build(name)
            except Exception as error:
                reason = str(error) if isinstance(error, NotAvailable) else f"{type(error).__name__}: {str(error).strip()[:300]}"
                self.missing[name] = reason
                print(f"    {name}: NOT MEASURED, {reason}", flush=True)
                return None
        return self._made[name]

    def some(self, *names: str) -> dict[str, Variant]:
        """Those of them that can be made, in this order."""
        return {name: made for name in names if (made := self.get(name)) is not None}

    def _build(self, name: str) -> Variant:
        before = self._settled()
        began = time.perf_counter()
        ear = _Listening()
        log = logging.getLogger("dynaflow")
        log.addHandler(ear)
        try:
            call = BUILDERS[name](self.case, self.options)
            self._steps(call, 4)
            build_s = time.perf_counter() - began
            variant = Variant(name, call, round(build_s, 2))
            if self.is_cuda:
                self._settled()
                torch.cuda.reset_peak_memory_stats()
                self._steps(call, 3)
                variant.allocated_mib = round((torch.cuda.max_memory_allocated() - before[0]) / MIB, 1)
                variant.reserved_mib = round((torch.cuda.max_memory_reserved() - before[1]) / MIB, 1)
        finally:
            log.removeHandler(ear)
            self.case.unmark()
        fallbacks = variant.stats.fallbacks if variant.stats is not None else {}
        variant.warnings = [*ear.heard, *(f"{n} calls fell back: {reason.splitlines()[0][:200]}" for reason, n in fallbacks.items())]
        print(f"    {name}: built in {build_s:.1f} s", *variant.warnings, sep="\n      ", flush=True)
        return variant

    def _steps(self, call: Call, count: int) -> None:
        for number in range(count):
            self.case.reset()
            call(number)
        self.sync()

    def _settled(self) -> tuple[int, int]:
        """Allocated and reserved bytes with nothing cached."""
        gc.collect()
        if not self.is_cuda:
            return 0, 0
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    def sync(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()
