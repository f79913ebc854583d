"""What happens to memory of loose values that was dropped, for runtimes that show it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dynaflow.ir import WHOLE, Part
from dynaflow.memory import drop_points

if TYPE_CHECKING:
    from dynaflow.runtime.program import Bound


def recycled(bound: Bound) -> dict[int, list[int]]:
    """Number of a launch (host order) -> the views whose memory it may be given, by an allocator that hands out at once, on its own
    stream, what was dropped before it. For runtimes that show what happens then."""
    if not bound.plan.loose:
        return {}
    flow, launches = bound.program.flow, bound.plan.launches
    home = {
        (value, part if flow.value[value].axis is not None else WHOLE): launch.stream
        for launch in launches for op, part in launch.calls for value in flow.op(op).writes
    }  # fmt: skip
    number_of: dict[tuple[str, Part], int] = {(view.value, view.part): i for i, view in enumerate(bound.views)}
    found: dict[int, list[int]] = {}
    for number, point in enumerate(drop_points(flow, bound.plan)):
        for tensor in point:
            taker = next((k for k in range(number, len(launches)) if launches[k].stream == home[tensor]), None)
            if taker is not None and tensor in number_of:
                found.setdefault(taker, []).append(number_of[tensor])
    return found


def overwrite(tensors: list[Any], views: Sequence[int]) -> None:
    """What the next owner of their memory does to dropped tensors."""
    for i in views:
        if tensors[i] is not None:
            tensors[i].fill_(float("nan") if tensors[i].is_floating_point() else -1)
