"""The pages in docs/systems: their snippets run, as a user runs them."""

from pathlib import Path

from tests.cpu.test_examples import ROOT, assert_runs, snippets


def assert_page_runs(name: str, folder: Path) -> None:
    text = snippets(ROOT / "docs" / "systems" / f"{name}.md")
    assert text.strip()
    (folder / "page.py").write_text(text)
    assert_runs(str(folder / "page.py"))
