"""Costs: how long an op takes alone, how much of the device it fills meanwhile, and what no schedule can be faster than.

Costs are measured by somebody else and given per op, over the whole batch. They are given for every op or for none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from dynaflow.errors import OptionError
from dynaflow.ir import Flow, Launch, Part


@dataclass(frozen=True, slots=True)
class Cost:
    # what the op takes while it runs alone
    us: float
    # share of the device that it fills meanwhile; 1: nothing fits beside it; two of 0.5 run side by side at full speed
    share: float = 1.0
    # what the allocator holds for a stream on which it has run, for what it allocates itself
    held_bytes: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.us < float("inf") and 0 <= self.share <= 1):
            raise OptionError(f"{self} is no cost.", fix="give microseconds from 0 up, and a share from 0 to 1")

    @property
    def work_us(self) -> float:
        """The time for which it would fill the whole device."""
        return self.us * self.share

    def of(self, part: Part) -> Cost:
        """The cost of a part, by its rows."""
        return self if part.is_whole else Cost(self.us * (part.hi - part.lo) / part.of, self.share, self.held_bytes)

    def at_sizes(self, growth: float) -> Cost:
        """At sizes whose product is larger by this factor: what is held grows with it, at most."""
        return replace(self, held_bytes=math.ceil(self.held_bytes * max(growth, 1.0)))


Costs = Mapping[str, Cost]


def check_costs(flow: Flow, costs: Costs) -> None:
    """Refuses costs that leave an op of the flow out: a missing cost is a mistake of the caller's, not a guess of ours."""
    missing = [op.name for op in flow.ops if not isinstance(costs.get(op.name), Cost)]
    if missing:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise OptionError(
            f"{len(missing)} of {len(flow.ops)} ops of {flow.name} have no cost: {shown}.",
            fix="give a Cost(us, share) for every op, or none at all")  # fmt: skip


def launch_cost(launch: Launch, costs: Costs) -> Cost:
    """Of several ops in one launch: one after the other, at the share that keeps their work."""
    each = [costs[op].of(part) for op, part in launch.calls]
    if len(each) == 1:
        return each[0]
    us = sum(cost.us for cost in each)
    return Cost(us, min(1.0, sum(cost.work_us for cost in each) / us) if us else 0.0)


def heights_us(flow: Flow, costs: Costs) -> list[float]:
    """Per op: the longest path from its start to the end of the flow, its own cost included."""
    own = [costs[op.name].us for op in flow.ops]
    height = own[:]
    # Edges go forward in program order: from the last op back, a height is final before it is used.
    for before, after, _ in sorted(flow.edges, key=lambda e: -e.before):
        height[before] = max(height[before], own[before] + height[after])
    return height


def critical_path_us(flow: Flow, costs: Costs) -> float:
    """The longest path through the flow: no number of streams makes an unsplit plan faster."""
    return max(heights_us(flow, costs), default=0.0)


def total_work_us(flow: Flow, costs: Costs) -> float:
    """The time for which all ops together fill the device: no order makes a plan faster."""
    return sum(costs[op.name].work_us for op in flow.ops)


def bound_us(flow: Flow, costs: Costs) -> float:
    """What no plan that leaves the batch in one piece can be faster than, were every launch free."""
    return max(critical_path_us(flow, costs), total_work_us(flow, costs))
