"""Time to the first result, in fresh processes with fresh caches on disk.

A child builds the model, loads the libraries, waits until it is its turn, then times: compile, first call, synchronise. The model has not
run before: cuDNN chooses how it convolves once per shape and process, and what a variant needs of that is its own time. (Rows without
`has_run` are older: the model had run once eagerly, which spared that choice those that run its very shapes, and nobody else.) Cold: the
caches' folder is empty, and those that are compared compile side by side. Warm: the same folder again, in new processes, a few times, since
it is seconds and one of them says little: each has the machine to itself while it is timed. Children load side by side.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import turn
from benchmarks.cases import Call, Case
from benchmarks.store import ROOT, Result
from benchmarks.variants import Builder, NotAvailable

NUM_WARM = 3
# where a child waits for its turn
PLACE = "DYNAFLOW_BENCHMARKS_TURN"


def command(suite: str, wish: Mapping[str, Any]) -> list[str]:
    """The suite's own command, as a child that does what the wish says."""
    return [sys.executable, "-m", f"benchmarks.{suite}", "--child", json.dumps(wish)]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "PYTHONFAULTHANDLER": "1", **more}


class Child:
    """A fresh process over these caches. It is ready when all is loaded, and begins when it is let."""

    def __init__(self, suite: str, wish: Mapping[str, Any], caches: Path, place: Path):
        """`place`: a name for files, the child's alone."""
        places = {name: str(caches / sub) for name, sub in (
            ("TORCHINDUCTOR_CACHE_DIR", "inductor"), ("TRITON_CACHE_DIR", "triton"),
            ("CUDA_CACHE_PATH", "cuda"), ("DYNAFLOW_DIR", "dynaflow"))}  # fmt: skip
        self._wish, self._caches, self._place = wish, caches, place
        self._began = time.perf_counter()
        with place.with_suffix(".out").open("w") as out, place.with_suffix(".err").open("w") as err:
            self._process = subprocess.Popen(
                command(suite, wish), cwd=ROOT, stdout=out, stderr=err, env=environment(**places, **{PLACE: str(place)}))

    def await_ready(self) -> None:
        while not turn.ready(self._place).exists() and self._process.poll() is None:
            time.sleep(turn.POLL_S)

    def begin(self) -> None:
        turn.given(self._place).touch()

    def result(self, is_left: bool = False) -> Result:
        """What its last line says. `is_left`: once it has said that, it is ended: to go takes a process with a GPU many seconds."""
        while is_left and not self._has_spoken() and self._process.poll() is None:
            time.sleep(turn.POLL_S)
        if is_left:
            self._process.kill()
        status = self._process.wait()
        wall_s = round(time.perf_counter() - self._began, 2)
        last = (self._place.with_suffix(".out").read_text().strip().splitlines() or [""])[-1]
        try:
            result = json.loads(last)
        except json.JSONDecodeError:
            result = {"note": f"child failed ({status}): {self._place.with_suffix('.err').read_text().strip()[-300:]}"}
        wish = self._wish
        print(f"    {wish['row']}, {wish['variant']}: {result.get('first_s', result.get('note'))} (process {wall_s} s)", flush=True)
        size = sum(f.stat().st_size for f in self._caches.rglob("*") if f.is_file()) if self._caches.exists() else 0
        return {**result, "process_s": wall_s, "cache_mib": round(size / 2**20, 1)}

    def _has_spoken(self) -> bool:
        text = self._place.with_suffix(".out").read_text()
        return text.endswith("\n") and text.splitlines()[-1].startswith("{")

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def in_turns(turns: Sequence[Sequence[tuple[str, Mapping[str, Any], Path]]], num_to_their_end: int | None = None) -> list[list[Result]]:
    """(suite, wish, caches) of children, turn by turn: those of a turn begin together, when all of the turn before are over. Of the turns
    behind the first `num_to_their_end`, nobody needs what children write as they go: those are over when they have said their figures."""
    with tempfile.TemporaryDirectory() as folder:
        children: list[list[Child]] = []
        try:
            for i, wishes in enumerate(turns):
                children.append([])
                for j, wanted in enumerate(wishes):
                    children[-1].append(Child(*wanted, Path(folder) / f"{i}-{j}"))
            for each in children:
                for child in each:
                    child.await_ready()
            found = []
            for number, each in enumerate(children):
                for child in each:
                    child.begin()
                found.append([child.result(num_to_their_end is not None and number >= num_to_their_end) for child in each])
            return found
        finally:
            for each in children:
                for child in each:
                    child.end()


def cold_and_warm(suite: str, wishes: Mapping[str, Mapping[str, Any]], once: Collection[str] = ()) -> dict[str, Result]:
    """variant -> its child's wish to variant -> {"cold": ..., "warm": ...}, of the warm ones the median. Cold, variants run side by side:
    what disturbs one disturbs all. `once`: variants that start warm once only."""
    with tempfile.TemporaryDirectory() as folder:
        each = {name: (suite, wish, Path(folder) / name.replace(" ", "-")) for name, wish in wishes.items()}
        names = [name for k in range(NUM_WARM) for name in wishes if not k or name not in once]
        cold, *warm = in_turns([list(each.values()), *([each[name]] for name in names)], num_to_their_end=1)
    found: dict[str, list[Result]] = {name: [] for name in wishes}
    for name, (result,) in zip(names, warm):
        found[name].append(result)
    return {name: {"cold": c, "warm": _median(found[name])} for name, c in zip(wishes, cold)}


def _median(results: Sequence[Result]) -> Result:
    """One that failed, if any did."""
    failed = [each for each in results if "first_s" not in each]
    seconds = sorted(each["first_s"] for each in results if "first_s" in each)
    if failed:
        return failed[0]
    return {**next(each for each in results if each["first_s"] == seconds[len(seconds) // 2]), "each_s": seconds}


def time_first(case: Case, build: Builder, options: Mapping[str, Any], device: str) -> None:
    """Inside the fresh process: prints one line of json."""
    sync = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    _load_libraries(device, case.dtype)
    sync()
    _await_turn()
    seconds = []
    try:
        began = time.perf_counter()
        call: Call = build(case, options)
        for number in range(3):
            case.reset()
            call(number)
            sync()
            seconds.append(round(time.perf_counter() - began, 3))
    except NotAvailable as error:
        print(json.dumps({"note": str(error)}))
        return
    print(json.dumps({"first_s": seconds[0], "third_s": seconds[2], "has_run": False}), flush=True)


def _load_libraries(device: str, dtype: torch.dtype) -> None:
    """Products, convolutions and attention, on shapes that no model has: what every process loads once, whatever it runs."""
    x = torch.randn(2, 8, 24, 24, device=device, dtype=dtype)
    torch.nn.functional.conv2d(x, torch.randn(8, 8, 3, 3, device=device, dtype=dtype))
    torch.nn.functional.scaled_dot_product_attention(x, x, x)
    x @ x


def _await_turn() -> None:
    if PLACE in os.environ:
        turn.expect(os.environ[PLACE], tunes_alone=False)
        turn.take()
