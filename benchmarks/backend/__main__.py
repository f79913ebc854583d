"""The price of being under DynaFlow, against torch.compile and torch.compile in a CUDA Graph.

    python -m benchmarks.backend [--rows GLOBS] [--only SECTIONS] [--json FILE]      measure a shard, merge it into the file
    python -m benchmarks.backend --merge FILE ...                                    merge files from another machine
    python -m benchmarks.backend --plot                                              plot and docs/backend.md from the file
    python -m benchmarks.backend --tiny --device cpu --json out/backend-tiny.json    everything, small, without a GPU
    python -m benchmarks.backend --list                                              rows and sections

Sections: host, time, split, trace, equal (a process per row, all variants of a row built once), first and layers (fresh processes). The
file is written after every row and section. `--limit-s` stops before a new row or section once so many seconds have passed, says what
was not run, and ends with 3.
Compiled code is kept where TORCHINDUCTOR_CACHE_DIR and TRITON_CACHE_DIR say: carry these folders to save time in the next call.
Ends with 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.backend import first, report
from benchmarks.backend.models import ROWS, Row, select
from benchmarks.backend.plot import plot
from benchmarks.backend.sections import SECTIONS, Effort
from benchmarks.backend.variants import Variants
from benchmarks.store import Result, command, failed, load, publish, stamped

# rows of section `first`, where --rows does not say: each costs six processes
FIRST_ROWS = "llama decode b=16,resnet50*"
LAYERS_ROW = f"llama blocks, {first.FEW} and {first.MANY}"


def main() -> int:
    args = _arguments()
    if args.child:
        first.run_child(args.child)
        return 0
    if args.list:
        print("rows     ", ", ".join(r.name for r in ROWS), "\nsections ", ", ".join(report.SECTIONS))
        return 0
    if publish(args, report, plot):
        return 0
    return Suite(args).run()


class Suite:
    """One shard."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.began = time.perf_counter()
        self.effort = Effort(args.rounds, args.host_steps, args.replays)
        self.options: dict[str, Any] = {} if args.compiler == "auto" else {"compiler": args.compiler}
        self.made_by = command("backend", sys.argv[1:])
        self.done: list[Result] = []
        self.not_run: list[str] = []

    def run(self) -> int:
        args = self.args
        torch.set_grad_enabled(False)
        chosen = [s for s in report.SECTIONS if s in args.only.split(",")]
        in_process = [s for s in SECTIONS if s in chosen]
        rows = select(args.rows or "*") if in_process else []
        for row in rows:
            if len(rows) == 1:
                self._row(row, in_process)
            else:
                self._alone(row, in_process)
        if "first" in chosen:
            for row in select(args.rows or FIRST_ROWS):
                self._section(row.name, "first", row.config(args.tiny),
                              lambda: first.first_section(row, args.tiny, args.device, self.options))  # fmt: skip
        if "layers" in chosen:
            self._section(LAYERS_ROW, "layers", {}, lambda: first.layers_section(args.tiny, args.device, self.options))
        return self._end()

    def _alone(self, row: Row, sections: list[str]) -> None:
        """A row in a process of its own: what the profiler leaves behind would slow the next one down."""
        args = self.args
        if self._is_late():
            self.not_run += [f"{s}: {row.name}" for s in sections]
            return
        wish = {"--rows": row.name, "--only": ",".join(sections), "--device": args.device, "--compiler": args.compiler, "--json": args.json,
                "--rounds": args.rounds, "--host-steps": args.host_steps, "--replays": args.replays,
                "--limit-s": args.limit_s - self._seconds()}  # fmt: skip
        words = [str(word) for pair in wish.items() for word in pair] + ["--tiny"] * args.tiny
        ended = subprocess.run([sys.executable, "-m", "benchmarks.backend", *words], check=False)
        if ended.returncode not in (0, 1):
            self.not_run += [f"{s}: {row.name}, ended with {ended.returncode}" for s in sections]
        self.done += [r for r in load(args.json) if r["row"] == row.name and r["section"] in sections]

    def _row(self, row: Row, sections: list[str]) -> None:
        args = self.args
        if self._is_late():
            self.not_run += [f"{s}: {row.name}" for s in sections]
            return
        print(f"{row.name} ({self._seconds():.0f} s)", flush=True)
        began = time.perf_counter()
        torch._dynamo.utils.counters.clear()
        try:
            case = row.case(args.device, torch.bfloat16, args.tiny)
            variants = Variants(case, args.device, self.options)
        except Exception as error:
            traceback.print_exc()
            for section in sections:
                self._keep(row.name, section, row.config(args.tiny), failed(section, error))
            return
        print(f"  model built in {time.perf_counter() - began:.1f} s", flush=True)
        for section in sections:
            measure = partial(SECTIONS[section], case, variants, self.effort)
            self._section(row.name, section, row.config(args.tiny), measure, variants)
        del case, variants, measure
        torch._dynamo.reset()
        gc.collect()
        if args.device.startswith("cuda"):
            torch.cuda.empty_cache()

    def _section(self, row: str, section: str, config: Result, measure: Any, variants: Variants | None = None) -> None:
        if self._is_late():
            self.not_run.append(f"{section}: {row}")
            return
        print(f"  {section}: {row}", flush=True)
        began = time.perf_counter()
        try:
            found = measure()
        except Exception as error:  # what does not work stands in the file
            traceback.print_exc()
            found = failed(section, error)
        seconds = round(time.perf_counter() - began, 1)
        if variants is not None:
            found |= _notes(found, variants)
        found["seconds"] = seconds
        self._keep(row, section, config, found)
        print(f"  {section}: {seconds} s", flush=True)

    def _keep(self, row: str, section: str, config: Result, found: Result) -> None:
        args = self.args
        config = {"dtype": "bf16", **config, **self.options, **({"tiny": True} if args.tiny else {})}
        self.done.append(stamped(row, section, config, found, self.made_by, args.device))
        report.save(args.json, report.merged(load(args.json), self.done))

    def _end(self) -> int:
        print(f"\n{self._seconds():.0f} s; compiled code on disk: {_cache_mib():.0f} MiB in {_cache_folder()}\n")
        if self.done:
            print(report.table(report.merged(self.done)))
        if self.not_run:
            print(f"NOT RUN (past --limit-s {self.args.limit_s:.0f}): " + "; ".join(self.not_run))
            return 3
        return 0 if all(t["is_met"] for r in self.done for t in r["targets"]) else 1

    def _seconds(self) -> float:
        return time.perf_counter() - self.began

    def _is_late(self) -> bool:
        return self._seconds() > self.args.limit_s


def _notes(found: Result, variants: Variants) -> Result:
    """What a reader of the row has to know: variants that are missing, warnings, graph breaks, how long variants took to build."""
    built = variants._made.values()
    breaks = dict(torch._dynamo.utils.counters["graph_break"])
    notes = [found.get("note", ""), *(f"{v.name}: {w}" for v in built for w in v.warnings)]
    notes += [f"{n} graph breaks: {str(reason)[:80]}" for reason, n in breaks.items()]
    notes += [f"{name} not measured: {reason}" for name, reason in variants.missing.items()]
    return {"note": "; ".join(filter(None, notes)), "build_s": {v.name: v.build_s for v in built}}


def _cache_folder() -> Path:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir())


def _cache_mib() -> float:
    folders = {_cache_folder(), Path(os.environ.get("TRITON_CACHE_DIR", _cache_folder()))}
    return sum(f.stat().st_size for folder in folders if folder.exists() for f in folder.rglob("*") if f.is_file()) / 2**20


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", help=f"comma-separated globs over row names; all, and for `first`: {FIRST_ROWS}")
    parser.add_argument("--only", default=",".join(report.SECTIONS), help="comma-separated sections")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="small models")
    parser.add_argument("--compiler", default="auto", help="compiler= of every df.compile")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--host-steps", type=int, default=200)
    parser.add_argument("--replays", type=int, default=1000)
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="start nothing new after so many seconds")
    parser.add_argument("--json", type=Path, default=report.RESULTS)
    parser.add_argument("--page", type=Path, default=report.PAGE)
    parser.add_argument("--merge", type=Path, nargs="*", default=[])
    parser.add_argument("--plot", action="store_true", help="plot and page from the json, measure nothing")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    unknown = set(args.only.split(",")) - set(report.SECTIONS)
    if unknown:
        parser.error(f"unknown section {', '.join(sorted(unknown))}; sections: {', '.join(report.SECTIONS)}")
    if args.tiny and args.json == report.RESULTS:
        parser.error("--tiny does not go into benchmarks/results: give --json")
    return args


if __name__ == "__main__":
    raise SystemExit(main())
