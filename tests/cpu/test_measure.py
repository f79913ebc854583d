"""Measuring: once per kernel and shape, in its place, and without a trace."""

import torch

from dynaflow.costs import Cost
from dynaflow.inductor.kernels import kernels
from dynaflow.measure import HostClock, compare, is_faster, measure_costs
from dynaflow.planned import finish_plan
from dynaflow.planner import sequential_plan
from dynaflow.runtime.binder import Binder

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
        super().__init__(0.5)
        self.num_measured = 0
        self.has_workspace = []

    def cost(self, launch, has_workspace=False):
        self.num_measured += 1
        self.has_workspace.append(has_workspace)
        super().cost(launch)
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
    cost = HostClock(0.25).cost(lambda: sum(range(20000)))
    assert cost.us > 50 and cost.share == 0.25


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
