"""Products: matrix products, convolutions, attention."""

from __future__ import annotations

from typing import Any

import torch

from dynaflow.batch_rules.call import DIFFERENT_ROWS, REDUCES, ROW_NUMBER, Call, Verdict
from dynaflow.batch_rules.table import rowwise, rules

# operands and result as in einsum; a third name is what is added, broadcast to the result
_PRODUCTS = {
    "mm": ("self mat2", "mk,kn->mn"),
    "_int_mm": ("self mat2", "mk,kn->mn"),
    "bmm": ("self mat2", "bmk,bkn->bmn"),
    "mv": ("self vec", "mk,k->m"),
    "dot": ("self tensor", "k,k->"),
    "vdot": ("self other", "k,k->"),
    "addmm": ("mat1 mat2 self", "mk,kn->mn"),
    "_addmm_activation": ("mat1 mat2 self", "mk,kn->mn"),
    "baddbmm": ("batch1 batch2 self", "bmk,bkn->bmn"),
    "addbmm": ("batch1 batch2 self", "bmk,bkn->mn"),
    "addmv": ("mat vec self", "mk,k->m"),
    "addr": ("vec1 vec2 self", "m,n->mn"),
    "_euclidean_dist": ("x1 x2", "mk,nk->mn"),
    "_cdist_forward": ("x1 x2", "mk,nk->mn"),
}


@rules(*_PRODUCTS)
def product(call: Call) -> Verdict:
    names, equation = _PRODUCTS[call.func._schema.name.removeprefix("aten::").removesuffix("_")]
    a, b, *added = (call[name] for name in names.split())
    if equation == "mk,nk->mn":  # distances come with any number of batch dims in front
        if a.ndim != b.ndim:
            return DIFFERENT_ROWS
        front = "abcdefgh"[: a.ndim - 2]
        equation = f"{front}mk,{front}nk->{front}mn"
    terms, _, result = equation.partition("->")
    return contraction(call, (a, b), terms.split(","), result, added)


def contraction(call: Call, operands: Any, terms: list[str], result: str, added: Any = ()) -> Verdict:
    """The batch must be one letter, in every operand that has the letter, and in the result."""
    letters = {term[axis] for x, term in zip(operands, terms) if (axis := call.axis(x)) is not None}
    if len(letters) != 1:
        return DIFFERENT_ROWS
    letter = letters.pop()
    if letter not in result:
        return REDUCES
    if any(letter in term and not call.batched(x) for x, term in zip(operands, terms)):
        return DIFFERENT_ROWS
    axis = result.index(letter)
    return axis if all(call.fits(x, len(result), axis) for x in added) else DIFFERENT_ROWS


def matmul(call: Call) -> Verdict:
    """`linear` and `matmul` as the graph calls them.

    Inside they flatten all dims but the last two, which interleaves a batch that is not the first dim, and unflatten again.
    """
    a, b, *bias = call.tensors
    ndim, out = max(a.ndim, b.ndim), call.outs[0]
    if call.batched(*bias) or a.ndim < 2:
        return DIFFERENT_ROWS
    if "linear" in str(call.func) or (b.ndim == 2 and not call.batched(b)):
        return call.axis(a) if call.axis(a) != a.ndim - 1 and not call.batched(b) else DIFFERENT_ROWS
    axis = call.aligned((a, b), ndim)
    return axis if isinstance(axis, int) and axis < ndim - 2 and out.ndim == ndim else DIFFERENT_ROWS


@rules("_scaled_mm")
def scaled_mm(call: Call) -> Verdict:
    """Rows of `self` may have scales of their own, one per row; everything else belongs to the weight."""
    others = [t for t in call.tensors if t is not call["self"] and t is not call["scale_a"]]
    scale = call["scale_a"]
    is_rowwise = call.axis(call["self"]) == 0 and not call.batched(*others)
    # block scales of some formats are swizzled over all rows: one dim, or more than a column per row
    has_row_scales = not call.batched(scale) or (call.axis(scale) == 0 and scale.ndim == 2)
    return 0 if is_rowwise and (has_row_scales or scale.numel() == 1) else DIFFERENT_ROWS


@rules("_grouped_mm")
def grouped_mm(call: Call) -> Verdict:
    if call.get("offs") is not None:
        return "groups rows of the batch"
    if call["self"].ndim != 3 or call["mat2"].ndim != 3:
        return DIFFERENT_ROWS
    return contraction(call, (call["self"], call["mat2"]), ["bmk", "bkn"], "bmn", (call.get("bias"),))


@rules("_weight_int8pack_mm", "_weight_int4pack_mm", "_weight_int4pack_mm_for_cpu", "_dyn_quant_matmul_4bit")
@rules(*"convolution _convolution convolution_overrideable cudnn_convolution mkldnn_convolution miopen_convolution".split())
@rules("cudnn_convolution_transpose", "_slow_conv2d_forward", "conv_depthwise3d", "_conv_depthwise2d")
def weighted(call: Call) -> Verdict:
    """The first tensor is rows in dim 0; all others are weights."""
    return 0 if call.axis(call.first) == 0 and not call.batched(*call.tensors[1:]) else DIFFERENT_ROWS


# ---------------------------------------------------------------------------- attention


@rules(
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
def attention(call: Call) -> Verdict:
    """Query, key and value carry the batch in dim 0, or folded into the heads; a mask does too, or is broadcast.

    Or the queries are the batch (requests packed into one row), and all of them see the same keys.
    """
    query, key, value = call["query"], call["key"], call["value"]
    axes = {call.axis(query), call.axis(key), call.axis(value)}
    is_packed = call.axis(query) == query.ndim - 2 and not call["is_causal"] and not call.sizes.has_batch([*key.shape, *value.shape])
    if not is_packed and (len(axes) != 1 or not axes <= {0, 1}):
        return DIFFERENT_ROWS
    axis = call.axis(query)
    if is_packed and any(call.sizes.is_whole(out) for out in call.outs):
        return DIFFERENT_ROWS  # a log-sum-exp that is padded over all queries
    masks = [t for t in call.tensors if t is not query and t is not key and t is not value]
    if not all(call.fits(mask, query.ndim, axis) for mask in masks):
        return DIFFERENT_ROWS
    # besides the result: log-sum-exp by rows; seeds and lengths, which know nothing of the batch
    return tuple(call.axis(out) for out in call.outs)


@rules("_flash_attention_forward", "_efficient_attention_forward")
def raw_attention(call: Call) -> Verdict:
    ragged = ("cum_seq_q", "cum_seq_k", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "seqlen_k")
    if any(call.get(name) is not None for name in ragged):
        return "packs the rows of the batch"
    if not all(call.axis(call[name]) == 0 for name in ("query", "key", "value")):
        return DIFFERENT_ROWS
    if not call.fits(call.get("bias"), 4, 0) or not call.fits(call.get("alibi_slopes"), 2, 0):
        return DIFFERENT_ROWS
    return tuple(call.axis(out) for out in call.outs)


rules("_transformer_encoder_layer_fwd", "_native_multi_head_attention")(rowwise)


@rules("higher_order::flex_attention")
def flex_attention(call: Call) -> Verdict:
    """Score and mask functions are called with a row number, which they must not use."""
    query, key, value, score, block_mask = (call[str(i)] for i in range(5))
    if not call.axis(query) == call.axis(key) == call.axis(value) == 0:
        return DIFFERENT_ROWS
    if any(call.batched(t) for t in call.tensors if t is not query and t is not key and t is not value):
        return DIFFERENT_ROWS
    mask = block_mask[-1]
    if _uses_argument(score, 1) or _uses_argument(mask, 0):
        return ROW_NUMBER
    return tuple(call.axis(out) for out in call.outs)


def _uses_argument(function: Any, index: int) -> bool:
    if not isinstance(function, torch.fx.GraphModule):
        return True
    placeholders = [n for n in function.graph.nodes if n.op == "placeholder"]
    # `b.new_ones(())` takes only dtype and device
    return index >= len(placeholders) or any(not str(user.target).startswith("new_") for user in placeholders[index].users)
