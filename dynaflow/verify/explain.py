"""The words and the lane picture of a refusal. Slow and complete: it runs once, for the plan that was refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynaflow import errors
from dynaflow.ir import Flow, Launch, Plan, Record

if TYPE_CHECKING:
    from dynaflow.verify.structure import Indexed

_SYNCHRONISE = "df.synchronise(flow, plan) makes the waits anew"
_MAX_ROWS = 5


def step_of(plan: Plan, time: int) -> tuple[int, int]:
    """The step of the call with this time, and the call's number inside its launch."""
    for at, step in enumerate(plan.steps):
        if type(step) is Launch:
            if time <= len(step.calls):
                return at, time - 1
            time -= len(step.calls)
    raise AssertionError("a time beyond the last call")


def launch_at(plan: Plan, at: int) -> Launch:
    step = plan.steps[at]
    assert type(step) is Launch, step
    return step


def position(plan: Plan, at: int) -> str:
    """`compute#57`: the launch's number on its stream."""
    stream = plan.steps[at].stream
    return f"{stream}#{sum(type(step) is Launch and step.stream == stream for step in plan.steps[:at])}"


def lanes(plan: Plan, first: int, last: int) -> str:
    """The steps from `first` to `last` in the lanes of these two; long stretches between them are left out."""
    streams = list(dict.fromkeys((plan.steps[first].stream, plan.steps[last].stream)))
    between = [at for at in range(first + 1, last) if plan.steps[at].stream in streams]
    room = _MAX_ROWS - 3 if len(between) > _MAX_ROWS - 2 else len(between)
    shown = [first, *between[len(between) - room :], last]
    rows = [[f"{at:>5}", *(_text(plan, at) if plan.steps[at].stream == stream else "" for stream in streams)] for at in shown]
    if room < len(between):
        rows.insert(1, ["  ...", *("" for _ in streams)])
    rows.insert(0, [" step", *streams])
    width = max(max(len(cell) for cell in row[1:]) for row in rows)
    lines = [f"{row[0]}   " + "  ".join(cell.ljust(width) for cell in row[1:]) for row in rows]
    lines[-1] += "  <-- here"
    return "\n".join(line.rstrip() for line in lines)


def _text(plan: Plan, at: int) -> str:
    step = plan.steps[at]
    if type(step) is Launch:
        return step.label if len(step.label) <= 40 else step.label[:37] + "..."
    return f"({'record' if type(step) is Record else 'wait'} {step.event})"  # type: ignore[union-attr]


def _op_of(plan: Plan, flow: Flow, time: int) -> tuple[int, int]:
    at, number = step_of(plan, time)
    return at, flow.index[launch_at(plan, at).calls[number][0]]


def _verb(flow: Flow, op: int, storage: int) -> str:
    access = next((a for a in flow.accesses[op] if a.storage == storage), None)
    name = flow.storages[storage]
    if name in flow.ops[op].uses:
        return "uses"
    return "writes" if access is None or access.is_write else "reads"


def _region(plan: Plan, flow: Flow, op: int, at: int, storage: int) -> str:
    access = next(a for a in flow.accesses[op] if a.storage == storage)
    name = flow.storages[storage]
    if name in flow.ops[op].uses:
        return name
    part = next(part for called, part in launch_at(plan, at).calls if called == flow.ops[op].name)
    return f"{name}, " + (f"rows {part}" if access.by_rows and not part.is_whole else "all rows")


# ---------------------------------------------------------------------------- refusals


def conflict(
    plan: Plan, flow: Flow, indexed: Indexed, earlier: int, now: int, storage: int, clock: list[int], stream_at: list[int]
) -> errors.PlanRefused:
    """`now` touches `storage`, and `earlier` (in host order) did: unordered, or ordered against the program."""
    if earlier > indexed.num_calls:
        return _after_death(plan, flow, indexed, now, storage)
    (first, op_first), (last, op_last) = _op_of(plan, flow, earlier), _op_of(plan, flow, now)
    a, b = launch_at(plan, first), launch_at(plan, last)
    region = _region(plan, flow, op_last, last, storage)
    verb_first, verb_last = _verb(flow, op_first, storage), _verb(flow, op_last, storage)
    if first == last:
        return errors.WrongOrder(
            f"in '{b.label}' on {b.stream}, {flow.ops[op_last].name} {verb_last} what {flow.ops[op_first].name} {verb_first}, "
            "and comes too late.", where=b.where, region=region,
            why=f"in the program, {flow.ops[op_last].name} comes before {flow.ops[op_first].name}",
            fix="list the calls in the order of the program")  # fmt: skip
    if clock[stream_at[earlier]] < earlier:
        gerund = {"reads": "reading", "writes": "writing", "uses": "using"}[verb_first]
        return errors.PlanRace(
            f"'{b.label}' on {b.stream} {verb_last} what '{a.label}' on {a.stream} may still be {gerund}.", where=b.where, region=region,
            why=f"no path of waits orders {position(plan, first)} before {position(plan, last)}", fix=_SYNCHRONISE,
            picture=lanes(plan, first, last))  # fmt: skip
    return errors.WrongOrder(
        f"'{b.label}' on {b.stream} {verb_last} what '{a.label}' on {a.stream} {verb_first}, and comes too late.", where=b.where,
        region=region, why=f"in the program, {flow.ops[op_last].name} comes before {flow.ops[op_first].name}",
        fix="launch them in the order of the program", picture=lanes(plan, first, last))  # fmt: skip


def shared(plan: Plan, flow: Flow, indexed: Indexed, earlier: int, now: int, storage: int) -> errors.LiveOverlap:
    """`now` writes `storage` into a slot whose previous value `earlier` may still use."""
    (first, op_first), (last, _) = _op_of(plan, flow, earlier), _op_of(plan, flow, now)
    a, b = launch_at(plan, first), launch_at(plan, last)
    if first == last:
        others = [x.storage for x in flow.accesses[op_first] if x.storage in _others(flow, indexed, storage)]
        return shared_inside(plan, flow, b, others[0], storage)
    previous = [s for s in _others(flow, indexed, storage) if any(x.storage == s for x in flow.accesses[op_first])]
    old = flow.storages[previous[0]] if previous else "the slot's previous value"
    return errors.LiveOverlap(
        f"'{b.label}' on {b.stream} writes '{flow.storages[storage]}' over '{old}', which '{a.label}' on {a.stream} may still use.",
        where=b.where, region=_slot(plan, flow, storage),
        why=f"no path of waits orders {position(plan, first)} before {position(plan, last)}",
        fix="df.place(flow, plan) gives slots for these waits", picture=lanes(plan, first, last))  # fmt: skip


def shared_inside(plan: Plan, flow: Flow, launch: Launch, one: int, other: int) -> errors.LiveOverlap:
    return errors.LiveOverlap(
        f"'{launch.label}' uses '{flow.storages[one]}' and '{flow.storages[other]}', which share memory.", where=launch.where,
        region=_slot(plan, flow, one), why="one unit may read its inputs until its end", fix="df.place(flow, plan) keeps them apart",
    )


def half_made(launch: Launch, value: str, reader: str) -> errors.MalformedPlan:
    return errors.MalformedPlan(
        f"'{launch.label}' makes only some of the rows of '{value}' that '{reader}' in it reads.", where=launch.where,
        why="what is made inside a launch is no input of it, and the other rows are made outside",
        fix="put all parts that make these rows into the launch, or none")  # fmt: skip


def _after_death(plan: Plan, flow: Flow, indexed: Indexed, now: int, storage: int) -> errors.LiveOverlap:
    last, op_last = _op_of(plan, flow, now)
    launch = launch_at(plan, last)
    others = _others(flow, indexed, storage)
    writers = [
        (at, flow.storages[a.storage])
        for at, step in enumerate(plan.steps[:last]) if type(step) is Launch
        for name, _ in step.calls for a in flow.accesses[flow.index[name]] if a.is_write and a.storage in others
    ]  # fmt: skip
    first, other = writers[-1]
    return errors.LiveOverlap(
        f"'{launch.label}' on {launch.stream} {_verb(flow, op_last, storage)} '{flow.storages[storage]}', "
        f"which '{launch_at(plan, first).label}' overwrote with '{other}'.",
        where=launch.where, region=_slot(plan, flow, storage), why="values of one slot live one after the other",
        fix="df.place(flow, plan) gives slots for this order", picture=lanes(plan, first, last))  # fmt: skip


def _slot(plan: Plan, flow: Flow, storage: int) -> str:
    home = flow.storages[flow.home_storage[storage]]
    return next(f"slot {slot}" for name, slot in plan.slots if flow.value[name].storage == home)


def _others(flow: Flow, indexed: Indexed, storage: int) -> list[int]:
    """The storages that share its slot, without those that share its home."""
    slot, home = indexed.slot_of[storage], flow.home_storage
    return [s for s, found in enumerate(indexed.slot_of) if found == slot and home[s] != home[storage]]


def not_started(plan: Plan, now: int) -> errors.UnjoinedStream:
    launch = launch_at(plan, step_of(plan, now)[0])
    return errors.UnjoinedStream(
        f"'{launch.label}' on {launch.stream} may start before the caller's work is done.", where=launch.where,
        why=f"nothing on {launch.stream} before it waits for 'start', or for what came after it",
        fix=f"'record start @caller' first, and 'wait start @{launch.stream}'")  # fmt: skip


def not_joined(plan: Plan, last: int) -> errors.UnjoinedStream:
    at = step_of(plan, last)[0]
    launch = launch_at(plan, at)
    return errors.UnjoinedStream(
        f"the caller may continue before '{launch.label}' on {launch.stream} is done.", where=launch.where,
        why=f"no path of waits orders {position(plan, at)} before the end of the caller's stream",
        fix=f"record an event after it on {launch.stream}, and wait for it on 'caller'")  # fmt: skip


def never_made(reader: str, value: str) -> errors.WrongOrder:
    return errors.WrongOrder(
        f"{reader} reads '{value}', which no op before makes.", why="the flow itself is not in program order",
        fix="this is a bug in the partition")  # fmt: skip
