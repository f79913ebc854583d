"""Plan + costs -> Timeline, on a model of one device.

Contract: a launch starts when all that it depends on is over, each dependency with its latency: what stood before it on its stream,
and what its stream waited for. What runs at the same time shares the device (`Machine`). So every launch takes its cost or longer, the
work done is the work given, and no timeline of an unsplit plan is shorter than `costs.bound_us`. What runs before and after the plan
takes no time: nothing is counted for the streams' start and for the join at the end.

1. Read the steps in host order, as a CUDA Graph is captured: a launch depends on its stream's last launch and on the events awaited
   since. A wait for an event that is not recorded yet passes.
2. Play: what depends on nothing starts at 0; whenever a launch ends, what it was the last dependency of starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Generic, TypeVar

from dynaflow.costs import Cost, Costs, check_costs, launch_cost
from dynaflow.ir import Flow, Launch, Plan, Record
from dynaflow.timeline import Span, Timeline

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Device:
    """Latencies, as measured inside a CUDA Graph."""

    # from the end of a launch to the start of the next on its stream
    edge_us: float = 1.2
    # from the end of a launch to the start of one that waits for it on another stream
    cross_us: float = 1.8


class _Level(Generic[Key]):
    """What runs at one priority. All of it runs at one rate, so one clock tells when each is over."""

    __slots__ = ("clock", "load", "ends")

    def __init__(self) -> None:
        # microseconds of its cost that each launch here has done since the clock was at its start
        self.clock = 0.0
        # sum of the shares
        self.load = 0.0
        # (clock at the end, order of start, share, key)
        self.ends: list[tuple[float, int, float, Key]] = []


class Machine(Generic[Key]):
    """Launches that share a device, from one end to the next.

    While the shares of what runs add up to 1 or less, all run at full speed; else each at 1/sum of it. Launches of a higher priority
    (a lower number) take theirs first; the others divide what is left in the same way.
    """

    def __init__(self) -> None:
        self.now_us = 0.0
        self._starts: list[tuple[float, int, Key, Cost, int]] = []
        self._levels: dict[int, _Level[Key]] = {}
        self._num_starts = 0

    def start(self, key: Key, at_us: float, cost: Cost, priority: int = 0) -> None:
        """Let it run from `at_us` on, which is not in the past."""
        heappush(self._starts, (at_us, self._num_starts, key, cost, priority))
        self._num_starts += 1

    def finish(self) -> Key | None:
        """Go on to the next end, and say whose it is; None when nothing is left."""
        while True:
            left, end_us, ending = 1.0, float("inf"), None
            rates = []
            for _, level in sorted(self._levels.items()) if len(self._levels) > 1 else self._levels.items():
                rate = 1.0 if level.load <= left else left / level.load
                left = max(0.0, left - level.load)
                rates.append((level, rate))
                if level.ends and rate and (at_us := self.now_us + (level.ends[0][0] - level.clock) / rate) < end_us:
                    end_us, ending = at_us, level
            if self._starts and self._starts[0][0] < end_us:
                end_us, ending = self._starts[0][0], None
            elif ending is None:
                return None
            for level, rate in rates:
                level.clock += (end_us - self.now_us) * rate
            self.now_us = end_us
            if ending is not None:
                ending.clock, _, share, key = heappop(ending.ends)
                ending.load = ending.load - share if ending.ends else 0.0
                return key
            _, number, key, cost, priority = heappop(self._starts)
            level = self._levels.setdefault(priority, _Level())
            level.load += cost.share
            heappush(level.ends, (level.clock + cost.us, number, cost.share, key))


def simulate(flow: Flow, plan: Plan, costs: Costs, device: Device | None = None) -> Timeline:
    """When each launch of a synchronised plan runs, from 0 on. Spans are in the plan's order of launches."""
    check_costs(flow, costs)
    device = device or Device()
    launches = plan.launches
    priority = {s.name: s.priority for s in plan.streams}

    # 1. What each launch depends on.
    num_unmet = [0] * len(launches)
    users: list[list[int]] = [[] for _ in launches]
    last: dict[str, tuple[int, ...]] = {}  # stream -> the launches that its next one comes after
    events: dict[str, tuple[int, ...]] = {}
    number = 0
    for step in plan.steps:
        before = last.get(step.stream, ())
        if isinstance(step, Launch):
            for i in set(before):
                users[i].append(number)
                num_unmet[number] += 1
            last[step.stream] = (number,)
            number += 1
        elif isinstance(step, Record):
            events[step.event] = before
        else:
            last[step.stream] = before + events.get(step.event, ())

    # 2. Play.
    machine: Machine[int] = Machine()
    start_us, end_us = [0.0] * len(launches), [0.0] * len(launches)
    each = [launch_cost(launch, costs) for launch in launches]

    def start(i: int) -> None:
        machine.start(i, start_us[i], each[i], priority.get(launches[i].stream, 0))

    for i in range(len(launches)):
        if not num_unmet[i]:
            start(i)
    while (done := machine.finish()) is not None:
        end_us[done] = now_us = machine.now_us
        for j in users[done]:
            latency_us = device.edge_us if launches[j].stream == launches[done].stream else device.cross_us
            start_us[j] = max(start_us[j], now_us + latency_us)
            num_unmet[j] -= 1
            if not num_unmet[j]:
                start(j)
    spans = (
        Span(launch.stream, launch.label, start_us[i], end_us[i], flow.op(launch.calls[0][0]).kind) for i, launch in enumerate(launches)
    )
    return Timeline(tuple(spans), plan.flow, tuple(dict.fromkeys(launch.stream for launch in launches)))
