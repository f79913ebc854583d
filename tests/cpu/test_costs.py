"""Costs of ops, of launches, and what no plan is faster than."""

import pytest

from dynaflow.costs import Cost, bound_us, check_costs, critical_path_us, heights_us, launch_cost, total_work_us
from dynaflow.errors import OptionError
from dynaflow.ir import WHOLE, Flow, Launch, Part
from tests.cpu.kernels import kernels

TABLE = {"a": (2.0, 0.5, []), "b": (10.0, 0.2, ["a"]), "c": (4.0, 1.0, ["a"]), "d": (1.0, 1.0, ["b", "c"])}


def test_bounds_by_hand():
    flow, costs = kernels(TABLE)
    assert heights_us(flow, costs) == [13.0, 11.0, 5.0, 1.0]
    assert critical_path_us(flow, costs) == 13.0
    assert total_work_us(flow, costs) == pytest.approx(1.0 + 2.0 + 4.0 + 1.0)
    assert bound_us(flow, costs) == 13.0


def test_work_bounds_where_the_device_is_full():
    flow, costs = kernels({name: (5.0, 0.8, []) for name in "abcd"})
    assert critical_path_us(flow, costs) == 5.0 and bound_us(flow, costs) == pytest.approx(16.0)


def test_a_flow_without_ops_takes_no_time():
    assert bound_us(Flow("empty", (), (), ()), {}) == 0.0


def test_a_launch_of_several_ops_is_their_sum():
    _, costs = kernels(TABLE)
    fused = launch_cost(Launch((("b", WHOLE), ("c", WHOLE)), "caller"), costs)
    assert fused.us == 14.0 and fused.work_us == pytest.approx(6.0)


def test_a_part_counts_by_its_rows_and_parts_add_up():
    cost, parts = Cost(10.0, 0.5), (Part(0, 3, 8), Part(3, 8, 8))
    assert [cost.of(p) for p in parts] == [Cost(3.75, 0.5), Cost(6.25, 0.5)] and cost.of(WHOLE) is cost


def test_ops_that_take_no_time_make_a_launch_that_takes_none():
    assert launch_cost(Launch((("a", WHOLE), ("b", WHOLE)), "s"), {"a": Cost(0.0), "b": Cost(0.0)}) == Cost(0.0, 0.0)


NAN, INFINITE = float("nan"), float("inf")


@pytest.mark.parametrize(("us", "share"), [(-1.0, 0.5), (NAN, 0.5), (INFINITE, 0.5), (1.0, 1.1), (1.0, -0.1), (1.0, NAN)])
def test_rejects_what_is_no_cost(us, share):
    with pytest.raises(OptionError, match="is no cost"):
        Cost(us, share)


def test_rejects_costs_that_leave_ops_out():
    flow, costs = kernels(TABLE)
    check_costs(flow, costs)
    check_costs(flow, {**costs, "of another flow": Cost(1.0)})
    with pytest.raises(OptionError, match="2 of 4 ops of kernels have no cost: a, c"):
        check_costs(flow, {name: costs[name] for name in "bd"})
