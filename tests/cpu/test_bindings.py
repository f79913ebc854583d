"""What runs for which sizes and tags: kept, bounded, refused, and never waited for where it is known."""

import contextlib
import gc
import threading
import weakref

import pytest
import torch
from torch import nn

import dynaflow as df
from dynaflow import capture, errors
from dynaflow.inductor.units import CompiledUnit
from dynaflow.runtime.binder import Binder
from tests.cpu.test_engine import assert_same, no_grad  # noqa: F401  (no_grad is a fixture)


class HalfAndRest(df.Strategy):
    """It looks at the exact size, so that every size has a plan of its own."""

    def schedule(self, flow):
        flow.split([int(flow.context.batch_size) // 2, -1])
        while ready := flow.get_ready_ops():
            flow.execute(ready[0])


@pytest.mark.parametrize("runtime", ["serial", "threads"])
def test_plans_of_exact_sizes_are_not_kept_for_good(monkeypatch, runtime):
    monkeypatch.setattr("dynaflow.bindings.MAX_PLANS", 3)
    alive, make = weakref.WeakSet(), Binder.__init__

    def init(self, *args):
        alive.add(self)
        make(self, *args)

    monkeypatch.setattr(Binder, "__init__", init)
    fast = df.compile(torch.tanh, strategy=HalfAndRest(), runtime=runtime, strict=True)
    for n in (*range(2, 12), 2, 11):
        x = torch.randn(n, 3)
        assert_same(fast(x), torch.tanh(x))
        assert torch.equal(fast(x), df.run_serialised(fast, x))
    assert df.stats(fast).plans == 11, "of twelve sizes, 2 was planned twice, and 11 was still there"
    gc.collect()
    assert len(alive) <= 2 * 3, "a plan and its twin on one stream each"


class PartByPart(HalfAndRest):
    """What of a part comes one behind the other is one unit, made for this plan."""

    def schedule(self, flow):
        flow.split([int(flow.context.batch_size) // 2, -1])
        while ready := flow.get_ready_ops():
            flow.execute(min(ready, key=lambda r: (r.part, r.depth)))


def test_units_that_were_compiled_for_a_plan_go_with_it(monkeypatch):
    monkeypatch.setattr("dynaflow.bindings.MAX_PLANS", 2)
    alive, make = weakref.WeakSet(), CompiledUnit.__init__

    def init(self, *args):
        alive.add(self)
        make(self, *args)

    monkeypatch.setattr(CompiledUnit, "__init__", init)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)).requires_grad_(False)
    fast = df.compile(model, strategy=PartByPart(), partition=[df.SplitModule("*")], compiler="inductor", runtime="serial", strict=True)
    made = []
    for n in range(4, 11):
        x = torch.randn(n, 8)
        torch.testing.assert_close(fast(x), model(x))
        made.append(len(alive))
    gc.collect()
    assert df.stats(fast).plans == 7 and len(alive) <= made[1], "as many as there were with two plans"


def test_a_plan_for_many_sizes_stays(monkeypatch):
    """The twin: what does not look at exact sizes has one plan for all of them."""
    monkeypatch.setattr("dynaflow.bindings.MAX_PLANS", 1)
    fast = df.compile(torch.tanh, strategy=df.TwoBatch(), strict=True)
    for n in (*range(2, 12), 2):
        x = torch.randn(n, 3)
        assert_same(fast(x), torch.tanh(x))
    assert df.stats(fast).plans == 1


class ByPhase(df.Strategy):
    def schedule(self, flow):
        return df.TwoBatch().schedule(flow) if flow.context.tags.get("phase") != "decode" else flow.sequential("decoding")


KNOWN = {
    "one plan": (df.TwoBatch(), {"runtime": "graph"}), "a plan per tag": (ByPhase(), {"runtime": "graph"}),
    "moved cuts": (df.TwoBatch(), {"runtime": "serial", "align": lambda rows: [row - 1 for row in rows]}),
}  # fmt: skip


@pytest.mark.parametrize("known", KNOWN)
def test_known_calls_do_not_wait_for_a_thread_that_plans(known):
    """Planning may compile, measure, and wait for other ranks: all of it under the lock."""
    strategy, options = KNOWN[known]
    fast = df.compile(torch.tanh, strategy=strategy, strict=True, **options)
    x, results, is_warm, is_held = torch.randn(4, 3), [], threading.Event(), threading.Event()

    def calls():
        for _ in range(3):
            fast(x)
        is_warm.set()
        is_held.wait(10)
        results.extend(fast(x) for _ in range(3))

    thread = threading.Thread(target=calls)
    thread.start()
    assert is_warm.wait(60)
    with capture.of(fast).settings.lock:
        is_held.set()
        thread.join(10)
        assert not thread.is_alive()
    assert len(results) == 3 and all(torch.equal(result, torch.tanh(x)) for result in results)


class WrongInPrefill(df.Strategy):
    def schedule(self, flow):
        if flow.context.tags.get("phase") == "prefill":
            return flow.split(2)  # and executes nothing
        return df.TwoBatch().schedule(flow)


def test_a_mistake_in_one_context_is_none_in_another():
    """By the tags that it looked at, too; and where it looks the same, the strategy does not run again."""
    fast = df.compile(torch.tanh, strategy=WrongInPrefill(), runtime="serial")
    strict = df.compile(torch.tanh, strategy=WrongInPrefill(), runtime="serial", strict=True)
    x = torch.randn(4, 3)
    for phase, num_falls, num_plans in (("prefill", 1, 0), ("decode", 1, 1), ("prefill", 2, 1), ("decode", 2, 1)):
        with df.context(phase=phase):
            assert_same(fast(x), torch.tanh(x))
        assert (sum(df.stats(fast).fallbacks.values()), df.stats(fast).plans) == (num_falls, num_plans)
    errors_seen = []
    for n in (4, 4, 6):
        with df.context(phase="prefill"), pytest.raises(errors.StrategyError) as caught:
            strict(torch.randn(n, 3))
        errors_seen.append(caught.value)
    assert len({id(error) for error in errors_seen}) == 3 and len({str(error) for error in errors_seen}) == 1


class RefusedFor(df.Strategy):
    """It raises, or returns without having done anything, and counts how often it was asked."""

    def __init__(self, make_error):
        self.make_error, self.num_asked = make_error, 0

    def schedule(self, flow):
        self.num_asked += 1
        if flow.context.batch_size < 100:
            if self.make_error is not None:
                raise self.make_error()
            return flow.split(2)
        return flow.sequential("large")


REFUSALS = {"raised": lambda: KeyError("no such op"), "its own": lambda: errors.BatchTooSmall("too small for me."), "nothing done": None,
            "text": lambda: df.Plan.parse("plan of.3f2a90b1\nnonsense")}  # fmt: skip


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("refusal", REFUSALS)
def test_what_a_strategy_is_refused_for_is_kept_once_and_nothing_of_the_call(refusal, strict):
    """Not what it was called with: that would be kept for every size."""
    strategy = RefusedFor(REFUSALS[refusal])
    fast = df.compile(torch.tanh, strategy=strategy, runtime="serial", strict=strict)
    given, seen, causes = [], [], []
    for n in (4, 5, 5, 6):
        x = torch.randn(n, 3)
        given.append(weakref.ref(x))
        try:
            assert_same(fast(x), torch.tanh(x))
        except (errors.StrategyError, errors.PlanSyntaxError) as error:
            seen.append(str(error))
            causes.append(type(error.__cause__))
        del x
    gc.collect()
    assert strategy.num_asked == 1 and [each() for each in given] == [None] * 4
    reasons = df.stats(fast).fallbacks
    assert (len(seen), len(set(seen)), sum(reasons.values())) == ((4, 1, 0) if strict else (0, 0, 4))
    assert "our bug" not in str(reasons) + str(seen)
    if strict and refusal == "raised":
        assert causes == [KeyError, *[type(None)] * 3], "where it came from is shown with the first"


@pytest.mark.parametrize("strict", [False, True])
def test_a_mistake_of_ours_is_said_to_be_ours(monkeypatch, strict):
    monkeypatch.setattr("dynaflow.planning.finish_plan", lambda *_: {}["of ours"])
    fast = df.compile(torch.tanh, strategy=df.TwoBatch(), runtime="serial", strict=strict)
    x = torch.randn(4, 3)
    with pytest.raises(errors.DynaFlowError, match="it is our bug") if strict else contextlib.nullcontext() as caught:
        assert_same(fast(x), torch.tanh(x))
    said = str(caught.value) if strict else next(iter(df.stats(fast).fallbacks))
    assert "the graph could not be planned: KeyError: 'of ours'" in said
    assert not strict or isinstance(caught.value.__cause__, KeyError)


def test_a_graph_that_is_refused_is_refused_anew_each_time():
    """One error that is raised again and again would keep the frames of every call."""
    fast = df.compile(lambda x: x.clone().unsqueeze_(0) * 2, strategy=df.TwoBatch(), strict=True)
    given, lengths = [], []
    for _ in range(3):
        x = torch.randn(4, 3)
        given.append(weakref.ref(x))
        with pytest.raises(errors.DynaFlowError, match="changes the shape of a tensor in place") as caught:
            fast(x)
        lengths.append(len(caught.traceback))
        del x, caught
    gc.collect()
    assert len(set(lengths)) == 1 and [each() for each in given] == [None] * 3
