"""The simulator: examples by hand, and what holds for every plan."""

import random
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.kernel_nets import NETS
from dynaflow.costs import Cost, bound_us, total_work_us
from dynaflow.errors import OptionError
from dynaflow.ir import Launch, Plan, Record, Stream, Wait
from dynaflow.planner import plan
from dynaflow.simulate import Device, Machine, simulate
from dynaflow.strategies import Branches, Greedy, Sequential, TwoBatch
from dynaflow.strategy import Strategy
from dynaflow.sync import synchronise
from tests.cpu.flows import chain
from tests.cpu.kernels import kernel_flows, kernels

DEVICE = Device(edge_us=1.0, cross_us=2.0)


class On(Strategy):
    """Every op on the stream that a table names, in program order; with the streams' priorities."""

    def __init__(self, table, **priorities):
        self.table, self.priorities = table, priorities

    def schedule(self, flow):
        for name, priority in self.priorities.items():
            flow.stream(name, priority=priority)
        for op in flow.ops:
            flow.execute(flow.find(op.name), stream=self.table[op.name])


def planned(flow, strategy, costs=None):
    return synchronise(flow, plan(flow, strategy, costs=costs))


def spans(timeline):
    return {s.label: (pytest.approx(s.start_us), pytest.approx(s.end_us)) for s in timeline.spans}


# -- by hand


def test_two_that_do_not_fit_slow_each_other_down():
    """a alone; b and c (0.8 each) share the device at 1/1.6 of their speed while both run; d after both."""
    flow, costs = kernels({"a": (2.0, 0.5, []), "b": (10.0, 0.8, ["a"]), "c": (5.0, 0.8, ["a"]), "d": (1.0, 1.0, ["b", "c"])})
    timeline = simulate(flow, planned(flow, On({"a": "caller", "b": "caller", "c": "s", "d": "caller"})), costs, DEVICE)
    # b from 3 (edge), c from 4 (cross): b has done 1; c takes 5 * 1.6 = 8, until 12; b has 9 - 5 = 4 left, until 16; d at 16 + 1
    assert spans(timeline) == {"a": (0, 2), "b": (3, 16), "c": (4, 12), "d": (17, 18)}
    assert timeline.total_us == pytest.approx(18) and timeline.overlap_us() == pytest.approx(8)
    assert timeline.spans[0].kind == "compute" and timeline.streams == ("caller", "s")


def test_two_that_fit_run_at_full_speed():
    flow, costs = kernels({"a": (4.0, 0.5, []), "b": (4.0, 0.5, [])})
    assert spans(simulate(flow, planned(flow, On({"a": "s", "b": "t"})), costs, DEVICE)) == {"a": (0, 4), "b": (0, 4)}


def test_a_higher_priority_takes_its_share_first():
    flow, costs = kernels({"a": (4.0, 1.0, []), "b": (4.0, 0.5, [])})
    timeline = simulate(flow, planned(flow, On({"a": "s", "b": "t"}, t=-1)), costs, DEVICE)
    assert spans(timeline) == {"a": (0, 6), "b": (0, 4)}
    timeline = simulate(flow, planned(flow, On({"a": "s", "b": "t"}, s=-1)), costs, DEVICE)
    assert spans(timeline) == {"a": (0, 4), "b": (0, 8)}, "b waits until a is over"


def test_a_wait_that_is_left_out_is_not_waited_for():
    flow, costs = kernels({"a": (5.0, 0.1, []), "b": (1.0, 0.1, ["a"])})
    good = planned(flow, On({"a": "s", "b": "t"}))
    bad = replace(good, steps=tuple(s for s in good.steps if not (type(s) is Wait and s.stream == "t")))
    assert spans(simulate(flow, good, costs, DEVICE))["b"] == (7, 8)
    assert spans(simulate(flow, bad, costs, DEVICE))["b"] == (0, 1)


def test_an_event_passes_on_what_its_stream_waited_for():
    """t launches nothing between its wait and its record: u comes after a all the same."""
    flow, costs = kernels({"a": (5.0, 0.1, []), "b": (1.0, 0.1, ["a"])})
    a, b = planned(flow, On({"a": "s", "b": "u"})).launches
    steps = (a, Record("e0", "s"), Wait("e0", "t"), Record("e1", "t"), Wait("e1", "u"), b)
    timeline = simulate(flow, Plan(flow.label, (Stream("s"), Stream("t"), Stream("u")), steps), costs, DEVICE)
    assert spans(timeline)["b"] == (7, 8)


def test_parts_cost_by_their_rows():
    flow = chain(1)
    costs = {"L0.a": Cost(4.0, 0.4), "L0.ar": Cost(2.0, 0.1)}
    timeline = simulate(flow, planned(flow, TwoBatch()), costs, Device(0.0, 0.0))
    assert spans(timeline) == {"L0.a 0/2": (0, 2), "L0.ar 0/2": (2, 3), "L0.a 1/2": (2, 4), "L0.ar 1/2": (4, 5)}


def test_a_plan_without_launches():
    flow, costs = kernels({"a": (1.0, 1.0, [])})
    assert simulate(flow, Plan(flow.label, (), ()), costs).total_us == 0.0


def test_rejects_an_op_without_a_cost():
    flow, costs = kernels({"a": (1.0, 1.0, []), "b": (1.0, 1.0, [])})
    for wrong in ({"a": costs["a"]}, {**costs, "b": 3.0}):
        with pytest.raises(OptionError, match="1 of 2 ops of .* have no cost: b"):
            simulate(flow, planned(flow, Sequential()), wrong)
    assert simulate(flow, planned(flow, Sequential()), costs).total_us >= 2


# -- for every plan


class Scattered(Strategy):
    """Ready ops in some order on some streams, some of them with a priority."""

    def __init__(self, seed, num_streams):
        self.seed, self.num_streams = seed, num_streams

    def schedule(self, flow):
        rng = random.Random(self.seed)
        lanes = ["caller", *(flow.stream(f"s{i}", priority=-rng.randint(0, 1)) for i in range(self.num_streams - 1))]
        while ready := flow.get_ready_ops():
            flow.execute(rng.choice(ready), stream=rng.choice(lanes))


def played(case, seed, num_streams):
    flow, costs = case
    p = planned(flow, Scattered(seed, num_streams))
    return flow, costs, p, simulate(flow, p, costs, DEVICE)


plans = given(kernel_flows(), st.integers(0, 99), st.integers(1, 5))


@plans
def test_nothing_starts_before_its_dependencies_end(case, seed, num_streams):
    flow, costs, p, timeline = played(case, seed, num_streams)
    at = {launch.calls[0][0]: span for launch, span in zip(p.launches, timeline.spans)}
    for before, after, _ in flow.edges:
        a, b = at[flow.ops[before].name], at[flow.ops[after].name]
        assert b.start_us >= a.end_us + (DEVICE.edge_us if a.stream == b.stream else DEVICE.cross_us) - 1e-6


@plans
def test_streams_are_in_order(case, seed, num_streams):
    _, _, p, timeline = played(case, seed, num_streams)
    for stream in timeline.streams:
        mine = [s for s in timeline.spans if s.stream == stream]
        for left, right in zip(mine, mine[1:]):
            assert right.start_us >= left.end_us + DEVICE.edge_us - 1e-6


@plans
def test_no_plan_beats_the_bound_and_no_launch_its_cost(case, seed, num_streams):
    flow, costs, p, timeline = played(case, seed, num_streams)
    assert timeline.total_us >= bound_us(flow, costs) - 1e-6
    for launch, span in zip(p.launches, timeline.spans):
        assert span.end_us - span.start_us >= costs[launch.calls[0][0]].us - 1e-6


@plans
def test_one_stream_is_the_sum(case, seed, num_streams):
    flow, costs = case
    timeline = simulate(flow, planned(flow, Scattered(seed, 1)), costs, DEVICE)
    assert timeline.total_us == pytest.approx(sum(c.us for c in costs.values()) + DEVICE.edge_us * (len(flow.ops) - 1))


@plans
def test_the_work_done_is_the_work_given(case, seed, num_streams):
    """Between two instants at which something starts or ends, the device does min(1, sum of shares) of work."""
    flow, costs, p, timeline = played(case, seed, num_streams)
    share = [costs[launch.calls[0][0]].share for launch in p.launches]
    marks = sorted({t for s in timeline.spans for t in (s.start_us, s.end_us)})
    done = 0.0
    for left, right in zip(marks, marks[1:]):
        middle = (left + right) / 2
        done += (right - left) * min(1.0, sum(w for w, s in zip(share, timeline.spans) if s.start_us <= middle < s.end_us))
    assert done == pytest.approx(total_work_us(flow, costs))


@plans
def test_more_latency_is_never_faster_on_a_device_with_room(case, seed, num_streams):
    """Where nothing slows anything down, times are longest paths: they grow with every edge. (With sharing, they may not.)"""
    flow, costs = case
    free = {name: Cost(c.us, 0.0) for name, c in costs.items()}
    p = planned(flow, Scattered(seed, num_streams))
    times = [simulate(flow, p, free, Device(edge, edge + 1)).total_us for edge in (0.0, 1.0, 3.0)]
    assert times == sorted(times)
    without = replace(p, steps=tuple(s for s in p.steps if type(s) is Launch))
    assert simulate(flow, without, free, DEVICE).total_us <= simulate(flow, p, free, DEVICE).total_us + 1e-6


@settings(max_examples=30)
@given(st.lists(st.tuples(st.floats(0.0, 50.0), st.floats(0.1, 20.0), st.floats(0.0, 1.0)), min_size=1, max_size=12))
def test_the_machine_against_small_steps(launches):
    """The same, by brute force: time in steps of 1/100 us, and every launch moved on by its rate."""
    machine = Machine()
    for i, (start, us, share) in enumerate(launches):
        machine.start(i, start, Cost(us, share))
    ends = {}
    while (i := machine.finish()) is not None:
        ends[i] = machine.now_us
    left, at, by_steps, step = [us for _, us, _ in launches], 0.0, {}, 0.01
    while len(by_steps) < len(launches):
        running = [i for i, (start, _, _) in enumerate(launches) if start <= at and i not in by_steps]
        rate = 1 / max(1.0, sum(launches[i][2] for i in running))
        at += step
        for i in running:
            left[i] -= rate * step
            if left[i] <= 1e-9:
                by_steps[i] = at
    assert ends == {i: pytest.approx(by_steps[i], abs=step * (2 + 2 * len(launches))) for i in by_steps}


def test_two_thousand_launches_take_less_than_100_ms():
    hrnet = NETS[0]
    flow, costs = hrnet()
    p = planned(flow, Greedy(8))
    copies = 2000 // len(flow.ops) + 1
    times = []
    for _ in range(3):
        began = time.process_time()
        for _ in range(copies):
            simulate(flow, p, costs)
        times.append(time.process_time() - began)
    assert min(times) < 0.1


def test_branches_foresees_its_own_time():
    """The strategy plays the plan on the same machine: what it held to be the end is the end, where it holds nothing back."""
    flow, costs = kernels({"a": (2.0, 0.2, []), "b": (9.0, 0.2, ["a"]), "c": (6.0, 0.2, ["a"]), "d": (1.0, 0.2, ["b", "c"])})
    timeline = simulate(flow, planned(flow, Branches(2), costs), costs)
    assert timeline.total_us == pytest.approx(2 + 1.2 + 9 + 1.2 + 1)
