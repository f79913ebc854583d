"""Streams that do nothing but write down what generated code asks of them, and in which order that puts launches."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, Callable

from dynaflow.runtime.program import Bound

# ("launch", number, stream) | ("step", number, stream) | ("record", event, stream) | ("wait", event, stream)
Log = list[tuple[str, Any, int]]


class LoggedStreams:
    """What generated code takes for streams. `log` is what it did with them."""

    def __init__(self, num_streams: int):
        self.log: Log = []
        self.current = 0
        self.has_joined = False
        self.kept: list[Any] = []
        ids = itertools.count()
        outer = self

        class Event:
            def __init__(self) -> None:
                self.id = next(ids)

            def record(self, stream: Stream) -> None:
                outer.log.append(("record", self.id, stream.number))

        class Stream:
            def __init__(self, number: int):
                self.number = number

            def wait_event(self, event: Event) -> None:
                outer.log.append(("wait", event.id, self.number))

        self.Event = Event
        self.all = tuple(Stream(i) for i in range(num_streams))

    def set_stream(self, stream: Any) -> None:
        self.current = stream.number

    def join(self) -> None:
        self.has_joined = True

    def keep(self, result: Any) -> None:
        self.kept.append(result)

    def leave(self) -> None:
        assert self.current == 0, "the turn ends on the caller's stream"

    def between(self, step: Callable[[], Any]) -> Any:
        """Eager steps happen one at a time: here the log says so."""
        assert self.current == 0, "a step runs on the caller's stream"
        before = len(self.log)
        results = step()
        (kind, number, _), *more = self.log[before:]
        assert kind == "launch" and not more
        self.log[before:] = [("step", number, 0)]
        return results


def watch(bound: Bound, streams: LoggedStreams) -> None:
    """Launches of `bound` show up in the log. To be called before its code is generated."""

    def logged(number: int, call: Callable[..., Any]) -> Callable[..., Any]:
        def launch(args: list[Any]) -> Any:
            streams.log.append(("launch", number, streams.current))
            return call(args)

        return launch

    for number, call in enumerate(bound.calls):
        call.entry = replace(call.entry, call=logged(number, call.entry.call))


def order_of(log: Log) -> set[tuple[int, int]]:
    """Pairs of launches of which the first is over before the second begins: by streams, events, and steps in which the host takes part."""
    known: dict[int, frozenset[int]] = {}
    events: dict[int, frozenset[int]] = {}
    pairs = set()
    for kind, what, stream in log:
        mine = known.get(stream, frozenset())
        if kind == "record":
            events[what] = mine
        elif kind == "wait":
            known[stream] = mine | events[what]
        else:
            pairs |= {(other, what) for other in mine}
            known[stream] = mine | {what}
    return pairs
