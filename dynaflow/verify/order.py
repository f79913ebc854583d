"""Are all accesses to the same memory ordered by streams and waits, and as the program has them?

Contract: a plan that passes gives the same result under every interleaving that its streams and waits allow, for every size.

Every call has a time (its number in host order, from 1; the calls of one launch follow each other). A clock is a list: per stream,
the time of the last call there that is known to be over. Time 0 is the caller's own work before the plan, on the caller's stream.

1. Launch: the stream must know time 0 (it started after the caller). Then, per storage that the op touches:
2.   read: after the last write of those rows, which an earlier op (in program order) must have made;
3.   write: the same, and after all reads since that write;
4.   slot: a write of a value that shares its slot is after every access of the slot's previous value, which is dead from then on;
     a home has the slot of its pieces: they live and die together;
5.   process group: after the group's last user, whichever op that was.
6. Record copies the clock; wait takes the later of both, stream by stream.
7. At the end the caller's stream must know the last call of every stream.

Only the last writer and the readers since are remembered: whatever came before them is ordered before them (checked then).
"""

from __future__ import annotations

from dynaflow.ir import Flow, Plan
from dynaflow.verify import explain
from dynaflow.verify.structure import RECORD, Indexed, remember

# What an op touches, without storages that no op writes: reads and writes as (storage, by_rows), and process groups.
Touches = tuple[list[tuple[int, bool]], list[tuple[int, bool]], list[int]]


def check_order(plan: Plan, flow: Flow, indexed: Indexed) -> int:
    """The number of streams that launch anything."""
    touches = remember(flow, "_verify_touches", touches_of)
    steps, rows_of, slot_of, home_of = indexed.steps, indexed.rows, indexed.slot_of, flow.home_storage
    num_streams, num_storages = len(indexed.streams), len(flow.storages)
    whole = tuple(range(indexed.num_segments))

    clocks = [[-1] * num_streams for _ in range(num_streams)]
    clocks[0][0] = 0
    events: list[list[int]] = []
    # per time: its stream and its op. One time too many: NEVER is known to no clock, and marks the dead.
    never = indexed.num_calls + 1
    stream_at = [0] * (never + 1)
    op_at = [-1] * (never + 1)
    # per storage: the time of the last write, by segment of the batch; and the times of the reads since
    written = [[0] * indexed.num_segments for _ in range(num_storages)]
    read: list[list[int]] = [[] for _ in range(num_storages)]
    part_at = [0] * (never + 1)
    dead = [never] * indexed.num_segments
    # per slot: the storage that has it now, and what must be over before that one may be written
    owner = [-1] * indexed.num_slots
    behind: list[dict[int, int]] = [{} for _ in owner]
    pieces = _pieces(flow) if flow.pieces else {}

    if indexed.num_calls > indexed.num_launches:
        _check_groups(plan, flow, indexed)
    now = 0
    for s, op, p in steps:
        clock = clocks[s]
        if op >= 0:
            # 1. launch
            now += 1
            if clock[0] < 0:
                raise explain.not_started(plan, now)
            clock[s] = now
            stream_at[now], op_at[now], part_at[now] = s, op, p
            rows = rows_of[p]
            reads, writes, groups = touches[op]
            # 2. read
            for storage, by_rows in reads:
                last = written[storage]
                for row in rows if by_rows else whole:
                    t = last[row]
                    if clock[stream_at[t]] < t or op_at[t] > op:
                        raise explain.conflict(plan, flow, indexed, t, now, storage, clock, stream_at)
                read[storage].append(now)
            # 3. write
            for storage, by_rows in writes:
                last = written[storage]
                touched = rows if by_rows else whole
                for row in touched:
                    t = last[row]
                    if clock[stream_at[t]] < t or op_at[t] > op:
                        raise explain.conflict(plan, flow, indexed, t, now, storage, clock, stream_at)
                    last[row] = now
                readers = read[storage]
                if readers:
                    is_all = len(touched) == len(whole)
                    kept = []
                    for t in readers:
                        other = whole if is_all or (storage, False) in touches[op_at[t]][0] else rows_of[part_at[t]]
                        if is_all or not (other[-1] < touched[0] or touched[-1] < other[0]):
                            if clock[stream_at[t]] < t or op_at[t] > op:
                                raise explain.conflict(plan, flow, indexed, t, now, storage, clock, stream_at)
                            if touched[0] <= other[0] and other[-1] <= touched[-1]:
                                continue
                        kept.append(t)
                    read[storage] = kept
                # 4. slot
                slot = slot_of[storage]
                if slot >= 0:
                    old, home = owner[slot], home_of[storage]
                    if old != home:
                        owner[slot] = home
                        if old >= 0:
                            # per stream, its last access: later times take the place of earlier ones
                            times = written[old] + read[old]
                            written[old] = dead
                            for piece in pieces.get(old, ()):
                                times += written[piece] + read[piece]
                                written[piece] = dead
                            behind[slot] = {stream_at[t]: t for t in sorted(times)}
                    for u, t in behind[slot].items():
                        # `now` itself: one op may not write over what it reads
                        if clock[u] < t or t == now:
                            raise explain.shared(plan, flow, indexed, t, now, storage)
            # 5. process group
            for token in groups:
                last = written[token]
                t = last[0]
                if clock[stream_at[t]] < t:
                    raise explain.conflict(plan, flow, indexed, t, now, token, clock, stream_at)
                last[0] = now
        # 6. record and wait
        elif op == RECORD:
            events.append(clock[:])
        else:
            for u, t in enumerate(events[p]):
                if t > clock[u]:
                    clock[u] = t

    # 7. the end
    for s in range(1, num_streams):
        if clocks[0][s] < clocks[s][s]:
            raise explain.not_joined(plan, clocks[s][s])
    return sum(clocks[s][s] > 0 for s in range(num_streams))


def _check_groups(plan: Plan, flow: Flow, indexed: Indexed) -> None:
    """Launches of several calls, fused or replaced. What one touches shares no slot: it may read its inputs until its end, and write
    its outputs from its beginning. What it makes, it makes for all its readers (a piece is written where it lies, for whoever reads it).
    That its calls are listed in the order of the program is checked with all others: each call has its own time."""
    rows_of = dict(zip(indexed.parts, indexed.rows))
    for launch in plan.launches:
        if len(launch.calls) == 1:
            continue
        held: dict[int, int] = {}
        made: dict[str, set[int]] = {}
        for name, part in launch.calls:
            op = flow.op(name)
            for storage, _, _ in flow.accesses[flow.index[name]]:
                slot = indexed.slot_of[storage]
                home = flow.home_storage[storage]
                if slot >= 0 and held.setdefault(slot, home) != home:
                    raise explain.shared_inside(plan, flow, launch, held[slot], home)
            for value in map(flow.home, (*op.reads, *op.mutates)):
                inside = made.get(value, set()).intersection(rows_of[part])
                if inside and len(inside) < len(rows_of[part]) and flow.value[value].axis is not None:
                    raise explain.half_made(launch, value, name)
            for value in op.writes:
                if not flow.value[value].home:
                    made.setdefault(value, set()).update(rows_of[part])


def _pieces(flow: Flow) -> dict[int, list[int]]:
    """Storage of a home -> those of its pieces."""
    index = flow.storage_index
    return {index[flow.value[home].storage]: [index[flow.value[p].storage] for p in pieces] for home, pieces in flow.pieces.items()}


def touches_of(flow: Flow) -> list[Touches]:
    """Per op. Storages that no op writes are left out: parameters and inputs make no conflicts."""
    _check_flow(flow)
    groups = {flow.storage_index[token] for op in flow.ops for token in op.uses if token.startswith("group:")}
    is_written = bytearray(len(flow.storages))
    for accesses in flow.accesses:
        for storage, _, is_write in accesses:
            if is_write:
                is_written[storage] = 1
    table = []
    for accesses in flow.accesses:
        reads, writes, used = [], [], []
        for storage, by_rows, is_write in accesses:
            if not is_write:
                if is_written[storage]:
                    reads.append((storage, by_rows))
            elif storage in groups:
                used.append(storage)
            else:
                writes.append((storage, by_rows))
        table.append((reads, writes, used))
    return table


def _check_flow(flow: Flow) -> None:
    """A temporary or output is made before it is read, in program order. A home is made as a whole, and its pieces with it; or all
    its pieces are. One that is an output is made by the end."""
    value, pieces = flow.value, flow.pieces
    made = {v.storage for v in flow.values if v.role == "input" or v.role == "param"}

    def is_made(name: str) -> bool:
        return value[name].storage in made or (name in pieces and all(map(is_made, pieces[name])))

    for op in flow.ops:
        for name in (*op.reads, *op.mutates):
            if not is_made(name):
                raise explain.never_made(f"'{op.name}'", name)
        for name in op.writes:
            made.add(value[name].storage)
            made.update(value[piece].storage for piece in pieces.get(name, ()))
    for name in flow.outputs:
        if name in pieces and not is_made(name):
            raise explain.never_made("the caller", name)
