"""State that parts have nothing in common of, because the caller vouches for it: side by side there, and refused everywhere else."""

from dataclasses import replace

import pytest

from dynaflow.context import Context
from dynaflow.errors import ContextMismatch, DynaFlowError, PlanRace
from dynaflow.ir import CALLER, Wait
from dynaflow.memory import place
from dynaflow.planner import plan
from dynaflow.strategies import PrefillDecode
from dynaflow.sync import synchronise
from dynaflow.testing.notation import flow_of
from dynaflow.verify import verify
from tests.cpu.strategies.plans import beside


def layers(uses, whole=""):
    """Two layers, whose attentions use this; and an op over the whole batch that uses what `whole` says."""
    return flow_of(f"""
        input x
        L0.qkv: x -> q0
        L0.attn {uses}: q0 -> a0
        L0.o: a0 -> x1
        L1.attn {uses}: x1 -> a1
        L1.sum whole {whole}: a1 -> y
        output y""")


def launches(flow, **tags):
    """As the strategy had them, without waits."""
    tags = {"tag.num_prefill": 5, **{f"tag.{name}": value for name, value in tags.items()}}
    return plan(flow, PrefillDecode(), Context({"batch_size": 64, "device": "cpu", **tags}))


def finished(flow, made):
    made = place(flow, synchronise(flow, made))
    verify(made, flow)
    return made


PAIR = ("L0.attn 0/2", "L0.attn 1/2")
VOUCHED = ("kv:*", (5,))


def test_attentions_run_in_order_unless_the_caller_vouches_for_the_cut():
    flow = layers("kv:0")
    for tags in ({}, {"apart": ("kv:*", (6,))}, {"apart": ("kv:*", (5,)), "first": "decode"}, {"apart": ("other:*", (5,))}):
        made = launches(flow, **tags)
        assert PAIR not in beside(finished(replace(flow, apart="other:*" if made.flow != flow.label else ""), made))
    apart = replace(flow, apart="kv:*")
    for tags in ({"apart": VOUCHED}, {"apart": ("kv:*", (59,)), "first": "decode"}):
        assert PAIR in beside(finished(apart, launches(flow, **tags)))


def test_rejects_the_plan_where_nobody_vouches():
    flow = layers("kv:0")
    made = finished(replace(flow, apart="kv:*"), launches(flow, apart=VOUCHED))
    with pytest.raises(ContextMismatch):
        verify(made, flow)
    with pytest.raises(PlanRace, match="L0.attn 1/2"):
        verify(replace(made, flow=flow.label), flow)
    verify(replace(synchronise(flow, made), flow=flow.label), flow)  # the twin: with the waits that it then needs


def test_every_wait_is_still_needed():
    flow = layers("kv:0", whole="kv:0")
    apart = replace(flow, apart="kv:*")
    made = finished(apart, launches(flow, apart=VOUCHED))
    assert PAIR in beside(made)
    for at, step in enumerate(made.steps):
        if type(step) is Wait:
            with pytest.raises(DynaFlowError):
                verify(replace(made, steps=made.steps[:at] + made.steps[at + 1 :]), apart)


@pytest.mark.parametrize("uses", ["kv:0 work:space", "kv:0 rng", "kv:0 group:tp", "work:space"])
@pytest.mark.parametrize("vouched", ["kv:*", "*"])
def test_what_is_not_vouched_for_stays_in_order(uses, vouched):
    """Memory that ops compute in; and what is no state of the caller's: the engine's own tokens."""
    flow = layers(uses)
    made = finished(replace(flow, apart=vouched), launches(flow, apart=(vouched, (5,))))
    assert (PAIR in beside(made)) == (vouched == "*" and "work" in uses)


def test_a_user_over_the_whole_batch_waits_for_both_and_both_for_it():
    flow = layers("kv:0", whole="kv:0")
    made = finished(replace(flow, apart="kv:*"), launches(flow, apart=VOUCHED))
    assert not any("L1.sum" in pair for pair in beside(made))
    on_caller = replace(made, steps=tuple(replace(s, stream=CALLER) for s in made.launches), streams=())
    verify(on_caller, replace(flow, apart="kv:*"))


@pytest.mark.parametrize("rows, why", [(("a", "b"), "one part must have the rest"), (("a", "-1", "b"), "multiples of 1/3")])
def test_rejects_rows_that_do_not_say_where_it_is_cut(rows, why):
    flow = layers("kv:0")
    made = finished(flow, launches(flow))
    with pytest.raises(DynaFlowError) as error:
        verify(replace(made, rows=rows), flow)
    assert why in error.value.why
