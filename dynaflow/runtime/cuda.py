"""CUDA streams: one host thread issues the launches in host order.

In the steady state that is the plan's generated function (`run`); a profiled call goes through the instructions (`issue`).

Values that cross streams live in the arena and in outputs, both allocated on the caller's stream, before the first launch or where
streams that touch them wait for it; or where their op put them, until their own stream is ordered behind all readers; the caller's
stream continues after every side stream. So no tensor is freed while a stream uses it, and nothing calls `record_stream`, but for
results in memory of side streams, where plans are called on several streams.
"""

from __future__ import annotations

import threading
from typing import Any, Collection, NamedTuple

import torch

from dynaflow.ir import Stream
from dynaflow.runtime.lanes import Run, without_autocast_cache
from dynaflow.runtime.program import LAUNCH, RECORD, Bound
from dynaflow.runtime.sm_shares import split_streams
from dynaflow.runtime.turns import go_behind, turns_of
from dynaflow.runtime.workspaces import make_workspace

_streams: dict[tuple[int, Stream], torch.cuda.Stream] = {}
_lock = threading.Lock()


def side_streams(
    device: torch.device, streams: tuple[Stream, ...], products: Collection[Stream] = (), is_recorded: bool = False
) -> list[torch.cuda.Stream]:
    """The CUDA streams behind a plan's. `products`: those of them that cuBLAS runs on; they have its workspace then. `is_recorded`: they
    are about to be captured."""
    if any(s.sms is not None for s in streams):
        shares = split_streams(streams, device)
        found = [shares[s.name] for s in streams]
    else:
        found = [side_stream(device, s) for s in streams]
    for stream, side in zip(streams, found):
        if stream in products:
            make_workspace(side, is_recorded)
    return found


def side_stream(device: torch.device, stream: Stream) -> torch.cuda.Stream:
    """The CUDA stream behind a name: one per device, name and settings, shared by all plans."""
    key = (device.index or 0, stream)
    with _lock:
        if key not in _streams:
            _streams[key] = torch.cuda.Stream(device, priority=stream.priority)
        return _streams[key]


class Callers(NamedTuple):
    """The streams that plans were called on: the first of them, the last, and whether there were several."""

    first: torch.cuda.Stream
    last: torch.cuda.Stream
    are_several: bool


_callers: dict[int, Callers] = {}


def _after_other_callers(device: torch.device, caller: torch.cuda.Stream) -> bool:
    """Memory that side streams allocated goes back to them when it is dropped, behind the caller that used it. The next caller may be on
    another stream: it goes on behind the last one, and with it all side streams. True where the allocator has to be told who uses
    results that are kept: their caller may read them for as long as it likes. It is told of none while there is one caller alone, since it
    would hold them back for longer: so that one is waited for by all others."""
    if torch.cuda.is_current_stream_capturing():
        return False  # recordings are replayed one after the other
    with _lock:
        first, last, are_several = _callers.get(device.index or 0, Callers(caller, caller, False))
        now = _callers[device.index or 0] = Callers(first, caller, are_several or caller != first)
    for other in dict.fromkeys((first, last)):
        if other != caller:
            go_behind(caller, other)
    return now.are_several


class CudaStreams:
    """The streams of one run: the current one is the caller's."""

    Event = torch.cuda.Event
    set_stream = staticmethod(torch.cuda.set_stream)

    def __init__(self, device: torch.device, bound: Bound):
        caller = torch.cuda.current_stream(device)
        self._are_several = bool(bound.streams) and _after_other_callers(device, caller)
        self.all = (caller, *side_streams(device, bound.streams, bound.product_streams))
        # recordings may have the same workspaces; inside of one, it is the one that takes its turn
        self._turns = turns_of(device) if bound.product_streams and not torch.cuda.is_current_stream_capturing() else None
        if self._turns is not None:
            self._turns.enter()

    def keep(self, result: torch.Tensor) -> None:
        """A result that lies in memory of a side stream: the caller's will read it."""
        if self._are_several:
            result.record_stream(self.all[0])

    def leave(self) -> None:
        """All is issued, and the caller's stream is current, behind the others."""
        if self._turns is not None:
            self._turns.leave()

    def join(self) -> None:
        """After an error: the caller's stream is current again, and goes on behind whatever was launched."""
        torch.cuda.set_stream(self.all[0])
        if not torch.cuda.is_current_stream_capturing():  # a recording is void anyway
            for side in self.all[1:]:
                self.all[0].wait_stream(side)
            self.leave()


def issue(bound: Bound, run: Run, device: torch.device) -> None:
    mine = CudaStreams(device, bound)
    streams = list(mine.all)
    caller = streams[0]
    events: dict[str, torch.cuda.Event] = {}
    timed: list[tuple[Any, Any, Any]] = []
    current = 0
    number = 0
    run.is_ahead = True
    origin = _mark(caller) if run.profile is not None else None
    profile, run.profile = run.profile, None
    try:
        for code, s, what in bound.instructions:
            if code == LAUNCH:
                for i in bound.drops[number]:
                    run.tensors[i] = None
                number += 1
                if s != current:
                    torch.cuda.set_stream(streams[s])
                    current = s
                if profile is None:
                    with without_autocast_cache():
                        run.launch(what)
                else:
                    begin = _mark(streams[s])
                    run.launch(what)
                    timed.append((what, begin, _mark(streams[s])))
                if run.error is not None:
                    break
            elif code == RECORD:
                event = events[what] = torch.cuda.Event()
                event.record(streams[s])
            else:
                streams[s].wait_event(events[what])
    finally:
        torch.cuda.set_stream(caller)
        if run.error is not None:
            for side in streams[1:]:
                caller.wait_stream(side)
        mine.leave()
    if run.error is None:
        for _, i in bound.outputs:
            mine.keep(run.tensors[i])
    if profile is not None and origin is not None:
        run.profile = profile
        caller.synchronize()
        for call, begin, end in timed:
            run.span(call, origin.elapsed_time(begin) * 1e3, origin.elapsed_time(end) * 1e3)
    run.close()


def _mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event
