"""Sizes and tags -> what runs for them: a plan bound to these sizes, or the reason why the sequential graph does.

1. What was seen before is looked up. Tags that no plan looked at do not tell contexts apart.
2. Anything new: a plan whose looks hold is bound to the sizes, and its memory verified; else the strategy runs first.
3. Where plans are measured, the fastest of the strategy's options and the sequential plan is kept.

Beside them the same plan in other forms: cut elsewhere (`moved`), on one stream (`serialised`), and the sequential plan op by op or in
as few launches as it takes.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, Callable, Mapping, Sequence

from dynaflow import collector, errors
from dynaflow.boundary import Boundary
from dynaflow.contest import LATER, Outcome, is_measuring
from dynaflow.context import ALL, APART
from dynaflow.ir import Plan
from dynaflow.planned import Fallback, Planned, finish_plan, our_bug
from dynaflow.planner import sequential_plan
from dynaflow.planning import Planning
from dynaflow.recorded import Padding
from dynaflow.runtime.binder import Binder
from dynaflow.runtime.graphs import Recordings
from dynaflow.runtime.program import Bound
from dynaflow.settings import Measured
from dynaflow.strategies import Sequential
from dynaflow.verify import verify_memory

log = logging.getLogger("dynaflow")

# bound plans that are kept per graph; the oldest goes first
MAX_BOUND = 1024
# plans that are kept per graph, of strategies that look at exact sizes, say; the oldest goes first
MAX_PLANS = 1024

Sizes = tuple[Any, ...]
# the plans for a call's sizes, and the sequential one -> which of them is the fastest; None: unmeasured, the first is kept
Measure = Callable[[Sequence[Bound], Bound | None], Outcome | None]


class Bindings:
    """`recordings` and `padding`: where plans are recorded. `fixed_batch`: the batch size, where Dynamo made it a constant."""

    def __init__(
        self, planning: Planning, boundary: Boundary, fixed_batch: int | None, recordings: Recordings | None, padding: Padding | None
    ):
        self.planning, self._boundary, self._fixed_batch = planning, boundary, fixed_batch
        self.flow, self.settings, self._device = planning.flow, planning.settings, planning.device
        self._recordings, self._padding = recordings, padding
        self._batch_at = [i for i, s in enumerate(self.flow.symbols) if s in self.flow.batch]
        self._bound: dict[Any, Bound | Fallback] = {}
        # the plan that each of these came of, those that gave up too
        self._made_of: dict[Any, Planned] = {}
        # contexts whose plans are still to be measured
        self._unmeasured: set[Any] = set()
        # tags that a plan looked at
        self._tags_read: tuple[str, ...] = ()
        # sizes whose plan is replayed, whatever the tags are
        self.steady: dict[Sizes, Bound] = {}
        # id of a plan -> the plan, and the binder of its serialised twin
        self._serial: dict[int, tuple[Plan, Binder]] = {}
        self._sequential_binder: Binder | None = None

    # -- 1. what is known

    def known(self, sizes: Sizes, tags: Mapping[str, Any]) -> Bound | Fallback | None:
        """What runs for sizes and tags that were seen before; None where that is to be measured first."""
        key = self._key(sizes, tags)
        return None if self._unmeasured and key in self._unmeasured and is_measuring(self._device) else self._bound.get(key)

    def keep_steady(self, sizes: Sizes, bound: Bound) -> None:
        """Calls of these sizes replay it from now on, without a look at anything but their arguments; where tags do not matter."""
        if self._tags_read or sizes in self._unmeasured or not self.settings.lock.acquire(blocking=False):
            return  # where another thread plans, a later call keeps it
        try:
            found = self._bound.get(sizes)  # another thread may have dropped it meanwhile, or planned by a tag
            if bound is (found.bound if isinstance(found, Fallback) else found) and not self._tags_read:
                self.steady[sizes] = bound
        finally:
            self.settings.lock.release()

    def clear(self) -> None:
        """As if nothing had been planned."""
        self.planning.plans.clear()
        for kept in (self._bound, self._made_of, self._unmeasured, self.steady, self._serial):
            kept.clear()

    def _key(self, sizes: Sizes, tags: Mapping[str, Any]) -> Any:
        if not self._tags_read:
            return sizes
        if ALL in self._tags_read:
            return (sizes, *sorted(tags.items()))
        return (sizes, *[tags.get(name) for name in self._tags_read])

    def _keep(self, key: Any, bound: Bound | Fallback, planned: Planned | None) -> None:
        if len(self._bound) >= MAX_BOUND:
            self._drop(next(iter(self._bound)))
        if key in self._bound:
            self._forget(self._bound[key])  # it was measured since, and is not the fastest
        if planned is not None:
            self._made_of[key] = planned
        self._bound[key] = bound

    def _drop(self, key: Any) -> None:
        self._forget(self._bound.pop(key))
        self._made_of.pop(key, None)
        self.steady.pop(key, None)
        self._unmeasured.discard(key)

    def _forget(self, found: Bound | Fallback) -> None:
        bound = found.bound if isinstance(found, Fallback) else found
        if self._recordings is not None and bound is not None:
            self._recordings.forget(bound)

    # -- 2. what is new

    def prepare(self, sizes: Sizes, tags: Mapping[str, Any], args: Sequence[Any], measure: Measure) -> Bound | Fallback:
        """What runs for sizes and tags that are seen for the first time."""
        with self.settings.lock:
            bound = self.known(sizes, tags)
            if bound is None:
                planned = None
                try:
                    with collector.held():
                        facts, numbers = self._facts(sizes, tags, args), self._boundary.numbers(sizes)
                        planned = self._plan(facts, numbers)
                        planned.raise_error()
                        bounds = self._bounds(planned, facts, numbers)
                    bound = self._bind(sizes, tags, bounds, planned, measure)
                except errors.DynaFlowError as error:
                    # what a rank runs that did not plan with this one, nobody knows: any collective may be the wrong one
                    if self.settings.strict or isinstance(error, errors.RankMissing):
                        raise
                    is_plannable = not isinstance(error, (errors.AmbiguousBatch, errors.Unplannable))
                    bound = Fallback.of(error, bound=self.as_one(sizes) if is_plannable else None)
                except Exception as error:
                    if self.settings.strict:
                        raise
                    bound = Fallback.of(our_bug(self.settings.name, "planned", error))
                self._keep(self._key(sizes, tags), bound, planned)
            return bound

    def _bind(self, sizes: Sizes, tags: Mapping[str, Any], bounds: list[Bound], planned: Planned, measure: Measure) -> Bound | Fallback:
        """`bounds`: the plan's for these sizes, and its rivals'."""
        if not bounds:
            why = planned.why(bool(self._batch_at) or self._fixed_batch is not None)
            return Fallback(why, None, isinstance(self.settings.strategy, Sequential), bound=self.as_one(sizes))
        bound, key = bounds[0], self._key(sizes, tags)
        self._unmeasured.discard(key)
        # what is padded runs under the plan of the size that it is padded to
        is_padded = self._padding is not None and self._padding.sizes(sizes) != sizes
        outcome = measure(bounds, self.as_one(sizes)) if self.settings.never_slower and not is_padded else None
        if outcome is LATER:
            self._unmeasured.add(key)
        elif outcome is not None:
            options = tuple(next(p.chosen for p in (planned, *planned.rivals) if p.plan is each.plan) for each in bounds)
            us = tuple(outcome.plans_us), outcome.sequential_us
            measured = Measured(self.flow.label, sizes, options, *us, outcome.winner)
            log.info("%s: plans for sizes %s were measured: %s", self.settings.name, sizes, measured)
            self.settings.note_measured(measured)
            if outcome.winner is None:
                return Fallback("no plan is faster than the sequential one", is_choice=True, bound=self.as_one(sizes))
            bound = bounds[outcome.winner]
        self.settings.count(binds=1)
        self.settings.note_peak(bound.peak_bytes)
        return bound

    def _facts(self, sizes: Sizes, tags: Mapping[str, Any], args: Sequence[Any]) -> Mapping[str, Any]:
        batch_sizes = {sizes[i] for i in self._batch_at}
        if len(batch_sizes) > 1:
            raise errors.AmbiguousBatch(
                f"the batch has several sizes in one call: {sorted(batch_sizes)}.", why="inputs that were one batch at capture differ now",
                fix="pass batch={argument: dim} to df.compile")  # fmt: skip
        if batch_sizes == {1} and any(copied.is_view(self._boundary.numbers(sizes)) for copied in self.planning.built.loose_copies):
            raise errors.Unplannable(
                "the batch has one row, and a copy of it is changed in place.", why="of one row, torch makes a view instead")
        return self._boundary.facts(args, next(iter(batch_sizes), self._fixed_batch or 1), self._device, tags)

    def _plan(self, facts: Mapping[str, Any], numbers: Mapping[str, Any]) -> Planned:
        if (planned := self.planning.known(facts)) is not None:
            return planned
        planned = self.planning.plan_with_all_ranks(facts, numbers)
        self._drop_oldest_plans()
        looks = [look for p in (planned, *planned.rivals) for look in p.looks]
        read = {name: None for look in looks if (name := look.name.removeprefix("tag.")) != look.name}
        if not read.keys() <= {*self._tags_read}:
            self._tags_read = tuple({**dict.fromkeys(self._tags_read), **read})
            for key in list(self._bound):  # nobody would find these again
                self._drop(key)
        return planned

    def _drop_oldest_plans(self) -> None:
        """With all that came of them, what gave up too. Ranks that plan together made theirs in one order: the same one goes on each, and
        what it was for is planned anew by all of them or by none."""
        while len(self.planning.plans) > MAX_PLANS:
            oldest = self.planning.plans.pop(0)
            for key in [key for key, planned in self._made_of.items() if planned is oldest]:
                self._drop(key)
            for each in (oldest, *oldest.rivals):
                self._serial.pop(id(each.plan), None)

    def _bounds(self, planned: Planned, facts: Mapping[str, Any], numbers: Mapping[str, Any]) -> list[Bound]:
        """The plan for these sizes, then its rivals, as far as they can be had."""
        found: list[Bound] = []
        for each in (planned, *planned.rivals):
            try:
                if (bound := each.bind(numbers, facts)) is None:
                    continue
                verify_memory(bound.program.flow, bound.plan, bound.memory)
            except errors.DynaFlowError as error:
                if each is planned:
                    raise
                log.info("%s: an option of its strategy is left out: %s", self.settings.name, error)
            else:
                found.append(bound)
        return found

    # -- the same in other forms

    def moved(self, bound: Bound) -> Bound:
        """The same plan, cut where this call may be cut."""
        align = self.settings.align
        if align is None or not (cuts := bound.cuts):
            return bound
        moved = tuple(align(cuts))
        if len(moved) != len(cuts) or any(a > b for a, b in zip((0, *moved), (*moved, bound.batch_size))):
            raise errors.OptionError(
                f"align moved the cuts at rows {list(cuts)} to {list(moved)}.", why=f"the batch has {bound.batch_size} rows",
                fix="return as many rows, in order")  # fmt: skip
        if moved == cuts:
            return bound
        if bound.program.flow.apart:
            raise errors.OptionError(
                f"align moved the cuts at rows {list(cuts)} to {list(moved)}, of parts that are apart.",
                why=f"the tag {APART} vouches for the former alone: state of the name {bound.program.flow.apart} could be raced for",
                fix="leave these cuts where they are, or do not give the tag")  # fmt: skip
        there = self._bound.get((bound, moved))
        return there if isinstance(there, Bound) else self._move(bound, moved)

    def _move(self, bound: Bound, cuts: tuple[int, ...]) -> Bound:
        with self.settings.lock:
            planned = next((p for p in self.planning.plans if p.binder is not None and p.plan is bound.plan), None)
            if planned is None or planned.binder is None:  # another thread's call dropped the plan meanwhile: this one is the last
                return Binder(bound.plan, bound.program).bind(bound.sizes, bound.memory, cuts)
            there = planned.binder.bind(bound.sizes, bound.memory, cuts)
            self._keep((bound, cuts), there, planned)
            self.settings.count(binds=1)
            return there

    def serialised(self, bound: Bound, sizes: Sizes) -> Bound:
        with self.settings.lock:
            plan, binder = self._serial.get(id(bound.plan), (None, None))
            if plan is not bound.plan or binder is None:
                # a function in the place of ops may have streams of its own
                functions = {name: f.serialised() if hasattr(f, "serialised") else f for name, f in bound.program.functions.items()}
                binder = Binder(bound.plan.serialised(), replace(bound.program, functions=functions))
                self._serial[id(bound.plan)] = (bound.plan, binder)
            return binder.bind(self._boundary.numbers(sizes), cuts=bound.cuts)

    def op_by_op(self, sizes: Sizes) -> Bound:
        """The sequential plan op by op, for `df.profile()`: the graph as a whole has no launches to show."""
        plan = finish_plan(self.flow, sequential_plan(self.flow, "profiled"))
        return Binder(plan, self.planning.built.program).bind(self._boundary.numbers(sizes))

    def as_one(self, sizes: Sizes) -> Bound | None:
        """The sequential plan in as few launches as it takes, where that is better than the graph as it was captured."""
        if self.planning.compiler is None and self._recordings is None:
            return None
        numbers = self._boundary.numbers(sizes)
        if self._sequential_binder is None:
            self._sequential_binder = self.planning.finish(sequential_plan(self.flow, "sequential"), {}, numbers, self.flow)
        return self._sequential_binder.bind(numbers)
