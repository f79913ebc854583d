"""Loose values: which may be, which are, and when their memory may go to somebody else."""

import random

import pytest

import dynaflow.testing.fuzz as fuzz
from dynaflow.ir import WHOLE, Flow, Part, Plan
from dynaflow.memory import can_be_loose, drop_points, loose_values, place
from dynaflow.testing import random_flow
from dynaflow.testing.notation import flow_of
from dynaflow.verify import verify
from tests.cpu.happens_before import happens_before

FLOW = flow_of("""
    input x
    a: x -> h
    b: h -> r
    c: h r -> y
    output y
""")


def plan_of(steps: str, flow: Flow = FLOW) -> Plan:
    return Plan.parse(f"plan {flow.label}\nstream one\nstream two\n" + steps)


def on_caller(*launches: str) -> str:
    return "\n".join(f"launch {launch} @caller" for launch in launches)


@pytest.mark.parametrize(
    ("launches", "loose"),
    [
        (("a", "b", "c"), {"h", "r"}),
        # written whole and read in parts; written and read in the same parts; in finer ones
        (("a", "b 0/2", "b 1/2", "c 0/2", "c 1/2"), {"h", "r"}),
        (("a 0/2", "a 1/2", "b 0/2", "b 1/2", "c 0/2", "c 2/4", "c 3/4"), {"h", "r"}),
        # written in halves and read whole; across the border
        (("a", "b 0/2", "b 1/2", "c"), {"h"}),
        (("a 0/2", "a 1/2", "b 0/3", "b 1/3", "b 2/3", "c 0/3", "c 1/3", "c 2/3"), {"r"}),
        # inside one launch it is internal; one that is read outside as well is not
        (("[a, b, c]",), set()),
        (("[a, b]", "c"), {"h", "r"}),
        # a function may return anything
        (("pkg.fn[a, b]", "c"), set()),
        (("a", "pkg.fn[b, c]"), {"h"}),
    ],
)
def test_can_be_loose(launches, loose):
    plan = plan_of(on_caller(*launches))
    assert can_be_loose(FLOW, plan) == loose
    placed = place(FLOW, plan, frozenset({"h", "r", "y", "x"}))
    assert set(placed.loose) == loose_values(FLOW, placed) == loose
    verify(placed, FLOW)
    assert Plan.parse(str(placed)) == placed


def test_what_is_changed_row_by_row_or_made_twice_cannot():
    flow = flow_of("input x\n a: x -> h k n^\n b: h! -> r\n c: k n -> y\n output y r")
    assert can_be_loose(flow, plan_of(on_caller("a", "b", "c"), flow)) == {"k", "n"}
    # every part makes the state n
    assert can_be_loose(flow, plan_of(on_caller("a 0/2", "a 1/2", "b", "c 0/2", "c 1/2"), flow)) == {"k"}


def test_what_has_no_rows_can_be_changed_in_place():
    flow = flow_of("input x\n a: x -> n^\n b whole: n! ->\n c: n x -> y\n output y")
    assert can_be_loose(flow, plan_of(on_caller("a", "b", "c"), flow)) == {"n"}
    assert can_be_loose(flow, plan_of(on_caller("[a, b]", "c"), flow)) == {"n"}
    # every part makes it; a function may return anything; it never leaves its launch
    for launches in (("a 0/2", "a 1/2", "b", "c"), ("pkg.fn[a, b]", "c"), ("[a, b, c]",)):
        assert not can_be_loose(flow, plan_of(on_caller(*launches), flow))


def test_homes_and_pieces_cannot():
    flow = flow_of("input x\n home h p q\n a: x -> p k\n b: x -> q\n c: h k -> y\n output y")
    assert can_be_loose(flow, plan_of(on_caller("a", "b", "c"), flow)) == {"k"}


def test_place_takes_only_what_it_was_given():
    plan = place(FLOW, plan_of(on_caller("a", "b", "c")), frozenset({"r"}))
    assert (plan.loose, plan.slots) == (("r",), (("h", 0),))
    assert "\nloose r\n" in str(plan)


# -- drop points


def points(steps: str, flow: Flow = FLOW, loose: tuple[str, ...] = ("h", "r")) -> list[list[str]]:
    plan = place(flow, plan_of(steps, flow), frozenset(loose))
    assert set(plan.loose) == set(loose)
    verify(plan, flow)
    return [[f"{value} {part}".rstrip() for value, part in dropped] for dropped in drop_points(flow, plan)]


def test_on_one_stream_a_tensor_is_dropped_right_behind_its_last_access():
    flow = flow_of("input x\n a: x -> h\n b: h -> r\n c: r -> s\n d: s -> y\n output y")
    assert points(on_caller("a", "b", "c", "d"), flow) == [[], [], ["h"], ["r"], []]
    assert points(on_caller("a 0/2", "a 1/2", "b 0/2", "c 0/2", "b 1/2", "c 1/2", "d"), flow) == [
        [], [], [], ["h 0/2"], ["r 0/2"], ["h 1/2"], ["r 1/2"], [],
    ]  # fmt: skip


def test_what_nobody_reads_is_dropped_at_once():
    flow = flow_of("input x\n a: x -> h y\n b: y -> z\n output z y")
    assert points(on_caller("a", "b"), flow, loose=("h",)) == [[], ["h"], []]


START = "record start @caller\nwait start @one\nwait start @two\n"
JOIN = "\nrecord j1 @one\nrecord j2 @two\nwait j1 @caller\nwait j2 @caller"


def test_what_another_stream_reads_is_dropped_when_its_own_stream_has_waited():
    flow = flow_of("input x\n a: x -> h\n b: h -> r\n p: x -> s\n c: r -> t\n d: t s -> y\n output y")
    steps = "launch a @one\nrecord e0 @one\nwait e0 @two\nlaunch b @two\nrecord e1 @two\n"
    steps += "launch p @one\nwait e1 @one\nlaunch c @one\nlaunch d @one"
    # b reads h on two: p may run beside it, c comes after it
    assert points(START + steps + JOIN, flow, loose=("h",)) == [[], [], [], ["h"], [], []]


def test_what_no_wait_brings_back_is_dropped_at_the_end():
    flow = flow_of("input x\n a: x -> h\n b: h -> y\n p: x -> s\n c: s -> z\n output y z")
    steps = "launch a @one\nrecord e0 @one\nwait e0 @two\nlaunch b @two\nlaunch p @one\nlaunch c @one"
    assert points(START + steps + JOIN, flow, loose=("h",)) == [[], [], [], [], ["h"]]


def test_a_change_in_place_is_an_access():
    flow = flow_of("input x\n a: x -> n^\n b whole: n! ->\n p: x -> s\n c: x s -> y\n output y")
    assert points(on_caller("a", "b", "p", "c"), flow, loose=("n",)) == [[], [], ["n"], [], []]
    # b changes it on two: p may run beside b, c comes after it
    steps = "launch a @one\nrecord e0 @one\nwait e0 @two\nlaunch b @two\nrecord e1 @two\nlaunch p @one\nwait e1 @one\nlaunch c @one"
    assert points(START + steps + JOIN, flow, loose=("n",)) == [[], [], [], ["n"], []]


@pytest.mark.parametrize("seed", range(60))
def test_drop_points_against_an_allocator_and_reachability(seed):
    """Every tensor is dropped once; whoever gets its memory comes after all its accesses; and nobody earlier on its stream could."""
    case = random_flow(seed)
    for number, strategy in enumerate(fuzz.strategies(case)):
        for plan in (fuzz.make_plan(case, strategy, random.Random(seed * 10 + number))[0], _all_loose(case, strategy)):
            ordered, launches = happens_before(plan), plan.launches
            dropped = drop_points(case.flow, plan)
            assert len(dropped) == len(launches) + 1
            tensors = _accesses(case, plan)
            assert sorted(tensor for point in dropped for tensor in point) == sorted(tensors)
            for at, point in enumerate(dropped):
                for tensor in point:
                    writer, users = tensors[tensor]
                    home = launches[writer].stream
                    assert all(n < at for n in users), "it is dropped before it is used"
                    # the allocator: the next launch on the stream gets the memory
                    mine = [n for n in range(len(launches)) if launches[n].stream == home]
                    takers = [n for n in mine if n >= at]
                    assert not takers or all((n, takers[0]) in ordered for n in users), "its memory is given away while it is used"
                    # as early as can be: whoever could have had it first has it
                    able = [n for n in mine if n > max(users) and all((u, n) in ordered for u in users)]
                    assert takers == able


def test_the_test_above_sees_values_that_cross_streams():
    crossing = 0
    for seed in range(20):
        case = random_flow(seed)
        plan = _all_loose(case, fuzz.strategies(case)[4])
        crossing += sum(len({plan.launches[n].stream for n in users}) > 1 for _, users in _accesses(case, plan).values())
    assert crossing > 20


def _all_loose(case, strategy) -> Plan:
    plan, _ = fuzz.make_plan(case, strategy)
    return place(case.flow, plan, frozenset(v.name for v in case.flow.values))


def _accesses(case, plan: Plan) -> dict[tuple[str, Part], tuple[int, list[int]]]:
    """Every loose tensor: who writes it, and all launches that touch a row of it. Rows as numbers, for a batch that all parts divide."""
    size = 1
    for part in plan.parts:
        size *= part.of if size % part.of else 1
    found = {}
    for n, launch in enumerate(plan.launches):
        for name, part in launch.calls:
            for value in case.flow.op(name).writes:
                if value in plan.loose:
                    found[value, part if case.flow.value[value].axis is not None else WHOLE] = (n, [n])
    for n, launch in enumerate(plan.launches):
        for name, part in launch.calls:
            for (value, written), (_, users) in found.items():
                if value in (*case.flow.op(name).reads, *case.flow.op(name).mutates):
                    mine = range(*(WHOLE if case.flow.value[value].axis is None else part).bounds(size))
                    if set(mine) & set(range(*written.bounds(size))):
                        users.append(n)
    return found
