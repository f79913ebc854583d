"""benchmarks.systems without a GPU: that rows can be measured, the form of the file, and bad news."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("diffusers")
pytest.importorskip("peft")

from benchmarks import systems
from benchmarks.store import load, stamped

ROOT = Path(__file__).parents[2]
VARIANTS = (systems.EAGER, systems.OURS, systems.SPLIT, systems.REDUCE)


def measured(name, variants=VARIANTS):
    (row,) = [r for r in systems.ROWS if r.name == name]
    with torch.no_grad():
        return systems.measure(row, "cpu", tiny=True, num_rounds=1, variants=variants)


@pytest.mark.parametrize("name, calls_per_step", [("llama generate static", 4), ("lora-llama 16 tokens", 1), ("sd3", 2)])
def test_rows(name, calls_per_step):
    found = measured(name)
    assert found["note"] == "" and found["ours"]["variant"] in (systems.OURS, systems.SPLIT) and found["against"] == systems.EAGER
    assert all(t["is_met"] for t in found["targets"]), found["targets"]
    counts = found["counts"][systems.SPLIT]
    assert counts["split_calls"] == counts["calls"] > 0 and counts["calls"] % calls_per_step == 0 and not counts["fallbacks"]
    assert found["counts"][systems.OURS]["split_calls"] == 0


def test_a_variant_that_fails_is_said(monkeypatch):
    monkeypatch.setitem(systems.OPTIONS, systems.SPLIT, {"strategy": "fastest"})
    found = measured("lora-llama 16 tokens")
    assert "dynaflow split not measured: OptionError: unknown strategy 'fastest'" in found["note"]
    assert found["ours"]["variant"] == systems.OURS


def test_the_file_and_the_page(tmp_path):
    path = tmp_path / "systems.json"
    row = stamped("sd3", "time", {"tiny": True}, measured("sd3"), "test", "cpu")
    systems.save(path, systems.merged(load(path), [row]))
    (kept,) = load(path)
    assert kept["speedup"] > 0 and kept["versions"]["transformers"]
    assert "| sd3 | " in systems.markdown([kept]) and "sd3" in systems.table([kept])


def test_the_command(tmp_path):
    listed = subprocess.run([sys.executable, "-m", "benchmarks.systems", "--list"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert all(row.name in listed.stdout for row in systems.ROWS)
    into_results = subprocess.run([sys.executable, "-m", "benchmarks.systems", "--tiny"], cwd=ROOT, capture_output=True, text=True)
    assert into_results.returncode == 2 and "give --json" in into_results.stderr
