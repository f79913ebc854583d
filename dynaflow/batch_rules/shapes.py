"""Ops that move elements and compute nothing: views, slices, joins, and tensors made of sizes."""

from __future__ import annotations

from dynaflow.batch_rules.call import DIFFERENT_ROWS, PICKS_ROWS, ROW_NUMBER, Call, Verdict
from dynaflow.batch_rules.table import rules

_JOINS = "joins rows of the batch"


# ---------------------------------------------------------------------------- made of sizes


@rules(
    *"empty zeros ones full new_empty new_zeros new_ones new_full empty_permuted".split(),
    sizes=("size",),
)
@rules("empty_strided", "new_empty_strided", sizes=("size", "stride"))
def constant(call: Call) -> Verdict:
    """Every element is the same (or undefined): rows do not differ, and nothing is read from `self`."""
    return call.axis(call.outs[0])


@rules("arange", "linspace", "logspace", sizes=("start", "end", "step", "steps"))
@rules("eye", sizes=("n", "m"))
def counted(call: Call) -> Verdict:
    return ROW_NUMBER


@rules("_assert_scalar", "sym_constrain_range", "sym_constrain_range_for_size", sizes=("self", "size"))
def checked(call: Call) -> Verdict:
    return "checks the batch size"


# ---------------------------------------------------------------------------- views


@rules("view", "_unsafe_view", "_reshape_copy", "view_copy", sizes=("size",))
def view(call: Call) -> Verdict:
    """Row-major order is kept. So the batch stays whole where as many elements-of-outer-dims precede it as before.

    [B, S] -> [B * S]: 1 and 1, fine. [S, B] -> [S * B]: S and 1, rows are interleaved.
    """
    x, out = call["self"], call.outs[0]
    before, after = call.axis(x), call.axis(out)
    if call.get("dtype") is not None:  # view.dtype scales the last dim
        return after if before == after and before != x.ndim - 1 else DIFFERENT_ROWS
    if before is None or after is None:
        return DIFFERENT_ROWS
    return after if call.sizes.outer(x, before) == call.sizes.outer(out, after) else "interleaves rows of the batch"


@rules("expand", "expand_copy", sizes=("size",))
def expand(call: Call) -> Verdict:
    x, out = call["self"], call.outs[0]
    axis = call.axis(x)
    return call.axis(out) if axis is None else axis + out.ndim - x.ndim


@rules("repeat", sizes=("repeats",))
def repeat(call: Call) -> Verdict:
    """A new batch comes out as the outermost factor; an old one stays outermost only where it is not repeated."""
    x, out = call["self"], call.outs[0]
    axis = call.axis(x)
    if axis is None:
        return call.axis(out)
    axis += out.ndim - x.ndim
    times = call["repeats"][axis]
    return axis if isinstance(times, int) and times == 1 else DIFFERENT_ROWS


@rules("permute", "permute_copy")
def permute(call: Call) -> Verdict:
    axis = call.axis(call["self"])
    return DIFFERENT_ROWS if axis is None else call.dims("dims", call["self"]).index(axis)


@rules("transpose", "transpose_copy")
def transpose(call: Call) -> Verdict:
    x = call["self"]
    axis, a, b = call.axis(x), call["dim0"] % x.ndim, call["dim1"] % x.ndim
    return {a: b, b: a}.get(axis, axis)


@rules("t", "t_copy")
def t(call: Call) -> Verdict:
    x = call["self"]
    axis = call.axis(x)
    return axis if x.ndim < 2 or axis is None else 1 - axis


@rules("unsqueeze", "unsqueeze_copy")
def unsqueeze(call: Call) -> Verdict:
    axis, dim = call.axis(call["self"]), call["dim"] % (call["self"].ndim + 1)
    return axis if axis is None else axis + (dim <= axis)


@rules("squeeze", "squeeze_copy")
def squeeze(call: Call) -> Verdict:
    """A part may have one row: what squeezes a dim of size 1 must not look at the batch."""
    x, out = call["self"], call.outs[0]
    axis, dims = call.axis(x), call.dims("dim", x)
    if axis is None or axis in dims:
        return "squeezes the batch of a part with one row"
    return axis - sum(d < axis for d in dims) if x.ndim - len(dims) == out.ndim else call.axis(out)


@rules("view_as_real", "view_as_complex", "view_as_real_copy", "view_as_complex_copy")
def reinterpret(call: Call) -> Verdict:
    return call.axis(call["self"])


@rules("diagonal", "diagonal_copy")
def diagonal(call: Call) -> Verdict:
    x = call["self"]
    axis, dims = call.axis(x), {call["dim1"] % x.ndim, call["dim2"] % x.ndim}
    return ROW_NUMBER if axis is None or axis in dims else axis - sum(d < axis for d in dims)


@rules("unfold", "unfold_copy")
def unfold(call: Call) -> Verdict:
    axis = call.axis(call["self"])
    return PICKS_ROWS if axis in call.dims("dimension", call["self"]) else axis


# ---------------------------------------------------------------------------- slices


@rules("slice", "slice_copy", sizes=("start", "end"))
def cut(call: Call) -> Verdict:
    x, out = call["self"], call.outs[0]
    axis, dim = call.axis(x), call["dim"] % x.ndim
    if axis != dim:  # a table, of which as many rows are taken as the batch has; or positions that depend on the batch size
        return ROW_NUMBER if call.sizes.has_batch((call["start"], call["end"])) else axis
    # nothing is cut off where the size stays
    is_full = call.sizes.expr(x.shape[dim]) == call.sizes.expr(out.shape[dim]) and call["step"] == 1
    return axis if is_full else PICKS_ROWS


@rules("select", "select_copy", "unbind", "unbind_copy")
def select(call: Call) -> Verdict:
    axis, dim = call.axis(call["self"]), call["dim"] % call["self"].ndim
    return PICKS_ROWS if axis is None or axis == dim else axis - (dim < axis)


@rules(*"split split_with_sizes unsafe_split unsafe_split_with_sizes split_copy split_with_sizes_copy".split())
def split(call: Call) -> Verdict:
    axis, dim = call.axis(call["self"]), call["dim"] % call["self"].ndim
    return PICKS_ROWS if axis is None or axis == dim else axis


@rules("slice_scatter")
def slice_scatter(call: Call) -> Verdict:
    axis = call.axis(call["self"])
    is_rowwise = axis is not None and axis == call.axis(call["src"]) and axis != call["dim"] % call["self"].ndim
    return axis if is_rowwise else DIFFERENT_ROWS


@rules("select_scatter")
def select_scatter(call: Call) -> Verdict:
    axis, dim = call.axis(call["self"]), call["dim"] % call["self"].ndim
    if axis is None or axis == dim or call.axis(call["src"]) != axis - (dim < axis):
        return DIFFERENT_ROWS
    return axis


# ---------------------------------------------------------------------------- joins


@rules("cat")
def cat(call: Call) -> Verdict:
    # torch skips tensors of shape (0,) here, which is how an empty cache begins
    tensors = [x for x in call["tensors"] if tuple(x.shape) != (0,)]
    axes = {call.axis(x) for x in tensors}
    if len(axes) != 1 or None in axes:
        return DIFFERENT_ROWS
    axis = axes.pop()
    return _JOINS if axis == call["dim"] % tensors[0].ndim else axis


@rules("stack")
def stack(call: Call) -> Verdict:
    axes = {call.axis(x) for x in call["tensors"]}
    axis = axes.pop()
    if axes or axis is None:
        return DIFFERENT_ROWS
    return axis + (call["dim"] % call.outs[0].ndim <= axis)
