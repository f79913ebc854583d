"""A small run of `python -m dynaflow.testing.programs --device cuda`, and that it would notice."""

import logging

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs CUDA", allow_module_level=True)

from dynaflow.runtime import graphs, lent
from dynaflow.testing.programs import check_many


@pytest.fixture(autouse=True)
def quiet():
    logging.getLogger("dynaflow").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("dynaflow").setLevel(logging.NOTSET)


def test_random_programs_do_what_eager_mode_does():
    tally = check_many(range(16), device="cuda")
    assert not tally.violations, str(tally)
    counts = tally.counts
    assert counts["programs"] >= 14 and counts["split"] >= 0.7 * counts["programs"], "a fuzz in which everything falls back proves nothing"
    assert counts["planned calls"] > 0.6 * counts["calls"] and counts["part launches"] > 0.3 * counts["launches"]


def test_notices_outputs_that_are_overwritten(monkeypatch):
    """As if all outputs were borrowed, whoever still holds them."""
    make = graphs.Recordings.__init__
    monkeypatch.setattr(graphs.Recordings, "__init__", lambda self, name, device, pool, borrow=False: make(self, name, device, pool, True))
    violations = check_many(range(6), device="cuda").violations
    assert any("of an earlier call was changed" in v for v in violations), violations


def test_notices_inputs_that_are_not_read_again(monkeypatch):
    """As if recordings went on with what their slots held when they were made. (With the same numbers in each call, nothing would show.)"""
    fill, filled = graphs.Slots.fill, []

    def once(self, args):
        if self not in filled:
            filled.append(self)
            fill(self, args)
        return True

    monkeypatch.setattr(graphs.Slots, "fill", once)
    monkeypatch.setattr(graphs, "feeds_of", lambda *args: None)
    violations = check_many(range(6), device="cuda").violations
    assert any("is off by" in v for v in violations), violations


# programs without convolutions and BatchNorm, whose backwards CUDA on the host has not
TRAINED = (0, 1, 3)


def test_random_programs_are_trained_as_in_eager_mode():
    tally = check_many(TRAINED, device="cuda", train=True)
    assert not tally.violations, str(tally)
    counts = tally.counts
    assert counts["trained"] >= 3 and counts["planned calls"] > 0.4 * (counts["forwards"] + counts["backwards"])
    assert counts["exact"] > 0.9 * counts["tensors"] and counts["kept"] > 50


def test_notices_what_is_saved_and_overwritten(monkeypatch):
    """As if nobody had what was handed out last: a forward whose backward is still to come, for one."""
    monkeypatch.setattr(lent.Lent, "is_gone", lambda self: True)
    monkeypatch.setattr(lent.Lent, "leave", _stay)
    monkeypatch.setattr(lent, "native", lambda: None)
    monkeypatch.setattr(graphs, "let_go", lambda: None)
    assert check_many(TRAINED[:1], device="cuda", train=True).violations


def _stay(one):
    """What is overwritten is not given back to the allocator: to read that would end the process."""
    lent._homes.remove(one._addresses)
    lent.outlived[next(lent._numbers)] = one
