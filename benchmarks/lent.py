"""On a GPU machine that is lent for minutes and has no network: tests and suites in one call, results in one folder.

    python -m benchmarks.lent --out OUT tests! "branches --rows 'hrnet_w18 b=*' --limit-s 200" "backend --only host & offload" caches

Steps run in the order given. A step that fails stops nothing, unless it ends with "!".

    tests           tests/gpu, files side by side; those that measure time behind them, alone; without the zoo
    zoo             tests/gpu/test_models.py, which takes many minutes
    SUITE ...       python -m benchmarks.SUITE ... --json OUT/SUITE-k.json; with "&" between them, several at once: they take turns
    caches          what was compiled, for the next call: OUT/caches.*

`--rows missing`, `--rows missed` and both, with globs or without, are the rows that benchmarks.outstanding finds in the committed results.

`--bundles` is a folder of *.tar.xz with packages that the machine lacks, `--caches` one with what an earlier call left or
`benchmarks.ahead` packed (it may be given several times), `--commit` what stands in the results. Everything that is unpacked or compiled
lies in the temporary folder, for as long as the machine is kept.
"""

from __future__ import annotations

import argparse
import configparser
import importlib.util
import os
import shlex
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path

from benchmarks import outstanding

ROOT = Path(__file__).resolve().parent.parent
WORK = Path(tempfile.gettempdir()) / "dynaflow-lent"
# what takes a process of its own; all other files of tests/gpu are together in one
TESTS = {"kernels": ("test_kernels.py", "test_in_captures.py"), "backend": ("test_backend.py",)}
TIMED_TESTS = {"network": ("test_network.py",)}
ZOO = {"zoo": ("test_models.py",)}
# lines of a step's output that are shown; all of it is in its file
SHOWN = 30
# bytes of one piece of the caches
PIECE = 15 * 2**20


class Lent:
    def __init__(self, args: argparse.Namespace):
        self.out, self.limit_s = args.out.resolve(), args.tests_limit_s
        self.out.mkdir(parents=True, exist_ok=True)
        packages, self.caches = WORK / "packages", WORK / "caches"
        packages.mkdir(parents=True, exist_ok=True)
        if not self.caches.exists():
            self.caches.mkdir()
            for folder in args.caches:
                self._unpack_caches(sorted(folder.glob("caches.*")))
        for bundle in sorted(args.bundles.glob("*.tar.xz")) if args.bundles is not None else ():
            if not (done := WORK / f"{bundle.name}.done").exists():
                with tarfile.open(bundle) as tar:
                    tar.extractall(packages, filter="tar")
                done.touch()
        _register(packages)
        path = [str(ROOT), str(packages), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        self.env = compiler_by_name(os.environ) | {
            "PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(self.caches / "inductor"), "TRITON_CACHE_DIR": str(self.caches / "triton"),
            "DYNAFLOW_DIR": str(self.caches / "dynaflow"),
        } | _ptxas() | ({"DYNAFLOW_COMMIT": args.commit} if args.commit else {})  # fmt: skip
        self._number = 0

    def step(self, text: str) -> bool:
        """Whether it went well."""
        if text == "tests":
            return self._tests(side_by_side()) & self._tests(TIMED_TESTS)
        if text == "zoo":
            return self._tests(ZOO)
        if text == "caches":
            return self._pack_caches()
        commands = []
        for one in text.split("&"):
            suite, *asked = shlex.split(one)
            if (rest := outstanding.spelled_out(suite, asked)) is None:
                print(f"== {one.strip()}: nothing is left to measure", flush=True)
                continue
            self._number += 1
            name = f"{suite}-{self._number}"
            commands.append((name, ["-m", f"benchmarks.{suite}", *rest, "--json", str(self.out / f"{name}.json")], None))
        return self._run(commands)

    def _tests(self, files: dict[str, tuple[str, ...]]) -> bool:
        command = ["-m", "pytest", "-p", "no:cacheprovider", "-q", "--maxfail=5"]
        return self._run([(name, [*command, *(f"tests/gpu/{file}" for file in each)], self.limit_s) for name, each in files.items()])

    def _run(self, commands: list[tuple[str, list[str], float | None]]) -> bool:
        """All at once; each into a file of its own, whose end is shown."""
        running, went_well = [], True
        for name, command, limit_s in commands:
            with (self.out / f"{name}.log").open("wb") as log:
                process = subprocess.Popen([sys.executable, *command], cwd=ROOT, env=self.env, stdout=log, stderr=log)
                running.append((name, process, limit_s))
        began = time.monotonic()
        for name, process, limit_s in running:
            try:
                rc: int | None = process.wait(None if limit_s is None else max(1.0, limit_s - (time.monotonic() - began)))
            except subprocess.TimeoutExpired:
                process.kill()
                rc = None
            went_well &= rc == 0
            lines = (self.out / f"{name}.log").read_text(errors="replace").splitlines()
            print(f"== {name}: {'ended for want of time' if rc is None else f'rc {rc}'}, {time.monotonic() - began:.0f} s",
                  *(line[:200] for line in lines[-(SHOWN if rc != 0 or limit_s is None else 1) :]), sep="\n", flush=True)  # fmt: skip
        return went_well

    def _pack_caches(self) -> bool:
        whole = WORK / "caches.tar.xz"
        with tarfile.open(whole, "w:xz", preset=1) as tar:
            tar.add(self.caches, arcname=".")
        data = whole.read_bytes()
        for k, at in enumerate(range(0, len(data), PIECE)):
            (self.out / f"caches.{k:02}").write_bytes(data[at : at + PIECE])
        print(f"== caches: {len(data) / 2**20:.0f} MiB", flush=True)
        return True

    def _unpack_caches(self, pieces: list[Path]) -> None:
        whole = WORK / "caches.tar.xz"
        whole.write_bytes(b"".join(piece.read_bytes() for piece in pieces))
        with tarfile.open(whole) as tar:
            tar.extractall(self.caches, filter="tar")


def _ptxas() -> dict[str, str]:
    """torch's own, which Inductor takes anyway: named from the start, it stands in all keys of kernels (`benchmarks.ahead.host`)."""
    found = importlib.util.find_spec("torch")
    path = Path(found.origin).parent / "bin" / "ptxas" if found is not None and found.origin is not None else None
    return {"TRITON_PTXAS_PATH": str(path)} if path is not None and path.exists() else {}


def _register(packages: Path) -> None:
    """What pip would write down of DynaFlow, so that vLLM and Dynamo find it: the tree itself is run, and nothing is installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    folder = packages / f"{project['name']}-{project['version']}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    points = configparser.ConfigParser()
    points.read_dict(project["entry-points"])
    with (folder / "entry_points.txt").open("w") as file:
        points.write(file)


def compiler_by_name(environ: Mapping[str, str]) -> dict[str, str]:
    """The C++ compiler is called what it is called elsewhere, wherever it lies: the name is part of the keys of all that Inductor keeps."""
    compiler = Path(environ.get("CXX", "g++"))
    folders = [str(compiler.parent)] if compiler.is_absolute() else []
    return {**environ, "CXX": compiler.name, "PATH": os.pathsep.join(filter(None, [*folders, environ.get("PATH", "")]))}


def side_by_side() -> dict[str, tuple[str, ...]]:
    """Files of tests by process, all but those that measure time and the zoo."""
    named = {file for groups in (TESTS, TIMED_TESTS, ZOO) for files in groups.values() for file in files}
    others = sorted(path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py") if path.name not in named)
    return {**TESTS, "others": tuple(others)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--bundles", type=Path)
    parser.add_argument("--caches", type=Path, action="append", default=[])
    parser.add_argument("--commit", default="")
    parser.add_argument("--tests-limit-s", type=float, default=150.0)
    args = parser.parse_args()
    lent, went_well = Lent(args), True
    for text in args.steps:
        good = lent.step(text.removesuffix("!"))
        went_well &= good
        if not good and text.endswith("!"):
            print(f"stopped behind {text}")
            break
    return 0 if went_well else 1


if __name__ == "__main__":
    raise SystemExit(main())
