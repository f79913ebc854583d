"""Memory, as eager has it: aliases, views, copies, layouts, in-place changes, random numbers; and what is left to the sequential graph."""

import copy
import logging

import pytest
import torch
from torch import nn

import dynaflow as df
from tests.cpu.test_engine import Block, assert_same, no_grad  # noqa: F401 (no_grad is a fixture)


def test_a_batch_that_is_not_outermost_in_memory():
    net = nn.Linear(4, 4)

    def time_major(x):
        h = net(x)
        return torch.relu(h).view(h.shape[0] * h.shape[1], 4).view_as(h) + h

    fast = df.compile(time_major, strategy=df.NanoBatch(3), batch=1, strict=True, runtime="fake:3")
    for n in (4, 7):
        x = torch.randn(5, n, 4)
        assert_same(fast(x), time_major(x))


def test_aliased_inputs_are_found():
    def shifts(a, b):
        a.add_(1)
        return b * 2

    fast = df.compile(shifts, strategy=df.Branches(2), runtime="fake:lazy")
    base = torch.arange(12.0).view(6, 2)
    wanted = shifts(*(base.clone(),) * 2)
    assert torch.equal(fast(base, base), wanted)
    x, y = torch.randn(6, 2), torch.randn(6, 2)
    assert torch.equal(fast(x, y), y * 2)
    overlapping = torch.randn(12, 2)
    a, b = overlapping[:6], overlapping[3:9]
    copy_ = overlapping.clone()
    assert torch.equal(fast(a, b), shifts(copy_[:6], copy_[3:9]))
    assert any("share memory" in reason for reason in df.stats(fast).fallbacks) or df.stats(fast).captures > 2


def changes_one(x, y):
    x.mul_(2)
    return y + 1


def between(x, y):
    with df.mark("before"):
        r = y + 1
    with df.mark("change"):
        x.mul_(2)
    with df.mark("after"):
        return r, torch.sin(y)


# two inputs in one storage -> (how they lie in t, the batch dims of both, whether rows of one are other rows of the other)
TOGETHER = {
    "the same": (lambda t: (t[:8], t[:8]), 0, False), "one after the other": (lambda t: (t[:8], t[10:18]), 0, False),
    "halves of rows": (lambda t: (t[:8, :2], t[:8, 2:]), 0, False), "some columns": (lambda t: (t[:8, :3], t[:8, 1:]), 0, False),
    "caches of each position": (lambda t: t.view(5, 2, 8, 2).unbind(1), 1, False),
    "shifted by a row": (lambda t: (t[:8], t[1:9]), 0, True), "shifted back": (lambda t: (t[1:9], t[:8]), 0, True),
    "every second row": (lambda t: (t[:8], t[::2][:8]), 0, True), "all of it without a batch": (lambda t: (t[:8], t), {"x": 0}, True),
    "shifted in the middle": (lambda t: (t.view(4, 10, 4)[:, :8], t.view(4, 10, 4)[:, 1:9]), 1, True),
}  # fmt: skip


@pytest.mark.parametrize("function", [changes_one, between])
@pytest.mark.parametrize("how", TOGETHER)
def test_rows_that_are_other_rows_of_what_is_changed(how, function):
    lie, batch, is_meeting = TOGETHER[how]
    for strategy, runtime in [(df.TwoBatch(), "serial"), (df.NanoBatch(4), "fake:1"), (df.TwoBatch(), "graph")]:
        fast = df.compile(function, strategy=strategy, runtime=runtime, batch=batch)
        for _ in range(3):
            mine = torch.randn(40, 4)
            theirs = mine.clone()
            assert_same(fast(*lie(mine)), function(*lie(theirs)))
            assert torch.equal(mine, theirs)
        stats = df.stats(fast)
        is_refused = any("other rows of another input" in reason for reason in stats.fallbacks)
        assert stats.split_calls == 0 if is_meeting else not is_refused, (how, stats)
        assert function is changes_one or is_refused == is_meeting, "of one op it may be known before that it cannot be split"


def test_outputs_are_tensors_of_their_own():
    fast = df.compile(Block(), strategy=df.TwoBatch(), strict=True)
    y = fast(torch.randn(4, 5, 8))["y"]
    assert y._base is None and y.storage_offset() == 0
    with torch.enable_grad():
        weight = torch.ones(8, requires_grad=True)
        y[0] = weight  # what eager allows, for a result that is no view
        y.sum().backward()
    assert torch.equal(weight.grad, torch.full((8,), 5.0))


def test_an_output_that_is_an_input_or_a_view_of_one():
    def function(x):
        x.mul_(2)
        return x, x[:, :2], x.t()

    fast = df.compile(function, strategy=df.TwoBatch(), strict=True)
    mine, theirs = torch.ones(4, 3), torch.ones(4, 3)
    got, wanted = fast(mine), function(theirs)
    assert_same(got, wanted, exact=True)
    got[1].fill_(7)
    assert float(mine[0, 0]) == 7, "still a view of the caller's tensor"


def test_random_ops_keep_their_order_and_are_not_split():
    def function(x):
        return torch.rand_like(x) + x, torch.bernoulli(x.sigmoid()) * 2

    for strategy in (df.TwoBatch(), df.Branches(3)):
        fast = df.compile(function, strategy=strategy, strict=True, runtime="fake:lazy")
        x = torch.randn(6, 4)
        fast(x)
        torch.manual_seed(1)
        got = fast(x)
        torch.manual_seed(1)
        assert_same(got, function(x), exact=True)


def test_batch_norm_in_training_mode_runs_merged_and_updates_once():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())
    twin = copy.deepcopy(model)
    fast = df.compile(model.train(), strategy=df.TwoBatch(), strict=True)
    for n in (6, 9):
        x = torch.randn(n, 4)
        assert_same(fast(x), twin(x))
    torch.testing.assert_close(model[1].running_mean, twin[1].running_mean)
    assert int(model[1].num_batches_tracked) == int(twin[1].num_batches_tracked) == 2
    model.eval()
    twin.eval()
    x = torch.randn(5, 4)
    assert_same(fast(x), twin(x))


def test_a_copy_stays_a_copy_in_a_part_of_one_row():
    def function(x):
        h = x * 2
        turned = h.t().contiguous()  # of one row: nothing to copy, says torch
        turned.add_(100)
        return h + 1, turned.t() * 1

    fast = df.compile(function, strategy=df.TwoBatch(), strict=True, runtime="fake")
    for n in (4, 2):
        x = torch.randn(n, 3)
        assert_same(fast(x), function(x), exact=True)


def write_then(copied):
    """A cache that is written, and what is read of it: `copied`."""

    def function(cache, x):
        cache.index_copy_(1, torch.tensor([1]), x)
        read = copied(cache)
        cache.add_(100)
        return read.sum(-1), cache.sum(1)

    return function


@pytest.mark.parametrize("strategy", [df.Branches(2), df.TwoBatch()], ids=lambda s: type(s).__name__)
def test_a_copy_of_one_row_that_is_a_copy_of_any_number(strategy):
    """Keys repeated for groups of heads: `expand` and `reshape` copy, however many rows there are. One row is planned like others."""
    function = write_then(lambda cache: cache[:, :, None].expand(-1, -1, 2, -1).reshape(cache.shape[0], 6, 4))
    fast = df.compile(function, strategy=strategy)
    for n in (4, 1, 2):
        cache, x = torch.randn(n, 3, 4), torch.randn(n, 1, 4)
        assert_same(fast(cache.clone(), x), function(cache.clone(), x), exact=True)
    assert df.stats(fast).fallbacks == ({} if isinstance(strategy, df.Branches) else {"batch smaller than 2": 1})


@pytest.mark.parametrize("copied", [
    lambda cache: cache.transpose(0, 1).contiguous(), lambda cache: cache.transpose(0, 1).reshape(-1, 4),
    lambda cache: cache.permute(1, 0, 2).flatten(),
], ids=["contiguous", "reshape", "flatten"])  # fmt: skip
def test_a_copy_that_is_a_view_of_one_row(copied):
    """Then a change of the cache is seen in it, as eager has it."""
    function = write_then(copied)
    fast = df.compile(function, strategy=df.Branches(2))
    for n in (4, 1, 2):
        cache, x = torch.randn(n, 3, 4), torch.randn(n, 1, 4)
        assert_same(fast(cache.clone(), x), function(cache.clone(), x), exact=True)


def test_an_expanded_input():
    fast = df.compile(Block(), strategy=df.TwoBatch(), strict=True)
    x = torch.randn(1, 5, 8).expand(6, 5, 8)
    assert_same(fast(x)["y"], Block.forward(fast, x)["y"])


def test_a_batch_without_rows_falls_back():
    fast = df.compile(torch.relu, strategy=df.TwoBatch(min_batch_size=0))
    assert fast(torch.randn(0, 4)).shape == (0, 4)
    assert any("has no row" in reason for reason in df.stats(fast).fallbacks)


def test_what_cannot_be_placed_falls_back():
    from torch.testing._internal.two_tensor import TwoTensor

    def turns(x):
        h = x * 2
        h.t_()
        return torch.relu(h) + 1

    fast = df.compile(turns, strategy=df.TwoBatch())
    x = torch.randn(4, 4)
    assert_same(fast(x), turns(x), exact=True)
    assert any("changes the shape of a tensor in place" in reason for reason in df.stats(fast).fallbacks)
    fast = df.compile(lambda x: torch.relu(x) * 2, strategy=df.TwoBatch())
    both = TwoTensor(torch.randn(4, 3), torch.randn(4, 3))
    assert isinstance(fast(both), TwoTensor) and any("TwoTensor" in reason for reason in df.stats(fast).fallbacks)


def test_gradients_that_the_model_turns_on_itself():
    weight = torch.randn(3, requires_grad=True)

    def function(x):
        with torch.enable_grad():
            y = x * weight
        return y + 1

    fast = df.compile(function, strategy=df.TwoBatch())
    x = torch.randn(4, 3)
    assert fast(x).requires_grad == function(x).requires_grad


def test_dropout_in_eval_mode_is_its_argument():
    def function(x):
        v = nn.functional.dropout(x, 0.5, training=False)
        v[:, 0].add_(1)
        return x * 1, v

    fast = df.compile(function, strategy=df.TwoBatch(), strict=True, runtime="fake:lazy")
    x = torch.randn(4, 3)
    mine, theirs = x.clone(), x.clone()
    assert_same(fast(mine), function(theirs), exact=True)
    assert torch.equal(mine, theirs)


def test_what_was_copied_may_change_later():
    def function(x):
        y = x.t().contiguous()
        x.add_(1)
        return y, x * 2

    fast = df.compile(function, strategy=df.NanoBatch(3), strict=True, runtime="fake")
    for n in (3, 7):
        mine = torch.randn(n, 4)
        theirs = mine.clone()
        assert_same(fast(mine), function(theirs), exact=True)
        assert torch.equal(mine, theirs)


def test_one_row_whose_copy_is_a_view():
    def function(x):
        v = x.t().reshape(-1)
        v.mul_(0)
        return v + 1

    fast = df.compile(function, strategy=df.Branches())
    for n in (4, 1):
        mine = torch.randn(n, 3)
        theirs = mine.clone()
        assert torch.equal(fast(mine), function(theirs)) and torch.equal(mine, theirs)


def test_a_batch_that_dynamo_fixed_is_said(caplog):
    def rows(x):
        return torch.stack([row * 2 for row in x.unbind(0)])

    sizes = []

    class Looks(df.Strategy):
        def schedule(self, flow):
            sizes.append(int(flow.context.batch_size))
            flow.split(2)
            while ready := flow.get_ready_ops():
                flow.execute(ready[0])

    fast = df.compile(rows, strategy=Looks())
    x = torch.randn(4, 3)
    with caplog.at_level(logging.WARNING, "dynaflow"):
        assert torch.equal(fast(x), x * 2)
    assert sizes == [4] and any("fixed the batch size at 4" in r.getMessage() for r in caplog.records)
    ((reason, count),) = df.stats(fast).fallbacks.items()
    assert count == 1 and "its size is a constant" in reason
    with pytest.raises(df.errors.FellBack, match="its size is a constant"):
        df.compile(rows, strategy=Looks(), strict=True)(x)


def test_a_value_with_gaps():
    @torch.library.custom_op("dynaflow_test::gappy", mutates_args=())
    def gappy(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided((x.shape[0], 4), (8, 1)).copy_(x)

    gappy.register_fake(lambda x: torch.empty_strided((x.shape[0], 4), (8, 1)))
    df.register_split_rule(torch.ops.dynaflow_test.gappy, df.rowwise)

    def function(x):
        with df.mark("a"):
            h = torch.ops.dynaflow_test.gappy(x)
        with df.mark("b"):
            y = torch.ops.dynaflow_test.gappy(h) * 2
        with df.mark("c"):
            return torch.relu(y), h

    fast = df.compile(function, strategy=df.TwoBatch(), strict=True, runtime="fake:1")
    x = torch.randn(6, 4)
    assert_same(fast(x), function(x), exact=True)

    def changed(x):
        with df.mark("a"):
            h = torch.empty_strided((x.shape[0], 4), (8, 1))
            h.copy_(x)
        with df.mark("b"):
            h.add_(1)
        with df.mark("c"):
            return torch.relu(h), h

    fast = df.compile(changed, strategy=df.TwoBatch())
    assert_same(fast(x), changed(x), exact=True)
