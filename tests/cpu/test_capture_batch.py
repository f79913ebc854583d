"""Which batch a capture has, and how many captures there are: constants, pieces without one, arguments that look like one."""

import dataclasses

import pytest
import torch
from torch import nn

import dynaflow as df
from tests.cpu.test_engine import assert_same, no_grad  # noqa: F401 (no_grad is a fixture)


def test_a_piece_without_a_batch_says_so():
    """A loss behind a graph break: there is nothing to split, whatever the batch size of the call."""

    def scaled_loss(x):
        loss = (x * 2).relu().mean()
        torch._dynamo.graph_break()
        return loss * 3

    for strategy in (df.TwoBatch(), AlwaysTwo()):
        fast, x = df.compile(scaled_loss, strategy=strategy), torch.randn(4, 3)
        assert_same(fast(x), scaled_loss(x))
        assert df.stats(fast).fallbacks == {"no input of this graph carries the batch": 1} and df.stats(fast).split_calls == 1
    fast = df.compile(scaled_loss, strategy=df.TwoBatch())
    fast(x[:1])
    assert df.stats(fast).fallbacks == {"no input of this graph carries the batch": 1, "batch smaller than 2": 1}


class AlwaysTwo(df.Strategy):
    """Does not ask for the batch size."""

    def schedule(self, flow):
        flow.split(2)
        while ready := flow.get_ready_ops():
            flow.execute(ready[0])


class Kinds(nn.Module):
    """What it does is an attribute's to say, as an active adapter's name is: a capture each."""

    kind = "k"

    def forward(self, x):
        return x * len(self.kind)


def test_more_captures_than_dynamo_makes_by_itself():
    model = Kinds()
    fast = df.compile(model, strategy=df.TwoBatch(), strict=True)
    for n in (*range(1, 13), *range(1, 13)):
        model.kind = "k" * n
        x = torch.randn(4, 3)
        assert_same(fast(x), x * n)
    assert df.stats(fast).captures == 12 and df.stats(fast).split_calls == 24
    assert torch._dynamo.config.recompile_limit == 8  # others' captures are none of our business


def test_a_limit_of_captures_that_somebody_set_holds():
    model = Kinds()
    fast = df.compile(model, strategy=df.TwoBatch())
    with torch._dynamo.config.patch(recompile_limit=3):
        for n in range(1, 7):
            model.kind = "k" * n
            assert_same(fast(torch.ones(4, 3)), torch.full((4, 3), float(n)))
    assert df.stats(fast).captures == 3
    ((reason, count),) = df.stats(fast).fallbacks.items()
    assert "recompile limit" in reason and count == 3


class PerRow(nn.Module):
    """A table of a row's own: a list of Python's makes the batch size a constant. Nothing ties the mask's to it."""

    def forward(self, x, mask=None, names=None):
        if names is not None and len(names) != len(x):
            raise ValueError("a name per row")
        kept = 1 if mask is None else mask.float()[torch.arange(x.shape[0]), 0][:, None]
        return torch.relu(x) * kept


@pytest.mark.parametrize("is_masked", [False, True])
def test_a_batch_that_is_a_constant_where_it_counts_is_a_fallback(is_masked):
    """Also where another argument's rows are free: to split a mask, and nothing else, is not to split the call."""
    fast, x = df.compile(PerRow(), strategy=df.TwoBatch()), torch.randn(4, 3)
    more = {"mask": torch.ones(4, 2, dtype=torch.bool)} if is_masked else {}
    assert_same(fast(x, **more, names=["a", "b", "a", "b"]), torch.relu(x))
    (reason,) = df.stats(fast).fallbacks
    assert "no batch to split" in reason and df.stats(fast).split_calls == 0
    assert_same(fast(x, **more), torch.relu(x))
    assert df.stats(fast).split_calls == 1


def test_an_argument_that_has_the_batchs_size_by_chance_does_not_keep_it_from_being_split():
    """A table of four rows beside a batch of four: the first argument says what the batch is."""
    def looked_up(x, table):
        first, second, third, fourth = table
        return x * first + second * third - fourth

    fast = df.compile(looked_up, strategy=df.TwoBatch(), strict=True)
    for n in (4, 6):
        x, table = torch.randn(n, 3), torch.randn(4, 3)
        assert_same(fast(x, table), looked_up(x, table))
    assert df.stats(fast).split_calls == 2


@dataclasses.dataclass(slots=True, frozen=True)
class InSlots:
    hidden: torch.Tensor
    count: int = 2


class SomeInSlots(InSlots):
    """Slots of its base class, and a __dict__ of its own."""


@pytest.mark.parametrize("kind", [InSlots, SomeInSlots])
def test_tensors_in_slots_carry_the_batch(kind):
    def double(given):
        return torch.sin(given.hidden) * given.count

    fast = df.compile(double, strategy=df.TwoBatch())
    for n in (8, 3, 5):
        x = torch.randn(n, 4)
        assert torch.equal(fast(kind(x)), double(kind(x)))
    assert df.stats(fast).split_calls == 3 and df.stats(fast).captures == 1, df.stats(fast)
