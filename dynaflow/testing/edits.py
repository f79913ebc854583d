"""Other edits of a plan: of the bytes that it was bound to, and those that change nothing.

    name, memory = mutate_memory(memory, rng)       mostly wrong
    plan = harmless_edit(plan, rng)                 still right
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from dynaflow.ir import CALLER, START, Launch, Plan, Record, Wait
from dynaflow.memory import ALIGNMENT, Memory

# ---------------------------------------------------------------------------- bytes of a bound plan

MEMORY_MUTATIONS = ("buffer moved", "buffer moved into another", "buffer outside the arena", "arena too small")


def mutate_memory(memory: Memory, rng: random.Random) -> tuple[str, Memory]:
    """Another offset for one value, or a smaller arena. Needs at least one value."""
    name = rng.choice(MEMORY_MUTATIONS)
    value, other = rng.choice(list(memory.offsets)), rng.choice(list(memory.offsets))
    nbytes = memory.offsets[value][1]
    room = max(0, memory.arena_bytes - nbytes) // 8 * 8
    if name == "arena too small":
        return name, Memory(memory.offsets, max(8, (memory.arena_bytes - ALIGNMENT * rng.randint(1, 2)) // 8 * 8))
    if name == "buffer moved":
        new = rng.randint(0, room // 8) * 8
    elif name == "buffer moved into another":
        # The start addresses differ, by a few numbers: only the intervals show it.
        new = max(0, min(room, memory.offsets[other][0] + 8 * rng.choice((-3, -2, -1, 1, 2, 3))))
    else:
        new = memory.arena_bytes - rng.randint(0, max(0, nbytes // 8 - 1)) * 8
    return name, Memory({**memory.offsets, value: (new, nbytes)}, memory.arena_bytes)


# ---------------------------------------------------------------------------- edits that change nothing


def harmless_edit(plan: Plan, rng: random.Random) -> Plan:
    """The same schedule written differently, or with more waits than it needs. Must stay accepted."""
    edit = rng.choice((_more_waits, _other_names, _streams_turned, _own_slots, _no_loose_values))
    return edit(plan, rng)


def _more_waits(plan: Plan, rng: random.Random) -> Plan:
    """A new record anywhere, and a wait for it anywhere behind it."""
    steps = list(plan.steps)
    streams = [CALLER, *(s.name for s in plan.streams)]
    for number in range(rng.randint(1, 4)):
        at = rng.randint(0, len(steps))
        steps.insert(at, Record(f"more{number}", rng.choice(streams)))
        steps.insert(rng.randint(at + 1, len(steps)), Wait(f"more{number}", rng.choice(streams)))
    return replace(plan, steps=tuple(steps))


def _other_names(plan: Plan, rng: random.Random) -> Plan:
    steps: list[Any] = list(plan.steps)
    return replace(plan, steps=tuple(s if type(s) is Launch or s.event == START else replace(s, event=f"renamed.{s.event}") for s in steps))


def _streams_turned(plan: Plan, rng: random.Random) -> Plan:
    return replace(plan, streams=plan.streams[::-1])


def _no_loose_values(plan: Plan, rng: random.Random) -> Plan:
    """What is loose may as well have a slot."""
    first = 1 + max((slot for _, slot in plan.slots), default=-1)
    chosen = [value for value in plan.loose if rng.random() < 0.7]
    slots = (*plan.slots, *((value, first + k) for k, value in enumerate(chosen)))
    return replace(plan, slots=slots, loose=tuple(value for value in plan.loose if value not in chosen))


def _own_slots(plan: Plan, rng: random.Random) -> Plan:
    return replace(plan, slots=tuple((value, k) for k, (value, _) in enumerate(plan.slots)))
