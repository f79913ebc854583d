"""Plan without waits -> the same plan with the fewest records and waits.

Contract: in the result, every two launches that touch the same memory (one of them writing) are ordered by streams and
waits, every stream starts after the caller's and the caller's continues after every stream; and no wait can be left out (those that
a strategy asked for, `after=`, aside).

1. Rows: the plan's part boundaries cut the batch into segments; an access by rows touches the segments of its part.
2. Walk the launches in host order. Per storage and segment, remember the last writer and the readers since.
3. What a launch must wait for is, per other stream, one launch: the latest that it conflicts with, or that it is to come after.
4. Drop what this stream already waited for, and what another of these launches itself waited for (vector clocks).
5. The rest become waits; each awaited launch records one event right behind it.
6. The caller's stream joins the streams in the same way.
"""

from __future__ import annotations

from dataclasses import replace

from dynaflow.ir import CALLER, START, Flow, Launch, Part, Plan, Record, Step, Wait, check_kinds


def synchronise(flow: Flow, plan: Plan) -> Plan:
    """The plan with the fewest waits that make it right: its launches keep their order and streams, waits that it had are made anew."""
    check_kinds("df.synchronise(flow, plan)", flow, plan)
    launches = plan.launches
    segments_of = segments(plan)
    num_segments = segments_of.count
    stream_index = {CALLER: 0, **{s.name: i for i, s in enumerate(plan.streams, 1)}}
    num_streams = len(stream_index)
    accesses, op_index = flow.conflicts, flow.index
    everything = range(num_segments)

    # clock[s][t]: how many launches of stream t are known to be finished when stream s runs its next one.
    # The caller's stream counts `start` as its first.
    clock = [[0] * num_streams for _ in range(num_streams)]
    clock[0][0] = 1
    length = [1] + [0] * (num_streams - 1)
    start_clock = list(clock[0])
    clock_after: list[list[list[int]]] = [[start_clock]] + [[] for _ in range(num_streams - 1)]

    writer: dict[int, tuple[int, int]] = {}
    readers: dict[int, list[tuple[int, int]]] = {}
    waits: list[list[tuple[int, int]]] = []  # per launch, and once more for the end: (stream, position) to wait for
    awaited: set[tuple[int, int]] = set()
    nothing: list[tuple[int, int]] = []
    places: list[tuple[int, int]] = []  # per launch: its stream and position

    def settle(s: int, need: dict[int, int]) -> list[tuple[int, int]]:
        """Step 4 for stream s: the (stream, position) pairs that must become waits. All of `need` is still open."""
        mine = clock[s]
        open_needs = list(need.items())
        if len(open_needs) > 1:
            open_needs = [
                (t, p) for t, p in open_needs
                if not any(u != t and clock_after[u][q][t] > p for u, q in open_needs)
            ]  # fmt: skip
        for t, p in open_needs:
            awaited.add((t, p))
            for u, known in enumerate(clock_after[t][p]):
                if known > mine[u]:
                    mine[u] = known
        return open_needs

    for launch in launches:
        s = stream_index[launch.stream]
        me = (s, length[s])
        mine = clock[s]
        need: dict[int, int] = {} if mine[0] else {0: 0}
        for number in launch.after:
            t, p = places[number]
            if t != s and mine[t] <= p and need.get(t, -1) < p:
                need[t] = p
        for op, part in launch.calls:
            rows = segments_of[part]
            for storage, by_rows, is_write in accesses[op_index[op]]:
                base = storage * num_segments
                for segment in rows if by_rows else everything:
                    key = base + segment
                    if key in writer:
                        t, p = writer[key]
                        if t != s and mine[t] <= p and need.get(t, -1) < p:
                            need[t] = p
                    if is_write:
                        if key in readers:
                            for t, p in readers.pop(key):
                                if t != s and mine[t] <= p and need.get(t, -1) < p:
                                    need[t] = p
                        writer[key] = me
                    elif key in readers:
                        readers[key].append(me)
                    else:
                        readers[key] = [me]
        waits.append(settle(s, need) if need else nothing)
        places.append(me)
        length[s] += 1
        mine[s] = length[s]
        clock_after[s].append(mine[:])
    waits.append(settle(0, {t: length[t] - 1 for t in range(1, num_streams) if length[t] > clock[0][t]}))

    # 5. Assemble: events are named in the order in which they are recorded.
    names: dict[tuple[int, int], str] = {(0, 0): START}
    steps: list[Step] = [Record(START, CALLER)] if (0, 0) in awaited else []
    position = [1] + [0] * (num_streams - 1)
    for number, launch in enumerate(launches):
        s = stream_index[launch.stream]
        if waits[number]:
            steps.extend(Wait(names[need], launch.stream) for need in sorted(waits[number]))
        steps.append(launch)
        here = (s, position[s])
        position[s] += 1
        if here in awaited:
            names[here] = f"e{len(names) - 1}"
            steps.append(Record(names[here], launch.stream))
    steps.extend(Wait(names[need], CALLER) for need in sorted(waits[-1]))
    return replace(plan, steps=tuple(steps))


class segments(dict[Part, range]):
    """Part -> the segments of the batch that it covers; `count` segments in all."""

    def __init__(self, plan: Plan):
        parts = {part for launch in plan.launches for _, part in launch.calls}
        marks = sorted({(p.lo, p.of) for p in parts} | {(p.hi, p.of) for p in parts} | {(0, 1), (1, 1)}, key=lambda m: m[0] / m[1])
        at: dict[tuple[int, int], int] = {}
        index = -1
        previous = (-1, 1)
        for mark in marks:  # equal fractions (1/2 and 2/4) are one mark
            if mark[0] * previous[1] != previous[0] * mark[1]:
                index += 1
                previous = mark
            at[mark] = index
        super().__init__({p: range(at[p.lo, p.of], at[p.hi, p.of]) for p in parts})
        self.count = max(index, 1)


def clocks(plan: Plan) -> tuple[dict[str, int], list[tuple[int, int, list[int]]]]:
    """Per launch: its stream's index, its position there, and what was finished before it.

    A wait for an event that is not recorded yet passes, as CUDA has it.
    """
    stream_index = {CALLER: 0, **{s.name: i for i, s in enumerate(plan.streams, 1)}}
    num_streams = len(stream_index)
    clock = [[0] * num_streams for _ in range(num_streams)]
    events: dict[str, list[int]] = {}
    table = []
    for step in plan.steps:
        s = stream_index[step.stream]
        mine = clock[s]
        if isinstance(step, Launch):
            table.append((s, mine[s], mine[:]))
            mine[s] += 1
        elif type(step) is Record:
            if step.event == START:
                mine[s] += 1
            events[step.event] = mine[:]
        else:
            for u, known in enumerate(events.get(step.event, ())):
                if known > mine[u]:
                    mine[u] = known
    return stream_index, table
