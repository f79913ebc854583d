"""Python's garbage collector, held while a graph is captured and planned, or recorded.

To trace a graph makes objects by the hundred thousand. That sets off collections of all that the process has loaded, a quarter of a second
each, which free next to nothing: what was made is still in use. So a capture, and planning, are left alone; while Inductor compiles,
which takes long and leaves graphs and tensors behind, the collector is on as ever. One that the user has turned off stays off.

Each thread holds it for itself: it is off while any of them does, and on again behind the last.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class _Holder:
    """A thread, by how often it holds the collector."""

    num_holds = 0


class _Current(threading.local):
    def __init__(self) -> None:
        self.holder = _Holder()


_current = _Current()
# what a collection destroys may come here while we count
_counting = threading.RLock()
_num_holders = 0
# the collector is off, and was on when we came
_is_ours = False


def hold() -> Callable[[], None]:
    """From now on until what it returns is called, by whichever thread."""
    holder = _current.holder
    _add(holder, 1)
    return lambda: _add(holder, -1)


@contextmanager
def held() -> Iterator[None]:
    release = hold()
    try:
        yield
    finally:
        release()


@contextmanager
def let_go() -> Iterator[None]:
    """As if this thread did not hold it."""
    holder = _current.holder
    num_holds = holder.num_holds
    _add(holder, -num_holds)
    try:
        yield
    finally:
        _add(holder, num_holds)


def _add(holder: _Holder, num_holds: int) -> None:
    global _num_holders, _is_ours
    with _counting:
        held_before = holder.num_holds > 0
        holder.num_holds += num_holds
        _num_holders += (holder.num_holds > 0) - held_before
        if _num_holders and gc.isenabled():
            gc.disable()
            _is_ours = True
        elif not _num_holders and _is_ours:
            _is_ours = False
            gc.enable()
