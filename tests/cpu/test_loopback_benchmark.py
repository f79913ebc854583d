"""benchmarks.loopback: two real gloo processes; what is unequal or unplanned is said to be so."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import loopback

ROOT = Path(__file__).parents[2]


def found(**more):
    times = {"sequential": 10.0, "split": 11.0, "overlapped": 7.0, "compute alone": 6.0, "network alone": 4.0}
    return {"link": "1G", "strategy": "TwoBatch", "load": 0.5, "times": {name: [ms] * 3 for name, ms in times.items()}, "checks": [1, 1, 1],
            "error": 1e-6, "num_part_launches": 8, "fallbacks": {}, **more}  # fmt: skip


def row(**more):
    return loopback.as_row(found(**more), loopback.TINY, "test", True)


def test_command_measures_two_processes(tmp_path):
    path = tmp_path / "tiny.json"
    command = [sys.executable, "-m", "benchmarks.loopback", "--tiny", "--rounds", "1", "--json", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    whole = json.loads(path.read_text())
    assert whole["suite"] == "loopback" and whole["summary"]["emulated"] and path.with_suffix(".png").exists()
    for r in whole["rows"]:
        assert r["emulated"] and "emulated" in r["row"] and r["equal"].startswith("bit, on both ranks") and "NO PLAN" not in r["note"]


def test_hidden_is_of_what_could_be_hidden():
    r = row()
    assert (r["hidden_ms"], r["hideable_ms"], r["hidden_share"]) == (3.0, 4.0, 0.75)
    assert r["speedup"] == pytest.approx(10 / 7, abs=1e-3) and r["bound"] == pytest.approx(10 / 6, abs=1e-3)


@pytest.mark.parametrize("bad", [{"checks": [1, 0, 1]}, {"num_part_launches": 0}, {"fallbacks": {"batch too small": 3}}])
def test_rejects_what_is_unequal_or_ran_no_plan(bad):
    assert loopback.summary([row()])["not_equal"] == []
    assert loopback.summary([row(**bad)])["not_equal"] == ["TwoBatch, 1G link (emulated)"]
