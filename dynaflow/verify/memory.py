"""Is every byte of a bound arena used by one value at a time?

Contract: of a plan that `verify` accepted. Intervals of bytes are compared, not start addresses.

1. Bounds: every value that has a slot has a buffer, of the size that its expression gives, inside the arena.
2. Where the slots do not overlap, nothing is left to show: `verify` proved for every size that values of one slot live one after
   the other. This is what `bind_memory` gives, and takes no time. Otherwise:
3. Lifetimes: what every access of a storage knows to be over (`born`), and its last access per stream (`last`).
4. In the order of first access, each buffer takes its bytes from those that hold them now. Each of those must be over:
   every access of it happens before every access of the new one. What they took their bytes from is over by then, too.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from typing import Any, NamedTuple

from dynaflow import errors
from dynaflow.ir import Flow, Launch, Plan, evaluate
from dynaflow.verify.structure import RECORD, index


class Life(NamedTuple):
    # per stream: the last step there that is over before any access; -1 for none
    born: list[int]
    # per stream: the step of the last access; -1 for none
    last: list[int]


def verify_memory(flow: Flow, plan: Plan, memory: Any, sizes: Mapping[str, int] | None = None) -> None:
    """`memory` has `offsets` (value -> (offset, bytes)) and `arena_bytes`; with `sizes`, the bytes are checked as well."""
    offsets, arena_bytes = memory.offsets, memory.arena_bytes
    slot_bytes: dict[int, tuple[int, int]] = {}
    # 1. bounds
    for name, slot in plan.slots:
        if name not in offsets:
            raise errors.MalformedPlan(f"'{name}' has a slot and no bytes.", fix="bind the memory again: bind_memory(flow, plan, sizes)")
        offset, nbytes = offsets[name]
        end = offset + nbytes
        if offset < 0 or nbytes < 0 or end > arena_bytes:
            raise errors.ArenaOverflow(
                f"'{name}' lies outside the arena.", region=f"bytes [{offset:#x}:{end:#x}] of an arena of {arena_bytes:#x}",
                fix="bind the memory again: bind_memory(flow, plan, sizes)")  # fmt: skip
        old = slot_bytes.get(slot)
        slot_bytes[slot] = (offset, end) if old is None else (min(offset, old[0]), max(end, old[1]))
    if len(offsets) > len(plan.slots):
        extra = next(name for name in offsets if name not in dict(plan.slots))
        raise errors.MalformedPlan(f"'{extra}' has bytes, and no slot in the plan.", fix="bind the memory again")
    if sizes is not None:
        _check_sizes(flow, plan, offsets, sizes)

    # 2. slots that do not touch each other: what happens inside one is proved for every size
    reach = 0
    for start, end in sorted(slot_bytes.values()):
        if start < reach and start < end:
            break
        reach = max(reach, end)
    else:
        return
    _sweep(flow, plan, offsets)


def _check_sizes(flow: Flow, plan: Plan, offsets: Mapping[str, tuple[int, int]], sizes: Mapping[str, int]) -> None:
    expected: dict[str, int] = {}
    for name, _ in plan.slots:
        expression = flow.value[name].nbytes
        need = expected.get(expression)
        if need is None:
            need = expected[expression] = evaluate(expression, sizes)
        if offsets[name][1] < need:
            raise errors.ArenaOverflow(
                f"'{name}' has {offsets[name][1]:,} bytes and needs {need:,}.", why=f"{expression} for {dict(sizes)}",
                fix="bind the memory for these sizes: bind_memory(flow, plan, sizes)")  # fmt: skip


def _sweep(flow: Flow, plan: Plan, offsets: Mapping[str, tuple[int, int]]) -> None:
    """4. who holds which bytes: `marks` are rising offsets, `holders[i]` has the bytes from marks[i] to marks[i + 1]"""
    buffers: dict[str, tuple[int, int]] = {}
    for name, (offset, nbytes) in offsets.items():
        storage = flow.value[name].storage
        start, end = buffers.get(storage, (offset, offset + nbytes))
        buffers[storage] = (min(start, offset), max(end, offset + nbytes))
    lives = lifetimes(plan, flow)
    marks: list[int] = [0]
    holders: list[str | None] = [None]
    for storage, life in lives.items():
        start, end = buffers[storage]
        if start == end:
            continue
        i = bisect_right(marks, start) - 1
        j = i
        while j < len(marks) and marks[j] < end:
            holder = holders[j]
            if holder is not None:
                for known, needed in zip(life.born, lives[holder].last):
                    if known < needed:
                        raise _overlap(plan, flow, holder, storage, buffers)
            j += 1
        # Keep what lies before the new buffer in interval i, and what lies behind it in interval j - 1.
        head = [(marks[i], holders[i])] if marks[i] < start else []
        tail = [(end, holders[j - 1])] if j == len(marks) or marks[j] > end else []
        fresh = [*head, (start, storage), *tail]
        marks[i:j] = [mark for mark, _ in fresh]
        holders[i:j] = [holder for _, holder in fresh]


def lifetimes(plan: Plan, flow: Flow) -> dict[str, Life]:
    """3. Per storage that has bytes in the arena, in the order of first access in host order. Times are step numbers. Accesses of a
    piece are its home's."""
    indexed = index(plan, flow)
    placed = {flow.value[name].storage for name, _ in plan.slots}
    homes = [flow.storages[home] for home in flow.home_storage]
    names = [name if name in placed else None for name in homes]
    num_streams = len(indexed.streams)
    clocks = [[-1] * num_streams for _ in range(num_streams)]
    events: list[list[int]] = []
    lives: dict[str, Life] = {}
    steps = iter(indexed.steps)
    for at, step in enumerate(plan.steps):
        if type(step) is not Launch:
            s, kind, event = next(steps)
            if kind == RECORD:
                events.append(clocks[s][:])
            else:
                clocks[s] = [max(a, b) for a, b in zip(clocks[s], events[event])]
            continue
        before = []
        touched = []
        for _ in step.calls:
            s, op, _ = next(steps)
            before = clocks[s]
            touched += [names[a.storage] for a in flow.accesses[op]]
        for name in touched:
            if name is None:
                continue
            life = lives.get(name)
            if life is None:
                life = lives[name] = Life(before[:], [-1] * num_streams)
            else:
                for u, known in enumerate(before):
                    if known < life.born[u]:
                        life.born[u] = known
            life.last[s] = at
        before[s] = at
    return lives


def _overlap(plan: Plan, flow: Flow, old: str, new: str, buffers: dict[str, tuple[int, int]]) -> errors.LiveOverlap:
    start, end = max(buffers[old][0], buffers[new][0]), min(buffers[old][1], buffers[new][1])
    users = {name: [x for x in plan.launches if any(_touches(flow, op, name) for op, _ in x.calls)] for name in (old, new)}
    first, last = users[new][0], users[old][-1]
    return errors.LiveOverlap(
        f"'{new}' lies on bytes of '{old}', which is still alive.", where=first.where, region=f"arena[{start:#x}:{end:#x}]",
        why=f"'{last.label}' on {last.stream} uses '{old}', and nothing orders it before '{first.label}' on {first.stream}",
        fix="bind the memory again: bind_memory(flow, plan, sizes)")  # fmt: skip


def _touches(flow: Flow, op: str, storage: str) -> bool:
    return any(flow.storages[flow.home_storage[a.storage]] == storage for a in flow.accesses[flow.index[op]])
