"""The emulated network: right numbers, right time, and traceable like a real collective."""

import threading
import time

import pytest
import torch
from torch import nn

from dynaflow.errors import PartitionError
from dynaflow.testing.network import add_collectives, all_reduce, duration_us


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


def test_opcheck():
    torch.library.opcheck(all_reduce, (torch.randn(3, 4), 1.0, 0.0))


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
    assert [node.args[1:] for node in found] == [(1.0, 0.0)] * 2, "latency and bandwidth are constants of the graph"


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
