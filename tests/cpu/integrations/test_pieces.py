"""Pieces that somebody else compiles and captures: looked at while he captures, his own callable otherwise."""

import logging
from types import SimpleNamespace

import pytest
import torch
from torch._inductor.compile_fx import compile_fx

import dynaflow as df
from dynaflow.inductor.structure import NotCompiled
from dynaflow.integrations import pieces as module
from dynaflow.integrations.pieces import Pieces
from dynaflow.integrations.serving import Engine
from tests.cpu.kernel_models import Towers, fresh  # noqa: F401  (fresh is a fixture)

NONE = "Toy compiled nothing here"


@pytest.fixture
def pieces():
    made = Pieces(Engine("Toy", logging.getLogger("toy")), "toy", NONE)
    made.settings.strategy = df.Branches(2)
    return made


def compiled(pieces, model=None):
    """As an engine compiles a piece: Inductor, with nothing of ours but what is around it."""

    def backend(graph, inputs):
        with pieces.taken({}):
            return compile_fx(graph, inputs)

    fast = torch.compile(model or Towers(), backend=backend)
    with torch.no_grad():
        fast(torch.randn(4, 8))
    return fast


def captured(pieces, fast, x):
    """The run before a capture, and what would be captured."""
    with pieces.opened(), torch.no_grad():
        return [fast(x) for _ in range(3)]


def test_plans_are_issued_in_captures_alone(pieces, caplog):
    fast, x = compiled(pieces), torch.randn(4, 8)
    (region,) = pieces.regions
    assert region.name.startswith("toy.") and not region.cases, "closed: nothing is looked at"
    with torch.no_grad():
        wanted = fast(x)
    assert not region.cases
    with caplog.at_level(logging.INFO, "toy"):
        assert all(torch.equal(got, wanted) for got in captured(pieces, fast, x))
    num_issues = pieces.settings.stats.planned_calls
    assert num_issues > 0 and not pieces.is_open
    stats = pieces.engine.stats
    assert (stats.regions, stats.planned_regions, stats.fallbacks, stats.refusal) == (1, 1, {}, "")
    summed = f"1 of 1 pieces run under plans of their kernels in Toy's CUDA Graphs, 1 cases, {num_issues} issues"
    assert f"dynaflow: branches: {summed}" in caplog.text
    with torch.no_grad():
        assert torch.equal(fast(x), wanted)
    assert pieces.settings.stats.planned_calls == num_issues


def test_equal_layers_share_a_region(pieces, monkeypatch):
    """Layers of equal code have one module, which Inductor loads once."""

    class Loaded:
        def __init__(self, name, compiled, *others, **named):
            self.module, self.cases = compiled.module, {}

        def __call__(self, args):
            return [self.module]

    monkeypatch.setattr(module, "Region", Loaded)
    graphs = [SimpleNamespace(module=code, source_code=code, current_callable=lambda args: ["plain"]) for code in ("even", "odd", "even")]
    layers = [pieces._region({}, graph, False, ()) for graph in graphs]
    assert len(pieces.regions) == 2
    assert [layer([]) for layer in layers] == [["plain"]] * 3
    with pieces.opened():
        assert [layer([]) for layer in layers] == [["even"], ["odd"], ["even"]]


def test_what_is_compiled_elsewhere_is_not_taken(pieces):
    fast = torch.compile(Towers(), backend="inductor")
    with torch.no_grad():
        fast(torch.randn(4, 8))
    assert not pieces.regions


def test_where_there_are_none_the_model_is_refused(pieces, caplog):
    with pieces.opened():
        pass
    assert pieces.engine.stats.refusal == NONE and f"dynaflow leaves this model to Toy: {NONE}" in caplog.text


def test_a_refused_model_is_not_looked_at(pieces):
    fast = compiled(pieces)
    pieces.engine.refuse("several ranks")
    captured(pieces, fast, torch.randn(4, 8))
    assert not pieces.regions[0].cases and pieces.engine.stats.regions == 0 and pieces.engine.stats.refusal == "several ranks"


def test_they_are_closed_after_a_capture_that_fails(pieces):
    compiled(pieces)
    with pytest.raises(RuntimeError, match="out of memory"), pieces.opened():
        assert pieces.is_open
        raise RuntimeError("out of memory")
    assert not pieces.is_open and pieces.engine.stats.regions == 1


def test_a_piece_that_is_no_region_is_said_and_counted(pieces, monkeypatch, caplog):
    def refuses(*args, **kwargs):
        raise NotCompiled("it has no wrapper")

    monkeypatch.setattr(module, "Region", refuses)
    fast, x = compiled(pieces, model := Towers()), torch.randn(4, 8)
    assert "dynaflow: a piece is left to Toy: it has no wrapper" in caplog.text and not pieces.regions
    with torch.no_grad():
        torch.testing.assert_close(captured(pieces, fast, x)[0], model(x))
    assert pieces.engine.stats.fallbacks == {"it has no wrapper": 1}
