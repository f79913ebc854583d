"""Are the pieces of a flow pieces, and does a plan leave them in their homes?

Contract: `check_pieces` (of a flow) and `check_homes` (of a plan) return, or raise.

1. A piece has a home: a temporary or an output that is no piece itself. Both have storages of their own. A piece goes to nobody by
   itself: it is no output.
2. A home that any launch touches, itself or a piece of it, has memory: a slot, or it is an output. It is never internal; `loose.py`
   has that it is never loose.
3. No replacement writes a piece: a function returns what it makes, and a piece is written where it lies.

That pieces of one home do not overlap is the word of whoever made the flow.
"""

from __future__ import annotations

from collections import Counter

from dynaflow import errors
from dynaflow.ir import Flow, Launch, Plan, Value
from dynaflow.verify.loose import PLACE

MAKER = "this is a bug in what made the flow"


def check_pieces(flow: Flow) -> bool:
    """Whether the flow has any."""
    # 1. piece and home
    num_views = Counter(v.storage for v in flow.values)
    for v in flow.values:
        if v.role != "piece" and not v.home:
            continue
        home = flow.value.get(v.home)
        if v.role != "piece":
            raise _no_piece(v, f"its role is '{v.role}'")
        if home is None:
            raise _no_piece(v, "that is no value of the flow" if v.home else "it has no home")
        if home.role not in ("temp", "output"):
            raise _no_piece(v, f"that is no temporary and no output, but of role '{home.role}'")
        for one in (v, home):
            if num_views[one.storage] > 1:
                raise _no_piece(v, f"other values are the same memory as '{one.name}', storage '{one.storage}'")
        if v.name in flow.outputs:
            raise _no_piece(v, "it is an output by itself")
    return bool(flow.pieces)


def check_homes(plan: Plan, flow: Flow, placed: set[str]) -> None:
    """`placed` are the values with a slot."""
    for launch in plan.launches:
        for name, _ in launch.calls:
            op = flow.op(name)
            for value in (*op.reads, *op.mutates, *op.writes):
                # 2. memory
                home = flow.home(value)
                if home in flow.pieces and flow.value[home].role == "temp" and home not in placed:
                    raise _no_memory(launch, value, home)
                # 3. replacements
                if launch.replace and value in op.writes and value != home:
                    raise errors.MalformedPlan(
                        f"'{launch.label}' writes '{value}', a piece of '{home}'.", where=launch.where,
                        why="a function returns what it makes, and a piece is written where it lies",
                        fix=f"launch '{name}' by itself")  # fmt: skip


def _no_memory(launch: Launch, value: str, home: str) -> errors.MalformedPlan:
    return errors.MalformedPlan(
        f"'{value}' has no memory: no slot for '{home}', and '{launch.label}' uses it.", where=launch.where,
        why=f"pieces are written into the memory of '{home}', even where it never leaves its launch",
        fix=PLACE)  # fmt: skip


def _no_piece(v: Value, why: str) -> errors.MalformedPlan:
    return errors.MalformedPlan(f"'{v.name}' cannot be a piece of '{v.home}'.", why=why, fix=MAKER)
