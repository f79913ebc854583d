"""Residual add and RMS norm in one pass over the rows. Imported where there is a GPU."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


def launch(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, total: torch.Tensor, normed: torch.Tensor, eps: float, num_ctas: int
) -> None:
    """All are contiguous. Each of `num_ctas` CTAs takes every num_ctas-th row, and holds one row in registers."""
    size = x.shape[-1]
    num_rows = x.numel() // size
    if not num_rows:
        return
    block = triton.next_power_of_2(size)
    num_warps = 4 if block <= 2048 else 8 if block <= 8192 else 16
    _kernel[(min(num_ctas, num_rows),)](x, residual, weight, total, normed, num_rows, size, eps, BLOCK=block, num_warps=num_warps)


@triton.jit
def _kernel(x, residual, weight, total, normed, num_rows, size, eps, BLOCK: tl.constexpr) -> Any:  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    is_in = at < size
    w = tl.load(weight + at, mask=is_in, other=0.0)
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        here = tl.cast(row, tl.int64) * size + at
        a = tl.load(x + here, mask=is_in, other=0.0).to(tl.float32)
        b = tl.load(residual + here, mask=is_in, other=0.0).to(tl.float32)
        # rounded as the add alone rounds it: the norm is that of what is stored
        s = (a + b).to(total.dtype.element_ty)
        tl.store(total + here, s, mask=is_in)
        f = s.to(tl.float32)
        n = (f * tl.rsqrt(tl.sum(f * f, 0) / size + eps)).to(normed.dtype.element_ty)
        tl.store(normed + here, (n * w).to(normed.dtype.element_ty), mask=is_in)
