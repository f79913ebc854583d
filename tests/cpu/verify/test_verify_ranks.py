"""Collectives in the same order on every rank."""

import pytest

from dynaflow import errors
from dynaflow.ir import Plan
from dynaflow.testing.notation import flow_of
from dynaflow.verify import verify_ranks

FLOW = flow_of("""
    input x
    a: x -> h
    c0 network group:tp: h -> y
    c1 network group:ep: x -> z
    output y z
""")


def plan_of(*launches: str) -> Plan:
    return Plan.parse(f"plan {FLOW.label}\nslot 0 h\n" + "\n".join(f"launch {launch} @caller" for launch in launches))


ONE = plan_of("a", "c0 0/2", "c0 1/2", "c1")


def test_accepts_one_plan_on_all_ranks():
    verify_ranks([ONE, ONE, ONE], FLOW)


def test_accepts_other_ops_in_another_place():
    verify_ranks([ONE, plan_of("a 0/2", "c0 0/2", "a 1/2", "c0 2:4/4", "c1")], [FLOW, FLOW])


def test_rejects_another_order():
    with pytest.raises(errors.RankMismatch) as caught:
        verify_ranks([ONE, ONE, plan_of("a", "c0 0/2", "c1", "c0 1/2")], FLOW)
    said = str(caught.value)
    assert said.startswith("collective 1 is 'c0' over rows 1/2 to 1/1 on rank 0 and 'c1' on rank 2.")
    assert said.endswith("<-- here") and len(said.splitlines()) <= 12


def test_rejects_another_part_order():
    with pytest.raises(errors.RankMismatch):
        verify_ranks([ONE, plan_of("a", "c0 1/2", "c0 0/2", "c1")], FLOW)


def test_rejects_another_split():
    with pytest.raises(errors.RankMismatch):
        verify_ranks([ONE, plan_of("a", "c0", "c1")], FLOW)


def test_rejects_missing_collective():
    with pytest.raises(errors.RankMismatch, match="'c1' on rank 0 and missing on rank 1"):
        verify_ranks([ONE, plan_of("a", "c0 0/2", "c0 1/2")], FLOW)


def test_rejects_flows_that_do_not_match_the_ranks():
    with pytest.raises(errors.RankMismatch, match="2 plans and 1 flow"):
        verify_ranks([ONE, ONE], [FLOW])


def test_accepts_no_ranks():
    verify_ranks([], FLOW)


def test_accepts_the_same_function_in_their_place():
    fused = plan_of("pkg.chunked(num_chunks=4)[a, c0]", "c1")
    verify_ranks([fused, fused], FLOW)


def test_rejects_another_number_of_chunks():
    with pytest.raises(errors.RankMismatch, match=r"chunked\(num_chunks=4\)\[c0\]' on rank 0 and .*num_chunks=2"):
        verify_ranks([plan_of(f"pkg.chunked(num_chunks={n})[a, c0]", "c1") for n in (4, 2)], FLOW)
