"""Plan -> the same plan with a slot for every value that lives in the arena.

Contract: two values share a slot only if every access of the one happens before every access of the other, in the order that
streams and waits already give. So reuse never adds a wait, and it is right for every size: a slot is as large as its largest
value, and slots never overlap. Parts of one value are adjacent rows of its one buffer. A home has the slot of all its pieces: whoever
touches a piece touches it.

1. Per value: where it is born (the clocks of its writers) and its last access per stream.
2. In order of birth, give each value a slot whose last value is dead by then: one of the same size first, then the smallest
   larger one, then the largest smaller one (which grows), else a new one.

Where sizes are numbers once and for all, as those of kernels are, `pack` makes better use of bytes than slots do.

Two kinds of values have no slot: internal ones, which never leave their launch, and loose ones, which stay in the memory in which
their op returned them (`can_be_loose`); when that memory may be given back is `drop_points`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Mapping, Sequence

from dynaflow.ir import WHOLE, Flow, Launch, Part, Plan, check_kinds, covers, evaluate, overlap
from dynaflow.sync import clocks

ALIGNMENT = 512  # bytes; what CUDA's own allocator gives


def place(flow: Flow, plan: Plan, loose: frozenset[str] = frozenset()) -> Plan:
    """The plan with slots: values that are never alive at the same time share memory. Slots that it had are made anew.

    `loose`: values that their op allocates; those that may be loose get no slot, the others are as all.
    """
    check_kinds("df.place(flow, plan)", flow, plan)
    nominal = flow.nominal_sizes
    loose = loose & can_be_loose(flow, plan) if loose else loose

    # 1. lifetimes
    stream_index, table = clocks(plan)
    born, last = _lifetimes(flow, plan, len(stream_index), table)

    # 2. slots; `free[size]` holds (slot, last access per stream) of the value that has it now
    slot_of: dict[str, int] = {}
    free: dict[int, list[tuple[int, list[int]]]] = {}
    size_cache: dict[str, int] = {}
    num_slots = 0
    for value, birth in born.items():
        if value in loose:
            continue
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
    return replace(plan, slots=tuple(slots), loose=tuple(value for value in born if value in loose))


def _lifetimes(
    flow: Flow, plan: Plan, num_streams: int, table: Sequence[tuple[int, int, list[int]]]
) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Of values that leave their launch, in the order of their first write: what every writer knows to be over, and the position behind
    the last access, per stream."""
    temps, op_index, hidden = flow.temps, flow.index, internal_values(flow, plan)
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
    return born, last


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
    """Values that live and die inside one launch, fused or a replacement: no memory is planned for them.

    A value is internal when every launch that touches it is a group that holds both its writer and all its readers. A home is none:
    its pieces are written where they lie.
    """
    launches = plan.launches
    if not any(launch.is_group for launch in launches):
        return set()
    touched_by: dict[str, set[int]] = {}
    for number, launch in enumerate(launches):
        for name, _ in launch.calls:
            op = flow.op(name)
            for value in (*op.reads, *op.writes, *op.mutates):
                touched_by.setdefault(value, set()).add(number)
    made = {v for op in flow.ops for v in op.writes if flow.value[v].role == "temp" and v not in flow.pieces}
    internal = set()
    for value in made:
        numbers = touched_by.get(value, set())
        if numbers and all(launches[n].is_group and _is_closed(flow, launches[n], value) for n in numbers):
            internal.add(value)
    return internal


def _is_closed(flow: Flow, launch: Launch, value: str) -> bool:
    """Whether a group makes every row of `value` that it reads."""
    makes: list[Part] = []
    for name, part in launch.calls:
        op = flow.op(name)
        if (value in op.reads or value in op.mutates) and not (makes if flow.value[value].axis is None else covers(makes, part)):
            return False
        if value in op.writes:
            makes.append(part)
    return bool(makes)


# ---------------------------------------------------------------------------- loose values


def can_be_loose(flow: Flow, plan: Plan) -> frozenset[str]:
    """Values that need no slot if their op allocates them: every read finds its rows in what one launch wrote.

    Temporaries with a storage of their own and no pieces that leave their launch. A value without rows has one writer, and may be
    changed in place; one with rows may not. What a replacement makes is not among them: a user's function may return memory that is
    not its own.
    """
    num_views = Counter(v.storage for v in flow.values)
    barred = internal_values(flow, plan) | {v for op in flow.ops for v in op.mutates if flow.value[v].axis is not None}
    found = {
        v.name for v in flow.values
        if v.role == "temp" and num_views[v.storage] == 1 and v.name not in barred and v.name not in flow.pieces
    }  # fmt: skip
    written: dict[str, list[Part]] = {}
    launches = plan.launches
    for launch in launches:
        for name, part in launch.calls:
            for value in flow.op(name).writes:
                written.setdefault(value, []).append(part)
                if launch.replace or (flow.value[value].axis is None and len(written[value]) > 1):
                    found.discard(value)
    for launch in launches:
        for name, part in launch.calls:
            for value in flow.op(name).reads:
                if value in found and flow.value[value].axis is not None and not any(covers((w,), part) for w in written.get(value, ())):
                    found.discard(value)
    return frozenset(found & written.keys())


def loose_values(flow: Flow, plan: Plan) -> frozenset[str]:
    """Temporaries that have no slot and leave their launch: in a plan that verifies, those that it lists as loose."""
    placed = {value for value, _ in plan.slots} | internal_values(flow, plan)
    return frozenset(v.name for v in flow.values if v.role == "temp" and v.name not in placed)


def drop_points(flow: Flow, plan: Plan) -> tuple[tuple[tuple[str, Part], ...], ...]:
    """Per launch in host order, and once more for the end: the loose tensors, as (value, part that was written), that the host may
    drop right before it issues that launch.

    Contract: a tensor lies in memory of its writer's stream W. The allocator is ordered by streams: from the moment at which the
    host drops the tensor, its memory may go to any later launch on W, and to no other stream's. So at a drop every access is issued,
    and every access happens before whatever is launched on W from then on. Nothing needs `record_stream`.

    1. Accesses: the launch that wrote the tensor, and all that read rows of it or change it in place.
    2. All of them on W: the stream itself orders them. It is dropped right behind the last one.
    3. Otherwise right before the first launch on W behind the last access, in host order, that is known to come after all of them.
    4. Where there is none: at the end, when the caller's stream, and with it whatever is launched next, comes after all streams.
    """
    stream_of, position_of, before = zip(*table) if (table := clocks(plan)[1]) else ((), (), ())
    # 1. value -> its tensors, as (rows, accesses: the writer first)
    tensors: dict[str, list[tuple[Part, list[int]]]] = {value: [] for value in plan.loose}
    launches = plan.launches
    for is_write in (True, False):
        for number, launch in enumerate(launches):
            for name, part in launch.calls:
                op = flow.op(name)
                for value in op.writes if is_write else (*op.reads, *op.mutates):
                    if value not in tensors:
                        continue
                    rows = part if flow.value[value].axis is not None else WHOLE
                    if is_write:
                        tensors[value].append((rows, [number]))
                    else:
                        for written, numbers in tensors[value]:
                            if overlap(written, rows):
                                numbers.append(number)

    points: list[list[tuple[str, Part]]] = [[] for _ in range(len(launches) + 1)]
    for value, written, numbers in ((value, *tensor) for value, made in tensors.items() for tensor in made):
        w, at = stream_of[numbers[0]], max(numbers) + 1
        # 2. and 3.
        if any(stream_of[n] != w for n in numbers):
            while at < len(launches) and not (
                stream_of[at] == w and all(before[at][stream_of[n]] > position_of[n] for n in numbers)
            ):  # fmt: skip
                at += 1
        points[at].append((value, written))
    return tuple(tuple(dropped) for dropped in points)


# ---------------------------------------------------------------------------- sizes


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


def pack(flow: Flow, plan: Plan, sizes: Mapping[str, int]) -> Memory:
    """Like `bind_memory`, for these sizes alone: any bytes of a value that is over may be another's, not slots as a whole.

    The largest value first, each at the lowest offset at which it lies on nobody who may be alive beside it. Such a memory has to be
    verified for its sizes (`verify_memory`). Where it takes no less than the slots do, slots it is.
    """
    in_slots = bind_memory(flow, plan, sizes)
    nbytes = {value: -(-size // ALIGNMENT) * ALIGNMENT for value, (_, size) in in_slots.offsets.items()}
    beside = _beside(flow, plan, nbytes)
    offsets: dict[str, int] = {}
    for value in sorted(nbytes, key=lambda v: -nbytes[v]):
        at = 0
        for start, end in sorted((offsets[other], offsets[other] + nbytes[other]) for other in beside[value] if other in offsets):
            if at + nbytes[value] <= start:
                break
            at = max(at, end)
        offsets[value] = at
    end = max((at + nbytes[value] for value, at in offsets.items()), default=0)
    if end >= in_slots.arena_bytes:
        return in_slots
    return Memory({value: (offsets[value], size) for value, (_, size) in in_slots.offsets.items()}, end)


def _beside(flow: Flow, plan: Plan, values: Mapping[str, int]) -> dict[str, list[str]]:
    """Value -> others that may be alive while it is: nothing orders all accesses of the one before all of the other."""
    stream_index, table = clocks(plan)
    born, last = _lifetimes(flow, plan, len(stream_index), table)
    # what every launch from there on knows to be over
    known = [[len(table)] * len(stream_index)]
    for _, _, before in reversed(table):
        known.append([a if a < b else b for a, b in zip(known[-1], before)])
    known.reverse()
    temps, op_index, first = flow.temps, flow.index, dict[str, int]()
    for number, launch in enumerate(plan.launches):
        for op, _ in launch.calls:
            for value in temps[op_index[op]][0]:
                first.setdefault(value, number)
    found: dict[str, list[str]] = {value: [] for value in values}
    alive: list[str] = []
    for value, birth in born.items():
        if value not in found:
            continue
        over = known[first[value]]
        alive = [other for other in alive if any(a < b for a, b in zip(over, last[other]))]
        for other in alive:
            if any(a < b for a, b in zip(birth, last[other])):
                found[value].append(other)
                found[other].append(value)
        alive.append(value)
    return found
