"""Plans with one mistake in them, by class of mistake. A mutant may be valid by luck: whether it is wrong is the oracle's word.

    name, mutant = mutate(plan, flow, seed)
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dynaflow.ir import CALLER, START, WHOLE, Flow, Launch, Part, Plan, Record, Step, Wait

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


def _step(plan: Plan, at: int) -> Any:
    return plan.steps[at]


def _changed(plan: Plan, at: int, **fields: Any) -> Plan:
    return _with(plan, [replace(step, **fields) if i == at else step for i, step in enumerate(plan.steps)])


def _choose(rng: random.Random, items: list[int]) -> int | None:
    return rng.choice(items) if items else None


def _plain(plan: Plan) -> list[int]:
    """Launches of one op, without a replacement."""
    return [i for i in _at(plan, Launch) if not _step(plan, i).is_group]


def _call(plan: Plan, at: int) -> tuple[str, Part]:
    return _step(plan, at).calls[0]


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
    event = _step(plan, at).event
    return _without(plan, *(i for i in (*_at(plan, Record), *_at(plan, Wait)) if _step(plan, i).event == event))


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
    return _changed(plan, at, event=_step(plan, other).event)


@_mutation
def _wait_for_an_earlier_event_of_that_stream(rng: random.Random, plan: Plan, flow: Flow) -> Plan | None:
    """The mistake that a reader overlooks: the right stream, one event too early."""
    records = _at(plan, Record)
    at = _choose(rng, _at(plan, Wait))
    if at is None:
        return None
    recorded = {_step(plan, i).event: i for i in records}
    mine = recorded[_step(plan, at).event]
    before = [i for i in records if i < mine and _step(plan, i).stream == _step(plan, mine).stream]
    return _changed(plan, at, event=_step(plan, before[-1]).event) if before else None


@_mutation
def _wait_on_the_wrong_stream(rng: random.Random, plan: Plan, flow: Flow) -> Plan | None:
    at = _choose(rng, _at(plan, Wait))
    return None if at is None else _changed(plan, at, stream=rng.choice(_streams(plan)))


@_mutation
def _record_on_the_wrong_stream(rng: random.Random, plan: Plan, flow: Flow) -> Plan | None:
    at = _choose(rng, _at(plan, Record))
    return None if at is None else _changed(plan, at, stream=rng.choice(_streams(plan)))


@_mutation
def _event_recorded_twice(rng: random.Random, plan: Plan, flow: Flow) -> Plan | None:
    records = _at(plan, Record)
    if len(records) < 2:
        return None
    a, b = rng.sample(records, 2)
    return _changed(plan, a, event=_step(plan, b).event)


@_mutation
def _drop_join(rng: random.Random, plan: Plan, flow: Flow) -> Plan | None:
    joins = [i for i in _at(plan, Wait) if _step(plan, i).stream == CALLER]
    return _without(plan, rng.choice(joins)) if joins else None


@_mutation
def _join_too_early(rng: random.Random, plan: Plan, flow: Flow) -> Plan | None:
    """The last record of a stream, before its last launch."""
    joined = {_step(plan, i).event for i in _at(plan, Wait) if _step(plan, i).stream == CALLER}
    records = [i for i in _at(plan, Record) if _step(plan, i).event in joined and i > 0]
    at = _choose(rng, records)
    return None if at is None else _moved(plan, at, at - 1)


@_mutation
def _drop_start_wait(rng: random.Random, plan: Plan, flow: Flow) -> Plan | None:
    waits = [i for i in _at(plan, Wait) if _step(plan, i).event == START]
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
    one, other = _step(plan, a), _step(plan, b)
    mutant = _changed(plan, a, calls=other.calls, replace=other.replace)
    return _changed(mutant, b, calls=one.calls, replace=one.replace)


def _swapped(plan: Plan, a: int, b: int) -> Plan:
    steps = list(plan.steps)
    steps[a], steps[b] = steps[b], steps[a]
    return _with(plan, steps)


@_mutation
def _launch_on_another_stream(rng: random.Random, plan: Plan, flow: Flow) -> Plan | None:
    at = _choose(rng, _at(plan, Launch))
    return None if at is None else _changed(plan, at, stream=rng.choice(_streams(plan)))


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
    one, other = _step(plan, a), _step(plan, b)
    mutant = _changed(plan, a, calls=other.calls)
    return _changed(mutant, b, calls=one.calls)


# ---------------------------------------------------------------------------- parts


def _with_part(plan: Plan, at: int, part: Part) -> Plan:
    return _changed(plan, at, calls=((_call(plan, at)[0], part),))


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
        (a, b) for a in _plain(plan) for b in _plain(plan) if _call(plan, a)[0] == _call(plan, b)[0]
        and _call(plan, a)[1].of == _call(plan, b)[1].of and _call(plan, a)[1].hi == _call(plan, b)[1].lo
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
        replace(_step(plan, at), calls=((name, Part(lo, hi, part.of)),)) for lo, hi in ((part.lo, middle), (middle, part.hi))
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
