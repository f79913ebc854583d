"""The suites that measure on a GPU run to their end without one, small, over CUDA on the host: that nothing of them fails is found before
a GPU is lent for them. Times mean nothing here; results are compared as on a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

if "libcuda.so.1" not in os.environ.get("LD_PRELOAD", ""):
    pytest.skip("needs CUDA on the host: `make system-suites`", allow_module_level=True)

ROOT = Path(__file__).parents[2]
SITE = Path(__file__).parent / "cuda_on_host" / "site"
# suite, rows, options. Left out: torch's profiler, which wants CUPTI; algorithms that are chosen by time; torch's own CUDA Graph trees
# around a Trainer, which end the process here, without us.
RUNS = {
    "backend": ("backend", "llama decode b=16", "--only host,time --rounds 2 --host-steps 4"),
    "branches": ("branches", "lora-llama 1 token", "--rounds 2 --variants eager+graph,torch.compile+graph,dynaflow,dynaflow+graph"),
    "training": ("branches", "train lora-llama 512 tokens", "--rounds 2 --variants eager,torch.compile,dynaflow"),
    "experts": ("overlap", "deepseek-v2-lite ep8 prefill 2k", "--rounds 2 --only NanoFlow,CommOverlap"),
    "parts": ("overlap", "flux ulysses8 1024px b=4", "--rounds 2"),
    "offload": ("offload", "llama 1 token", ""),
    "trainer": ("systems", "lora trainer step 512 tokens", "--rounds 2 --variants eager,torch.compile,dynaflow"),
    "pipeline": ("systems", "sd3 1024 tokens", "--rounds 2"),
    "generate": ("systems", "llama generate static b=1", "--rounds 2"),
}


# what a row may say that it has not
MAY_MISS = ("splits nothing that is sent",)


@pytest.mark.parametrize("run", RUNS)
def test_a_suite_runs_to_its_end(tmp_path: Path, run: str) -> None:
    suite, row, options = RUNS[run]
    failures, out = tmp_path / "failures", tmp_path / "out.json"
    places = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "DYNAFLOW_DIR": "dynaflow"}
    environment = os.environ | {name: str(tmp_path / folder) for name, folder in places.items()} | {
        "PYTHONPATH": f"{SITE}:{ROOT}", "CUDA_ON_HOST_FAILURES": str(failures), "PYTHONUNBUFFERED": "1"}  # fmt: skip
    command = ["-m", f"benchmarks.{suite}", "--tiny", "--device", "cuda", "--rows", row, *options.split(), "--json", str(out)]
    done = subprocess.run([sys.executable, "-W", "ignore", *command], cwd=ROOT, env=environment, capture_output=True, text=True)
    said = done.stdout + done.stderr
    assert done.returncode in (0, 1) and out.exists() and "Traceback" not in said, said[-4000:]  # 1: a target is missed, times are made up
    assert not failures.exists(), failures.read_text()[:4000]
    rows = json.loads(out.read_text())["rows"]
    assert rows
    for found in rows:
        assert found["ours"] or found["section"] not in ("time", "serving"), f"{found['row']}: {found['note']}"
        unexpected = [note for note in found["note"].split("; ") if "not measured" in note and not note.endswith(MAY_MISS)]
        assert not unexpected and "fell back" not in found["note"], found["note"]
