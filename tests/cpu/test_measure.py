"""Measuring: once per kernel and shape, in its place, and without a trace."""

from types import SimpleNamespace

import pytest
import torch

from dynaflow import measure
from dynaflow.costs import Cost
from dynaflow.inductor.kernels import kernels
from dynaflow.measure import HostClock, compare, is_faster, measure_costs
from dynaflow.planned import finish_plan
from dynaflow.planner import sequential_plan
from dynaflow.runtime import threads
from dynaflow.runtime.binder import Binder
from dynaflow.runtime.program import Geometry

MIB = 2**20

TEXT = """
import torch

def call(args):
    arg0_1, arg1_1 = args
    args.clear()
    buf0 = empty_strided_cpu((4, 4), (4, 1), torch.float32)
    extern_kernels.mm(arg0_1, arg0_1, out=buf0)
    buf1 = empty_strided_cpu((4, 4), (4, 1), torch.float32)
    extern_kernels.mm(buf0, arg0_1, out=buf1)
    del buf0
    torch.ops.aten.add_.Tensor(buf1, arg1_1)
    torch.ops.aten.add_.Tensor(arg1_1, buf1)
    return (buf1, )
"""


class CountingClock(HostClock):
    def __init__(self):
        self.num_measured = 0
        self.has_workspace = []

    def cost(self, launch, has_workspace=False, is_alone=False):
        self.num_measured += 1
        self.has_workspace.append(has_workspace)
        super().cost(launch, has_workspace, is_alone)
        return Cost(float(self.num_measured))


def bound_kernels(x, y):
    class extern_kernels:
        mm = staticmethod(torch.mm)

    made = kernels(TEXT, {"torch": torch, "extern_kernels": extern_kernels}, [x, y], {}, "sample")
    return made, Binder(finish_plan(made.flow, sequential_plan(made.flow, "")), made.program).bind({})


def test_each_kernel_and_shape_once_and_nothing_shows():
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    made, bound = bound_kernels(x, y)
    mine, clock = y.clone(), CountingClock()
    costs = measure_costs(bound, {"arg0_1": x, "arg1_1": mine}, made.keys, clock)
    assert {name: cost.us for name, cost in costs.items()} == {"mm.0": 1, "mm.1": 1, "add_.Tensor.2": 2, "add_.Tensor.3": 2}
    assert clock.num_measured == 2
    # the call was run once, whatever was measured on the way
    torch.testing.assert_close(mine, y + (x @ x @ x + y))


def test_a_clock_is_told_which_kernels_have_a_workspace():
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    made, bound = bound_kernels(x, y)
    clock = CountingClock()
    measure_costs(bound, {"arg0_1": x, "arg1_1": y}, made.keys, clock)
    assert clock.has_workspace == [True, False] and made.program.products == {"mm.0", "mm.1"}


def test_a_host_clock_measures():
    assert HostClock().cost(lambda: sum(range(20000))).us > 50


@pytest.mark.parametrize("num_lanes, least", [(1, 0.5), (2, 0.5), (16, 1 / 16)])
@pytest.mark.parametrize("ratio, told", [(1.0, 0.0), (1.5, 0.5), (2.0, 1.0), (3.0, 1.0)])
def test_the_share_is_told_by_two_side_by_side(monkeypatch, num_lanes, least, ratio, told):
    """Two that take as long as one fill as little as a lane has; two that take twice as long, or longer, fill all."""
    now = [0.0]
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(measure, "num_lanes", lambda: num_lanes)

    def launch(factor=1.0):
        now[0] += 0.01 * factor

    monkeypatch.setattr(threads, "side_by_side", lambda row: launch(ratio))
    cost = HostClock().cost(launch)
    assert cost.us == pytest.approx(10_000) and cost.share == pytest.approx(least + told * (1 - least))


@pytest.mark.parametrize("us, calls", [(1.0, 3 + 3 * 64), (400.0, 3 + 3 * 2), (2_000.0, 3), (60_000.0, 1)])
def test_what_takes_long_is_launched_less_often(monkeypatch, us, calls):
    now, num_calls = [0.0], [0]
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def launch():
        now[0] += us * 1e-6
        num_calls[0] += 1

    assert HostClock().cost(launch, is_alone=True).us == pytest.approx(us) and num_calls == [calls]


COUNTS = """
import torch

def call(args):
    arg0_1, arg1_1 = args
    args.clear()
    torch.ops.aten.add_.Scalar(arg1_1, 1)
    buf0 = torch.ops.aten.sin.default(arg0_1)
    return (buf0, )
"""


@pytest.mark.parametrize("counter, num_beside", [(torch.zeros(2, dtype=torch.int64), 1), (torch.zeros(2), 2)], ids=["counter", "floats"])
def test_counters_are_not_moved_by_two_threads(monkeypatch, counter, num_beside):
    beside, real = [], threads.side_by_side
    monkeypatch.setattr(threads, "side_by_side", lambda row: beside.append(row) or real(row))
    x = torch.randn(4)
    made = kernels(COUNTS, {"torch": torch}, [x, counter], {"buf0": Geometry((4,), (1,), x.dtype, x.device)}, "counts")
    bound = Binder(finish_plan(made.flow, sequential_plan(made.flow, ""), None, made.allocated), made.program).bind({})
    measure_costs(bound, {"arg0_1": x, "arg1_1": counter}, made.keys, HostClock())
    assert len({id(row.__closure__) for row in beside}) == num_beside and counter.tolist() == [1, 1]


def test_ways_are_compared_in_turns():
    calls = []
    fast, slow = (lambda: calls.append("fast")), (lambda: [calls.append("slow"), sum(range(30000))])
    times = compare([slow, fast], HostClock())
    assert min(times[0]) > max(times[1]) and is_faster(times[1], times[0]) and not is_faster(times[0], times[1])
    switches = sum(a != b for a, b in zip(calls, calls[1:]))
    assert switches >= 10, "a machine that slows down meanwhile slows both"


def test_a_gain_must_be_no_chance():
    other = [100.0] * 7
    assert is_faster([90.0] * 6 + [120.0], other)
    assert not is_faster([90.0] * 5 + [120.0] * 2, other), "twice slower"
    assert not is_faster([99.0] * 7, other), "too little"


@pytest.mark.parametrize("small, large, num_large, segments_mib", [
    (0, 0, 0, 0), (512, 0, 0, 2), (3 * MIB, 0, 0, 4), (0, 2 * MIB, 1, 20), (512, 9 * MIB, 1, 22), (0, 10 * MIB, 1, 10),
    (0, 17 * MIB, 1, 18), (0, 18 * MIB, 3, 20), (0, 27 * MIB, 3, 40),
])  # fmt: skip
def test_what_the_allocator_takes_for_what_it_is_asked_for(small, large, num_large, segments_mib):
    assert measure.segment_bytes(small, large, num_large) == segments_mib * MIB
