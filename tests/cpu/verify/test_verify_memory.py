"""Bytes of a bound plan: intervals are compared, not start addresses."""

from dataclasses import dataclass
from types import MappingProxyType

import pytest

from dynaflow import errors
from dynaflow.ir import Plan
from dynaflow.testing.notation import flow_of
from dynaflow.verify import verify, verify_memory

# h and r live at the same time; s begins when h is dead.
FLOW = flow_of("""
    input x
    one: x -> h
    two: h -> r
    three: r -> s
    four: s -> y
    output y
""")
PLAN = Plan.parse(f"""
plan {FLOW.label}
slot 0 h s
slot 1 r
launch one @caller
launch two @caller
launch three @caller
launch four @caller
""")
SIZES = {"s0": 4}  # 64 bytes each


@dataclass(frozen=True)
class Memory:
    offsets: MappingProxyType
    arena_bytes: int


def memory(h: int, r: int, s: int, arena_bytes: int = 192, nbytes: int = 64) -> Memory:
    return Memory(MappingProxyType({"h": (h, nbytes), "r": (r, nbytes), "s": (s, nbytes)}), arena_bytes)


def assert_refused(error: type, bound: Memory) -> str:
    with pytest.raises(error) as caught:
        verify_memory(FLOW, PLAN, bound, SIZES)
    assert len(str(caught.value).splitlines()) <= 12
    return str(caught.value)


def test_accepts_reuse_of_dead_bytes():
    verify(PLAN, FLOW)
    verify_memory(FLOW, PLAN, memory(0, 64, 0), SIZES)


def test_accepts_partial_reuse_of_dead_bytes():
    verify_memory(FLOW, PLAN, memory(0, 96, 32), SIZES)


def test_accepts_buffers_that_touch():
    verify_memory(FLOW, PLAN, memory(64, 128, 0), SIZES)


def test_rejects_the_same_bytes_alive():
    assert "'r' lies on bytes of 'h', which is still alive" in assert_refused(errors.LiveOverlap, memory(0, 0, 64))


@pytest.mark.parametrize("offset", [1, 8, 63])
def test_rejects_overlap_of_another_start(offset):
    assert f"arena[{offset:#x}:0x40]" in assert_refused(errors.LiveOverlap, memory(0, offset, 128))


def test_rejects_overlap_with_the_second_of_two_holders():
    assert_refused(errors.LiveOverlap, memory(0, 64, 32))


def test_rejects_buffer_behind_the_arena():
    assert "lies outside the arena" in assert_refused(errors.ArenaOverflow, memory(0, 64, 129))


def test_rejects_buffer_before_the_arena():
    assert_refused(errors.ArenaOverflow, memory(-1, 64, 0))


def test_accepts_buffer_that_ends_with_the_arena():
    verify_memory(FLOW, PLAN, memory(0, 64, 128), SIZES)


def test_rejects_buffer_that_is_too_small():
    assert "has 32 bytes and needs 64" in assert_refused(errors.ArenaOverflow, memory(0, 64, 128, nbytes=32))


def test_rejects_value_without_bytes():
    with pytest.raises(errors.MalformedPlan, match="'s' has a slot and no bytes"):
        verify_memory(FLOW, PLAN, Memory(MappingProxyType({"h": (0, 64), "r": (64, 64)}), 192), SIZES)


def test_rejects_bytes_of_an_unknown_value():
    with pytest.raises(errors.MalformedPlan, match="no slot in the plan"):
        verify_memory(FLOW, PLAN, Memory(MappingProxyType({**memory(0, 64, 128).offsets, "zzz": (0, 8)}), 192), SIZES)


def test_accepts_empty_buffers_anywhere():
    verify_memory(FLOW, PLAN, memory(0, 0, 0, arena_bytes=0, nbytes=0), {"s0": 0})


def test_rejects_overlap_of_unordered_streams():
    flow = flow_of("input x\n one: x -> h\n two: h -> y\n three: x -> s\n four: s -> z\n output y z")
    text = (
        "plan {}\nstream a\nstream b\nslot 0 h\nslot 1 s\nrecord start @caller\nwait start @a\nwait start @b\nlaunch one @a\n"
        "launch two @a\n{}launch three @b\nlaunch four @b\nrecord ja @a\nrecord jb @b\nwait ja @caller\nwait jb @caller"
    )
    both = Memory(MappingProxyType({"h": (0, 64), "s": (32, 64)}), 96)
    unordered, ordered = (Plan.parse(text.format(flow.label, waits)) for waits in ("", "record e @a\nwait e @b\n"))
    verify_memory(flow, ordered, both, SIZES)
    with pytest.raises(errors.LiveOverlap):
        verify_memory(flow, unordered, both, SIZES)
