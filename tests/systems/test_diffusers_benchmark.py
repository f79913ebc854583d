"""benchmarks.systems without a GPU: that rows can be measured, the form of the file, what pages quote, and bad news."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("diffusers")
pytest.importorskip("peft")

from benchmarks.store import load, stamped
from benchmarks.systems import child, report
from benchmarks.systems import variants as v
from benchmarks.systems.rows import rows

ROOT = Path(__file__).parents[2]
VARIANTS = (v.EAGER, v.OURS, v.SPLIT, v.REDUCE)


def measured(name, variants=VARIANTS):
    with torch.no_grad():
        return child.measure(rows()[name], "cpu", tiny=True, num_rounds=1, names=variants)


@pytest.mark.parametrize("name", ["llama generate static b=16", "lora decode 1 token", "lora prefill 512 tokens", "sd3 1024 tokens"])
def test_rows(name):
    found = measured(name)
    assert found["note"] == "" and found["ours"]["variant"] == v.OURS and found["against"] == v.EAGER
    assert found["best"]["variant"] in (v.OURS, v.SPLIT) and found["speedup"] > 0
    assert all(t["is_met"] for t in found["targets"]), found["targets"]
    counts = found["counts"][v.SPLIT]
    assert counts["split_calls"] == counts["calls"] > 0 and not counts["fallbacks"]
    assert found["counts"][v.OURS]["split_calls"] == 0


def test_pipelines_with_a_controlnet_and_caches_that_grow():
    for name in ("sdxl+controlnet 64x64", "flux 1024 tokens", "llama generate dynamic b=1"):
        found = measured(name, (v.EAGER, v.OURS))
        assert found["note"] == "" and all(t["is_met"] for t in found["targets"]), found


def test_a_trainer_is_compiled_once_per_variant_and_trains_the_same():
    before = child.df.stats().captures
    found = measured("lora trainer step 512 tokens", (v.EAGER, v.OURS))
    assert found["note"] == "" and found["targets"][0]["is_met"] and found["ours"]["variant"] == v.OURS
    assert child.df.stats().captures == before + 1
    assert 0 < found["ours"]["error"] < 1e-3, "nothing was trained, or something else"


def test_a_variant_that_fails_is_said(monkeypatch):
    monkeypatch.setitem(v.OPTIONS, v.SPLIT, {"strategy": "fastest"})
    found = measured("lora prefill 512 tokens")
    assert "dynaflow split not measured: OptionError: unknown strategy 'fastest'" in found["note"]
    assert found["ours"]["variant"] == v.OURS


def test_weights_that_say_nothing_are_refused():
    with pytest.raises(ValueError, match="say nothing"):
        child._errors({}, [torch.zeros(3)])


def test_a_result_that_is_wrong_misses_its_target(monkeypatch):
    monkeypatch.setattr(child.Times, "figures", lambda self: {"median_ms": 1.0, "spread_ms": 0.0})
    monkeypatch.setattr(child, "ratio", lambda *_: {"ratio": 1.0, "low": 1.0, "high": 1.0})
    times = {name: child.Times(rounds=[[1.0]]) for name in (v.EAGER, v.COMPILE, v.OURS)}
    row = rows()["flux 1024 tokens"]
    for error, is_met in ((0.029, True), (0.031, False)):
        found = child._compared(row, times, {v.EAGER: 0.019, v.COMPILE: 0.02, v.OURS: error}, False, torch.bfloat16)
        assert found["targets"][0]["is_met"] is is_met


def test_the_file_the_page_and_the_quotes(tmp_path):
    path = tmp_path / "systems.json"
    row = stamped("sd3 1024 tokens", "time", {"tiny": True, "unit": "step"}, measured("sd3 1024 tokens"), "test", "cpu")
    report.save(path, report.merged(load(path), [row]))
    (kept,) = load(path)
    assert kept["speedup"] > 0 and kept["versions"]["transformers"]
    assert "| sd3 1024 tokens | step | " in report.markdown([kept]) and "sd3 1024 tokens" in report.table([kept])
    page = "before\n<!-- measured: flux*,sd3* -->\nold\n<!-- end of measured -->\nbehind\n"
    assert "| sd3 1024 tokens | step | " in report.quoted(page, [kept]) and "old" not in report.quoted(page, [kept])
    assert report.quoted(page, []) == page.replace("old", report.NOT_YET)


def test_pages_quote_the_result_file():
    for page in report.pages():
        text = page.read_text(encoding="utf-8")
        assert report.quoted(text, load(report.RESULTS)) == text, "run python -m benchmarks.systems --plot"
    assert {page.stem for page in report.pages()} == {row.page for row in rows().values()}


def test_the_command(tmp_path):
    listed = subprocess.run([sys.executable, "-m", "benchmarks.systems", "--list"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert all(name in listed.stdout for name in rows())
    into_results = subprocess.run([sys.executable, "-m", "benchmarks.systems", "--tiny"], cwd=ROOT, capture_output=True, text=True)
    assert into_results.returncode == 2 and "give --json" in into_results.stderr
