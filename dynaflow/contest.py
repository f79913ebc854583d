"""Plans against the sequential one, on copies of a call's own arguments: whoever asks for `never_slower` gets the fastest.

1. What a call changes is copied, inputs too where they are to be padded; random numbers are put back. Nothing of this shows outside.
2. All run as calls would: in recordings where plans are recorded, else launch by launch; in turns.
3. Where the flow calls collectives, every rank runs each as often as the others do. The slowest rank counts, and a plan has to win on
   all of them.
4. The outcome is remembered on disk, unless other ranks depend on it: theirs may not remember.
"""

from __future__ import annotations

import hashlib
import json
import logging
import statistics
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Iterator, Sequence

import torch

from dynaflow import disk
from dynaflow.errors import RankMissing
from dynaflow.inductor.units import ambient
from dynaflow.measure import Before, clock_for, compare, is_faster, same_random_numbers
from dynaflow.runtime.lanes import is_profiling
from dynaflow.runtime.program import Bound, copy_as_it_lies
from dynaflow.runtime.ranks import are_waited_for, everybody_says, uses_groups
from dynaflow.runtime.slots import Slots

if TYPE_CHECKING:
    from dynaflow.engine import CapturedGraph

log = logging.getLogger("dynaflow")

_measures: ContextVar[bool] = ContextVar("measures", default=True)


def is_measuring(device: torch.device) -> bool:
    """Whether calls on this device may be measured now: not inside of `unmeasured`, a profile, or the caller's own recording."""
    return _measures.get() and _can_repeat(device)


def _can_repeat(device: torch.device) -> bool:
    return not is_profiling() and not (device.type == "cuda" and torch.cuda.is_current_stream_capturing())


@contextmanager
def unmeasured() -> Iterator[None]:
    """Calls inside compile all that `never_slower=True` measures, and run the strategy's own plan. Measuring is left to the first call
    behind: to when nobody else uses the device, say."""
    token = _measures.set(False)
    try:
        yield
    finally:
        _measures.reset(token)


# of what is kept on disk
VERSION = 1

# calls per round where ranks run together: no rank may decide for itself
NUM_TOGETHER = 3


@dataclass(frozen=True)
class Outcome:
    # which of the plans; None: the sequential one
    winner: int | None
    # microseconds per call
    plans_us: list[float]
    sequential_us: float


# all is compiled, and is to be measured by a later call
LATER = Outcome(None, [], 0.0)


def contest(
    graph: CapturedGraph, bounds: Sequence[Bound], sequential: Bound | None, sizes: tuple[Any, ...], args: Sequence[Any]
) -> Outcome | None:
    """LATER inside of `unmeasured`, a profile or the caller's own recording. None where the plan is kept unmeasured: no room for copies,
    not all of them can be recorded, ranks that are not in step, or collectives that ranks need not call together."""
    is_shared = uses_groups(graph.flow)
    if is_shared and not are_waited_for(graph.flow):
        return None
    # a plan's own functions may be others under the same name
    can_remember = not is_shared and not any(bound.program.functions for bound in bounds)
    path = _path(graph, bounds, sizes, args)
    if can_remember and is_measuring(graph.device) and (known := _remembered(path, len(bounds))) is not None:
        return known
    try:
        with torch.no_grad(), same_random_numbers(graph.device):
            can_repeat = _can_repeat(graph.device)
            given = _copies_if_room(graph, sizes, args) if can_repeat else None
            if is_shared and (verdict := _in_step(graph, len(bounds), sizes, given is not None)) is not None:
                return None if verdict is _KEPT else LATER
            if given is None:
                return None if can_repeat else LATER
            before = Before([given[i] for i in sorted(graph.boundary.changed)], has_counters_only=True)
            made = [graph.repeatable(each, given, before.put_back_counters) for each in (*bounds, sequential)]
            if not is_shared and not is_measuring(graph.device):
                return LATER
            if len({is_recorded for _, is_recorded in made}) > 1:
                log.warning("%s: not all of its plans can be recorded; they are not measured", graph.settings.name)
                return None
            ways = [_again(run, before) for run, _ in made]
            *mine, other = compare(ways, clock_for(graph.device), NUM_TOGETHER if is_shared else None)
    except torch.OutOfMemoryError as error:
        if is_shared:  # the others wait in a collective of a plan that this rank does not run to its end
            raise RankMissing(
                f"this rank has no memory left to measure plans of '{graph.flow.name}' with the others.", why="they are in the midst of it",
                fix="end all ranks; leave memory for plans, or use never_slower=False on all") from error  # fmt: skip
        _say_no_room(graph)
        return None
    found = {"wins": [is_faster(us, other) for us in mine], "us": [statistics.median(us) for us in (*mine, other)]}
    everybody = everybody_says(graph.gm.graph, graph.flow, found) if is_shared else [found]
    *plans_us, sequential_us = (max(us) for us in zip(*(says["us"] for says in everybody)))
    winners = [i for i, wins in enumerate(zip(*(says["wins"] for says in everybody))) if all(wins)]
    outcome = Outcome(min(winners, key=plans_us.__getitem__, default=None), plans_us, sequential_us)
    if can_remember:
        disk.save(path, json.dumps(asdict(outcome)))
    return outcome


_KEPT = object()


def _in_step(graph: CapturedGraph, num_plans: int, sizes: tuple[Any, ...], has_copies: bool) -> Any:
    """Before anything is run that other ranks must run, too: None where all ranks measure the same, LATER where none of them does now, and
    _KEPT, for good, where they differ."""
    mine = {"asks": is_measuring(graph.device), "copies": has_copies, "plans": num_plans, "sizes": list(sizes)}
    everybody = everybody_says(graph.gm.graph, graph.flow, mine)
    if all(says == {**mine, "asks": True, "copies": True} for says in everybody):
        return None
    if not any(says["asks"] for says in everybody):
        return LATER
    log.warning("%s: its plan is kept unmeasured: ranks would not measure it together", graph.settings.name)
    return _KEPT


def _remembered(path: Path, num_plans: int) -> Outcome | None:
    text = disk.load(path)
    try:
        found = None if text is None else Outcome(**json.loads(text))
    except (TypeError, ValueError) as error:  # whatever another version left there
        log.info("an outcome that was kept is of no use: %s: %s", type(error).__name__, error)
        return None
    return found if found is not None and found.winner in (None, *range(num_plans)) else None


def _copies_if_room(graph: CapturedGraph, sizes: tuple[Any, ...], args: Sequence[Any]) -> list[Any] | None:
    try:
        return _copies(graph, sizes, args)
    except torch.OutOfMemoryError:
        _say_no_room(graph)
        return None


def _say_no_room(graph: CapturedGraph) -> None:
    log.warning("%s: there is no room to measure its plan against the sequential one; it is kept", graph.settings.name)


def _copies(graph: CapturedGraph, sizes: tuple[Any, ...], args: Sequence[Any]) -> list[Any]:
    """What may be changed, and what a recording reads from slots, is ours."""
    slots = Slots(args, graph.slots(args, sizes), ())
    slots.fill(args)
    given = slots.given(args)
    for i in graph.boundary.changed:
        given[i] = copy_as_it_lies(args[i])
    return given


def _again(run: Callable[[], Any], before: Before) -> Callable[[], None]:
    def again() -> None:
        before.put_back_counters()
        run()

    return again


def _path(graph: CapturedGraph, bounds: Sequence[Bound], sizes: tuple[Any, ...], args: Sequence[Any]) -> Path:
    """Of the outcome for this graph and these plans, these sizes and this machine."""
    machine = torch.cuda.get_device_name(graph.device) if graph.device.type == "cuda" else f"cpu {torch.get_num_threads()}"
    lie = [(tuple(a.shape), a.stride(), str(a.dtype)) if isinstance(a, torch.Tensor) else a for a in args]
    settings, plans = graph.settings, [str(bound.plan) for bound in bounds]
    versions = torch.__version__, VERSION
    key = repr((graph.gm.code, plans, sizes, lie, machine, versions, ambient(), settings.runtime, settings.compiler, settings.mode))
    return disk.directory("contests") / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
