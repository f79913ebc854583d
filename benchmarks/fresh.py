"""Time to the first result, in fresh processes with fresh caches on disk.

A child builds the model and runs it once eagerly (libraries load), then times: compile, first call, synchronise. Cold: the caches'
folder is empty. Warm: the same folder again, in a new process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import Call, Case
from benchmarks.store import ROOT, Result
from benchmarks.variants import Builder, NotAvailable


def command(suite: str, wish: Mapping[str, Any]) -> list[str]:
    """The suite's own command, as a child that does what the wish says."""
    return [sys.executable, "-m", f"benchmarks.{suite}", "--child", json.dumps(wish)]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "PYTHONFAULTHANDLER": "1", **more}


def child(suite: str, wish: Mapping[str, Any], caches: Path) -> Result:
    """A fresh process over these caches; what its last line says."""
    places = {name: str(caches / sub) for name, sub in (
        ("TORCHINDUCTOR_CACHE_DIR", "inductor"), ("TRITON_CACHE_DIR", "triton"),
        ("CUDA_CACHE_PATH", "cuda"), ("DYNAFLOW_DIR", "dynaflow"))}  # fmt: skip
    began = time.perf_counter()
    done = subprocess.run(command(suite, wish), cwd=ROOT, capture_output=True, text=True, env=environment(**places))
    wall_s = round(time.perf_counter() - began, 2)
    last = (done.stdout.strip().splitlines() or [""])[-1]
    try:
        result = json.loads(last)
    except json.JSONDecodeError:
        result = {"note": f"child failed ({done.returncode}): {done.stderr.strip()[-300:]}"}
    print(f"    {wish['row']}, {wish['variant']}: {result.get('first_s', result.get('note'))} (process {wall_s} s)", flush=True)
    size = sum(f.stat().st_size for f in caches.rglob("*") if f.is_file()) if caches.exists() else 0
    return {**result, "process_s": wall_s, "cache_mib": round(size / 2**20, 1)}


def cold_and_warm(names: Sequence[str], start: Callable[[str, Path], Result]) -> dict[str, Result]:
    """variant -> {"cold": ..., "warm": ...}; `start(variant, caches)` runs a child. Variants run side by side: what disturbs one
    disturbs all."""
    found: dict[str, Result] = {name: {} for name in names}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(names)) as pool:
        caches = [Path(folder) / name.replace(" ", "-") for name in names]
        for when in ("cold", "warm"):
            for name, result in zip(names, pool.map(start, names, caches)):
                found[name][when] = result
    return found


def time_first(case: Case, build: Builder, options: Mapping[str, Any], device: str) -> None:
    """Inside the fresh process: prints one line of json."""
    sync = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    case.run(case.sets[0])
    sync()
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
    print(json.dumps({"first_s": seconds[0], "third_s": seconds[2]}))
