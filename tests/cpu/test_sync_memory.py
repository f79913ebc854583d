"""synchronise adds the fewest waits; place shares memory only between values whose lives are ordered."""

import random
from dataclasses import replace

import pytest

from dynaflow.context import Context
from dynaflow.errors import PlanRefused
from dynaflow.ir import Plan, Wait
from dynaflow.memory import ALIGNMENT, bind_memory, pack, place
from dynaflow.planner import plan, sequential_plan
from dynaflow.strategies import Branches, NanoBatch, TwoBatch
from dynaflow.sync import synchronise
from dynaflow.testing import fuzz, random_flow, show_wrong
from dynaflow.testing.notation import flow_of
from dynaflow.verify import verify, verify_memory
from tests.cpu.flows import chain, diamond, stateful

CASES = [
    (chain(4), TwoBatch()), (chain(4), NanoBatch(3)), (diamond(), Branches(2)),
    (diamond(), Branches(3)), (stateful(), TwoBatch()), (stateful(), Branches(2)),
]  # fmt: skip


def made(flow, strategy):
    return place(flow, synchronise(flow, plan(flow, strategy, Context({"batch_size": 12}))))


@pytest.mark.parametrize(("flow", "strategy"), CASES, ids=str)
def test_no_wait_can_be_left_out(flow, strategy):
    p = made(flow, strategy)
    assert verify(p, flow)
    for i, step in enumerate(p.steps):
        if isinstance(step, Wait):
            with pytest.raises(PlanRefused):
                verify(replace(p, steps=p.steps[:i] + p.steps[i + 1 :]), flow)


def test_a_sequential_plan_needs_no_event():
    p = synchronise(chain(), sequential_plan(chain(), "why not"))
    assert p.steps == p.launches


def test_waits_of_two_batch_on_a_chain():
    p = made(chain(2), TwoBatch())
    # two streams start, each part crosses over and back: compute->comm 4 times, comm->compute 2 times, and one join
    assert len(p.waits) == 1 + 4 + 2 + 1


@pytest.mark.parametrize(("flow", "strategy"), CASES, ids=str)
@pytest.mark.parametrize("batch_size", [3, 12, 1000])
def test_memory_holds_for_every_size(flow, strategy, batch_size):
    p = made(flow, strategy)
    memory = bind_memory(flow, p, {"s0": batch_size})
    verify_memory(flow, p, memory)
    assert set(memory.offsets) == {v.name for v in flow.values if v.role == "temp"}
    assert all(offset % ALIGNMENT == 0 for offset, _ in memory.offsets.values())


# -- bytes instead of slots


@pytest.mark.parametrize(("flow", "strategy"), CASES, ids=str)
@pytest.mark.parametrize("batch_size", [3, 12, 1000])
def test_packed_memory_is_in_order_and_takes_no_more(flow, strategy, batch_size):
    p, sizes = made(flow, strategy), {"s0": batch_size}
    memory = pack(flow, p, sizes)
    verify_memory(flow, p, memory, sizes)
    assert memory.arena_bytes <= bind_memory(flow, p, sizes).arena_bytes
    assert all(offset % ALIGNMENT == 0 for offset, _ in memory.offsets.values())


def sized(flow, **sizes):
    return replace(flow, values=tuple(replace(v, nbytes=str(sizes.get(v.name, 0) * ALIGNMENT)) for v in flow.values))


def test_two_small_values_lie_where_a_large_one_was():
    """Slots would be as large as the largest value in each: h, and s beside r."""
    flow = sized(flow_of("input x\n a: x -> h\n b: h -> q\n c: q -> r\n d: q r -> s\n e: r s -> y\n output y"), h=4, q=1, r=2, s=2)
    p = place(flow, sequential_plan(flow, ""))
    assert bind_memory(flow, p, {}).arena_bytes > 5 * ALIGNMENT
    packed = pack(flow, p, {})
    verify_memory(flow, p, packed, {})
    assert packed.arena_bytes == 5 * ALIGNMENT, "h and q are alive at once, and so are q, r and s"


def test_bytes_are_shared_only_where_streams_order_it():
    """w is dead when r is written if both are on one stream; on two, nothing says so."""
    text = "plan {}\nstream one\nstream two\nlaunch a @one\nlaunch b @one\nlaunch c @{}\nlaunch d @{}\n"
    flow = sized(flow_of("input x\n a: x -> w\n b: w -> y\n c: x -> r\n d: r -> z\n output y z"), w=3, r=2)
    for other, num in (("one", 3), ("two", 5)):
        p = place(flow, synchronise(flow, Plan.parse(text.format(flow.label, other, other))))
        packed = pack(flow, p, {})
        verify_memory(flow, p, packed, {})
        assert packed.arena_bytes == num * ALIGNMENT


@pytest.mark.parametrize("seed", range(25))
def test_nothing_is_wrong_with_packed_memory(seed):
    """Random flows and plans, run under several interleavings: the oracle knows nothing of lifetimes."""
    case, rng = random_flow(seed), random.Random(seed)
    for strategy in rng.sample(fuzz.strategies(case), 2):
        p, functions = fuzz.make_plan(case, strategy, rng)
        memory = pack(case.flow, p, case.sizes)
        verify_memory(case.flow, p, memory, case.sizes)
        assert not show_wrong(p, case, case.reference(), num_interleavings=6, seed=seed, memory=memory, functions=functions)


def test_a_long_chain_reuses_memory():
    flow = chain(50)
    p = made(flow, TwoBatch())
    one = 256 * 12
    assert bind_memory(flow, p, {"s0": 12}).arena_bytes <= 4 * one, "99 values must not take more than a few buffers"


def test_a_home_has_one_slot_for_as_long_as_any_piece_lives():
    """v dies before the first piece, w begins behind the last reader of one: in turn. m lives beside a piece: not in that slot."""
    flow = flow_of("input x\n home h p q\n a: x -> v\n b: v -> u\n c: u -> p\n d: p -> m\n e: m -> q\n f: q -> w\n g: w -> y\n output y")
    slots = dict(place(flow, synchronise(flow, sequential_plan(flow, ""))).slots)
    assert set(slots) == {"v", "u", "h", "m", "w"}, "pieces have none"
    assert slots["v"] == slots["h"] != slots["m"] and slots["w"] != slots["h"], "f reads q while it writes w"


def test_pieces_are_born_with_the_first_of_them():
    """One stream knows that b is done with v, the other does not."""
    flow = flow_of("input x\n home h p q\n a: x -> v\n b: v -> u\n c: x -> p\n d: x -> q\n e: h u -> y\n output y")
    steps = "stream one\nstream two\nlaunch a @one\nlaunch b @one\nlaunch {} @one\nlaunch {} @two\nlaunch e @one\n"
    for launches in (("c", "d"), ("d", "c")):
        waiting = synchronise(flow, Plan.parse(f"plan {flow.label}\n{steps.format(*launches)}"))
        slots = dict(place(flow, waiting).slots)
        assert slots["h"] != slots["v"], "one of the pieces may be written while v is read"
        with pytest.raises(PlanRefused):
            verify(replace(place(flow, waiting), slots=(("v", 0), ("h", 0), ("u", 1))), flow)
    in_order = place(flow, sequential_plan(flow, ""))
    assert dict(in_order.slots)["h"] == dict(in_order.slots)["v"] and verify(in_order, flow)


def test_a_fingerprint_knows_homes_and_is_as_ever_without_them():
    assert chain().label == "chain.733154b2"
    flow = flow_of("input x\n home h p q\n a: x -> p q\n b: h -> y\n output y")
    apart = replace(flow, values=tuple(replace(v, home="", role="temp") if v.home else v for v in flow.values))
    other = replace(flow, values=tuple(replace(v, home="y") if v.name == "p" else v for v in flow.values))
    assert len({flow.fingerprint, apart.fingerprint, other.fingerprint}) == 3


def test_serialised_is_the_same_launches_on_the_callers_stream():
    flow = chain(4)
    p = made(flow, TwoBatch())
    s = p.serialised()
    assert [launch.calls for launch in s.launches] == [launch.calls for launch in p.launches]
    assert {launch.stream for launch in s.launches} == {"caller"} and not s.waits
    assert verify(s, flow)
