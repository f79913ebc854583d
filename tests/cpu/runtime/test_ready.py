"""One look at a call of a recording: ready where all is as it was at the last call, and nowhere else. Streams and driver are made up."""

import ctypes
import gc
import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import dynaflow as df
from dynaflow.runtime import feeds, graphs, native, ready, slots
from dynaflow.runtime.lent import Lent
from dynaflow.runtime.ready import FED, NOT_READY, READY
from tests.cpu.runtime.machine import Machine
from tests.cpu.runtime.recorder import Body

DEVICE, STREAM = 3, 0x7F00


class Streams:
    """torch's function and the driver's."""

    def __init__(self):
        self.now, self.status, self.fails, self.last = STREAM, 0, False, ctypes.c_int64(STREAM)
        self._current = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))(self._give_current)
        self._capturing = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int32))(self._give_status)
        functions = [ctypes.cast(f, ctypes.c_void_p).value for f in (self._current, self._capturing)]
        self.facts = native.Stream(*functions, DEVICE, ctypes.addressof(self.last))

    def _give_current(self, device, found):
        assert device == DEVICE
        found[0] = self.now
        return 0

    def _give_status(self, stream, found):
        assert (stream or 0) == self.now
        found[0] = self.status
        return int(self.fails)


class Call:
    """A recording of an input, a weight and a cache that is changed, with one output; and the next call of it."""

    def __init__(self, is_fed=True, is_borrowed=False):
        self.x, self.weight, self.cache = torch.randn(4), torch.nn.Parameter(torch.randn(4)), torch.zeros(4)
        self.streams, self.machine = Streams(), Machine()
        held = slots.Slots(self.args, {0: None}, [2])
        self.feeds = feeds.Feeds(held.each, [], native.native(), self.machine)
        self.feeds.issue()
        self.feeds.bind("a graph")
        self.lent = Lent([torch.randn(4)])
        self.look = ready.Look(self.streams.facts, held, self.lent.counts, self.feeds if is_fed else None, is_borrowed)
        self.slot = held.each[0]

    @property
    def args(self):
        return [self.x, self.weight, self.cache]

    def found(self):
        found = {self.look.function(self.args), self.look.function(tuple(self.args))}
        assert len(found) == 1
        return found.pop()


@pytest.fixture
def call():
    made = Call()
    yield made
    made.lent.leave()


def on_another_stream(call):
    call.streams.now = 0


def while_it_is_captured(call):
    call.streams.status = 1


def where_the_driver_cannot_say(call):
    call.streams.fails = True


def while_somebody_has_the_output(call):
    call.held = call.lent.lend()


def with_a_weight_that_moved(call):
    call.weight.data = torch.randn(4)


def with_another_cache(call):
    call.cache = torch.zeros(4)


def with_an_input_in_the_cache(call):
    call.x = call.cache


OTHERWISE = [on_another_stream, while_it_is_captured, where_the_driver_cannot_say, while_somebody_has_the_output, with_a_weight_that_moved,
             with_another_cache, with_an_input_in_the_cache]  # fmt: skip


@pytest.mark.parametrize("otherwise", OTHERWISE)
def test_what_is_otherwise_is_looked_at_again(call, otherwise):
    assert call.found() == FED
    otherwise(call)
    num_set = call.machine.num_set
    assert call.found() == NOT_READY and call.machine.num_set == num_set, "nothing is changed by a look at what is not ready"


def with_an_input_that_lies_otherwise(call):
    call.x = torch.randn(8)[::2]


def with_an_input_of_another_kind(call):
    call.x = torch.arange(4)


def where_the_driver_refuses(call):
    call.machine.refuses = True


@pytest.mark.parametrize("otherwise", [with_an_input_that_lies_otherwise, with_an_input_of_another_kind, where_the_driver_refuses])
def test_inputs_that_a_recording_cannot_copy_are_left_to_torch(call, otherwise):
    otherwise(call)
    assert call.found() == READY


def test_every_call_like_the_last_is_ready_and_its_inputs_are_read(call):
    for _ in range(3):
        call.x = torch.randn(4)
        assert call.found() == FED
        call.machine.replay()
        assert torch.equal(call.slot.tensor, call.x)
        held = call.lent.lend()
        assert call.found() == NOT_READY
        del held
    call.streams.now = call.streams.last.value = 0
    assert call.found() == FED, "the default stream is as good as any"


def test_outputs_that_are_borrowed_may_be_held():
    call = Call(is_borrowed=True)
    held = call.lent.lend()
    assert call.found() == FED
    del held
    call.lent.leave()


def test_where_no_copies_are_recorded_torch_makes_them():
    call = Call(is_fed=False)
    assert call.found() == READY and not call.machine.num_set
    call.lent.leave()


def test_outputs_that_stand_anew_are_looked_at_where_they_are(call):
    """After one was moved to memory that processes share."""
    (sent,) = call.lent.lend()
    sent.share_memory_()
    assert call.found() == NOT_READY
    assert call.lent.is_gone() and call.found() == FED
    held = call.lent.lend()
    assert call.found() == NOT_READY
    del held, sent
    assert call.found() == FED


@pytest.mark.parametrize("missing", ["streams", "C", "counts", "counts of what is borrowed"])
def test_is_never_ready_where_it_cannot_look(monkeypatch, missing):
    if missing == "C":
        monkeypatch.setattr(slots, "native", lambda: None)
    args, streams = [torch.randn(4)], Streams()
    held, counts = slots.Slots(args, {0: None}, []), None if missing.startswith("counts") else native.Words(native.native())
    look = ready.Look(None if missing == "streams" else streams.facts, held, counts, None, missing == "counts of what is borrowed")
    assert look.function(args) == (READY if missing == "counts of what is borrowed" else NOT_READY)


def test_without_a_device_there_is_no_stream_to_look_at():
    args = [torch.randn(4)]
    held = slots.Slots(args, {0: None}, [])
    look = ready.Look(ready.stream_of(torch.device("cpu"), ctypes.c_int64(-1)), held, None, None, is_borrowed=True)
    assert look.function(args) == READY


def test_a_device_whose_functions_are_not_found_is_not_looked_at(monkeypatch):
    def missing(name, *_):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ready, "_functions", ready._functions.__wrapped__)
    monkeypatch.setattr(ready.ctypes, "CDLL", missing)
    assert ready.stream_of(torch.device("cuda", 0), ctypes.c_int64(-1)) is None


# -- through recordings


class Recordings(graphs.Recordings):
    """The copies are recorded, and made when the driver replays them; then the slots are added."""

    def make_recorder(self, body, fed):
        class Recorder:
            def begin(self):
                fed.issue()

            def end(self):
                fed.bind("a graph")
                return fed._device.replay

            def abort(self):
                raise AssertionError("nothing fails here")

        return Recorder()

    def _make(self, given, body, held):
        made = super()._make(given, body, held)
        copy = made.replay

        def replay():
            copy()
            made.outputs[0].copy_(held.each[0].tensor + held.each[1].tensor)

        replay()
        made.replay = replay
        return made


def test_recordings_that_copy_their_inputs_give_what_each_call_asks_for(monkeypatch):
    """Inputs lie as they like, and results are kept for as long as callers like."""
    machines = []

    def feeds_of(held, device):
        machines.append(Machine())
        return feeds.Feeds(held.each, [], native.native(), machines[-1])

    monkeypatch.setattr(graphs, "feeds_of", feeds_of)
    body, key, rng = Body(), Call(), random.Random(0)
    made = Recordings("two", torch.device("cpu"), graphs.Pool())

    def call(*args):
        out = made.replay(key, args)
        return out if out is not None else made.record(key, args, lambda: {0: None, 1: None}, body)

    def some():
        return rng.choice([torch.randn(8)[::2], torch.randn(5)[1:], torch.randn(4), torch.randn(4)])

    assert call(torch.randn(4), torch.randn(4)) is None and call(torch.randn(4), torch.randn(4)) is not None, "the second is recorded"
    held = []
    for _ in range(200):
        x, y = some(), some()
        held.append((call(x, y)[0], x + y))
        while len(held) > rng.choice([0, 1, 2, 3]):
            held.pop(rng.randrange(len(held)))
        assert all(torch.equal(*each) for each in held)
    assert len(machines) == len(made._kept[key].recordings) == graphs.MAX_ROTATION + 1
    key.lent.leave()


def test_a_bucket_that_another_thread_gives_up_is_not_asked_for():
    """While this one waits for the pool."""
    fast = df.compile(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), strategy=df.TwoBatch(), strict=True, runtime="graph")
    with torch.no_grad(), ThreadPoolExecutor(1) as pool:
        for size in (6, 6, 6, 8, 8, 8, 10, 10, 10):
            fast(torch.randn(size, 8))
        (made,) = (r for r in gc.get_objects() if type(r) is graphs.Recordings and r._pool is df.capture.of(fast).settings.pool)
        x = torch.randn(6, 8)
        with made._pool.lock:
            waiting = pool.submit(torch.no_grad()(fast), x)
            time.sleep(0.3)
            made._kept.popitem(last=False)
        torch.testing.assert_close(waiting.result(), fast.forward(x))
