"""Links in the README and the docs lead to files that are there, and to headings that are on the page."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def text_of(page: Path) -> str:
    """Without blocks of code: a comment there is no heading."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def targets(page: Path) -> list[str]:
    """Of its links; what looks like one inside of code is none."""
    return re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", text_of(page)))


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings: lower case, no punctuation, hyphens for blanks, a number behind those that were there before."""
    found: list[str] = []
    for heading in re.findall(r"^#+ +(.+?) *$", text_of(page), re.MULTILINE):
        plain = re.sub(r"\]\([^)]*\)", "", heading)
        found.append(re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-"))
    return {name if found[:i].count(name) == 0 else f"{name}-{found[:i].count(name)}" for i, name in enumerate(found)}


def broken(page: Path) -> list[str]:
    bad = []
    for target in targets(page):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        is_there = there.exists() and ROOT in there.parents
        if not is_there or anchor and (there.suffix != ".md" or anchor not in anchors(there)):
            bad.append(target)
    return bad


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    assert not (found := broken(page)), f"{page.name} links to {found}"


def test_rejects_a_broken_link(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "other.md").write_text("# On the CPU, too\n## A\n## A\n```\n# no heading\n```\n")
    page = tmp_path / "page.md"
    page.write_text("[a](other.md#on-the-cpu-too) [b](other.md#a-1) [c](https://x.y/z) [d](#own)\n# Own\n`[e](not.md)`")
    assert broken(page) == []
    page.write_text("[a](gone.md) [b](other.md#no-heading) [c](#own) [d](../outside.md)")
    assert broken(page) == ["gone.md", "other.md#no-heading", "#own", "../outside.md"]


def test_every_page_is_linked_from_somewhere():
    linked = {(page.parent / target.partition("#")[0]).resolve() for page in PAGES for target in targets(page)}
    folders = {path for path in linked if path.is_dir()}
    alone = [page for page in PAGES[1:] if page not in linked and page.parent not in folders]
    assert not alone, f"no page links to {[str(page.relative_to(ROOT)) for page in alone]}"
