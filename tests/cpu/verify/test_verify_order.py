"""Every refusal of `verify/order.py`, and its twin that must pass."""

import pytest

from dynaflow import errors
from dynaflow.ir import Flow, Plan
from dynaflow.testing.notation import flow_of
from dynaflow.verify import verify


def plan_of(flow: Flow, steps: str, slots: str | None = None) -> Plan:
    """Streams a and b; every temporary in a slot of its own, unless said otherwise."""
    temps = [v.name for v in flow.values if v.role == "temp"]
    slots = "\n".join(f"slot {i} {name}" for i, name in enumerate(temps)) if slots is None else slots
    body = "\n".join(line.strip() for line in steps.strip().splitlines())
    return Plan.parse(f"plan {flow.label}\nstream a\nstream b\n{slots}\n{body}\n")


def forked(steps: str, joins: str = "record ja @a\nrecord jb @b\nwait ja @caller\nwait jb @caller") -> str:
    return f"record start @caller\nwait start @a\nwait start @b\n{steps}\n{joins}"


def assert_accepted(flow: Flow, steps: str, slots: str | None = None) -> None:
    verify(plan_of(flow, steps, slots), flow)


def assert_refused(error: type, flow: Flow, steps: str, slots: str | None = None) -> str:
    with pytest.raises(error) as caught:
        verify(plan_of(flow, steps, slots), flow)
    assert len(str(caught.value).splitlines()) <= 12
    return str(caught.value)


CHAIN = flow_of("""
    input x
    one: x -> h
    two: h -> y
    output y
""")


# -- races: read after write, write after read, write after write


def test_rejects_race_read_after_write():
    said = assert_refused(errors.PlanRace, CHAIN, forked("launch one @a\nlaunch two @b"))
    assert said.startswith("'two' on b reads what 'one' on a may still be writing.")
    assert "region   h, all rows" in said and "no path of waits orders a#0 before b#0" in said and said.endswith("two  <-- here\n".strip())


def test_accepts_read_after_write():
    assert_accepted(CHAIN, forked("launch one @a\nrecord e @a\nwait e @b\nlaunch two @b"))


def test_rejects_race_when_the_record_is_too_early():
    assert_refused(errors.PlanRace, CHAIN, forked("record e @a\nlaunch one @a\nwait e @b\nlaunch two @b"))


def test_rejects_race_when_the_wait_is_too_late():
    flow = flow_of("input x\n one: x -> h\n two: h -> y\n three: h -> z\n output y z")
    assert_refused(errors.PlanRace, flow, forked("launch one @a\nrecord e @a\nlaunch two @b\nwait e @b\nlaunch three @b"))


def test_accepts_a_path_over_a_third_stream():
    steps = "launch one @a\nrecord e @a\nwait e @caller\nrecord f @caller\nwait f @b\nlaunch two @b"
    assert_accepted(CHAIN, forked(steps))


def test_rejects_race_write_after_read():
    flow = flow_of("input x\n read: x -> y\n change: x! -> z\n output y z")
    assert_refused(errors.PlanRace, flow, forked("launch read @a\nlaunch change @b"))


def test_accepts_write_after_read():
    flow = flow_of("input x\n read: x -> y\n change: x! -> z\n output y z")
    assert_accepted(flow, forked("launch read @a\nrecord e @a\nwait e @b\nlaunch change @b"))


def test_rejects_race_write_after_write():
    flow = flow_of("input x\n one: x! ->\n two: x! ->\n three: x -> y\n output y")
    assert_refused(errors.PlanRace, flow, forked("launch one @a\nlaunch two @b\nrecord e @b\nwait e @a\nlaunch three @a"))


def test_accepts_two_readers_at_once():
    flow = flow_of("input x\n one: x -> h\n left: h -> y\n right: h -> z\n output y z")
    assert_accepted(flow, forked("launch one @a\nrecord e @a\nwait e @b\nlaunch left @a\nlaunch right @b"))


def test_rejects_race_with_an_older_reader_on_the_same_stream():
    """Two readers of one stream, and a write that waits for the first of them only."""
    flow = flow_of("input x\n r0: x -> y\n r1: x -> z\n change: x! -> u\n output y z u")
    assert_refused(errors.PlanRace, flow, forked("launch r0 @a\nrecord e @a\nlaunch r1 @a\nwait e @b\nlaunch change @b"))


# -- rows


SPLIT = flow_of("input x\n one: x -> h\n two: h -> y\n output y")


def test_accepts_parts_side_by_side():
    assert_accepted(SPLIT, forked("launch one 0/2 @a\nlaunch one 1/2 @b\nlaunch two 0/2 @a\nlaunch two 1/2 @b"))


def test_rejects_race_of_overlapping_rows_of_different_splits():
    assert_refused(errors.PlanRace, SPLIT, forked("launch one 0/2 @a\nlaunch one 1/2 @b\nlaunch two 0/3 @a\nlaunch two 1:3/3 @b"))


def test_accepts_different_splits_where_rows_are_awaited():
    steps = "launch one 0/2 @a\nlaunch one 1/2 @b\nrecord e @a\nlaunch two 0/3 @a\nwait e @b\nlaunch two 1:3/3 @b"
    assert_accepted(SPLIT, forked(steps))


def test_rejects_race_of_a_whole_reader_with_one_part():
    assert_refused(errors.PlanRace, SPLIT, forked("launch one 0/2 @a\nlaunch one 1/2 @b\nlaunch two @b"))


def test_rejects_race_of_parts_that_change_one_state():
    flow = flow_of("input x\n input n state\n bump: x n! -> y\n output y")
    assert_refused(errors.PlanRace, flow, forked("launch bump 0/2 @a\nlaunch bump 1/2 @b"))


def test_accepts_parts_that_change_one_state_in_any_order():
    flow = flow_of("input x\n input n state\n bump: x n! -> y\n output y")
    assert_accepted(flow, forked("launch bump 1/2 @a\nrecord e @a\nwait e @b\nlaunch bump 0/2 @b"))


def test_rejects_race_of_aliased_inputs():
    flow = flow_of("input kv\n input view of kv\n write: kv! ->\n read: view -> y\n output y")
    assert_refused(errors.PlanRace, flow, forked("launch write 0/2 @a\nlaunch write 1/2 @a\nlaunch read @b"))


def test_accepts_aliased_inputs_in_order():
    flow = flow_of("input kv\n input view of kv\n write: kv! ->\n read: view -> y\n output y")
    assert_accepted(flow, forked("launch write 0/2 @a\nlaunch write 1/2 @a\nrecord e @a\nwait e @b\nlaunch read @b"))


def test_rejects_race_with_a_reader_that_an_uneven_write_only_half_covers():
    """`change 0/4` comes after the reader, `change 1:4/4` does not: the reader must not be forgotten by the first."""
    flow = flow_of("input x\n read: x -> y\n change: x! ->\n output y")
    steps = "launch read 0/2 @a\nlaunch read 1/2 @b\nlaunch change 0/4 @a\nlaunch change 1:4/4 @b"
    assert_refused(errors.PlanRace, flow, forked(steps))


# -- program order


def test_rejects_wrong_order_on_one_stream():
    flow = flow_of("input x\n read: x -> y\n change: x! -> z\n output y z")
    said = assert_refused(errors.WrongOrder, flow, "launch change @caller\nlaunch read @caller")
    assert "in the program, read comes before change" in said


def test_rejects_read_of_rows_that_nobody_wrote():
    assert_refused(errors.WrongOrder, CHAIN, "launch two @caller\nlaunch one @caller")


def test_rejects_read_of_one_part_that_nobody_wrote():
    assert_refused(errors.WrongOrder, SPLIT, "launch one 0/2 @caller\nlaunch two @caller\nlaunch one 1/2 @caller")


def test_accepts_program_order_on_the_caller():
    assert_accepted(CHAIN, "launch one @caller\nlaunch two @caller")


def test_rejects_flow_that_reads_what_is_never_made():
    flow = flow_of("input x\n one: h -> y\n two: x -> h\n output y")
    assert_refused(errors.WrongOrder, flow, "launch one @caller\nlaunch two @caller")


def test_rejects_random_ops_out_of_order():
    flow = flow_of("input x\n d0 rng whole: x -> y\n d1 rng whole: x -> z\n output y z")
    assert_refused(errors.WrongOrder, flow, "launch d1 @caller\nlaunch d0 @caller")


def test_rejects_random_ops_side_by_side():
    flow = flow_of("input x\n d0 rng whole: x -> y\n d1 rng whole: x -> z\n output y z")
    assert "region   rng" in assert_refused(errors.PlanRace, flow, forked("launch d0 @a\nlaunch d1 @b"))


def test_accepts_random_ops_in_order():
    flow = flow_of("input x\n d0 rng whole: x -> y\n d1 rng whole: x -> z\n output y z")
    assert_accepted(flow, forked("launch d0 @a\nrecord e @a\nwait e @b\nlaunch d1 @b"))


COLLECTIVES = flow_of("input x\n c0 network group:tp: x -> y\n c1 network group:tp: x -> z\n output y z")


def test_rejects_collectives_of_one_group_side_by_side():
    assert "group:tp" in assert_refused(errors.PlanRace, COLLECTIVES, forked("launch c0 @a\nlaunch c1 @b"))


def test_accepts_collectives_of_one_group_in_any_order():
    assert_accepted(COLLECTIVES, forked("launch c1 @a\nlaunch c0 @a"))


def test_accepts_collectives_of_two_groups_side_by_side():
    flow = flow_of("input x\n c0 network group:tp: x -> y\n c1 network group:ep: x -> z\n output y z")
    assert_accepted(flow, forked("launch c0 @a\nlaunch c1 @b"))


# -- replacements


def test_rejects_race_of_a_replacement():
    flow = flow_of("input x\n one: x -> h\n two: h -> r\n three: r -> y\n output y")
    assert_refused(errors.PlanRace, flow, forked("launch f.g[one, two] @a\nlaunch three @b"), slots="slot 0 r")


def test_rejects_replacement_that_lists_a_reader_before_its_writer():
    """What is listed first is an input of the function: it would get memory that nobody wrote."""
    flow = flow_of("input x\n one: x -> h\n two: h -> r\n three: r -> y\n output y")
    assert_refused(errors.WrongOrder, flow, forked("launch f.g[two, one] @a\nlaunch three @a"))


def test_accepts_replacement_in_the_order_of_the_program():
    flow = flow_of("input x\n one: x -> h\n two: h -> r\n three: r -> y\n output y")
    assert_accepted(flow, forked("launch f.g[one, two] @a\nlaunch three @a"), slots="slot 0 r")


def test_rejects_replacement_that_makes_only_some_rows_that_it_reads():
    flow = flow_of("input x\n one: x -> h\n scan whole: h -> y\n output y")
    said = assert_refused(errors.MalformedPlan, flow, "launch one 0/2 @caller\nlaunch f.g[one 1/2, scan] @caller")
    assert "makes only some of the rows of 'h' that 'scan' in it reads" in said


def test_accepts_replacement_across_parts():
    flow = flow_of("input x\n one: x -> h\n scan whole: h -> y\n output y")
    assert_accepted(flow, "launch f.g[one 0/2, one 1/2, scan] @caller")
    assert_accepted(flow, "launch f.g[one 0/2, one 1/2, scan] @caller", slots="")
    assert_accepted(flow, "launch one 0/2 @caller\nlaunch one 1/2 @caller\nlaunch scan @caller")


def test_accepts_replacement_that_reads_other_rows_than_it_makes():
    assert_accepted(CHAIN, "launch one 0/2 @caller\nlaunch f.g[one 1/2, two 0/2] @caller\nlaunch two 1/2 @caller")


def test_rejects_replacement_around_an_op_in_between():
    flow = flow_of("input x\n one: x -> h\n two: h -> r\n three: r -> y\n output y")
    assert_refused(errors.WrongOrder, flow, forked("launch f.g[one, three] @a\nlaunch two @a"))


# -- fused launches


LINE = flow_of("input x\n one: x -> h\n two: h -> r\n three: r -> y\n output y")


def test_accepts_fused_launch():
    assert_accepted(LINE, forked("launch [one, two] @a\nlaunch three @a"), slots="slot 0 r")
    assert_accepted(LINE, "launch [one, two, three] @caller", slots="")


def test_rejects_swapped_calls_inside_a_fused_launch():
    said = assert_refused(errors.WrongOrder, LINE, forked("launch [two, one] @a\nlaunch three @a"))
    assert "in 'two..one' on a, one writes what two reads, and comes too late" in said


def test_rejects_fused_launch_around_an_op_in_between():
    assert_refused(errors.WrongOrder, LINE, forked("launch [one, three] @a\nlaunch two @a"))


def test_rejects_race_of_a_fused_launch():
    assert_refused(errors.PlanRace, LINE, forked("launch [one, two] @a\nlaunch three @b"), slots="slot 0 r")


def test_rejects_fused_launch_across_the_wait_that_its_second_op_needs():
    good = "launch one @b\nrecord e @b\nwait e @a\nlaunch [two, three] @a"
    flow = flow_of("input x\n free: x -> z\n one: x -> h\n two: h -> r\n three: r -> y\n output y z")
    assert_accepted(flow, forked("launch free @a\n" + good), slots="slot 0 h")
    assert_refused(errors.PlanRace, flow, forked("launch [free, two] @a\nlaunch one @b\nrecord e @b\nwait e @a\nlaunch three @a"))


def test_rejects_change_in_place_before_its_reader_in_a_fused_launch():
    flow = flow_of("input x\n one: x -> h\n look: h -> y\n add: h!\n last: h -> z\n output y z")
    assert_accepted(flow, "launch [one, look, add, last] @caller", slots="")
    assert_refused(errors.WrongOrder, flow, "launch [one, add, look, last] @caller")


def test_rejects_slot_shared_inside_a_fused_launch():
    flow = flow_of("input x\n one: x -> h\n two: h -> r\n three: r -> s\n four: s -> y\n output y")
    assert_accepted(flow, "launch one @caller\nlaunch two @caller\nlaunch three @caller\nlaunch four @caller", slots="slot 0 h s\nslot 1 r")
    assert_refused(
        errors.LiveOverlap, flow, "launch one @caller\nlaunch [two, three] @caller\nlaunch four @caller", slots="slot 0 h s\nslot 1 r")


# -- start and end


def test_rejects_unstarted_stream():
    said = assert_refused(errors.UnjoinedStream, CHAIN, "launch one @a\nlaunch two @a\nrecord e @a\nwait e @caller")
    assert "may start before the caller's work is done" in said


def test_accepts_start_through_another_stream():
    steps = "record start @caller\nwait start @a\nlaunch one @a\nrecord e @a\nwait e @b\nlaunch two @b\nrecord f @b\nwait f @caller"
    assert_accepted(CHAIN, steps)


def test_rejects_unjoined_stream():
    said = assert_refused(errors.UnjoinedStream, CHAIN, "record start @caller\nwait start @a\nlaunch one @a\nlaunch two @a")
    assert "the caller may continue before 'two' on a is done" in said


def test_rejects_join_before_the_last_launch():
    steps = "record start @caller\nwait start @a\nlaunch one @a\nrecord e @a\nlaunch two @a\nwait e @caller"
    assert_refused(errors.UnjoinedStream, CHAIN, steps)


def test_accepts_join_through_another_stream():
    flow = flow_of("input x\n one: x -> y\n two: x -> z\n output y z")
    assert_accepted(flow, forked("launch one @a\nrecord e @a\nlaunch two @b\nwait e @b", joins="record f @b\nwait f @caller"))


def test_accepts_an_empty_plan_of_an_empty_flow():
    flow = flow_of("input x\n output x")
    assert_accepted(flow, "")


# -- slots


REUSE = flow_of("""
    input x
    one: x -> h
    two: h -> r
    three: r -> s
    four: s -> y
    output y
""")


def test_accepts_slot_after_the_last_reader():
    assert_accepted(REUSE, "\n".join(f"launch {op} @caller" for op in ("one", "two", "three", "four")), slots="slot 0 h s\nslot 1 r")


def test_rejects_slot_of_what_the_same_op_reads():
    said = assert_refused(
        errors.LiveOverlap, REUSE, "\n".join(f"launch {op} @caller" for op in ("one", "two", "three", "four")), slots="slot 0 h r\nslot 1 s"
    )
    assert "'two' uses 'h' and 'r', which share memory" in said


SIDE = flow_of("""
    input x
    one: x -> h
    two: h -> y
    three: x -> s
    four: s -> z
    output y z
""")


def test_rejects_slot_with_an_unordered_reader():
    steps = forked("launch one @a\nlaunch two @a\nlaunch three @b\nlaunch four @b")
    said = assert_refused(errors.LiveOverlap, SIDE, steps, slots="slot 0 h s")
    assert "'three' on b writes 's' over 'h', which 'two' on a may still use" in said


def test_accepts_slot_with_an_ordered_reader():
    steps = "launch one @a\nlaunch two @a\nrecord e @a\nwait e @b\nlaunch three @b\nlaunch four @b"
    assert_accepted(SIDE, forked(steps), slots="slot 0 h s")


def test_rejects_slot_of_interleaved_values():
    steps = "\n".join(f"launch {op} @caller" for op in ("one", "three", "two", "four"))
    said = assert_refused(errors.LiveOverlap, SIDE, steps, slots="slot 0 h s")
    assert "'two' on caller reads 'h', which 'three' overwrote with 's'" in said


def test_rejects_slot_when_only_the_first_part_is_ordered():
    """Rows of two values in one slot are not the same bytes: every part must come after every part."""
    steps = "launch one 0/2 @a\nlaunch two 0/2 @a\nlaunch one 1/2 @b\nlaunch two 1/2 @b\nrecord f @b\nwait f @a\n"
    steps += "launch three 0/2 @a\nlaunch three 1/2 @b\nrecord g @a\nwait g @b\nlaunch four @b"
    assert "'three 1/2' on b writes 's' over 'h'" in assert_refused(errors.LiveOverlap, SIDE, forked(steps), slots="slot 0 h s")


def test_accepts_slot_when_all_parts_are_ordered():
    steps = "launch one 0/2 @a\nlaunch two 0/2 @a\nrecord e @a\nlaunch one 1/2 @b\nlaunch two 1/2 @b\nrecord f @b\nwait f @a\nwait e @b\n"
    steps += "launch three 0/2 @a\nlaunch three 1/2 @b\nrecord g @a\nwait g @b\nlaunch four @b"
    assert_accepted(SIDE, forked(steps), slots="slot 0 h s")


def test_rejects_slot_shared_inside_a_replacement():
    assert_refused(errors.LiveOverlap, REUSE, "launch f.g[one, two, three] @caller\nlaunch four @caller", slots="slot 0 h s\nslot 1 r")


def test_long_stretches_are_left_out_of_the_picture():
    flow = flow_of("input x\n one: x -> h\n" + "\n".join(f"p{i}: x -> q{i}" for i in range(20)) + "\n two: h -> y\n output y")
    steps = forked("launch one @a\n" + "\n".join(f"launch p{i} @a" for i in range(20)) + "\nlaunch two @b")
    assert "..." in assert_refused(errors.PlanRace, flow, steps)
