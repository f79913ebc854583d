"""One vLLM engine in a process of its own, under a load that repeats exactly: requests are added engine step by engine step.

    python tests/systems/vllm_load.py '{"model": "...", "arrivals": [[0, [5, 7], 8], ...], "engine": {...}}' results.json
"""

import json
import os
import random
import sys

os.environ.update(VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1", VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="INFO")
if not os.environ.get("AS_IT_COMES"):  # in several processes, which send each other plain data alone
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_ALLOW_INSECURE_SERIALIZATION="1")


def make_model(path, kind="qwen3", layers=2, dtype="float32", **more):
    """A checkpoint with weights large enough that every token looks at the whole of its context."""
    import torch
    import transformers

    sizes = {
        "vocab_size": 509, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": layers, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 1024, "tie_word_embeddings": False,
        "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
    }  # fmt: skip
    if kind == "qwen3_moe":
        sizes.update(moe_intermediate_size=64, num_experts=8, num_experts_per_tok=2, decoder_sparse_step=1, norm_topk_prob=True)
    if kind == "gemma3":  # some layers see the last tokens alone
        sizes.update(sliding_window=48, layer_types=["sliding_attention", "full_attention"] * (layers // 2), query_pre_attn_scalar=32)
    sizes.update(more)
    names = {"qwen3": "Qwen3", "llama": "Llama", "qwen3_moe": "Qwen3Moe", "gemma3": "Gemma3"}
    config = getattr(transformers, f"{names[kind]}TextConfig" if kind == "gemma3" else f"{names[kind]}Config")(**sizes)
    torch.manual_seed(0)
    model = getattr(transformers, f"{names[kind]}ForCausalLM")(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5 * 1.5)
    model.to(getattr(torch, dtype)).save_pretrained(path)


def mixed(number=60, seed=0, longest=200, per_step=3):
    """(step, prompt, tokens to generate): prompts of mixed lengths, of which every third one begins as an earlier one does."""
    rng = random.Random(seed)
    prompts = []
    for i in range(number):
        length = rng.choice([rng.randint(1, 8), rng.randint(9, 60), rng.randint(61, longest)])
        prompt = [rng.randrange(3, 509) for _ in range(length)]
        if i % 3 == 2:
            same = prompts[rng.randrange(max(0, i - 6), i)][:longest]
            prompt = same + prompt[: max(1, length - len(same))]
        prompts.append(prompt)
    return [(i // per_step, prompt, rng.randint(2, 16)) for i, prompt in enumerate(prompts)]


def reader_before_writer(length_behind):
    """In step 2, a request takes the place of one that has ended, before another whose prompt it shares and which is only being computed.
    Of one more request, `length_behind` tokens come behind both."""
    rng = random.Random(1)
    first, writer, behind = ([rng.randrange(3, 509) for _ in range(n)] for n in (4, 300, length_behind))
    reader = writer[:288] + [rng.randrange(3, 509) for _ in range(20)]
    return [(0, first, 2), (0, writer, 8), (2, reader, 8), *([(2, behind, 8)] if behind else [])]


def reader_beside_writer(length_behind):
    """In one step, a prompt, and a request that has one token left to compute behind what it shares of that prompt: as if it decoded.
    Of one more request, `length_behind` tokens come behind both."""
    rng = random.Random(1)
    writer, behind = ([rng.randrange(3, 509) for _ in range(n)] for n in (100, length_behind))
    return [(0, writer, 8), (0, [*writer[:96], 7], 8), *([(0, behind, 8)] if behind else [])]


def make_mistake(name):
    """What a test's twin leaves out, to see that it is needed."""
    from dynaflow.integrations import steps, vllm

    if name == "order":
        vllm._cache_of_layer = lambda call: []
    elif name == "window":
        readers = steps.readers_and_writers
        steps.readers_and_writers = lambda computed, starts, blocks, size, window: readers(computed, starts, blocks, size)
    else:
        assert name == "together"
        steps.readers_and_writers = lambda *_: set()


def be_like_cuda():
    """What models call on CUDA and not on the CPU: experts as one opaque op, and vLLM's own ops, which a pass of its compiler lowers."""
    import torch
    import vllm.ir
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    MoERunner._select_forward = lambda self: torch.ops.vllm.moe_forward
    vllm.ir.set_default_torch_wrap(True)
    vllm.ir.set_default_torch_wrap = lambda enable: None


def run(options):
    from vllm import LLM

    from benchmarks.vllm_serving.engine import served

    if options.get("mistake"):
        make_mistake(options["mistake"])
    if options.get("like_cuda"):
        be_like_cuda()
    engine = {
        "skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 512, "max_num_batched_tokens": 128, "max_num_seqs": 24,
        "block_size": 32, "enforce_eager": True, "enable_prefix_caching": True, "seed": 0,
    }  # fmt: skip
    llm = LLM(options["model"], **{**engine, **options.get("engine", {})})
    tokens, cached = {}, 0
    for output in served(llm, options["arrivals"]):
        tokens[output.request_id] = list(output.outputs[0].token_ids)
        cached += output.num_cached_tokens or 0
    stats = llm.collective_rpc("dynaflow_stats" if os.environ.get("AS_IT_COMES") else _stats)
    return {"tokens": tokens, "cached_tokens": cached, "stats": stats}


def _stats(worker):
    import dynaflow as df
    from dynaflow.integrations.vllm import stats

    engine = df.stats()
    return {**vars(stats()), "captures": engine.captures, "launches": engine.num_launches, "part_launches": engine.num_part_launches}


if __name__ == "__main__":
    results = run(json.loads(sys.argv[1]))
    with open(sys.argv[2], "w") as file:
        json.dump(results, file)
