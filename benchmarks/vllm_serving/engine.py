"""An engine in a process of its own: `Engine` is the parent's side, `serve` the child's. They speak in lines of JSON."""

from __future__ import annotations

import copy
import json
import os
import queue
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from benchmarks.pace import Core
from benchmarks.store import Result
from benchmarks.vllm_serving.suites import Load

# what a child's answers begin with, between the lines that vLLM logs
ANSWER = "ANSWER "
FIRST_PORT = 29600


def arrivals(load: Load, vocabulary: int) -> list[tuple[int, list[int], int]]:
    """(step, prompt, tokens to generate)"""
    rng = random.Random(0)
    prompts = [[rng.randrange(2, vocabulary) for _ in range(rng.randint(load.shortest, load.longest))] for _ in range(load.requests)]
    return [(i // load.per_step, prompt, load.generated) for i, prompt in enumerate(prompts)]


# ---------------------------------------------------------------------------- the child


def served(llm: Any, requests: Sequence[Any], adapters: Sequence[str] = ()) -> Iterator[Any]:
    """Requests (step of the engine, prompt, tokens to make) as they end. They are added step by step, so that it repeats exactly. Where
    there are LoRA adapters, requests take them in turns."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    lora = [LoRARequest(f"adapter{i}", i + 1, path) for i, path in enumerate(adapters)]

    waiting, step = list(enumerate(requests)), 0
    while waiting or llm.llm_engine.has_unfinished_requests():
        while waiting and waiting[0][1][0] <= step:
            number, (_, prompt, max_tokens) = waiting.pop(0)
            sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
            adapter = lora[number % len(lora)] if lora else None
            llm.llm_engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling, lora_request=adapter)
        step += 1
        yield from (output for output in llm.llm_engine.step() if output.finished)


def _fill(model: Any) -> None:
    """vLLM's own dummy weights are so small that attention says nothing: tokens would be the same whatever it computes. (On the CPU they
    are packed when they are loaded, and stay.)"""
    import torch

    for parameter in model.parameters():
        if parameter.is_cuda and parameter.dim() > 1:
            parameter.data.normal_(0, parameter.shape[-1] ** -0.5, generator=torch.Generator(parameter.device).manual_seed(0))


def serve(wish: Result) -> None:
    """Reads a load and how often per line, serves it, and answers."""
    if wish["is_emulated"]:
        from benchmarks.vllm_serving.emulated import put_all_reduces

        put_all_reduces()
    if not any(point.name == "dynaflow" for point in entry_points(group="vllm.general_plugins")):
        # it would be plain vLLM that is measured, under another name
        raise RuntimeError("vLLM does not find DynaFlow's plugin: install DynaFlow (pip install --no-deps .), or see benchmarks.lent")
    from vllm import LLM

    from dynaflow.integrations.vllm import stats

    llm = LLM(wish["model"], **wish["engine"])
    llm.apply_model(_fill)

    def answer(what: Any) -> None:
        print(ANSWER + json.dumps(what), flush=True)

    answer("ready")
    for line in sys.stdin:
        asked = json.loads(line)
        requests = arrivals(Load(**asked["load"]), wish["vocabulary"])
        before, times, loops, tokens = copy.deepcopy(stats()), [], [], {}
        # what is started while this thread sits on one core would sit there, too: compilers do, when a load is served first
        with Core() if asked["is_timed"] else nullcontext() as core:
            for _ in range(asked["times"]):
                llm.reset_prefix_cache()
                if core is not None:
                    core.settle()
                began = time.perf_counter()
                tokens = {output.request_id: list(output.outputs[0].token_ids) for output in served(llm, requests, wish["adapters"])}
                times.append((time.perf_counter() - began) * 1e3)
                loops.append(None if core is None else round(core.look(), 2))
        now = stats()
        answer({"ms": times, "loop_us": loops, "tokens": tokens, "steps": now.steps - before.steps,
                "split_steps": now.split_steps - before.split_steps, "fallbacks": dict(now.fallbacks - before.fallbacks),
                "refusal": now.refusal, "regions": now.regions, "planned_regions": now.planned_regions})  # fmt: skip


# ---------------------------------------------------------------------------- the parent


class EngineEnded(RuntimeError):
    """A child ended, or took too long, and what it said last."""


class Engine:
    """Starts at once; `wait` until it is ready."""

    def __init__(self, way: str, wish: Result, env: dict[str, str], log: Path, number: int):
        self.way, self.log = way, log
        # one process per engine, so that its steps are those of the load
        fixed = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0",
                 "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1",
                 # neither vLLM's cache nor its search for a port is made for several that start at once
                 "VLLM_CACHE_ROOT": str(Path(os.environ.get("VLLM_CACHE_ROOT", log.parent / "cache")) / log.stem),
                 "VLLM_PORT": str(FIRST_PORT + 50 * number)}  # fmt: skip
        plain = {name: value for name, value in os.environ.items() if not name.startswith("DYNAFLOW_STRATEGY")}
        words = [sys.executable, "-m", "benchmarks.vllm_serving", "--serve", json.dumps(wish)]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                         env={**plain, **fixed, **env}, text=True)  # fmt: skip
        self._answers: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self.log.open("w") as log:
            for line in self._process.stdout:
                if line.startswith(ANSWER):
                    self._answers.put(line.removeprefix(ANSWER))
                else:
                    log.write(line)
                    log.flush()
        self._answers.put(None)

    def wait(self, limit_s: float) -> Any:
        """Its next answer."""
        try:
            answer = self._answers.get(timeout=max(limit_s, 0.1))
        except queue.Empty:
            self.kill()
            raise EngineEnded(f"{self.way} did not answer in {limit_s:.0f} s:\n{self._tail()}") from None
        if answer is None:
            raise EngineEnded(f"{self.way} ended:\n{self._tail()}")
        return json.loads(answer)

    def ask(self, load: Load, times: int = 1, is_timed: bool = False) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"load": asdict(load), "times": times, "is_timed": is_timed}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise EngineEnded(f"{self.way} ended:\n{self._tail()}") from None

    def _tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:] if self.log.exists() else ""

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
