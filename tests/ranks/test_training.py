"""Training over ranks: gradients of the mean over all ranks' rows, whichever of torch's wrappers is outside."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dynaflow as df
from tests.ranks.harness import run

pytestmark = pytest.mark.xdist_group("ranks")


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.LayerNorm(16), nn.Linear(16, 4))


def steps(is_outside):
    """Three of them, against one process with all rows."""
    whole, mine = net(), net()
    model = DistributedDataParallel(df.compile(mine, strategy=df.TwoBatch())) if is_outside else torch.compile(
        DistributedDataParallel(mine), backend="dynaflow")  # fmt: skip
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (whole, mine)]
    rows = [torch.randn(8, 16, generator=torch.Generator().manual_seed(rank)) for rank in range(dist.get_world_size())]
    with torch.enable_grad():
        for step in range(3):
            whole(torch.cat(rows) + step).square().mean().backward()
            model(rows[dist.get_rank()] + step).square().mean().backward()
            for wanted, got in zip(whole.parameters(), mine.parameters()):
                torch.testing.assert_close(got.grad, wanted.grad)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return dict(df.stats(model.module).fallbacks) if is_outside else {}


def test_ddp_around_a_compiled_model():
    for fallbacks in run(steps, 2, True):
        assert fallbacks == {"gradients are needed: the sequential graph runs under autograd": 3}


def test_compiled_ddp():
    assert run(steps, 2, False) == [{}, {}]
