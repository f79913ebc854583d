"""Recordings in pieces around what cannot be recorded, and attempts that fail."""

import logging
import random

import pytest
import torch
from torch import nn

import dynaflow as df
import dynaflow.testing.fuzz as fuzz
from dynaflow.runtime import generated, graphs
from dynaflow.runtime.binder import bind
from dynaflow.runtime.program import scratch
from dynaflow.testing import random_flow
from tests.cpu.runtime.models import Net, sine
from tests.cpu.runtime.placing import with_fresh_results
from tests.cpu.runtime.recorder import REFUSAL, FakeRecorder
from tests.cpu.runtime.test_faults import Lanes, inject  # noqa: F401 (inject is a fixture)

pytestmark = pytest.mark.usefixtures("no_grad")


# -- segments

CALLS = []


def _waits(x: torch.Tensor, amount: float) -> torch.Tensor:
    if FakeRecorder.is_recording:
        raise RuntimeError(REFUSAL)
    CALLS.append(x.shape[0])
    return x + amount


waits = torch.library.custom_op("dynaflow_test::waits", _waits, mutates_args=())
waits.register_fake(lambda x, amount: torch.empty_like(x))
df.register_split_rule(torch.ops.dynaflow_test.waits, df.rowwise)


class Interrupted(nn.Module):
    """Changes a cache, waits, changes it again, waits again."""

    def forward(self, x, cache):
        cache.add_(x)
        h = torch.ops.dynaflow_test.waits(torch.sin(x), 1.0)
        cache.mul_(h)
        return torch.ops.dynaflow_test.waits(h * 2, 2.0).cos() + cache


CUTS = [df.SplitFunc(torch.ops.dynaflow_test.waits)]


@pytest.mark.parametrize("strategy", [df.Sequential(), df.TwoBatch(), df.NanoBatch(3)], ids=lambda s: type(s).__name__)
def test_what_cannot_be_recorded_stays_between_recordings(recorder, caplog, strategy):
    model = Interrupted()
    fast = df.compile(model, strategy=strategy, runtime="graph", partition=["auto", *CUTS])
    cache = torch.randn(6, 4)
    held = []
    with caplog.at_level(logging.WARNING, "dynaflow"):
        for number in range(6):
            x, theirs = torch.randn(6, 4), cache.clone()
            CALLS.clear()
            got = fast(x, cache)
            num_rows, wanted = sum(CALLS), model(x, theirs)
            torch.testing.assert_close(got, wanted)
            torch.testing.assert_close(cache, theirs)
            assert number < 2 or num_rows == 12, "each call waits anew, once per row"
            held.append((got, wanted))
    for got, wanted in held:
        torch.testing.assert_close(got, wanted)
    learned = [r.getMessage() for r in caplog.records if "launched between recordings" in r.getMessage()]
    num_steps = len(learned)
    assert num_steps >= 2 and all("waits" in message and REFUSAL in message for message in learned)
    assert not [r for r in caplog.records if "runs launch by launch" in r.getMessage()]
    # one recording more than steps; what failed was aborted, step by step
    assert recorder.count("abort") == num_steps and recorder.count("end") == recorder.count("begin") - num_steps
    assert len(learned) == len(set(learned)), "learned once, for all recordings"


def test_a_failure_in_a_later_piece_changes_nothing_twice(recorder, monkeypatch):
    """Where no more may be learned, the first piece has run: the cache is as it was before the plan runs launch by launch."""
    monkeypatch.setattr("dynaflow.recorded.MAX_LEARNED", 1)
    model = Interrupted()
    fast = df.compile(model, runtime="graph", partition=["auto", *CUTS])
    cache = torch.randn(6, 4)
    for _ in range(2 + graphs.MAX_FAILURES):
        x, theirs = torch.randn(6, 4), cache.clone()
        torch.testing.assert_close(fast(x, cache), model(x, theirs))
        torch.testing.assert_close(cache, theirs)
    assert "replay" in recorder and recorder.count("abort") == 1 + graphs.MAX_FAILURES


def test_a_step_that_raises_names_its_launch(recorder, monkeypatch):
    model = Interrupted()
    fast = df.compile(model, runtime="graph", partition=["auto", *CUTS])
    cache, x = torch.zeros(6, 4), torch.randn(6, 4)
    for _ in range(3):
        fast(x, cache)
    replays = recorder.count("replay")
    monkeypatch.setattr("tests.cpu.runtime.test_pieces.CALLS", None)
    with pytest.raises(AttributeError) as error:
        fast(x, cache)
    monkeypatch.undo()
    assert recorder.count("replay") == replays + 1
    (note,) = [n for n in error.value.__notes__ if "raised by" in n]
    assert "waits" in note and "cache (by " in note


@pytest.mark.parametrize("seed", range(10))
def test_random_flows_in_pieces(seed):
    """Fused, loose and plain plans, recorded around random steps, replayed with other inputs."""
    case, rng = random_flow(seed), random.Random(seed)
    program = with_fresh_results(case.program)
    # what draws from the host's random state is no part of a recording
    drawing = {op.name for op in case.flow.ops if "rng" in op.uses}
    for number, strategy in enumerate(fuzz.strategies(case)[:4]):
        plan, _ = fuzz.make_plan(case, strategy, random.Random(seed * 10 + number))
        bound = bind(plan, program, case.sizes)
        steps = {n for n, launch in enumerate(plan.launches) if any(op in drawing for op, _ in launch.calls)}
        eager = frozenset(steps | set(rng.sample(range(len(plan.launches)), min(3, len(plan.launches)))))
        inputs = case.inputs()

        class Body:
            changed = promised = saved = copied = ()

            def prepare(self): ...

            def make_outputs(self, bound=bound):
                return [scratch(geometry) for geometry in bound.output_geometries]

            def __call__(self, given, between, outputs, bound=bound, eager=eager, inputs=inputs):
                return generated.run(bound, inputs, generated.NoStreams(len(bound.streams) + 1), between, eager, outputs)

        recording = graphs.Recording(Body(), [], FakeRecorder())
        places = [out.data_ptr() for out in recording.outputs]
        for again in range(3):
            if again:
                for name, tensor in case.inputs().items():
                    inputs[name].copy_(tensor)
                recording.replay()
            for name, tensor in case.reference().items():
                found = dict(zip((n for n, _ in bound.outputs), recording.outputs)).get(name, inputs.get(name))
                assert torch.equal(found, tensor), f"{name}, replay {again}\n{plan}"
        assert places == [out.data_ptr() for out in recording.outputs]


# -- failures


def test_what_cannot_be_recorded_runs_launch_by_launch(monkeypatch, caplog):
    class Refusing(FakeRecorder):
        def begin(self):
            attempts.append(1)
            raise RuntimeError("no memory for a graph")

    attempts = []
    monkeypatch.setattr(graphs.Recordings, "make_recorder", lambda self, body, feeds: Refusing())
    fast = df.compile(sine, strategy=df.TwoBatch(), strict=True, runtime="graph")
    with caplog.at_level(logging.WARNING, "dynaflow"):
        for _ in range(3 + graphs.MAX_FAILURES):
            x = torch.randn(4, 3)
            assert torch.equal(fast(x), sine(x))
        assert len(attempts) == graphs.MAX_FAILURES
        assert sum("cannot be recorded" in r.getMessage() for r in caplog.records) == graphs.MAX_FAILURES
        x = torch.randn(6, 3)  # other sizes have attempts of their own
        assert torch.equal(fast(x), sine(x)) and torch.equal(fast(x), sine(x)) and len(attempts) == graphs.MAX_FAILURES + 1


def test_an_attempt_that_fails_once_is_made_again(monkeypatch, caplog):
    """Another thread waited for the device just then."""

    class Unlucky(FakeRecorder):
        def end(self):
            if not attempts:
                attempts.append(1)
                raise RuntimeError("operation failed due to a previous error during capture")
            return super().end()

    attempts = []
    log = []
    monkeypatch.setattr(graphs.Recordings, "make_recorder", lambda self, body, feeds: Unlucky(log))
    model = Net()
    fast = df.compile(model, strategy=df.TwoBatch(), strict=True, runtime="graph")
    cache = torch.zeros(6, 4)
    for _ in range(4):
        x, theirs = torch.randn(6, 4), cache.clone()
        y = fast(x, cache)[0]
        torch.testing.assert_close(y, model(x, theirs)[0])
        torch.testing.assert_close(cache, theirs)
        del y
    assert log.count("abort") == 1 and log.count("replay") == 2


def test_a_fault_at_any_launch_of_an_attempt(counted, inject):  # noqa: F811
    """A launch that raises once, while it is recorded: it becomes a step, and nothing is applied twice."""
    model = Net()
    number = num_launches = 0
    while number <= num_launches:
        fast = df.compile(model, strategy=Lanes(), strict=True, runtime="graph")
        cache = torch.zeros(6, 4)
        for turn in range(4):
            inject(number if turn == 1 else None)
            x, theirs = torch.randn(6, 4), cache.clone()
            got, wanted = fast(x, cache)[0], model(x, theirs)[0]
            torch.testing.assert_close(got, wanted)
            torch.testing.assert_close(cache, theirs)
            num_launches = df.stats(fast).num_launches if not turn else num_launches
        number += 1
    assert number > 5


def test_an_op_that_raises_is_the_caller_s_error(counted):
    def check(x, cache):
        cache.add_(1)
        return torch.ops.dynaflow_graphs.raises(x) + cache

    fast = df.compile(check, strategy=df.TwoBatch(), strict=True, runtime="graph",
                      partition=["auto", df.SplitFunc(torch.ops.dynaflow_graphs.raises)])  # fmt: skip
    good, bad = torch.ones(4, 3), -torch.ones(4, 3)
    cache = torch.zeros(4, 3)
    fast(good, cache)
    with pytest.raises(ValueError, match="negative") as error:
        fast(bad, cache)
    assert "raises" in "\n".join(error.value.__notes__)
    assert cache.max() <= 2, "what was tried first is undone"
    before = cache.clone()
    for number in range(1, 4):
        assert torch.equal(fast(good, cache), good * 2 + before + number) and torch.equal(cache, before + number)


@torch.library.custom_op("dynaflow_graphs::raises", mutates_args=())
def raises(x: torch.Tensor) -> torch.Tensor:
    if FakeRecorder.is_recording:
        raise RuntimeError(REFUSAL)
    if x.min() < 0:
        raise ValueError("negative")
    return x * 2


raises.register_fake(lambda x: torch.empty_like(x))
df.register_split_rule(torch.ops.dynaflow_graphs.raises, df.rowwise)
