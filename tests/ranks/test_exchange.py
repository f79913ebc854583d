"""Which exchanges between ranks are split, and which must see the whole batch."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

import dynaflow as df
from tests.ranks import models
from tests.ranks.harness import run
from tests.ranks.models import world

pytestmark = pytest.mark.xdist_group("ranks")


needs_gathers = pytest.mark.skipif(not models.gathers_in_graphs, reason="Dynamo of this torch does not capture such all-gathers")


def gathers_another_dim(x):
    return torch.tanh(funcol.all_gather_tensor(x * 2, 1, dist.group.WORLD))


def scatters_another_dim(x):
    return torch.tanh(funcol.reduce_scatter_tensor(x * 2, "sum", 1, dist.group.WORLD))


def exchanges_other_dims(x):
    return torch.tanh(models.UlyssesByChunks.exchange(x * 2, 1, 2))


def exchanges_ranks_in_front(x):
    """ranks, batch, ...: the batch is not what is exchanged"""
    by_rank = (x * 2).unflatten(1, (world(), -1)).transpose(0, 1).contiguous()
    return torch.tanh(funcol.all_to_all_single(by_rank, None, None, dist.group.WORLD).transpose(0, 1))


def gathers_the_batch(x):
    """The rows of all ranks, one rank behind the other: a part of the batch is not a range of them."""
    return torch.tanh(funcol.all_gather_tensor(x * 2, 0, dist.group.WORLD))


def gathers_and_scatters_the_batch(x):
    everything = funcol.all_gather_tensor(x * 2, 0, dist.group.WORLD)
    return funcol.reduce_scatter_tensor(torch.tanh(everything), "sum", 0, dist.group.WORLD)


def gathers_and_keeps(x):
    """What was gathered is used as it came, too."""
    got = funcol.all_gather_tensor(x * 2, 0, dist.group.WORLD)
    return torch.cat(got.chunk(world(), 0), 1) + 1, got + 1


def gathers_in_another_order(x):
    got = funcol.all_gather_tensor(x * 2, 0, dist.group.WORLD)
    return torch.cat(got.chunk(world(), 0)[::-1], 1) + 1


def gathers_half(x):
    """Half of every rank's rows, joined."""
    got = funcol.all_gather_tensor(x * 2, 0, dist.group.WORLD)
    return torch.cat(got.chunk(2 * world(), 0), 1) + 1


def exchanges_the_batch(x):
    return torch.tanh(funcol.all_to_all_single(x * 2, None, None, dist.group.WORLD))


def exchanges_rows_for_another_dim(x):
    """Rows of the batch go to other ranks, and are joined along another dim."""
    got = funcol.all_to_all_single(x * 2, None, None, dist.group.WORLD)
    return torch.cat(got.chunk(world(), 0), 1) + 1


SPLIT = [gathers_another_dim, scatters_another_dim, exchanges_other_dims, exchanges_ranks_in_front]
WHOLE = [gathers_the_batch, gathers_and_scatters_the_batch, gathers_and_keeps, gathers_in_another_order, gathers_half, exchanges_the_batch,
         exchanges_rows_for_another_dim]  # fmt: skip


def equals_plain(function):
    """What df.stats says of it, under two parts."""
    x = torch.randn(8, 4, 6, generator=torch.Generator().manual_seed(dist.get_rank()))
    fast = df.compile(function, strategy=df.TwoBatch(), strict=True)
    torch.testing.assert_close(fast(x), function(x))
    return df.stats(fast)


def splits(functions):
    return [equals_plain(function) for function in functions]


def refusals(functions):
    """Per function: why its collectives are not split."""
    found = []
    for function in functions:
        equals_plain(function)
        flow = df.explain(function, (torch.randn(8, 4, 6),), strategy=df.TwoBatch()).flow
        found.append([op.unsplittable for op in flow.ops if op.kind == "network"])
    return found


@needs_gathers
def test_exchanges_along_another_dim_are_split():
    for told in run(splits, 2, SPLIT):
        for function, stats in zip(SPLIT, told):
            assert stats.num_part_launches == stats.num_launches > 0 and not stats.num_unsplittable, (function, stats)


def test_rejects_exchanges_of_the_batch():
    for found in run(refusals, 2, WHOLE):
        assert all(why and all("exchanges rows between ranks" in w for w in why) for why in found), found
