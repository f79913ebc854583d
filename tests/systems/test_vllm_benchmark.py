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
    words = ["--tiny", "--rounds", "2", "--logs", tmp_path / "logs", "--json", tmp_path / "serving.json"]
    command = [sys.executable, "-m", "benchmarks.vllm_serving"]
    ran = subprocess.run([*command, *words], env=env, text=True, cwd=Path(__file__).parents[2], capture_output=True, timeout=400)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-3000:]
    plain, emulated, lora = json.loads((tmp_path / "serving.json").read_text())["rows"]
    same, itself = "100% of requests token by token", " (vLLM's own, once more: 100%)"
    for row, equal in ((plain, same + itself), (emulated, same)):
        assert row["equal"] == equal and row["split_steps"] > 0 and row["speedup"] > 0
        assert row["row"] in ran.stdout and row["emulated"] == ("emulated" in row["row"])
    assert lora["equal"] == same and "vLLM does not compile the model into pieces" in lora["note"]
    assert lora["config"]["adapters"] == 3 and set(lora["baselines"]) == {"vllm"}
    assert len(plain["noise"]) == 2 and "noise" not in emulated, "vLLM against itself, where there are two of it"
    assert set(plain["baselines"]) == {"vllm", "two_batch, no overlap"} and emulated["config"]["ranks"] == 8
    assert "on 2 streams" in (tmp_path / "logs" / "tiny-emulated-two_batch.log").read_text(), "the all-reduces are no network ops"


def test_a_page_and_a_picture(tmp_path):
    from benchmarks.vllm_serving import report

    row = {"row": "m, batch 1, auto", "section": "serving", "speedup": 1.01, "interval": [1.0, 1.02], "equal": "-", "steps": 3,
           "config": {"model": "m", "layers": 8, "way": "auto"}, "ours": {"tokens_per_s": 1010, "median_ms": 1.0}, "split_steps": 0,
           "baselines": {"vllm, default runner": {"tokens_per_s": 1000, "median_ms": 1.01}}, "targets": [], "fallbacks": {}, "note": "",
           "hardware": {"gpu": "H200"}, "versions": {"torch": "2"}}  # fmt: skip
    assert "| m | 8 | batch 1 | auto | 1.010 (1.000 to 1.020) | 1,010 | - | 1,000 | - | - | 0 of 3 | - |" in report.markdown([row])
    noisy = row | {"noise": [0.97, 1.03]}
    assert "| 1,000 | - | 0.970 to 1.030 | 0 of 3 | - |" in report.markdown([noisy])
    pytest.importorskip("matplotlib")
    report.plot([row], tmp_path / "x.json")
    assert (tmp_path / "x.svg").stat().st_size > 0
