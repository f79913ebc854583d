"""Lookups and scatters: tables have no batch, and the batch is never looked up by number."""

from __future__ import annotations

import torch

from dynaflow.batch_rules.call import DIFFERENT_ROWS, PICKS_ROWS, Call, Verdict
from dynaflow.batch_rules.table import rules


@rules("embedding")
def embedding(call: Call) -> Verdict:
    return DIFFERENT_ROWS if call.batched(call["weight"]) else call.axis(call["indices"])


@rules("gather")
def gather(call: Call) -> Verdict:
    """out[i][j] = self[index[i][j]][j] along dim 0."""
    x, index = call["self"], call["index"]
    axis, dim = call.axis(index), call["dim"] % max(x.ndim, 1)
    if axis is None:  # rows that the index does not reach are dropped
        return PICKS_ROWS
    if call.axis(x) is None:
        return axis if axis == dim else DIFFERENT_ROWS
    return axis if call.axis(x) == axis != dim else PICKS_ROWS


@rules("scatter", "scatter_add", "scatter_reduce")
def scatter(call: Call) -> Verdict:
    axes = {call.axis(call["self"]), call.axis(call["index"])}
    if isinstance(call.get("src"), torch.Tensor):
        axes.add(call.axis(call["src"]))
    axis = axes.pop()
    return PICKS_ROWS if axes or axis is None or axis == call["dim"] % call["self"].ndim else axis


@rules("index_select")
def index_select(call: Call) -> Verdict:
    x, dim = call["self"], call["dim"] % max(call["self"].ndim, 1)
    axis = call.axis(x)
    if call.batched(call["index"]):
        return dim if axis is None else DIFFERENT_ROWS
    return PICKS_ROWS if axis == dim else axis


@rules("index_copy", "index_add", "index_fill", "index_reduce")
def index_copy(call: Call) -> Verdict:
    """Writes whole slices along `dim`: a cache that is written at some positions, for all rows alike."""
    x, source = call["self"], call.get("source")
    axis = call.axis(x)
    if axis is None or call.batched(call["index"]):
        return DIFFERENT_ROWS
    if source is not None and call.axis(source) != axis:
        return DIFFERENT_ROWS
    if isinstance(call.get("value"), torch.Tensor) and call.batched(call["value"]):
        return DIFFERENT_ROWS
    return PICKS_ROWS if axis == call["dim"] % x.ndim else axis


def _layout(call: Call) -> tuple[Verdict, int]:
    """Batch axis and number of dims of `self[indices]`: the indexed dims give way to those that the indices have together.

    They stand where the first indexed dim stood, or first of all if dims in between are not indexed.
    """
    x, indices = call["self"], list(call["indices"])
    at = [d for d, index in enumerate(indices) if index is not None]
    given = [indices[d] for d in at]
    if any(index.dtype in (torch.bool, torch.uint8) for index in given):
        return "selects by a mask", 0
    num_new = max(index.ndim for index in given)
    by_index = call.aligned(given, num_new)
    kept = [d for d in range(x.ndim) if d not in at]
    start = at[0] if at == list(range(at[0], at[-1] + 1)) else 0
    ndim = len(kept) + num_new
    axis = call.axis(x)
    if isinstance(by_index, str):
        return by_index, ndim
    if axis is None:
        return (None if by_index is None else start + by_index), ndim
    if axis in at:
        return PICKS_ROWS, ndim
    if by_index is not None:
        return DIFFERENT_ROWS, ndim
    position = kept.index(axis)
    return (position if position < start else position + num_new), ndim


@rules("index", "_unsafe_index")
def index(call: Call) -> Verdict:
    return _layout(call)[0]


@rules("index_put", "_unsafe_index_put", "_index_put_impl")
def index_put(call: Call) -> Verdict:
    x, values = call["self"], call["values"]
    axis = call.axis(x)
    where, ndim = _layout(call)
    if isinstance(where, str):
        return where
    if axis is None or not isinstance(where, int) or not call.fits(values, ndim, where):
        return DIFFERENT_ROWS
    return axis


@rules("bucketize")
def bucketize(call: Call) -> Verdict:
    return DIFFERENT_ROWS if call.batched(call["boundaries"]) else call.axis(call["self"])


@rules("isin")
def isin(call: Call) -> Verdict:
    is_table = not isinstance(call.get("test_elements"), torch.Tensor) or not call.batched(call["test_elements"])
    return call.axis(call["elements"]) if is_table and isinstance(call.get("elements"), torch.Tensor) else DIFFERENT_ROWS


@rules("searchsorted")
def searchsorted(call: Call) -> Verdict:
    table, x = call["sorted_sequence"], call.get("self")
    if not isinstance(x, torch.Tensor) or call.get("sorter") is not None:
        return DIFFERENT_ROWS
    axis = call.axis(x)
    if not call.batched(table):
        return axis if table.ndim == 1 else DIFFERENT_ROWS
    return axis if call.axis(table) == axis and axis != x.ndim - 1 else DIFFERENT_ROWS
