"""Recordings of a larger batch that serve a smaller one."""

import logging

import pytest
import torch
from torch import nn

import dynaflow as df
from dynaflow.runtime import slots
from tests.cpu.runtime.models import sine

pytestmark = pytest.mark.usefixtures("no_grad")


# -- buckets


class Rows(nn.Module):
    """Each row by itself: an embedding, a layer; two results, one with two rows per row."""

    def __init__(self):
        super().__init__()
        self.embed, self.layer = nn.Embedding(11, 4), nn.Linear(4, 4)

    def forward(self, ids, scale):
        h = self.layer(self.embed(ids)) * scale
        return h.relu(), torch.stack((h, -h), 1).flatten(0, 1)


# option -> the bucket that serves each number of rows
BUCKETS = {
    "list": ([2, 5, 8], {1: 2, 2: 2, 3: 5, 4: 5, 5: 5, 6: 8, 7: 8, 8: 8, 9: 9}),
    "powers": ("powers", {1: 1, 2: 2, 3: 4, 5: 8, 8: 8, 9: 16}),
}


@pytest.mark.parametrize("kind", BUCKETS)
@pytest.mark.parametrize("strategy", [df.Sequential(), df.TwoBatch()], ids=lambda s: type(s).__name__)
def test_padded_rows_do_not_show(counted, kind, strategy):
    buckets, serves = BUCKETS[kind]
    model = Rows()
    fast = df.compile(model, strategy=strategy, runtime="graph", buckets=buckets)
    for _ in range(3):
        for rows in serves:
            ids, scale = torch.randint(0, 11, (rows,)), torch.randn(rows, 1)
            got, wanted = fast(ids, scale), model(ids, scale)
            for g, w in zip(got, wanted):
                torch.testing.assert_close(g, w)
                assert g.stride() == w.stride()
            del got, g
    assert len(counted) == len(set(serves.values())), "one recording per bucket"
    assert df.stats(fast).captures == 1


def test_rows_beyond_the_call_s_are_valid_ones():
    ids = torch.tensor([[7, 8], [9, 10]])
    made = slots.Slots([ids], {0: (0, 5)}, [])
    assert made.each[0].tensor.tolist() == [[7, 8], [9, 10], [7, 8], [9, 10], [7, 8]]
    made.fill([ids + 1])
    assert made.each[0].tensor.tolist() == [[8, 9], [10, 11], [7, 8], [9, 10], [7, 8]]


def test_an_empty_batch_is_not_padded(counted):
    fast = df.compile(sine, runtime="graph", buckets="powers")
    for rows in (3, 3, 0, 0, 0, 4):
        x = torch.randn(rows, 3)
        assert torch.equal(fast(x), sine(x))


def write(x, cache):
    cache.add_(x)
    return x * 2


def column_sums(x):
    return x.sum(0)


# what -> function, its arguments for n rows, batch=, words of the reason
REFUSED = {
    "it mixes rows": (lambda x: x - x.mean(0), lambda n: (torch.randn(n, 3),), None, "mean"),
    "it counts rows": (lambda x: x * x.shape[0], lambda n: (torch.randn(n, 3),), None, ""),
    "a cache with the batch": (write, lambda n: (torch.randn(n, 3), torch.zeros(n, 3)), None, "changes cache in place"),
    "an output with the batch inside": (
        lambda x: (x * 2).t().contiguous(), lambda n: (torch.randn(n, 3),), None, "not the outermost dim of its output"),
    "an input with the batch inside": (column_sums, lambda n: (torch.randn(3, n),), 1, "not the outermost dim of its input"),
    "an input that is a slice": (column_sums, lambda n: (torch.randn(3, 40)[:, :n],), 1, "not the outermost dim of its input"),
    "an expanded input": (lambda x, m: x + m, lambda n: (torch.randn(n, 3), torch.randn(n, 1).expand(n, 3)), None, "is expanded"),
}  # fmt: skip


@pytest.mark.parametrize("reason", REFUSED)
def test_rejects_padding(counted, caplog, reason):
    """Where padding would show, sizes are recorded as they are."""
    function, make, batch, words = REFUSED[reason]
    with caplog.at_level(logging.WARNING, "dynaflow"):
        fast = df.compile(function, runtime="graph", buckets=[4, 8], batch=batch)
        for rows in (3, 6, 5):
            args = make(rows)
            for _ in range(3):
                theirs = [a.clone() if a.is_contiguous() else a for a in args]
                torch.testing.assert_close(fast(*args), function(*theirs))
                torch.testing.assert_close(list(args), theirs)
    (said,) = [r.getMessage() for r in caplog.records if "buckets= has no effect" in r.getMessage()]
    assert words in said and len(counted) == 3


def test_a_changed_input_without_rows_is_padded(counted, caplog):
    """The twin: what is changed carries no batch."""
    fast = df.compile(lambda x, counter: (counter.add_(1), x * 2)[1], runtime="graph", buckets=[4, 8])
    counter = torch.zeros(())
    for number, rows in enumerate((3, 4, 2, 3, 1), 1):
        x = torch.randn(rows, 3)
        assert torch.equal(fast(x, counter), x * 2) and counter.item() == number
    assert not [r for r in caplog.records if "buckets=" in r.getMessage()] and len(counted) == 1
