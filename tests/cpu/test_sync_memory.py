"""synchronise adds the fewest waits; place shares memory only between values whose lives are ordered."""

from dataclasses import replace

import pytest

from dynaflow.context import Context
from dynaflow.errors import PlanRefused
from dynaflow.ir import Wait
from dynaflow.memory import ALIGNMENT, bind_memory, place
from dynaflow.planner import plan, sequential_plan
from dynaflow.strategies import Branches, NanoBatch, TwoBatch
from dynaflow.sync import synchronise
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


def test_a_long_chain_reuses_memory():
    flow = chain(50)
    p = made(flow, TwoBatch())
    one = 256 * 12
    assert bind_memory(flow, p, {"s0": 12}).arena_bytes <= 4 * one, "99 values must not take more than a few buffers"


def test_serialised_is_the_same_launches_on_the_callers_stream():
    flow = chain(4)
    p = made(flow, TwoBatch())
    s = p.serialised()
    assert [launch.calls for launch in s.launches] == [launch.calls for launch in p.launches]
    assert {launch.stream for launch in s.launches} == {"caller"} and not s.waits
    assert verify(s, flow)
