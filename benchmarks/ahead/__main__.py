"""Compile here, where there is no GPU, what a benchmark would compile on a machine that has one.

    python -m benchmarks.ahead --keys > KEYS            what the caches' keys are made of here, and on the machine with the GPU
    python -m benchmarks.ahead --differences A B        where two such files differ
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from benchmarks.ahead import keys

ROOT = Path(__file__).resolve().parents[2]
WHERE = ROOT / "build" / "ahead"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", action="store_true")
    parser.add_argument("--differences", nargs=2, type=Path, metavar=("HERE", "THERE"))
    args = parser.parse_args()
    if args.differences:
        here, there = (json.loads(path.read_text()) for path in args.differences)
        print(*keys.differences(here, there), sep="\n")
        return 0
    if args.keys:
        if not has_gpu() and "CUDA_ON_HOST_NAME" not in os.environ:
            from benchmarks.ahead.host import environment

            os.execve(sys.executable, [sys.executable, "-m", "benchmarks.ahead", "--keys"], environment(WHERE, WHERE / "caches"))
        print(keys.text(keys.keys()))
        return 0
    parser.error("nothing to do")


def has_gpu() -> bool:
    return Path("/dev/nvidiactl").exists()


if __name__ == "__main__":
    raise SystemExit(main())
