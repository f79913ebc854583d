"""Models over real collectives: on every rank the rows of the single-process model, under plans that really split the batch."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dynaflow as df
from tests.ranks import models
from tests.ranks.harness import run

pytestmark = pytest.mark.xdist_group("ranks")


class Uneven(df.Strategy):
    """compute | A0 A1 A2 ...    half of the rows, a third, the rest
    comm    |    a0 a1 ..."""

    def schedule(self, flow):
        flow.split([3, 2, -1])
        while ready := flow.get_ready_ops():
            r = min(ready, key=lambda r: (r.kind != "network", r.depth, r.part))
            flow.execute(r, stream="comm" if r.kind == "network" else "compute")


STRATEGIES = {"two": df.TwoBatch(), "nano": df.NanoBatch(3), "uneven": Uneven(), "sequential": df.Sequential()}

# sharded model -> the whole one, the shape of its input without the batch, the dim that is divided over ranks (None: all have all of it)
CASES = {
    "Functional": ("Mlp", (3,), None),
    "InPlace": ("Mlp", (3,), None),
    "SequenceParallel": ("Mlp", (models.SEQ,), 1),
    "TokenParallel": ("Mlp", (), 0),
    "ExpertParallel": ("Moe", (), 0),
    "SparseExpertParallel": ("Moe", (), 0),
    "Ulysses": ("Attention", (models.SEQ,), 1),
    "UlyssesByChunks": ("Attention", (models.SEQ,), 1),
}


def equals_one_process(name, strategies, batch_sizes, partition="auto", compiler="auto", strict=True):
    """strategy -> what df.stats says of it."""
    base, shape, dim = CASES[name]
    torch.manual_seed(0)
    full = [getattr(models, base)() for _ in range(2 if name == "Functional" else 1)]
    whole = nn.Sequential(*full).eval()
    net = nn.Sequential(*(getattr(models, name)(f) for f in full)).eval()
    told = {}
    for strategy in strategies:
        fast = df.compile(net, strategy=STRATEGIES[strategy], partition=partition, compiler=compiler, strict=strict)
        for batch_size in batch_sizes:
            rows = batch_size * (dist.get_world_size() if dim == 0 else 1)
            x = torch.randn(rows, *shape, models.WIDTH, generator=torch.Generator().manual_seed(batch_size))
            wanted = whole(x)
            if dim is not None:
                x, wanted = (t.chunk(dist.get_world_size(), dim)[dist.get_rank()].contiguous() for t in (x, wanted))
            torch.testing.assert_close(fast(x), wanted)
            assert torch.equal(fast(x), df.run_serialised(fast, x))
        told[strategy] = df.stats(fast)
    return told


# rows go to other ranks: the exchange sees the whole batch
WHOLE = ("TokenParallel", "SparseExpertParallel")


@pytest.mark.parametrize("name", [name for name in CASES if name not in WHOLE and (models.gathers_in_graphs or name != "SequenceParallel")])
def test_two_ranks(name):
    strategies = [s for s in STRATEGIES if s != "sequential" or name == "Functional"]  # which runs the graph as it is
    for told in run(equals_one_process, 2, name, strategies, [6, 9]):
        for strategy, stats in told.items():
            assert not stats.fallbacks and not stats.num_unsplittable, (strategy, stats)
            assert strategy == "sequential" or (stats.num_part_launches > 0 and stats.captures == 1), (strategy, stats)


@pytest.mark.parametrize("name", ["ExpertParallel", "UlyssesByChunks"])
def test_four_ranks(name):
    for told in run(equals_one_process, 4, name, ["nano"], [7]):
        stats = told["nano"]
        assert stats.num_part_launches > 0 and not stats.fallbacks and not stats.num_unsplittable, stats


def test_rules_name_collectives_as_models_call_them():
    rules = ["auto", df.SplitFunc(dist.all_reduce, kind="network")]
    for told in run(equals_one_process, 2, "InPlace", ["two"], [6, 9], rules):
        assert told["two"].num_part_launches > 0 and not told["two"].fallbacks


@pytest.mark.parametrize("name", WHOLE)
def test_what_cannot_be_split_runs_merged_between_parts(name):
    for told in run(equals_one_process, 2, name, ["two"], [6, 9, 4], "auto", "auto", False):
        assert told["two"].num_unsplittable > 0 and told["two"].num_part_launches > 0, told
        assert set(told["two"].fallbacks) <= {"no input of this graph carries the batch"}, told  # graphs that the counts break off


@pytest.mark.skipif(not models.gathers_in_graphs, reason="Dynamo of this torch does not capture such all-gathers")
def test_compiled_by_inductor():
    for told in run(equals_one_process, 2, "SequenceParallel", ["two"], [6], "auto", "inductor"):
        assert told["two"].num_part_launches > 0 and not told["two"].fallbacks and not told["two"].num_unsplittable
