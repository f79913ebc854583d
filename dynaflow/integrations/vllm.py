"""vLLM under a strategy: a `vllm.general_plugins` plugin, off until asked for.

    DYNAFLOW_STRATEGY=auto vllm serve ...
    LLM(..., additional_config={"dynaflow": {"strategy": "two_batch", "min_tokens": 512}})

vLLM calls `register` in every process. Where DynaFlow is asked for, and nothing in the configuration is against it, `VllmSteps` stand
between the model runner and its model (`vllm_steps.py`). "branches" is about kernels, not about steps: they run as vLLM has them, on any
runner, with plans of kernels in vLLM's CUDA Graphs (`vllm_branches.py`). All that is not vLLM's own is for any engine: see `serving.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from vllm.compilation.piecewise_backend import PiecewiseBackend
from vllm.distributed import parallel_state
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from dynaflow.integrations import vllm_branches
from dynaflow.integrations.around import put_around
from dynaflow.integrations.ops import find_op, tell_split_rules
from dynaflow.integrations.pieces import Pieces
from dynaflow.integrations.serving import NOTHING_TO_HIDE, Engine, Options, Stats, first_that_holds, read_options
from dynaflow.integrations.vllm_steps import VllmSteps

ENGINE = Engine("vLLM", logging.getLogger("vllm"))
PIECES = Pieces(ENGINE, "vllm", vllm_branches.WHY_NONE)

# ops of vLLM that treat tokens apart; a build has some of them
ROWWISE = """_C.rms_norm _C.fused_add_rms_norm _C.rotary_embedding _C.silu_and_mul _C.mul_and_silu _C.gelu_and_mul _C.gelu_tanh_and_mul
    _C.gelu_new _C.gelu_fast _C.gelu_quick _C.onednn_mm _C.cpu_fused_moe""".split()
# they compute in one workspace of the process
EXPERTS = ("vllm.moe_forward", "vllm.moe_forward_shared")
ATTENTION, CACHE_UPDATE = "vllm.unified_attention_with_output", "vllm.unified_kv_cache_update"
# that of dynaflow/testing/network.py: where a benchmark has it, it stands for vLLM's own
EMULATED = "dynaflow_testing.all_reduce.default"
ALL_REDUCE = ("vllm.all_reduce", "_C.shm_allreduce", EMULATED)


def stats(worker: Any = None) -> Stats:
    """Of this process. `llm.collective_rpc(stats)` gives those of all workers."""
    return ENGINE.stats


def register() -> None:
    """The plugin. vLLM may call it several times."""
    for runner in (GPUModelRunner, RunnerV2):
        put_around(runner, "initialize_kv_cache", _initialize)
        put_around(runner, "capture_model", _capture)
    put_around(PiecewiseBackend, "__init__", _compile)


def asked_for(config: Any) -> Options | None:
    given = config.additional_config.get("dynaflow") if isinstance(config.additional_config, dict) else None
    return read_options(given, "additional_config['dynaflow']")


def _initialize(initialize: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    """Runners are complete, their models loaded and compiled, when their KV cache is initialised. Nothing is captured yet."""
    result = initialize(runner, *args, **kwargs)
    options = asked_for(runner.vllm_config)
    if options is not None and options.is_branches:
        ENGINE.show_log()
        ENGINE.refuse(vllm_branches.refusal(runner.vllm_config))
    elif options is not None and isinstance(runner, RunnerV2):
        ENGINE.refuse("it runs on Model Runner V2; VLLM_USE_V2_MODEL_RUNNER=0 chooses the other")
    elif options is not None:
        _install(runner, options)
    return result


def _install(runner: Any, options: Options) -> None:
    for name in ("_model_forward", "_build_attention_metadata"):
        vars(runner).pop(name, None)  # the KV cache is initialised anew
    has_collectives = runner.parallel_config.tensor_parallel_size > 1 or find_op(EMULATED) is not None
    ENGINE.refuse(refusal(runner) or (NOTHING_TO_HIDE if options.is_auto and not has_collectives else ""))
    if ENGINE.stats.refusal:
        return
    _tell_split_rules()
    ENGINE.show_log()
    steps = VllmSteps(ENGINE, options, runner)
    runner._model_forward, runner._build_attention_metadata = steps.forward, steps.build_metadata


def _compile(make: Callable[..., None], backend: Any, graph: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
    with PIECES.taken(vllm_branches.accumulating(vllm_config)) if _wants_branches(vllm_config) else nullcontext():
        make(backend, graph, vllm_config, *args, **kwargs)


def _capture(capture: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    with PIECES.opened() if _wants_branches(runner.vllm_config) else nullcontext():
        return capture(runner, *args, **kwargs)


def _wants_branches(config: Any) -> bool:
    options = asked_for(config)
    return options is not None and options.is_branches


def refusal(runner: Any) -> str:
    """Why nothing of this model is split; empty where it may be."""
    config, parallel = runner.vllm_config, runner.parallel_config
    layers = {type(x).__name__ for x in config.compilation_config.static_forward_context.values() if isinstance(x, AttentionLayerBase)}
    specs = {type(spec).__name__ for g in runner.kv_cache_config.kv_cache_groups if not isinstance(spec := g.kv_cache_spec, AttentionSpec)}
    has_smaller_blocks = any(getattr(g, "kernel_block_table", None) is not None for groups in runner.attn_groups for g in groups)
    return first_that_holds({
        "a pipeline of several ranks": parallel.pipeline_parallel_size > 1,
        "data parallel ranks, which must take the same steps": parallel.data_parallel_size > 1,
        "expert parallel ranks, whose collectives are inside of the experts": parallel.enable_expert_parallel,
        "vLLM's own micro-batches (DBO)": parallel.use_ubatching,
        "a context that lies on several ranks (DCP)": runner.dcp_world_size > 1,
        "LoRA, whose adapters are looked up by a token's place in the step": config.lora_config is not None,
        "speculative decoding, whose drafter shares the step's metadata": config.speculative_config is not None,
        "a KV connector, which moves layers once per step": config.kv_transfer_config is not None,
        "kv_sharing_fast_prefill": runner.cache_config.kv_sharing_fast_prefill,
        "attention both ways over a prefix, which vLLM does not cut": runner.is_mm_prefix_lm or bool(runner.model_config.rswa_window),
        f"attention layers of type {', '.join(sorted(layers - {'Attention'}))}": layers != {Attention.__name__},
        f"a cache of {', '.join(sorted(specs))}": bool(specs),
        "an attention backend with smaller blocks than the cache's": has_smaller_blocks,
    })  # fmt: skip


def _tell_split_rules() -> None:
    tell_split_rules(ROWWISE)
    tell_split_rules(EXPERTS, uses=lambda call: ["vllm:workspace"])
    tell_split_rules(ALL_REDUCE, uses=lambda call: [f"group:{parallel_state.get_tp_group().device_group.group_name}"])
    tell_split_rules([ATTENTION], uses=_cache_of_layer)
    # it returns an empty tensor, which orders it before the attention: nothing that has rows
    tell_split_rules([CACHE_UPDATE], lambda call: None, uses=_cache_of_layer)


def _cache_of_layer(call: Any) -> list[str]:
    return [f"kv:{getattr(call['layer_name'], 'value', call['layer_name'])}"]  # vLLM's LayerName, or its text
