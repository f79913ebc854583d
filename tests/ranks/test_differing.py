"""What ranks that differ are told, and how soon: one whose strategy fails, and one that calls a collective of its own."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dynaflow as df
from dynaflow.errors import RankMismatch, StrategyRaised
from dynaflow.runtime import ranks
from tests.ranks import models
from tests.ranks.harness import run

pytestmark = pytest.mark.xdist_group("ranks")


def batch(batch_size):
    return torch.randn(batch_size, models.WIDTH, generator=torch.Generator().manual_seed(batch_size))


class FailsOn(df.Strategy):
    def __init__(self, rank):
        self.rank = rank

    def schedule(self, flow):
        if dist.get_rank() == self.rank:
            raise LookupError("no such table")
        return df.TwoBatch().schedule(flow)


def one_fails(strict):
    """Per call: the error, or that the result is right."""
    torch.manual_seed(0)
    whole = models.Mlp()
    net = models.Functional(whole)
    fast, told = df.compile(net, strategy=FailsOn(1), strict=strict), []
    for batch_size in (4, 6):
        try:
            torch.testing.assert_close(fast(batch(batch_size)), whole(batch(batch_size)))
            told.append("right")
        except (StrategyRaised, RankMismatch) as error:
            told.append(f"{type(error).__name__}: {error}")
    return told, list(df.stats(fast).fallbacks)


def test_others_are_told_why_one_has_no_plan():
    for rank, (told, fallbacks) in enumerate(run(one_fails, 2, False)):
        assert told == ["right", "right"] and len(fallbacks) == 1 + rank, "its own error, too, on the rank that has it"
        assert "rank 1 has no plan: strategy FailsOn raised LookupError: no such table" in fallbacks[-1]


def test_strict_calls_raise_the_mismatch_again():
    (first, again), (own, later) = (told for told, _ in run(one_fails, 2, True))
    assert first.startswith("RankMismatch") and "LookupError: no such table" in first
    assert again == later == first and own.startswith("StrategyRaised")


class WithOneOfItsOwn(nn.Module):
    """Rank 0 adds up over a group of its own, too."""

    def __init__(self, full, has_own):
        super().__init__()
        self.inner = models.Functional(full)
        self.group = dist.new_group([0])
        self.has_own = has_own and dist.get_rank() == 0

    def forward(self, x):
        y = torch.tanh(x)
        if self.has_own:
            dist.all_reduce(y, group=self.group)
        return self.inner(y)


def one_has_a_collective_of_its_own(has_own):
    ranks.TIME_LIMIT = timedelta(seconds=10)  # nobody waits as long
    torch.manual_seed(0)
    whole = models.Mlp()
    fast = df.compile(WithOneOfItsOwn(whole, has_own), strategy=df.TwoBatch())
    for batch_size in (4, 6):
        torch.testing.assert_close(fast(batch(batch_size)), whole(torch.tanh(batch(batch_size))))
    return list(df.stats(fast).fallbacks)


def test_rejects_a_collective_of_one_rank_alone_at_once():
    """Over another group than the one that they share: they find each other all the same."""
    for (reason,) in run(one_has_a_collective_of_its_own, 2, True):
        assert "collective 0 is 'all_reduce' over rows 0/1 to 1/2 on rank 0 and 'inner.all_reduce' over rows 0/1 to 1/2 on rank 1" in reason


def test_accepts_a_group_that_nobody_uses():
    assert run(one_has_a_collective_of_its_own, 2, False) == [[], []]
