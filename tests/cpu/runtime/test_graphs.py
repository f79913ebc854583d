"""Recorded plans: inputs in slots, caches by address, outputs that belong to the caller. The recording itself is CUDA's."""

import logging

import pytest
import torch
from torch import nn

import dynaflow as df
from dynaflow.runtime import graphs
from tests.cpu.runtime.models import Net


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture
def counted(monkeypatch):
    """How often something was recorded."""
    made = []
    plain = graphs.Recording.__init__

    def init(self, *args):
        made.append(self)
        plain(self, *args)

    monkeypatch.setattr(graphs.Recording, "__init__", init)
    return made


def test_replays_give_the_same_and_outputs_stay(counted):
    model = Net()
    fast = df.compile(model, strategy=df.NanoBatch(3), strict=True, runtime="graph")
    cache = torch.zeros(6, 4)
    kept = []
    for _ in range(6):
        x, theirs = torch.randn(6, 4), cache.clone()
        got, wanted = fast(x, cache), model(x, theirs)
        for g, w in zip(got, wanted):
            torch.testing.assert_close(g, w)
            assert g.stride() == w.stride()
        torch.testing.assert_close(cache, theirs)
        kept.append((got[0], got[0].clone()))
    assert all(torch.equal(a, b) for a, b in kept) and len(counted) == 1
    assert df.stats(fast).planned_calls == 6


def test_another_cache_or_parameter_is_recorded_anew(counted):
    model = Net()
    fast = df.compile(model, strategy=df.TwoBatch(), strict=True, runtime="graph")
    x = torch.randn(6, 4)
    for cache in (torch.zeros(6, 4), torch.ones(6, 4)):
        for _ in range(3):
            theirs = cache.clone()
            fast(x, cache)
            model(x, theirs)
            torch.testing.assert_close(cache, theirs)
    assert len(counted) == 2
    model.b.weight = nn.Parameter(torch.randn(4, 4))
    torch.testing.assert_close(fast(x, torch.zeros(6, 4))[0], model(x, torch.zeros(6, 4))[0])


def test_the_oldest_recordings_go_first(counted, monkeypatch):
    monkeypatch.setattr(graphs, "MAX_RECORDINGS", 2)
    fast = df.compile(lambda x: torch.sin(x) * 2, strategy=df.TwoBatch(), strict=True, runtime="graph")
    for _ in range(2):
        for n in (4, 5, 6):
            for _ in range(3):
                x = torch.randn(n, 3)
                assert torch.equal(fast(x), torch.sin(x) * 2)
    assert len(counted) == 6


def test_what_cannot_be_recorded_runs_launch_by_launch(monkeypatch, caplog):
    def fails(body):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graphs, "record_nothing", fails)
    fast = df.compile(lambda x: torch.sin(x) * 2, strategy=df.TwoBatch(), strict=True, runtime="graph")
    x = torch.randn(4, 3)
    with caplog.at_level(logging.WARNING, "dynaflow"):
        for _ in range(4):
            assert torch.equal(fast(x), torch.sin(x) * 2)
    assert sum("cannot be recorded" in r.getMessage() for r in caplog.records) == 1


def test_an_expanded_input_is_bound_by_address():
    fast = df.compile(lambda x: torch.sin(x) * 2, strategy=df.TwoBatch(), strict=True, runtime="graph")
    for _ in range(4):
        x = torch.randn(1, 3).expand(4, 3)
        assert torch.equal(fast(x), torch.sin(x) * 2)
