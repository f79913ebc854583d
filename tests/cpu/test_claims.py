"""Numbers, names and defaults on the pages are those of the code."""

import inspect
import re
from pathlib import Path

import pytest

import dynaflow as df
from dynaflow import bindings, entry, measure, planning, region, room, settings
from dynaflow.errors import MAX_LINES
from dynaflow.ir import KINDS
from dynaflow.planner import Planner, ReadyOp
from dynaflow.runtime import graphs, ranks
from dynaflow.simulate import Device
from dynaflow.testing import network

ROOT = Path(__file__).parents[2]
COMPILE_OPTIONS = [name for name in inspect.signature(df.compile).parameters if name != "model"]
NUMBERS = {1: "one", 2: "two", 3: "three", 5: "five", 7: "seven", 10: "ten"}

CLAIMS = [
    ("kernels.md", f"that is {room.MAX_MEMORY:g} times, or {room.SPARE_BYTES >> 20} MiB more where that is more"),
    ("kernels.md", f"the device has {NUMBERS[room.NOT_MISSED]} times as much free"),
    ("kernels.md", f"less than a factor of {NUMBERS[region.NEAR]}"),
    ("kernels.md", f"more than {region.MAX_CASES} sizes"),
    ("kernels.md", f"in segments of {measure.SMALL_SEGMENT >> 20} or {measure.LARGE_SEGMENT >> 20} MiB"),
    ("strategy.md", f"{bindings.MAX_PLANS:,} plans of a captured graph are kept"),
    ("strategy.md", f"up to {planning.MAX_PLANS} plans in all"),
    ("strategy.md", f"({Device().edge_us} us, or {Device().cross_us} us across streams"),
    ("runtimes.md", f"The last {graphs.MAX_RECORDINGS} per captured graph are kept"),
    ("runtimes.md", f"after {graphs.MAX_FAILURES} failures"),
    ("runtimes.md", f"({graphs.MAX_WASTED} recordings in a row that were never replayed)"),
    ("runtimes.md", f"at least {measure.MIN_GAIN:.0%} faster"),
    ("promises.md", f"up to {NUMBERS[graphs.MAX_ROTATION + 1]} sets of outputs per size"),
    ("ranks.md", f"within {NUMBERS[ranks.TIME_LIMIT.total_seconds() // 60]} minutes"),
    ("systems/peft.md", f"{entry.MAX_CAPTURES} in all"),
    ("errors.md", f"at most {MAX_LINES} lines"),
]


def words(text: str) -> str:
    """Without line breaks."""
    return " ".join(text.split())


@pytest.mark.parametrize("page, claim", CLAIMS, ids=[f"{page}-{i}" for i, (page, _) in enumerate(CLAIMS)])
def test_numbers_on_the_pages_are_those_of_the_code(page, claim):
    text = words((ROOT / "docs" / page).read_text())
    assert claim in text, f"docs/{page} does not say {claim!r}"


def test_a_stale_number_is_noticed():
    text = words((ROOT / "docs" / "kernels.md").read_text())
    assert f"or {(room.SPARE_BYTES >> 20) * 32} MiB more where that is more" not in text


def test_what_compile_says_of_its_options():
    """Each has its lines, in order; max_memory's default is the one that is taken; every runtime, compiler and name is there."""
    text = inspect.getdoc(df.compile)
    said = words(text)
    assert [name for name in re.findall(r"^(\w+) +\S", text, re.MULTILINE) if name in COMPILE_OPTIONS] == COMPILE_OPTIONS
    assert f"{room.MAX_MEMORY:g} times, or {room.SPARE_BYTES >> 20} MiB more where that is more" in said
    for name in (*settings.RUNTIMES, *settings.COMPILERS, *settings._NAMED):
        assert f'"{name}"' in said, name


@pytest.mark.parametrize("option", COMPILE_OPTIONS)
def test_every_option_is_on_a_page(option):
    pages = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    assert re.search(rf"\b{option}=", pages)


def test_the_runtimes_page_has_every_runtime():
    page = (ROOT / "docs" / "runtimes.md").read_text()
    assert set(re.findall(r'^\| `"(\w+)"` \|', page, re.MULTILINE)) == set(settings.RUNTIMES)


def test_the_strategy_page_has_what_a_strategy_is_given():
    """Methods of the flow, attributes of ready ops and of the context, kinds, strategies with their defaults."""
    page = (ROOT / "docs" / "strategy.md").read_text()
    nested = {"finish", "follow", "repeat", "split_as", "trial", "declared_at"}  # for strategies inside of strategies, and for us
    methods = {name for name, thing in vars(Planner).items() if inspect.isfunction(thing) and not name.startswith("_")} - nested
    assert {name for name in methods if f"flow.{name}(" not in page} == set()
    given = {name for name in (*ReadyOp.__slots__, *vars(ReadyOp)) if not name.startswith("_")}
    assert {name for name in given if f"`{name}`" not in page} == set()
    assert all(f"`{kind}`" in page for kind in KINDS)
    for name, argument in re.findall(r"^\| `df\.(\w+)\((\w+=\d+)?\)`", page, re.MULTILINE):
        parameters = inspect.signature(getattr(df, name)).parameters.values()
        defaults = [f"{p.name}={p.default!r}" for p in parameters if p.default is not p.empty]
        assert not argument or argument == defaults[0], name


def test_every_exported_strategy_is_on_the_strategy_page():
    page = (ROOT / "docs" / "strategy.md").read_text()
    strategies = [name for name in df.__all__ if isinstance(getattr(df, name), type) and issubclass(getattr(df, name), df.Strategy)]
    assert [name for name in strategies if name != "Strategy" and f"`df.{name}(" not in page] == []


def test_everything_that_is_exported_is_on_a_page_and_says_what_it_is():
    pages = "".join(page.read_text() for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")))
    for name in df.__all__:
        assert re.search(rf"\b{name}\b", pages), name
        assert inspect.getdoc(getattr(df, name)), f"df.{name} has no docstring"


def test_the_runtimes_page_has_every_counter():
    page = (ROOT / "docs" / "runtimes.md").read_text()
    assert [name for name in vars(settings.Stats()) if f"`{name}`" not in page] == []


def test_links_of_the_emulated_network_are_those_of_the_page():
    page = (ROOT / "docs" / "runtimes.md").read_text()
    rows = {f"| `{link.name}` | {link.gbps / 8:g} | {link.latency_us:g} us | {link.sms} |"
            for link in vars(network).values() if isinstance(link, network.Link)}  # fmt: skip
    assert rows and all(row in page for row in rows)
