"""The environment of processes that compile for a GPU machine: CUDA on the host, under the name of that machine's GPU.

    python -m benchmarks.ahead.host MODULE ...      a module under it
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.systems.cuda_on_host.library import build, package

ROOT = Path(__file__).resolve().parents[2]
# what is compiled here outlives a checkout
WHERE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dynaflow" / "ahead"
NAME = "NVIDIA H200"
# torch's threads there: in the keys of DynaFlow's units
NUM_THREADS = 16
# what nvidia-smi is asked for: by it, Inductor decides which products could gain by padding
MAX_CLOCK_MHZ = 1980


def environment(folder: Path, caches: Path) -> dict[str, str]:
    """`folder`: for what is made once. `caches`: where what is compiled lies."""
    made = build(folder / "library")
    del made["TRITON_INTERPRET"]  # kernels are compiled
    tool = folder / "bin" / "nvidia-smi"
    tool.parent.mkdir(parents=True, exist_ok=True)
    tool.write_text(f"#!/bin/sh\necho {MAX_CLOCK_MHZ}\n")
    tool.chmod(0o755)
    return os.environ | made | places(caches) | {
        "CUDA_ON_HOST_NAME": NAME, "CXX": "g++",
        "PATH": os.pathsep.join([str(tool.parent), os.environ.get("PATH", "")]),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]),
        "TRITON_PTXAS_PATH": str(ptxas()), "TRITON_STORE_BINARY_ONLY": "1", "PYTHONUNBUFFERED": "1",
    }  # fmt: skip


def ptxas() -> Path:
    """torch's own. Inductor takes it too, but may have asked for Triton's version before: then that one stands in the kernels' keys. So it
    is named there and here (`benchmarks.lent`)."""
    return package("torch") / "bin" / "ptxas"


def places(caches: Path) -> dict[str, str]:
    return {"TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"), "TRITON_CACHE_DIR": str(caches / "triton"),
            "DYNAFLOW_DIR": str(caches / "chosen")}  # fmt: skip


def is_under_it() -> bool:
    return "CUDA_ON_HOST_NAME" in os.environ


if __name__ == "__main__":
    os.execve(sys.executable, [sys.executable, "-m", *sys.argv[1:]], environment(WHERE, WHERE / "caches" / "own"))
