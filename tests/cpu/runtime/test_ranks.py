"""Real processes over gloo: the same results as one process, and a rank that would differ is refused on all of them."""

import os
import socket
import traceback

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import dynaflow as df


class RowParallel(nn.Module):
    """A linear layer whose inputs are divided over the ranks, as tensor parallelism does it."""

    def __init__(self, full):
        super().__init__()
        rank, world = dist.get_rank(), dist.get_world_size()
        self.weight = nn.Parameter(full.weight.chunk(world, 1)[rank].clone())

    def forward(self, x):
        rank, world = dist.get_rank(), dist.get_world_size()
        y = x.chunk(world, -1)[rank] @ self.weight.t()
        dist.all_reduce(y)
        return y


class Backwards(df.Strategy):
    """Collectives of the last part first: legal on its own, fatal beside TwoBatch."""

    def schedule(self, flow):
        flow.split(2)
        while ready := flow.get_ready_ops():
            flow.execute(max(ready, key=lambda r: (r.part, -r.depth)))


def models(num_layers=3):
    torch.manual_seed(0)
    return [nn.Linear(8, 8, bias=False) for _ in range(num_layers)]


def equal_results(rank):
    full = models()
    net = nn.Sequential(*(layer for f in full for layer in (RowParallel(f), nn.GELU())))
    fast = df.compile(net, strategy=df.TwoBatch(), partition=["auto", df.SplitFunc(dist.all_reduce, kind="network")], strict=True)
    for batch_size in (6, 9, 4):
        x = torch.randn(batch_size, 8, generator=torch.Generator().manual_seed(batch_size))
        wanted = nn.Sequential(*(layer for f in full for layer in (f, nn.GELU())))(x)
        torch.testing.assert_close(fast(x), wanted)
    assert df.stats(fast).num_part_launches > 0 and not df.stats(fast).fallbacks


def different_orders(rank):
    net = nn.Sequential(*(RowParallel(f) for f in models()))
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    wanted = net(x)
    fast = df.compile(net, strategy=Backwards() if rank else df.TwoBatch())
    torch.testing.assert_close(fast(x), wanted)
    (reason,) = df.stats(fast).fallbacks
    assert "on rank 0" in reason and "on rank 1" in reason, reason
    strict = df.compile(net, strategy=Backwards() if rank else df.TwoBatch(), strict=True)
    with pytest.raises(df.DynaFlowError, match="on rank 1"):
        strict(x)


def one_rank_gives_up(rank):
    net = nn.Sequential(*(RowParallel(f) for f in models()))
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    wanted = net(x)
    fast = df.compile(net, strategy=df.Sequential() if rank else df.TwoBatch())
    torch.testing.assert_close(fast(x), wanted)


def worker(rank, world, port, body, results):
    try:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
        torch.set_num_threads(1)
        dist.init_process_group("gloo", rank=rank, world_size=world)
        with torch.no_grad():
            body(rank)
        dist.destroy_process_group()
        results.put((rank, "ok"))
    except BaseException:
        results.put((rank, traceback.format_exc()))


@pytest.mark.parametrize("body", [equal_results, different_orders, one_rank_gives_up], ids=lambda f: f.__name__)
def test_two_ranks(body):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    results = context.Queue()
    workers = [context.Process(target=worker, args=(r, 2, port, body, results)) for r in range(2)]
    for w in workers:
        w.start()
    outcomes = dict(results.get(timeout=150) for _ in workers)
    for w in workers:
        w.join(30)
    assert outcomes == {0: "ok", 1: "ok"}, "\n".join(outcomes.values())
