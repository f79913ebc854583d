"""The zoo on the CPU: each model under each strategy, a few batch sizes each. `make models` runs all of them."""

import pytest

pytest.importorskip("transformers")
pytest.importorskip("timm")

from benchmarks.models import check_generate, check_model
from benchmarks.zoo import ZOO, select

# strategy -> batch sizes; the first one is captured, the others must not capture again, except 1
CASES = {"sequential": (3,), "2-way": (8, 17, 2, 1), "3-way": (17, 3), "branches": (2, 8)}


@pytest.mark.parametrize("entry", ZOO, ids=lambda e: e.name)
@pytest.mark.parametrize("strategy", CASES)
def test_model(entry, strategy):
    (row,) = check_model(entry, [strategy], CASES[strategy])
    assert row.verdict == "ok"
    assert row.captures <= 1 + (1 in CASES[strategy])
    if strategy != "sequential":
        assert {c.batch: c.fallback for c in row.cases if c.fallback and c.batch > 1} == {}
    if strategy in ("2-way", "3-way"):
        assert row.num_part_launches > row.num_ops


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_generate_gives_the_same_tokens(name, cache):
    (entry,) = select(name)
    result = check_generate(entry, cache)
    assert result.verdict == "same tokens"
    assert result.fallbacks == {}
