"""See `benchmarks/systems/__init__.py`."""

from __future__ import annotations

import argparse
import sys

import benchmarks.systems
from benchmarks import runner
from benchmarks.cases import select
from benchmarks.store import command, load
from benchmarks.systems import child, report
from benchmarks.systems.rows import rows
from benchmarks.systems.variants import DEFAULT, NAMES


class Suite(runner.Shard):
    def __init__(self, args: argparse.Namespace):
        super().__init__("systems", args)

    def run(self) -> int:
        args = self.args
        wanted = args.variants.split(",") if args.variants else DEFAULT
        wish = {"tiny": args.tiny, "device": args.device, "rounds": args.rounds, "made_by": command("systems", sys.argv[1:]),
                "variants": [name for name in NAMES if name in wanted]}  # fmt: skip
        jobs = [runner.Job("time", row.name, wish) for row in select(list(rows().values()), args.rows)]
        for done in self.each(jobs, runner.default_jobs(args), in_turns=True):
            if new := load(done.json):
                report.save(args.json, report.merged(load(args.json), new))
        return self.end(report, True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=benchmarks.systems.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="*", help="comma-separated globs over row names")
    parser.add_argument("--variants", default="", help=f"comma-separated variants; by default {', '.join(DEFAULT)}")
    parser.add_argument("--rounds", type=int, default=10)
    runner.add_options(parser, report)
    args = parser.parse_args()
    if unknown := set(args.variants.split(",")) - {*NAMES, ""}:
        parser.error(f"unknown variant {', '.join(sorted(unknown))}; known: {', '.join(NAMES)}")
    if args.tiny and args.json == report.RESULTS:
        parser.error("--tiny does not go into benchmarks/results: give --json")
    return args


def main() -> int:
    args = _arguments()
    listing = f"rows      {', '.join(rows())}\nvariants  {', '.join(NAMES)}"
    rc = runner.main(args, Suite, child.run, listing, report, report.plot)
    if args.plot:
        report.quote(load(args.json))
    return rc


if __name__ == "__main__":
    raise SystemExit(main())
