"""One graph that Inductor compiled, run under plans of its kernels.

A region is called as Inductor's own callable is: a list of arguments, which it empties, and a sequence of results. Its numbers (sizes)
tell cases apart. Per case:

1. The first call runs Inductor's wrapper, with a look at what extern kernels return.
2. The second makes the kernels' flow and a plan. Under the strategy "auto" it measures what the kernels cost, searches for plans, lets
   the best of them and Inductor's own callable run in turns on copies of this call's arguments, and keeps the fastest. The choice is
   remembered on disk. Any other strategy gets what it asks for.
3. Later calls run what was chosen: on CUDA as one recording, on the CPU on lanes.

Whatever is not understood runs as Inductor has it: said once, counted, raised instead when strict.
"""

from __future__ import annotations

import hashlib
import json
import logging
import statistics
import types
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Callable, Mapping, Sequence
from weakref import WeakSet

import torch
from torch._prims_common import clone_preserve_strides

from dynaflow import disk, errors
from dynaflow.context import Context, current_tags
from dynaflow.costs import Cost, bound_us
from dynaflow.inductor.kernels import Kernels, kernels
from dynaflow.inductor.observed import Observed
from dynaflow.inductor.source import NotUnderstood
from dynaflow.inductor.units import ALIGNMENT
from dynaflow.ir import CALLER, Plan
from dynaflow.measure import Before, clock_for, compare, is_faster, measure_costs
from dynaflow.memory import place
from dynaflow.ongoing import is_serialised
from dynaflow.planned import finish_plan
from dynaflow.planner import run_strategy, sequential_plan
from dynaflow.recorded import PlanBody, is_dense, streams_for, touches_host, why_unrecordable
from dynaflow.runtime import fake, generated, graphs, threads
from dynaflow.runtime.binder import Binder
from dynaflow.runtime.lanes import Run
from dynaflow.runtime.program import Bound
from dynaflow.search import Candidate, search
from dynaflow.settings import Settings
from dynaflow.strategies import Auto, Sequential
from dynaflow.verify import verify

log = logging.getLogger("dynaflow")

# cases of one region: sizes beyond these run as Inductor has them
MAX_CASES = 16
# plans that are tried on the device, and the most streams that they have
NUM_TRIED, MAX_STREAMS = 6, 16
# of plans that are as fast as this, that with the fewest streams: libraries keep memory for each
AS_FAST = 1.02
# sets of addresses at which a case gets the outputs of other recordings
MAX_ADDRESSES = 8

Boxed = Callable[[list[Any]], Sequence[Any]]

# all regions of the process, for those who want to know what was chosen
living: WeakSet[Region] = WeakSet()


class Region:
    def __init__(
        self, name: str, text: str, module: types.ModuleType, plain: Boxed, settings: Settings, static: Sequence[int], is_backward: bool
    ):
        self.name, self.text, self.module, self.settings, self.static = name, text, module, settings, tuple(static)
        self.plain, self.is_backward = plain, is_backward
        self.digest = hashlib.sha256(text.encode()).hexdigest()
        self.cases: dict[tuple[int, ...], Case] = {}
        # why no case is made; empty while there may be
        self.refusal = ""
        living.add(self)

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        if is_serialised():
            return self.plain(args)
        if self.refusal:
            self.note(self.refusal)
            return self.plain(args)
        numbers = tuple([a for a in args if type(a) is int])
        case = self.cases.get(numbers)
        if case is None:
            if len(self.cases) >= MAX_CASES:
                self.note(f"more than {MAX_CASES} different sizes")
                return self.plain(args)
            case = self.cases[numbers] = Case(self)
        return case(args)

    def forget(self) -> None:
        """Choose anew."""
        self.cases.clear()
        self.refusal = ""

    def refuse(self, reason: str) -> None:
        self.refusal = reason
        self.note(reason)

    def note(self, reason: str) -> None:
        """Say it once, count it; raise it when strict."""
        if self.settings.strict:
            raise errors.FellBack(f"{self.name} would run as Inductor has it: {reason}.", fix="strict=False lets it")
        if self.settings.count_fallback(reason):
            log.warning("%s runs as Inductor has it: %s", self.name, reason)


@dataclass(frozen=True)
class Choice:
    """What was chosen for a case, and why."""

    # empty: Inductor's own callable
    plan: str
    # microseconds per call of what was tried; of the bound: simulated
    times_us: Mapping[str, float]
    costs: Mapping[str, Cost]

    def __str__(self) -> str:
        times = ", ".join(f"{name} {us:,.0f} us" for name, us in self.times_us.items())
        return f"{'a plan of the kernels' if self.plan else 'Inductor as it is'} ({times or 'as the strategy asks'})"

    def dump(self) -> str:
        costs = {name: (cost.us, cost.share) for name, cost in self.costs.items()}
        return json.dumps({"plan": self.plan, "times_us": dict(self.times_us), "costs": costs})

    @staticmethod
    def parse(text: str) -> Choice:
        read = json.loads(text)
        return Choice(read["plan"], read["times_us"], {name: Cost(*cost) for name, cost in read["costs"].items()})


class Case:
    """A region for given numbers."""

    def __init__(self, region: Region):
        self.region = region
        self.kernels: Kernels | None = None
        self.choice: Choice | None = None
        self.bound: Bound | None = None
        self._way: Boxed | None = None
        self._seen: Mapping[str, Any] | None = None

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        if self._way is not None:
            return self._run(args)
        if not _are_aligned(args):
            return self.region.plain(args)
        with self.region.settings.lock:
            try:
                if self._seen is None:
                    return self._observe(args)
                if self._way is None and not _is_capturing(args):
                    with _on(_device(args)):
                        self._choose(args)
            except NotUnderstood as reason:
                self.region.refuse(str(reason))
            except Exception as error:
                # nothing of this call has run yet, and choosing changes nothing of it
                if self.region.settings.strict or self._seen is None:
                    raise
                log.exception("dynaflow: no plan could be chosen for %s", self.region.name)
                self.region.refuse(f"no plan could be chosen: {type(error).__name__}: {error}")
        return self._run(args)

    def _run(self, args: list[Any]) -> Sequence[Any]:
        return (self._way or self.region.plain)(args)

    # -- 1. the first call

    def _observe(self, args: list[Any]) -> Sequence[Any]:
        region = self.region
        call = Observed(region.text, region.module.__dict__)
        results, self._seen = call(args, getattr(region.module, "runner", None))
        return results

    # -- 2. the choice

    def _choose(self, args: list[Any]) -> None:
        region, settings = self.region, self.region.settings
        assert self._seen is not None
        made = self.kernels = kernels(region.text, region.module.__dict__, args, self._seen, region.name, region.static)
        device = _device(args)
        for op, target in zip(made.flow.ops, made.targets):
            if why := why_unrecordable([target.removeprefix("torch.ops.")]):
                raise NotUnderstood(f"{op.name}: {why}")
            if touches_host(made.flow, op, made.program.layouts, device):
                raise NotUnderstood(f"{op.name} touches memory of the host, or of another device")
        if isinstance(settings.strategy, Auto):
            for op in made.flow.ops:
                if op.kind == "network" or (op.uses == (CALLER,) and _has_other_ranks()):
                    # every rank measures for as long as it likes, or not at all: others would wait for it
                    raise NotUnderstood(f"{op.name} may talk to other ranks, and is not measured on one alone")
            self.choice = self._remembered(args) or self._compared(args)
        else:
            plan = self._asked(args)
            if plan.reason and not isinstance(settings.strategy, Sequential):
                region.note(plan.reason)
            self.choice = Choice("" if plan.reason else str(plan), {}, {})
        if self.choice.plan:
            self.bound = self._bind(Plan.parse(self.choice.plan))
            self._way = Way(self, self.bound, device)
            settings.count(plans=1, binds=1)
            settings.note_peak(self.bound.peak_bytes)
        else:
            self._way = region.plain
        log.info("%s: %d kernels run under %s", region.name, len(made.flow.ops), self.choice)

    def _asked(self, args: Sequence[Any]) -> Plan:
        """The strategy's own plan. It sees no batch: kernels are made for all of it."""
        assert self.kernels is not None
        facts = {"batch_size": 1, "device": str(_device(args)), "needs_grad": False, **{f"tag.{k}": v for k, v in current_tags().items()}}
        planner = run_strategy(self.kernels.flow, self.region.settings.strategy, Context(facts))
        return finish_plan(self.kernels.flow, planner.finish(), None, self.kernels.allocated)

    def _bind(self, plan: Plan) -> Bound:
        assert self.kernels is not None
        return Binder(plan, self.kernels.program).bind({})

    def _compared(self, args: Sequence[Any]) -> Choice:
        """The fastest of Inductor's own callable, the kernels in program order, and the best plans that are found."""
        made, device = self.kernels, _device(args)
        assert made is not None
        # with their strides, which kernels take for granted: `clone` closes gaps
        given = [clone_preserve_strides(a) if i in made.changed else a for i, a in enumerate(args)]
        clock = clock_for(device)
        before = Before([given[i] for i in made.changed])

        def trial(way: Boxed) -> None:
            before.put_back_counters()
            way(list(given))

        with torch.no_grad(), _same_random_numbers(device):
            serial = self._bind(finish_plan(made.flow, sequential_plan(made.flow, ""), None, made.allocated))
            costs = measure_costs(serial, {name: given[i] for i, name in made.inputs}, made.keys, clock)
            candidates = [c for c in search(made.flow, costs, max_streams=MAX_STREAMS) if c.num_streams > 1]
            # the simulator is not the device: the best of each kind, not the best few, which are much alike
            kinds = {c.kind: c for c in reversed(candidates)}
            best_first = sorted(kinds.values(), key=lambda c: c.simulated_us)
            bounds = {"one stream": serial} | self._within_memory(best_first, serial, _num_bytes(args))
            ways: dict[str, Boxed] = {"Inductor": self.region.plain}
            ways |= {name: Way(self, bound, device, is_trial=True) for name, bound in bounds.items()}
            rounds = dict(zip(ways, compare([partial(trial, way) for way in ways.values()], clock)))
            times = {name: statistics.median(found) for name, found in rounds.items()}
            best = _least(times, {name: len(bound.streams) for name, bound in bounds.items()})
            # a machine that others use, too, favours one of many now and then: it has to win again
            if not is_faster(rounds[best], rounds["Inductor"]) or not is_faster(
                *compare([partial(trial, ways[name]) for name in (best, "Inductor")], clock)
            ):
                best = "Inductor"
        plan_text = str(bounds[best].plan) if best in bounds else ""
        choice = Choice(plan_text, {**times, "bound": bound_us(made.flow, costs)}, costs)
        disk.save(self._path(args), choice.dump())
        return choice

    def _within_memory(self, candidates: Sequence[Candidate], serial: Bound, given_bytes: int) -> dict[str, Bound]:
        """The first NUM_TRIED that hold no more than they may, beside what they are given."""
        made, settings = self.kernels, self.region.settings
        assert made is not None
        limit = (serial.peak_bytes + given_bytes) * settings.max_memory - given_bytes
        found: dict[str, Bound] = {}
        for candidate in candidates:
            plan = place(made.flow, candidate.plan, made.allocated)
            verify(plan, made.flow)
            bound = self._bind(plan)
            if bound.peak_bytes <= limit:
                found[candidate.kind] = bound
            else:
                log.info("%s: %s would hold %.1f MiB, more than %.1f (max_memory=%g)", self.region.name, candidate.kind,
                         bound.peak_bytes / 2**20, limit / 2**20, settings.max_memory)  # fmt: skip
            if len(found) == NUM_TRIED:
                break
        return found

    def _remembered(self, args: Sequence[Any]) -> Choice | None:
        assert self.kernels is not None
        text = disk.load(self._path(args))
        if text is None:
            return None
        try:
            choice = Choice.parse(text)
            if choice.plan:
                verify(Plan.parse(choice.plan), self.kernels.flow)
        except Exception as error:  # noqa: BLE001 (whatever another version left there)
            log.info("%s: the choice that was kept is of no use: %s: %s", self.region.name, type(error).__name__, error)
            return None
        return choice

    def _path(self, args: Sequence[Any]) -> Any:
        """Of the choice for this code, these sizes and this machine."""
        region, device = self.region, _device(args)
        machine = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu {torch.get_num_threads()}"
        lie = [a if type(a) is int else (tuple(a.shape), a.stride(), str(a.dtype)) for a in args]
        key = repr((region.digest, region.name, lie, machine, torch.__version__, region.settings.max_memory, region.settings.runtime))
        return disk.directory("choices") / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


class Way:
    """A case under a plan: on CUDA as one recording, on the CPU on lanes.

    Parameters and what is changed in place are bound by address, and so is what another recording returned (a backward's saved
    tensors): the same few addresses come again. Of a backward's other inputs Inductor says that they stay where they are; those that are
    seen to move are copied from then on, as all other inputs are. While nothing is recorded, Inductor's own callable runs.
    """

    def __init__(self, case: Case, bound: Bound, device: torch.device, is_trial: bool = False):
        assert case.kernels is not None
        self._is_trial = is_trial
        self._region, self._kernels, self._bound, self._device = case.region, case.kernels, bound, device
        settings = case.region.settings
        self._runtime, _, self._seed = settings.runtime.partition(":")
        is_recorded = self._runtime == "graph" or (self._runtime == "auto" and device.type == "cuda")
        self._recordings = graphs.Recordings(case.region.name, device, settings.pool, settings.borrow) if is_recorded else None
        self._body = PlanBody(bound, self._kernels.inputs, self._kernels.changed, device, lambda op: "")
        names = self._names = [name for name, _ in bound.outputs]
        returns = self._kernels.returns
        # where the plan's outputs, each as a whole, are all that is returned: their numbers
        is_plain = all(len(r) == 2 and r[1] is None and r[0] in names for r in returns)
        self._order = [names.index(r[0]) for r in returns] if is_plain else None
        inputs = [i for i, _ in self._kernels.inputs if i not in self._kernels.changed]
        static = set(case.region.static)
        # inputs that may move, and those that do
        self._checked = inputs if case.region.is_backward else [i for i in inputs if i not in static]
        self._moving = {i for i in self._checked if i not in static}
        # inputs whose addresses tell recordings apart where they are lent: a backward may well change a saved tensor in place
        self._keyed = [*self._checked, *self._kernels.changed]
        self._keys: dict[tuple[int, ...], _Key] = {}

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        with torch.no_grad(), _on(self._device):
            outputs = self._recorded(args) if self._recordings is not None else None
            if outputs is None:
                if self._device.type == "cuda" and not (torch.cuda.is_current_stream_capturing() and _are_aligned(args)):
                    return self._region.plain(args)
                outputs = self._issue(args)
        if not self._is_trial:
            self._region.settings.count_planned(self._bound.num_launches, 0)
        if self._order is not None:
            results: Sequence[Any] = [outputs[i] for i in self._order]
        else:
            results = self._kernels.hand_out(args, dict(zip(self._names, outputs)))
        args.clear()
        return results

    def _recorded(self, args: list[Any]) -> Sequence[torch.Tensor] | None:
        assert self._recordings is not None
        addresses = tuple([args[i].data_ptr() for i in self._keyed if graphs.is_lent(args[i])])
        key = self._keys.get(addresses)
        if key is None:
            if len(self._keys) >= MAX_ADDRESSES:
                return None
            key = self._keys[addresses] = _Key()
        outputs = self._recordings.replay(key, args)
        if outputs is None and self._is_aligned(args):
            self._moving.update(i for i, address in key.addresses.items() if args[i].data_ptr() != address)
            copied = self._slots(args)
            key.addresses = {i: args[i].data_ptr() for i in self._checked if i not in copied}
            outputs = self._recordings.record(key, args, lambda: copied, self._body)
        return outputs

    def _slots(self, args: Sequence[Any]) -> dict[int, tuple[int, int] | None]:
        """Inputs that are copied. What is expanded cannot be: its slot would be written several times in one place."""
        return {i: None for i in self._checked if i in self._moving and not graphs.is_lent(args[i]) and is_dense(args[i])}

    def _is_aligned(self, args: Sequence[Any]) -> bool:
        copied = self._slots(args)
        return not any(args[i].data_ptr() % ALIGNMENT for i, _ in self._kernels.inputs if i not in copied)

    def _issue(self, args: Sequence[Any]) -> Sequence[torch.Tensor]:
        bound = self._bound
        values = {name: args[i] for i, name in self._kernels.inputs}
        if self._device.type == "cuda" or self._runtime in ("serial", "graph") or not bound.streams:
            return generated.run(bound, values, streams_for(self._device if self._device.type == "cuda" else None, bound))
        is_fake = self._runtime == "fake"
        tensors = bound.tensors(values, poison=is_fake)
        run = Run(bound, tensors, {})
        if is_fake:
            fake.issue(bound, run, int(self._seed) if self._seed.isdigit() else self._seed or "issue")
        else:
            threads.issue(bound, run)
        return list(bound.results(tensors).values())


class _Key:
    """Stands for a recording's outputs of other recordings, by address."""

    def __init__(self) -> None:
        # where inputs were that may move, and are bound by address
        self.addresses: dict[int, int] = {}


def _least(times: Mapping[str, float], num_streams: Mapping[str, int]) -> str:
    """The fastest; of those that are as fast, that with the fewest streams."""
    least = min(times.values())
    return min((name for name, us in times.items() if us <= least * AS_FAST), key=lambda name: (num_streams.get(name, 0), times[name]))


def _device(args: Sequence[Any]) -> torch.device:
    devices = [a.device for a in args if isinstance(a, torch.Tensor)]
    return next((d for d in devices if d.type == "cuda"), devices[0] if devices else torch.device("cpu"))


def _num_bytes(args: Sequence[Any]) -> int:
    """What the arguments hold."""
    storages = {s.data_ptr(): s.nbytes() for s in (a.untyped_storage() for a in args if isinstance(a, torch.Tensor))}
    return sum(storages.values())


def _has_other_ranks() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1


def _on(device: torch.device) -> Any:
    """Kernels are launched on the current device."""
    is_elsewhere = device.type == "cuda" and device.index not in (None, torch.cuda.current_device())
    return torch.cuda.device(device) if is_elsewhere else nullcontext()


def _are_aligned(args: Sequence[Any]) -> bool:
    """Kernels take for granted that what they read is aligned; around Inductor's own callable it is seen to."""
    return not any(isinstance(a, torch.Tensor) and a.device.type == "cuda" and a.data_ptr() % ALIGNMENT for a in args)


def _is_capturing(args: Sequence[Any]) -> bool:
    return _device(args).type == "cuda" and torch.cuda.is_current_stream_capturing()


class _same_random_numbers:
    """What is drawn inside does not show outside."""

    def __init__(self, device: torch.device):
        self._device = device

    def __enter__(self) -> None:
        is_cuda = self._device.type == "cuda"
        self._state = torch.cuda.get_rng_state(self._device) if is_cuda else torch.get_rng_state()

    def __exit__(self, *_: Any) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(self._state, self._device)
        else:
            torch.set_rng_state(self._state)
