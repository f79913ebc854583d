"""Serving with vLLM: plain, and under strategies (ways and models: `suites.py`).

    python -m benchmarks.vllm_serving [--suites GLOBS] [--loads GLOBS] [--ways GLOBS] [--limit-s S]     measure (needs vLLM and a GPU)
    python -m benchmarks.vllm_serving --merge FILE ... | --plot | --list
    python -m benchmarks.vllm_serving --tiny --json out/vllm_serving.json       small, on the CPU (`build/systems/vllm/bin/python`)

1. Suite by suite: every way is an engine in a process of its own, from the same config.json with the same random weights, with vLLM's
   own compilation and CUDA Graphs as they come. All are started at once, behind those that measure as they start ("branches"), each
   of which is alone. Nothing is timed until all of them are ready. (Commands side by side start theirs side by side, too.)
2. Of each load, the beginning is served by all at once: models are captured, parts are compiled. Then each serves the load once alone;
   what takes turns to decide ("auto") decides here.
3. Rounds: the ways serve the same load one after another, the first one moves on by one each round. Short loads are served several times
   per round. Requests arrive engine step by engine step and the prefix cache is emptied before each, so that rounds are equal. What
   was served while the machine was slow is left out, unless all of the round was: small steps are the host's time (`pace.py`).
4. A speedup is the fastest baseline's time over the way's own. Greedy tokens are compared request by request: in fp32 they must be equal;
   in bf16 a part's matrix products may be rounded otherwise than the whole step's, near-ties then fall the other way, and the share of
   equal requests is what is reported.

Rows are saved as they are finished. An engine that fails is said, with the end of its log; the others go on without it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from benchmarks import store, turn
from benchmarks.runner import slug
from benchmarks.store import Result
from benchmarks.vllm_serving import adapters, report
from benchmarks.vllm_serving.engine import Engine, EngineEnded, serve
from benchmarks.vllm_serving.suites import SUITES, TINY_SUITES, Load, Suite

# what a way should serve per round at least
ROUND_MS = 400.0
MAX_TIMES = 12
MIN_ROUNDS = 6
# for an engine to serve a load, parts' compilations included
MAX_WAIT_S = 150.0


class Measurement:
    def __init__(self, args: argparse.Namespace, folder: Path):
        self.args, self.folder = args, folder
        self.began = time.perf_counter()
        # of the suite under way
        self.engines: dict[str, Engine] = {}
        self.num_engines = 0
        # what could not be had, and why
        self.failed: dict[str, str] = {}
        self.not_run: list[str] = []

    def left_s(self) -> float:
        return float(self.args.limit_s - (time.perf_counter() - self.began))

    def say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self.began:4.0f} s] {text}", flush=True)

    def run(self, suites: Sequence[Suite]) -> int:
        machine = turn.Machine()
        try:
            for suite in suites:
                while not machine.try_share():
                    time.sleep(turn.POLL_S)
                self.start(suite)
                while not machine.try_own():
                    time.sleep(turn.POLL_S)
                for load in _chosen(suite.loads, self.args.loads):
                    self.measure(suite, load)
                self.stop()
                machine.let_others()
        finally:
            self.stop()
            machine.leave()
        return self.end()

    def stop(self) -> None:
        for engine in self.engines.values():
            engine.kill()
        self.engines = {}

    def start(self, suite: Suite) -> None:
        """1."""
        logs = self.args.logs or self.folder
        logs.mkdir(parents=True, exist_ok=True)
        wish = self.wish(suite)
        ways = _chosen(suite.ways, self.args.ways)
        # what measures as it starts is alone on the device
        for group in (*([way] for way in ways if suite.measures(way)), [way for way in ways if not suite.measures(way)]):
            ends = time.perf_counter() + self.args.start_s
            for way in group:
                log = logs / f"{slug(suite.name)}-{slug(way)}.log"
                self.engines[way] = Engine(way, wish, suite.ways[way], log, self.num_engines)
                self.num_engines += 1
            for way in group:
                if self.answer(suite, way, ends - time.perf_counter()) is not None:
                    self.say(f"{suite.name}, {way}: ready")

    def wish(self, suite: Suite) -> Result:
        """What an engine of this suite is told."""
        model = self.folder / slug(suite.name)
        model.mkdir()
        (model / "config.json").write_text(json.dumps(suite.model))
        options = {"skip_tokenizer_init": True, "load_format": "dummy", "seed": 0, "dtype": suite.model["torch_dtype"], **suite.engine}
        paths = adapters.make(model, suite.model, suite.adapters, options["max_lora_rank"]) if suite.adapters else []
        return {"model": str(model), "vocabulary": suite.model["vocab_size"], "engine": options, "is_emulated": suite.is_emulated,
                "adapters": paths}  # fmt: skip

    def answer(self, suite: Suite, way: str, limit_s: float = MAX_WAIT_S) -> Any:
        """None where the engine is lost; the others go on."""
        try:
            return self.engines[way].wait(min(self.left_s(), limit_s))
        except EngineEnded as error:
            self.lose(suite, way, error)
            return None

    def lose(self, suite: Suite, way: str, error: EngineEnded) -> None:
        self.failed[f"{suite.name}, {way}"] = str(error)
        self.say(f"FAILED: {suite.name}, {error}")
        del self.engines[way]

    def served(self, suite: Suite, way: str, load: Load, times: int = 1, is_timed: bool = False) -> Any:
        try:
            self.engines[way].ask(load, times, is_timed)
        except EngineEnded as error:
            self.lose(suite, way, error)
            return None
        return self.answer(suite, way)

    def measure(self, suite: Suite, name: str) -> None:
        """2 and 3."""
        load, engines = suite.loads[name], self.engines
        if self.left_s() < self.args.min_load_s or not engines:
            self.not_run.append(f"{suite.name}, {name}")
            return
        for way in list(engines):  # all at once
            try:
                engines[way].ask(load.beginning())
            except EngineEnded as error:
                self.lose(suite, way, error)
        for way in list(engines):
            self.answer(suite, way)
        self.say(f"{suite.name}, {name}: compiled")
        times: dict[str, int] = {}
        for way in list(engines):
            if (found := self.served(suite, way, load)) is not None:
                times[way] = max(1, min(MAX_TIMES, round(ROUND_MS / found["ms"][0])))
        often = max(times.values(), default=1)
        rounds: dict[str, list[Result]] = {way: [] for way in engines}
        ends = time.perf_counter() + self.args.load_s
        for number in range(self.args.rounds):
            if not engines or self.left_s() < 5 or (number >= MIN_ROUNDS and time.perf_counter() > ends):
                break
            order = list(engines)[number % len(engines) :] + list(engines)[: number % len(engines)]
            for way in order:
                if (found := self.served(suite, way, load, often, is_timed=True)) is not None:
                    rounds[way].append(found)
        done = min((len(rounds[way]) for way in engines), default=0)
        if done:
            rows = report.rows(suite, name, {way: rounds[way][:done] for way in engines}, self.failed, self.args)
            report.save(self.args.json, report.merged(store.load(self.args.json), rows))
            self.say(report.table(rows))

    def end(self) -> int:
        rows = store.load(self.args.json)
        print(f"\n{time.perf_counter() - self.began:.0f} s\n{report.table(rows)}")
        for title, found in (("FAILED", list(self.failed)), (f"NOT RUN (--limit-s {self.args.limit_s:.0f})", self.not_run)):
            if found:
                print(f"{title}: " + "; ".join(found))
        if self.not_run:
            return 3
        return 1 if self.failed or not all(t["is_met"] for t in report.targets(rows)) else 0


def _chosen(names: Any, globs: str) -> list[str]:
    return [name for name in names if any(fnmatchcase(name, glob) for glob in globs.split(";"))]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("suites", "loads", "ways"):
        parser.add_argument(f"--{name}", default="*", help="globs, with ; between them")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--start-s", type=float, default=600.0, help="go on without engines that are not ready after so many seconds")
    parser.add_argument("--load-s", type=float, default=20.0, help="start no round of a load after so many seconds")
    parser.add_argument("--min-load-s", type=float, default=15.0, help="start no load with less than this left")
    parser.add_argument("--limit-s", type=float, default=math.inf)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--logs", type=Path, help="a folder for what the engines say")
    parser.add_argument("--json", type=Path, default=report.RESULTS)
    parser.add_argument("--page", type=Path, default=report.PAGE)
    parser.add_argument("--merge", type=Path, nargs="+", default=[])
    parser.add_argument("--plot", action="store_true", help="plot and page from the json, measure nothing")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.tiny and args.json == report.RESULTS:
        parser.error("--tiny does not go into benchmarks/results: give --json")
    return args


def main() -> int:
    args = _arguments()
    if args.serve:
        serve(json.loads(args.serve))
        return 0
    suites = [s for s in (TINY_SUITES if args.tiny else SUITES) if _chosen([s.name], args.suites)]
    if args.list:
        for suite in suites:
            print(f"{suite.name}\n  ways   {'; '.join(suite.ways)}\n  loads  {'; '.join(suite.loads)}")
        return 0
    if store.publish(args, report, report.plot):
        return 0
    args.made_by = store.command("vllm_serving", sys.argv[1:]).strip()
    with tempfile.TemporaryDirectory() as folder:
        return Measurement(args, Path(folder)).run(suites)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # vLLM's threads may outlive its engine
    os._exit(code)
