"""Flow + costs -> plans for many settings, ranked by their simulated time. Which of the best is fastest on a device, measuring tells."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from dynaflow.context import Context
from dynaflow.costs import Cost, Costs, check_costs
from dynaflow.ir import Flow, Plan
from dynaflow.planner import plan
from dynaflow.simulate import Device, simulate
from dynaflow.strategies.branches import Branches
from dynaflow.strategies.confined import NOTHING, Confined
from dynaflow.strategies.greedy import Greedy
from dynaflow.strategy import Strategy
from dynaflow.sync import synchronise

NUM_STREAMS = (1, 2, 3, 4, 6, 8, 12, 16)
SLACKS = (0.1, 0.03, 1.0)

# Plans for costs that are a little off: other orders of ops that are nearly as urgent.
NUM_NOISY = 2
NOISE = 0.1


@dataclass(frozen=True, slots=True)
class Candidate:
    # with records and waits; without memory
    plan: Plan
    strategy: Strategy
    # costs that were off by up to NOISE while planning: the number of the draw; 0 for those given
    noise: int
    simulated_us: float

    @property
    def num_streams(self) -> int:
        """Streams that launch something, the caller's included."""
        return len({launch.stream for launch in self.plan.launches})

    @property
    def kind(self) -> str:
        """Plans of one kind are much alike."""
        name = type(self.strategy).__name__.lower()
        return f"{self.num_streams} streams, {name}{' prioritised' if getattr(self.strategy, 'prioritised', False) else ''}"

    def __str__(self) -> str:
        noise = f", noise {self.noise}" if self.noise else ""
        streams = f"{self.num_streams} stream{'s' if self.num_streams > 1 else ''}"
        return f"{self.simulated_us:.1f} us on {streams}: {self.strategy!r}{noise}"


def search(
    flow: Flow, costs: Costs, *, max_streams: int = 16, device: Device | None = None, context: Context | None = None,
    confined: Confined = NOTHING,
) -> list[Candidate]:  # fmt: skip
    """Different plans, the fastest in simulation first; of equal ones, that with fewer streams.

    One stream is always among the settings: the first is never slower than that. Every simulation is of the costs given.
    """
    check_costs(flow, costs)
    found: dict[Plan, Candidate] = {}
    for strategy, noise in settings(max_streams, device, confined):
        made = synchronise(flow, plan(flow, strategy, context, costs=noisy(costs, noise) if noise else costs))
        if made not in found:
            found[made] = Candidate(made, strategy, noise, simulate(flow, made, costs, device).total_us)
    return sorted(found.values(), key=lambda c: (round(c.simulated_us, 3), c.num_streams))


def neighbours(flow: Flow, costs: Costs, candidate: Candidate, count: int, device: Device | None = None) -> list[Candidate]:
    """Up to `count` other plans of the candidate's strategy, for costs that are a little off: other orders of ops that are nearly as
    urgent. They are not ranked: where costs were wrong, a plan that seems slower is faster."""
    found = {candidate.plan: candidate}
    for noise in range(NUM_NOISY + 1, NUM_NOISY + 1 + count):
        made = synchronise(flow, plan(flow, candidate.strategy, costs=noisy(costs, noise)))
        if made not in found:
            found[made] = Candidate(made, candidate.strategy, noise, simulate(flow, made, costs, device).total_us)
    return list(found.values())[1:]


def settings(max_streams: int, device: Device | None = None, confined: Confined = NOTHING) -> Iterator[tuple[Strategy, int]]:
    """(strategy, noise), plain ones first: of equal plans the first is kept."""
    for num_streams in (n for n in NUM_STREAMS if n <= max_streams):
        yield Branches(num_streams, device=device, confined=confined), 0
        if num_streams == 1:
            continue
        for prioritised in (False, True):
            for slack in SLACKS:
                yield Branches(num_streams, prioritised, slack, device, confined), 0
        for noise in range(1, NUM_NOISY + 1):
            yield Branches(num_streams, device=device, confined=confined), noise
        yield Greedy(num_streams, confined), 0


def noisy(costs: Costs, seed: int) -> dict[str, Cost]:
    """Every time off by a random factor, the same for the same seed."""
    draw = random.Random(seed)
    return {name: Cost(cost.us * draw.uniform(1 - NOISE, 1 + NOISE), cost.share) for name, cost in costs.items()}
