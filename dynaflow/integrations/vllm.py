"""vLLM under a strategy: a `vllm.general_plugins` plugin, off until asked for.

    DYNAFLOW_STRATEGY=auto vllm serve ...
    LLM(..., additional_config={"dynaflow": {"strategy": "two_batch", "min_tokens": 512}})

vLLM calls `register` in every process. Where DynaFlow is asked for, and nothing in the configuration is against it, a `Steps` stands
between the model runner and its model (`vllm_steps.py`). Under "auto" it decides from what steps take (`step_trials.py`). "branches" is
about kernels, not about steps: they run as vLLM has them, on any runner, with plans of kernels in vLLM's CUDA Graphs (`vllm_branches.py`).
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from vllm.distributed import parallel_state
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

import dynaflow as df
from dynaflow.errors import OptionError
from dynaflow.integrations import vllm_branches
from dynaflow.integrations.step_trials import Trials
from dynaflow.integrations.vllm_steps import TOTAL, Stats, Steps
from dynaflow.settings import read_strategy

log = logging.getLogger("vllm.dynaflow")

DEFAULTS = {"strategy": "two_batch", "min_tokens": 512, "compiler": "auto", "runtime": "auto"}

# ops of vLLM that treat tokens apart; a build has some of them
ROWWISE = """_C.rms_norm _C.fused_add_rms_norm _C.rotary_embedding _C.silu_and_mul _C.mul_and_silu _C.gelu_and_mul _C.gelu_tanh_and_mul
    _C.gelu_new _C.gelu_fast _C.gelu_quick _C.onednn_mm _C.cpu_fused_moe""".split()
# they compute in one workspace of the process
EXPERTS = ("vllm.moe_forward", "vllm.moe_forward_shared")
ATTENTION = ("vllm.unified_attention_with_output", "vllm.unified_kv_cache_update")
# that of dynaflow/testing/network.py: where a benchmark has it, it stands for vLLM's own
EMULATED = "dynaflow_testing.all_reduce.default"
ALL_REDUCE = ("vllm.all_reduce", "_C.shm_allreduce", EMULATED)


def stats(worker: Any = None) -> Stats:
    """Of this process. `llm.collective_rpc(stats)` gives those of all workers."""
    return TOTAL


def register() -> None:
    """The plugin. vLLM may call it several times."""
    for cls, put in ((GPUModelRunner, _install), (RunnerV2, _refuse_v2)):
        if cls.initialize_kv_cache.__code__.co_filename != __file__:
            cls.initialize_kv_cache = _followed_by(cls.initialize_kv_cache, put)
    vllm_branches.watch(_wants_branches, (GPUModelRunner, RunnerV2), TOTAL)


def _followed_by(initialize: Callable[..., Any], put: Callable[[Any, dict[str, Any]], None]) -> Callable[..., Any]:
    """Runners are complete, their models loaded, when their KV cache is initialised."""

    @functools.wraps(initialize)
    def initialize_kv_cache(runner: Any, *args: Any, **kwargs: Any) -> Any:
        result = initialize(runner, *args, **kwargs)
        if (options := asked_for(runner.vllm_config)) is not None:
            (_note_branches if options["is_branches"] else put)(runner, options)
        return result

    return initialize_kv_cache


def asked_for(config: Any) -> dict[str, Any] | None:
    """Options, where DynaFlow is asked for; unknown ones are refused by name."""
    extra = config.additional_config.get("dynaflow") if isinstance(config.additional_config, dict) else None
    given = {name: os.environ[variable] for name in DEFAULTS if (variable := f"DYNAFLOW_{name.upper()}") in os.environ}
    if extra is None and "strategy" not in given:
        return None
    options = {**DEFAULTS, **given, **({"strategy": extra} if isinstance(extra, str) else extra or {})}
    if unknown := sorted(set(options) - set(DEFAULTS)):
        raise OptionError(f"additional_config['dynaflow'] has {unknown[0]!r}.", fix=f"use {', '.join(DEFAULTS)}")
    is_auto, is_branches = (options["strategy"] == name for name in ("auto", "branches"))
    strategy = df.NanoFlow() if is_auto else read_strategy(options["strategy"])
    return {**options, "strategy": strategy, "is_auto": is_auto, "is_branches": is_branches, "min_tokens": int(options["min_tokens"])}


def _wants_branches(config: Any) -> bool:
    options = asked_for(config)
    return options is not None and options["is_branches"]


def _note_branches(runner: Any, options: dict[str, Any]) -> None:
    """The model is compiled, its graphs are not captured."""
    TOTAL.refusal = vllm_branches.refusal(runner.vllm_config)
    _log_as_vllm_does()
    if TOTAL.refusal:
        log.warning("dynaflow leaves this model to vLLM: %s", TOTAL.refusal)


def _install(runner: Any, options: dict[str, Any]) -> None:
    for name in ("_model_forward", "_build_attention_metadata"):
        vars(runner).pop(name, None)  # the KV cache is initialised anew
    is_auto, _ = options.pop("is_auto"), options.pop("is_branches")
    TOTAL.refusal = refusal(runner) or (_nothing_to_hide(runner) if is_auto else "")
    if TOTAL.refusal:
        log.warning("dynaflow leaves this model to vLLM: %s", TOTAL.refusal)
        return
    _tell_split_rules()
    _log_as_vllm_does()
    steps = Steps(runner, **options, trials=Trials("vLLM", log, _added_up) if is_auto else None)
    runner._model_forward, runner._build_attention_metadata = steps.forward, steps.build_metadata
    where = ", where they are measured to be faster so" if is_auto else ""
    log.info("dynaflow: steps of %d tokens or more run under %s%s", steps.min_tokens, type(options["strategy"]).__name__, where)


def _nothing_to_hide(runner: Any) -> str:
    """Why "auto" does not even try: on one rank, parts of a step only read the weights twice."""
    has_collectives = runner.parallel_config.tensor_parallel_size > 1 or _find(EMULATED) is not None
    return "" if has_collectives else "auto: one rank has no collectives to hide behind compute"


def _added_up(numbers: list[float]) -> list[float]:
    """Over all ranks of the tensor parallel group: they must decide alike."""
    total = torch.tensor(numbers, dtype=torch.float64)
    torch.distributed.all_reduce(total, group=parallel_state.get_tp_group().cpu_group)
    return total.tolist()


def _log_as_vllm_does() -> None:
    """What DynaFlow says of captures, plans and fallbacks stands in vLLM's log."""
    ours, theirs = logging.getLogger("dynaflow"), logging.getLogger("vllm")
    if not ours.handlers:
        ours.handlers, ours.propagate = list(theirs.handlers), False
        ours.setLevel(theirs.level)


def _refuse_v2(runner: Any, options: dict[str, Any]) -> None:
    TOTAL.refusal = "it runs on Model Runner V2; VLLM_USE_V2_MODEL_RUNNER=0 chooses the other"
    log.warning("dynaflow leaves this model to vLLM: %s", TOTAL.refusal)


def refusal(runner: Any) -> str:
    """Why nothing of this model is split; empty where it may be."""
    config, parallel = runner.vllm_config, runner.parallel_config
    layers = {type(x).__name__ for x in config.compilation_config.static_forward_context.values() if isinstance(x, AttentionLayerBase)}
    specs = {type(spec).__name__ for g in runner.kv_cache_config.kv_cache_groups if not isinstance(spec := g.kv_cache_spec, AttentionSpec)}
    has_smaller_blocks = any(getattr(g, "kernel_block_table", None) is not None for groups in runner.attn_groups for g in groups)
    against = {
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
    }  # fmt: skip
    return next((reason for reason, holds in against.items() if holds), "")


def _tell_split_rules() -> None:
    uses = {**dict.fromkeys(ATTENTION, _cache_of_layer), **dict.fromkeys(ALL_REDUCE, _tensor_parallel_group),
            **dict.fromkeys(EXPERTS, _workspace)}  # fmt: skip
    for name in (*ROWWISE, *uses):
        if (op := _find(name)) is not None:
            df.register_split_rule(op, _nothing_that_has_rows if name == ATTENTION[1] else df.rowwise, uses=uses.get(name))


def _find(name: str) -> Any:
    """An op, or one overload of it, where this build of vLLM has it."""
    namespace, op, *overload = name.split(".")
    found = getattr(getattr(torch.ops, namespace), op, None)
    return getattr(found, overload[0]) if found is not None and overload else found


def _nothing_that_has_rows(call: Any) -> None:
    """The cache's update returns an empty tensor, which orders it before the attention."""


def _cache_of_layer(call: Any) -> list[str]:
    return [f"kv:{getattr(call['layer_name'], 'value', call['layer_name'])}"]  # vLLM's LayerName, or its text


def _tensor_parallel_group(call: Any) -> list[str]:
    return [f"group:{parallel_state.get_tp_group().device_group.group_name}"]


def _workspace(call: Any) -> list[str]:
    return ["vllm:workspace"]
