"""The price of being under DynaFlow, against torch.compile and torch.compile in a CUDA Graph.

    python -m benchmarks.backend [--rows GLOBS] [--only SECTIONS] [--json FILE]      measure a shard, merge it into the file
    python -m benchmarks.backend --merge FILE ...                                    merge files from another machine
    python -m benchmarks.backend --plot                                              plot and docs/backend.md from the file
    python -m benchmarks.backend --tiny --device cpu --json out/backend-tiny.json    everything, small, without a GPU
    python -m benchmarks.backend --list                                              rows and sections

Sections: host, time, split, trace (a process per row: rows load side by side, and are timed in turns, each alone), equal (a process per
row, side by side), first and layers (fresh processes). `--limit-s` starts nothing new that would not fit, ends what runs past it, says
what was not run, and ends with 3.
Compiled code is kept where TORCHINDUCTOR_CACHE_DIR and TRITON_CACHE_DIR say: carry these folders to save time in the next call.
Ends with 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from typing import Any

from benchmarks import runner, turn
from benchmarks.backend import child, first, report
from benchmarks.backend.models import ROWS, select
from benchmarks.backend.plot import plot
from benchmarks.backend.sections import SECTIONS
from benchmarks.store import Result, command, failed, load, stamped

# rows of section `first`, where --rows does not say: each costs six processes
FIRST_ROWS = "llama decode b=16,resnet50*"
LAYERS_ROW = f"llama blocks, {first.FEW} and {first.MANY}"


def main() -> int:
    listing = f"rows      {', '.join(r.name for r in ROWS)}\nsections  {', '.join(report.SECTIONS)}"
    return runner.main(_arguments(), Suite, child.run, listing, report, plot)


class Suite(runner.Shard):
    """One shard."""

    def __init__(self, args: argparse.Namespace):
        super().__init__("backend", args)
        options: Result = {} if args.compiler == "auto" else {"compiler": args.compiler}
        self.made_by = command("backend", sys.argv[1:])
        self.wish: Result = {"tiny": args.tiny, "device": args.device, "options": options, "made_by": self.made_by, "rounds": args.rounds,
                             "host_steps": args.host_steps, "replays": args.replays}  # fmt: skip

    def run(self) -> int:
        args = self.args
        chosen = [s for s in report.SECTIONS if s in args.only.split(",")]
        timed = [s for s in SECTIONS if s in chosen and s != "equal"]
        num_jobs = runner.default_jobs(args)
        sections = {"time": timed, "equal": [s for s in chosen if s == "equal"]}
        jobs = [runner.Job(phase, row.name, self.wish | {"sections": own})
                for phase, own in sections.items() if own for row in select(args.rows or "*")]  # fmt: skip
        for done in self.each(jobs, num_jobs, in_turns=True):
            self._keep_row(done, sections[done.phase])
        if "first" in chosen:
            for row in select(args.rows or FIRST_ROWS):
                self._section(row.name, "first", row.config(args.tiny),
                              lambda: first.first_section(row, args.tiny, args.device, self.wish["options"]))  # fmt: skip
        if "layers" in chosen:
            self._section(LAYERS_ROW, "layers", {}, lambda: first.layers_section(args.tiny, args.device, self.wish["options"]))
        return self.end(report, bool(set(chosen)))

    def _keep_row(self, done: runner.Done, sections: list[str]) -> None:
        """What the process wrote; for a section that it failed at, why. One that was ended replaces nothing that is there."""
        known, new = load(self.args.json), load(done.json)
        (row,) = select(done.row)
        if done.rc not in (None, 0):
            missing = [s for s in sections if all(r["section"] != s for r in new)]
            new += [child.stamp(row, s, failed(s, RuntimeError(done.tail[-300:])), self.wish) for s in missing]
        if known or new:
            report.save(self.args.json, report.merged(known, new))

    def _section(self, row: str, section: str, config: Result, measure: Any) -> None:
        """In fresh processes of its own."""
        if self.left_s() < runner.MIN_ROW_S:
            self.not_run.append(f"{section}: {row}")
            return
        print(f"  {section}: {row}", flush=True)
        began = time.perf_counter()
        try:
            with turn.sharing():
                found = measure()
        except Exception as error:  # what does not work stands in the file
            traceback.print_exc()
            found = failed(section, error)
        found["seconds"] = round(time.perf_counter() - began, 1)
        new = stamped(row, section, child.config(config, self.wish), found, self.made_by, self.args.device)
        report.save(self.args.json, report.merged(load(self.args.json), [new]))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", help=f"comma-separated globs over row names; all, and for `first`: {FIRST_ROWS}")
    parser.add_argument("--only", default=",".join(report.SECTIONS), help="comma-separated sections")
    parser.add_argument("--compiler", default="auto", help="compiler= of every df.compile")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--host-steps", type=int, default=200)
    parser.add_argument("--replays", type=int, default=1000)
    runner.add_options(parser, report)
    args = parser.parse_args()
    unknown = set(args.only.split(",")) - set(report.SECTIONS)
    if unknown:
        parser.error(f"unknown section {', '.join(sorted(unknown))}; sections: {', '.join(report.SECTIONS)}")
    if args.tiny and args.json == report.RESULTS:
        parser.error("--tiny does not go into benchmarks/results: give --json")
    return args


if __name__ == "__main__":
    raise SystemExit(main())
