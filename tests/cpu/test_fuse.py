"""fuse merges neighbours, and changes neither what is ordered nor what waits for what."""

import random

import pytest

import dynaflow.testing.fuzz as fuzz
from dynaflow.fuse import fuse
from dynaflow.ir import Launch, Plan
from dynaflow.memory import internal_values, place
from dynaflow.planner import sequential_plan
from dynaflow.sync import synchronise
from dynaflow.testing import random_flow
from dynaflow.testing.notation import flow_of
from dynaflow.verify import verify
from tests.cpu.happens_before import happens_before

FLOW = flow_of("""
    input x
    a: x -> h
    b: h -> r
    ar network group:tp: r -> s
    c: s -> t
    d: t -> y
    output y
""")


def fused(steps: str, can_fuse=lambda op: op.kind == "compute", flow=FLOW) -> list[str]:
    head = f"plan {flow.label}\nstream one\nstream two\n"
    plan = fuse(flow, Plan.parse(head + "\n".join(line.strip() for line in steps.strip().splitlines()) + "\n"), can_fuse)
    return str(plan).splitlines()[3:]


def test_neighbours_become_one_launch():
    assert fused("launch a @one\nlaunch b @one\nlaunch ar @one\nlaunch c @one\nlaunch d @one") == [
        "launch [a, b] @one", "launch ar @one", "launch [c, d] @one",
    ]  # fmt: skip


def test_steps_of_other_streams_may_lie_between_and_the_unit_stands_at_the_first():
    assert fused("launch a 0/2 @one\nlaunch a 1/2 @two\nlaunch b 0/2 @one\nlaunch b 1/2 @two") == [
        "launch [a, b] 0/2 @one", "launch [a, b] 1/2 @two",
    ]  # fmt: skip


@pytest.mark.parametrize("between", ["record e @one", "wait e @one", "launch ar @one", "launch pkg.fn[c, d] @one", "launch d 0/2 @one"])
def test_what_ends_a_unit(between):
    lines = ["launch a @one", between, "launch b @one"]
    assert fused("\n".join(lines)) == lines


@pytest.mark.parametrize("between", ["record e @two", "wait e @two", "launch ar @two", "launch pkg.fn[c, d] @two"])
def test_what_does_not(between):
    assert fused(f"launch a @one\n{between}\nlaunch b @one") == ["launch [a, b] @one", between]


def test_different_parts_and_what_cannot_be_fused_stay_apart():
    assert fused("launch a 0/2 @one\nlaunch b 1/2 @one") == ["launch a 0/2 @one", "launch b 1/2 @one"]
    assert fused("launch a @one\nlaunch b @one\nlaunch c @one", lambda op: op.name != "b") == [
        "launch a @one", "launch b @one", "launch c @one",
    ]  # fmt: skip


def test_fusing_twice_is_fusing_once():
    once = "launch a @one\nlaunch b @one\nrecord e @one\nlaunch c @one\nlaunch d @one"
    assert fused("\n".join(fused(once))) == fused(once)


def test_a_sequential_plan_becomes_one_launch_without_memory():
    flow = flow_of("input x\n a: x -> h\n b: h -> r\n c: r -> y\n output y")
    plan = place(flow, fuse(flow, synchronise(flow, sequential_plan(flow, "why not")), lambda op: True))
    assert [launch.label for launch in plan.launches] == ["a..c"]
    assert plan.slots == () and internal_values(flow, plan) == {"h", "r"}
    assert verify(plan, flow).num_launches == 1


@pytest.mark.parametrize("seed", range(25))
def test_the_order_of_calls_is_what_it_was(seed):
    """By reachability over streams, records and waits; and what is ordered is issued in that order."""
    case, rng = random_flow(seed), random.Random(seed)
    for strategy in fuzz.strategies(case):
        plan = synchronise(case.flow, fuzz.run_strategy(case.flow, strategy, fuzz.Context({"batch_size": case.batch_size})).finish())
        may = {op.name for op in case.flow.ops if rng.random() < 0.8}
        new = fuse(case.flow, plan, lambda op, may=may: op.name in may)
        assert _order(new) == _order(plan)
        issued = {call: i for i, call in enumerate(call for launch in new.launches for call in launch.calls)}
        assert all(issued[a] < issued[b] for a, b in _order(new))
        # nothing is left to fuse
        assert fuse(case.flow, new, lambda op, may=may: op.name in may) == new
        assert [s for s in new.steps if type(s) is not Launch] == [s for s in plan.steps if type(s) is not Launch]
        verify(place(case.flow, new), case.flow)


def _order(plan: Plan) -> set:
    """Pairs of calls, the first of which happens before the second."""
    launches = plan.launches
    pairs = {(a, b) for i, j in happens_before(plan) for a in launches[i].calls for b in launches[j].calls}
    return pairs | {(a, b) for launch in launches for i, a in enumerate(launch.calls) for b in launch.calls[i + 1 :]}
