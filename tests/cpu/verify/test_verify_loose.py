"""Every refusal of `verify/loose.py`, and its twin that must pass."""

import pytest

from dynaflow import errors
from dynaflow.ir import Flow, Plan
from dynaflow.testing.notation import flow_of
from dynaflow.verify import verify

FLOW = flow_of("""
    input x
    a: x -> h n^
    b: h n -> r
    add: r! -> s
    c: h r s -> y
    output y
""")


def plan_of(slots: str, *launches: str, flow: Flow = FLOW) -> Plan:
    return Plan.parse(f"plan {flow.label}\n{slots}\n" + "\n".join(f"launch {launch} @caller" for launch in launches))


def assert_refused(slots: str, *launches: str, flow: Flow = FLOW) -> str:
    with pytest.raises(errors.MalformedPlan) as caught:
        verify(plan_of(slots, *launches, flow=flow), flow)
    assert len(str(caught.value).splitlines()) <= 12
    return str(caught.value)


ALL = ("a", "b", "add", "c")
SLOTS = "slot 0 r\nslot 1 s\n"


def test_accepts_loose_values():
    verify(plan_of(SLOTS + "loose h n", *ALL), FLOW)
    verify(plan_of(SLOTS + "loose h\nloose n", "a", "b 0/2", "b 1/2", "add", "c 0/2", "c 1/2"), FLOW)


def test_rejects_value_that_is_neither_placed_nor_listed():
    assert "'n' has no memory" in assert_refused(SLOTS + "loose h", *ALL)


def test_rejects_what_is_listed_and_has_a_slot():
    assert "it has a slot" in assert_refused(SLOTS + "slot 2 n\nloose h n", *ALL)


def test_rejects_what_is_listed_twice():
    assert "twice" in assert_refused(SLOTS + "loose h h n", *ALL)


@pytest.mark.parametrize(("name", "why"), [("zzz", "no value"), ("x", "role 'input'"), ("y", "role 'output'")])
def test_rejects_what_is_no_temporary(name, why):
    assert why in assert_refused(SLOTS + f"loose h n {name}", *ALL)


def test_rejects_what_is_changed_row_by_row():
    assert "'add' changes rows of it in place" in assert_refused("slot 1 s\nloose h n r", *ALL)


CHANGED = flow_of("input x\n a: x -> n^\n b whole: n! ->\n c: n x -> y\n output y")


def test_accepts_what_is_changed_in_place_and_has_no_rows():
    verify(plan_of("loose n", "a", "b", "c", flow=CHANGED), CHANGED)
    verify(plan_of("loose n", "a", "[b, c]", flow=CHANGED), CHANGED)


def test_rejects_what_is_changed_in_place_and_made_by_several_launches():
    verify(plan_of("slot 0 n", "a 0/2", "a 1/2", "b", "c", flow=CHANGED), CHANGED)
    assert "several launches make it" in assert_refused("loose n", "a 0/2", "a 1/2", "b", "c", flow=CHANGED)


def test_rejects_what_is_changed_and_never_leaves_its_launch():
    flow = flow_of("input x\n a: x -> n^\n b whole: n! ->\n c: x -> y\n output y")
    verify(plan_of("loose n", "a", "[b, c]", flow=flow), flow)
    assert "never leaves its launch" in assert_refused("loose n", "[a, b, c]", flow=flow)


PIECES = flow_of("input x\n home h p q\n a: x -> p\n b: x -> q\n c: h -> y\n output y")


def test_rejects_a_home_and_a_piece():
    verify(plan_of("slot 0 h", "a", "b", "c", flow=PIECES), PIECES)
    assert "it has pieces (p, q)" in assert_refused("loose h", "a", "b", "c", flow=PIECES)
    assert "a piece of 'h'" in assert_refused("slot 0 h\nloose p", "a", "b", "c", flow=PIECES)


def test_rejects_what_is_written_in_parts_and_read_whole():
    said = assert_refused(SLOTS + "slot 2 n\nloose h", "a 0/2", "a 1/2", "b", "add", "c")
    assert "'b' reads rows of it that no launch alone wrote" in said


def test_rejects_a_state_that_several_launches_make():
    verify(plan_of(SLOTS + "slot 2 n\nloose h", "a 0/2", "a 1/2", "b 0/2", "b 1/2", "add", "c 0/2", "c 1/2"), FLOW)
    said = assert_refused(SLOTS + "loose h n", "a 0/2", "a 1/2", "b 0/2", "b 1/2", "add", "c 0/2", "c 1/2")
    assert "several launches make it" in said


def test_rejects_what_a_replacement_makes():
    assert "may return memory that is not its own" in assert_refused(SLOTS + "loose h", "pkg.fn[a, b]", "add", "c")


def test_rejects_what_never_leaves_its_launch():
    verify(plan_of(SLOTS + "loose h", "[a, b]", "add", "c"), FLOW)
    assert "'n' cannot be loose" in assert_refused(SLOTS + "loose h n", "[a, b]", "add", "c")
