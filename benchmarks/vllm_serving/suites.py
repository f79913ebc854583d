"""What is measured: suites (a model, ways to serve it, loads), as data.

    way                          engine
    vllm                         vLLM on Model Runner V1, which DynaFlow needs
    vllm, default runner         vLLM as it comes: dense models take Model Runner V2 (0.25)
    vllm, once more              a second engine of the same kind: what it is off the first one is the noise of the run
    auto                         DYNAFLOW_STRATEGY=auto
    <strategy>                   steps that no CUDA Graph of vLLM's serves, in parts
    <strategy>, no overlap       the same parts on one stream: what splitting costs
    vllm, dual stream            vLLM's own overlap of LoRA with the layers' products, off as it comes; reported, and no baseline
    branches                     DYNAFLOW_STRATEGY=branches: plans of kernels in vLLM's CUDA Graphs, on the runner that vLLM takes
    branches, Runner V1          the same on Model Runner V1

All models have random weights. Where small steps count, a model is as deep as the real one, or as three engines have room for: with few
layers, a decode step is the host's time and not the device's. `layers` stands in every row. Where `is_emulated`, an all-reduce of 8
ranks over NVLink is emulated behind every row-parallel linear, in all ways alike (`emulated.py`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

V1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
PLAIN, DEFAULT, AUTO, DUAL = "vllm", "vllm, default runner", "auto", "vllm, dual stream"
AGAIN = "vllm, once more"
BRANCHES, BRANCHES_V1 = "branches", "branches, Runner V1"
NANOFLOW, TWO_BATCH = "dynaflow:NanoFlow", "two_batch"
GIB = 1 << 30


@dataclass(frozen=True)
class Load:
    requests: int
    # tokens of the shortest and of the longest prompt
    shortest: int
    longest: int
    # tokens that each request makes
    generated: int
    # requests that arrive per step of the engine
    per_step: int

    def beginning(self) -> Load:
        """What arrives first: enough to capture and to compile."""
        return replace(self, requests=min(self.requests, self.per_step))


@dataclass(frozen=True)
class Suite:
    name: str
    # what stands in config.json
    model: dict[str, Any]
    # way -> environment of its engine
    ways: dict[str, dict[str, str]]
    loads: dict[str, Load]
    # arguments of vllm.LLM
    engine: dict[str, Any] = field(default_factory=dict)
    is_emulated: bool = False
    # LoRA adapters, which requests take in turns
    adapters: int = 0

    def config(self, load: str) -> dict[str, Any]:
        m = self.model
        shape = {"layers": m["num_hidden_layers"], "hidden": m["hidden_size"], "dtype": m["torch_dtype"]}
        lora = {"adapters": self.adapters, "rank": self.engine["max_lora_rank"]} if self.adapters else {}
        return {"model": self.name, **shape, **lora, "load": asdict(self.loads[load]), "tiny": self.name.startswith("tiny")}

    def measures(self, way: str) -> bool:
        """Whether its engine measures as it starts, and must be alone on the device."""
        return self.ways[way].get("DYNAFLOW_STRATEGY") == BRANCHES

    def row(self, load: str, way: str) -> str:
        return f"{self.name}, {load}, {way}"


def _strategy(name: str, **options: Any) -> dict[str, str]:
    return {**V1, "DYNAFLOW_STRATEGY": name, **{f"DYNAFLOW_{key.upper()}": str(value) for key, value in options.items()}}


def _without_overlap(name: str, **options: Any) -> dict[str, dict[str, str]]:
    return {name: _strategy(name, **options), f"{name}, no overlap": _strategy(name, runtime="serial", **options)}


BASELINES = {PLAIN: V1, DEFAULT: {}}
# as a user has it who sets one variable: on whatever runner vLLM takes
AS_IT_COMES = {AUTO: {"DYNAFLOW_STRATEGY": AUTO}}
IN_GRAPHS = {BRANCHES: {"DYNAFLOW_STRATEGY": "branches"}, BRANCHES_V1: _strategy("branches")}

COMMON = {
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 8192, "tie_word_embeddings": False,
    "attention_bias": False, "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "bfloat16", "head_dim": 128,
}  # fmt: skip
QWEN3_8B = {
    **COMMON, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096,
    "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip
LLAMA_8B = {
    **COMMON, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip
QWEN3_30B_A3B = {
    **COMMON, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 4,
    "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
# what one of 8 tensor parallel ranks has of a layer
LLAMA_70B_TP8 = {
    **COMMON, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 16032, "hidden_size": 8192,
    "intermediate_size": 3584, "num_hidden_layers": 16, "num_attention_heads": 8, "num_key_value_heads": 1,
}  # fmt: skip
TINY = {
    **COMMON, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "torch_dtype": "float32",
}  # fmt: skip
TINY_LLAMA = {**TINY, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}

PREFILL = {
    "prefill 16k": Load(128, 1024, 1024, 1, 16),
    "prefill 8k": Load(64, 1024, 1024, 1, 8),
    "prefill offline": Load(96, 512, 2048, 1, 96),
}
MIXED = {"mixed": Load(48, 64, 2048, 16, 4)}
DECODE = {f"batch {n}": Load(n, 128, 128, 32, n) for n in (1, 4, 16, 64, 256)}


# short prompts: what is measured are vLLM's CUDA Graphs
LORA_DECODE = {f"decode {n}": Load(n, 16, 16, 64, n) for n in (1, 16, 64, 256)}
LORA = {"enable_lora": True, "max_loras": 4, "max_lora_rank": 16}
# fewer graphs than vLLM captures as it comes, in all ways alike: engines are ready sooner
LORA_GPU = {**LORA, "max_num_seqs": 256, "max_num_batched_tokens": 4096,
            "compilation_config": {"cudagraph_capture_sizes": [1, 16, 64, 256]}}  # fmt: skip


def _gpu(kv_gib: float) -> dict[str, Any]:
    # several engines share the device: each gets its cache by name, and asks for no share of what is free
    return {"kv_cache_memory_bytes": int(kv_gib * GIB), "gpu_memory_utilization": 0.03, "max_model_len": 4096,
            "max_num_batched_tokens": 16384}  # fmt: skip


SUITES = (
    Suite("llama-3-70b TP8 emulated", LLAMA_70B_TP8,
          {**BASELINES, **_without_overlap(NANOFLOW), TWO_BATCH: _strategy(TWO_BATCH), AUTO: _strategy(AUTO)},
          {**PREFILL, "batch 256": DECODE["batch 256"], **MIXED}, _gpu(2), is_emulated=True),
    Suite("qwen3-8b", QWEN3_8B, {DEFAULT: {}, AGAIN: {}, **AS_IT_COMES}, {**DECODE, "prefill 8k": PREFILL["prefill 8k"], **MIXED}, _gpu(8)),
    Suite("qwen3-30b-a3b", QWEN3_30B_A3B, {DEFAULT: {}, AGAIN: {}, **AS_IT_COMES},
          {**DECODE, "prefill 8k": PREFILL["prefill 8k"], **MIXED}, _gpu(3)),
    Suite("llama-3-8b lora", LLAMA_8B,
          {DEFAULT: {}, AGAIN: {}, DUAL: {"VLLM_LORA_ENABLE_DUAL_STREAM": "1"}, BRANCHES: IN_GRAPHS[BRANCHES]},
          LORA_DECODE, {**_gpu(5), **LORA_GPU}, adapters=4),
)  # fmt: skip
_TINY_ENGINE = {"max_model_len": 256, "max_num_batched_tokens": 64, "max_num_seqs": 8, "enforce_eager": True}
TINY_SUITES = (
    Suite("tiny", TINY, {PLAIN: V1, AGAIN: V1, **_without_overlap("two_batch", min_tokens=16)}, {"mixed": Load(6, 8, 60, 3, 2)},
          _TINY_ENGINE),
    Suite("tiny emulated", TINY, {PLAIN: V1, "two_batch": _strategy("two_batch", min_tokens=16)}, {"prefill": Load(24, 30, 30, 2, 2)},
          _TINY_ENGINE, is_emulated=True),
    Suite("tiny lora", TINY_LLAMA, {PLAIN: V1, BRANCHES_V1: IN_GRAPHS[BRANCHES_V1]}, {"decode 4": Load(8, 8, 20, 4, 4)},
          {**_TINY_ENGINE, **LORA, "max_loras": 3, "max_lora_rank": 8}, adapters=3),
)  # fmt: skip
