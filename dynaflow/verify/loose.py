"""May what a plan lists as loose stay in the memory in which its op returned it?

Contract: `check_loose` returns the storages of the listed values, or raises. A listed value

1. is a temporary, listed once, with a storage of its own and without a slot or pieces; no op changes rows of it in place;
2. is made by ops alone (a replacement may return memory that is not its own), by one launch where it has no rows of its own;
3. is read (and, where it has no rows, changed in place) in rows that one launch wrote: there is no buffer in which several results
   lie side by side;
4. leaves its launch: what does not has no memory to speak of.

That a read comes after its write is checked for all values alike (`order.py`); that memory is given back when every access is over
follows from the plan (`dynaflow.memory.drop_points`).
"""

from __future__ import annotations

from collections import Counter

from dynaflow import errors
from dynaflow.ir import Flow, Launch, Part, Plan, Value

PLACE = "df.place(flow, plan) gives the slots"


def check_loose(plan: Plan, flow: Flow, placed: set[str], rows_of: dict[Part, tuple[int, ...]]) -> set[int]:
    """`placed` are the values with a slot; `rows_of` are the segments of the batch that a part covers."""
    # 1. what it is
    num_views = Counter(v.storage for v in flow.values)
    changed = {value: op.name for op in flow.ops for value in op.mutates}
    for name, count in Counter(plan.loose).items():
        value = flow.value.get(name)
        if value is None:
            raise _refused(name, "it is no value of the flow")
        if value.role != "temp":
            raise _refused(name, f"it is no temporary but {what_else(value)}")
        if count > 1:
            raise _refused(name, "it is listed twice")
        if name in placed:
            raise _refused(name, "it has a slot")
        if num_views[value.storage] > 1:
            raise _refused(name, f"other values are the same memory, storage '{value.storage}'")
        if name in flow.pieces:
            raise _refused(name, f"it has pieces ({', '.join(flow.pieces[name])}), which are written into its memory")
        if name in changed and value.axis is not None:
            raise _refused(name, f"'{changed[name]}' changes rows of it in place")

    # value -> (rows, launch) of what makes it and of what reads or changes it
    made: dict[str, list[tuple[set[int], Launch]]] = {name: [] for name in plan.loose}
    read: dict[str, list[tuple[set[int], Launch]]] = {name: [] for name in plan.loose}
    for launch in plan.launches:
        for op_name, part in launch.calls:
            op = flow.op(op_name)
            for table, touched in ((made, op.writes), (read, (*op.reads, *op.mutates))):
                for name in touched:
                    if name in table:
                        table[name].append((set(rows_of[part]) if flow.value[name].axis is not None else {0}, launch))
    for name in plan.loose:
        # 2. what makes it
        for _, launch in made[name]:
            if launch.replace:
                raise _refused(name, f"'{launch.label}' makes it, and may return memory that is not its own", launch)
        if flow.value[name].axis is None and len(made[name]) > 1:
            raise _refused(name, "several launches make it, each of them all of it")
        # 3. what reads it
        for rows, launch in read[name]:
            if not any(rows <= written for written, _ in made[name]):
                raise _refused(name, f"'{launch.label}' reads rows of it that no launch alone wrote", launch)
        # 4. where it goes
        makers = [launch for _, launch in made[name]]
        if all(launch.is_group and launch in makers for _, launch in (*made[name], *read[name])):
            raise _refused(name, "it never leaves its launch: it needs no memory at all")
    return {flow.storage_index[flow.value[name].storage] for name in plan.loose}


def what_else(value: Value) -> str:
    """What a value without a slot is, for people."""
    return f"a piece of '{value.home}', in whose memory it lies" if value.home else f"of role '{value.role}', with memory of its own"


def _refused(name: str, why: str, launch: Launch | None = None) -> errors.MalformedPlan:
    where = launch.where if launch is not None else ""
    return errors.MalformedPlan(f"'{name}' cannot be loose.", where=where, why=why, fix=f"take it off the 'loose' line; {PLACE}")
