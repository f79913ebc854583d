"""Plans with one mistake in their fused launches or loose values. Importing this adds its classes to MUTATIONS."""

from __future__ import annotations

import random
from dataclasses import replace

from dynaflow.ir import WHOLE, Flow, Launch, Part, Plan, Step
from dynaflow.memory import place
from dynaflow.testing.mutate import MUTATIONS, _at, _changed, _choose, _mutation, _step, _with, _without

__all__ = ["MUTATIONS"]


def _fused(plan: Plan) -> list[int]:
    return [i for i in _at(plan, Launch) if _step(plan, i).is_group and not _step(plan, i).replace]


def _alone(plan: Plan, stream: str) -> list[int]:
    return [i for i in _at(plan, Launch) if _step(plan, i).stream == stream and not _step(plan, i).replace]


def _some_stream(rng: random.Random, plan: Plan) -> str:
    return rng.choice([_step(plan, i).stream for i in _at(plan, Launch)])


def _merged(rng: random.Random, plan: Plan, flow: Flow, a: int, b: int) -> Plan:
    """One fused launch in the place of two, at the first one's place or at the second one's; mostly with slots made for it."""
    calls = _step(plan, a).calls + _step(plan, b).calls
    kept, gone = (a, b) if rng.random() < 0.7 else (b, a)
    mutant = _without(_changed(plan, kept, calls=calls), gone)
    return place(flow, mutant, frozenset(plan.loose)) if rng.random() < 0.7 else mutant


# ---------------------------------------------------------------------------- fused launches


@_mutation
def _swap_calls_inside_a_fused_launch(rng: random.Random, plan: Plan, flow: Flow) -> Plan | None:
    at = _choose(rng, _fused(plan))
    if at is None:
        return None
    calls = list(_step(plan, at).calls)
    k = rng.randrange(len(calls) - 1)
    calls[k], calls[k + 1] = calls[k + 1], calls[k]
    return _changed(plan, at, calls=tuple(calls))


@_mutation
def _reverse_a_fused_launch(rng: random.Random, plan: Plan, flow: Flow) -> Plan | None:
    at = _choose(rng, _fused(plan))
    return None if at is None else _changed(plan, at, calls=_step(plan, at).calls[::-1])


@_mutation
def _drop_call_of_a_fused_launch(rng: random.Random, plan: Plan, flow: Flow) -> Plan | None:
    at = _choose(rng, _fused(plan))
    if at is None:
        return None
    calls = _step(plan, at).calls
    k = rng.randrange(len(calls))
    return _changed(plan, at, calls=calls[:k] + calls[k + 1 :])


@_mutation
def _call_moved_to_another_launch(rng: random.Random, plan: Plan, flow: Flow) -> Plan | None:
    """Out of a fused launch, into another one or behind a launch of one op."""
    at = _choose(rng, _fused(plan))
    others = [i for i in _at(plan, Launch) if i != at and not _step(plan, i).replace]
    if at is None or not others:
        return None
    other, calls = rng.choice(others), _step(plan, at).calls
    k = rng.randrange(len(calls))
    mutant = _changed(plan, at, calls=calls[:k] + calls[k + 1 :])
    mutant = _changed(mutant, other, calls=(*_step(plan, other).calls, calls[k]))
    return place(flow, mutant, frozenset(plan.loose)) if rng.random() < 0.5 else mutant


@_mutation
def _part_of_one_fused_call(rng: random.Random, plan: Plan, flow: Flow) -> Plan | None:
    at = _choose(rng, _fused(plan))
    if at is None:
        return None
    calls = _step(plan, at).calls
    k = rng.randrange(len(calls))
    name, part = calls[k]
    others = [p for p in (*plan.parts, WHOLE, Part(0, 1, 2)) if p != part]
    return _changed(plan, at, calls=(*calls[:k], (name, rng.choice(others)), *calls[k + 1 :]))


@_mutation
def _unfuse_without_slots(rng: random.Random, plan: Plan, flow: Flow) -> Plan | None:
    """Two launches in the place of a fused one: what was internal has no memory."""
    at = _choose(rng, _fused(plan))
    if at is None:
        return None
    launch = _step(plan, at)
    k = rng.randrange(1, len(launch.calls))
    steps: list[Step] = list(plan.steps)
    steps[at : at + 1] = [replace(launch, calls=launch.calls[:k]), replace(launch, calls=launch.calls[k:])]
    return _with(plan, steps)


@_mutation
def _fuse_across_a_record_or_a_wait(rng: random.Random, plan: Plan, flow: Flow) -> Plan | None:
    """Neighbours on their stream, over one part, whatever stands between them: valid where nobody minds the later record."""
    mine = _alone(plan, _some_stream(rng, plan))
    pairs = [(a, b) for a, b in zip(mine, mine[1:]) if _part(plan, a) == _part(plan, b)]
    return _merged(rng, plan, flow, *rng.choice(pairs)) if pairs else None


@_mutation
def _fuse_distant_launches(rng: random.Random, plan: Plan, flow: Flow) -> Plan | None:
    mine = _alone(plan, _some_stream(rng, plan))
    pairs = [(a, b) for i, a in enumerate(mine) for b in mine[i + 2 :] if _part(plan, a) == _part(plan, b)]
    return _merged(rng, plan, flow, *rng.choice(pairs)) if pairs else None


@_mutation
def _fuse_different_parts(rng: random.Random, plan: Plan, flow: Flow) -> Plan | None:
    mine = _alone(plan, _some_stream(rng, plan))
    pairs = [(a, b) for a, b in zip(mine, mine[1:]) if _part(plan, a) != _part(plan, b)]
    return _merged(rng, plan, flow, *rng.choice(pairs)) if pairs else None


@_mutation
def _fuse_across_streams(rng: random.Random, plan: Plan, flow: Flow) -> Plan | None:
    launches = [i for i in _at(plan, Launch) if not _step(plan, i).replace]
    pairs = [(a, b) for a, b in zip(launches, launches[1:]) if _step(plan, a).stream != _step(plan, b).stream]
    return _merged(rng, plan, flow, *rng.choice(pairs)) if pairs else None


def _part(plan: Plan, at: int) -> Part:
    return _step(plan, at).calls[0][1]


# ---------------------------------------------------------------------------- loose values


@_mutation
def _placed_value_made_loose(rng: random.Random, plan: Plan, flow: Flow) -> Plan | None:
    """Valid where one launch wrote what each of its readers reads."""
    if not plan.slots:
        return None
    k = rng.randrange(len(plan.slots))
    return replace(plan, slots=plan.slots[:k] + plan.slots[k + 1 :], loose=(*plan.loose, plan.slots[k][0]))


@_mutation
def _loose_value_not_listed(rng: random.Random, plan: Plan, flow: Flow) -> Plan | None:
    return replace(plan, loose=_less_one(rng, plan)[0]) if plan.loose else None


@_mutation
def _loose_value_given_a_slot(rng: random.Random, plan: Plan, flow: Flow) -> Plan | None:
    """The slot of another value, mostly."""
    if not plan.loose or not plan.slots:
        return None
    rest, value = _less_one(rng, plan)
    slot = rng.choice([*(slot for _, slot in plan.slots), max(slot for _, slot in plan.slots) + 1])
    slots = tuple(sorted((*plan.slots, (value, slot)), key=lambda item: item[1]))
    return replace(plan, slots=slots, loose=plan.loose if rng.random() < 0.2 else rest)


@_mutation
def _any_value_listed_as_loose(rng: random.Random, plan: Plan, flow: Flow) -> Plan | None:
    """Inputs, outputs, values with a slot, internal ones: the list says what is not so."""
    return replace(plan, loose=(*plan.loose, rng.choice(flow.values).name))


def _less_one(rng: random.Random, plan: Plan) -> tuple[tuple[str, ...], str]:
    k = rng.randrange(len(plan.loose))
    return plan.loose[:k] + plan.loose[k + 1 :], plan.loose[k]
