"""Serving with vLLM: plain, under a strategy, and under the strategy's parts without their overlap.

    python -m benchmarks.vllm_serving                                          measure and write the file (needs vLLM and a GPU)
    python -m benchmarks.vllm_serving --loads prefill --strategies two_batch   some of it
    python -m benchmarks.vllm_serving --tiny --json out/vllm_serving.json      small, on the CPU (`build/systems/vllm/bin/python`)

Every way is an engine in a process of its own, all at once, from the same config.json with the same random weights (load_format="dummy"),
with vLLM's own compilation and CUDA Graphs as they come. They serve the same load in turns, round by round; requests are added engine step
by engine step, and the prefix cache is emptied before each round, so that rounds are equal. Ways:

    vllm            without DynaFlow
    <strategy>      steps of --min-tokens tokens or more in parts
    <strategy>, no overlap     the same parts on one stream: what splitting costs

A round's time is that of the whole load. Greedy tokens are compared request by request: in fp32 they must be equal; in bf16 a part's matrix
products may be rounded otherwise than the whole step's, near-ties then fall the other way, and the share of equal requests is what is
reported.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import store
from benchmarks.measure import Times, ratio
from benchmarks.store import Result, stamped

RESULTS = store.RESULTS / "vllm_serving.json"
# what a child's answers begin with, between the lines that vLLM logs
ANSWER = "ANSWER "
# 8 of the 36 layers of Qwen3-8B
MODEL: Result = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 8, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False,
    "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "bfloat16",
}  # fmt: skip
TINY_MODEL: Result = {
    **MODEL, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "torch_dtype": "float32",
}  # fmt: skip
# requests, shortest and longest prompt, tokens to generate, requests added per step
LOADS = {"prefill": (256, 1024, 1024, 1, 256), "mixed": (256, 64, 2048, 64, 4), "decode": (512, 16, 64, 128, 512)}
TINY_LOADS = {"mixed": (6, 8, 60, 3, 2)}


def arrivals(load: Sequence[int], vocabulary: int) -> list[tuple[int, list[int], int]]:
    """(step, prompt, tokens to generate)"""
    number, shortest, longest, tokens, per_step = load
    rng = random.Random(0)
    prompts = [[rng.randrange(2, vocabulary) for _ in range(rng.randint(shortest, longest))] for _ in range(number)]
    return [(i // per_step, prompt, tokens) for i, prompt in enumerate(prompts)]


# ---------------------------------------------------------------------------- a child: one engine


def served(llm: Any, requests: Sequence[Any]) -> Iterator[Any]:
    """Requests (step of the engine, prompt, tokens to make) as they end. They are added step by step, so that it repeats exactly."""
    from vllm import SamplingParams

    waiting, step = list(enumerate(requests)), 0
    while waiting or llm.llm_engine.has_unfinished_requests():
        while waiting and waiting[0][1][0] <= step:
            number, (_, prompt, max_tokens) = waiting.pop(0)
            sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
            llm.llm_engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
        step += 1
        yield from (output for output in llm.llm_engine.step() if output.finished)


def serve(wish: Result) -> None:
    """Reads the name of a load per line, serves it, and answers."""
    from vllm import LLM

    from dynaflow.integrations.vllm import stats

    llm = LLM(wish["model"], **wish["engine"])

    def round_(load: Sequence[int]) -> Result:
        llm.reset_prefix_cache()
        before, requests = copy.deepcopy(stats()), arrivals(load, wish["vocabulary"])
        began = time.perf_counter()
        tokens = {output.request_id: list(output.outputs[0].token_ids) for output in served(llm, requests)}
        ms = (time.perf_counter() - began) * 1e3
        found = stats()
        return {"ms": ms, "tokens": tokens, "steps": found.steps - before.steps, "split_steps": found.split_steps - before.split_steps,
                "fallbacks": dict(found.fallbacks - before.fallbacks), "refusal": found.refusal}  # fmt: skip

    print(ANSWER + json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(ANSWER + json.dumps(round_(json.loads(line))), flush=True)


class Child:
    def __init__(self, way: str, wish: Result, log: Path):
        self.way, self.log = way, log
        env = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0",
               "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}  # fmt: skip
        words = [sys.executable, "-m", "benchmarks.vllm_serving", "--serve", json.dumps(wish)]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log.open("w"), env=env, text=True)
        self._answer()

    def round(self, load: Sequence[int]) -> Result:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(load) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))
        raise RuntimeError(f"{self.way} ended:\n" + self.log.read_text()[-3000:])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


# ---------------------------------------------------------------------------- results


def measure(args: argparse.Namespace, folder: Path) -> list[Result]:
    config, loads = (TINY_MODEL, TINY_LOADS) if args.tiny else (MODEL, LOADS)
    (folder / "config.json").write_text(json.dumps(config))
    ways: dict[str, Result] = {"vllm": {}}
    for strategy in args.strategies:
        for runtime, name in (("auto", strategy), ("serial", f"{strategy}, no overlap")):
            asked = {"strategy": strategy, "min_tokens": args.min_tokens, "runtime": runtime}
            ways[name] = {"additional_config": {"dynaflow": asked}}
    engine = {"skip_tokenizer_init": True, "load_format": "dummy", "seed": 0, "dtype": config["torch_dtype"], "max_model_len": 4096,
              "max_num_batched_tokens": 8192, "max_num_seqs": 512, "gpu_memory_utilization": round(0.9 / len(ways), 2)}  # fmt: skip
    if args.tiny:
        engine.update(max_model_len=256, max_num_batched_tokens=64, max_num_seqs=8, enforce_eager=True)
    children = {}
    for way, more in ways.items():
        wish = {"model": str(folder), "vocabulary": config["vocab_size"], "engine": {**engine, **more}}
        children[way] = Child(way, wish, folder / f"{len(children)}.log")
    rows = []
    for name in args.loads or loads:
        rounds: dict[str, list[Result]] = {way: [] for way in ways}
        for number in range(args.rounds + 1):
            order = list(ways)[number % len(ways) :] + list(ways)[: number % len(ways)]
            for way in order:
                found = children[way].round(loads[name])
                if number:  # the first one captures and compiles
                    rounds[way].append(found)
        rows += [as_row(name, strategy, loads[name], rounds, config, args) for strategy in args.strategies]
    for child in children.values():
        child.close()
    return rows


def as_row(
    load: str, strategy: str, shape: Sequence[int], rounds: dict[str, list[Result]], model: Result, args: argparse.Namespace
) -> Result:
    import vllm

    times = {way: Times([[r["ms"]] for r in found]) for way, found in rounds.items()}
    ours, plain = rounds[strategy][-1], rounds["vllm"][-1]
    gain = ratio(times["vllm"], times[strategy])
    equal = sum(ours["tokens"][number] == tokens for number, tokens in plain["tokens"].items()) / len(plain["tokens"])
    num_tokens = sum(len(prompt) + tokens for _, prompt, tokens in arrivals(shape, model["vocab_size"]))
    figures = {way: {**t.figures(), "tokens_per_s": round(num_tokens / t.figures()["median_ms"] * 1e3)} for way, t in times.items()}
    config = {"load": dict(zip(("requests", "shortest", "longest", "generated", "per_step"), shape)), "strategy": strategy,
              "layers": model["num_hidden_layers"], "hidden": model["hidden_size"], "dtype": model["torch_dtype"], "vllm": vllm.__version__,
              "min_tokens": args.min_tokens, **({"tiny": True} if args.tiny else {})}  # fmt: skip
    result = {
        "repetitions": args.rounds, "ours": figures[strategy],
        "baselines": {way: figures[way] for way in ("vllm", f"{strategy}, no overlap")}, "against": "vllm", "speedup": gain["ratio"],
        "interval": [gain["low"], gain["high"]], "equal": f"{equal:.0%} of requests token by token",
        "steps": ours["steps"], "split_steps": ours["split_steps"], "fallbacks": ours["fallbacks"], "note": ours["refusal"],
    }  # fmt: skip
    return stamped(f"{load}, {strategy}", "serving", config, result, args.made_by, "cuda" if torch.cuda.is_available() else "cpu")


def summary(rows: Sequence[Result]) -> Result:
    return {"rows": len(rows), "geomean_speedup": round(store.geomean([r["speedup"] for r in rows]), 4),
            "min_speedup": min(r["speedup"] for r in rows), "never_split": [r["row"] for r in rows if not r["split_steps"]]}  # fmt: skip


def table(rows: Sequence[Result]) -> str:
    lines = []
    for r in rows:
        ways = {r["config"]["strategy"]: r["ours"], **r["baselines"]}
        rates = ", ".join(f"{way} {f['tokens_per_s']:,} tokens/s ({f['median_ms']:.0f} ms)" for way, f in ways.items())
        low, high = r["interval"]
        gain = f"{r['speedup']:.3f}x ({low:.3f} to {high:.3f}); {r['split_steps']} of {r['steps']} steps split"
        lines += [r["row"], f"  {rates}", f"  {gain}; equal: {r['equal']}; fallbacks {r['fallbacks']} {r['note']}"]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", nargs="+", default=["two_batch", "dynaflow:NanoFlow"])
    parser.add_argument("--loads", nargs="+", choices=[*LOADS])
    parser.add_argument("--min-tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(json.loads(args.serve))
        return 0
    if args.tiny and args.json == RESULTS:
        parser.error("--tiny does not go into benchmarks/results: give --json")
    args.made_by = store.command("vllm_serving", sys.argv[1:]).strip()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(args, Path(folder))
    store.save(args.json, "vllm_serving", rows, summary(rows))
    print(table(rows))
    return 1 if summary(rows)["never_split"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
