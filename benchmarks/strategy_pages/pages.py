"""Pages with places for what is made: `<!-- made by python -m benchmarks.strategy_pages: KIND NAME -->`, up to `<!-- end -->`."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.store import DOCS
from benchmarks.strategy_pages.lines import table as lines
from benchmarks.strategy_pages.numbers import numbers, summary
from benchmarks.strategy_pages.plans import SHOWN, grid

FOLDER = DOCS / "strategies"
BEGIN, END = "<!-- made by python -m benchmarks.strategy_pages: {} -->", "<!-- end -->"
_PLACE = re.compile(re.escape(BEGIN).replace(r"\{\}", r"(?P<what>.+?)") + r".*?" + re.escape(END), re.DOTALL)

# page -> (strategy, what it hides, what it needs, how it splits)
PAGES = {
    "two-batch": ("TwoBatch", "any collective or copy", "network ops or copies", "in two"),
    "nano-batch": ("NanoBatch", "any collective or copy", "network ops or copies", "in n"),
    "nano-flow": (
        "NanoFlow", "network, and attention over a cache, behind products", "network ops or attention as ops", "unevenly, per class of op",
    ),
    "dual-batch": ("DualBatch", "dispatch and combine of experts", "network ops that can be split", "in two"),
    "single-batch": ("SingleBatch", "shared experts, beside dispatch, experts and combine", "an op that no network op waits for", "no"),
    "comm-overlap": ("CommOverlap", "any collective; weights' all-gathers", "network ops", "in as many parts as pay"),
    "token-weave": ("TokenWeave", "all-reduce, add and norm", "`memory` ops behind the collective", "in two, at a wave"),
    "fused-gemm": (
        "FusedGemm", "a collective behind the product before it", "a product that the collective alone takes", "inside of one function",
    ),
    "offload": ("Offload", "copies of weights from the host", "`df.offload(model, device)`", "no"),
    "prefill-decode": (
        "PrefillDecode", "decoding attention behind prefilling attention", "a tag with the boundary", "attention, at the boundary",
    ),
    "branches": ("Branches", "small ops beside one another", "branches that do not depend on each other", "no"),
    "mixed": ("Mixed", "what two strategies hide", "two strategies, the inner one without a split", "as the outer one does"),
}  # fmt: skip


def places(page: str) -> list[str]:
    """What a page has places for."""
    return [match["what"] for match in _PLACE.finditer(page)]


def wanted(name: str) -> set[str]:
    """What a page must have places for: every plan of its own, with its picture; its numbers."""
    if name == "index":
        return {"overview", "lines"}
    own = [shown for shown in SHOWN if shown == name or shown.startswith(f"{name}-") and shown not in PAGES]
    return {f"{kind} {shown}" for shown in own for kind in ("picture", "plan")} | {f"numbers {PAGES[name][0]}"}


def made(what: str) -> str:
    kind, _, name = what.partition(" ")
    if kind == "picture":
        title = SHOWN[name].title or type(SHOWN[name].strategy).__name__
        return f"![{title}: its lanes, below those of the sequential plan](../img/strategies/{SHOWN[name].path.name})"
    if kind == "plan":
        return f"```\n{grid(name)}\n```"
    return {"numbers": lambda: numbers(name), "overview": overview, "lines": lines}[kind]()


def overview() -> str:
    rows = [f"| [{strategy}]({name}.md) | {hides} | {needs} | {splits} | {summary(strategy)} |"
            for name, (strategy, hides, needs, splits) in PAGES.items()]  # fmt: skip
    return "\n".join(["| strategy | hides | needs | splits | measured |", "|---|---|---|---|---|", *rows])


def rendered(name: str, page: str) -> str:
    """The page with all that is made made anew."""
    found = places(page)
    if sorted(found) != sorted(wanted(name)):
        raise ValueError(f"{name}.md has places for {sorted(found)}, not for {sorted(wanted(name))}")
    return _PLACE.sub(lambda match: f"{BEGIN.format(match['what'])}\n{made(match['what'])}\n{END}", page)


def path_of(name: str) -> Path:
    return FOLDER / f"{name}.md"
