"""vLLM on a GPU, with its own compilation, CUDA Graphs and FlashAttention: steps in parts make the tokens that whole steps make.

In bf16 a part's matrix products may be rounded otherwise than the whole step's, and near-ties fall the other way; wrong attention would
change nearly all tokens. The first token of a request sees its prompt alone.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs CUDA", allow_module_level=True)
pytest.importorskip("vllm")

from tests.systems import vllm_load

LOAD = Path(vllm_load.__file__)
ENGINE = {
    "dtype": "bfloat16", "enforce_eager": False, "block_size": 16, "max_num_batched_tokens": 4096, "max_num_seqs": 256,
    "kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.02,
}  # fmt: skip
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
CASES = {
    "qwen3": ("qwen3", ("two_batch", "vllm_strategies:Uneven", "prefill_decode")),
    "qwen3_moe": ("qwen3_moe", ("two_batch",)),
}


def load():
    """Steps of 1,000 to 2,000 tokens, most of them with some requests that decode."""
    return vllm_load.mixed(number=192, per_step=32)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """(model, strategy) -> results and log, of engines that run side by side."""
    folder, running = tmp_path_factory.mktemp("vllm"), {}
    for number, (name, (kind, strategies)) in enumerate(CASES.items()):
        vllm_load.make_model(folder / name, kind, dtype="bfloat16", **SIZES)
        for strategy in (None, *strategies):
            extra = {} if strategy is None else {"additional_config": {"dynaflow": {"strategy": strategy, "min_tokens": 64}}}
            options = {"model": str(folder / name), "arrivals": load(), "engine": {**ENGINE, **extra}}
            results, log = (folder / f"{len(running)}.{suffix}" for suffix in ("json", "log"))
            env = {**os.environ, "PYTHONPATH": f"{LOAD.parent}:{os.environ.get('PYTHONPATH', '')}", "VLLM_USE_V2_MODEL_RUNNER": "0",
                   "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_CACHE_ROOT": str(folder / f"cache{len(running)}"),
                   "VLLM_PORT": str(28000 + 50 * (len(running) + 10 * number))}  # fmt: skip
            words = [sys.executable, str(LOAD), json.dumps(options), str(results)]
            process = subprocess.Popen(words, stdout=log.open("w"), stderr=subprocess.STDOUT, env=env)
            running[name, strategy] = process, results, log
    done = {}
    try:
        for key, (process, results, log) in running.items():
            code = process.wait(110)
            done[key] = (json.loads(results.read_text()) if code == 0 else None), log.read_text(errors="replace")
    finally:
        for process, _, _ in running.values():
            process.kill()
    return done


@pytest.mark.parametrize("name, strategy", [(name, s) for name, (_, strategies) in CASES.items() for s in strategies])
def test_parts_make_the_same_tokens(served, name, strategy):
    (wanted, plain_log), (results, log) = served[name, None], served[name, strategy]
    assert wanted is not None, plain_log[-3000:]
    assert results is not None, log[-6000:]
    (stats,) = results["stats"]
    assert not stats["refusal"] and stats["split_steps"] >= 4, (stats, log[-6000:])
    assert "(0 only over the whole batch)" in log
    pairs = [(tokens, results["tokens"][number]) for number, tokens in wanted["tokens"].items()]
    first, every = sum(a[0] == b[0] for a, b in pairs) / len(pairs), sum(a == b for a, b in pairs) / len(pairs)
    print(f"{name}, {strategy}: {first:.0%} of first tokens, {every:.0%} of requests are equal; {stats['split_steps']} steps split")
    assert first >= 0.9 and every >= 0.5, (first, every)
