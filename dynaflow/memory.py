"""Plan -> the same plan with a slot for every value that lives in the arena.

Contract: two values share a slot only if every access of the one happens before every access of the other, in the order that
streams and waits already give. So reuse never adds a wait, and it is right for every size: a slot is as large as its largest
value, and slots never overlap. Parts of one value are adjacent rows of its one buffer.

1. Per value: where it is born (the clocks of its writers) and its last access per stream.
2. In order of birth, give each value a slot whose last value is dead by then: one of the same size first, then the smallest
   larger one, then the largest smaller one (which grows), else a new one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Mapping

from dynaflow.ir import Flow, Launch, Part, Plan, covers, evaluate
from dynaflow.sync import clocks

ALIGNMENT = 512  # bytes; what CUDA's own allocator gives

# Stand-ins for sizes while placing: structure must not depend on the sizes of the first call.
_NOMINAL_BATCH, _NOMINAL_SIZE = 64, 128


def place(flow: Flow, plan: Plan) -> Plan:
    stream_index, table = clocks(plan)
    num_streams = len(stream_index)
    nominal = {s: _NOMINAL_BATCH if s in flow.batch else _NOMINAL_SIZE for s in flow.symbols}
    temps, op_index, hidden = flow.temps, flow.index, internal_values(flow, plan)

    # 1. lifetimes
    born: dict[str, list[int]] = {}
    last: dict[str, list[int]] = {}
    for launch, (s, position, before) in zip(plan.launches, table):
        for name, _ in launch.calls:
            made, touched = temps[op_index[name]]
            for value in made:
                if value in born:
                    born[value] = [a if a < b else b for a, b in zip(born[value], before)]
                elif value not in hidden:
                    born[value] = before
                    last[value] = [0] * num_streams
                else:
                    continue
                last[value][s] = position + 1
            for value in touched:
                if value in last:
                    last[value][s] = position + 1

    # 2. slots; `free[size]` holds (slot, last access per stream) of the value that has it now
    slot_of: dict[str, int] = {}
    free: dict[int, list[tuple[int, list[int]]]] = {}
    size_cache: dict[str, int] = {}
    num_slots = 0
    for value, birth in born.items():
        expression = flow.value[value].nbytes
        size = size_cache.get(expression)
        if size is None:
            size = size_cache[expression] = evaluate(expression, nominal)
        found = _take(free, size, birth)
        if found is None and len(free) > 1:
            others = sorted((s for s in free if s > size), key=lambda s: s) + sorted((s for s in free if s < size), reverse=True)
            for other in others:
                found = _take(free, other, birth)
                if found is not None:
                    size = max(size, other)
                    break
        if found is None:
            found, num_slots = num_slots, num_slots + 1
        slot_of[value] = found
        free.setdefault(size, []).append((found, last[value]))
    slots = sorted(slot_of.items(), key=lambda item: item[1])
    return replace(plan, slots=tuple(slots))


def _take(free: dict[int, list[tuple[int, list[int]]]], size: int, birth: list[int]) -> int | None:
    candidates = free.get(size)
    if candidates:
        for i, (slot, end) in enumerate(candidates):
            for known, needed in zip(birth, end):
                if known < needed:
                    break
            else:
                del candidates[i]
                return slot
    return None


def internal_values(flow: Flow, plan: Plan) -> set[str]:
    """Values that live and die inside one replacement: no memory is planned for them.

    A value is internal when every launch that touches it is a replacement that holds both its writer and all its readers.
    """
    if not any(launch.replace for launch in plan.launches):
        return set()
    touched_by: dict[str, set[int]] = {}
    for number, launch in enumerate(plan.launches):
        for name, _ in launch.calls:
            op = flow.op(name)
            for value in (*op.reads, *op.writes, *op.mutates):
                touched_by.setdefault(value, set()).add(number)
    launches = plan.launches
    made = {v for op in flow.ops for v in op.writes if flow.value[v].role == "temp"}
    internal = set()
    for value in made:
        numbers = touched_by.get(value, set())
        if numbers and all(launches[n].replace and _is_closed(flow, launches[n], value) for n in numbers):
            internal.add(value)
    return internal


def _is_closed(flow: Flow, launch: Launch, value: str) -> bool:
    """Whether a replacement makes every row of `value` that it reads."""
    makes: list[Part] = []
    for name, part in launch.calls:
        op = flow.op(name)
        if (value in op.reads or value in op.mutates) and not (makes if flow.value[value].axis is None else covers(makes, part)):
            return False
        if value in op.writes:
            makes.append(part)
    return bool(makes)


@dataclass(frozen=True, slots=True)
class Memory:
    """A plan's arena for given sizes: value -> (offset, bytes)."""

    offsets: Mapping[str, tuple[int, int]]
    arena_bytes: int


def bind_memory(flow: Flow, plan: Plan, sizes: Mapping[str, int]) -> Memory:
    """Slots one behind the other, each as large as its largest value."""
    cache: dict[str, int] = {}
    value_of, nbytes_of = flow.value, {}
    slot_bytes: dict[int, int] = {}
    for value, slot in plan.slots:
        expression = value_of[value].nbytes
        nbytes = cache.get(expression)
        if nbytes is None:
            nbytes = cache[expression] = evaluate(expression, sizes)
        nbytes_of[value] = nbytes
        if nbytes > slot_bytes.get(slot, -1):
            slot_bytes[slot] = nbytes
    offset_of, end = {}, 0
    for slot, nbytes in slot_bytes.items():
        offset_of[slot] = end
        end += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return Memory({value: (offset_of[slot], nbytes_of[value]) for value, slot in plan.slots}, end)


def drop_points(flow: Flow, plan: Plan) -> tuple[tuple[tuple[str, Part], ...], ...]:
    return ((),) * (len(plan.launches) + 1)
