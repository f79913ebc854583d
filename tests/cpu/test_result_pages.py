"""Pages that are made from result files are what the files give now; what pages say of our own files is so."""

from pathlib import Path

import pytest

from benchmarks.backend import report as backend
from benchmarks.branches import report as branches
from benchmarks.overlap import report as overlap
from benchmarks.store import DOCS, ROOT, load
from benchmarks.systems import report as systems
from benchmarks.vllm_serving import report as vllm_serving

SUITES = {"backend": backend, "branches": branches, "overlap": overlap, "systems": systems, "vllm_serving": vllm_serving}


@pytest.mark.parametrize("suite", SUITES)
def test_a_page_is_that_of_its_results(suite):
    report = SUITES[suite]
    assert report.markdown(load(report.RESULTS)) == report.PAGE.read_text(encoding="utf-8"), f"run python -m benchmarks.{suite} --plot"


@pytest.mark.parametrize("page", systems.pages(), ids=lambda page: page.stem)
def test_what_a_page_quotes_is_in_the_results(page):
    text = page.read_text(encoding="utf-8")
    assert systems.quoted(text, load(systems.RESULTS)) == text, "run python -m benchmarks.systems --plot"


def num_lines(*names: str) -> int:
    files = [ROOT / "dynaflow" / "integrations" / f"{name}.py" for name in names]
    return sum(len(Path(file).read_text(encoding="utf-8").splitlines()) for file in files)


def test_lines_of_the_integrations_are_as_the_pages_say():
    shared = ("serving", "steps", "step_trials", "requests", "pieces", "ops", "around")
    vllm = ("vllm", "vllm_steps", "vllm_branches")
    index, page = ((DOCS / "systems" / f"{name}.md").read_text(encoding="utf-8") for name in ("index", "vllm"))
    said = [
        f"| {num_lines('transformers')} lines |", *(f"| {num_lines(name)} |" for name in ("accelerate", "peft", "diffusers")),
        "| {}, {} for steps and {} for branches,".format(*(num_lines(name) for name in vllm)), f"has {num_lines('__init__')} lines;",
        f"engines share has {num_lines(*shared)},",
    ]  # fmt: skip
    assert [text for text in said if text not in index] == []
    assert [name for name in shared if f"`{name}.py`" not in index or f"| {num_lines(name)} |" not in index] == []
    assert f"| 0 (one setting) | {num_lines(*vllm)}, in" in page and f"and {num_lines(*shared)} that know nothing" in page


def test_what_vllms_page_says_of_branches_is_in_the_results():
    rows = {r["config"]["load"]["requests"]: r for r in load(vllm_serving.RESULTS) if r["config"]["way"] == "branches"}
    gain = {n: f"{r['speedup']:.2f}x" for n, r in rows.items()}
    page = " ".join((DOCS / "systems" / "vllm.md").read_text(encoding="utf-8").split())
    assert gain[16] == gain[64]
    exact = f"{rows[16]['speedup']:.3f}"
    assert f"{gain[1]} for one sequence that decodes, {gain[16]} for 16 ({exact}) and for 64, {gain[256]} for 256." in page
