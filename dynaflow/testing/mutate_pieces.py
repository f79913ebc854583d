"""Plans with one mistake that has to do with pieces. Importing this adds its classes to MUTATIONS."""

from __future__ import annotations

import random
from dataclasses import replace

from dynaflow.ir import Flow, Launch, Plan, Record, Wait
from dynaflow.testing.mutate import MUTATIONS, _at, _changed, _choose, _moved, _mutation, _step, _streams, _without

__all__ = ["MUTATIONS"]


def _homes(plan: Plan, flow: Flow) -> list[int]:
    """Places in `plan.slots` of the values that have pieces."""
    return [k for k, (value, _) in enumerate(plan.slots) if value in flow.pieces]


def _touches_home(plan: Plan, flow: Flow, at: int, *, makes: bool = False) -> bool:
    ops = [flow.op(name) for name, _ in _step(plan, at).calls]
    touched = [v for op in ops for v in (op.writes if makes else (*op.reads, *op.mutates, *op.writes))]
    return any(flow.home(v) in flow.pieces for v in touched)


@_mutation
def _drop_wait_behind_a_piece(rng: random.Random, plan: Plan, flow: Flow) -> Plan | None:
    """A wait for an event that is recorded right behind who makes a piece, or a whole home."""
    records = {
        _step(plan, i).event for launch in _at(plan, Launch) if _touches_home(plan, flow, launch, makes=True)
        for i in _at(plan, Record) if i > launch and _step(plan, i).stream == _step(plan, launch).stream
    }  # fmt: skip
    at = _choose(rng, [i for i in _at(plan, Wait) if _step(plan, i).event in records])
    return None if at is None else _without(plan, at)


@_mutation
def _drop_wait_before_a_piece(rng: random.Random, plan: Plan, flow: Flow) -> Plan | None:
    """A wait right before who touches a piece, or a whole home."""
    touching = [i for i in _at(plan, Launch) if _touches_home(plan, flow, i)]
    at = _choose(rng, [i - 1 for i in touching if i and type(plan.steps[i - 1]) is Wait])
    return None if at is None else _without(plan, at)


@_mutation
def _piece_on_another_stream(rng: random.Random, plan: Plan, flow: Flow) -> Plan | None:
    at = _choose(rng, [i for i in _at(plan, Launch) if _touches_home(plan, flow, i)])
    return None if at is None else _changed(plan, at, stream=rng.choice(_streams(plan)))


@_mutation
def _piece_earlier_or_later(rng: random.Random, plan: Plan, flow: Flow) -> Plan | None:
    at = _choose(rng, [i for i in _at(plan, Launch) if _touches_home(plan, flow, i)])
    return None if at is None else _moved(plan, at, min(len(plan.steps) - 1, max(0, at + rng.randint(-8, 8))))


@_mutation
def _value_in_the_slot_of_a_home(rng: random.Random, plan: Plan, flow: Flow) -> Plan | None:
    """Valid where every piece is dead by then, or none is made yet."""
    home = _choose(rng, _homes(plan, flow))
    others = [k for k, (_, slot) in enumerate(plan.slots) if home is not None and slot != plan.slots[home][1]]
    if home is None or not others:
        return None
    k = rng.choice(others)
    slots = [*plan.slots[:k], *plan.slots[k + 1 :], (plan.slots[k][0], plan.slots[home][1])]
    return replace(plan, slots=tuple(sorted(slots, key=lambda item: item[1])))


@_mutation
def _home_in_the_slot_of_another(rng: random.Random, plan: Plan, flow: Flow) -> Plan | None:
    k = _choose(rng, _homes(plan, flow))
    others = sorted({slot for _, slot in plan.slots if k is not None and slot != plan.slots[k][1]})
    if k is None or not others:
        return None
    return replace(plan, slots=(*plan.slots[:k], (plan.slots[k][0], rng.choice(others)), *plan.slots[k + 1 :]))


@_mutation
def _home_without_slot(rng: random.Random, plan: Plan, flow: Flow) -> Plan | None:
    """Not at all, or loose."""
    k = _choose(rng, _homes(plan, flow))
    if k is None:
        return None
    loose = (*plan.loose, plan.slots[k][0]) if rng.random() < 0.5 else plan.loose
    return replace(plan, slots=plan.slots[:k] + plan.slots[k + 1 :], loose=loose)


@_mutation
def _piece_given_a_slot(rng: random.Random, plan: Plan, flow: Flow) -> Plan | None:
    """That of its home, or any; or it is listed as loose."""
    pieces = [piece for found in flow.pieces.values() for piece in found]
    if not pieces or not plan.slots:
        return None
    piece = rng.choice(pieces)
    if rng.random() < 0.3:
        return replace(plan, loose=(*plan.loose, piece))
    slot = rng.choice([dict(plan.slots).get(flow.home(piece), 0), *(slot for _, slot in plan.slots)])
    return replace(plan, slots=tuple(sorted((*plan.slots, (piece, slot)), key=lambda item: item[1])))
