"""verify: the gate before the first launch.

    report = verify(plan, flow)               # no race, every op once, all joined; for every size and interleaving
    verify_memory(flow, plan, memory)         # ... and, for given sizes, no byte used by two values at a time
    verify_ranks(plans, flows)                # ... and the same order of collectives on every rank

Each raises one of `dynaflow.errors` (most are PlanRefused) at the first thing that is wrong.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from dynaflow.ir import Flow, Plan, check_kinds
from dynaflow.verify.memory import verify_memory
from dynaflow.verify.order import check_order
from dynaflow.verify.ranks import verify_ranks
from dynaflow.verify.structure import index

__all__ = ["Report", "verify", "verify_memory", "verify_ranks"]

CHECKS = ("structure", "order", "slots")


@dataclass(frozen=True, slots=True)
class Report:
    """What was proved of a plan."""

    num_launches: int
    num_waits: int
    num_streams: int
    # names of the checks that passed
    checks: tuple[str, ...]
    elapsed_us: float = field(default=0.0, compare=False)

    def __str__(self) -> str:
        return (
            f"verified: {counted(self.num_launches, 'launch', 'es')}, {counted(self.num_waits, 'wait', 's')}, "
            f"{counted(self.num_streams, 'stream', 's')}: no race, no missing or doubled op, all joined"
        )


def counted(number: int, word: str, plural: str) -> str:
    return f"{number:,} {word}{plural if number != 1 else ''}"


def verify(plan: Plan, flow: Flow) -> Report:
    """Prove that the plan gives the program's result under every legal interleaving, or raise what is wrong with it."""
    check_kinds("df.verify(plan, flow)", flow, plan)
    started = time.perf_counter()
    indexed = index(plan, flow)
    num_streams = check_order(plan, flow, indexed)
    elapsed_us = (time.perf_counter() - started) * 1e6
    return Report(indexed.num_launches, indexed.num_waits, num_streams, CHECKS, elapsed_us)
