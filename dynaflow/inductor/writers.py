"""Extern kernels that allocate their result, as functions that write it where they are told.

Contract: `writer` gives a function that takes the destination, then what the call takes; it leaves there, bit for bit, what the call
would return, by the same kernel and without a copy. None where that is not sure: the call runs as it is. A destination has the shape,
strides and dtype of what the call returned when it was looked at.

1. Calls in `WRITERS`: each is asked about what the call takes.
2. aten ops that have a kernel of their own for `out=`.
"""

from __future__ import annotations

from typing import Any, Callable, Mapping, Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dynaflow.inductor.redirect import out_overload
from dynaflow.runtime.program import Geometry

Write = Callable[..., None]


def writer(target: str, taken: Callable[[], tuple[Sequence[Any], Mapping[str, Any]]], result: Geometry) -> Write | None:
    """`taken`: what the call takes, by position and by name, with a Geometry for every tensor."""
    if target in WRITERS:
        args, kwargs = taken()
        return WRITERS[target](result, *args, **kwargs)
    name = out_overload(target, result.device.type.upper())
    if name is None:
        return None
    overload = getattr(getattr(torch.ops.aten, name.split(".")[3]), name.split(".")[4])
    return lambda out, *args, **kwargs: overload(*args, **kwargs, out=out)


def cudnn_convolution(
    result: Geometry, input: Geometry, weight: Geometry, bias: Geometry | None, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int,
) -> Write | None:  # fmt: skip
    """What torch's convolution comes down to where it chooses cuDNN, has no bias to add and nothing to bring into another format."""
    if result.device.type != "cuda" or bias is not None or transposed or len(input.shape) < 4:
        return None
    with FakeTensorMode():
        x, w, y = (torch.empty_strided(g.shape, g.stride, dtype=g.dtype, device=g.device) for g in (input, weight, result))
        backend = torch._C._select_conv_backend(x, w, None, stride, padding, dilation, transposed, output_padding, groups)
        if backend.name != "Cudnn":
            return None
        like = torch._C._conv_determine_backend_memory_format(x, w, backend)
        is_as_it_is = all(t.is_contiguous(memory_format=like) for t in (x, w, y))
    return _write_convolution if is_as_it_is else None


def _write_convolution(
    out: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, bias: None, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int,
) -> None:  # fmt: skip
    """As aten does it, with what the user has set by now."""
    cudnn: Any = torch.backends.cudnn
    if not cudnn.enabled:
        out.copy_(torch.convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups))
        return
    is_deterministic = cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
    torch.ops.aten.cudnn_convolution.out(input, weight, padding, stride, dilation, groups, cudnn.benchmark, is_deterministic,
                                         cudnn.conv.fp32_precision == "tf32", out=out)  # fmt: skip


# what a wrapper calls -> who says how it is told where to write: given the result and what the call takes
WRITERS: dict[str, Callable[..., Write | None]] = {
    "extern_kernels.convolution": cudnn_convolution,
    "torch.ops.aten.convolution.default": cudnn_convolution,
}
