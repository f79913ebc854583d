"""Who shares memory comes one after the other, whatever streams and threads it is launched from.

Recordings have the workspaces of the streams in them that they were recorded on (`workspaces`), and all are recorded on the same ones: so
recordings of one device take turns, with each other and with plans that are issued launch by launch on these streams. The next turn waits
for an event behind the last one, not for a stream: that may be part of somebody's capture by then.

Plans that two threads issue launch by launch at once have no turns, but the order of the streams that they share.
"""

from __future__ import annotations

import threading
from typing import Any, Callable

import torch

# what torch.cuda's own function comes down to; only CUDA builds have it
raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def is_captured(stream: Any) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


def go_behind(stream: Any, other: Any) -> None:
    """What a stream gets from now on comes after all that the other one has. Not while the other one is captured: whoever waits for it
    becomes part of the capture. What it had before is over: torch begins a capture with a wait for the device."""
    if not is_captured(other):
        stream.wait_stream(other)


class Turns:
    def __init__(self, device: torch.device):
        self._device, self._index = device, device.index or 0
        # nothing else is locked while it is held
        self._lock = threading.RLock()
        self._event: Any = None
        self._stream: Any = None
        self._raw: int | None = None

    def enter(self) -> None:
        """The current stream goes on behind what had the last turn."""
        with self._lock:
            raw = raw_stream(self._index)
            if raw != self._raw:
                self._stream, self._raw = torch.cuda.current_stream(self._device), raw
                if self._event is None:
                    self._event = torch.cuda.Event()
                else:
                    self._stream.wait_event(self._event)

    def leave(self) -> None:
        """The next turn is behind what the current stream has by now."""
        with self._lock:
            self.enter()  # who came in between is over, too
            self._event.record(self._stream)

    def takes(self, replay: Callable[[], Any]) -> Callable[[], None]:
        """The replay, as a turn. On the path of every call: spelt out."""
        lock, index = self._lock, self._index

        def run() -> None:
            with lock:
                if raw_stream(index) != self._raw:
                    self.enter()
                replay()
                self._event.record(self._stream)

        return run


_turns: dict[int, Turns] = {}


def turns_of(device: torch.device) -> Turns:
    return _turns.setdefault(device.index or 0, Turns(device))
