"""The emulated network on a GPU: it takes its time, holds its SMs, moves its bytes, and is recorded."""

import statistics

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs CUDA", allow_module_level=True)

import dynaflow as df
from dynaflow.testing import network
from dynaflow.testing.hold import hold
from dynaflow.testing.network import LINKS, OPS, duration_us

DEVICE = torch.device("cuda")
NUM_SMS = torch.cuda.get_device_properties(0).multi_processor_count


def graph_of(fn):
    """`fn` in a CUDA Graph, and its results."""
    fn()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = fn()
    return graph, result


def replayed_us(graph, count=20):
    """The median time of a replay on the device."""
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    torch.cuda.synchronize()
    for start, end in pairs:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs) * 1e3


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(8, 640), (64, 1001), (4096, 512)], ids=str)
def test_results_are_those_of_the_cpu(name, dtype, shape):
    x = torch.randn(shape, dtype=dtype)
    for dims in ((), (0,), (1,)) if name in ("all_gather", "reduce_scatter") and shape[1] % 8 == 0 else ((),):
        numbers = (1.0, 0.0, 8, 4, *dims)
        assert torch.equal(OPS[name](x.to(DEVICE), *numbers).cpu(), OPS[name](x, *numbers))


@pytest.mark.parametrize("link", LINKS.values(), ids=lambda link: link.name)
@pytest.mark.parametrize("megabytes", [1, 32])
def test_the_time_held_is_right(link, megabytes):
    x = torch.randn(megabytes * 2**19 // 4096, 4096, device=DEVICE, dtype=torch.bfloat16)
    wanted_us = duration_us(x, link.latency_us, link.gbps, 8)
    # ten in a row, so that the graph's own start does not count
    graph, _ = graph_of(lambda: [network.all_reduce(x, link.latency_us, link.gbps, 8, link.sms) for _ in range(10)])
    measured_us = replayed_us(graph) / 10
    print(f"{link.name}, {megabytes} MiB: {measured_us:.1f} us, wanted {wanted_us:.1f} (emulated)")
    # 2 us: the launch of the next kernel, and the clock's own steps
    assert measured_us == pytest.approx(wanted_us, rel=0.1, abs=2)


@pytest.mark.parametrize("sms", [1, 2, 8, 16, 24, 32])
def test_as_many_sms_are_held(sms):
    """Each CTA is on an SM of its own."""
    x = torch.randn(1 << 16, device=DEVICE)
    where = torch.full((sms,), -1, dtype=torch.int32, device=DEVICE)
    hold(x, x.shape, 0, 100.0, sms, where=where)
    held = set(where.tolist())
    assert len(held) == sms and min(held) >= 0 and max(held) < NUM_SMS


def test_the_held_sms_are_missing_to_a_matrix_product():
    """A product that fills the device takes longer beside a collective that holds half of it; beside one that holds an SM, hardly."""
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    x, side = torch.randn(1024, device=DEVICE), torch.cuda.Stream(priority=-1)
    alone_us = replayed_us(graph_of(lambda: a @ b)[0])

    def beside(sms):
        def both():
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                y = network.all_reduce(x, 0.9 * alone_us, 0.0, 2, sms)
            z = a @ b
            torch.cuda.current_stream().wait_stream(side)
            return y, z

        return replayed_us(graph_of(both)[0]) / alone_us

    few, many = beside(1), beside(NUM_SMS // 2)
    print(f"a product beside a collective (emulated) on 1 SM: {few:.2f}x its time, on {NUM_SMS // 2}: {many:.2f}x")
    assert few < 1.2 < many


def test_recorded_and_replayed():
    x = torch.zeros(1024, 64, device=DEVICE)
    graph, y = graph_of(lambda: network.all_reduce(x, 20.0, 0.0, 8, 4))
    for value in (1.0, 2.0, 3.0):
        x.fill_(value)
        graph.replay()
        assert torch.equal(x, y)


def test_a_plan_with_collectives_is_one_graph():
    net = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(3))).to(DEVICE)
    network.add_collectives(net, "*", link="NVLink-H100", ranks=8)
    rules = ["auto", df.SplitFunc(network.all_reduce, kind="network")]
    fast = df.compile(net, strategy=df.TwoBatch(), partition=rules, strict=True, runtime="graph")
    for _ in range(5):
        x = torch.randn(512, 1024, device=DEVICE)
        assert torch.equal(fast(x), df.run_serialised(fast, x))
    torch.testing.assert_close(fast(x), net(x), rtol=1e-3, atol=1e-3)
