"""Which way to run a case is the fastest: measured, on copies of a call's own arguments.

1. Every kernel's cost is measured, and plans are searched for in simulation.
2. Inductor's own callable, the kernels in its order, and the best plan of each kind run in turns; then the neighbours of the winner.
3. The winner runs against Inductor's own once more, and has to win again.

Where the plan is for somebody else's captures (`Region.in_captures`), all ways run as recordings, Inductor's own too: what its launches
cost the host is nothing there. There, and on the CPU, kernels side by side are all that a plan can gain: where they would not be faster
than in a row, nothing is tried. Nor is anything on the CPU where lanes would have no cores of their own, or where a call takes long.

Contract: nothing of this shows outside. What a call changes is changed on copies, and the state of random numbers is put back.
"""

from __future__ import annotations

import json
import logging
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable, Iterable, Mapping, Sequence

import torch

from dynaflow.costs import Cost, Costs, bound_us, critical_path_us
from dynaflow.inductor.kernels import Kernels
from dynaflow.ir import Plan
from dynaflow.measure import (
    MIN_GAIN,
    NUM_ROUNDS,
    Before,
    clock_for,
    compare,
    is_faster,
    measure_costs,
    num_lanes,
    same_random_numbers,
)
from dynaflow.memory import place
from dynaflow.planned import finish_plan
from dynaflow.planner import sequential_plan
from dynaflow.room import MAX_STREAMS, room_for
from dynaflow.runtime.graphs import Pool, as_replay
from dynaflow.runtime.program import Bound, copy_as_it_lies
from dynaflow.search import NUM_NOISY, Candidate, neighbours, search
from dynaflow.simulate import Device
from dynaflow.verify import verify
from dynaflow.way import Boxed, Way, device_of

if TYPE_CHECKING:
    from dynaflow.region import Region

log = logging.getLogger("dynaflow")

# plans that are tried on the device, and neighbours of the best of them
NUM_TRIED, NUM_NEIGHBOURS = 6, 6
# of plans that are as fast as this, that with the fewest streams: libraries keep memory for each
AS_FAST = 1.02
# on the CPU: seconds that trying takes, about and at most; calls of a way where they are long; ways beside the plans: Inductor, one
# stream, and the last two once more
TRIALS_S, NUM_CALLS, NUM_OTHERS = 30.0, NUM_ROUNDS + 2, 4
# lanes are threads
LANES = Device(edge_us=5.0, cross_us=50.0)

INDUCTOR, ONE_STREAM, IN_A_ROW = "Inductor", "one stream", "kernels in a row"


@dataclass(frozen=True)
class Choice:
    """What was chosen for a case, and why."""

    # empty: Inductor's own callable
    plan: str
    # microseconds per call of what was tried; of the bound: simulated
    times_us: Mapping[str, float]
    costs: Mapping[str, Cost]
    # the sizes at which that was measured, where they are not the case's own
    measured_at: str = ""
    # why no plan was tried
    untried: str = ""

    def __str__(self) -> str:
        times = ", ".join(f"{name} {us:,.0f} us" for name, us in self.times_us.items())
        why = ": ".join(filter(None, (self.untried, times))) or "as the strategy asks"
        where = f", measured at sizes {self.measured_at}" if self.measured_at else ""
        return f"{'a plan of the kernels' if self.plan else 'Inductor as it is'} ({why}{where})"

    def dump(self) -> str:
        costs = {name: (cost.us, cost.share, cost.held_bytes) for name, cost in self.costs.items()}
        return json.dumps({"plan": self.plan, "times_us": dict(self.times_us), "costs": costs, "untried": self.untried})

    @staticmethod
    def parse(text: str) -> Choice:
        read = json.loads(text)
        costs = {name: Cost(*cost) for name, cost in read["costs"].items()}
        return Choice(read["plan"], read["times_us"], costs, untried=read.get("untried", ""))


def in_order(kernels: Kernels) -> Plan:
    """The kernels one after the other, as Inductor has them."""
    return finish_plan(kernels.flow, sequential_plan(kernels.flow, ""), None, kernels.allocated)


class Trials:
    def __init__(self, region: Region, kernels: Kernels, args: Sequence[Any]):
        self._region, self._kernels, self._device = region, kernels, device_of(args)
        # not in captures, which are CUDA Graphs
        self._on_lanes = self._device.type == "cpu" and not region.in_captures
        # with their strides, which kernels take for granted
        self._given = [copy_as_it_lies(a) if i in kernels.changed else a for i, a in enumerate(args)]
        self._before = Before([self._given[i] for i in kernels.changed])
        self._serial = kernels.bind(in_order(kernels))
        self._room = room_for(region, kernels, self._serial, args)
        self._clock = clock_for(self._device, self._room.make)
        # what was tried, and microseconds per call, round by round
        self._bounds: dict[str, Bound] = {}
        self._ways: dict[str, Boxed] = {INDUCTOR: region.plain}
        self._rounds: dict[str, list[float]] = {}
        self._pool = Pool()
        # of somebody else's captures: the recordings
        self._is_captured = region.in_captures and self._device.type == "cuda"
        self._replays: dict[str, Callable[[], Any]] = {}

    def choose(self) -> Choice:
        flow, num_plans = self._kernels.flow, NUM_TRIED + NUM_NEIGHBOURS + 1
        if not self._room.take(self._serial):
            return Choice("", {}, {}, untried=self._says_too_much("any plan", self._serial))
        with torch.no_grad(), same_random_numbers(self._device):
            if self._on_lanes:
                if untried := self._why_no_lanes():
                    return Choice("", {}, {}, untried=untried)
                num_plans = self._num_fitting()
                if num_plans < 1:
                    return Choice("", {}, {}, untried="a call takes too long to be repeated")
            values = {name: self._given[i] for i, name in self._kernels.inputs}
            costs = measure_costs(self._serial, values, self._kernels.keys, self._clock)
            self._room.learn(costs)
            bound, in_a_row = bound_us(flow, costs), sum(costs[op.name].us for op in flow.ops)
            if (self._region.in_captures or self._on_lanes) and bound > (1 - MIN_GAIN) * in_a_row:
                return Choice("", {IN_A_ROW: in_a_row, "bound": bound}, costs, untried="side by side they would be no faster")
            best = self._best(costs, num_plans)
            if not self._wins_again(best):
                best = INDUCTOR
        plan = str(self._bounds[best].plan) if best in self._bounds else ""
        return Choice(plan, {**self._times(), "bound": bound}, costs)

    def _why_no_lanes(self) -> str:
        """What is known before anything is measured."""
        flow = self._kernels.flow
        if num_lanes() < 2:
            return f"no cores are left for lanes: every kernel has {torch.get_num_threads()} threads"
        is_chain = critical_path_us(flow, {op.name: Cost(1.0) for op in flow.ops}) >= len(flow.ops)
        return "every kernel needs the one before it" if is_chain else ""

    def _num_fitting(self) -> int:
        """Plans that there is time to try."""
        began = time.perf_counter()
        self._trial(INDUCTOR)()
        seconds = time.perf_counter() - began
        self._before.put_back()
        return int(TRIALS_S / NUM_CALLS / seconds) - NUM_OTHERS

    def _best(self, costs: Costs, num_plans: int) -> str:
        flow, device = self._kernels.flow, LANES if self._on_lanes else None
        max_streams = min(MAX_STREAMS, num_lanes()) if self._on_lanes else MAX_STREAMS
        for confined in self._room.confined(costs):
            found = search(flow, costs, max_streams=max_streams, device=device, confined=confined)
            candidates = [c for c in found if c.num_streams > 1]
            # the simulator is not the device: the best of each kind, not the best few, which are much alike
            kinds = {c.kind: c for c in reversed(candidates)}
            best_first = [c for c in sorted(kinds.values(), key=lambda c: c.simulated_us) if not _has_idle_streams(c, kinds.values())]
            if (tried := self._within_memory(best_first, min(NUM_TRIED, num_plans))) or not best_first:
                break
        best = self._try({ONE_STREAM: self._serial} | tried)
        num_near = min(NUM_NEIGHBOURS, num_plans - len(tried) - 1)
        if best not in kinds or num_near < 1:
            return best
        # costs are not quite what they were measured to be: neighbours may be better still
        near = self._within_memory(neighbours(flow, costs, kinds[best], num_near, device), num_near)
        if not near:
            return best
        del self._rounds[best]  # it runs beside them once more: what was measured earlier, the machine may have been slower for
        return self._try(near)

    def _within_memory(self, candidates: Sequence[Candidate], count: int) -> dict[str, Bound]:
        """The first `count` that hold no more than they may."""
        found: dict[str, Bound] = {}
        for candidate in candidates:
            plan = place(self._kernels.flow, candidate.plan, self._kernels.allocated)
            verify(plan, self._kernels.flow)
            bound = self._kernels.bind(plan)
            if self._room.take(bound):
                found[f"{candidate.kind}, noise {candidate.noise}" if candidate.noise > NUM_NOISY else candidate.kind] = bound
            else:
                log.info("%s: %s", self._region.name, self._says_too_much(candidate.kind, bound))
            if len(found) == count:
                break
        return found

    def _says_too_much(self, what: str, bound: Bound) -> str:
        held, limit = (n / 2**20 for n in (self._room.held(bound), self._room.limit))
        return f"{what} would hold {held:,.1f} MiB, more than {limit:,.1f} (max_memory={self._region.settings.max_memory})"

    def _try(self, new: Mapping[str, Bound]) -> str:
        """Let them run in turns. The best of all so far."""
        self._bounds.update(new)
        self._ways.update((name, Way(self._region, self._kernels, bound, self._device, self._pool)) for name, bound in new.items())
        turns = [name for name in self._ways if name not in self._rounds]
        self._rounds.update(zip(turns, compare([self._trial(name) for name in turns], self._clock), strict=True))
        return _least(self._times(), {name: len(bound.streams) for name, bound in self._bounds.items()})

    def _wins_again(self, best: str) -> bool:
        """A machine that others use, too, favours one of many now and then."""
        if not is_faster(self._rounds[best], self._rounds[INDUCTOR]):
            return False
        return is_faster(*compare([self._trial(name) for name in (best, INDUCTOR)], self._clock))

    def _trial(self, name: str) -> Callable[[], None]:
        call = self._call(name)

        def run() -> None:
            self._before.put_back_counters()
            call()

        return run

    def _call(self, name: str) -> Callable[[], Any]:
        way = self._ways[name]
        if not self._is_captured:
            return lambda: way(list(self._given))
        if name not in self._replays:
            if isinstance(way, Way):
                self._before.put_back_counters()
                way.warm_up(self._given)
            self._replays[name] = as_replay(self._pool, self._device, lambda: way(list(self._given)), keeps_memsets=True)
        return self._replays[name]

    def _times(self) -> dict[str, float]:
        return {name: statistics.median(us) for name, us in self._rounds.items()}


def _has_idle_streams(candidate: Candidate, others: Iterable[Candidate]) -> bool:
    """Whether fewer streams come to the same: each that is tried, libraries keep memory for."""
    return any(c.num_streams < candidate.num_streams and c.simulated_us <= candidate.simulated_us * AS_FAST for c in others)


def _least(times: Mapping[str, float], num_streams: Mapping[str, int]) -> str:
    """The fastest; of those that are as fast, that with the fewest streams."""
    least = min(times.values())
    return min((name for name, us in times.items() if us <= least * AS_FAST), key=lambda name: (num_streams.get(name, 0), times[name]))
