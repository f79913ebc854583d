"""Is the plan well formed, and does every op run over every row exactly once?

Contract: `index(plan, flow)` returns the plan as small integers, which the other checks read, or raises.

1. Names: the plan is of this flow; streams are declared once; ops, streams and events exist.
2. Events: recorded once, and before (in host order) anything waits for them.
3. Parts: no op that mixes the batch is split; each op's parts tile the batch; a fused launch is over one part.
4. Slots: every temporary has exactly one slot, unless it never leaves a launch of several calls, or is loose; nothing else has one.
   What is loose may be (`loose.py`). Pieces lie in the slot of their home (`pieces.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple, cast

from dynaflow import errors
from dynaflow.ir import CALLER, START, Flow, Launch, Part, Plan, Record, Wait, tiles
from dynaflow.verify.loose import PLACE, check_loose, what_else
from dynaflow.verify.pieces import check_homes, check_pieces

RECORD, WAIT = -1, -2


class Indexed(NamedTuple):
    """A plan in integers."""

    # host order: (stream, op, part) per call; (stream, RECORD | WAIT, event)
    steps: list[tuple[int, int, int]]
    # the caller's stream is number 0
    streams: tuple[str, ...]
    parts: tuple[Part, ...]
    # per part: the segments of the batch that it covers; segments lie between neighbouring part boundaries
    rows: list[tuple[int, ...]]
    num_segments: int
    num_calls: int
    num_launches: int
    num_waits: int
    # per storage: its slot (a piece's is its home's), or -1 where it shares memory with nothing, or with its home alone
    slot_of: list[int]
    num_slots: int


def index(plan: Plan, flow: Flow) -> Indexed:
    # 1. names
    if plan.flow != flow.label:
        raise errors.ContextMismatch(
            f"the plan is of flow '{plan.flow}', and this is '{flow.label}'.", why="what follows the dot is a hash over ops and values",
            fix="plan again for this flow, or load the plan that was made for it")  # fmt: skip
    stream_index = {CALLER: 0}
    for stream in plan.streams:
        if stream.name in stream_index:
            why = "it is the caller's own" if stream.name == CALLER else "the plan has it twice"
            raise errors.MalformedPlan(f"stream '{stream.name}' cannot be declared again.", why=why, fix="declare each stream once")
        stream_index[stream.name] = len(stream_index)

    op_index = flow.index
    steps: list[tuple[int, int, int]] = []
    append = steps.append
    events: dict[str, int] = {}
    part_index: dict[Part, int] = {}
    launched = [0] * len(flow.ops)  # per op: the set of its parts, as bits
    num_calls = 0
    at = 0
    try:
        for at, step in enumerate(cast(tuple[Any, ...], plan.steps)):
            s = stream_index[step.stream]
            kind = type(step)
            if kind is Launch:
                calls = step.calls
                if len(calls) != 1:
                    if not calls:
                        raise errors.MalformedPlan(f"a launch on {step.stream} calls nothing.", where=step.where, fix="remove it")
                    if not step.replace and any(part != calls[0][1] for _, part in calls):
                        raise _several_parts(step)
                for name, part in calls:
                    op = op_index[name]
                    p = part_index.get(part)
                    if p is None:
                        p = part_index[part] = _new_part(part, len(part_index), step)
                    bit = 1 << p
                    before = launched[op]
                    if before & bit:
                        raise _doubled(plan, at, name, part)
                    launched[op] = before | bit
                    append((s, op, p))
                    num_calls += 1
            # 2. events
            elif kind is Record:
                event = step.event
                if event in events or (event == START and s):
                    raise _bad_record(step)
                events[event] = e = len(events)
                append((s, RECORD, e))
            else:
                append((s, WAIT, events[step.event]))
    except KeyError:
        raise _unknown(plan, flow, at, stream_index, events) from None

    # 3. parts: ops that are launched over the same set of parts are judged together
    parts = tuple(part_index)
    for bits in set(launched):
        if not tiles(part for p, part in enumerate(parts) if bits >> p & 1):
            raise _does_not_tile(plan, flow, launched, parts)
    if plan.rows:
        _check_rows(plan, parts)
    whole = [1 << p for p, part in enumerate(parts) if part.is_whole]
    for op in unsplittable(flow):
        if launched[op] not in whole:
            raise _split(plan, flow, op)

    rows, num_segments = _segments(parts)
    slot_of, num_slots = _slots(plan, flow, dict(zip(parts, rows)))
    num_waits = len(steps) - num_calls - len(events)
    num_launches = len(plan.steps) - num_waits - len(events)
    return Indexed(steps, tuple(stream_index), parts, rows, num_segments, num_calls, num_launches, num_waits, slot_of, num_slots)


def _check_rows(plan: Plan, parts: tuple[Part, ...]) -> None:
    """Rows of calls are given for the parts 0/n, 1/n, ...: there is no cut but between two of those."""
    n = len(plan.rows)
    odd = next((part for part in parts if n * part.lo % part.of or n * part.hi % part.of), None)
    if odd is not None or plan.rows.count("-1") != 1:
        raise errors.MalformedPlan(
            f"rows {' '.join(plan.rows)} does not say where the batch is cut.",
            why="one part must have the rest (-1)" if odd is None else f"{odd} is cut elsewhere than at multiples of 1/{n}",
            fix="give the rows of each part, one of them as -1")  # fmt: skip


def unsplittable(flow: Flow) -> list[int]:
    return remember(flow, "_verify_unsplittable", lambda flow: [i for i, op in enumerate(flow.ops) if op.unsplittable])


def remember(record: Any, key: str, make: Callable[[Any], Any]) -> Any:
    """A cached property of somebody else's frozen record."""
    found = record.__dict__.get(key)
    if found is None:
        found = record.__dict__[key] = make(record)
    return found


def _segments(parts: tuple[Part, ...]) -> tuple[list[tuple[int, ...]], int]:
    """Rows as integers: boundaries are compared as fractions, so 1/2 and 2/4 are one."""
    if len(parts) == 1:
        return [(0,)], 1
    spans = [(Fraction(part.lo, part.of), Fraction(part.hi, part.of)) for part in parts]
    marks = {mark: i for i, mark in enumerate(sorted({m for span in spans for m in span} | {Fraction(0), Fraction(1)}))}
    return [tuple(range(marks[lo], marks[hi])) for lo, hi in spans], len(marks) - 1


# ---------------------------------------------------------------------------- 4. slots


def _slots(plan: Plan, flow: Flow, rows_of: dict[Part, tuple[int, ...]]) -> tuple[list[int], int]:
    """Per storage the number of its slot, -1 for what shares memory with nothing; and how many slots there are."""
    has_pieces = remember(flow, "_verify_pieces", check_pieces)
    temporary = remember(flow, "_verify_temporary", _temporary)
    storage_of = remember(flow, "_verify_storage_of", lambda flow: {v.name: flow.storage_index[v.storage] for v in flow.values})
    slot_of = [-1] * len(flow.storages)
    number_of: dict[int, int] = {}
    num_in: list[int] = []
    seen: set[str] = set()
    num_placed = 0
    for name, slot in plan.slots:
        storage = storage_of.get(name, -1)
        if storage < 0 or storage not in temporary or slot < 0 or name in seen:
            raise _bad_slot(plan, flow, name, slot)
        seen.add(name)
        number = number_of.get(slot)
        if number is None:
            number = number_of[slot] = len(num_in)
            num_in.append(0)
        old = slot_of[storage]
        if old != number:
            if old >= 0:
                raise _bad_slot(plan, flow, name, slot)
            slot_of[storage] = number
            num_placed += 1
            num_in[number] += 1
    if num_placed < len(temporary) or plan.loose:
        loose = check_loose(plan, flow, seen, rows_of) if plan.loose else set()
        _without_slot(plan, flow, {s for s in temporary if slot_of[s] < 0 and s not in loose}, rows_of)
    if has_pieces:
        check_homes(plan, flow, seen)
        slot_of = [slot_of[home] for home in flow.home_storage]
    return [number if number >= 0 and num_in[number] > 1 else -1 for number in slot_of], len(num_in)


def _temporary(flow: Flow) -> frozenset[int]:
    """Storages that live in the arena: those that hold temporaries alone."""
    roles: dict[int, set[str]] = {}
    for v in flow.values:
        roles.setdefault(flow.storage_index[v.storage], set()).add(v.role)
    return frozenset(storage for storage, found in roles.items() if found == {"temp"})


def _without_slot(plan: Plan, flow: Flow, storages: set[int], rows_of: dict[Part, tuple[int, ...]]) -> None:
    """A temporary needs no memory where every launch that touches it is a group that makes all the rows that it reads."""
    for launch in plan.launches:
        made: dict[str, set[int]] = {}
        for name, part in launch.calls:
            op = flow.op(name)
            for value in (*op.reads, *op.mutates, *op.writes):
                if flow.storage_index[flow.value[value].storage] not in storages:
                    continue
                if launch.is_group and value in op.writes:
                    made.setdefault(value, set()).update(rows_of[part])
                elif value not in made or (flow.value[value].axis is not None and not made[value].issuperset(rows_of[part])):
                    raise errors.MalformedPlan(
                        f"'{value}' has no memory: no slot, and '{launch.label}' uses it.", where=launch.where,
                        why="only what never leaves its launch, or is loose, needs no slot", fix=PLACE)  # fmt: skip


def _bad_slot(plan: Plan, flow: Flow, name: str, slot: int) -> errors.MalformedPlan:
    value = flow.value.get(name)
    if value is None:
        what, why = f"slot {slot} holds '{name}', which is no value of the flow.", ""
    elif slot < 0:
        what, why = f"'{name}' has slot {slot}.", "slots count from 0"
    elif [n for n, _ in plan.slots].count(name) > 1:
        what, why = f"'{name}' has two slots.", f"slots {', '.join(str(s) for n, s in plan.slots if n == name)}"
    elif value.role == "temp":
        what, why = f"'{name}' has slot {slot}.", f"it is the same memory as storage '{value.storage}', which lies elsewhere"
    else:
        what, why = f"'{name}' has slot {slot}.", f"it is no temporary but {what_else(value)}"
    return errors.MalformedPlan(what, why=why, fix=PLACE)


# ---------------------------------------------------------------------------- what was wrong


def _new_part(part: Part, number: int, step: Launch) -> int:
    if not 0 <= part.lo < part.hi <= part.of:
        raise errors.MalformedPlan(
            f"'{step.label}' has the part {part.lo}:{part.hi}/{part.of}, which is none.", where=step.where,
            fix="a part is lo:hi/of with 0 <= lo < hi <= of")  # fmt: skip
    return number


def _several_parts(step: Launch) -> errors.MalformedPlan:
    (first, part), (other, another) = step.calls[0], next(call for call in step.calls if call[1] != step.calls[0][1])
    return errors.MalformedPlan(
        f"a launch on {step.stream} fuses '{first} {part}".rstrip() + f"' and '{other} {another}".rstrip() + "'.", where=step.where,
        why="fused ops run over one part", fix="launch them by themselves, or put a function in their place (replace=fn)")  # fmt: skip


def _doubled(plan: Plan, at: int, name: str, part: Part) -> errors.OpDoubled:
    first = next(i for i, step in enumerate(plan.steps) if type(step) is Launch and (name, part) in step.calls)
    return errors.OpDoubled(
        f"'{name} {part}".rstrip() + "' is launched twice.", where=cast(Launch, plan.steps[at]).where,
        why=f"steps {first} and {at}", fix="remove one of them")  # fmt: skip


def _bad_record(step: Record) -> errors.MalformedPlan:
    if step.event == START and step.stream != CALLER:
        return errors.MalformedPlan(
            f"event '{START}' is recorded on {step.stream}.", why=f"it is where the caller's work ends: it belongs on '{CALLER}'",
            fix="give the event another name")  # fmt: skip
    return errors.MalformedPlan(
        f"event '{step.event}' is recorded twice.", why="a wait on it could mean either", fix="give every record a name of its own")


def _unknown(plan: Plan, flow: Flow, at: int, streams: dict[str, int], events: dict[str, int]) -> errors.PlanRefused:
    step = plan.steps[at]
    where = step.where if type(step) is Launch else ""
    if step.stream not in streams:
        return errors.MalformedPlan(
            f"step {at} is on stream '{step.stream}', which the plan does not declare.", where=where,
            why=f"it has {', '.join(streams)}", fix=f"add the line 'stream {step.stream}'")  # fmt: skip
    if type(step) is Launch:
        name = next(name for name, _ in step.calls if name not in flow.index)
        return errors.MalformedPlan(f"'{name}' is no op of flow {flow.label}.", where=where, fix="print df.explain(...) for its ops")
    assert type(step) is Wait, step
    for later in range(at + 1, len(plan.steps)):
        record = plan.steps[later]
        if type(record) is Record and record.event == step.event:
            return errors.WaitBeforeRecord(
                f"{step.stream} waits for event '{step.event}' at step {at}, before it is recorded at step {later} on {record.stream}.",
                why="CUDA lets a wait on an event that is not recorded yet pass, silently",
                fix="move the record up, or let df.synchronise(flow, plan) make the waits anew",
                picture=f"{at:>5}  wait {step.event} @{step.stream}\n{later:>5}  record {record.event} @{record.stream}   <-- too late",
            )
    return errors.MalformedPlan(
        f"{step.stream} waits for event '{step.event}' at step {at}, which nothing records.", fix="add the record, or remove the wait")


def _does_not_tile(plan: Plan, flow: Flow, launched: list[int], parts: tuple[Part, ...]) -> errors.PlanRefused:
    """The first op (in program order) whose parts miss rows or hold rows twice, by name."""
    for i, bits in enumerate(launched):
        name = flow.ops[i].name
        mine = sorted((part for p, part in enumerate(parts) if bits >> p & 1), key=lambda p: Fraction(p.lo, p.of))
        if not mine:
            return errors.OpMissing(f"'{name}' is never launched.", why="every op of the flow must run", fix="launch it, over every row")
        if tiles(mine):
            continue
        shown = ", ".join(str(p) or "all rows" for p in mine)
        reach, last = Fraction(0), mine[0]
        for part in mine:
            lo, hi = Fraction(part.lo, part.of), Fraction(part.hi, part.of)
            if lo < reach:
                is_same = (lo, hi) == (Fraction(last.lo, last.of), Fraction(last.hi, last.of))
                return (errors.OpDoubled if is_same else errors.PartOverlap)(
                    f"'{name}' runs over the rows {lo} to {min(hi, reach)} of the batch twice.", where=_where(plan, name, part),
                    region=f"parts {shown}", why=f"{last} and {part} overlap", fix="launch each row once")  # fmt: skip
            if lo > reach:
                break
            reach, last = hi, part
        else:
            lo = Fraction(1)
        return errors.PartGap(
            f"'{name}' never runs over the rows {reach} to {lo} of the batch.", where=_where(plan, name, mine[0]), region=f"parts {shown}",
            why="the parts of an op must tile the batch", fix="launch the missing rows")  # fmt: skip
    raise AssertionError("all ops tile")


def _split(plan: Plan, flow: Flow, op: int) -> errors.UnsplittableOp:
    name = flow.ops[op].name
    parts = [part for launch in plan.launches for called, part in launch.calls if called == name]
    return errors.UnsplittableOp(
        f"'{name}' is launched over {', '.join(map(str, parts))}, and cannot be split.", where=_where(plan, name, parts[0]),
        why=flow.ops[op].unsplittable, fix="launch it once, over the whole batch")  # fmt: skip


def _where(plan: Plan, name: str, part: Part) -> str:
    return next((launch.where for launch in plan.launches if (name, part) in launch.calls), "")
