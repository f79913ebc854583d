"""What comes of a strategy's launches: a plan that may run, or the reason why the sequential graph does."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Callable, Mapping

from dynaflow import errors
from dynaflow.context import ApartLook, Look, cuts_of
from dynaflow.fuse import fuse
from dynaflow.ir import Flow, Op, Plan
from dynaflow.memory import place
from dynaflow.planner import CONSTANT_BATCH
from dynaflow.runtime.binder import Binder
from dynaflow.runtime.program import Bound
from dynaflow.sync import synchronise
from dynaflow.verify import verify

log = logging.getLogger("dynaflow")

# of a piece of a model that Dynamo cut into several: a loss behind a graph break, tables of positions, what belongs to weights alone
NO_BATCH = "no input of this graph carries the batch"


@dataclass(frozen=True)
class Planned:
    """A strategy's plan for one context. `binder` is None when the strategy gave up."""

    plan: Plan
    looks: tuple[Look | ApartLook, ...]
    binder: Binder | None
    # what the strategy's other options come to, where they are to be measured
    rivals: tuple[Planned, ...] = ()
    # why there is no plan, for every context that looks like this one
    error: errors.DynaFlowError | None = None
    # which option the first, second, ... `flow.any_of` of the strategy gave; 0 for those that are not named
    chosen: tuple[int, ...] = ()

    def raise_error(self) -> None:
        """A new one each time. The first takes along where it comes from: what is kept is bare."""
        if (kept := self.error) is not None:
            cause, origin = kept.__cause__, kept.__traceback__
            kept.__cause__ = kept.__context__ = kept.__traceback__ = None
            raise kept.bare().with_traceback(origin) from cause

    def why(self, has_batch: bool) -> str:
        """Why the strategy gave up. A graph without a batch looks to it like one of a single row."""
        is_about_batch = self.plan.reason == CONSTANT_BATCH or any(look.name == "batch_size" for look in self.looks)
        return NO_BATCH if is_about_batch and not has_batch else self.plan.reason

    def bind(self, sizes: Mapping[str, int], facts: Mapping[str, Any]) -> Bound | None:
        """The plan for these sizes, cut where the call's tags say, if they do; None when the strategy gave up."""
        if self.binder is None:
            return None
        rows = self.plan.rows
        return self.binder.bind(sizes, cuts=self.binder.made_of(cuts_of(rows, facts)) if rows else None)

    def holds(self, facts: Mapping[str, Any]) -> bool:
        return all(look.holds(facts) for look in self.looks) and all(rival.holds(facts) for rival in self.rivals)


@dataclass(frozen=True)
class Fallback:
    """Why a context runs the sequential graph."""

    reason: str
    error: errors.DynaFlowError | None = None
    # the strategy is Sequential: nothing was given up
    is_wanted: bool = False
    # a plan is there, and was measured not to be faster: counted as other fallbacks are, and no error
    is_choice: bool = False
    # the sequential plan, compiled as one launch (or as few as it takes); None: the graph runs as it was captured
    bound: Bound | None = None

    @classmethod
    def of(cls, error: errors.DynaFlowError, **more: Any) -> Fallback:
        return cls(str(error), error.bare(), **more)


def our_bug(name: str, what: str, error: Exception) -> errors.Unplannable:
    """A graph of `name` could not be analysed, or planned, for no reason that we know: said with its traceback."""
    log.exception("dynaflow: a graph of %s could not be %s", name, what)
    found = errors.Unplannable(f"the graph could not be {what}: {type(error).__name__}: {error}", fix="report this: it is our bug")
    found.__cause__ = error
    return found


def finish_plan(flow: Flow, plan: Plan, can_fuse: Callable[[Op], bool] | None = None, loose: frozenset[str] = frozenset()) -> Plan:
    """synchronise, fuse, place, verify: what stands between a strategy's launches and a plan that may run."""
    plan = synchronise(flow, plan)
    if can_fuse is not None:
        plan = fuse(flow, plan, can_fuse)
    plan = place(flow, plan, loose)
    verify(plan, flow)
    return plan
