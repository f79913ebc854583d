"""What fake tensors do while a graph is captured for all batch sizes, where torch's own way costs too much or asks too much."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch._prims_common import get_computation_dtype, is_contiguous_for_memory_format_or_false
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_CONVOLUTION = torch.ops.aten.convolution.default
_BATCH_NORM = torch.ops.aten._native_batch_norm_legit_no_training.default


def for_all_batch_sizes() -> list[Callable[[], None]]:
    """From now on; what it takes to undo it."""
    convolution = fake_impls.op_implementations_dict[_CONVOLUTION]
    return [_put(fake_impls.op_implementations_dict, _CONVOLUTION, _quiet(convolution)),
            _put(fake_impls.get_fast_op_impls(), _BATCH_NORM, batch_norm)]  # fmt: skip


def _put(table: dict[Any, Any], op: Any, function: Callable[..., Any]) -> Callable[[], None]:
    undo = functools.partial(table.__setitem__, op, table[op]) if op in table else functools.partial(table.pop, op, None)
    table[op] = function
    return undo


def _quiet(original: Callable[..., Any]) -> Callable[..., Any]:
    """The fake convolution, kept from asking which CPU library it will be: NNPACK wants 16 rows, which would cut captures in two."""

    @functools.wraps(original)
    def quiet(*args: Any, **kwargs: Any) -> Any:
        before = torch._C._get_nnpack_enabled(), torch._C._get_mkldnn_enabled()
        torch._C._set_nnpack_enabled(False)
        torch._C._set_mkldnn_enabled(False)
        try:
            return original(*args, **kwargs)
        finally:
            torch._C._set_nnpack_enabled(before[0])
            torch._C._set_mkldnn_enabled(before[1])

    return quiet


def batch_norm(mode: FakeTensorMode, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """Of a model in evaluation. torch works out what its five elementwise ops return, 16 ms of symbolic strides for each shape. Where the
    input is dense and its channels come last, and no dim of 1 leaves strides open, that is what the input is like."""
    x, _, _, mean, *_ = args
    is_plain = not kwargs and x.dim() == 4 and all(isinstance(n, int) and n > 1 for n in x.shape[1:])
    if not is_plain or not is_contiguous_for_memory_format_or_false(x, memory_format=torch.channels_last):
        with mode:
            return decomposition_table[_BATCH_NORM](*args, **kwargs)  # type: ignore[no-any-return]
    # what a backward would want; its shape and type are not the same everywhere
    is_cpu = x.device.type == "cpu"
    saved = ((0,), x.dtype) if is_cpu else (mean.shape, get_computation_dtype(x.dtype))
    made = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"),
            *(torch.empty(saved[0], dtype=saved[1], device="meta") for _ in range(2))]  # fmt: skip
    return tuple(FakeTensor(mode, each, x.device) for each in made)
