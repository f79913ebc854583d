"""Variants of a case, side by side in one process: built when first asked for, with what they hold of the device's memory.

Each variant has a code object of its own, so that Dynamo's guards of one are never checked for another.
"""

from __future__ import annotations

import gc
import logging
import time
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch

import dynaflow as df
from benchmarks import turn
from benchmarks.cases import Call, Case

MIB = 2**20
NOT_MEASURED = "NOT MEASURED"
# (case, options of DynaFlow) -> a function of the step's number
Builder = Callable[[Case, Mapping[str, Any]], Call]


class NotAvailable(Exception):
    """This variant cannot be made here; the message says why."""


def entry(module: Any) -> Callable[..., Any]:
    """A function with a code object of its own around the module."""

    def call(**kwargs: Any) -> Any:
        return module(**kwargs)

    return types.FunctionType(call.__code__.replace(), call.__globals__, "call", None, call.__closure__)


def compiled(**settings: Any) -> Builder:
    """torch.compile, with these settings; each call is a step of its own to Inductor's own CUDA Graphs, where it has them."""

    def build(case: Case, _: Mapping[str, Any]) -> Call:
        fast = torch.compile(entry(case.module), **settings)

        def call(number: int) -> Any:
            return case.finish(fast(**case.args(number)))

        def step(number: int) -> Any:
            torch.compiler.cudagraph_mark_step_begin()
            return call(number)

        return step if "mode" in settings else call

    return build


def plain(case: Case) -> Any:
    return case.module


def with_inductor(case: Case) -> Any:
    return torch.compile(entry(case.module))


def graphed(callable_of: Callable[[Case], Any] = with_inductor) -> Builder:
    """The module, compiled or not, inside one torch.cuda.graph over static inputs; a call copies its inputs into them."""

    def build(case: Case, _: Mapping[str, Any]) -> Call:
        fast = callable_of(case)
        static = {name: x.clone() for name, x in case.sets[0].items()}
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _step in range(2):
                case.reset()
                fast(**static, **case.state)
        torch.cuda.current_stream().wait_stream(side)
        case.reset()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = fast(**static, **case.state)

        def replay(number: int) -> Any:
            inputs = case.sets[number % len(case.sets)]
            for name, slot in static.items():
                slot.copy_(inputs[name], non_blocking=True)
            graph.replay()
            return result

        replay.without_copies = lambda number: graph.replay()  # type: ignore[attr-defined]
        return replay

    return build


@dataclass
class Variant:
    name: str
    call: Call
    # until the fourth call returned, without what was waited for
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
    """The variants of one case, each built when it is first asked for. A suite names its own in a subclass."""

    builders: ClassVar[Mapping[str, Builder]] = {}
    on_cuda_only: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, case: Case, device: str, options: Mapping[str, Any] | None = None):
        self.case, self.device, self.options = case, device, dict(options or {})
        self.is_cuda = device.startswith("cuda")
        self._made: dict[str, Variant] = {}
        # variant -> why there is none
        self.missing: dict[str, str] = {}
        case.run(case.sets[0])
        if self.is_cuda:
            _load_libraries()

    def anew(self) -> Self:
        """The same, nothing of it built yet."""
        fresh = type(self)(self.case, self.device, self.options)
        fresh.missing.update(self.missing)
        return fresh

    def get(self, name: str) -> Variant | None:
        if name in self.missing:
            return None
        if name not in self._made:
            try:
                if name in self.on_cuda_only and not self.is_cuda:
                    raise NotAvailable("needs CUDA")
                self._made[name] = self._build(name)
            except Exception as error:
                reason = str(error) if isinstance(error, NotAvailable) else f"{type(error).__name__}: {str(error).strip()[:300]}"
                self.missing[name] = reason
                print(f"    {name}: {NOT_MEASURED}, {reason}", flush=True)
                return None
        return self._made[name]

    def some(self, *names: str) -> dict[str, Variant]:
        """Those of them that can be made, in this order."""
        return {name: made for name in names if (made := self.get(name)) is not None}

    def _build(self, name: str) -> Variant:
        self.case.reset()  # gradients of the variant before are not what this one begins with
        before = self._settled()
        began = time.perf_counter() - turn.waited_s
        ear = _Listening()
        log = logging.getLogger("dynaflow")
        log.addHandler(ear)
        try:
            call = self.builders[name](self.case, self.options)
            self.steps(call, 4)
            build_s = time.perf_counter() - turn.waited_s - began
            variant = Variant(name, call, round(build_s, 2))
            if self.is_cuda:
                self._settled()
                torch.cuda.reset_peak_memory_stats()
                self.steps(call, 3)
                variant.allocated_mib = round((torch.cuda.max_memory_allocated() - before[0]) / MIB, 1)
                variant.reserved_mib = round((torch.cuda.max_memory_reserved() - before[1]) / MIB, 1)
        finally:
            log.removeHandler(ear)
            self.case.unmark()
        fell_back = (f"{n} calls fell back: {reason.splitlines()[0][:200]}" for reason, n in self.fallbacks(variant).items())
        variant.warnings = [*ear.heard, *fell_back]
        print(f"    {name}: built in {build_s:.1f} s", *variant.warnings, sep="\n      ", flush=True)
        return variant

    def fallbacks(self, variant: Variant) -> Mapping[str, int]:
        """Reason -> calls that fell back for it."""
        return {} if variant.stats is None else variant.stats.fallbacks

    def steps(self, call: Call, count: int) -> None:
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
