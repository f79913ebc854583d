"""vLLM under a strategy: a `vllm.general_plugins` plugin, off until asked for.

    DYNAFLOW_STRATEGY=auto vllm serve ...
    LLM(..., additional_config={"dynaflow": {"strategy": "two_batch", "min_tokens": 512}})

vLLM calls `register` in every process, whether DynaFlow is asked for or not. All that it does is to look at the configuration of workers
that are made. Where one asks, and nothing in it is against it, `VllmSteps` stand between the model runner and its model
(`vllm_steps.py`). "branches" is about kernels, not about steps: they run as vLLM has them, on any runner, with plans of kernels in vLLM's
CUDA Graphs (`vllm_branches.py`). All that is not vLLM's own is for any engine: see `serving.py`.

What only a worker that asks needs is imported there: vLLM's server, and workers that do not ask, load none of it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from vllm.v1.worker.worker_base import WorkerBase

from dynaflow.integrations.around import put_around
from dynaflow.integrations.ops import find_op, tell_split_rules
from dynaflow.integrations.serving import NOTHING_TO_HIDE, Engine, Options, Stats, first_that_holds, read_options

ENGINE = Engine("vLLM", logging.getLogger("vllm"))

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
    """Of this process. `llm.collective_rpc("dynaflow_stats")` gives those of all workers, as plain data."""
    return ENGINE.stats


def register() -> None:
    """The plugin. vLLM may call it several times."""
    put_around(WorkerBase, "__init__", _make)


def asked_for(config: Any) -> Options | None:
    given = config.additional_config.get("dynaflow") if isinstance(config.additional_config, dict) else None
    return read_options(given, "additional_config['dynaflow']")


def _make(make: Callable[..., None], worker: Any, *args: Any, **kwargs: Any) -> None:
    """Nothing is loaded yet: an option that is wrong costs no time."""
    make(worker, *args, **kwargs)
    if (options := asked_for(worker.vllm_config)) is None:
        return
    worker.dynaflow_stats = lambda: {**vars(ENGINE.stats), "fallbacks": dict(ENGINE.stats.fallbacks)}
    worker.initialize_from_config = functools.partial(_initialize, worker.initialize_from_config, worker, options)
    if options.is_branches:
        from dynaflow.integrations import vllm_branches

        vllm_branches.take_pieces()


def _initialize(initialize: Callable[..., Any], worker: Any, options: Options, *args: Any, **kwargs: Any) -> Any:
    """Runners are complete, their models loaded and compiled, when their KV cache is initialised. Nothing is captured yet."""
    result = initialize(*args, **kwargs)
    runner = worker.model_runner
    for name in ("_model_forward", "_build_attention_metadata", "capture_model"):
        vars(runner).pop(name, None)  # the KV cache is initialised anew
    ENGINE.show_log()
    if options.is_branches:
        from dynaflow.integrations import vllm_branches

        ENGINE.refuse(vllm_branches.refusal(runner.vllm_config))
        runner.capture_model = vllm_branches.PIECES.opened()(runner.capture_model)
    else:
        _install(runner, options)
    return result


def _install(runner: Any, options: Options) -> None:
    has_collectives = runner.vllm_config.parallel_config.tensor_parallel_size > 1 or find_op(EMULATED) is not None
    ENGINE.refuse(NOTHING_TO_HIDE if options.is_auto and not has_collectives else refusal(runner))
    if ENGINE.stats.refusal:
        return
    _tell_split_rules()
    from dynaflow.integrations.vllm_steps import VllmSteps

    steps = VllmSteps(ENGINE, options, runner)
    runner._model_forward, runner._build_attention_metadata = steps.forward, steps.build_metadata


def refusal(runner: Any) -> str:
    """Why nothing of this model is split; empty where it may be."""
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.v1.kv_cache_interface import AttentionSpec

    if not hasattr(runner, "_model_forward"):
        return "it runs on Model Runner V2; VLLM_USE_V2_MODEL_RUNNER=0 chooses the other"
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
        # vLLM 0.25; later ones do it on Model Runner V2 alone
        "routed experts that are returned, which lie by a token's place in the step": getattr(
            runner.model_config, "enable_return_routed_experts", False),
        "kv_sharing_fast_prefill": runner.cache_config.kv_sharing_fast_prefill,
        "attention both ways over a prefix, which vLLM does not cut": runner.is_mm_prefix_lm or bool(runner.model_config.rswa_window),
        f"attention layers of type {', '.join(sorted(layers - {'Attention'}))}": layers != {"Attention"},
        f"a cache of {', '.join(sorted(specs))}": bool(specs),
        "an attention backend with smaller blocks than the cache's": has_smaller_blocks,
    })  # fmt: skip


def _tell_split_rules() -> None:
    from vllm.distributed import parallel_state

    tell_split_rules(ROWWISE)
    tell_split_rules(EXPERTS, uses=lambda call: ["vllm:workspace"])
    tell_split_rules(ALL_REDUCE, uses=lambda call: [f"group:{parallel_state.get_tp_group().device_group.group_name}"])
    tell_split_rules([ATTENTION], uses=_cache_of_layer)
    # it returns an empty tensor, which orders it before the attention: nothing that has rows
    tell_split_rules([CACHE_UPDATE], lambda call: None, uses=_cache_of_layer)


def _cache_of_layer(call: Any) -> list[str]:
    return [f"kv:{getattr(call['layer_name'], 'value', call['layer_name'])}"]  # vLLM's LayerName, or its text
