"""Compile here, where there is no GPU, what a benchmark would compile on a machine that has one (docs/decisions/027-compiled-ahead.md).

    python -m benchmarks.ahead --suite branches [--rows GLOBS] [--variants V,...]      compile rows, one process each
    python -m benchmarks.ahead --pack .carry/ahead [--suite S] [--rows GLOBS]          for benchmarks.lent --caches
    python -m benchmarks.ahead --verify .carry/ahead --suite S [--rows GLOBS]          fresh processes over what was packed compile nothing
    python -m benchmarks.ahead --keys > KEYS                    what the caches' keys are made of, here and on the machine with the GPU
    python -m benchmarks.ahead --differences HERE THERE         where two such files differ; 1 where what was compiled is not found

`--measured FOLDER`, of caches that came back from the GPU, takes what it measured of products (to pad them, or not): else both ways are
compiled. `--there KEYS`, of the machine with the GPU, has --suite and --pack refuse where keys differ. The interpreter is the one of
`make build/systems/ahead/stamp` (systems/ahead.txt). What was compiled for a row lies in the user's cache folder,
dynaflow/ahead/caches/SUITE.ROW: it outlives this checkout.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.ahead import host, kept, keys

ROOT = host.ROOT
WHERE = host.WHERE
MEASURED = WHERE / "measured.json"


def main() -> int:
    args = _arguments()
    if args.differences:
        here, there = (json.loads(path.read_text()) for path in args.differences)
        print(*keys.differences(here, there), sep="\n")
        return 1 if any(keys.decisive(here, there)) else 0
    if not host.is_under_it() and (has_gpu() and not args.keys):
        raise SystemExit("there is a GPU here: the suites compile on it themselves (--only warm)")
    if not host.is_under_it() and not has_gpu():
        environment = host.environment(WHERE, WHERE / "caches" / "own")
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.ahead", *sys.argv[1:]], environment)
    if args.child:
        from benchmarks.ahead import child

        return child.run(args.child)
    if args.keys:
        print(keys.text(keys.keys()))
        return 0
    if args.there is not None:
        keys.refuse(keys.keys(), json.loads(args.there.read_text()))
    if args.measured:
        MEASURED.parent.mkdir(parents=True, exist_ok=True)
        if (measured := kept.measured_in(args.measured)) is None:
            raise kept.NotCaches(f"nothing was measured of products in {', '.join(map(str, args.measured))}")
        MEASURED.write_text(json.dumps(measured))
    if args.verify is not None:
        return _verify(args)
    if args.pack is not None:
        return _pack(args)
    return _compile(args)


def _compile(args: argparse.Namespace) -> int:
    is_good = True
    for row in _rows(args):
        wish = {"suite": args.suite, "row": row, "variants": [v for v in args.variants.split(",") if v]}
        found = _child(wish, folder_of(args.suite, row))
        if found is not None and found["choices"]["padding"] and not found["choices"]["algorithm"]:
            # a product that a GPU would try with padding and without: both ways, for either is found by what it makes of the graph
            _child(wish | {"padding": True}, folder_of(args.suite, row))
        is_good &= found is not None and not found["missing"]
    return 0 if is_good else 1


def _pack(args: argparse.Namespace) -> int:
    folders = [folder_of(args.suite, row) for row in _rows(args)] if args.suite else sorted((WHERE / "caches").glob("*.*"))
    folders = [folder for folder in folders if folder.exists()]
    measured = json.loads(MEASURED.read_text()) if MEASURED.exists() else None
    for folder in folders:
        print(f"{kept.num_bytes(folder) / 2**20:7.2f} MiB  {folder.name}", flush=True)
    print(f"{kept.pack(folders, args.pack, measured=measured) / 2**20:7.2f} MiB  {args.pack}")
    return 0


def _verify(args: argparse.Namespace) -> int:
    is_good = True
    for row in _rows(args):
        with tempfile.TemporaryDirectory() as folder:
            kept.unpack(args.verify, Path(folder))
            wish = {"suite": args.suite, "row": row, "variants": [v for v in args.variants.split(",") if v]}
            found = _child(wish, Path(folder))
        is_good &= found is not None and is_warm(found)
    return 0 if is_good else 1


def is_warm(found: dict[str, Any]) -> bool:
    """Whether nothing was compiled. Where a GPU would measure, AOT's entries are not kept: that part is traced anew."""
    return not found["missing"] and not found["kernels compiled"] and not found["graphs"].get("miss")


def _child(wish: dict[str, Any], caches: Path) -> dict[str, Any] | None:
    """What it says; None where it failed. Its log lies beside the caches."""
    caches.mkdir(parents=True, exist_ok=True)
    if MEASURED.exists():
        wish = wish | {"measured": str(MEASURED)}
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.ahead", "--child", json.dumps(wish)]
    log = WHERE / f"{wish['suite']}.{keys.slug(wish['row'])}.log"
    with log.open("w") as file:
        done = subprocess.run(command, cwd=ROOT, env=os.environ | host.places(caches), stdout=subprocess.PIPE, stderr=file, text=True)
    lines = done.stdout.strip().splitlines() or [""]
    try:
        found: dict[str, Any] = json.loads(lines[-1])
    except json.JSONDecodeError:
        print(f"{wish['row']}: failed ({done.returncode}), see {log}", flush=True)
        return None
    print(json.dumps(found), flush=True)
    return found


def _rows(args: argparse.Namespace) -> list[str]:
    from benchmarks.ahead import child

    return child.rows(args.suite, args.rows)


def folder_of(suite: str, row: str) -> Path:
    return WHERE / "caches" / f"{suite}.{keys.slug(row)}"


def has_gpu() -> bool:
    return Path("/dev/nvidiactl").exists()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", default="", help="branches, backend, overlap, systems")
    parser.add_argument("--rows", default="*", help="comma-separated globs over row names")
    parser.add_argument("--variants", default="", help="comma-separated variants; those that the suite's warm phase builds")
    parser.add_argument("--pack", type=Path, metavar="FOLDER")
    parser.add_argument("--verify", type=Path, metavar="FOLDER")
    parser.add_argument("--measured", type=Path, action="append", default=[], metavar="FOLDER")
    parser.add_argument("--there", type=Path, metavar="KEYS")
    parser.add_argument("--keys", action="store_true")
    parser.add_argument("--differences", nargs=2, type=Path, metavar=("HERE", "THERE"))
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not (args.suite or args.pack or args.keys or args.differences or args.child):
        parser.error("nothing to do: --suite, --pack, --keys or --differences")
    return args


if __name__ == "__main__":
    raise SystemExit(main())
