"""The environment of processes that compile for a GPU machine: CUDA on the host, under the name of that machine's GPU.

In every process of theirs that imports torch, `nothing.install` is called (an entry point, as for any device that torch is taught).
"""

from __future__ import annotations

import os
from pathlib import Path

from tests.systems.cuda_on_host.library import build

ROOT = Path(__file__).resolve().parents[2]
NAME = "NVIDIA H200"
# what nvidia-smi is asked for: by it, Inductor decides which products could gain by padding
MAX_CLOCK_MHZ = 1980


def environment(folder: Path, caches: Path) -> dict[str, str]:
    """`folder`: for what is made once. `caches`: where what is compiled lies."""
    made = build(folder / "library")
    del made["TRITON_INTERPRET"]
    info = folder / "entry" / "dynaflow_ahead-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dynaflow-ahead\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\nahead = benchmarks.ahead.nothing:install\n")
    tool = folder / "bin" / "nvidia-smi"
    tool.parent.mkdir(exist_ok=True)
    tool.write_text(f"#!/bin/sh\necho {MAX_CLOCK_MHZ}\n")
    tool.chmod(0o755)
    path = [str(ROOT), str(info.parent), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return os.environ | made | {
        "CUDA_ON_HOST_NAME": NAME, "PATH": os.pathsep.join([str(tool.parent), os.environ.get("PATH", "")]),
        "PYTHONPATH": os.pathsep.join(path), "TRITON_STORE_BINARY_ONLY": "1", "PYTHONUNBUFFERED": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"), "TRITON_CACHE_DIR": str(caches / "triton"),
        "DYNAFLOW_DIR": str(caches / "dynaflow"),
    }  # fmt: skip
