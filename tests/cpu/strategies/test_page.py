"""docs/strategies.md shows what is true: pictures of plans as they are made now, lines as they are counted now."""

import pytest

import dynaflow as df
from benchmarks.strategy_page import BEGIN, PAGE, PEERS, num_lines, rendered


def test_the_page_is_up_to_date():
    page = PAGE.read_text(encoding="utf-8")
    assert rendered(page) == page, "run python -m benchmarks.strategy_page"


def test_an_edited_picture_or_number_is_noticed():
    page = PAGE.read_text(encoding="utf-8")
    for old, new in (("`DualBatch` | 1", "`DualBatch` | 2"), ("attn 2/4", "attn 2/5")):
        edited = page.replace(old, new, 1)
        assert edited != page and rendered(edited) == page


def test_a_page_without_a_place_is_refused():
    with pytest.raises(ValueError, match="0 places"):
        rendered(PAGE.read_text(encoding="utf-8").replace(BEGIN.format("Mixed"), ""))


@pytest.mark.parametrize("strategy", PEERS, ids=lambda s: s.__name__)
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
