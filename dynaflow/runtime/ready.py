"""All that a call of a recording looks at, in one look.

Mostly everything is as it was at the last call: the same stream, which nobody captures; nobody has the outputs; weights are where they
were; inputs lie as their slots do. `look` in native.c sees that in one go, and tells the recording's copies where to read. Whatever it does
not find as it was, it leaves to who looks again, in Python.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Any, Callable, Sequence

import torch

from dynaflow.runtime.feeds import Feeds
from dynaflow.runtime.native import Ready, Stream, Words
from dynaflow.runtime.slots import Slots

# what a look finds: what is to be looked at again; a recording that can be replayed once its inputs are copied; one that copies them itself
NOT_READY, READY, FED = range(3)


def look_again(args: Sequence[Any]) -> int:
    return NOT_READY


class Look:
    """Of one recording. `function` is to be called while this is kept."""

    def __init__(self, stream: Stream | None, slots: Slots, counts: Words | None, feeds: Feeds | None, is_borrowed: bool = False):
        """`stream`, `counts` of references to outputs: None where they cannot be asked for. `feeds`: copies that are part of the
        recording. `is_borrowed`: whoever has the outputs has them until this call."""
        self.function: Callable[[Sequence[Any]], int] = look_again
        if stream is None or slots.check is None or (counts is None and not is_borrowed):
            return
        words = None if counts is None or is_borrowed else counts.facts
        copies = feeds.facts if feeds is not None and feeds.is_all else None
        parts: tuple[ctypes.Structure | None, ...] = (stream, words, slots.check.facts, copies)
        facts = Ready(*[None if part is None else ctypes.addressof(part) for part in parts])
        self._kept = (parts, facts, slots, counts, feeds)
        self.function = slots.check.native.look(facts)


def stream_of(device: torch.device, last: ctypes.c_int64) -> Stream | None:
    """What is asked for the device's current stream. `last`: the one of the last replay."""
    if device.type != "cuda":
        return Stream(None, None, 0, None)
    functions = _functions()
    if functions is None:
        return None
    made = Stream(*functions, device.index or 0, ctypes.addressof(last))
    made.kept = last  # type: ignore[attr-defined]
    return made


@cache
def _functions() -> tuple[int | None, ...] | None:
    """torch's that gives the current stream, and the driver's that says whether somebody captures it."""
    try:
        torchs = ctypes.CDLL(os.path.join(torch.__path__[0], "lib", "libtorch_cuda.so")).aoti_torch_get_current_cuda_stream
        drivers = ctypes.CDLL("libcuda.so.1").cuStreamIsCapturing
    except (OSError, AttributeError):
        return None
    return tuple(ctypes.cast(function, ctypes.c_void_p).value for function in (torchs, drivers))
