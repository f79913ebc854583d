"""Steps of an engine that is made up: whatever is decided about one, its result is that of the whole (`ToySteps.serve` compares)."""

import logging

import numpy as np
import pytest
import torch
from torch._dynamo.exc import TorchDynamoException

import dynaflow as df
from dynaflow import planned
from dynaflow.errors import RankMissing
from dynaflow.integrations import steps as module
from dynaflow.integrations.ops import tell_split_rules
from dynaflow.integrations.step_trials import NUM_STEPS, Trials
from dynaflow.integrations.steps import TOO_FEW, tags_of
from dynaflow.verify import verify
from tests.cpu.happens_before import happens_before
from tests.cpu.integrations.toy_engine import STATE, ToySteps

TURN = "auto: no faster in parts, or its turn as a whole"


class Raises(df.Strategy):
    """Gives up, or makes a mistake, for as long as it is said to."""

    def __init__(self, how):
        self.how = how

    def schedule(self, flow):
        if flow.context.tags["phase"] == "prefill" and self.how == "gives up":
            return flow.sequential("a prompt is computed")
        if self.how == "mistake":
            raise KeyError("no such op")
        df.TwoBatch().schedule(flow)


def test_splits_a_step():
    engine = ToySteps()
    stats = engine.serve(5, 6)
    assert (stats.steps, stats.split_steps, stats.fallbacks, stats.refusal) == (1, 1, {}, "")
    assert engine.asked == ["why_whole", "starts", "in_parts", "tables"]
    assert engine.parts == [(0, 5, slice(0, 1)), (5, 11, slice(1, 2))], "a cut moves to a request's first token"


def test_too_few_tokens():
    engine = ToySteps(min_tokens=11)
    assert engine.serve(5, 5).fallbacks == {"fewer than 11 tokens": 1}
    assert engine.asked == ["whole"], "nothing of a small step is looked at"
    assert engine.serve(5, 6).split_steps == 1, "as many as are asked for"


def test_the_engines_own_reason():
    engine = ToySteps()
    engine.has_graph = True
    assert engine.serve(5, 6).fallbacks == {"Toy has a graph for it": 1}
    assert engine.asked == ["why_whole", "whole"]
    engine.has_graph = False
    assert engine.serve(5, 6).split_steps == 1


def test_a_step_that_falls_back_runs_whole_and_the_next_is_tried():
    engine = ToySteps(Raises("gives up"))
    for number in (1, 2):
        stats = engine.serve(5, 6)
        (reason,) = stats.fallbacks
        assert "a prompt is computed" in reason and "\n" not in reason and stats.fallbacks[reason] == number
        assert engine.asked[-2:] == ["in_parts", "whole"] and not stats.refusal and not stats.split_steps
    assert engine.serve(*[1] * 11).split_steps == 1, "steps that decode are split"


def test_a_step_with_too_few_tokens_for_the_parts_runs_whole_and_the_next_is_tried():
    class Small(df.Strategy):
        def schedule(self, flow):
            flow.split((0.05, 0.95))
            while ready := flow.get_ready_ops():
                flow.execute(ready[0])

    engine = ToySteps(Small())
    assert engine.serve(40).split_steps == 1
    for number in (1, 2):
        stats = engine.serve(5, 6 + number)
        assert stats.fallbacks == {TOO_FEW: number} and not stats.refusal and engine.asked[-2:] == ["in_parts", "whole"]
    assert engine.serve(40).split_steps == 2


def test_a_plan_without_parts_is_no_split():
    class Uncut(df.Strategy):
        def schedule(self, flow):
            while ready := flow.get_ready_ops():
                flow.execute(ready[0])

    for strategy in (Uncut(), df.Sequential()):
        stats = ToySteps(strategy).serve(5, 6)
        assert (stats.steps, stats.uncut_steps, stats.split_steps, stats.cut_requests, stats.fallbacks) == (1, 1, 0, 0, {})
    assert ToySteps().serve(5, 6).uncut_steps == 0


def test_of_two_engines_in_a_process_each_has_its_own_reasons():
    one, other = ToySteps(), ToySteps(Raises("mistake"))
    other.engine = one.engine
    assert "KeyError" in other.serve(5, 6).refusal
    assert one.serve(5, 6).split_steps == 1 and other.serve(5, 6).split_steps == 1
    assert one.engine.stats.steps == 3


def test_what_holds_for_good_is_said_once(caplog):
    engine = ToySteps(Raises("mistake"))
    with caplog.at_level(logging.INFO, "toy"):
        for _ in range(3):
            stats = engine.serve(5, 6)
    assert "KeyError" in stats.refusal and stats.fallbacks == {stats.refusal: 3} and not stats.split_steps
    said = [record for record in caplog.records if "leaves this model" in record.getMessage()]
    assert len(said) == 1 and said[0].levelname == "ERROR" and said[0].name == "toy.dynaflow"
    assert said[0].getMessage().startswith("dynaflow leaves this model to Toy from here on: ") and "no such op" in said[0].getMessage()
    assert engine.asked == ["why_whole", "starts", "in_parts", "whole", "whole", "whole"], "a refused model costs nothing"


def raising(error):
    def in_parts(*call):
        raise error

    return in_parts


def test_a_model_that_cannot_be_captured_is_refused(monkeypatch):
    engine = ToySteps()
    monkeypatch.setattr(engine, "in_parts", raising(TorchDynamoException("cannot trace it\nfrom user code: ...")))
    for number in (1, 2):
        assert engine.serve(5, 6).fallbacks == {"cannot trace it": number}
    assert engine.engine.stats.refusal == "cannot trace it"


@pytest.mark.parametrize("error", [RankMissing("rank 1 did not say what it would call."), RuntimeError("out of memory")])
def test_raises_what_must_not_be_hidden(error, monkeypatch):
    """Other ranks run nobody knows what; and an error of the model's own is the engine's to handle."""
    engine = ToySteps()
    with monkeypatch.context() as patched, pytest.raises(type(error)):
        patched.setattr(engine, "in_parts", raising(error))
        engine.serve(5, 6)
    stats = engine.engine.stats
    assert (stats.steps, stats.split_steps, stats.fallbacks, stats.refusal) == (1, 0, {}, "") and "whole" not in engine.asked
    assert engine.serve(5, 6).split_steps == 1


def test_what_it_will_do_is_said(caplog):
    with caplog.at_level(logging.INFO, "toy"):
        ToySteps(min_tokens=9)
        ToySteps(is_auto=True)
    plain, auto = (record.getMessage() for record in caplog.records if record.name == "toy.dynaflow")
    assert plain == "dynaflow: steps of 9 tokens or more run under TwoBatch"
    assert auto == "dynaflow: steps of 8 tokens or more run under TwoBatch, where they are measured to be faster so"


# -- auto


def timed(engine, us_in_parts):
    """A clock for its trials: a whole step takes 10 us per token."""
    now, in_parts, whole = [0.0], engine.in_parts, engine.whole

    def passes(us, run):
        def call(*args):
            now[0] += us * sum(engine.lengths) * 1e-6
            return run(*args)

        return call

    engine.in_parts, engine.whole = passes(us_in_parts, in_parts), passes(10.0, whole)
    engine.trials = Trials("Toy", engine.engine.log, engine._added_up, mark=lambda: now[0])


@pytest.mark.parametrize("us_in_parts, is_split", [(8.0, True), (12.0, False)])
def test_auto_takes_turns_and_then_the_faster_way(us_in_parts, is_split):
    engine = ToySteps(is_auto=True)
    timed(engine, us_in_parts)
    num_turns, num_more = 2 * (NUM_STEPS + 1), 5
    for _ in range(num_turns + num_more):
        stats = engine.serve(5, 6)
    wanted = num_turns // 2 + is_split * num_more
    assert (stats.split_steps, stats.fallbacks) == (wanted, {TURN: num_turns + num_more - wanted})
    assert engine.asked.count("starts") == stats.steps, "what kind it is"


def test_auto_gives_up_a_kind_that_cannot_be_split():
    engine = ToySteps(Raises("gives up"), is_auto=True)
    for _ in range(NUM_STEPS + 3):
        stats = engine.serve(5, 6)
    assert stats.fallbacks[TURN] == 2 and stats.split_steps == 0 and engine.asked.count("in_parts") == NUM_STEPS + 1
    engine.serve(*[1] * 11)
    assert stats.split_steps == 1, "steps of other kinds have turns of their own"


@pytest.mark.parametrize("share_of_the_other, is_split", [(0.9, True), (1.5, False)])
def test_ranks_decide_alike(share_of_the_other, is_split, monkeypatch):
    """By what all of them measured, over the engine's own group."""

    def all_reduce(numbers, group):
        assert group == "ranks of Toy"
        numbers += torch.tensor([share_of_the_other * 10, 10.0, share_of_the_other, 1.0], dtype=torch.float64)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    engine = ToySteps(is_auto=True)
    monkeypatch.setattr(engine, "group", lambda: "ranks of Toy")
    timed(engine, 8.0)
    for _ in range(2 * (NUM_STEPS + 1) + 1):
        engine.serve(5, 6)
    assert list(engine.trials.in_parts.values()) == [is_split]


# -- cuts


def test_a_long_request_is_cut_inside():
    engine = ToySteps()
    assert engine.serve(3, 21).cut_requests == 1
    assert engine.parts == [(0, 12, slice(0, 2)), (12, 24, slice(1, 2))]
    assert engine.serve(12, 12).cut_requests == 1, "between requests: none more"
    engine.prefix = [(np.array([4, 0]), np.array([[1] * 9, [1] * 9]), 4, None)]
    assert engine.serve(12, 20).cut_requests == 1, "in a step that is not split: none"


SHARED = [(np.array([4, 0]), np.array([[1, 3], [1, 2]]), 4, None)]  # request 0 reads block 1, which request 1 writes in this step


def test_a_reader_of_the_prefix_cache_stays_with_its_writer(monkeypatch):
    engine = ToySteps()
    engine.prefix = SHARED
    assert engine.serve(4, 8).fallbacks == {"no cut leaves readers of the prefix cache with their writers.": 1}
    monkeypatch.setattr(module, "readers_and_writers", lambda *_: set())
    assert engine.serve(4, 8).split_steps == 1, "the twin: nothing else was against it"


def test_a_writer_that_comes_first_may_be_parted_from_its_reader():
    engine = ToySteps()
    engine.prefix = [(np.array([0, 4]), np.array([[1, 2], [1, 3]]), 4, None)]
    assert engine.serve(8, 4).split_steps == 1


def test_what_a_window_has_left_behind_is_in_nobodys_way():
    engine = ToySteps()
    engine.prefix = [(*SHARED[0][:3], 1)]
    assert engine.serve(4, 8).split_steps == 1


def test_the_order_of_parts_is_that_of_their_rows():
    """A strategy that prefers the last part: what the engine's ops say that they use holds it back."""

    class LastFirst(df.Strategy):
        def schedule(self, flow):
            flow.split(3)
            while ready := flow.get_ready_ops():
                flow.execute(max(ready, key=lambda r: (r.part.lo, -r.depth)))

    assert ToySteps(LastFirst()).serve(24).split_steps == 1
    assert STATE["rows"] == (0, 24), "contexts are left as they were"
    forgetful = ToySteps(LastFirst())
    tell_split_rules(["dynaflow_toy.attend"])  # the twin: it is not said that it uses the cache (the next ToySteps says it again)
    with pytest.raises(AssertionError, match="not close"):
        forgetful.serve(24)


@pytest.mark.parametrize(
    "lengths, wanted",
    [([5, 6], ("prefill", 0, 11, "prefill", "prefill")), ([1, 1, 1], ("decode", 3, 0, "decode", "decode")),
     ([1, 1, 2], ("mixed", 2, 2, "decode", "decode")), ([1, 9], ("mixed", 1, 9, "prefill", "decode")),
     ([9, 2, 1], ("mixed", 1, 11, "prefill", "prefill")), ([1, 1, 9, 1], ("mixed", 3, 10, "prefill", "decode")),
     ([1, 9, 1, 1], ("mixed", 3, 10, "prefill", "prefill")), ([1, 9, 1], ("mixed", 2, 10, "prefill", "decode")),
     ([9, 1, 9], ("mixed", 1, 19, "prefill", "neither")), ([1, 9, 1, 1, 9, 1], ("mixed", 4, 21, "prefill", "neither"))],
)  # fmt: skip
def test_tags(lengths, wanted):
    names = ("phase", "num_decoding", "num_prefill", "mostly", "first")
    assert tags_of(np.cumsum([0, *lengths]), sum(lengths)) == dict(zip(names, wanted))


# -- prefill beside decode

PHASES = df.PrefillDecode(attention="*attend")
# `lazy` has the stream that was declared last go first, wherever nothing holds it back: what is not ordered shows
ORDERS = ["fake:issue", "fake:greedy", "fake:lazy"]


@pytest.fixture
def plans(monkeypatch):
    """Those that are made, in order."""
    made = []
    monkeypatch.setattr(planned, "verify", lambda plan, flow: made.append(plan) or verify(plan, flow))
    return made


def attentions(plan):
    """Their streams, in the order of their rows; and whether no wait orders them."""
    (i, first), (j, second) = ((i, launch) for i, launch in enumerate(plan.launches) if "attend" in launch.label)
    assert first.calls[0][1].hi == second.calls[0][1].lo
    ordered = happens_before(plan)
    return [first.stream, second.stream], (i, j) not in ordered and (j, i) not in ordered


@pytest.mark.parametrize("runtime", ORDERS)
def test_prefill_beside_decode_in_either_order(plans, runtime):
    engine = ToySteps(PHASES, runtime=runtime)
    assert engine.serve(1, 1, 1, 6, 4).split_steps == 1
    assert engine.parts == [(0, 3, slice(0, 3)), (3, 13, slice(3, 5))]
    assert attentions(plans[-1]) == (["decode", "prefill"], True)
    assert engine.serve(7, 4, 1).split_steps == 2
    assert engine.parts == [(0, 11, slice(0, 2)), (11, 12, slice(2, 3))]
    assert attentions(plans[-1]) == (["prefill", "decode"], True)
    num_plans = len(plans)
    for lengths in ((1, 9), (1, 1, 30), (20, 1, 1), (1, 1, 1, 1, 5, 1, 2)):
        stats = engine.serve(*lengths)
    assert (stats.split_steps, stats.cut_requests, stats.fallbacks) == (6, 0, {})
    assert len(plans) == num_plans, "a plan serves every boundary"


@pytest.mark.parametrize("lengths, why", [
    ((1, 9, 1, 1, 9), "no one cut parts them"), ((5, 1, 4), "no one cut parts them"), ((5, 6), "one phase"), ((1,) * 9, "one phase"),
])  # fmt: skip
def test_a_step_without_one_boundary_between_phases_runs_whole(lengths, why):
    engine = ToySteps(PHASES)
    stats = engine.serve(*lengths)
    (reason,) = stats.fallbacks
    assert why in reason and engine.asked[-1] == "whole" and not stats.refusal
    assert engine.serve(1, 9).split_steps == 1


def test_an_engine_that_says_nothing_of_its_state_has_attentions_in_order(plans, monkeypatch):
    monkeypatch.setattr(ToySteps, "own_state", "")
    engine = ToySteps(PHASES, runtime="fake:lazy")
    assert engine.serve(1, 1, 6, 4).split_steps == 1 and attentions(plans[-1]) == (["decode", "prefill"], False)
    assert engine.asked == ["why_whole", "starts", "in_parts", "tables"]


def shares(engine, is_reader_first):
    """A request with one token left reads a block that one of 8 tokens is computing, on the other side of the boundary."""
    reader, writer = (4, [1, 3]), (0, [1, 2])
    (a, x), (b, y) = (reader, writer) if is_reader_first else (writer, reader)
    engine.prefix = [(np.array([a, b]), np.array([x, y]), 4, None)]
    engine.reads = {0: 1} if is_reader_first else {1: 0}
    return engine.serve(*((1, 8) if is_reader_first else (8, 1)))


@pytest.mark.parametrize("runtime", ORDERS)
def test_a_reader_of_the_prefix_cache_does_not_run_beside_its_writer(plans, runtime):
    engine = ToySteps(PHASES, runtime=runtime)
    assert shares(engine, is_reader_first=False).split_steps == 1
    assert attentions(plans[-1]) == (["prefill", "decode"], False), "the writer first"
    assert shares(engine, is_reader_first=True).fallbacks == {"no cut leaves readers of the prefix cache with their writers.": 1}
    engine.prefix, engine.reads = [], {}
    assert engine.serve(8, 1).split_steps == 2 and attentions(plans[-1]) == (["prefill", "decode"], True), "the twin: strangers"


def test_without_that_check_a_reader_reads_too_early(monkeypatch):
    monkeypatch.setattr(module, "readers_and_writers", lambda *_: set())
    with pytest.raises(AssertionError, match="not close"):
        shares(ToySteps(PHASES, runtime="fake:lazy"), is_reader_first=False)


def test_rejects_a_cut_that_moves_away_from_where_parts_are_apart(monkeypatch):
    monkeypatch.setattr(module, "place_cuts", lambda cuts, *_: [cut + 1 for cut in cuts])
    assert "of parts that are apart" in ToySteps(PHASES).serve(1, 1, 6, 4).refusal
    monkeypatch.setattr(ToySteps, "own_state", "")
    assert ToySteps(PHASES).serve(1, 1, 6, 4).split_steps == 1, "the twin: in order, it may"
