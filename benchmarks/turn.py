"""A process's turn: processes load and compile side by side, and each has the machine to itself while it is timed.

`benchmarks.runner` starts a wave of processes and gives out turns when all of them are waiting, and no other suite is loading beside it;
where one has waited for long, those that still load are held meanwhile.
Kernels that are tuned while a process loads are timed under a lock that all processes share: whoever tunes is alone with the device, too.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

POLL_S = 0.02
LOCK, MACHINE = (Path(tempfile.gettempdir()) / f"dynaflow-benchmarks.{what}" for what in ("lock", "machine"))

_place: Path | None = None
# seconds that this process waited for its turn
waited_s = 0.0


def ready(place: Path) -> Path:
    return place.with_suffix(".ready")


def given(place: Path) -> Path:
    return place.with_suffix(".turn")


def expect(place: str, tunes_alone: bool = True) -> None:
    """Inside a process that others run beside: turns are given out at this place. Without one, `take` does not wait."""
    global _place
    _place = Path(place) if place else None
    if tunes_alone:
        _tune_alone()


def take() -> None:
    """Wait until the machine is this process's own; it stays so until it ends."""
    global _place, waited_s
    if _place is None:
        return
    place, _place = _place, None
    began = time.perf_counter()
    ready(place).touch()
    while not given(place).exists():
        time.sleep(POLL_S)
    waited_s += time.perf_counter() - began


class Machine:
    """Shared by suites whose processes load, one's own while a process has its turn."""

    def __init__(self) -> None:
        self._file = MACHINE.open("w")

    def try_share(self) -> bool:
        return self._try(fcntl.LOCK_SH)

    def try_own(self) -> bool:
        """Who fails has lost the share, too: so two suites that are ready do not wait for each other."""
        return self._try(fcntl.LOCK_EX)

    def let_others(self) -> None:
        """Between two waves: who waits for a turn gets it."""
        fcntl.flock(self._file, fcntl.LOCK_UN)
        time.sleep(10 * POLL_S)

    def _try(self, how: int) -> bool:
        try:
            fcntl.flock(self._file, how | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def leave(self) -> None:
        self._file.close()


@contextlib.contextmanager
def sharing() -> Iterator[None]:
    """Others load meanwhile, and nobody has a turn."""
    machine = Machine()
    try:
        while not machine.try_share():
            time.sleep(POLL_S)
        yield
    finally:
        machine.leave()


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    global waited_s
    began = time.perf_counter()
    with LOCK.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        waited_s += time.perf_counter() - began
        yield


@contextlib.contextmanager
def nobody_tunes() -> Iterator[bool]:
    """Whether nobody does; then nobody begins to, either."""
    with LOCK.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def _tune_alone() -> None:
    """Inductor times what it may choose among through these."""
    from torch._inductor.runtime import benchmarking

    for name in ("TritonBenchmarker", "InductorBenchmarker"):
        if (kind := getattr(benchmarking, name, None)) is not None and "benchmark_gpu" in vars(kind):
            kind.benchmark_gpu = _locked(kind.benchmark_gpu)


def _locked(timed: Any) -> Any:
    @functools.wraps(timed)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _alone():
            return timed(*args, **kwargs)

    return call
