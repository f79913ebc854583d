"""Python's garbage collector, held while a graph is captured and planned.

To trace a graph makes objects by the hundred thousand. That sets off collections of all that the process has loaded, a quarter of a second
each, which free next to nothing: what was made is still in use. So a capture, and planning, are left alone; while Inductor compiles,
which takes long and leaves graphs and tensors behind, the collector is on as ever. One that the user has turned off stays off.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# the collector is off, and it was on when we came
_is_held = False


def hold() -> Callable[[], None]:
    """From now on until what it returns is called."""
    if not gc.isenabled():
        return lambda: None
    _switch(False)
    return lambda: _switch(True)


@contextmanager
def held() -> Iterator[None]:
    release = hold()
    try:
        yield
    finally:
        release()


@contextmanager
def let_go() -> Iterator[None]:
    """As if nobody held it."""
    was_held = _is_held
    if was_held:
        _switch(True)
    try:
        yield
    finally:
        if was_held:
            _switch(False)


def _switch(on: bool) -> None:
    # Threads that capture side by side may let it go too early for each other. It ends where it began all the same.
    global _is_held
    _is_held = not on
    (gc.enable if on else gc.disable)()
