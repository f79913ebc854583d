"""Recorded plans: inputs in slots, caches by address, outputs that belong to the caller. The recording itself is CUDA's; here it is
a recorder that writes down what is issued and does it later, or (as without a GPU) none: the work is issued again."""

import gc
import logging
import threading
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import dynaflow as df
from dynaflow import recorded
from dynaflow.runtime import generated, graphs, ready, slots
from dynaflow.runtime.driver import DriverError
from tests.cpu.runtime.models import Net, sine
from tests.cpu.runtime.recorder import FakeRecorder
from tests.cpu.runtime.test_buckets import REFUSED
from tests.cpu.runtime.test_pieces import CUTS, Interrupted

pytestmark = pytest.mark.usefixtures("no_grad")


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


def test_one_unit_allocates_what_is_borrowed_where_nothing_was_recorded_before(monkeypatch):
    """As late as Inductor does: in the pool, which no earlier recording writes to. Later recordings, and what is not borrowed, get memory
    of their own. (Work is issued again: nothing here could write down what compiled code does.)"""
    made = []
    plain = graphs.Recording.__init__

    def init(self, body, args, recorder, allocates):
        plain(self, body, args, recorder, allocates)
        made.append((self.outputs[0].data_ptr(), allocates))

    monkeypatch.setattr(graphs.Recording, "__init__", init)
    for borrow in (True, False):
        fast = df.compile(sine, strategy="sequential", strict=True, runtime="graph", compiler="inductor", borrow=borrow)
        for n in (4, 4, 4, 6, 6, 6):
            x = torch.randn(n, 3)
            y = fast(x)
            torch.testing.assert_close(y, sine(x))
        if borrow:
            assert [allocates for _, allocates in made] == [True, False] and y.data_ptr() == made[-1][0]
    assert len(made) > 2 and not any(allocates for _, allocates in made[1:])


@pytest.mark.parametrize("stream, is_one_unit", [("caller", True), ("comm", False)])
def test_one_unit_allocates_on_the_callers_stream_alone(monkeypatch, stream, is_one_unit):
    """What it allocates on another one would be given to others while the caller still reads it."""
    bounds, written = [], generated._written
    monkeypatch.setattr(generated, "_written", lambda bound, *rest: bounds.append(bound) or written(bound, *rest))

    class On(df.Strategy):
        def schedule(self, flow):
            while ready := flow.get_ready_ops():
                flow.execute(ready[0], stream=stream)

    fast = df.compile(sine, strategy=On(), strict=True, compiler="inductor", runtime="graph")
    for _ in range(3):
        x = torch.randn(4, 3)
        torch.testing.assert_close(fast(x), sine(x))
    assert [bound.is_one_unit for bound in bounds] == [is_one_unit]


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


@pytest.fixture
def alive(recorder, monkeypatch):
    """Plans that are recorded, and still there."""
    found = weakref.WeakSet()
    plain = recorded.PlanBody.__init__

    def init(self, bound, *rest):
        found.add(bound)
        plain(self, bound, *rest)

    monkeypatch.setattr(recorded.PlanBody, "__init__", init)
    return found


@pytest.mark.parametrize("strategy", [df.TwoBatch(), df.Sequential()])
def test_plans_that_were_dropped_are_let_go(alive, monkeypatch, strategy):
    """With what is recorded for them; of the sequential plan, too."""
    monkeypatch.setattr("dynaflow.bindings.MAX_BOUND", 2)
    fast = df.compile(sine, strategy=strategy, strict=True, runtime="graph")
    for rows in range(2, 12):
        for _ in range(3):
            x = torch.randn(rows, 3)
            assert torch.equal(fast(x), sine(x))
    gc.collect()
    assert 0 < len(alive) <= 3, "two of the graph for all sizes; Sequential's first size has one of its own"


class TwoBatchByPhase(df.Strategy):
    def schedule(self, flow):
        if flow.context.batch_size >= 8 and flow.context.tags.get("phase") == "decode":
            return flow.sequential("decoding")
        return df.TwoBatch().schedule(flow)


def test_what_was_planned_before_a_tag_mattered_is_let_go(alive):
    """Calls are told apart by their tags from then on: it would not be found again."""
    fast = df.compile(sine, strategy=TwoBatchByPhase(), strict=True, runtime="graph")
    for rows in (4, 5, 6, 8, 4):
        for _ in range(3):
            x = torch.randn(rows, 3)
            with df.context(phase="prefill"):
                assert torch.equal(fast(x), sine(x))
    gc.collect()
    assert sorted(bound.batch_size for bound in alive) == [4, 8]


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
        monkeypatch.setattr(graphs.Lent, "is_gone", lambda self: True)
    elif hole == "slots are not filled":
        monkeypatch.setattr(slots.Slots, "fill", lambda self, args: None)
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
    made = slots.Slots([x, cache], {0: None}, [1])
    assert made.given([x, cache])[1] is cache and made.given([x, cache])[0] is made.each[0].tensor
    gone = weakref.ref(cache)
    del cache
    assert gone() is None


@pytest.mark.parametrize("fixed_weights", [False, True])
def test_weights_that_are_promised_to_stay_are_not_looked_at(monkeypatch, fixed_weights):
    looked = []

    def same_addresses(args, table, indices):
        looked[:] = [args[i] for i in indices]
        return slots.same_addresses(args, table, indices)

    monkeypatch.setattr(slots, "native", lambda: None)
    monkeypatch.setattr(slots, "_same_addresses", same_addresses)
    model, cache = Net(), torch.zeros(6, 4)
    fast = df.compile(model, strategy=df.TwoBatch(), strict=True, runtime="graph", fixed_weights=fixed_weights)
    for _ in range(4):
        fast(torch.randn(6, 4), cache)
    assert any(t is cache for t in looked)
    assert any(t is p for t in looked for p in model.parameters()) != fixed_weights


def test_a_buffer_that_is_replaced_is_noticed_whatever_was_promised():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.inner.register_buffer("mask", torch.ones(4))
            self.inner.plain = torch.ones(4)

        def forward(self, x):
            return self.inner(x) * self.inner.mask * self.inner.plain

    model = Masked()
    fast = df.compile(model, strategy=df.TwoBatch(), runtime="graph", fixed_weights=True)
    for step in range(6):
        if step == 3:
            model.inner.mask = torch.randn(4)
            model.inner.plain = torch.randn(4)
        x = torch.randn(6, 4)
        torch.testing.assert_close(fast(x), model(x))


def test_a_weight_that_moves_is_noticed(counted):
    model, cache = Net(), torch.zeros(6, 4)
    fast = df.compile(model, strategy=df.TwoBatch(), strict=True, runtime="graph")
    for step in range(6):
        if step == 3:
            for parameter in model.parameters():
                parameter.data = torch.randn_like(parameter)
        x, theirs = torch.randn(6, 4), cache.clone()
        for got, wanted in zip(fast(x, cache), model(x, theirs)):
            torch.testing.assert_close(got, wanted)
    assert len(counted) >= 2


def test_what_is_borrowed_from_one_graph_of_a_call_outlives_the_next(recorder):
    """Recordings of a call's graphs share their memory, and are made at different times: outputs must not lie in it."""

    def model(x, y):
        a = torch.sin(x) * 2
        torch._dynamo.graph_break()
        return a, torch.cos(y) + 1

    fast = df.compile(model, strategy=df.TwoBatch(), runtime="graph", borrow=True, batch={"x": 0, "y": 0})
    for rows in (4, 6, 8, 4, 6, 8, 4, 6, 8):
        x, y = torch.randn(rows, 3), torch.randn(rows, 3)
        for got, wanted in zip(fast(x, y), model(x, y)):
            torch.testing.assert_close(got, wanted)
    assert recorder.count("replay") > 9


@pytest.mark.parametrize("is_bad", [False, True])
def test_work_as_a_replay(monkeypatch, is_bad):
    """What fails is aborted, and the next one may record."""
    done = []

    class Recorder:
        def __init__(self, pool, device, keeps_memsets): ...
        def begin(self):
            done.append("begin")

        def end(self):
            return lambda: done.append("again")

        def abort(self):
            done.append("abort")

    def work():
        done.append("work")
        if is_bad:
            raise RuntimeError("boom")

    monkeypatch.setattr(graphs, "CudaRecorder", Recorder)
    with pytest.raises(RuntimeError, match="boom") if is_bad else nullcontext():
        graphs.as_replay(graphs.Pool(), torch.device("cpu"), work)()
    assert done == ["begin", "work", "abort" if is_bad else "again"]
    assert graphs.one_at_a_time.acquire(blocking=False)
    graphs.one_at_a_time.release()


@pytest.mark.parametrize("fault", ["on replay", "while it is recorded", ""])
def test_where_copies_cannot_be_recorded_torch_makes_them(recorder, monkeypatch, caplog, fault):
    """Recordings go on, over slots that are filled ahead of them."""
    caplog.set_level(logging.INFO, "dynaflow")
    made = []

    class Feeds:
        is_bound, is_all = True, False

        def __init__(self, held):
            self.held = held
            made.append(self)

        def __call__(self, args):
            return fault != "on replay" and self.held.fill(args)

    class Recorder(FakeRecorder):
        def __init__(self, feeds):
            super().__init__()
            self.feeds = feeds

        def begin(self):
            super().begin()
            if self.feeds is not None and fault == "while it is recorded":
                raise DriverError("cuLaunchKernel says 1")

    monkeypatch.setattr(graphs, "feeds_of", lambda held, device: None if held is None else Feeds(held))
    monkeypatch.setattr(graphs.Recordings, "make_recorder", lambda self, body, feeds: Recorder(feeds))
    fast = df.compile(lambda x: torch.sin(x) * 2, strategy=df.TwoBatch(), strict=True, runtime="graph")
    for _ in range(6):
        x = torch.randn(6, 4)
        torch.testing.assert_close(fast(x), torch.sin(x) * 2)
    assert len(made) == 1 and df.stats(fast).planned_calls == 6
    assert ("copied ahead of" in caplog.text) == bool(fault)


@pytest.mark.parametrize("is_ready", [True, False])
@pytest.mark.parametrize("options", [{}, {"borrow": True}, {"fixed_weights": True}])
def test_a_call_like_the_last_takes_one_look(recorder, monkeypatch, options, is_ready):
    """And what is not seen in it is looked at again: the results are the same."""
    model, seen = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), []
    fast = df.compile(model, strategy=df.TwoBatch(), strict=True, runtime="graph", **options)
    run = graphs.Recordings._run
    monkeypatch.setattr(graphs.Recordings, "_run", lambda self, *rest: seen.append(1) or run(self, *rest))
    if not is_ready:
        monkeypatch.setattr(graphs, "Look", lambda *facts: ready.Look(None, *facts[1:]))
    with torch.no_grad():
        for _ in range(6):
            x = torch.randn(6, 8)
            torch.testing.assert_close(fast(x), model(x))
    assert len(seen) == (1 if is_ready else 5), "the first call is launched, the second recorded"
