"""Plans with one mistake in them, by class of mistake. A mutant may be valid by luck: whether it is wrong is the oracle's word.

    name, mutant = mutate(plan, flow, seed)
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from dynaflow.ir import CALLER, START, WHOLE, Flow, Launch, Part, Plan, Record, Step, Wait
from dynaflow.memory import ALIGNMENT, Memory

Mutation = Callable[[random.Random, Plan, Flow], Plan | None]
MUTATIONS: dict[str, Mutation] = {}


def mutate(plan: Plan, flow: Flow, seed: int) -> tuple[str, Plan]:
    """One random mutation that applies. The mutant differs from the plan."""
    rng = random.Random(seed)
    for name in rng.sample(list(MUTATIONS), len(MUTATIONS)):
        mutant = apply(name, plan, flow, rng)
        if mutant is not None:
            return name, mutant
    raise ValueError("no mutation applies to this plan")


def apply(name: str, plan: Plan, flow: Flow, rng: random.Random) -> Plan | None:
    """The plan after this mutation; None where it does not apply, or changes nothing."""
    mutant = MUTATIONS[name](rng, plan, flow)
    return None if mutant is None or mutant == plan else mutant


def _mutation(function: Mutation) -> Mutation:
    MUTATIONS[function.__name__.strip("_").replace("_", " ")] = function
    return function


# ---------------------------------------------------------------------------- helpers


def _at(plan: Plan, kind: type) -> list[int]:
    return [i for i, step in enumerate(plan.steps) if type(step) is kind]


def _with(plan: Plan, steps: list[Step]) -> Plan:
    return replace(plan, steps=tuple(steps))


def _without(plan: Plan, *gone: int) -> Plan:
    return _with(plan, [step for i, step in enumerate(plan.steps) if i not in gone])


def _moved(plan: Plan, source: int, target: int) -> Plan:
    steps = list(plan.steps)
    step = steps.pop(source)
    steps.insert(target, step)
    return _with(plan, steps)


def _replaced(plan: Plan, at: int, step: Step) -> Plan:
    return _with(plan, [step if i == at else old for i, old in enumerate(plan.steps)])


def _choose(rng: random.Random, items: list[int]) -> int | None:
    return rng.choice(items) if items else None


def _plain(plan: Plan) -> list[int]:
    """Launches of one op, without a replacement."""
    return [i for i in _at(plan, Launch) if not plan.steps[i].replace]  # type: ignore[union-attr]


def _call(plan: Plan, at: int) -> tuple[str, Part]:
    return plan.steps[at].calls[0]  # type: ignore[union-attr]


def _streams(plan: Plan) -> list[str]:
    return [CALLER, *(s.name for s in plan.streams)]


# ---------------------------------------------------------------------------- records and waits


@_mutation
def _drop_wait(rng: random.Random, plan: Plan, flow: Flow) -> Plan | None:
    at = _choose(rng, _at(plan, Wait))
    return None if at is None else _without(plan, at)


@_mutation
def _drop_record(rng: random.Random, plan: Plan, flow: Flow) -> Plan | None:
    at = _choose(rng, _at(plan, Record))
    return None if at is None else _without(plan, at)


@_mutation
def _drop_record_and_its_waits(rng: random.Random, plan: Plan, flow: Flow) -> Plan | None:
    at = _choose(rng, _at(plan, Record))
    if at is None:
        return None
    event = plan.steps[at].event  # type: ignore[union-attr]
    return _without(plan, *(i for i, step in enumerate(plan.steps) if type(step) is not Launch and step.event == event))


@_mutation
def _wait_later(rng: random.Random, plan: Plan, flow: Flow) -> Plan | None:
    at = _choose(rng, _at(plan, Wait))
    return None if at is None else _moved(plan, at, min(len(plan.steps) - 1, at + rng.randint(1, 8)))


@_mutation
def _wait_earlier(rng: random.Random, plan: Plan, flow: Flow) -> Plan | None:
    at = _choose(rng, _at(plan, Wait))
    return None if at is None else _moved(plan, at, max(0, at - rng.randint(1, 8)))


@_mutation
def _record_earlier(rng: random.Random, plan: Plan, flow: Flow) -> Plan | None:
    at = _choose(rng, _at(plan, Record))
    return None if at is None else _moved(plan, at, max(0, at - rng.randint(1, 8)))


@_mutation
def _record_later(rng: random.Random, plan: Plan, flow: Flow) -> Plan | None:
    at = _choose(rng, _at(plan, Record))
    return None if at is None else _moved(plan, at, min(len(plan.steps) - 1, at + rng.randint(1, 8)))


@_mutation
def _wait_for_another_event(rng: random.Random, plan: Plan, flow: Flow) -> Plan | None:
    at, other = _choose(rng, _at(plan, Wait)), _choose(rng, _at(plan, Record))
    if at is None or other is None:
        return None
    return _replaced(plan, at, replace(plan.steps[at], event=plan.steps[other].event))  # type: ignore[union-attr, call-arg]


@_mutation
def _wait_for_an_earlier_event_of_that_stream(rng: random.Random, plan: Plan, flow: Flow) -> Plan | None:
    """The mistake that a reader overlooks: the right stream, one event too early."""
    records = _at(plan, Record)
    at = _choose(rng, _at(plan, Wait))
    if at is None:
        return None
    recorded = {plan.steps[i].event: i for i in records}  # type: ignore[union-attr]
    mine = recorded[plan.steps[at].event]  # type: ignore[union-attr]
    before = [i for i in records if i < mine and plan.steps[i].stream == plan.steps[mine].stream]
    return _replaced(plan, at, replace(plan.steps[at], event=plan.steps[before[-1]].event)) if before else None  # type: ignore[union-attr, call-arg]


@_mutation
def _wait_on_the_wrong_stream(rng: random.Random, plan: Plan, flow: Flow) -> Plan | None:
    at = _choose(rng, _at(plan, Wait))
    return None if at is None else _replaced(plan, at, replace(plan.steps[at], stream=rng.choice(_streams(plan))))


@_mutation
def _record_on_the_wrong_stream(rng: random.Random, plan: Plan, flow: Flow) -> Plan | None:
    at = _choose(rng, _at(plan, Record))
    return None if at is None else _replaced(plan, at, replace(plan.steps[at], stream=rng.choice(_streams(plan))))


@_mutation
def _event_recorded_twice(rng: random.Random, plan: Plan, flow: Flow) -> Plan | None:
    records = _at(plan, Record)
    if len(records) < 2:
        return None
    a, b = rng.sample(records, 2)
    return _replaced(plan, a, replace(plan.steps[a], event=plan.steps[b].event))  # type: ignore[union-attr, call-arg]


@_mutation
def _drop_join(rng: random.Random, plan: Plan, flow: Flow) -> Plan | None:
    joins = [i for i in _at(plan, Wait) if plan.steps[i].stream == CALLER]
    return _without(plan, rng.choice(joins)) if joins else None


@_mutation
def _join_too_early(rng: random.Random, plan: Plan, flow: Flow) -> Plan | None:
    """The last record of a stream, before its last launch."""
    joined = {plan.steps[i].event for i in _at(plan, Wait) if plan.steps[i].stream == CALLER}  # type: ignore[union-attr]
    records = [i for i in _at(plan, Record) if plan.steps[i].event in joined and i > 0]  # type: ignore[union-attr]
    at = _choose(rng, records)
    return None if at is None else _moved(plan, at, at - 1)


@_mutation
def _drop_start_wait(rng: random.Random, plan: Plan, flow: Flow) -> Plan | None:
    waits = [i for i in _at(plan, Wait) if plan.steps[i].event == START]  # type: ignore[union-attr]
    return _without(plan, rng.choice(waits)) if waits else None


# ---------------------------------------------------------------------------- launches


@_mutation
def _swap_adjacent_launches(rng: random.Random, plan: Plan, flow: Flow) -> Plan | None:
    launches = _at(plan, Launch)
    if len(launches) < 2:
        return None
    k = rng.randrange(len(launches) - 1)
    return _swapped(plan, launches[k], launches[k + 1])


@_mutation
def _swap_distant_launches(rng: random.Random, plan: Plan, flow: Flow) -> Plan | None:
    launches = _at(plan, Launch)
    return _swapped(plan, *rng.sample(launches, 2)) if len(launches) > 2 else None


@_mutation
def _swap_what_two_launches_do(rng: random.Random, plan: Plan, flow: Flow) -> Plan | None:
    """The calls change places; streams and waits stay."""
    launches = _at(plan, Launch)
    if len(launches) < 2:
        return None
    k = rng.randrange(len(launches) - 1)
    a, b = launches[k], launches[min(len(launches) - 1, k + rng.randint(1, 3))]
    one, other = plan.steps[a], plan.steps[b]
    mutant = _replaced(plan, a, replace(one, calls=other.calls, replace=other.replace))  # type: ignore[union-attr, call-arg]
    return _replaced(mutant, b, replace(other, calls=one.calls, replace=one.replace))  # type: ignore[union-attr, call-arg]


def _swapped(plan: Plan, a: int, b: int) -> Plan:
    steps = list(plan.steps)
    steps[a], steps[b] = steps[b], steps[a]
    return _with(plan, steps)


@_mutation
def _launch_on_another_stream(rng: random.Random, plan: Plan, flow: Flow) -> Plan | None:
    at = _choose(rng, _at(plan, Launch))
    return None if at is None else _replaced(plan, at, replace(plan.steps[at], stream=rng.choice(_streams(plan))))


@_mutation
def _launch_earlier(rng: random.Random, plan: Plan, flow: Flow) -> Plan | None:
    at = _choose(rng, _at(plan, Launch))
    return None if at is None else _moved(plan, at, max(0, at - rng.randint(1, 8)))


@_mutation
def _drop_launch(rng: random.Random, plan: Plan, flow: Flow) -> Plan | None:
    at = _choose(rng, _at(plan, Launch))
    return None if at is None else _without(plan, at)


@_mutation
def _launch_twice(rng: random.Random, plan: Plan, flow: Flow) -> Plan | None:
    at = _choose(rng, _at(plan, Launch))
    if at is None:
        return None
    steps = list(plan.steps)
    steps.insert(at + rng.choice((1, rng.randint(1, len(steps) - at))), steps[at])
    return _with(plan, steps)


@_mutation
def _swap_part_order(rng: random.Random, plan: Plan, flow: Flow) -> Plan | None:
    """Two parts of one op change places: each now waits for the other's inputs."""
    by_op: dict[str, list[int]] = {}
    for i in _plain(plan):
        by_op.setdefault(_call(plan, i)[0], []).append(i)
    split = [launches for launches in by_op.values() if len(launches) > 1]
    if not split:
        return None
    a, b = rng.sample(rng.choice(split), 2)
    one, other = plan.steps[a], plan.steps[b]
    mutant = _replaced(plan, a, replace(one, calls=other.calls))  # type: ignore[union-attr, call-arg]
    return _replaced(mutant, b, replace(other, calls=one.calls))  # type: ignore[union-attr, call-arg]


# ---------------------------------------------------------------------------- parts


def _with_part(plan: Plan, at: int, part: Part) -> Plan:
    return _replaced(plan, at, replace(plan.steps[at], calls=((_call(plan, at)[0], part),)))  # type: ignore[union-attr, call-arg]


@_mutation
def _gap_between_parts(rng: random.Random, plan: Plan, flow: Flow) -> Plan | None:
    at = _choose(rng, [i for i in _plain(plan) if not _is_single_row(_call(plan, i)[1])])
    if at is None:
        return None
    part = _finer(_call(plan, at)[1])
    return _with_part(plan, at, rng.choice((Part(part.lo + 1, part.hi, part.of), Part(part.lo, part.hi - 1, part.of))))


@_mutation
def _overlapping_parts(rng: random.Random, plan: Plan, flow: Flow) -> Plan | None:
    at = _choose(rng, [i for i in _plain(plan) if not _call(plan, i)[1].is_whole])
    if at is None:
        return None
    part = _call(plan, at)[1]
    wider = [Part(part.lo - 1, part.hi, part.of)] * (part.lo > 0) + [Part(part.lo, part.hi + 1, part.of)] * (part.hi < part.of)
    return _with_part(plan, at, rng.choice(wider))


@_mutation
def _wrong_part(rng: random.Random, plan: Plan, flow: Flow) -> Plan | None:
    """An op runs over the rows of another part, too often there and never on its own."""
    at = _choose(rng, [i for i in _plain(plan) if not _call(plan, i)[1].is_whole])
    others = [part for part in plan.parts if at is not None and part != _call(plan, at)[1]]
    return None if at is None or not others else _with_part(plan, at, rng.choice(others))


@_mutation
def _split_an_unsplittable_op(rng: random.Random, plan: Plan, flow: Flow) -> Plan | None:
    at = _choose(rng, [i for i in _plain(plan) if flow.op(_call(plan, i)[0]).unsplittable])
    return None if at is None else _in_halves(plan, at)


@_mutation
def _split_a_launch(rng: random.Random, plan: Plan, flow: Flow) -> Plan | None:
    """Mostly valid: two launches in the place of one, over its rows."""
    at = _choose(rng, [i for i in _plain(plan) if not flow.op(_call(plan, i)[0]).unsplittable and not _is_single_row(_call(plan, i)[1])])
    return None if at is None else _in_halves(plan, at)


@_mutation
def _merge_parts(rng: random.Random, plan: Plan, flow: Flow) -> Plan | None:
    """One launch over two adjacent parts, in the place of the first or of the second of them."""
    pairs = [
        (a, b) for a in _plain(plan) for b in _plain(plan)
        if _call(plan, a)[0] == _call(plan, b)[0] and _call(plan, a)[1].of == _call(plan, b)[1].of and _call(plan, a)[1].hi == _call(plan, b)[1].lo
    ]  # fmt: skip
    if not pairs:
        return None
    a, b = rng.choice(pairs)
    joined = Part(_call(plan, a)[1].lo, _call(plan, b)[1].hi, _call(plan, a)[1].of)
    kept, gone = rng.choice(((a, b), (b, a)))
    return _without(_with_part(plan, kept, WHOLE if joined.is_whole else joined), gone)


def _is_single_row(part: Part) -> bool:
    return part.hi - part.lo == 1 and part.of > 1


def _finer(part: Part) -> Part:
    return part if part.hi - part.lo > 1 else Part(part.lo * 2, part.hi * 2, part.of * 2)


def _in_halves(plan: Plan, at: int) -> Plan:
    name, part = _call(plan, at)
    part = _finer(part)
    middle = (part.lo + part.hi) // 2
    steps = list(plan.steps)
    steps[at : at + 1] = [
        replace(steps[at], calls=((name, Part(lo, hi, part.of)),)) for lo, hi in ((part.lo, middle), (middle, part.hi))  # type: ignore[call-arg]
    ]
    return _with(plan, steps)


# ---------------------------------------------------------------------------- memory


@_mutation
def _two_values_in_one_slot(rng: random.Random, plan: Plan, flow: Flow) -> Plan | None:
    """All values of one slot move into another."""
    slots = sorted({slot for _, slot in plan.slots})
    if len(slots) < 2:
        return None
    a, b = rng.sample(slots, 2)
    return replace(plan, slots=tuple((value, a if slot == b else slot) for value, slot in plan.slots))


@_mutation
def _value_in_another_slot(rng: random.Random, plan: Plan, flow: Flow) -> Plan | None:
    slots = sorted({slot for _, slot in plan.slots})
    if len(slots) < 2:
        return None
    k = rng.randrange(len(plan.slots))
    value, old = plan.slots[k]
    new = rng.choice([slot for slot in slots if slot != old])
    return replace(plan, slots=(*plan.slots[:k], (value, new), *plan.slots[k + 1 :]))


@_mutation
def _value_without_slot(rng: random.Random, plan: Plan, flow: Flow) -> Plan | None:
    if not plan.slots:
        return None
    k = rng.randrange(len(plan.slots))
    return replace(plan, slots=plan.slots[:k] + plan.slots[k + 1 :])


# ---------------------------------------------------------------------------- bytes of a bound plan

MEMORY_MUTATIONS = ("buffer moved", "buffer moved by a few bytes", "buffer outside the arena", "arena too small")


def mutate_memory(memory: Memory, rng: random.Random) -> tuple[str, Memory]:
    """Another offset for one value, or a smaller arena. Needs at least one value."""
    name = rng.choice(MEMORY_MUTATIONS)
    value = rng.choice(list(memory.offsets))
    offset, nbytes = memory.offsets[value]
    room = max(0, memory.arena_bytes - nbytes)
    if name == "arena too small":
        return name, Memory(memory.offsets, max(8, (memory.arena_bytes - ALIGNMENT * rng.randint(1, 2)) // 8 * 8))
    if name == "buffer moved":
        new = rng.randint(0, room // 8) * 8
    elif name == "buffer moved by a few bytes":
        new = max(0, min(room // 8 * 8, offset + 8 * rng.choice((-3, -2, -1, 1, 2, 3, 32, -32))))
    else:
        new = memory.arena_bytes - rng.randint(0, max(0, nbytes // 8 - 1)) * 8
    return name, Memory({**memory.offsets, value: (new, nbytes)}, memory.arena_bytes)


# ---------------------------------------------------------------------------- edits that change nothing


def harmless_edit(plan: Plan, rng: random.Random) -> Plan:
    """The same schedule written differently, or with more waits than it needs. Must stay accepted."""
    edit = rng.choice((_more_waits, _other_names, _streams_turned, _own_slots))
    return edit(plan, rng)


def _more_waits(plan: Plan, rng: random.Random) -> Plan:
    """A new record anywhere, and a wait for it anywhere behind it."""
    steps = list(plan.steps)
    for number in range(rng.randint(1, 4)):
        at = rng.randint(0, len(steps))
        steps.insert(at, Record(f"more{number}", rng.choice(_streams(plan))))
        steps.insert(rng.randint(at + 1, len(steps)), Wait(f"more{number}", rng.choice(_streams(plan))))
    return _with(plan, steps)


def _other_names(plan: Plan, rng: random.Random) -> Plan:
    steps = [s if type(s) is Launch or s.event == START else replace(s, event=f"renamed.{s.event}") for s in plan.steps]  # type: ignore[union-attr, call-arg]
    return _with(plan, steps)


def _streams_turned(plan: Plan, rng: random.Random) -> Plan:
    return replace(plan, streams=plan.streams[::-1])


def _own_slots(plan: Plan, rng: random.Random) -> Plan:
    return replace(plan, slots=tuple((value, k) for k, (value, _) in enumerate(plan.slots)))
