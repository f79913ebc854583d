"""How fast the machine is just now: on a lent one, a core may be half as fast as the next, and change within a second.

A fixed loop of Python tells: it computes a little, and looks at objects all over memory, which others on the machine may have pushed out of
its caches. A thread that is timed on the host sits on the core that is fastest, moves where that slows down, and what was timed while it
was slow is left out.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterable

# what a loop may take over the fastest that was seen
SLACK = 1.2
NUM_LOOPS = 5
# two hundred kilobytes, in no order: what a look at a few hundred weights takes
_OBJECTS = [float(i) for i in range(8192)]
random.Random(0).shuffle(_OBJECTS)


def run_loop(number: int = 0) -> int:
    """Nothing but Python, the same everywhere."""
    counts: dict[int, int] = {}
    for i in range(400):
        counts[i % 61] = counts.get(i % 61, number) + i
    return len(counts) if sum(_OBJECTS) else 0


def loop_us() -> float:
    """The fastest of a few: what interrupts one of them is not the core's pace."""
    found = []
    for _ in range(NUM_LOOPS):
        began = time.perf_counter()
        run_loop()
        found.append((time.perf_counter() - began) * 1e6)
    return min(found)


class Core:
    """This thread stays on one core (another has none of its data at hand) for as long as that is among the fastest."""

    def __init__(self) -> None:
        self._before = os.sched_getaffinity(0)
        self.best_us = float("inf")
        self.num_moves = 0

    def __enter__(self) -> Core:
        self._move(self._before)
        return self

    def __exit__(self, *_: object) -> None:
        os.sched_setaffinity(0, self._before)

    def look(self) -> float:
        """What the loop takes now."""
        now_us = loop_us()
        self.best_us = min(self.best_us, now_us)
        return now_us

    def is_fast(self) -> bool:
        return self.look() <= SLACK * self.best_us

    def settle(self) -> None:
        """Onto the fastest, where this one no longer is."""
        if not self.is_fast():
            self._move(self._before)
            self.num_moves += 1

    def _move(self, cores: Iterable[int]) -> None:
        found = {}
        for core in cores:
            os.sched_setaffinity(0, {core})
            found[core] = loop_us()
        fastest = min(found, key=lambda core: found[core])
        os.sched_setaffinity(0, {fastest})
        self.best_us = min(self.best_us, found[fastest])
