"""docs/strategies shows what is true: plans, pictures and lines of code as they are now, numbers of the result files."""

import pytest

import dynaflow as df
from benchmarks.strategy_pages.__main__ import stale
from benchmarks.strategy_pages.lines import PEERS, num_lines
from benchmarks.strategy_pages.numbers import numbers
from benchmarks.strategy_pages.pages import BEGIN, FOLDER, PAGES, path_of, rendered
from benchmarks.strategy_pages.plans import IMAGES, SHOWN, draw, source, source_of


def text_of(name):
    return path_of(name).read_text(encoding="utf-8")


def test_pages_and_pictures_are_up_to_date():
    assert stale() == [], "run python -m benchmarks.strategy_pages"


def test_every_strategy_has_a_page_and_no_page_or_picture_is_left_over():
    assert {strategy for strategy, *_ in PAGES.values()} == {
        name for name, item in vars(df).items()
        if isinstance(item, type) and issubclass(item, df.Strategy) and name not in ("Strategy", "Sequential", "Auto", "Greedy")
    }  # fmt: skip
    assert {page.stem for page in FOLDER.glob("*.md")} == {"index", *PAGES}
    assert {path.name for path in IMAGES.iterdir()} == {shown.path.name for shown in SHOWN.values()}


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [("index", "`DualBatch` | 1", "`DualBatch` | 2"), ("nano-flow", "attn 2/4", "attn 2/5"), ("dual-batch", "62x at best", "72x at best")],
)
def test_an_edited_plan_or_number_is_noticed(name, old, new):
    edited = text_of(name).replace(old, new, 1)
    assert edited != text_of(name) and rendered(name, edited) == text_of(name)


def test_a_page_without_a_place_is_refused():
    with pytest.raises(ValueError, match="places"):
        rendered("mixed", text_of("mixed").replace(BEGIN.format("plan mixed"), ""))


def test_a_picture_tells_what_it_was_drawn_from(tmp_path):
    pytest.importorskip("matplotlib")
    draw("offload", tmp_path)
    assert source_of(tmp_path / "offload.png") == source("offload") != source("mixed")
    (tmp_path / "other.png").write_bytes((tmp_path / "offload.png").read_bytes().replace(b"Description", b"Descriptiom"))
    assert source_of(tmp_path / "other.png") == ""


@pytest.mark.parametrize("name", [name for name, *_ in PAGES.values()])
def test_what_is_measured_over_an_emulated_network_says_so(name):
    text = numbers(name)
    assert ("overlap.json" in text or "loopback.json" in text) <= ("emulated" in text)
    assert "|" in text or text.startswith("Not measured yet")


# it simulates what it plans
@pytest.mark.parametrize("strategy", [s for s in PEERS if s is not df.Branches], ids=lambda s: s.__name__)
def test_strategies_are_short(strategy):
    assert num_lines(strategy) <= 40 and strategy.__doc__


def test_lines_of_code_are_counted():
    class Counted(df.Strategy):
        """Not these
        lines."""

        def __init__(self):
            self.x = 1

        def schedule(self, flow):
            """Nor these."""
            # nor this

            while ready := flow.get_ready_ops():
                flow.execute(
                    ready[0])  # fmt: skip

        @staticmethod
        def helper():
            return 1

    assert num_lines(Counted) == 7
