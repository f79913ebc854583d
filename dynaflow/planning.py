"""Contexts -> plans of one captured graph.

1. The strategy runs once per context; what it did is synchronised, fused, placed and verified.
2. Where plans are measured, it runs once more for each combination of its options (`flow.any_of`): rivals of the first.
3. Ranks agree on the order of their collectives, or all of them run the sequential graph.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any, Mapping, Sequence

import torch
from torch import fx

from dynaflow import errors
from dynaflow.context import Context
from dynaflow.inductor.entries import Inductor
from dynaflow.ir import Flow, Op, Plan
from dynaflow.memory import can_be_loose
from dynaflow.planned import Planned, finish_plan, our_bug
from dynaflow.planner import run_strategy, sequential_plan
from dynaflow.recorded import why_between
from dynaflow.replacement import body, check_replacement
from dynaflow.runtime.binder import Binder
from dynaflow.runtime.program import COPIED, Program
from dynaflow.runtime.ranks import agree
from dynaflow.runtime.sm_shares import check_shares
from dynaflow.settings import Settings
from dynaflow.units import Built
from dynaflow.verify import counted

log = logging.getLogger("dynaflow")

# plans of one context that are measured against each other
MAX_PLANS = 8


class Planning:
    def __init__(self, graph: fx.Graph, built: Built, compiler: Inductor | None, settings: Settings, device: torch.device):
        self._graph, self.built, self.compiler, self.settings, self.device = graph, built, compiler, settings, device
        self.flow = built.program.flow
        self.program: Program = replace(built.program, compiler=compiler)
        # in the order in which they are looked through
        self.plans: list[Planned] = []

    def known(self, facts: Mapping[str, Any]) -> Planned | None:
        """A plan that was made for a context which looks the same to its strategy."""
        return next((p for p in self.plans if p.holds(facts)), None)

    def plan(self, facts: Mapping[str, Any], sizes: Mapping[str, Any]) -> Planned:
        """Run the strategy in this context; and, where plans are measured, once for each combination of its options. What it is refused for
        comes back as `Planned.error`."""
        planned, num_options = self._plan_once(facts, sizes, ())
        if not self.settings.never_slower or planned.error is not None:
            return planned
        rivals: list[Planned] = []
        waiting = _other_options((), num_options)
        for _ in range(MAX_PLANS - 1):
            if not waiting:
                break
            chosen = waiting.pop(0)
            rival, num_options = self._plan_once(facts, sizes, chosen)
            if rival.error is not None:
                log.info("%s: an option of its strategy is left out: %s", self.settings.name, rival.error)
                rival = replace(rival, error=None)  # it gave up, where the strategy sees the same
            waiting += _other_options(chosen, num_options)
            if all(_identity(rival) != _identity(other) for other in (planned, *rivals)):
                rivals.append(rival)
        return replace(planned, rivals=tuple(rivals))

    def _plan_once(self, facts: Mapping[str, Any], sizes: Mapping[str, Any], chosen: Sequence[int]) -> tuple[Planned, list[int]]:
        """Synchronise, fuse, place and verify what the strategy did; and how many options it had."""
        context = Context(facts)
        try:
            return self._finished(context, sizes, chosen)
        except errors.DynaFlowError as error:
            refused = error
        except Exception as error:  # noqa: BLE001 (other ranks wait to be told, too)
            refused = our_bug(self.settings.name, "planned", error)
        plan = sequential_plan(self.flow, "refused", tuple(map(str, context.looks)))
        return Planned(plan, context.looks, None, error=refused, chosen=tuple(chosen)), []

    def _finished(self, context: Context, sizes: Mapping[str, Any], chosen: Sequence[int]) -> tuple[Planned, list[int]]:
        began = time.perf_counter()
        planner = run_strategy(
            self.flow, self.settings.strategy, context, chosen=chosen,
            check_replacement=lambda function, calls, where: check_replacement(self.flow, self.built.fakes, function, calls, where),
            make_body=lambda calls: body(self.built.program, calls),
        )  # fmt: skip
        plan = planner.finish()
        self.settings.count(plans=1)
        if plan.reason:
            return Planned(plan, context.looks, None, chosen=tuple(chosen)), planner.num_options
        check_shares(plan.streams, self.device, planner.declared_at)
        binder = self.finish(plan, planner.functions, sizes, planner.flow)
        plan = binder.plan
        made = (counted(len(plan.launches), "launch", "es"), counted(len(plan.streams), "stream", "s"),
                counted(len(plan.waits), "wait", "s"), counted(len({s for _, s in plan.slots}), "slot", "s"))  # fmt: skip
        elapsed_ms = (time.perf_counter() - began) * 1e3
        log.info("planned %s: %s on %s in %.1f ms | %s | %s | verified", self.flow.label, *made[:2], elapsed_ms, *made[2:])
        return Planned(plan, context.looks, binder, chosen=tuple(chosen)), planner.num_options

    def finish(self, plan: Plan, functions: Mapping[str, Any], sizes: Mapping[str, Any], flow: Flow) -> Binder:
        """Where units are compiled, neighbours are fused; what units allocate themselves, for these sizes, needs no slot where nothing
        but views of it is read. `flow`: as the plan has it, with state that is apart where the caller says so."""
        program = replace(self.program, functions=functions, flow=flow)
        can_fuse = self._can_fuse if self.compiler is not None else None
        finished = finish_plan(flow, plan, can_fuse)
        binder = Binder(finished, program)
        loose = self._allocated_by_units(binder, sizes)
        return Binder(finish_plan(flow, plan, can_fuse, loose), program, like=binder) if loose else binder

    def _can_fuse(self, op: Op) -> bool:
        assert self.compiler is not None
        # one that must stay between recordings would keep the whole unit there
        is_between = self.settings.runtime == "graph" and bool(why_between(op, self.built, self.device))
        return self.compiler.can_fuse(op.name) and not is_between and self.program.units[op.name].into is None

    def _allocated_by_units(self, binder: Binder, sizes: Mapping[str, Any]) -> frozenset[str]:
        if self.settings.runtime.startswith("fake"):
            return frozenset()  # poisoned memory shows more
        made = frozenset().union(*(unit.fresh for unit in self.program.units.values()))
        candidates = can_be_loose(self.flow, binder.plan) & made
        if not candidates:
            return frozenset()
        try:
            bound = binder.bind(sizes)
        except errors.BatchTooSmall:
            return frozenset()
        copied = {bound.views[out.view].value for call in bound.calls for out in call.outs if out.how == COPIED and out.scratch is None}
        return frozenset(copied) & candidates

    def plan_with_all_ranks(self, facts: Mapping[str, Any], sizes: Mapping[str, Any]) -> Planned:
        """Every rank says what it would do, a rank without a plan too: all run plans, or all run the sequential graph."""
        planned = self.plan(facts, sizes)
        try:
            plans = (planned, *planned.rivals)
            num_measured = len(plans) if self.settings.never_slower and any(each.binder is not None for each in plans) else 0
            for each in plans:
                agree(self._graph, self.flow, each.plan, num_measured, str(each.error or each.plan.reason))
        except errors.RankMissing:
            raise
        except errors.RankMismatch as error:
            # On every rank, and for good: nobody plans this graph again, or waits for others to do so.
            self.plans.insert(0, Planned(sequential_plan(self.flow, str(error)), (), None, error=error))
            raise (planned.error or error) from None  # the first error is the one to show
        self.plans.append(planned)
        return planned


def _other_options(chosen: tuple[int, ...], num_options: Sequence[int]) -> list[tuple[int, ...]]:
    """What is left to choose after a run that was told so much, and had so many options: each combination comes up once."""
    rest = range(len(chosen), len(num_options))
    return [(*chosen, *(0 for _ in range(len(chosen), i)), option) for i in rest for option in range(1, num_options[i])]


def _identity(planned: Planned) -> tuple[Any, ...]:
    """Plans name the functions that they put in the place of ops; those may differ under one name."""
    functions = planned.binder.program.functions if planned.binder is not None else {}
    return (str(planned.plan), *((name, id(function)) for name, function in functions.items()))
