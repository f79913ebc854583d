"""Branches (and Greedy): where ops go, and that plans for nets are good."""

import random
import time

import pytest
from hypothesis import given

from benchmarks.kernel_nets import NETS, Net
from dynaflow.costs import Cost, bound_us
from dynaflow.memory import place
from dynaflow.planner import plan
from dynaflow.simulate import Device, simulate
from dynaflow.strategies import Branches, Greedy, Sequential
from dynaflow.strategies.confined import Confined
from dynaflow.sync import synchronise
from dynaflow.verify import verify
from tests.cpu.flows import chain, diamond, stateful
from tests.cpu.kernels import kernel_flows, kernels


def streams(flow, strategy, costs=None):
    return {launch.calls[0][0]: launch.stream for launch in plan(flow, strategy, costs=costs).launches}


def us(flow, costs, strategy, device=None):
    return simulate(flow, synchronise(flow, plan(flow, strategy, costs=costs)), costs, device).total_us


FORK = {"a": (2.0, 0.1, []), "c": (4.0, 0.1, ["a"]), "b": (9.0, 0.1, ["a"]), "d": (1.0, 0.1, ["b", "c"])}


def test_the_critical_path_follows_on_the_callers_stream():
    assert streams(*kernels(FORK)[:1], Branches(2), kernels(FORK)[1]) == {"a": "caller", "b": "caller", "c": "aux0", "d": "caller"}


def test_the_longest_way_to_go_comes_first():
    """Two lanes for three chains: the long one has a lane to itself, though it comes last in program order."""
    table = {f"s{i}": (5.0, 0.1, []) for i in range(4)} | {"l0": (7.0, 0.1, []), "l1": (7.0, 0.1, ["l0"]), "l2": (7.0, 0.1, ["l1"])}
    flow, costs = kernels(table)
    where = streams(flow, Branches(2), costs)
    assert {where[f"l{i}"] for i in range(3)} == {"caller"} and {where[f"s{i}"] for i in range(4)} == {"aux0"}
    # program order on the caller's stream and the other in turn, as Greedy has it, is slower
    assert us(flow, costs, Branches(2)) < us(flow, costs, Greedy(2))


def test_critical_work_does_not_queue_behind_a_long_kernel():
    table = {"root": (2.0, 0.1, []), "long": (50.0, 0.1, ["root"]), "p": (3.0, 0.1, ["root"]), "q": (60.0, 0.1, ["p"])}
    flow, costs = kernels(table)
    where = streams(flow, Branches(2), costs)
    assert where["p"] == where["q"] != where["long"]


def test_ops_with_time_to_spare_wait_while_the_device_is_full():
    """`fill` does not fit beside b, and its path is short: beside e there is room for it."""
    table = {"a": (2.0, 1.0, []), "b": (20.0, 0.9, ["a"]), "fill": (3.0, 0.5, ["a"]), "e": (20.0, 0.3, ["b"])}
    flow, costs = kernels(table)
    order = [launch.calls[0][0] for launch in plan(flow, Branches(3), costs=costs).launches]
    assert order == ["a", "b", "e", "fill"]
    eager = [launch.calls[0][0] for launch in plan(flow, Branches(3, slack=1.0), costs=costs).launches]
    assert eager == ["a", "b", "fill", "e"], "with that much slack everything is critical"


def test_tiny_kernels_are_not_scattered_where_an_event_costs_more():
    table = {"a": (2.0, 0.1, []), "b": (0.5, 0.1, ["a"]), "c": (0.5, 0.1, ["a"]), "d": (2.0, 0.1, ["b", "c"])}
    flow, costs = kernels(table)
    dear = Device(edge_us=1.0, cross_us=5.0)
    assert set(streams(flow, Branches(4, device=dear), costs).values()) == {"caller"}
    assert len(set(streams(flow, Branches(4, device=Device(1.0, 1.0)), costs).values())) == 2, "events are cheap: b beside c"
    assert us(flow, costs, Branches(4, device=dear), dear) < us(flow, costs, Branches(4, device=Device(1.0, 1.0)), dear)


@pytest.mark.parametrize("num_streams", [1, 2, 3, 5])
@pytest.mark.parametrize("prioritised", [False, True])
def test_never_more_streams_than_asked_for(num_streams, prioritised):
    flow, costs = kernels({f"k{i}": (5.0, 0.01, []) for i in range(12)})
    p = plan(flow, Branches(num_streams, prioritised), costs=costs)
    assert len({launch.stream for launch in p.launches}) == num_streams
    assert {s.name: s.priority for s in p.streams}.get("critical") == (-1 if prioritised and num_streams > 1 else None)


def test_the_lane_of_higher_priority_is_for_the_critical_path():
    flow, costs = kernels(FORK)
    assert streams(flow, Branches(2, prioritised=True), costs) == {"a": "critical", "b": "critical", "c": "caller", "d": "critical"}


@pytest.mark.parametrize("strategy", [Branches(3), Branches(3, prioritised=True), Greedy(3)], ids=str)
@pytest.mark.parametrize("has_costs", [False, True])
def test_ops_that_use_the_caller_run_on_its_stream(strategy, has_costs):
    table = {"root": (2.0, 0.1, [])} | {f"k{i}": (9.0, 0.2, ["root"]) for i in range(6)}
    flow, costs = kernels(table, uses=[("k1", "caller"), ("k4", "caller"), ("k5", "caller")])
    where = streams(flow, strategy, costs if has_costs else None)
    assert {where[k] for k in ("k1", "k4", "k5")} == {"caller"} and len(set(where.values())) == 3
    free, _ = kernels(table)
    assert {streams(free, strategy, costs if has_costs else None)[k] for k in ("k1", "k4", "k5")} != {"caller"}


def test_without_costs_branches_stand_side_by_side():
    where = streams(diamond(), Branches(2))
    assert where["a"] == where["d"] == "caller" and {where["b"], where["c"]} == {"caller", "aux0"}
    assert set(streams(chain(4), Branches(4)).values()) == {"caller"}, "a chain stays on one stream"


@pytest.mark.parametrize("flow", [chain(3), diamond(), stateful()], ids=lambda flow: flow.name)
@pytest.mark.parametrize("strategy", [Branches(), Branches(2, prioritised=True), Greedy()], ids=str)
def test_plans_without_costs_verify(flow, strategy):
    verify(place(flow, synchronise(flow, plan(flow, strategy))), flow)


@given(kernel_flows())
def test_every_plan_verifies_and_keeps_the_bound(case):
    flow, costs = case
    for strategy in (Branches(1), Branches(3), Branches(4, prioritised=True, slack=0.0), Greedy(3)):
        p = place(flow, synchronise(flow, plan(flow, strategy, costs=costs)))
        verify(p, flow)
        assert simulate(flow, p, costs).total_us >= bound_us(flow, costs) - 1e-6


def test_ops_that_take_no_time_and_no_room():
    flow, costs = kernels({"a": (0.0, 0.0, []), "b": (0.0, 0.0, ["a"]), "c": (0.0, 1.0, ["a"])})
    assert set(streams(flow, Branches(2), costs)) == {"a", "b", "c"}


@pytest.mark.parametrize("make", NETS, ids=lambda make: make.__name__)
def test_nets_are_faster_than_on_one_stream_and_than_greedy(make):
    flow, costs = make()
    one, ours = us(flow, costs, Sequential()), us(flow, costs, Branches())
    greedy = min(us(flow, costs, Greedy(n)) for n in (2, 4, 6, 8, 16))
    if flow.name == "chain":
        assert ours == one == greedy
    else:
        assert ours < greedy < one / 1.3


def test_drawn_flows_are_never_slower_than_one_stream_and_mostly_faster_than_greedy():
    """Lists have anomalies: no rule beats another on every flow."""
    draw, ratios = random.Random(0), []
    for _ in range(60):
        table = {}
        for i in range(draw.randint(3, 60)):
            before = draw.sample(range(max(0, i - 8), i), min(i, draw.randint(0, 3)))
            table[f"k{i}"] = (draw.choice([0.5, 2, 5, 10, 30]), draw.choice([0.05, 0.2, 0.5, 0.8, 1.0]), [f"k{j}" for j in before])
        flow, costs = kernels(table)
        ours = us(flow, costs, Branches())
        assert ours <= us(flow, costs, Sequential()) + 1e-6
        ratios.append(ours / us(flow, costs, Greedy(6)))
    assert sum(ratios) / len(ratios) < 0.99 and sum(r <= 1 for r in ratios) > 40 and max(ratios) < 1.25


def test_kernels_that_fill_the_device_do_not_lose_to_one_stream():
    middle = {f"k{i}": (9.0, 1.0, ["a"]) for i in range(5)}
    flow, costs = kernels({"a": (9.0, 1.0, []), **middle, "z": (9.0, 1.0, list(middle))})
    assert us(flow, costs, Branches(4)) <= us(flow, costs, Sequential())


def test_five_thousand_kernels_are_planned_in_two_seconds():
    wide, full, deep = Net("wide"), Net("full"), Net("deep")
    outputs = [[net.op(f"k{i}", 5.0, share) for i in range(5000)] for net, share in ((wide, 0.1), (full, 0.6))]
    chains = ["x"] * 8
    for i in range(5000):
        chains[i % 8] = deep.op(f"k{i}", 5.0, 0.1, chains[i % 8])
    for flow, costs in (wide.flow(*outputs[0]), full.flow(*outputs[1]), deep.flow(*chains)):
        flow.edges  # planning alone
        began = time.process_time()
        plan(flow, Branches(8), costs=costs)
        assert time.process_time() - began < 2.0


def test_costs_make_the_difference():
    """A checker of the test above: with costs that say the opposite, the plan is worse."""
    flow, costs = kernels({f"k{i}": (1.0 + 9.0 * (i == 7), 0.1, []) for i in range(8)})
    wrong = {name: Cost(11.0 - cost.us, cost.share) for name, cost in costs.items()}
    bad = simulate(flow, synchronise(flow, plan(flow, Branches(2), costs=wrong)), costs).total_us
    assert us(flow, costs, Branches(2)) < bad


# -- ops that are confined to few streams


@pytest.mark.parametrize("make", NETS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("num_streams", [1, 2, 3])
@pytest.mark.parametrize("strategy", [Branches, lambda n, confined: Branches(n, True, confined=confined), Greedy])
def test_confined_ops_stay_on_the_first_streams(make, num_streams, strategy):
    """Every third op. The plan verifies, and the others use all streams."""
    flow, costs = make()
    ops = frozenset(op.name for op in flow.ops[::3])
    kind = (lambda n, confined: Branches(n, confined=confined)) if strategy is Branches else strategy
    where = streams(flow, kind(4, Confined(((ops, num_streams),))), costs)
    names = ["caller", *sorted(set(where.values()) - {"caller"}, key=lambda lane: (lane != "critical", lane))]
    assert {where[op] for op in ops} <= set(names[:num_streams])
    if make.__name__ != "chain":
        assert set(where.values()) == set(streams(flow, kind(4, Confined()), costs).values())
    verify(place(flow, synchronise(flow, plan(flow, kind(4, Confined(((ops, num_streams),))), costs=costs))), flow)


def test_without_the_border_they_do_not():
    """The twin."""
    flow, costs = NETS[1]()
    ops = frozenset(op.name for op in flow.ops[::3])
    assert len({stream for op, stream in streams(flow, Branches(4), costs).items() if op in ops}) > 2
