"""One graph that Inductor compiled, run under plans of its kernels.

A region is called as Inductor's own callable is: a list of arguments, which it empties, and a sequence of results. Its numbers (sizes)
tell cases apart. Per case:

1. The first call runs Inductor's wrapper, with a look at what extern kernels return.
2. The second makes the kernels' flow and a plan. Under the strategy "auto" it measures what the kernels cost, searches for plans, lets
   the best of them and Inductor's own callable run in turns on copies of this call's arguments, and keeps the fastest. The choice is
   remembered on disk, and taken for sizes that are near. Any other strategy gets what it asks for.
3. Later calls run what was chosen: on CUDA as one recording, on the CPU on lanes.

Where somebody else captures (`in_captures`: a serving system that has CUDA Graphs of its own), nothing is recorded here. The first call
observes and chooses, and what is measured are recordings, Inductor's own order among them. The plan is issued while a stream is being
captured, and Inductor's own callable runs otherwise. Numbers that ops read on the host (tensors of one element there) are what a capture
keeps of them: they tell cases apart, as sizes do.

Whatever is not understood runs as Inductor has it: said once, counted, raised instead when strict.
"""

from __future__ import annotations

import hashlib
import logging
import math
import types
from dataclasses import replace
from typing import Any, Mapping, Sequence
from weakref import WeakSet

import torch
from torch._inductor.output_code import CompiledFxGraph

from dynaflow import disk, errors
from dynaflow.context import Context, current_tags
from dynaflow.inductor.compile import loaded_module
from dynaflow.inductor.entries import num_returned
from dynaflow.inductor.kernels import Kernels, kernels
from dynaflow.inductor.observed import Observed
from dynaflow.inductor.source import NotUnderstood
from dynaflow.inductor.units import ambient
from dynaflow.ir import CALLER, Op, Plan
from dynaflow.measure import num_lanes
from dynaflow.ongoing import is_serialised
from dynaflow.planned import finish_plan
from dynaflow.planner import run_strategy
from dynaflow.recorded import touches_host, why_unrecordable
from dynaflow.room import MAX_MEMORY, SPARE_BYTES, room_for
from dynaflow.runtime import cuda
from dynaflow.runtime.program import Bound
from dynaflow.settings import Settings
from dynaflow.strategies import Auto, Sequential
from dynaflow.trials import Choice, Trials, in_order
from dynaflow.verify import verify
from dynaflow.way import Boxed, Way, are_aligned, device_of, is_capturing, on

log = logging.getLogger("dynaflow")

# cases of one region: sizes beyond these run as Inductor has them (who captures for himself has as many sizes as he likes)
MAX_CASES = 16
# sizes that differ by less than this factor run as was found best for the first of them
NEAR = 2.0
# what a choice on disk was made by: another number where memory is counted otherwise
COUNTED = 5

# all regions of the process, for those who want to know what was chosen
living: WeakSet[Region] = WeakSet()


class Region:
    def __init__(
        self, name: str, compiled: CompiledFxGraph, settings: Settings, static: Sequence[int], is_backward: bool, in_captures: bool = False,
        text: str = "",
    ):  # fmt: skip
        """Raises NotCompiled. `in_captures`: the plan is for those who capture their own CUDA Graphs, see above. `text`: what kernels are
        read from, where it is not the wrapper's own; it computes the same."""
        plain = compiled.current_callable
        assert plain is not None, "Inductor has compiled it"
        self.name, self.text, self.settings, self.static = name, text or compiled.source_code, settings, tuple(static)
        self.module: types.ModuleType = loaded_module(compiled)
        self.plain, self.is_backward, self.in_captures = plain, is_backward, in_captures
        self.digest = hashlib.sha256(self.text.encode()).hexdigest()
        # of a forward in training, how many of its results the caller gets: the others are saved for its backward; None: all of them
        self.num_returned = num_returned(compiled, self.digest)
        # by their numbers, and what was read
        self.cases: dict[tuple[int, ...], Case] = {}
        # why no case is made; empty while there may be
        self.refusal = ""
        self._said: set[str] = set()
        # where the numbers are among the arguments, and the tensors whose one element is read on the host
        self._numbers_at: list[int] | None = None
        self.read_at: list[int] = []
        living.add(self)

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        if is_serialised():
            return self.plain(args)
        if self.refusal:
            self.note(self.refusal)
            return self.plain(args)
        if self._numbers_at is None:  # the same in every call
            self._numbers_at = [i for i, a in enumerate(args) if type(a) is int]
            self.read_at = [i for i, a in enumerate(args) if _is_number_on_host(a)] if self.in_captures else []
        numbers = tuple([args[i] for i in self._numbers_at])
        read = tuple([int(args[i]) for i in self.read_at]) if self.read_at else ()
        case = self.cases.get(numbers + read)
        if case is None:
            if len(self.cases) >= MAX_CASES and not self.in_captures:
                self.note(f"more than {MAX_CASES} different sizes")
                return self.plain(args)
            case = self.cases[numbers + read] = Case(self, numbers, read)
        return case(args)

    def forget(self) -> None:
        """Choose anew."""
        self.cases.clear()
        self.refusal = ""

    def refuse(self, reason: str) -> None:
        self.refusal = reason
        self.note(reason)

    @property
    def is_strict(self) -> bool:
        """Whether not to plan is an error: only where plans of kernels were asked for."""
        return self.settings.strict and self.settings.partition == "kernels"

    def note(self, reason: str) -> None:
        """Say it once, count it; raise it when strict. Where nothing was asked for, nothing is given up: it is only said."""
        if self.settings.partition != "kernels":
            if reason not in self._said:
                self._said.add(reason)
                log.info("%s runs as Inductor has it: %s", self.name, reason)
            return
        if self.settings.strict:
            raise errors.FellBack(f"{self.name} would run as Inductor has it: {reason}.", fix="strict=False lets it")
        if self.settings.count_fallback(reason):
            log.warning("%s runs as Inductor has it: %s", self.name, reason)


class Case:
    """A region for given numbers, and for what its ops read on the host."""

    def __init__(self, region: Region, numbers: tuple[int, ...], read: tuple[int, ...] = ()):
        self.region, self.numbers, self.read = region, numbers, read
        self.kernels: Kernels | None = None
        self.choice: Choice | None = None
        # for these very sizes, now or by an earlier process
        self.is_measured = False
        self.bound: Bound | None = None
        self._way: Boxed | None = None
        self._seen: Mapping[str, Any] | None = None

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        if self._way is not None:
            return self._run(args)
        if not are_aligned(args):
            if self.region.in_captures:
                self.region.note("an argument is not aligned")
            return self.region.plain(args)
        with self.region.settings.lock:
            if self._seen is None:
                # who captures runs a size once, and captures it then: the call that is looked at is the one to choose by
                kept = list(args) if self.region.in_captures else None
                try:
                    results = self._observe(args)
                except NotUnderstood as reason:
                    self.region.refuse(str(reason))
                    return self.region.plain(args)
                if kept is not None and self._may_choose(kept):
                    self._try_to_choose(kept)
                return results
            if self._way is None and self._may_choose(args):
                self._try_to_choose(args)
        return self._run(args)

    def _may_choose(self, args: Sequence[Any]) -> bool:
        """Not while a stream is captured: nothing can be measured then."""
        if not is_capturing(args):
            return True
        if self.region.in_captures:
            self.region.note("it was captured before it was run")
        return False

    def _try_to_choose(self, args: Sequence[Any]) -> None:
        """Choosing changes nothing of the call: whatever goes wrong, Inductor's own callable is there."""
        try:
            with on(device_of(args)):
                self._choose(args)
        except NotUnderstood as reason:
            self.region.refuse(str(reason))
        except Exception as error:
            if self.region.is_strict:
                raise
            log.exception("dynaflow: no plan could be chosen for %s", self.region.name)
            self.region.refuse(f"no plan could be chosen: {type(error).__name__}: {error}")

    def _run(self, args: list[Any]) -> Sequence[Any]:
        return (self._way or self.region.plain)(args)

    # -- 1. the first call

    def _observe(self, args: list[Any]) -> Sequence[Any]:
        region = self.region
        call = Observed(region.text, region.module.__dict__)
        results, self._seen = call(args, getattr(region.module, "runner", None))
        return results

    # -- 2. the choice

    def _choose(self, args: Sequence[Any]) -> None:
        region, settings = self.region, self.region.settings
        assert self._seen is not None
        made = self.kernels = kernels(region.text, region.module.__dict__, args, self._seen, region.name, region.static)
        device = device_of(args)
        for op, target in zip(made.flow.ops, made.targets):
            if why := why_unrecordable([target.removeprefix("torch.ops.")]):
                raise NotUnderstood(f"{op.name}: {why}")
            if touches_host(made.flow, self._but_for_what_is_read(op), made.program.layouts, device):
                raise NotUnderstood(f"{op.name} touches memory of the host, or of another device")
        if isinstance(settings.strategy, Auto):
            for op in made.flow.ops:
                if op.kind == "network" or (op.uses == (CALLER,) and _has_other_ranks()):
                    # every rank measures for as long as it likes, or not at all: others would wait for it
                    raise NotUnderstood(f"{op.name} may talk to other ranks, and is not measured on one alone")
            self.choice = self._remembered(args)
            self.is_measured = self.choice is not None
            if self.choice is None:
                self.choice = self._of_near_sizes(args)
            if self.choice is None:
                self.choice = self._measured(made, args)
        else:
            plan = self._asked(args)
            if plan.reason and not isinstance(settings.strategy, Sequential):
                region.note(plan.reason)
            self.choice = Choice("" if plan.reason else str(plan), {}, {})
        if self.choice.plan:
            self.bound = self.bound or made.bind(Plan.parse(self.choice.plan))
            self._way = Way(region, made, self.bound, device)
            if region.in_captures and device.type == "cuda":
                cuda.side_streams(device, self.bound.streams, self.bound.product_streams, is_recorded=True)  # not while others capture
            settings.count(plans=1, binds=1)
            settings.note_peak(self.bound.peak_bytes)
        else:
            self._way = region.plain
        log.log(self._level, "%s: %d kernels run under %s", region.name, len(made.flow.ops), self.choice)

    def _measured(self, made: Kernels, args: Sequence[Any]) -> Choice:
        try:
            choice = Trials(self.region, made, args).choose()
        except torch.OutOfMemoryError:  # at other sizes, or in another process, there may be some
            return Choice("", {}, {}, untried="no memory is left to measure plans in")
        self.is_measured = True
        if device_of(args).type == "cuda" or not choice.untried:  # on the CPU that is soon found out, and may be others' fault
            disk.save(self._path(args), choice.dump())
        return choice

    @property
    def _level(self) -> int:
        """Who captures has dozens of sizes, most of them near others: those that were measured are told."""
        return logging.DEBUG if self.region.in_captures and not self.is_measured else logging.INFO

    def _but_for_what_is_read(self, op: Op) -> Op:
        """An op of others' that reads a number on the host does so as it is issued, in the caller's order: once per capture, with us as
        without. What it reads tells cases apart."""
        assert self.kernels is not None
        if CALLER not in op.uses or not self.region.read_at:
            return op
        known = {name for i, name in self.kernels.inputs if i in self.region.read_at}
        return replace(op, reads=tuple(value for value in op.reads if value not in known))

    def _asked(self, args: Sequence[Any]) -> Plan:
        """The strategy's own plan. It sees no batch: kernels are made for all of it."""
        assert self.kernels is not None
        facts = {"batch_size": 1, "device": device_of(args).type, "needs_grad": False, **{f"tag.{k}": v for k, v in current_tags().items()}}
        planner = run_strategy(self.kernels.flow, self.region.settings.strategy, Context(facts))
        return finish_plan(self.kernels.flow, planner.finish(), None, self.kernels.allocated)

    def _remembered(self, args: Sequence[Any]) -> Choice | None:
        assert self.kernels is not None
        text = disk.load(self._path(args))
        if text is None:
            return None
        try:
            choice = Choice.parse(text)
            if choice.plan:
                verify(plan := Plan.parse(choice.plan), self.kernels.flow)
                self.bound = self.kernels.bind(plan)
        except Exception as error:  # noqa: BLE001 (whatever another version left there)
            log.info("%s: the choice that was kept is of no use: %s: %s", self.region.name, type(error).__name__, error)
            return None
        return choice

    def _of_near_sizes(self, args: Sequence[Any]) -> Choice | None:
        """What was measured for other sizes, none of them further away than a factor of NEAR: a cache that grows by one token per call
        is not measured at every length."""
        assert self.kernels is not None
        # (other threads come with other sizes meanwhile)
        cases = [case for case in list(self.region.cases.values()) if case.is_measured and case.read == self.read]
        measured = [(_distance(self.numbers, case.numbers), case) for case in cases]
        distance, near = min(measured, key=lambda pair: pair[0], default=(NEAR, self))
        if distance >= NEAR or near.choice is None:
            return None
        choice = near.choice
        if choice.plan:
            plan = replace(Plan.parse(choice.plan), flow=self.kernels.flow.label)
            try:
                verify(plan, self.kernels.flow)
                bound = self.kernels.bind(plan)
            except errors.DynaFlowError as error:
                log.info("%s: the plan for sizes %s cannot be taken for %s: %s", self.region.name, near.numbers, self.numbers, error)
                return None
            growth = math.prod(max(b / max(a, 1), 1.0) for a, b in zip(near.numbers, self.numbers))
            costs = {name: cost.at_sizes(growth) for name, cost in choice.costs.items()}
            serial = self.kernels.bind(in_order(self.kernels))
            if not room_for(self.region, self.kernels, serial, args, costs).take(bound):
                return None  # of what it holds, more grows with the sizes than of what Inductor's order does
            choice, self.bound = replace(choice, plan=str(plan)), bound
        log.log(self._level, "%s: sizes %s run as was found best for %s", self.region.name, self.numbers, near.numbers)
        return replace(choice, measured_at=str(near.numbers))

    def _path(self, args: Sequence[Any]) -> Any:
        """Of the choice for this code, these sizes and this machine."""
        region, device = self.region, device_of(args)
        machine = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu {torch.get_num_threads()}, {num_lanes()}"
        lie = [*(a if type(a) is int else (tuple(a.shape), a.stride(), str(a.dtype), a.requires_grad) for a in args), *self.read]
        settings = region.settings.max_memory or (MAX_MEMORY, SPARE_BYTES), region.settings.runtime, ambient()
        key = repr((COUNTED, region.digest, region.name, lie, machine, torch.__version__, settings))
        return disk.directory("choices") / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def _is_number_on_host(arg: Any) -> bool:
    return isinstance(arg, torch.Tensor) and arg.device.type == "cpu" and arg.numel() == 1 and not arg.is_floating_point()


def _distance(numbers: Sequence[int], others: Sequence[int]) -> float:
    """The largest factor between two that correspond."""
    return max((max(a, b, 1) / max(min(a, b), 1) for a, b in zip(numbers, others, strict=True)), default=1.0)


def _has_other_ranks() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
