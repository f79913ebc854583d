"""The emulated network: right numbers, right time, and traceable and splittable like a real collective."""

import threading
import time

import pytest
import torch
from torch import nn

import dynaflow as df
from dynaflow.errors import OptionError, PartitionError, UnsplittableOp
from dynaflow.testing import network
from dynaflow.testing.network import LINKS, OPS, Collective, Link, add_collectives, all_gather, all_reduce, duration_us, reduce_scatter


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Pair(nn.Module):
    def forward(self, x):
        return x, "weights"


def test_numbers_do_not_change_and_memory_is_new():
    x = torch.randn(4, 8)
    y = all_reduce(x, 1.0, 0.0)
    assert torch.equal(x, y) and y.data_ptr() != x.data_ptr()


def test_duration():
    x = torch.empty(1000, dtype=torch.float32)
    assert duration_us(x, 50, 0) == 50
    # 4,000 bytes at 8 Gbit/s are 4 us
    assert duration_us(x, 50, 8) == pytest.approx(54)


def test_the_caller_is_held():
    start = time.perf_counter()
    all_reduce(torch.empty(1), 20_000.0, 0.0)
    assert time.perf_counter() - start >= 0.02


def test_other_threads_run_meanwhile():
    """Two collectives of 150 ms on two threads take far less than 300 ms."""
    threads = [threading.Thread(target=all_reduce, args=(torch.empty(1), 150_000.0, 0.0)) for _ in range(2)]
    start = time.perf_counter()
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert time.perf_counter() - start < 0.28


NUMBERS = (1.0, 0.0, 2, 4)


@pytest.mark.parametrize("name", OPS)
def test_opcheck(name):
    x = torch.randn(6, 4)
    for given in (x, x.clone().requires_grad_(), x.t().contiguous().t()):
        torch.library.opcheck(OPS[name], (given, *NUMBERS))


def test_gradients_pass():
    x = torch.randn(3, requires_grad=True)
    all_reduce(x, 1.0, 0.0).sum().backward()
    assert torch.equal(x.grad, torch.ones(3))


@pytest.mark.parametrize("dynamic", [None, True])
def test_add_collectives_is_seen_by_dynamo(dynamic):
    torch._dynamo.reset()
    model = nn.Sequential(Block(), Block())
    x = torch.randn(4, 8)
    expected = model(x)
    add_collectives(model, "*.down", latency_us=1)
    graphs = []

    def backend(gm, inputs):
        graphs.append(gm)
        return gm.forward

    assert torch.equal(torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)(x), expected)
    found = [node for gm in graphs for node in gm.graph.nodes if "all_reduce" in str(node.target)]
    assert [node.args[1:] for node in found] == [(1.0, 0.0, 2, 1)] * 2, "latency, bandwidth, ranks and SMs are constants of the graph"


def test_attributes_and_state_stay():
    model = Block()
    keys = list(model.state_dict())
    handles = add_collectives(model, ["up", "down"], latency_us=1)
    assert list(model.state_dict()) == keys and model.down.in_features == 16 and len(handles) == 2


def test_tuples_are_reduced_in_their_first_item():
    model = nn.Sequential(Pair())
    add_collectives(model, "0", latency_us=1)
    x = torch.randn(2)
    y, rest = model(x)
    assert torch.equal(x, y) and y.data_ptr() != x.data_ptr() and rest == "weights"


def test_handles_remove_it():
    model = nn.Sequential(Block())
    for handle in add_collectives(model, "*.down", latency_us=300_000):
        handle.remove()
    start = time.perf_counter()
    model(torch.randn(1, 8))
    assert time.perf_counter() - start < 0.3


def test_rejects_a_name_that_matches_nothing():
    with pytest.raises(PartitionError, match="matches 'layers.*'"):
        add_collectives(Block(), "layers.*")


# -- links and bytes


@pytest.mark.parametrize("name, share", [("all_reduce", 2 * 7 / 8), ("reduce_scatter", 7 / 8), ("all_gather", 7), ("all_to_all", 7 / 8)])
def test_bytes_on_the_wire(name, share):
    assert network.wire_bytes(name, 1000, 8) == pytest.approx(1000 * share)
    assert network.wire_bytes(name, 1000, 1) == 0


def test_bytes_are_those_of_an_all_reduce_in_two_steps():
    """A ring's all-reduce is a reduce-scatter and an all-gather of what is left."""
    steps = network.wire_bytes("reduce_scatter", 800, 8) + network.wire_bytes("all_gather", 100, 8)
    assert network.wire_bytes("all_reduce", 800, 8) == pytest.approx(steps)


def test_links_are_stated_and_in_order():
    assert set(LINKS) == {"NVLink-H100", "NVLink-B200", "PCIe5", "400G-IB"}
    for link in LINKS.values():
        assert link.latency_us > 0 and 1 <= link.sms <= 32
    assert LINKS["PCIe5"].gbps < LINKS["400G-IB"].gbps < LINKS["NVLink-H100"].gbps < LINKS["NVLink-B200"].gbps
    # no faster than the wire: 450, 900, 64 and 50 GB/s
    limits = {"NVLink-H100": 450, "NVLink-B200": 900, "PCIe5": 64, "400G-IB": 50}
    assert all(LINKS[name].gbps / 8 < limit for name, limit in limits.items())


def test_duration_over_a_link():
    link = Link("own", latency_us=5, gbps=80, sms=2)
    # 8 MB, of which 7/8 twice: 14 MB at 10 GB/s are 1,400 us
    assert link.duration_us("all_reduce", 8e6, 8) == pytest.approx(1405)
    assert link.with_sms(7) == Link("own", 5, 80, 7)


@pytest.mark.parametrize("name", OPS)
def test_an_op_takes_its_time(name):
    x = torch.zeros(4000, 250)  # 4 MB
    began = time.perf_counter()
    OPS[name](x, 1000.0, 8.0, 4)
    assert time.perf_counter() - began >= duration_us(x, 1000.0, 8.0, 4, name) * 1e-6


def test_rejects_an_unknown_link_and_no_ranks():
    with pytest.raises(OptionError, match="unknown link 'NVLink-H900'"):
        add_collectives(Block(), "up", link="NVLink-H900")
    with pytest.raises(OptionError, match="link= states latency"):
        add_collectives(Block(), "up", link="PCIe5", gbps=10)
    with pytest.raises(OptionError, match="ranks=0"):
        network.wire_bytes("all_reduce", 1, 0)


def test_add_collectives_over_a_link():
    model = Block()
    add_collectives(model, "down", link="NVLink-H100", ranks=8)
    assert (model.down.emulated_latency_ns, model.down.emulated_ranks, model.down.emulated_sms) == (10_000, 8, 16)
    model(torch.randn(2, 8))


# -- results


@pytest.mark.parametrize("dim", [0, 1])
def test_shapes_and_values_along_a_dim(dim):
    x = torch.randn(4, 8, 3)
    gathered = all_gather(x, *NUMBERS[:2], 4, 1, dim)
    assert torch.equal(gathered, torch.cat([x] * 4, dim))
    scattered = reduce_scatter(x, *NUMBERS[:2], 4, 1, dim)
    torch.testing.assert_close(scattered, x.unflatten(dim, (4, -1)).sum(dim))
    torch.testing.assert_close(reduce_scatter(gathered, *NUMBERS[:2], 4, 1, dim), 4 * x)


def test_rejects_rows_that_cannot_be_divided():
    with pytest.raises(RuntimeError, match="7 rows cannot be divided among 2 ranks"):
        reduce_scatter(torch.randn(7, 2), *NUMBERS)


@pytest.mark.parametrize("name", OPS)
def test_gradients(name):
    x = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda x: OPS[name](x, 0.0, 0.0, 2), (x,))


# -- splitting


class Parallel(nn.Module):
    """Sequence parallel: rows are whole, the sequence is scattered and gathered."""

    def __init__(self, dim=1):
        super().__init__()
        link = Link("own", 1.0, 0.0)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.gather, self.scatter = Collective("all_gather", link, 2, dim), Collective("reduce_scatter", link, 2, dim)
        self.exchange = Collective("all_to_all", link, 2)

    def forward(self, x):
        return self.exchange(self.scatter(self.down(torch.relu(self.up(self.gather(x))))))


NETWORK = [df.SplitFunc(op, kind="network") for op in (all_gather, reduce_scatter, network.all_to_all)]


@pytest.mark.parametrize("runtime", ["threads", "graph", "fake:7"])
@pytest.mark.parametrize("strategy", [df.TwoBatch(), df.NanoBatch(3)], ids=str)
def test_collectives_are_split_by_rows(strategy, runtime):
    with torch.no_grad():
        model, x = Parallel(), torch.randn(6, 4, 8)
        fast = df.compile(model, strategy=strategy, partition=NETWORK, runtime=runtime, strict=True)
        for _ in range(3):  # with runtime="graph", the last ones are replays
            torch.testing.assert_close(fast(x), model(x))
            assert torch.equal(fast(x), df.run_serialised(fast, x))
    assert df.stats(fast).num_part_launches and not df.stats(fast).fallbacks


def test_claims_of_the_split_rules_hold():
    df.check(Parallel(), (torch.randn(6, 4, 8),), strategy=df.TwoBatch(), partition=NETWORK)


class ByName(df.Strategy):
    def schedule(self, flow):
        flow.split(2, ops="gather*")
        while ready := flow.get_ready_ops():
            flow.execute(ready[0])


def test_rejects_a_split_along_the_dim_that_is_exchanged():
    with pytest.raises(UnsplittableOp, match="exchanges rows between ranks"):
        df.explain(Parallel(dim=0), (torch.randn(4, 4, 8),), strategy=ByName(), partition=NETWORK)


def test_a_split_beside_the_dim_that_is_exchanged():
    explained = df.explain(Parallel(dim=1), (torch.randn(4, 4, 8),), strategy=ByName(), partition=NETWORK)
    assert not any(op.unsplittable for op in explained.flow.ops)


def test_inductor_compiles_around_a_collective():
    with torch.no_grad():
        model, x = Parallel(), torch.randn(4, 4, 8)
        fast = df.compile(model, strategy=df.TwoBatch(), partition=NETWORK, compiler="inductor", strict=True)
        torch.testing.assert_close(fast(x), model(x))
        assert torch.equal(fast(x), df.run_serialised(fast, x))
