"""Every example runs as a user runs it, and ends in its own equality check. The docs' snippets run too, page by page."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dynaflow import errors

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("0*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
STRATEGY_PAGES = sorted((ROOT / "docs" / "strategies").glob("*.md"))


def assert_runs(*command: str, cwd: Path = ROOT) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, *command], cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path):
    assert assert_runs(str(path)).rstrip().splitlines()[-1].startswith("equal to plain PyTorch")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_short_and_says_what_it_shows(path):
    text = path.read_text()
    assert len(text.splitlines()) < 80
    assert text.startswith('"""')


def test_there_are_seven():
    assert [path.name[:3] for path in EXAMPLES] == ["01_", "02_", "03_", "04_", "05_", "06_", "07_"]


def test_demo(tmp_path):
    told = assert_runs(str(ROOT / "examples" / "demo.py"), "--quick", "--out", str(tmp_path))
    assert "bit-equal" in told and "left out" in told
    if importlib.util.find_spec("matplotlib"):
        assert (tmp_path / "demo.png").stat().st_size > 5000
    assert (tmp_path / "demo.trace.json").stat().st_size > 1000


def snippets(page: Path) -> str:
    return "\n".join(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize("page", [page for page in PAGES if snippets(page)], ids=lambda page: page.stem)
def test_docs_snippets_run(page, tmp_path):
    # a file, not -c: torch reads the source of custom ops and of what it compiles
    (tmp_path / "page.py").write_text(snippets(page))
    assert_runs(str(tmp_path / "page.py"))


def test_strategy_pages_snippets_run(tmp_path):
    """All in one process, each page on its own: importing torch takes longer than most of them."""
    pages = [page for page in STRATEGY_PAGES if snippets(page)]
    assert {page.stem for page in STRATEGY_PAGES} - {page.stem for page in pages} == {"index"}
    names = [f"page_{page.stem.replace('-', '_')}" for page in pages]
    for name, page in zip(names, pages):
        (tmp_path / f"{name}.py").write_text(snippets(page))
    (tmp_path / "all_pages.py").write_text("".join(f"import {name}\n" for name in names))
    assert_runs(str(tmp_path / "all_pages.py"))


def test_docs_explain_every_error():
    text = (ROOT / "docs" / "errors.md").read_text()
    classes = {name for name, item in vars(errors).items() if isinstance(item, type) and issubclass(item, errors.DynaFlowError)}
    families = {"DynaFlowError", "StrategyError", "PlanRefused"}
    assert {name for name in classes - families if f"**{name}.**" not in text} == set()
    assert set(re.findall(r"^\*\*(\w+)\.\*\*", text, re.MULTILINE)) <= classes


def test_docs_grid_is_what_grid_prints():
    from dynaflow.ir import Plan

    page = (ROOT / "docs" / "plan.md").read_text()
    source = re.search(r'parse\("""\n(.*?)"""\)', page, re.DOTALL)
    assert Plan.parse(source[1]).grid() in page
