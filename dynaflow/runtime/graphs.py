"""Bound plans as CUDA Graphs: all streams of a plan in one launch per call.

1. The first call with given sizes runs the plan launch by launch (kernels load, libraries make their workspaces).
2. The second records it. Inputs get slots that the engine owns; parameters, and inputs that the plan changes, are bound by address.
   What cannot be recorded (an op that waits for the device, say) stays between two recordings and is launched anew each time.
3. Later calls copy their inputs into the slots and replay. Outputs rotate: each recording of the same sizes has its own, and a
   recording is replayed only while nobody holds its last outputs. Where all of MAX_ROTATION are held, outputs are copied.
4. A call whose addresses differ is recorded anew; the oldest recordings go first.

All recordings of a compiled callable share one memory pool: they are replayed one after the other, and nothing in the pool has to
survive a replay. Slots and outputs are not in the pool: what one recording frees there, another may write to. But what is borrowed
may be overwritten by the next call anyway: the first recording of a pool, where no other can have been there before, allocates borrowed
outputs itself, as late as it can, and they lie where its own intermediate results were. How a recording is made is a parameter: on the
CPU nothing is recorded, and a replay issues the work again on the same memory.

Recordings with products run one after the other on a device, whoever made them (`turns`).
"""

from __future__ import annotations

import ctypes
import logging
import sys
import threading
import warnings
from collections import OrderedDict
from contextlib import suppress
from typing import Any, Callable, Protocol, Sequence
from weakref import WeakKeyDictionary, WeakSet

import torch

from dynaflow import collector
from dynaflow.runtime.driver import DriverError
from dynaflow.runtime.feeds import Feeds, feeds_of
from dynaflow.runtime.lent import Lent, by_address, let_go, outlived
from dynaflow.runtime.memsets import without_memsets
from dynaflow.runtime.ready import FED, Look, look_again, stream_of
from dynaflow.runtime.slots import Slots
from dynaflow.runtime.turns import go_behind, raw_stream, turns_of

log = logging.getLogger("dynaflow")

# recordings kept per captured graph
MAX_RECORDINGS = 32
# recordings of the same sizes, each with outputs of its own
MAX_ROTATION = 2
# recordings in a row that are never replayed before we stop making them
MAX_WASTED = 8
# attempts at recording one plan for one set of sizes: another thread that waits for the device makes an attempt void
MAX_FAILURES = 3

Step = Callable[[], Sequence[torch.Tensor]]
Between = Callable[[Step], Sequence[torch.Tensor]]


class Body(Protocol):
    """Issues all work on the given arguments, eager steps through `between`, puts the results into `outputs` and returns them."""

    def __call__(self, given: Sequence[Any], between: Between, outputs: Sequence[torch.Tensor] | None) -> Sequence[torch.Tensor]: ...

    def prepare(self) -> None:
        """Make what cannot be made while it is recorded: streams, and what libraries keep for them."""
        ...

    def make_outputs(self) -> list[torch.Tensor]: ...

    @property
    def allocates(self) -> bool:
        """Whether it may be given None for the outputs."""
        ...

    @property
    def has_products(self) -> bool:
        """Whether it computes in workspaces that libraries keep for its streams, or may."""
        ...

    # arguments that are changed in place, and those of which somebody promised that they stay where they are
    changed: Sequence[int]
    promised: Sequence[int]
    # outputs that nobody but a backward gets, and those of which the caller gets copies
    saved: Sequence[int]
    copied: Sequence[int]

    def has_steps(self) -> bool: ...

    def learn(self, error: BaseException) -> bool:
        """What could not be recorded becomes an eager step; False where the error says nothing of the kind."""
        ...


class Recorder(Protocol):
    """Turns work that is issued between `begin` and `end` into a function that does it again."""

    def begin(self) -> None: ...
    def end(self) -> Callable[[], Any]: ...
    def abort(self) -> None: ...


# what torch.cuda's own function comes down to; only CUDA builds have it
_is_capturing: Any = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)

_capture_streams: dict[int, torch.cuda.Stream] = {}


def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The one that recordings are made on."""
    index = device.index or 0
    if index not in _capture_streams:
        _capture_streams.setdefault(index, torch.cuda.Stream(device))
    return _capture_streams[index]


class CudaRecorder:
    def __init__(
        self, pool: Pool, device: torch.device, has_products: bool = True, keeps_memsets: bool = False, feeds: Feeds | None = None
    ):
        """`feeds`: copies that the first graph begins with."""
        self._pool, self._device, self._has_products, self._keeps_memsets = pool, device, has_products, keeps_memsets
        self._feeds = feeds
        self._context: Any = None
        self._guard: Any = None
        self._release: Callable[[], None] = lambda: None

    def begin(self) -> None:
        # torch's own capture stream belongs to whichever device was current when it was made
        self._guard = torch.cuda.device(self._device)
        self._guard.__enter__()
        # other recordings may be among the garbage: to destroy one now would make this one void
        self._release = collector.hold()
        self._stream = torch.cuda.current_stream(self._device)
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)
        stream = capture_stream(self._device)
        handle = self._pool.handle_for(stream)
        self._context = torch.cuda.graph(self._graph, pool=handle, stream=stream, capture_error_mode="thread_local")
        self._context.__enter__()
        if self._feeds is not None:
            self._feeds.issue()

    def end(self) -> Callable[[], Any]:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")  # two eager steps in a row
            self._context.__exit__(None, None, None)
        if not self._keeps_memsets:
            without_memsets(self._graph, capture_stream(self._device))
        self._graph.instantiate()
        if self._feeds is not None:
            self._feeds.bind(self._graph)
            self._feeds = None  # of what is recorded in pieces, the first has them
        self._leave()
        launch = super(torch.cuda.CUDAGraph, self._graph).replay  # what torch's own method comes down to
        return turns_of(self._device).takes(launch) if self._has_products else launch

    def _leave(self) -> None:
        if self._guard is not None:
            self._release()
            self._guard.__exit__(None, None, None)
            self._guard = None

    def abort(self) -> None:
        """A capture that fails leaves its stream current, the allocator with its pool, and the generator refusing to draw."""
        if self._guard is None:
            return  # nothing was being recorded
        if self._context is not None:
            try:
                self._context.__exit__(*sys.exc_info())
            except RuntimeError as error:
                log.debug("the recording was already void: %s", error)
        torch.cuda.set_stream(self._stream)
        if self._pool.handle is not None:
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self._device.index or 0, self._pool.handle)
                # a capture that did not get that far never gives the pool back either
                torch._C._cuda_releasePool(self._device.index or 0, self._pool.handle)
        self._pool.renew()
        try:
            # The next capture that succeeds, an empty one at that, makes the generator draw again. Another state in its place would not
            # do: earlier recordings draw from this one.
            self._pool.handle_for(capture_stream(self._device))
        finally:
            self._leave()


class Last:
    """The stream that replays of one pool were last launched on, on one device."""

    def __init__(self) -> None:
        self.stream: Any = None
        # its number, where it can be seen from C; no stream has that of none
        self.raw = ctypes.c_int64(-1)

    def enter(self, device: torch.device) -> None:
        """This replay comes after the last one, whatever stream that was on."""
        if device.type != "cuda":
            return
        raw = raw_stream(device.index or 0)
        if raw == self.raw.value:
            return
        stream = torch.cuda.current_stream(device)
        if self.stream is not None:
            go_behind(stream, self.stream)
        self.stream, self.raw.value = stream, raw


class Pool:
    """The memory that the recordings of one compiled callable share, and the order in which they run."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.handle: Any = None
        # by device, as what follows: torch has memory of its own on each, and default streams have the same number on all
        self._keepers: dict[int, Any] = {}
        self._last: dict[int, Last] = {}
        self._is_new = True

    def handle_for(self, stream: torch.cuda.Stream) -> Any:
        """What torch knows the memory by. An empty recording keeps it: torch refuses a pool whose recordings are all gone."""
        if self.handle is None:
            self.handle = torch.cuda.graph_pool_handle()
        if stream.device_index not in self._keepers:
            keeper = torch.cuda.CUDAGraph()
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
                # it waits for the device first: to begin a capture writes to where recordings in flight read what they draw from
                with torch.cuda.graph(keeper, pool=self.handle, stream=stream, capture_error_mode="thread_local"):
                    pass
            self._keepers[stream.device_index] = keeper
        return self.handle

    def renew(self) -> None:
        """Other memory, from now on."""
        self.handle = None
        self._keepers.clear()

    def is_new(self) -> bool:
        """Whether nothing was recorded there before; something is, from now on."""
        was_new, self._is_new = self._is_new, False
        return was_new

    def last_on(self, device: torch.device) -> Last:
        return self._last.setdefault(device.index or 0, Last())


class Recording:
    """One body on fixed memory, with outputs of its own. Making it runs it."""

    def __init__(self, body: Body, given: Sequence[Any], recorder: Recorder | None, allocates: bool = False):
        """`allocates`: its outputs lie in the pool, where the body allocates them."""
        self._recorder = recorder
        self._pieces: list[Callable[[], Any]] = []
        # what the allocator has to know of streams that use it; the one that does now
        self._memory: list[torch.Tensor] = []
        self.stream: Any = None
        body.prepare()
        # Mostly outside of the pool: what a recording allocates while it is made, another one may use for whatever it likes.
        made = None if allocates else body.make_outputs()
        outputs: Sequence[torch.Tensor]
        if recorder is None:
            # of promised weights the tensors themselves: should somebody break the promise, what is read is stale, not gone
            known = [a if i in body.promised else by_address(a) for i, a in enumerate(given)]
            outputs = body(known, self._run_step, made)
            self._pieces.append(lambda: body(known, Recording._run_step, outputs))
        else:
            try:
                recorder.begin()
                outputs = body(given, self._between, made)
                self._close()
            except BaseException:
                recorder.abort()
                raise
        self.outputs = outputs
        self._memory += made or ()
        # tells it where its inputs are
        self.feed: Callable[[Sequence[Any]], bool] = lambda args: True
        # what one look at a call's arguments finds
        self.look: Callable[[Sequence[Any]], int] = look_again
        self.replay = self._pieces[0] if len(self._pieces) == 1 else self._replay
        self.lent = Lent(outputs, body.saved, body.copied)

    def looks(self, look: Look, slots: Slots) -> None:
        self._look, self.look = look, look.function
        self._memory += [slot.tensor for slot in slots.each]

    def go_to(self, stream: Any) -> None:
        """Its replays are launched on this stream from now on (None: there are no streams). Whoever had its outputs last may still be
        reading them, on the stream of that call, and later than whatever ran since. And when the recording goes, its memory must not
        be given away while this stream uses it: it is of the stream that was current when it was made."""
        if stream is None or stream is self.stream:
            return
        if self.stream is not None:
            go_behind(stream, self.stream)
        self.stream = stream
        for tensor in self._memory:
            if tensor.device.type == "cuda":
                tensor.record_stream(stream)

    def _replay(self) -> None:
        for piece in self._pieces:
            piece()

    def _close(self) -> None:
        assert self._recorder is not None
        replay = self._recorder.end()
        self._pieces.append(replay)
        replay()

    def _between(self, step: Step) -> Sequence[torch.Tensor]:
        """End one recording, run `step` as it is, begin the next. Its results stay where they are the first time."""
        assert self._recorder is not None
        self._close()
        results = list(step())
        self._memory += results

        def again() -> None:
            for mine, new in zip(results, step()):
                mine.copy_(new)

        self._pieces.append(again)
        self._recorder.begin()
        return results

    @staticmethod
    def _run_step(step: Step) -> Sequence[torch.Tensor]:
        return step()

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        # at the end of the process modules go away in any order: what leaving needs may be gone, and so will be the memory
        if hasattr(self, "lent") and not is_ending():
            self.lent.leave()


# One recording at a time in the whole process: beginning one waits for the device, which makes any other void.
one_at_a_time = threading.RLock()


def as_replay(pool: Pool, device: torch.device, work: Callable[[], Any], keeps_memsets: bool = False) -> Callable[[], Any]:
    """What `work` launches, recorded: a function that launches it again. Where it fails, nothing is left of the attempt. Who launches
    products makes the workspace of `capture_stream` before. `keeps_memsets`: as in the graphs that others capture."""
    recorder = CudaRecorder(pool, device, keeps_memsets=keeps_memsets)
    with one_at_a_time:
        try:
            recorder.begin()
            work()
            return recorder.end()
        except BaseException:
            recorder.abort()
            raise


class Bucket:
    """One set of sizes at given addresses."""

    def __init__(self, slots: Slots, body: Body):
        self.slots, self._body = slots, body
        self.recordings: list[Recording] = []
        self.num_replays = 0

    def run(
        self, args: Sequence[Any], record: Callable[[Sequence[Any], Body, Slots], Recording], borrow: bool, stream: Any = None
    ) -> list[torch.Tensor]:
        """The outputs: the recording's own, lent, or copies. `stream`: the current one, None where there are none."""
        for number, recording in enumerate(self.recordings):
            if borrow or number == MAX_ROTATION or recording.lent.is_gone():
                if not recording.feed(args):
                    raise _Refused
                recording.go_to(stream)
                recording.replay()
                self.num_replays += 1
                break
        else:
            self.slots.fill(args)
            number, recording = len(self.recordings), record(self.slots.given(args), self._body, self.slots)
            recording.go_to(stream)
            self.recordings.append(recording)
        if borrow:
            return [o.data for o in recording.outputs]
        return [o.clone() for o in recording.outputs] if number == MAX_ROTATION else recording.lent.lend()


class Recordings:
    """The recordings of one captured graph. What stands for given sizes and a given plan (`key`) may go; it is not kept alive."""

    def __init__(self, name: str, device: torch.device, pool: Pool, borrow: bool = False):
        self._name, self._device, self._pool, self._borrow = name, device, pool, borrow
        self._is_cuda = device.type == "cuda"
        self._seen: WeakSet[Any] = WeakSet()
        self._failures: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._kept: OrderedDict[Any, Bucket] = OrderedDict()
        self._num_wasted = 0
        # whether recordings may copy their inputs themselves
        self._may_feed = True
        self._last = pool.last_on(device)
        self._stream = stream_of(device, self._last.raw)

    def replay(self, key: Any, args: Sequence[Any]) -> list[torch.Tensor] | None:
        """The outputs, if something is recorded that fits. On the path of every call: spelt out."""
        with self._pool.lock:
            bucket = self._kept.get(key)
            if bucket is None:
                return None
            for recording in bucket.recordings[:MAX_ROTATION]:
                if (found := recording.look(args)) and (found == FED or recording.feed(args)):
                    break
            else:
                if (self._is_cuda and _is_capturing()) or not bucket.slots.fit(args):
                    return None  # inside the caller's own recording; or something is elsewhere
                return self._run(key, bucket, args)
            if len(self._kept) > 1:
                self._kept.move_to_end(key)
            if outlived:
                let_go()
            if recording.stream is not self._last.stream:
                recording.go_to(self._last.stream)
            recording.replay()
            bucket.num_replays += 1
            return [o.data for o in recording.outputs] if self._borrow else recording.lent.lend()

    def record(
        self, key: Any, args: Sequence[Any], copied: Callable[[], dict[int, tuple[int, int] | None]], body: Body
    ) -> list[torch.Tensor] | None:
        """The outputs, if this call is one to be recorded; None when it is to run launch by launch.

        `key` stands for all that the body depends on besides its tensors; `copied` says which arguments get slots.
        """
        if self._is_cuda and _is_capturing():
            return None
        with self._pool.lock:
            if key not in self._seen or self._failures.get(key, 0) >= MAX_FAILURES:
                self._seen.add(key)
                return None
            old = self._kept.pop(key, None)
            if old is not None:
                self._num_wasted = 0 if old.num_replays else self._num_wasted + 1
                if self._num_wasted >= MAX_WASTED:
                    self._failures[key] = MAX_FAILURES
                    log.warning("%s gets tensors at new addresses on every call (a new cache each time?): it is no longer recorded, and "
                                "runs launch by launch", self._name)  # fmt: skip
                    return None
            bucket = self._kept[key] = Bucket(Slots(args, copied(), body.changed, body.promised), body)
            return self._run(key, bucket, args)

    def _run(self, key: Any, bucket: Bucket, args: Sequence[Any]) -> list[torch.Tensor] | None:
        with self._pool.lock:
            self._last.enter(self._device)
            if len(self._kept) > 1 and key in self._kept:
                self._kept.move_to_end(key)
            let_go()
            try:
                return bucket.run(args, self._record, self._borrow, self._last.stream)
            except _Refused:  # of what is recorded from now on, torch copies the inputs
                self._may_feed = False
                self._kept.pop(key, None)
                log.warning("%s: the driver refuses to change where a CUDA Graph reads; inputs are copied ahead of it", self._name)
                return None
            except _Unrecordable as error:
                self._kept.pop(key, None)
                self._failures[key] = self._failures.get(key, 0) + 1
                log.warning("%s cannot be recorded in a CUDA Graph and runs launch by launch: %s", self._name, error)
                return None

    def trial(self, given: Sequence[Any], body: Body) -> Callable[[], None] | None:
        """The replay of a recording that is not kept for calls; None where nothing can be recorded."""
        with self._pool.lock:
            self._last.enter(self._device)
            try:
                recording = self._make(given, body, None)
            except _Unrecordable as error:
                log.info("%s cannot be recorded in a CUDA Graph: %s", self._name, error)
                return None

        def replay() -> None:
            with self._pool.lock:  # calls share the memory
                self._last.enter(self._device)
                recording.replay()  # not this function alone: what it writes to is the recording's

        return replay

    def forget(self, key: Any) -> None:
        """What is recorded for a plan that runs no more."""
        with self._pool.lock:
            self._kept.pop(key, None)

    def _record(self, given: Sequence[Any], body: Body, slots: Slots) -> Recording:
        while self._num_recordings() >= MAX_RECORDINGS and len(self._kept) > 1:
            self._kept.popitem(last=False)
        return self._make(given, body, slots)

    def _make(self, given: Sequence[Any], body: Body, slots: Slots | None) -> Recording:
        """`slots`: None for a recording that is not kept for calls."""
        while True:
            feeds = feeds_of(slots, self._device) if self._may_feed else None
            recorder = self.make_recorder(body, feeds)
            is_first = self._pool.is_new()
            # With eager steps, what comes before a failure has run already: it must not run twice on the caller's tensors.
            saved = [(given[i], given[i].clone()) for i in body.changed] if body.has_steps() or recorder is None else []
            try:
                with one_at_a_time:
                    recording = Recording(body, given, recorder, self._borrow and slots is not None and is_first and body.allocates)
            except Exception as error:
                for tensor, before in saved:
                    tensor.copy_(before)
                if isinstance(error, DriverError) and feeds is not None:
                    log.info("%s: inputs are copied ahead of its CUDA Graphs: %s", self._name, error)
                    self._may_feed = False
                    continue
                if not body.learn(error):
                    raise _Unrecordable(f"{type(error).__name__}: {error}") from error
                log.info("%s: recorded in pieces around what cannot be recorded (%s: %s)", self._name, type(error).__name__, error)
            else:
                if slots is not None:
                    feeds = feeds if feeds is not None and feeds.is_bound else None
                    recording.feed = slots.fill if feeds is None else feeds
                    recording.looks(Look(self._stream, slots, recording.lent.counts, feeds, self._borrow), slots)
                return recording

    def make_recorder(self, body: Body, feeds: Feeds | None) -> Recorder | None:
        return CudaRecorder(self._pool, self._device, body.has_products, feeds=feeds) if self._device.type == "cuda" else None

    def _num_recordings(self) -> int:
        return sum(len(bucket.recordings) for bucket in self._kept.values())


class _Unrecordable(Exception):
    pass


class _Refused(Exception):
    """A recording cannot be told where its inputs are."""
