"""Every refusal of `verify/structure.py`, and its twin that must pass."""

from dataclasses import replace

import pytest

from dynaflow import errors
from dynaflow.ir import Launch, Part, Plan
from dynaflow.testing.notation import flow_of
from dynaflow.verify import verify

FLOW = flow_of("""
    input x
    input count state
    norm: x -> h
    ar network group:tp: h -> r
    scan whole: r count! -> s
    add: s x -> y
    output y
""")

GOOD = f"""
plan {FLOW.label}
stream compute
stream comm
slot 0 h
slot 1 r
slot 2 s
record start @caller
wait start @compute
launch norm 0/2 @compute
record e0 @compute
wait e0 @comm
launch ar 0/2 @comm
launch norm 1/2 @compute
record e1 @compute
wait e1 @comm
launch ar 1/2 @comm
record e2 @comm
wait e2 @compute
launch scan @compute
launch add @compute
record e3 @compute
wait e3 @caller
"""


def plan_of(*edits: tuple[str, str]) -> Plan:
    text = GOOD
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new, 1)
    return Plan.parse(text)


def assert_refused(error: type, *edits: tuple[str, str]) -> str:
    with pytest.raises(error) as caught:
        verify(plan_of(*edits), FLOW)
    assert len(str(caught.value).splitlines()) <= 12
    return str(caught.value)


def test_accepts_and_reports():
    report = verify(plan_of(), FLOW)
    assert str(report) == "verified: 6 launches, 5 waits, 2 streams: no race, no missing or doubled op, all joined"
    assert report == replace(report, elapsed_us=-1.0)


def test_rejects_plan_of_another_flow():
    assert "toy." in assert_refused(errors.ContextMismatch, (FLOW.label, "toy.00000000"))


def test_rejects_unknown_op():
    assert "'nrom' is no op" in assert_refused(errors.MalformedPlan, ("launch norm 0/2", "launch nrom 0/2"))


def test_rejects_unknown_stream():
    assert "'aux'" in assert_refused(errors.MalformedPlan, ("launch scan @compute", "launch scan @aux"))


def test_rejects_stream_declared_twice():
    assert_refused(errors.MalformedPlan, ("stream comm", "stream compute"))


def test_rejects_declared_caller():
    assert_refused(errors.MalformedPlan, ("stream comm", "stream comm\nstream caller"))


def test_accepts_launches_on_the_caller():
    there_and_back = "record e9 @compute\nwait e9 @caller\nlaunch scan @caller\nrecord e8 @caller\nwait e8 @compute"
    verify(plan_of(("launch scan @compute", there_and_back)), FLOW)


def test_rejects_event_recorded_twice():
    assert "twice" in assert_refused(errors.MalformedPlan, ("record e1 @compute", "record e0 @compute"))


def test_accepts_event_awaited_twice():
    verify(plan_of(("wait e0 @comm", "wait e0 @comm\nwait e0 @compute")), FLOW)


def test_rejects_start_on_another_stream():
    assert_refused(errors.MalformedPlan, ("record start @caller", "record start @compute"))


def test_rejects_wait_for_nothing():
    assert "nothing records" in assert_refused(errors.MalformedPlan, ("wait e2 @compute", "wait e99 @compute"))


def test_rejects_wait_before_record():
    said = assert_refused(errors.WaitBeforeRecord, ("record e0 @compute\nwait e0 @comm", "wait e0 @comm\nrecord e0 @compute"))
    assert "silently" in said and "too late" in said


def test_rejects_missing_op():
    assert "'add' is never launched" in assert_refused(errors.OpMissing, ("launch add @compute\n", ""))


def test_rejects_doubled_op():
    assert "'norm 0/2' is launched twice" in assert_refused(errors.OpDoubled, ("launch norm 1/2", "launch norm 0/2"))


def test_rejects_doubled_op_under_another_name_of_the_part():
    assert_refused(errors.OpDoubled, ("launch norm 1/2 @compute", "launch norm 1/2 @compute\nlaunch norm 2:4/4 @compute"))


def test_rejects_gap():
    assert "rows 3/4 to 1 of the batch" in assert_refused(errors.PartGap, ("launch norm 1/2", "launch norm 2/4"))


def test_rejects_gap_at_the_start():
    assert "rows 0 to 1/4" in assert_refused(errors.PartGap, ("launch norm 0/2", "launch norm 1/4"))


def test_rejects_overlap():
    assert "rows 1/4 to 1/2" in assert_refused(errors.PartOverlap, ("launch norm 1/2", "launch norm 1:4/4"))


def test_accepts_parts_of_different_denominators():
    verify(plan_of(("launch norm 1/2 @compute", "launch norm 2/4 @compute\nlaunch norm 9:12/12 @compute")), FLOW)


def test_rejects_split_of_an_unsplittable_op():
    said = assert_refused(errors.UnsplittableOp, ("launch scan @compute", "launch scan 0/2 @compute\nlaunch scan 1/2 @compute"))
    assert "it mixes the batch" in said


def test_accepts_the_whole_batch_under_another_name():
    verify(plan_of(("launch scan @compute", "launch scan 0:2/2 @compute")), FLOW)


def test_rejects_part_that_is_none():
    steps = tuple(replace(s, calls=(("add", Part(1, 1, 2)),)) if type(s) is Launch and s.label == "add" else s for s in plan_of().steps)
    with pytest.raises(errors.MalformedPlan, match="which is none"):
        verify(replace(plan_of(), steps=steps), FLOW)


def test_rejects_a_launch_of_nothing():
    steps = tuple(replace(s, calls=()) if type(s) is Launch and s.label == "scan" else s for s in plan_of().steps)
    with pytest.raises(errors.MalformedPlan, match="calls nothing"):
        verify(replace(plan_of(), steps=steps), FLOW)


# -- fused launches

FUSED = ("launch scan @compute\nlaunch add @compute", "launch [scan, add] @compute")


def test_accepts_fused_launch_and_counts_it_once():
    assert verify(plan_of(FUSED), FLOW).num_launches == 5


def test_accepts_fused_launch_with_its_inner_value_in_no_slot():
    verify(plan_of(("slot 2 s\n", ""), FUSED), FLOW)


def test_rejects_inner_value_that_leaves_its_fused_launch():
    assert "'r' has no memory" in assert_refused(errors.MalformedPlan, ("slot 1 r\n", ""), FUSED)


def test_rejects_fused_launch_over_several_parts():
    said = assert_refused(errors.MalformedPlan, ("launch scan @compute\nlaunch add @compute", "launch [scan, add 0/2] @compute"))
    assert "fuses 'scan' and 'add 0/2'" in said


def test_rejects_call_that_is_fused_and_launched():
    assert "'add' is launched twice" in assert_refused(errors.OpDoubled, ("launch scan @compute", "launch [scan, add] @compute"))


def test_rejects_fused_launch_without_one_of_its_calls():
    assert "'add' is never launched" in assert_refused(errors.OpMissing, FUSED, ("[scan, add]", "[scan]"))


# -- slots


def test_rejects_missing_slot():
    assert "'s' has no memory" in assert_refused(errors.MalformedPlan, ("slot 2 s\n", ""))


def test_rejects_slot_of_an_output():
    assert "'y' has slot 3" in assert_refused(errors.MalformedPlan, ("slot 2 s", "slot 2 s\nslot 3 y"))


def test_rejects_slot_of_an_input():
    assert_refused(errors.MalformedPlan, ("slot 2 s", "slot 2 s x"))


def test_rejects_slot_of_nothing():
    assert "no value of the flow" in assert_refused(errors.MalformedPlan, ("slot 2 s", "slot 2 s zzz"))


def test_rejects_two_slots_of_one_value():
    plan = plan_of()
    with pytest.raises(errors.MalformedPlan, match="two slots"):
        verify(replace(plan, slots=(*plan.slots, ("s", 5))), FLOW)


def test_accepts_replacement_with_its_inner_value_in_no_slot():
    verify(plan_of(("slot 2 s\n", ""), ("launch scan @compute\nlaunch add @compute", "launch my.fused[scan, add] @compute")), FLOW)


def test_rejects_inner_value_that_leaves_its_replacement():
    edits = (("slot 1 r\n", ""), ("launch scan @compute\nlaunch add @compute", "launch my.fused[scan, add] @compute"))
    assert "'r' has no memory" in assert_refused(errors.MalformedPlan, *edits)


def test_a_plan_without_places_is_refused_by_name():
    with pytest.raises(errors.MalformedPlan, match="place"):
        verify(replace(plan_of(), slots=()), FLOW)
