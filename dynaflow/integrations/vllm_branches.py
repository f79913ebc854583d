"""Branches of a model in vLLM: plans of its kernels, inside of the CUDA Graphs that vLLM captures.

vLLM cuts a model at its attentions, compiles the pieces with Inductor, and captures them size by size. In a piece, kernels that do not
depend on each other run one after the other: a LoRA adapter's first product behind that of the layer it belongs to, for one.

    caller | shrink(x)  expand(..)  y += ..       lora_expand adds to what the layer's own product gives:
    aux0   |  y = x @ W                           taken apart, it does not need to wait for it (`accumulating`)

1. Every piece that vLLM compiles, or finds in its cache, becomes a region (`dynaflow/region.py`). Equal layers share one.
2. vLLM runs each size once before it captures it. In that run the region measures plans of its kernels against Inductor's order, both as
   recordings, and keeps the faster one; near sizes take what was found. What an op reads on the host (how many adapters are active)
   tells cases apart, as sizes do.
3. While vLLM captures, the region issues its plan into vLLM's graph. All other calls run vLLM's own code, untouched.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch._inductor.output_code import CompiledFxGraph
from vllm.compilation.piecewise_backend import PiecewiseBackend
from vllm.config import CompilationMode, CUDAGraphMode

from dynaflow.inductor.accumulating import Accumulates, apart
from dynaflow.inductor.entries import wrapped_by
from dynaflow.inductor.structure import NotCompiled
from dynaflow.integrations.vllm_steps import Stats
from dynaflow.region import Region
from dynaflow.settings import Settings
from dynaflow.strategies import Auto
from dynaflow.way import Boxed

log = logging.getLogger("vllm.dynaflow")

# it rounds what it adds to the type of its weights
ACCUMULATING = {"torch.ops.vllm.lora_expand.default": Accumulates("output_tensor", "add_inputs")}


class Pieces:
    """What vLLM compiled in this process."""

    def __init__(self) -> None:
        # nothing is recorded here: vLLM does that
        self.settings = Settings(Auto(), partition="kernels", runtime="cuda", name="vllm")
        self.regions: list[Region] = []
        # vLLM captures, or runs what it is about to capture
        self.is_open = False

    def region(self, ops: Mapping[str, Accumulates], compiled: CompiledFxGraph, is_backward: bool, static: Sequence[int]) -> Boxed:
        """In the place of Inductor's own callable (`wrapped_by`). vLLM asks a callable for its code: it has to be a function. `ops`:
        those that are taken apart."""
        plain = compiled.current_callable
        assert plain is not None, "Inductor has compiled it"
        name = f"vllm.{hashlib.sha256(compiled.source_code.encode()).hexdigest()[:8]}"
        try:
            text = apart(compiled.source_code, ops)
            made = Region(name, compiled, self.settings, static, is_backward, in_captures=True, text=text)
        except NotCompiled as error:
            self.settings.count_fallback(str(error))
            log.warning("dynaflow: a piece is left to vLLM: %s", error)
            return plain
        if all(region.module is not made.module for region in self.regions):  # equal layers have equal code
            self.regions.append(made)
        # by number: vLLM looks for code in whatever callable a function closes over, and a region has none
        number = [region.module for region in self.regions].index(made.module)

        def run(args: list[Any]) -> Sequence[Any]:
            return self.regions[number](args) if self.is_open else plain(args)

        return run

    def sum_up(self, total: Stats) -> None:
        """After a capture."""
        planned = [r for r in self.regions if any(case.choice is not None and case.choice.plan for case in r.cases.values())]
        total.regions, total.planned_regions = len(self.regions), len(planned)
        total.fallbacks.update(self.settings.stats.fallbacks - total.fallbacks)
        if not self.regions:
            total.refusal = "vLLM compiled none of its pieces here, it read all from a cache; VLLM_USE_MEGA_AOT_ARTIFACT=0 shows them"
            log.warning("dynaflow leaves this model to vLLM: %s", total.refusal)
            return
        num_cases = sum(len(r.cases) for r in self.regions)
        log.info("dynaflow: branches: %d of %d pieces run under plans of their kernels in vLLM's CUDA Graphs, %d cases, %d issues%s",
                 len(planned), len(self.regions), num_cases, self.settings.stats.planned_calls,
                 "".join(f" | left to vLLM: {reason}" for reason in self.settings.stats.fallbacks))  # fmt: skip


PIECES = Pieces()


def watch(is_asked: Callable[[Any], bool], runners: Sequence[Any], total: Stats) -> None:
    """Once per process. `is_asked`: whether a configuration asks for branches."""
    if PiecewiseBackend.__init__.__code__.co_filename == __file__:
        return
    make = PiecewiseBackend.__init__

    @functools.wraps(make)
    def make_in_the_open(self: Any, graph: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        if not is_asked(vllm_config):
            return make(self, graph, vllm_config, *args, **kwargs)
        with wrapped_by(functools.partial(PIECES.region, accumulating(vllm_config))):
            return make(self, graph, vllm_config, *args, **kwargs)

    PiecewiseBackend.__init__ = make_in_the_open
    for runner in runners:
        runner.capture_model = _opened(runner.capture_model, is_asked, total)


def accumulating(config: Any) -> Mapping[str, Accumulates]:
    """Ops that may be taken apart: an adapter's sums are the same then, where it has the model's type, and the same kernels, whose
    tuned configurations (VLLM_TUNED_CONFIG_FOLDER) know whether they add."""
    lora = config.lora_config
    is_same = lora is not None and lora.lora_dtype in ("auto", config.model_config.dtype) and not os.environ.get("VLLM_TUNED_CONFIG_FOLDER")
    return ACCUMULATING if is_same else {}


def _opened(capture: Callable[..., Any], is_asked: Callable[[Any], bool], total: Stats) -> Callable[..., Any]:
    @functools.wraps(capture)
    def capture_model(runner: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_asked(runner.vllm_config) or total.refusal:
            return capture(runner, *args, **kwargs)
        PIECES.is_open = True
        try:
            return capture(runner, *args, **kwargs)
        finally:
            PIECES.is_open = False
            PIECES.sum_up(total)

    return capture_model


def refusal(config: Any) -> str:
    """Why no plan can be put into a CUDA Graph of vLLM's; empty where one may."""
    compilation, parallel = config.compilation_config, config.parallel_config
    against = {
        "vLLM does not compile the model into pieces": compilation.mode != CompilationMode.VLLM_COMPILE,
        "vLLM captures no CUDA Graphs": compilation.cudagraph_mode == CUDAGraphMode.NONE,
        "Inductor partitions the graph, attentions included (use_inductor_graph_partition)": compilation.use_inductor_graph_partition,
        "several ranks, which cannot measure each on its own": parallel.world_size > 1 or parallel.data_parallel_size > 1,
        "vLLM's own micro-batches (DBO)": parallel.use_ubatching,
    }
    return next((reason for reason, holds in against.items() if holds), "")
