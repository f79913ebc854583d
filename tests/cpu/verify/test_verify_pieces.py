"""Pieces: every refusal that has to do with them, in `pieces.py`, `order.py` and `memory.py`, and its twin that must pass."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from dynaflow import errors
from dynaflow.ir import Flow, Plan
from dynaflow.memory import bind_memory
from dynaflow.testing.notation import flow_of
from dynaflow.verify import verify, verify_memory

# two halves of h, and who reads all of it
FLOW = flow_of("""
    input x
    home h p q
    one: x -> p
    two: x -> q
    cat: h -> y
    output y
""")


def plan_of(flow: Flow, steps: str, slots: str = "slot 0 h") -> Plan:
    """Streams a and b start after the caller's and are joined."""
    head = f"plan {flow.label}\nstream a\nstream b\n{slots}\nrecord start @caller\nwait start @a\nwait start @b\n"
    return Plan.parse(f"{head}{steps}\nrecord ja @a\nrecord jb @b\nwait ja @caller\nwait jb @caller\n")


def assert_accepted(flow: Flow, steps: str, slots: str = "slot 0 h") -> Plan:
    plan = plan_of(flow, steps, slots)
    verify(plan, flow)
    assert Plan.parse(str(plan)) == plan
    return plan


def assert_refused(error: type, flow: Flow, steps: str, slots: str = "slot 0 h") -> str:
    with pytest.raises(error) as caught:
        verify(plan_of(flow, steps, slots), flow)
    assert len(str(caught.value).splitlines()) <= 12
    return str(caught.value)


# -- order

SIDE_BY_SIDE = "launch one @a\nlaunch two @b\nrecord e @b\nwait e @a\nlaunch cat @a"


def test_accepts_pieces_side_by_side():
    assert_accepted(FLOW, SIDE_BY_SIDE)


def test_rejects_a_race_of_a_piece_and_who_reads_the_home():
    said = assert_refused(errors.PlanRace, FLOW, SIDE_BY_SIDE.replace("wait e @a\n", ""))
    assert said.startswith("'cat' on a reads what 'two' on b may still be writing.") and "region   q, all rows" in said


def test_rejects_the_home_s_reader_before_a_piece():
    assert_refused(errors.WrongOrder, FLOW, "launch one @a\nlaunch cat @a\nlaunch two @a")


def test_accepts_two_readers_of_two_pieces_side_by_side():
    flow = flow_of("input x\n home h p q\n one: x -> p\n two: x -> q\n a: p! ->\n b: q -> z\n cat: h -> y\n output y z")
    steps = "launch one @a\nlaunch two @b\nlaunch a @a\nlaunch b @b\nrecord e @b\nwait e @a\nlaunch cat @a"
    assert_accepted(flow, steps)
    # b reads q alone, and cat only reads: it waits for two, not for b
    assert_accepted(flow, steps.replace("launch b @b\nrecord e @b", "record e @b\nlaunch b @b"))


def test_rejects_a_piece_that_changes_while_the_home_is_read():
    flow = flow_of("input x\n home h p q\n one: x -> p\n two: x -> q\n cat: h -> y\n a: q! -> z\n output y z")
    steps = SIDE_BY_SIDE + "\nrecord f @a\nwait f @b\nlaunch a @b"
    assert_accepted(flow, steps)
    assert "'a' on b writes what 'cat' on a may still be reading" in assert_refused(errors.PlanRace, flow, steps.replace("wait f @b\n", ""))


WHOLE_FIRST = flow_of("input x\n home h p q\n fill: x -> h\n one: x -> p\n get: q -> z\n cat: h -> y\n output y z")


def test_accepts_a_home_that_is_written_as_a_whole_first():
    steps = "launch fill @a\nrecord e @a\nwait e @b\nlaunch one @a\nlaunch get @b\nlaunch cat @a"
    assert_accepted(WHOLE_FIRST, steps)


@pytest.mark.parametrize("gone", ["one", "get"])
def test_rejects_a_piece_beside_who_writes_the_home(gone):
    """`one` writes p after all of h is written; `get` reads what was written of it."""
    steps = "launch fill @a\nrecord e @a\nwait e @b\nlaunch one @b\nlaunch get @b\nrecord f @b\nwait f @a\nlaunch cat @a"
    assert_accepted(WHOLE_FIRST, steps)
    steps = "launch fill @a\nlaunch {} @b\nrecord e @a\nwait e @b\nlaunch {} @b\nrecord f @b\nwait f @a\nlaunch cat @a"
    other = "get" if gone == "one" else "one"
    assert f"'{gone}' on b" in assert_refused(errors.PlanRace, WHOLE_FIRST, steps.format(gone, other))


def test_rejects_a_race_over_what_no_piece_covers():
    """Both touch all of h, and no piece was written in between."""
    flow = flow_of("input x\n home h p\n fill: x -> h\n cat: h -> y\n output y")
    assert_accepted(flow, "launch fill @a\nrecord e @a\nwait e @b\nlaunch cat @b")
    assert_refused(errors.PlanRace, flow, "launch fill @a\nlaunch cat @b")
    assert {flow.storages[a.storage] for a in flow.accesses[1]} == {"h", "p", "y"}


def test_pieces_by_rows():
    steps = "launch one 0/2 @a\nlaunch two 0/2 @b\nrecord e @b\nlaunch one 1/2 @a\nlaunch two 1/2 @b\n"
    early = steps + "wait e @a\nlaunch cat 0/2 @a\nrecord f @b\nwait f @a\nlaunch cat 1/2 @a"
    assert_accepted(FLOW, early)
    said = assert_refused(errors.PlanRace, FLOW, early.replace("record f @b\nwait f @a\n", ""))
    assert "'cat 1/2' on a reads what 'two 1/2' on b" in said and "q, rows 1/2" in said


def test_a_home_without_rows_whose_piece_has_rows_is_touched_as_a_whole():
    values = tuple(replace(v, axis=None, shape=("4",), nbytes="16") if v.name == "h" else v for v in FLOW.values)
    flow = replace(FLOW, values=values)
    assert [a.by_rows for a in flow.accesses[0]] == [True, True]
    assert {flow.storages[a.storage]: a.by_rows for a in flow.accesses[2]} == {"h": False, "p": False, "q": False, "y": True}


# -- program order


def never_made(text: str) -> str:
    flow = flow_of(text)
    launches = "\n".join(f"launch {op.name} @a" for op in flow.ops)
    return assert_refused(errors.WrongOrder, flow, launches, "slot 0 h" if flow.value["h"].role == "temp" else "")


def test_rejects_a_home_that_is_read_before_all_its_pieces_are_made():
    said = never_made("input x\n home h p q\n a: x -> p\n cat: h -> y\n b: x -> q\n output y")
    assert "'cat' reads 'h', which no op before makes" in said


def test_rejects_a_piece_that_is_read_before_it_is_made():
    assert "'get' reads 'q'" in never_made("input x\n home h p q\n a: x -> p\n get: q -> z\n b: x -> q\n cat: h -> y\n output y z")


def test_rejects_an_output_of_which_a_piece_is_missing():
    assert "the caller reads 'h'" in never_made("input x\n home h p q\n a: x -> p\n output h")


@pytest.mark.parametrize("text", [
    "input x\n home h p q\n a: x -> p\n b: x -> q\n output h",
    "input x\n home h p q\n a: x -> h\n b: p -> y\n output h y",
    "input x\n home h p q\n a: x -> p\n b: x -> q\n c: h! -> y\n output y",
])  # fmt: skip
def test_accepts_homes_that_are_made(text):
    flow = flow_of(text)
    slots = "slot 0 h" if flow.value["h"].role == "temp" else ""
    assert_accepted(flow, "\n".join(f"launch {op.name} @a" for op in flow.ops), slots)


# -- slots

# v is dead before the pieces are written, w begins when they are dead
SHARED = flow_of("""
    input x
    home h p q
    pre: x -> v
    use: v -> u
    one: x -> p
    two: x -> q
    cat: h -> y
    post: y -> w
    last: w -> z
    output u y z
""")
SLOT = "slot 0 v h w"
IN_TURN = "launch pre @a\nlaunch use @a\nrecord e @a\nwait e @b\nlaunch one @a\nlaunch two @b\nrecord f @b\nwait f @a\nlaunch cat @a\n"
IN_TURN += "launch post @a\nlaunch last @a"


def test_accepts_a_home_in_turn_with_others():
    assert_accepted(SHARED, IN_TURN, SLOT)


def test_rejects_a_piece_over_a_value_that_is_still_read():
    """The first piece is in order, the second is not."""
    said = assert_refused(errors.LiveOverlap, SHARED, IN_TURN.replace("wait e @b\n", ""), SLOT)
    assert "'two' on b writes 'q' over 'v', which 'use' on a may still use" in said and "slot 0" in said


def test_rejects_a_value_over_a_home_of_which_one_piece_is_alive():
    flow = flow_of("input x\n home h p q\n a: x -> p\n b: x -> q\n get: p -> u\n post: u -> w\n last: w -> z\n late: q -> y\n output y z")
    steps = "launch a @a\nlaunch b @a\nlaunch get @a\nlaunch {} @a\nlaunch {} @a\nlaunch {} @a"
    slots = "slot 0 h w\nslot 1 u"
    assert_accepted(flow, steps.format("late", "post", "last"), slots)
    said = assert_refused(errors.LiveOverlap, flow, steps.format("post", "last", "late"), slots)
    assert "'late' on a reads 'q', which 'post' overwrote with 'w'" in said


def test_rejects_a_value_over_a_piece_that_another_stream_reads():
    flow = flow_of("input x\n home h p q\n a: x -> p\n b: x -> q\n get: p -> u\n post: u -> w\n last: w -> z\n late: q -> y\n output y z")
    steps = "launch a @a\nlaunch b @a\nrecord e @a\nwait e @b\nlaunch late @b\nrecord f @b\nlaunch get @a\n"
    steps += "wait f @a\nlaunch post @a\nlaunch last @a"
    assert_accepted(flow, steps, "slot 0 h w\nslot 1 u")
    said = assert_refused(errors.LiveOverlap, flow, steps.replace("wait f @a\n", ""), "slot 0 h w\nslot 1 u")
    assert "writes 'w' over 'q', which 'late' on b may still use" in said


def test_rejects_a_piece_that_is_written_when_the_slot_has_gone_to_another():
    flow = flow_of("input x\n home h p q\n a: x -> p\n mid: x -> w\n use: w -> z\n b: x -> q\n cat: h -> y\n output y z")
    launches = "\n".join(f"launch {name} @a" for name in ("a", "mid", "use", "b", "cat"))
    assert_accepted(flow, launches, "slot 0 h\nslot 1 w")
    said = assert_refused(errors.LiveOverlap, flow, launches, "slot 0 h w")
    assert "writes 'q', which 'mid' overwrote with 'w'" in said


def test_rejects_an_op_that_writes_a_piece_over_what_it_reads():
    flow = flow_of("input x\n home h p q\n pre: x -> v\n one: v -> p q\n cat: h -> y\n output y")
    launches = "launch pre @a\nlaunch one @a\nlaunch cat @a"
    assert_accepted(flow, launches, "slot 0 v\nslot 1 h")
    assert "uses 'v' and 'p', which share memory" in assert_refused(errors.LiveOverlap, flow, launches, "slot 0 v h")


def test_rejects_a_fused_launch_that_writes_a_piece_over_what_it_reads():
    flow = flow_of("input x\n home h p q\n pre: x -> v\n use: v -> u\n one: u -> p\n two: x -> q\n cat: h -> y\n output y")
    slots = "slot 0 v h\nslot 1 u"
    assert_accepted(flow, "launch pre @a\nlaunch use @a\nlaunch [one, two] @a\nlaunch cat @a", slots)
    assert "'v' and 'h', which share memory" in assert_refused(
        errors.LiveOverlap, flow, "launch pre @a\nlaunch [use, one] @a\nlaunch two @a\nlaunch cat @a", "slot 0 v h")


def test_rejects_a_piece_with_a_slot():
    said = assert_refused(errors.MalformedPlan, FLOW, SIDE_BY_SIDE, "slot 0 h\nslot 1 p")
    assert "it is no temporary but a piece of 'h', in whose memory it lies" in said


@pytest.mark.parametrize("steps", [SIDE_BY_SIDE, "launch [one, two, cat] @a"])
def test_rejects_a_home_without_a_slot(steps):
    assert_accepted(FLOW, steps)
    assert "has no memory" in assert_refused(errors.MalformedPlan, FLOW, steps, "")


def test_rejects_a_home_without_a_slot_that_nobody_touches_as_a_whole():
    flow = flow_of("input x\n home h p q\n one: x -> p\n get: p -> y\n output y")
    assert_accepted(flow, "launch one @a\nlaunch get @a")
    assert "no slot for 'h'" in assert_refused(errors.MalformedPlan, flow, "launch one @a\nlaunch get @a", "")
    assert "no slot for 'h'" in assert_refused(errors.MalformedPlan, flow, "launch [one, get] @a", "")


def test_rejects_a_replacement_that_writes_a_piece():
    assert_accepted(FLOW, "launch one @a\nlaunch two @a\nlaunch pkg.fn[cat] @a")
    said = assert_refused(errors.MalformedPlan, FLOW, "launch one @a\nlaunch pkg.fn[two, cat] @a")
    assert "writes 'q', a piece of 'h'" in said


def test_rejects_a_function_that_makes_some_rows_of_a_home_and_reads_more_of_a_piece():
    flow = flow_of("input x\n home h p q\n fill: x -> h\n get: p -> y\n output y h")
    assert_accepted(flow, "launch pkg.fn[fill 0/2, fill 1/2, get] @a", "")
    said = assert_refused(errors.MalformedPlan, flow, "launch fill 0/2 @a\nlaunch pkg.fn[fill 1/2, get] @a", "")
    assert "makes only some of the rows of 'h' that 'get' in it reads" in said


# -- bytes


def test_bytes_of_a_home():
    plan = assert_accepted(SHARED, IN_TURN, "slot 0 v\nslot 1 h\nslot 2 w")
    sizes = {"s0": 4}
    verify_memory(SHARED, plan, bind_memory(SHARED, plan, sizes), sizes)

    def check(v: int, h: int, w: int) -> None:
        offsets = {"v": (v, 64), "h": (h, 64), "w": (w, 64)}
        verify_memory(SHARED, plan, SimpleNamespace(offsets=offsets, arena_bytes=192), sizes)

    check(0, 32, 64)  # in turn
    plan = replace(plan, steps=plan_of(SHARED, IN_TURN.replace("wait e @b\n", "")).steps)  # the second piece may come too early
    with pytest.raises(errors.LiveOverlap, match="'h' lies on bytes of 'v', which is still alive"):
        check(0, 32, 64)
    check(0, 64, 128)


# -- the flow itself


@pytest.mark.parametrize(("name", "changes", "why"), [
    ("p", {"home": "zzz"}, "no value of the flow"), ("p", {"home": ""}, "it has no home"), ("p", {"role": "temp"}, "its role is 'temp'"),
    ("p", {"home": "x"}, "role 'input'"), ("p", {"home": "q"}, "role 'piece'"), ("p", {"storage": "q"}, "the same memory as 'p'"),
    ("y", {"storage": "h", "role": "temp"}, "the same memory as 'h'"),
])  # fmt: skip
def test_rejects_what_is_no_piece(name, changes, why):
    flow = replace(FLOW, values=tuple(replace(v, **changes) if v.name == name else v for v in FLOW.values))
    assert why in assert_refused(errors.MalformedPlan, flow, SIDE_BY_SIDE)


def test_rejects_a_piece_that_is_an_output():
    assert "it is an output by itself" in assert_refused(errors.MalformedPlan, replace(FLOW, outputs=("y", "p")), SIDE_BY_SIDE)
