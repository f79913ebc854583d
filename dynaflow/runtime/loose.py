"""Loose values at run time: tensors that stay where their op put them, and the views of them that other launches read.

A launch that makes a loose value puts the tensor into the table of the call (`keep`); reads of fewer rows find narrow views of it.
`drops` says before which launches the table may forget them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dynaflow.ir import WHOLE, Flow, Part, covers
from dynaflow.memory import drop_points

if TYPE_CHECKING:
    from dynaflow.runtime.program import Bound, View


class Keep(NamedTuple):
    """A result that becomes a view of the table, with the views of some of its rows."""

    # number of the result, and of its view
    result: int
    view: int
    # (view, axis, start, length) of what others read of it
    narrow: tuple[tuple[int, int, int, int], ...]


def keep(keeps: Sequence[Keep], results: Sequence[torch.Tensor], args: Sequence[Any], tensors: list[Any]) -> None:
    """Put loose results into the table. An op that returned (a view of) its argument has no memory of its own: that is copied."""
    given = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)}
    for number, view, narrow in keeps:
        result = results[number]
        tensor = tensors[view] = result.clone() if result.untyped_storage().data_ptr() in given else result
        for other, axis, start, length in narrow:
            tensors[other] = tensor.narrow(axis, start, length)


def narrow_views(flow: Flow, views: Sequence[View], written: Sequence[int], at: Mapping[Part, int]) -> Iterator[tuple[int, list[str]]]:
    """Per view that a launch writes: its number, and (view, axis, start, length) of every other view in its rows, as expressions.

    `at` numbers the parts: part k has the rows `_lo<k>` to `_hi<k>` of `_batch`.
    """
    of_value: dict[str, list[int]] = {}
    for i, view in enumerate(views):
        of_value.setdefault(view.value, []).append(i)
    for i in written:
        name, part = views[i]
        value, inside = flow.value[name], [j for j in of_value[name] if j != i and covers((part,), views[j].part)]
        each = f"(({value.shape[value.axis]}) // _batch)" if value.axis is not None else "0"
        rows = [(j, at[views[j].part]) for j in inside]
        yield i, [f"({j}, {value.axis}, (_lo{k} - _lo{at[part]}) * {each}, (_hi{k} - _lo{k}) * {each})" for j, k in rows]


def drops(bound: Bound) -> tuple[tuple[int, ...], ...]:
    """Per launch in host order, and once more for the end: the views that the host may take off the table right before it."""
    points = drop_points(bound.program.flow, bound.plan)
    of_value: dict[str, list[tuple[int, Part]]] = {name: [] for name in bound.plan.loose}
    for i, view in enumerate(bound.views):
        if view.value in of_value:
            of_value[view.value].append((i, view.part))
    return tuple(tuple(i for value, part in point for i, read in of_value[value] if covers((part,), read)) for point in points)


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
