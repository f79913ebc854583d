"""The benchmark's own machinery, with a tiny model on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")


def test_the_benchmark_runs_tiny(tmp_path):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    words = "--tiny --rounds 2 --min-tokens 16 --strategies two_batch --json".split()
    ran = subprocess.run([sys.executable, "-m", "benchmarks.vllm_serving", *words, tmp_path / "serving.json"], env=env, text=True,
                         cwd=Path(__file__).parents[2], capture_output=True, timeout=280)  # fmt: skip
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-3000:]
    (row,) = json.loads((tmp_path / "serving.json").read_text())["rows"]
    assert row["equal"] == "100% of requests token by token" and row["split_steps"] > 0 and row["speedup"] > 0
    assert set(row["baselines"]) == {"vllm", "two_batch, no overlap"} and row["row"] in ran.stdout
