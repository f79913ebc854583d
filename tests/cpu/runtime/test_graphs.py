"""Recorded plans: inputs in slots, caches by address, outputs that belong to the caller. The recording itself is CUDA's; here it is
a recorder that writes down what is issued and does it later, or (as without a GPU) none: the work is issued again."""

import gc
import logging
import random
import threading
import weakref

import pytest
import torch
from torch import nn

import dynaflow as df
import dynaflow.testing.fuzz as fuzz
from dynaflow import recorded
from dynaflow.runtime import generated, graphs
from dynaflow.runtime.binder import bind
from dynaflow.runtime.program import scratch
from dynaflow.testing import random_flow
from tests.cpu.runtime.models import Net
from tests.cpu.runtime.placing import with_fresh_results
from tests.cpu.runtime.recorder import REFUSAL, FakeRecorder
from tests.cpu.runtime.test_faults import Lanes, inject  # noqa: F401 (inject is a fixture)


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(params=["recorded", "issued again"])
def counted(request, monkeypatch):
    """What was recorded."""
    made = []
    plain = graphs.Recording.__init__

    def init(self, *args):
        plain(self, *args)
        made.append(self)

    monkeypatch.setattr(graphs.Recording, "__init__", init)
    if request.param == "recorded":
        monkeypatch.setattr(graphs.Recordings, "make_recorder", lambda self: FakeRecorder())
    return made


@pytest.fixture
def recorder(monkeypatch):
    """Everything is recorded with a FakeRecorder; their common log."""
    log = []
    monkeypatch.setattr(graphs.Recordings, "make_recorder", lambda self: FakeRecorder(log))
    return log


def sine(x):
    return torch.sin(x) * 2


# -- rotation


def test_outputs_that_are_held_are_never_overwritten(counted):
    model = Net()
    fast = df.compile(model, strategy=df.NanoBatch(3), strict=True, runtime="graph")
    cache = torch.zeros(6, 4)
    kept = []
    for _ in range(8):
        x, theirs = torch.randn(6, 4), cache.clone()
        got, wanted = fast(x, cache), model(x, theirs)
        for g, w in zip(got, wanted):
            torch.testing.assert_close(g, w)
            assert g.stride() == w.stride()
        torch.testing.assert_close(cache, theirs)
        kept.append((got[0], got[0].clone()))
    assert all(torch.equal(a, b) for a, b in kept)
    # all of the rotation is held: one more recording, whose outputs are copied
    assert len(counted) == graphs.MAX_ROTATION + 1 and df.stats(fast).planned_calls == 8
    memory = [out.data_ptr() for recording in counted for out in recording.outputs]
    assert not {got.data_ptr() for got, _ in kept[1 + graphs.MAX_ROTATION :]} & set(memory)


def test_outputs_that_were_let_go_are_used_again(counted):
    fast = df.compile(sine, strategy=df.TwoBatch(), strict=True, runtime="graph")
    places = set()
    for _ in range(6):
        x = torch.randn(4, 3)
        y = fast(x)
        assert torch.equal(y, sine(x))
        places.add(y.data_ptr())
        del y
    assert len(counted) == 1 and len(places) <= 2


@pytest.mark.parametrize("hold", [lambda y: y[1:], lambda y: y.numpy(), lambda y: y.untyped_storage(), lambda y: y.t().unbind()[0]])
def test_a_view_holds_its_output(recorder, hold):
    fast = df.compile(sine, strategy=df.TwoBatch(), strict=True, runtime="graph")
    fast(torch.randn(4, 3))
    x = torch.randn(4, 3)
    held = hold(fast(x))
    for _ in range(3):
        fast(torch.randn(4, 3))
    wanted = hold(sine(x))
    if isinstance(held, torch.UntypedStorage):
        assert held.tolist() == wanted.tolist()
    else:
        assert torch.equal(torch.as_tensor(held), torch.as_tensor(wanted))


def test_borrowed_outputs_are_one_recording_s(counted):
    fast = df.compile(sine, strategy=df.TwoBatch(), strict=True, runtime="graph", borrow=True)
    fast(torch.randn(4, 3))
    first = fast(torch.randn(4, 3))
    for _ in range(3):
        x = torch.randn(4, 3)
        y = fast(x)
        assert torch.equal(y, sine(x)) and y.data_ptr() == first.data_ptr() and torch.equal(first, y)
    assert len(counted) == 1


def test_the_oldest_recordings_go_first(counted, monkeypatch):
    monkeypatch.setattr(graphs, "MAX_RECORDINGS", 2)
    fast = df.compile(sine, strategy=df.TwoBatch(), strict=True, runtime="graph")
    for _ in range(2):
        for n in (4, 5, 6):
            for _ in range(3):
                x = torch.randn(n, 3)
                assert torch.equal(fast(x), sine(x))
    assert len(counted) == 6


# -- slots and addresses


def test_inputs_are_copied(counted):
    fast = df.compile(sine, strategy=df.TwoBatch(), strict=True, runtime="graph")
    x = torch.randn(4, 3)
    for _ in range(4):
        x = x.clone() + 1
        y = fast(x)
        wanted = sine(x)
        x.fill_(7)
        assert torch.equal(y, wanted)
    memory = {t.data_ptr() for r in counted for t in r.outputs}
    assert x.data_ptr() not in memory


def test_another_cache_or_parameter_is_recorded_anew(counted):
    model = Net()
    fast = df.compile(model, strategy=df.TwoBatch(), strict=True, runtime="graph")
    x = torch.randn(6, 4)
    caches = torch.zeros(6, 4), torch.ones(6, 4)
    for number, cache in enumerate(caches, 1):
        for _ in range(3):
            theirs = cache.clone()
            y = fast(x, cache)[0]
            torch.testing.assert_close(y, model(x, theirs)[0])
            torch.testing.assert_close(cache, theirs)
            del y
        assert len(counted) == number
    # changed where it is: seen, and nothing is recorded
    model.b.weight.mul_(2)
    torch.testing.assert_close(fast(x, caches[1])[0], model(x, torch.zeros(6, 4))[0])
    assert len(counted) == 2
    model.b.weight = nn.Parameter(torch.randn(4, 4))
    for _ in range(3):
        torch.testing.assert_close(fast(x, caches[1])[0], model(x, torch.zeros(6, 4))[0])


def test_new_addresses_on_every_call_are_given_up_loudly(counted, caplog):
    model = Net()
    fast = df.compile(model, strategy=df.TwoBatch(), strict=True, runtime="graph")
    caches = [torch.zeros(6, 4) for _ in range(2 * graphs.MAX_WASTED)]
    with caplog.at_level(logging.WARNING, "dynaflow"):
        for cache in caches:
            x, theirs = torch.randn(6, 4), cache.clone()
            torch.testing.assert_close(fast(x, cache)[0], model(x, theirs)[0])
            torch.testing.assert_close(cache, theirs)
    assert len(counted) == graphs.MAX_WASTED
    assert sum("new addresses on every call" in r.getMessage() for r in caplog.records) == 1


def test_an_input_that_shares_memory_with_a_changed_one(counted):
    """Once recorded with separate tensors; then x is the cache itself."""
    model = Net()
    fast = df.compile(model, strategy=df.TwoBatch(), runtime="graph")
    cache = torch.zeros(6, 4)
    for _ in range(3):
        fast(torch.randn(6, 4), cache)
    cache.copy_(torch.randn(6, 4))
    theirs = cache.clone()
    got, wanted = fast(cache, cache), model(theirs, theirs)
    torch.testing.assert_close(got[0], wanted[0])
    torch.testing.assert_close(cache, theirs)


def test_an_expanded_input_is_bound_by_address(counted):
    fast = df.compile(sine, strategy=df.TwoBatch(), strict=True, runtime="graph")
    for _ in range(4):
        x = torch.randn(1, 3).expand(4, 3)
        assert torch.equal(fast(x), sine(x))


# -- buckets


class Rows(nn.Module):
    """Each row by itself: an embedding, a layer; two results, one with two rows per row."""

    def __init__(self):
        super().__init__()
        self.embed, self.layer = nn.Embedding(11, 4), nn.Linear(4, 4)

    def forward(self, ids, scale):
        h = self.layer(self.embed(ids)) * scale
        return h.relu(), torch.stack((h, -h), 1).flatten(0, 1)


# option -> the bucket that serves each number of rows
BUCKETS = {
    "list": ([2, 5, 8], {1: 2, 2: 2, 3: 5, 4: 5, 5: 5, 6: 8, 7: 8, 8: 8, 9: 9}),
    "powers": ("powers", {1: 1, 2: 2, 3: 4, 5: 8, 8: 8, 9: 16}),
}


@pytest.mark.parametrize("kind", BUCKETS)
@pytest.mark.parametrize("strategy", [df.Sequential(), df.TwoBatch()], ids=lambda s: type(s).__name__)
def test_padded_rows_do_not_show(counted, kind, strategy):
    buckets, serves = BUCKETS[kind]
    model = Rows()
    fast = df.compile(model, strategy=strategy, runtime="graph", buckets=buckets)
    for _ in range(3):
        for rows in serves:
            ids, scale = torch.randint(0, 11, (rows,)), torch.randn(rows, 1)
            got, wanted = fast(ids, scale), model(ids, scale)
            for g, w in zip(got, wanted):
                torch.testing.assert_close(g, w)
                assert g.stride() == w.stride()
            del got, g
    assert len(counted) == len(set(serves.values())), "one recording per bucket"
    assert df.stats(fast).captures == 1


def test_rows_beyond_the_call_s_are_valid_ones():
    ids = torch.tensor([[7, 8], [9, 10]])
    assert graphs._slot(ids, (0, 5)).tolist() == [[7, 8], [9, 10], [7, 8], [9, 10], [7, 8]]
    slots = graphs.Slots([ids], {0: (0, 5)}, [])
    slots.fill([ids + 1])
    assert slots.slots[0].tolist() == [[8, 9], [10, 11], [7, 8], [9, 10], [7, 8]]


def test_an_empty_batch_is_not_padded(counted):
    fast = df.compile(sine, runtime="graph", buckets="powers")
    for rows in (3, 3, 0, 0, 0, 4):
        x = torch.randn(rows, 3)
        assert torch.equal(fast(x), sine(x))


def write(x, cache):
    cache.add_(x)
    return x * 2


def column_sums(x):
    return x.sum(0)


# what -> function, its arguments for n rows, batch=, words of the reason
REFUSED = {
    "it mixes rows": (lambda x: x - x.mean(0), lambda n: (torch.randn(n, 3),), None, "mean"),
    "it counts rows": (lambda x: x * x.shape[0], lambda n: (torch.randn(n, 3),), None, ""),
    "a cache with the batch": (write, lambda n: (torch.randn(n, 3), torch.zeros(n, 3)), None, "changes cache in place"),
    "an output with the batch inside": (
        lambda x: (x * 2).t().contiguous(), lambda n: (torch.randn(n, 3),), None, "not the outermost dim of its output"),
    "an input with the batch inside": (column_sums, lambda n: (torch.randn(3, n),), 1, "not the outermost dim of its input"),
    "an input that is a slice": (column_sums, lambda n: (torch.randn(3, 40)[:, :n],), 1, "not the outermost dim of its input"),
    "an expanded input": (lambda x, m: x + m, lambda n: (torch.randn(n, 3), torch.randn(n, 1).expand(n, 3)), None, "is expanded"),
}  # fmt: skip


@pytest.mark.parametrize("reason", REFUSED)
def test_rejects_padding(counted, caplog, reason):
    """Where padding would show, sizes are recorded as they are."""
    function, make, batch, words = REFUSED[reason]
    with caplog.at_level(logging.WARNING, "dynaflow"):
        fast = df.compile(function, runtime="graph", buckets=[4, 8], batch=batch)
        for rows in (3, 6, 5):
            args = make(rows)
            for _ in range(3):
                theirs = [a.clone() if a.is_contiguous() else a for a in args]
                torch.testing.assert_close(fast(*args), function(*theirs))
                torch.testing.assert_close(list(args), theirs)
    (said,) = [r.getMessage() for r in caplog.records if "buckets= has no effect" in r.getMessage()]
    assert words in said and len(counted) == 3


def test_a_changed_input_without_rows_is_padded(counted, caplog):
    """The twin: what is changed carries no batch."""
    fast = df.compile(lambda x, counter: (counter.add_(1), x * 2)[1], runtime="graph", buckets=[4, 8])
    counter = torch.zeros(())
    for number, rows in enumerate((3, 4, 2, 3, 1), 1):
        x = torch.randn(rows, 3)
        assert torch.equal(fast(x, counter), x * 2) and counter.item() == number
    assert not [r for r in caplog.records if "buckets=" in r.getMessage()] and len(counted) == 1


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
    monkeypatch.setattr("tests.cpu.runtime.test_graphs.CALLS", None)
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
            def allocate(self, bound=bound):
                return [scratch(geometry) for geometry in bound.output_geometries]

            def __call__(self, given, between, outputs, bound=bound, eager=eager, inputs=inputs):
                generated.run(bound, inputs, generated.NoStreams(len(bound.streams) + 1), between, eager, outputs)

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
    monkeypatch.setattr(graphs.Recordings, "make_recorder", lambda self: Refusing())
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
    monkeypatch.setattr(graphs.Recordings, "make_recorder", lambda self: Unlucky(log))
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


# -- threads


def test_two_threads(counted):
    fast = df.compile(Net(), strategy=df.TwoBatch(), strict=True, runtime="graph")
    fast(torch.randn(6, 4), torch.zeros(6, 4))
    model = Net()
    model.load_state_dict(fast.state_dict())
    wrong = []

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        cache = torch.zeros(6, 4)
        held = []
        with torch.no_grad():
            for _ in range(25):
                x, theirs = torch.randn(6, 4, generator=generator), cache.clone()
                got, wanted = fast(x, cache)[0], model(x, theirs)[0]
                held = [*held[-2:], (got, wanted)]
                if not all(torch.allclose(a, b, atol=1e-5) for a, b in (*held, (cache, theirs))):
                    wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and not any(thread.is_alive() for thread in threads) and counted


# -- what is kept


def test_plans_that_were_dropped_are_let_go(recorder, monkeypatch):
    monkeypatch.setattr("dynaflow.engine.MAX_BOUND", 2)
    monkeypatch.setattr(graphs, "MAX_RECORDINGS", 2)
    alive = weakref.WeakSet()
    plain = recorded.PlanBody.__init__

    def init(self, graph, bound):
        alive.add(bound)
        plain(self, graph, bound)

    monkeypatch.setattr(recorded.PlanBody, "__init__", init)
    fast = df.compile(sine, strategy=df.TwoBatch(), strict=True, runtime="graph")
    for rows in range(2, 12):
        for _ in range(3):
            x = torch.randn(rows, 3)
            assert torch.equal(fast(x), sine(x))
    gc.collect()
    assert 0 < len(alive) <= 4


def test_why_an_op_cannot_be_recorded():
    assert "makes the host wait" in recorded.why_unrecordable(["aten.mm.default", "aten._local_scalar_dense.default"])
    assert not recorded.why_unrecordable(["aten.mm.default", "aten.relu.default", "no_such.op.default"])


# -- these tests would notice


def _held(fast):
    """Whether an output that is held changes under later calls, or a call's result is wrong."""
    kept = []
    for _ in range(5):
        x = torch.randn(4, 3)
        kept.append((fast(x), sine(x)))
    return not all(torch.equal(a, b) for a, b in kept)


def _changed(model, fast):
    cache = torch.randn(6, 4)
    for _ in range(3):
        x, theirs = torch.randn(6, 4), cache.clone()
        fast(x, cache)
        model(x, theirs)
        if not torch.allclose(cache, theirs):
            return True
    return False


@pytest.mark.parametrize("hole", ["", "outputs are never held", "slots are not filled", "padding is not refused", "nothing is undone"])
def test_notices(recorder, monkeypatch, hole):
    if hole == "outputs are never held":
        monkeypatch.setattr(graphs.Recording, "is_free", lambda self: True)
    elif hole == "slots are not filled":
        monkeypatch.setattr(graphs.Slots, "fill", lambda self, args: None)
    elif hole == "padding is not refused":
        monkeypatch.setattr(recorded, "why_unpadded", lambda flow, built: "")
    elif hole == "nothing is undone":
        monkeypatch.setattr(recorded.PlanBody, "has_steps", lambda self: False)
    monkeypatch.setattr("dynaflow.recorded.MAX_LEARNED", 1)
    model, (mixes, make, _, _) = Interrupted(), REFUSED["it mixes rows"]
    found = _held(df.compile(sine, strategy=df.TwoBatch(), strict=True, runtime="graph"))
    found |= _changed(model, df.compile(model, runtime="graph", partition=["auto", *CUTS]))
    fast = df.compile(mixes, runtime="graph", buckets=[8])
    for _ in range(3):
        (x,) = make(5)
        found |= not torch.allclose(fast(x), mixes(x))
    assert found == bool(hole)


def test_outputs_outlive_their_recording(counted):
    """What was handed out stays as it was when the model, its recordings and their memory are gone."""
    fast = df.compile(lambda x: torch.sin(x) * 2, strategy=df.TwoBatch(), strict=True, runtime="graph")
    kept = []
    for _ in range(4):
        x = torch.randn(6, 4)
        kept.append((fast(x)[1:], torch.sin(x)[1:] * 2))  # a view alone holds the memory
    del fast
    counted.clear()
    gc.collect()
    torch._dynamo.reset()
    gc.collect()
    rubbish = [torch.full((6, 4), 9.0) for _ in range(64)]
    assert all(torch.equal(a, b) for a, b in kept) and len(rubbish) == 64


def test_an_input_that_is_returned_is_the_callers(counted):
    """... and not the slot that it was copied to."""
    fast = df.compile(lambda x, y: (torch.sin(x) * y, y, x[1:]), strategy=df.TwoBatch(), strict=True, runtime="graph")
    kept = []
    for _ in range(5):
        x, y = torch.randn(6, 4), torch.randn(6, 4)
        got = fast(x, y)
        assert got[1].data_ptr() == y.data_ptr() and got[2].data_ptr() == x[1:].data_ptr()
        kept.append((got, (torch.sin(x) * y, y.clone(), x[1:].clone())))
    assert all(torch.allclose(a, b) for got, wanted in kept for a, b in zip(got, wanted))


def test_slots_do_not_keep_the_callers_cache():
    x, cache = torch.randn(6, 4), torch.zeros(6, 4)
    slots = graphs.Slots([x, cache], {0: None}, [1])
    assert slots.given([x, cache])[1] is cache and slots.given([x, cache])[0] is slots.slots[0]
    gone = weakref.ref(cache)
    del cache
    assert gone() is None
