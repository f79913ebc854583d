"""What strategies hide of an emulated network, per rank of models that run on many GPUs: sequential, split, split and overlapped.

    python -m benchmarks.overlap --warm --jobs 8 --limit-s 540                   compile workloads side by side: fills the caches on disk
    python -m benchmarks.overlap [--rows GLOBS] [--only STRATEGIES] [--json F]   workloads load side by side, are timed in turns, each alone
    python -m benchmarks.overlap --merge FILE ...                                merge files from another machine
    python -m benchmarks.overlap --plot                                          plot and docs/overlap.md from the file
    python -m benchmarks.overlap --tiny --device cpu --json out/overlap-tiny.json      everything, small, without a GPU
    python -m benchmarks.overlap --list                                          workloads and strategies

A workload is a process: sequential, the bounds and every strategy's two ways take turns in it. A row of the file is a strategy on a
workload. `--limit-s` starts nothing new that would not fit, ends what runs past it, says what was not run, and ends with 3. Strategies
that this version of dynaflow lacks are reported as not available. Ends with 1 when a target is missed or a workload failed. Compiled code
is kept where TORCHINDUCTOR_CACHE_DIR and TRITON_CACHE_DIR say. Every number is emulated.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks import runner, turn
from benchmarks.overlap import report
from benchmarks.overlap.plot import plot
from benchmarks.overlap.rows import WORKLOADS, Workload, select
from benchmarks.overlap.sections import measured, ways
from benchmarks.overlap.variants import STRATEGIES, WITHOUT_WORKLOAD, Variants
from benchmarks.store import Result, command, failed, load, stamped
from dynaflow.testing.network import LINKS, find_link


def main() -> int:
    listing = "\n".join((
        f"workloads  {', '.join(w.name for w in WORKLOADS)}",
        "strategies " + ", ".join(f"{name} ({', '.join(kinds)})" for name, kinds in STRATEGIES.items()),
        f"           {', '.join(f'{name} (no workload has a mixed batch)' for name in WITHOUT_WORKLOAD)}"))  # fmt: skip
    return runner.main(_arguments(), Suite, run_child, listing, report, plot)


class Suite(runner.Shard):
    def __init__(self, args: argparse.Namespace):
        super().__init__("overlap", args)
        self.wish = {"tiny": args.tiny, "device": args.device, "options": args.options, "rounds": args.rounds, "only": args.only,
                     "link": args.link, "sms": args.sms, "made_by": command("overlap", sys.argv[1:])}  # fmt: skip

    def run(self) -> int:
        args = self.args
        phase, workloads = "warm" if args.warm else "time", on_link(select(args.rows or "*"), args.link, args.sms)
        num_jobs = runner.default_jobs(args)
        jobs = [runner.Job(phase, w.name, self.wish) for w in workloads if strategies_of(w, args.only)]
        for done in self.each(jobs, num_jobs, args.min_row_s, in_turns=not args.warm):
            if not args.warm:
                self._keep(next(w for w in workloads if w.name == done.row), done)
        return self.end(report, not args.warm)

    def _keep(self, workload: Workload, done: runner.Done) -> None:
        """What the process wrote, else why there is nothing. A workload ended for want of time replaces nothing that is there."""
        known, new = load(self.args.json), load(done.json)
        if not new and done.rc is not None:
            new = failed_rows(workload, self.wish, RuntimeError(done.tail[-300:]))
        if known or new:
            report.save(self.args.json, report.merged(known, new))


# -- one workload, in a process of its own


def strategies_of(workload: Workload, only: str) -> list[str]:
    return [s for s, kinds in STRATEGIES.items() if workload.kind in kinds and (not only or s in only.split(","))]


def on_link(workloads: list[Workload], link: str, sms: int) -> list[Workload]:
    """On another link than their own, or on other SMs, where that is asked for."""
    links = [find_link(link) if link else w.link for w in workloads]
    return [replace(w, link=own.with_sms(sms) if sms else own) for w, own in zip(workloads, links)]


def rows_of(workload: Workload, wish: Result, found: dict[str, Result]) -> list[Result]:
    """strategy -> result, as rows of the file."""
    return [
        stamped(report.name_of(workload.name, s), "time", report.config(workload, s, wish["tiny"], wish["options"]), result,
                wish["made_by"], wish["device"])
        for s, result in found.items()
    ]  # fmt: skip


def failed_rows(workload: Workload, wish: Result, error: Exception) -> list[Result]:
    result = failed("time", error) | {"emulated": True}
    return rows_of(workload, wish, dict.fromkeys(strategies_of(workload, wish["only"]), result))


def run_child(text: str) -> int:
    wish = json.loads(text)
    (workload,) = on_link([w for w in WORKLOADS if w.name == wish["row"]], wish["link"], wish["sms"])
    torch.set_grad_enabled(False)
    torch.backends.cuda.enable_cudnn_sdp(False)  # the same call twice, on one stream, differs: no plan could be bit-equal
    turn.expect(wish["turn"])
    began = time.perf_counter()
    try:
        case = workload.case(wish["device"], wish["tiny"])
        variants = Variants(case, wish["device"], wish["options"])
        chosen = strategies_of(workload, wish["only"])
        if wish["phase"] == "warm":
            variants.some(*ways(chosen))
            return 0
        found = measured(case, variants, chosen, wish["rounds"])
        seconds = round(time.perf_counter() - began, 1)
        report.save(Path(wish["json"]), rows_of(workload, wish, {s: r | {"seconds": seconds} for s, r in found.items()}))
    except Exception as error:  # what does not work stands in the file
        traceback.print_exc()
        if wish["phase"] != "warm":
            report.save(Path(wish["json"]), failed_rows(workload, wish, error))
        return 1
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", help="comma-separated globs over workloads; all")
    parser.add_argument("--only", default="", help="comma-separated strategies; all")
    parser.add_argument("--link", default="", choices=("", *LINKS), help="for all workloads; their own (goes into a file of its own)")
    parser.add_argument("--sms", type=int, default=0, help="SMs that collectives hold; the link's own (goes into a file of its own)")
    parser.add_argument("--options", type=json.loads, default={}, help='options of every df.compile, as json: {"compiler": "eager"}')
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warm", action="store_true", help="compile only")
    parser.add_argument("--min-row-s", type=float, default=runner.MIN_ROW_S, help="with less left, start no workload")
    runner.add_options(parser, report)
    args = parser.parse_args()
    if unknown := set(args.only.split(",")) - {*STRATEGIES, ""}:
        parser.error(f"unknown strategy {', '.join(sorted(unknown))}; known: {', '.join(STRATEGIES)}")
    if (args.tiny or args.link or args.sms) and args.json == report.RESULTS:
        parser.error("--tiny, --link and --sms do not go into benchmarks/results/overlap.json: give --json")
    return args


if __name__ == "__main__":
    raise SystemExit(main())
