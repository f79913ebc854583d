"""What independent branches gain: torch.compile(model, backend="dynaflow") against torch.compile in a CUDA Graph and max-autotune.

    python -m benchmarks.branches --only warm --jobs 8 --limit-s 540      compile rows side by side: fills the caches on disk
    python -m benchmarks.branches --only tune --limit-s 540               max-autotune, one row at a time: it measures as it compiles
    python -m benchmarks.branches --only time [--rows GLOBS] [--json F]   rows load side by side and are timed in turns, each alone
    python -m benchmarks.branches --only first                            time to the first result, cold and warm, fresh processes
    python -m benchmarks.branches --merge FILE ...                        merge files from another machine
    python -m benchmarks.branches --plot                                  plot and docs/branches.md from the file
    python -m benchmarks.branches --tiny --device cpu --json out/branches-tiny.json      small, without a GPU
    python -m benchmarks.branches --list                                  rows, variants and phases

Every row is a process of its own, with all its variants in it; the rows that matter most come first. `--limit-s` starts nothing new that
would not fit, ends what runs past it, says what was not run, and ends with 3. A row's figures without max-autotune are written before
max-autotune is built. Compiled code is kept where TORCHINDUCTOR_CACHE_DIR and TRITON_CACHE_DIR say. Ends with 1 when a target is
missed or a row failed. BRANCHES_LORA=own takes our own LoRA layers instead of PEFT's.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks import fresh, runner, turn
from benchmarks.branches import child, report
from benchmarks.branches.plot import plot
from benchmarks.branches.rows import HRNET, LORA, NAMES, Row, select
from benchmarks.branches.variants import COMPILE, OURS, Variants
from benchmarks.store import command, failed, load, stamped

PHASES = ("warm", "tune", "time", "first")
# rows of phase `first`, where --rows does not say: each costs four processes
FIRST_ROWS = f"{HRNET},{LORA}"


def main() -> int:
    listing = f"rows      {', '.join(NAMES)}\nvariants  {', '.join(Variants.builders)}\nphases    {', '.join(PHASES)}"
    return runner.main(_arguments(), Suite, child.run, listing, report, plot)


class Suite(runner.Shard):
    """Phases one after the other, rows in their order."""

    def __init__(self, args: argparse.Namespace):
        super().__init__("branches", args)
        self.made_by = command("branches", sys.argv[1:])

    def run(self) -> int:
        for phase in PHASES:
            if phase not in self.args.only.split(","):
                continue
            if phase == "first":
                self._first(select(self.args.rows or FIRST_ROWS))
            else:
                self._rows(phase, select(self.args.rows or "*"))
        return self.end(report, bool({"time", "first"} & set(self.args.only.split(","))))

    def _rows(self, phase: str, rows: list[Row]) -> None:
        num_jobs = self._jobs(phase)
        wish = self._wish() | {"rounds": self.args.rounds, "timelines": str(self.args.timelines.absolute()) if self.args.timelines else ""}
        for done in self.each([runner.Job(phase, r.name, wish) for r in rows], num_jobs, in_turns=phase == "time"):
            if phase == "time":
                self._keep(next(r for r in rows if r.name == done.row), done)

    def _jobs(self, phase: str) -> int:
        """Rows load side by side; max-autotune takes all cores for one."""
        return runner.default_jobs(self.args) if phase != "tune" else self.args.jobs or 1

    def _keep(self, row: Row, done: runner.Done) -> None:
        """Into the file: what the process wrote, else why there is nothing. A row ended for want of time replaces none that is there."""
        known, new = load(self.args.json), load(done.json)
        if not new and (done.rc is not None or all(r["row"] != row.name for r in known)):
            error = TimeoutError(f"ended after {done.seconds} s") if done.rc is None else RuntimeError(done.tail[-300:])
            config = report.config(row, self.args.tiny, self.args.options)
            new = [stamped(row.name, "time", config, failed("time", error), self.made_by, self.args.device)]
        if known or new:
            report.save(self.args.json, report.merged(known, new))

    def _first(self, rows: list[Row]) -> None:
        for row in rows:
            if self.left_s() < 4 * runner.MIN_ROW_S:
                self.not_run.append(f"first: {row.name}")
                continue
            wishes = {name: self._wish() | {"phase": "first", "row": row.name, "variant": name} for name in (COMPILE, OURS)}
            with turn.sharing():
                found = {"repetitions": fresh.NUM_WARM, "first": fresh.cold_and_warm("branches", wishes), "against": COMPILE}
            config = report.config(row, self.args.tiny, self.args.options)
            new = stamped(row.name, "first", config, found, self.made_by, self.args.device)
            report.save(self.args.json, report.merged(load(self.args.json), [new]))

    def _wish(self) -> dict[str, Any]:
        args = self.args
        chosen = [v for v in args.variants.split(",") if v]
        return {"tiny": args.tiny, "device": args.device, "options": args.options, "variants": chosen, "made_by": self.made_by}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", help=f"comma-separated globs over row names; all, and for `first`: {FIRST_ROWS}")
    parser.add_argument("--only", default="time", help=f"comma-separated phases: {', '.join(PHASES)}")
    parser.add_argument("--variants", default="", help="comma-separated variants; all")
    parser.add_argument("--options", type=json.loads, default={}, help='options of the backend, as json: {"runtime": "graph"}')
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--timelines", type=Path, help="also write measured timelines, for benchmarks.branches.pictures")
    runner.add_options(parser, report)
    args = parser.parse_args()
    for what, chosen, known in (("phase", args.only, PHASES), ("variant", args.variants, tuple(Variants.builders))):
        if unknown := set(chosen.split(",")) - {*known, ""}:
            parser.error(f"unknown {what} {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    if args.tiny and args.json == report.RESULTS:
        parser.error("--tiny does not go into benchmarks/results: give --json")
    return args


if __name__ == "__main__":
    raise SystemExit(main())
