"""Ops that work element by element, and ops that work along some dims: those must not be the batch."""

from __future__ import annotations

from dynaflow.batch_rules.call import ALONG_BATCH, DIFFERENT_ROWS, PICKS_ROWS, REDUCES, ROW_NUMBER, Call, Rule, Verdict
from dynaflow.batch_rules.table import rules

# elementwise in fact, but without torch.Tag.pointwise
_UNTAGGED = """
    clone copy fill zero masked_fill _to_copy lift lift_fresh lift_fresh_copy detach detach_copy alias alias_copy zeros_like ones_like
    empty_like full_like eq ne lt le gt ge logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor
    hardswish log_sigmoid_forward _prelu_kernel floor_divide complex polar _conj _neg_view resolve_conj resolve_neg
    native_dropout rrelu_with_noise fake_quantize_per_tensor_affine_cachemask dequantize
    rsub clamp clamp_min clamp_max hardshrink softshrink threshold mish softplus hardtanh elu gelu
"""


@rules(*_UNTAGGED.split())
def pointwise(call: Call) -> Verdict:
    ndim = max(t.ndim for t in call.tensors)
    # torch tags `equal` as pointwise too, which compares whole tensors
    if not call.outs or any(out.ndim != ndim for out in call.outs):
        return REDUCES
    return call.aligned(call.tensors, ndim)


@rules(*"mse_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits soft_margin_loss".split())
def loss(call: Call) -> Verdict:
    return pointwise(call) if call["reduction"] == 0 else REDUCES


@rules("nll_loss_forward", "nll_loss2d_forward")
def nll_loss(call: Call) -> Verdict:
    if call["reduction"] != 0:
        return REDUCES
    is_rowwise = call.axis(call["self"]) == 0 and call.axis(call["target"]) == 0 and not call.batched(call["weight"])
    return (0, None) if is_rowwise else DIFFERENT_ROWS


@rules(
    *"sum nansum mean amax amin aminmax max min argmax argmin any all prod var std var_mean std_mean norm linalg_vector_norm".split(),
    *"logsumexp count_nonzero median nanmedian mode kthvalue linalg__powsum".split(),
)
def reduction(call: Call) -> Verdict:
    axis, dims = call.axis(call.first), call.dims("dim", call.first)
    if axis is None or axis in dims:
        return REDUCES
    return axis if call.get("keepdim", False) else axis - sum(d < axis for d in dims)


@rules(*"_softmax _log_softmax _safe_softmax cumsum cumprod cummax cummin logcumsumexp sort argsort topk glu".split())
@rules(*"_fft_c2c _fft_r2c _fft_c2r".split())
def along_dim(call: Call) -> Verdict:
    axis = call.axis(call.first)
    return ALONG_BATCH if axis in call.dims("dim", call.first) else axis


@rules("flip", "roll", "rot90")
def along_dims(call: Call) -> Verdict:
    # roll without dims works on the flattened tensor
    axis = call.axis(call.first)
    return PICKS_ROWS if axis in call.dims("dims", call.first) else axis


@rules("tril", "triu")
def triangle(call: Call) -> Verdict:
    axis = call.axis(call.first)
    return axis if axis is not None and axis < call.first.ndim - 2 else ROW_NUMBER


# ---------------------------------------------------------------------------- norms


@rules("native_layer_norm", "_fused_rms_norm")
def layer_norm(call: Call) -> Verdict:
    x = call["input"]
    axis = call.axis(x)
    if axis is None or call.batched(call["weight"], call.get("bias")):
        return DIFFERENT_ROWS
    return axis if axis < x.ndim - len(call["normalized_shape"]) else REDUCES


@rules("native_group_norm", sizes=("N",))
def group_norm(call: Call) -> Verdict:
    if call.axis(call["input"]) != 0 or call.batched(call["weight"], call["bias"]):
        return DIFFERENT_ROWS
    return 0


@rules(
    *"native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training _native_batch_norm_legit_functional".split(),
    *"cudnn_batch_norm miopen_batch_norm _batch_norm_with_update _batch_norm_no_update".split(),
)
def batch_norm(call: Call) -> Verdict:
    x = call["input"]
    per_channel = [call.get(name) for name in ("weight", "bias", "running_mean", "running_var")]
    if call.axis(x) == 1:
        # instance norm: the batch is folded into the channels, of which each has its own statistics
        if any(t is not None and call.axis(t) != 0 for t in per_channel):
            return DIFFERENT_ROWS
        return tuple(call.axis(out) for out in call.outs)
    is_training = call.get("training", call.get("train", "no_training" not in str(call.func) and "no_update" not in str(call.func)))
    if is_training or call.axis(x) is None:
        return REDUCES
    if call.batched(*per_channel):
        return DIFFERENT_ROWS
    return (call.axis(x), *(None for _ in call.outs[1:]))


# ---------------------------------------------------------------------------- ops on the last dims


def leading(num_dims: int) -> Rule:
    """The op works on the last `num_dims` dims; everything before them is a batch to it."""

    def rule(call: Call) -> Verdict:
        axes = {a for t in call.tensors if (a := call.axis(t)) is not None}
        if len(axes) != 1 or len({t.ndim for t in call.tensors if call.batched(t)}) != 1:
            return DIFFERENT_ROWS
        axis = axes.pop()
        ndim = max(t.ndim for t in call.tensors if call.batched(t))
        return axis if axis < ndim - num_dims else ALONG_BATCH

    return rule


_POOL = ("max_pool{}d_with_indices", "avg_pool{}d", "_adaptive_avg_pool{}d", "adaptive_avg_pool{}d", "adaptive_max_pool{}d", "max_pool{}d")
_PAD = ("reflection_pad{}d", "replication_pad{}d")
_UPSAMPLE = ("upsample_nearest{}d", "_upsample_nearest_exact{}d")

for _n in (1, 2, 3):
    rules(*(name.format(_n) for name in (*_POOL, *_PAD, *_UPSAMPLE)))(leading(_n))
rules("upsample_linear1d")(leading(1))
rules(*"upsample_bilinear2d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa".split())(leading(2))
rules("upsample_trilinear3d")(leading(3))
rules("pixel_shuffle", "pixel_unshuffle", "grid_sampler_2d", "channel_shuffle", "native_channel_shuffle")(leading(3))
rules("grid_sampler_3d")(leading(4))
rules("im2col", "col2im")(leading(2))
rules(*"linalg_inv_ex linalg_cholesky_ex linalg_qr _linalg_svd _linalg_eigh _linalg_det".split())(leading(2))
rules("linalg_lu_factor_ex", "linalg_matrix_exp")(leading(2))


@rules("constant_pad_nd")
def pad(call: Call) -> Verdict:
    x, widths = call["self"], call["pad"]
    axis = call.axis(x)
    if axis is None:
        return DIFFERENT_ROWS
    # pairs of widths, from the last dim backwards
    at = 2 * (x.ndim - 1 - axis)
    return axis if all(isinstance(w, int) and w == 0 for w in widths[at : at + 2]) else ALONG_BATCH
