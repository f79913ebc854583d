"""Is every byte of a bound arena used by one value at a time?

Contract: of a plan that `verify` accepted. Intervals of bytes are compared, not start addresses.

1. Bounds: every value that has a slot has a buffer, of the size that its expression gives, inside the arena.
2. Lifetimes, once per plan: what every access of a storage knows to be over (`born`), and its last access per stream (`last`).
3. In the order of first access, each buffer takes its bytes from those that hold them now. Each of those must be over:
   every access of it happens before every access of the new one. What they took their bytes from is over by then, too.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from typing import Any, NamedTuple

from dynaflow import errors
from dynaflow.ir import Flow, Launch, Plan, evaluate
from dynaflow.verify.structure import RECORD, index, remember


class Life(NamedTuple):
    # per stream: the last step there that is over before any access; -1 for none
    born: list[int]
    # per stream: the step of the last access; -1 for none
    last: list[int]


def verify_memory(flow: Flow, plan: Plan, memory: Any, sizes: Mapping[str, int] | None = None) -> None:
    """`memory` has `offsets` (value -> (offset, bytes)) and `arena_bytes`; with `sizes`, the bytes are checked as well."""
    # 1. bounds
    offsets, arena_bytes = memory.offsets, memory.arena_bytes
    expected: dict[str, int] = {}
    for name, _ in plan.slots:
        if name not in offsets:
            raise errors.MalformedPlan(f"'{name}' has a slot and no bytes.", fix="bind the memory again: bind_memory(flow, plan, sizes)")
    buffers: dict[str, tuple[int, int]] = {}
    for name, (offset, nbytes) in offsets.items():
        value = flow.value.get(name)
        if value is None:
            raise errors.MalformedPlan(f"'{name}' has bytes, and is no value of the flow.", fix="bind the memory again")
        if sizes is not None:
            need = expected.get(value.nbytes)
            if need is None:
                need = expected[value.nbytes] = evaluate(value.nbytes, sizes)
            if nbytes < need:
                raise errors.ArenaOverflow(
                    f"'{name}' has {nbytes:,} bytes and needs {need:,}.", why=f"{value.nbytes} for {dict(sizes)}",
                    fix="bind the memory for these sizes: bind_memory(flow, plan, sizes)")  # fmt: skip
        if offset < 0 or nbytes < 0 or offset + nbytes > arena_bytes:
            raise errors.ArenaOverflow(
                f"'{name}' lies outside the arena.", region=f"bytes [{offset:#x}:{offset + nbytes:#x}] of an arena of {arena_bytes:#x}",
                fix="bind the memory again: bind_memory(flow, plan, sizes)")  # fmt: skip
        start, end = buffers.get(value.storage, (offset, offset + nbytes))
        buffers[value.storage] = (min(start, offset), max(end, offset + nbytes))

    # 3. who holds which bytes: `marks` are rising offsets, `holders[i]` has the bytes from marks[i] to marks[i + 1]
    lives = remember(plan, "_verify_lives", lambda plan: lifetimes(plan, flow))
    marks: list[int] = [0]
    holders: list[str | None] = [None]
    for storage, life in lives.items():
        if storage not in buffers:
            continue
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
        head_marks, head_holders = ([marks[i]], [holders[i]]) if marks[i] < start else ([], [])
        tail_end = marks[j] if j < len(marks) else None
        tail_marks, tail_holders = ([end], [holders[j - 1]]) if tail_end is None or tail_end > end else ([], [])
        marks[i:j] = [*head_marks, start, *tail_marks]
        holders[i:j] = [*head_holders, storage, *tail_holders]


def lifetimes(plan: Plan, flow: Flow) -> dict[str, Life]:
    """Per storage that lives in the arena, in the order of first access in host order. Times are step numbers."""
    indexed = index(plan, flow)
    placed = {flow.value[name].storage for name, _ in plan.slots}
    names = [name if name in placed else None for name in flow.storages]
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
    return any(flow.storages[a.storage] == storage for a in flow.accesses[flow.index[op]])
