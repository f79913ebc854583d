"""Timeline: a Plan with times, simulated or measured. What was busy when, and how much of it lay beside something else."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from os import PathLike

# [start, end) in microseconds, sorted and disjoint
Intervals = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Span:
    """One launch on one stream."""

    stream: str
    # the launch's label: "layers.0.attn 1/2"
    label: str
    start_us: float
    end_us: float
    # the op's kind, where known
    kind: str = ""


@dataclass(frozen=True)
class Timeline:
    spans: tuple[Span, ...]
    title: str = ""
    # lanes in the order to show them; streams that are not named follow in order of first use
    lanes: tuple[str, ...] = ()

    @cached_property
    def streams(self) -> tuple[str, ...]:
        """Streams that have spans."""
        used = dict.fromkeys(s.stream for s in self.spans)
        return tuple(s for s in dict.fromkeys((*self.lanes, *used)) if s in used)

    @property
    def start_us(self) -> float:
        return min((s.start_us for s in self.spans), default=0.0)

    @property
    def total_us(self) -> float:
        """From the first start to the last end."""
        return max((s.end_us for s in self.spans), default=0.0) - self.start_us

    def busy_us(self, stream: str) -> float:
        return _length(self._busy(stream))

    def overlap_us(self) -> float:
        """Time in which two or more streams are busy."""
        return _length(_covered([iv for s in self.streams for iv in self._busy(s)], at_least=2))

    def hidden_share(self, stream: str) -> float:
        """Share of this stream's busy time in which another stream is busy too; 0 where it never is."""
        mine = self._busy(stream)
        others = _covered([iv for s in self.streams if s != stream for iv in self._busy(s)], at_least=1)
        total = _length(mine)
        return _length(_covered(mine + others, at_least=2)) / total if total else 0.0

    def _busy(self, stream: str) -> Intervals:
        return _covered([(s.start_us, s.end_us) for s in self.spans if s.stream == stream], at_least=1)

    def to_chrome(self, path: str | PathLike[str]) -> None:
        """A trace-event file for Perfetto or chrome://tracing."""
        from dynaflow.view.chrome import write

        write([self], path)

    def to_picture(self, path: str | PathLike[str]) -> None:
        """A PNG (or whatever the path's suffix says). Needs matplotlib: pip install dynaflow[view]."""
        from dynaflow.view.picture import picture

        picture([self], path)

    def __str__(self) -> str:
        lanes = [f"{s} busy {duration(self.busy_us(s))} ({self.hidden_share(s):.0%} beside another)" for s in self.streams]
        return " | ".join([f"{self.title or 'timeline'}: {duration(self.total_us)}", *lanes])


def duration(us: float) -> str:
    """As text, in the unit that leaves it digits: `3.4 us`, `62 us`, `2.3 ms`."""
    return f"{us / 1e3:,.1f} ms" if us >= 1e3 else f"{us:.0f} us" if us >= 10 else f"{us:.1f} us"


def _covered(intervals: Intervals, at_least: int) -> Intervals:
    """Where at least so many of the intervals lie over one another."""
    # at one instant, ends come before starts: intervals that only touch do not overlap
    edges = sorted([(start, 1) for start, end in intervals if end > start] + [(end, -1) for start, end in intervals if end > start])
    result: Intervals = []
    depth, since = 0, 0.0
    for at, change in edges:
        before, depth = depth, depth + change
        if before < at_least <= depth:
            since = at
        elif depth < at_least <= before:
            if result and result[-1][1] == since:
                result[-1] = (result[-1][0], at)
            else:
                result.append((since, at))
    return result


def _length(intervals: Intervals) -> float:
    return sum(end - start for start, end in intervals)
