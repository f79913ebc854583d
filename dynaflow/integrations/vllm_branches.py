"""Branches of a model in vLLM: plans of its kernels, inside of the CUDA Graphs that vLLM captures (`pieces.py`).

vLLM cuts a model at its attentions, compiles the pieces with Inductor, and captures them size by size. In a piece, kernels that do not
depend on each other run one after the other: a LoRA adapter's first product behind that of the layer it belongs to, for one.

    caller | shrink(x)  expand(..)  y += ..       lora_expand adds to what the layer's own product gives:
    aux0   |  y = x @ W                           taken apart, it does not need to wait for it (`accumulating`)

vLLM runs each size once before it captures it, with adapters and without: how many are active is read on the host.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from vllm.compilation.piecewise_backend import PiecewiseBackend
from vllm.config import CompilationMode, CUDAGraphMode

from dynaflow.inductor.accumulating import Accumulates
from dynaflow.integrations.around import put_around
from dynaflow.integrations.pieces import Pieces
from dynaflow.integrations.serving import first_that_holds
from dynaflow.integrations.vllm import ENGINE, asked_for

# it rounds what it adds to the type of its weights
ACCUMULATING = {"torch.ops.vllm.lora_expand.default": Accumulates("output_tensor", "add_inputs")}

WHY_NONE = "vLLM compiled none of its pieces here, it read all from a cache; VLLM_USE_MEGA_AOT_ARTIFACT=0 shows them"
PIECES = Pieces(ENGINE, "vllm", WHY_NONE)


def take_pieces() -> None:
    """Of all models in this process whose configurations ask for it."""
    put_around(PiecewiseBackend, "__init__", _compile)


def _compile(make: Callable[..., None], backend: Any, graph: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
    options = asked_for(vllm_config)
    with PIECES.taken(accumulating(vllm_config)) if options is not None and options.is_branches else nullcontext():
        make(backend, graph, vllm_config, *args, **kwargs)


def accumulating(config: Any) -> Mapping[str, Accumulates]:
    """Ops that may be taken apart: an adapter's sums are the same then, where it has the model's type, and the same kernels, whose
    tuned configurations (VLLM_TUNED_CONFIG_FOLDER) know whether they add."""
    lora = config.lora_config
    is_same = lora is not None and lora.lora_dtype in ("auto", config.model_config.dtype) and not os.environ.get("VLLM_TUNED_CONFIG_FOLDER")
    return ACCUMULATING if is_same else {}


def refusal(config: Any) -> str:
    """Why no plan can be put into a CUDA Graph of vLLM's; empty where one may."""
    compilation, parallel = config.compilation_config, config.parallel_config
    return first_that_holds({
        "vLLM does not compile the model into pieces": compilation.mode != CompilationMode.VLLM_COMPILE,
        "vLLM captures no CUDA Graphs": compilation.cudagraph_mode == CUDAGraphMode.NONE,
        "Inductor partitions the graph, attentions included (use_inductor_graph_partition)": compilation.use_inductor_graph_partition,
        "several ranks, which cannot measure each on its own": parallel.world_size > 1 or parallel.data_parallel_size > 1,
        "vLLM's own micro-batches (DBO)": parallel.use_ubatching,
    })  # fmt: skip
