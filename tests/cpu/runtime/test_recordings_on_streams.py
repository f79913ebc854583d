"""Recordings that are replayed on several streams, and what is left of a capture that fails: on a made-up device."""

import ctypes
from types import SimpleNamespace

import pytest
import torch

from dynaflow.runtime import cuda, graphs, native, turns
from tests.cpu.runtime.recorder import Body


class Stream:
    def __init__(self, machine, device, number):
        self.machine, self.number, self.name = machine, number, f"{device}.{number}"

    def wait_stream(self, other):
        self.machine.log.append(f"{self.name} waits for {other.name}")

    def __eq__(self, other):
        return self.name == other.name

    def __hash__(self):
        return hash(self.name)


class Device:
    """Streams that write down who waits for whom. They are numbers; the same number is another stream on another device."""

    def __init__(self, monkeypatch):
        self.log, self.now, self.captured = [], 1, set()
        monkeypatch.setattr(graphs, "raw_stream", lambda index: self.now)
        monkeypatch.setattr(graphs, "_is_capturing", lambda: False)
        monkeypatch.setattr(graphs, "stream_of", self.stream_of)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.stream(device.index))
        monkeypatch.setattr(turns, "is_captured", lambda stream: stream.number in self.captured)
        self._current = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))(self._give_current)
        self._capturing = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int32))(self._give_status)

    def stream(self, device):
        return Stream(self, device, self.now)

    def _give_current(self, device, found):
        found[0] = self.now
        return 0

    def _give_status(self, stream, found):
        found[0] = 0
        return 0

    def stream_of(self, device, last):
        functions = [ctypes.cast(f, ctypes.c_void_p).value for f in (self._current, self._capturing)]
        made = native.Stream(*functions, device.index, ctypes.addressof(last))
        made.kept = last
        return made


class Key:
    pass


class Call:
    """Calls of one recorded plan."""

    def __init__(self, machine, pool, device=0):
        self.machine, self.key, self.body = machine, Key(), Body()
        self.recordings = graphs.Recordings("toy", torch.device("cuda", device), pool)
        self.recordings.make_recorder = lambda body, feeds: SimpleNamespace(begin=int, end=lambda: self._replay, abort=int)
        self.args = [torch.zeros(4)]
        for _ in range(2):
            self.record()

    def _replay(self):
        self.machine.log.append("replay")

    def record(self):
        return self.recordings.record(self.key, self.args, lambda: {0: None}, self.body)

    def __call__(self, on):
        """The outputs, and what happened on the way."""
        self.machine.now, before = on, len(self.machine.log)
        outputs = self.recordings.replay(self.key, self.args)
        assert outputs is not None
        return outputs, self.machine.log[before:]


@pytest.fixture
def machine(monkeypatch):
    return Device(monkeypatch)


def test_outputs_are_overwritten_behind_whoever_read_them_last(machine):
    """Stream 1 goes on reading what it got while 2 calls: when 2 gets the same memory, it waits for 1 once more."""
    call = Call(machine, graphs.Pool())
    read_on_1, seen = call(1)
    assert seen == ["replay"]
    kept, seen = call(2)
    assert seen == ["0.2 waits for 0.1", "replay"] and len(call.recordings._kept[call.key].recordings) == 2
    del read_on_1  # by now, stream 1 has a kernel that reads it
    _, seen = call(2)
    assert seen == ["0.2 waits for 0.1", "replay"]
    del kept
    for _ in range(3):
        assert call(2)[1] == ["replay"], "all is ordered"


def test_memory_goes_back_behind_every_stream_that_used_it(machine):
    """Of a recording that goes: what it allocated is of the stream that was current then."""
    call = Call(machine, graphs.Pool())
    (recording,) = call.recordings._kept[call.key].recordings
    used = []
    kinds = [torch.device("cuda", 0), torch.device("cpu")]
    assert [t.shape for t in recording._memory] == [torch.Size([4])] * 2, "its output and its slot"
    recording._memory = [SimpleNamespace(device=d, record_stream=lambda stream, d=d: used.append((d.type, stream.name))) for d in kinds]
    for stream in (1, 1, 2, 2, 1):
        call(stream)
    assert used == [("cuda", "0.2"), ("cuda", "0.1")]


def test_replays_of_one_device_are_ordered_whatever_runs_on_another(machine):
    """The default streams of two devices have the same number."""
    pool = graphs.Pool()
    first, second = Call(machine, pool), Call(machine, pool, device=1)
    first(1), second(1)
    assert second(2)[1][0] == "1.2 waits for 1.1"
    assert first(2)[1][0] == "0.2 waits for 0.1"
    assert "0.2 waits for 1.2" not in machine.log, "what is on two devices shares nothing"


def test_nobody_waits_for_a_stream_that_is_captured(machine):
    """He would become part of the capture."""
    call = Call(machine, graphs.Pool())
    call(1)
    machine.captured.add(1)
    assert call(2)[1] == ["replay"]
    machine.captured.clear()
    assert call(1)[1][0] == "0.1 waits for 0.2"


class Caller:
    """Plans launch by launch, with a result in memory of a side stream."""

    def __init__(self, machine, monkeypatch):
        self.machine, self.told = machine, []
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(cuda, "side_streams", lambda device, streams, products: [])
        monkeypatch.setattr(cuda, "_callers", {})

    def __call__(self, on):
        """Who waits for whom, and who the allocator is told of."""
        self.machine.now, before, told = on, len(self.machine.log), []
        bound = SimpleNamespace(streams=("aux0",), product_streams=())
        cuda.CudaStreams(torch.device("cuda", 0), bound).keep(SimpleNamespace(record_stream=lambda stream: told.append(stream.name)))
        return self.machine.log[before:], told


def test_results_of_side_streams_are_their_caller_s_to_read(machine, monkeypatch):
    """What the first caller got was not told of: all others go behind it whenever they call."""
    call = Caller(machine, monkeypatch)
    assert call(1) == call(1) == ([], []), "one caller: what it drops comes back behind it"
    assert call(2) == (["0.2 waits for 0.1"], ["0.2"])
    assert call(2) == (["0.2 waits for 0.1"], ["0.2"])
    assert call(3) == (["0.3 waits for 0.1", "0.3 waits for 0.2"], ["0.3"])
    assert call(1) == (["0.1 waits for 0.3"], ["0.1"])
    assert call(1) == ([], ["0.1"])


def test_a_caller_that_is_captured_is_not_waited_for(machine, monkeypatch):
    call = Caller(machine, monkeypatch)
    call(1)
    machine.captured.add(1)
    assert call(2) == ([], ["0.2"])


# -- captures that fail


class Torch:
    """What torch keeps of captures: the generator that graphs draw from, and who uses which pool. As of 2.11."""

    def __init__(self, monkeypatch):
        self.uses, self.underway, self.drawn = {}, [], 0
        self.generator = SimpleNamespace(is_capturing=False)
        self.is_void = self.is_idle = False
        torchs = self

        class Graph:
            def __init__(self, keep_graph=False):
                self.pool, self.is_ended, self.generator = None, False, torchs.generator

            def capture_begin(self, pool=None, capture_error_mode="global"):
                assert torchs.is_idle, "recordings in flight read what this writes"
                self.pool, torchs.is_idle = pool, False
                torchs.uses[pool] = torchs.uses.get(pool, 0) + 1
                torchs.underway.append(pool)
                self.generator.is_capturing = True

            def capture_end(self):
                if torchs.is_void:
                    torchs.is_void = False
                    raise RuntimeError("operation failed due to a previous error during capture")
                torchs.underway.remove(self.pool)
                self.generator.is_capturing = False
                self.is_ended = True

            def instantiate(self):
                pass

            def __del__(self):
                if self.is_ended:
                    torchs.uses[self.pool] -= 1

        class Replayed(Graph):
            def replay(self):
                raise AssertionError("torch's own is called")

        def replay(graph):
            assert not graph.generator.is_capturing, "Offset increment outside graph capture encountered unexpectedly."
            torchs.drawn += 1

        Graph.replay = replay

        class capture:
            def __init__(self, graph, pool, stream, capture_error_mode):
                self.graph, self.pool = graph, pool

            def __enter__(self):
                torchs.is_idle = True
                self.graph.capture_begin(pool=self.pool)

            def __exit__(self, *error):
                self.graph.capture_end()

        class nothing:
            def __init__(self, *args): ...
            def __enter__(self): ...
            def __exit__(self, *error): ...

        handles = iter(range(1, 99))
        stream = SimpleNamespace(device_index=0)
        for name, value in {
            "CUDAGraph": Replayed, "graph": capture, "device": nothing, "stream": nothing, "current_stream": lambda device: stream,
            "set_stream": lambda stream: None, "graph_pool_handle": lambda: next(handles)}.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(graphs, "capture_stream", lambda device: stream)
        monkeypatch.setattr(graphs, "without_memsets", lambda graph, stream: None)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self.end_allocate, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_releasePool", self.release, raising=False)

    def end_allocate(self, device, pool):
        if pool not in self.underway:
            raise RuntimeError("not currently recording to mempool_id")
        self.underway.remove(pool)

    def release(self, device, pool):
        self.uses[pool] -= 1


@pytest.mark.parametrize("is_void", [True, False])
def test_what_fails_leaves_the_generator_to_earlier_recordings_and_gives_its_pool_back(monkeypatch, is_void):
    """`is_void`: the capture cannot even be ended."""
    torchs, pool = Torch(monkeypatch), graphs.Pool()

    def recorder():
        return graphs.CudaRecorder(pool, torch.device("cuda", 0), has_products=False)

    earlier = recorder()
    earlier.begin()
    draw, old = earlier.end(), pool.handle
    failing = recorder()
    failing.begin()
    torchs.is_void = is_void
    failing.abort()
    draw()
    assert torchs.drawn == 1 and pool.handle != old and not torchs.underway
    del failing
    assert torchs.uses[old] == 1, "the earlier recording's"
    del earlier, draw
    assert torchs.uses[old] == 0, "torch may free it"
    later = recorder()
    later.begin()
    later.end()()
    assert torchs.drawn == 2


def test_a_pool_is_kept_on_every_device_that_it_is_used_on(monkeypatch):
    """torch counts its users on each."""
    torchs, pool = Torch(monkeypatch), graphs.Pool()
    handles = [pool.handle_for(SimpleNamespace(device_index=index)) for index in (0, 1, 0, 1)]
    assert len(set(handles)) == 1 and torchs.uses == {handles[0]: 2}
    pool.renew()
    assert torchs.uses == {handles[0]: 0}
