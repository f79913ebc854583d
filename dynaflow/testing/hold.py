"""The CUDA side of the emulated network: kernels that move the bytes and hold k SMs until the time is over.

Each is launched with k CTAs of 512 threads, on the current stream, like any other kernel: a CUDA Graph records it. Each CTA
 1. reads the device's clock (`%globaltimer`, nanoseconds, the same for all SMs): its deadline is `hold_ns` from then,
 2. moves its share of the elements,
 3. reads the clock until the deadline has passed.
So a CTA that gets its SM late ends late, as a channel of a real collective does, and moving is part of the time, not added to it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer, smid

# 512 threads per CTA (NCCL has 512 to 640). Idle SMs are filled breadth first, so that k CTAs are on k SMs. What needs most of an SM's
# registers or shared memory, as matrix products do, finds no room beside one; a small elementwise CTA may.
NUM_WARPS = 16
# what a CTA has on its way at once: few CTAs must move as much as a fast link does
BLOCK_BYTES = 1 << 16


@triton.jit(do_not_specialize=["hold_ns"])
def _hold(
    x_ptr, out_ptr, where_ptr, num, inner, hold_ns,
    NUM_READ: tl.constexpr, NUM_WRITTEN: tl.constexpr, SUM: tl.constexpr, HAS_WHERE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x is [num/inner, NUM_READ, inner], out is [num/inner, NUM_WRITTEN, inner]: the sum over x's middle dim, as often as out has it."""
    deadline = globaltimer() + hold_ns
    cta = tl.program_id(0)
    for start in range(cta * BLOCK, num, tl.num_programs(0) * BLOCK):
        at = tl.cast(start, tl.int64) + tl.arange(0, BLOCK)
        mask = at < num
        if NUM_READ == 1 and NUM_WRITTEN == 1:
            source, target = at, at
        else:
            source = at // inner * (inner * NUM_READ) + at % inner
            target = at // inner * (inner * NUM_WRITTEN) + at % inner
        value = tl.load(x_ptr + source, mask=mask)
        if NUM_READ > 1:
            value = value.to(SUM)
            for i in tl.static_range(1, NUM_READ):
                value += tl.load(x_ptr + source + i * inner, mask=mask).to(SUM)
        for i in tl.static_range(NUM_WRITTEN):
            tl.store(out_ptr + target + i * inner, value.to(out_ptr.dtype.element_ty), mask=mask)
    if HAS_WHERE:
        tl.store(where_ptr + cta, smid())
    now = globaltimer()
    while now < deadline:
        now = globaltimer()


def hold(
    x: torch.Tensor, shape: tuple[int, ...], dim: int, hold_us: float, sms: int, num_read: int = 1, num_written: int = 1,
    where: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """A tensor of `shape`: x's `num_read` blocks along `dim` added up, `num_written` times; `sms` SMs are held for `hold_us` or longer.

    `where` gets the number of the SM that each CTA ran on.
    """
    x = x.contiguous()
    out = torch.empty(shape, dtype=x.dtype, device=x.device)
    num, inner = x.numel() // num_read, x.shape[dim:].numel() // num_read
    wide = tl.float64 if x.dtype == torch.float64 else tl.float32
    with torch.cuda.device_of(x):
        _hold[(sms,)](
            x, out, out if where is None else where, num, inner, round(hold_us * 1e3), NUM_READ=num_read, NUM_WRITTEN=num_written, SUM=wide,
            HAS_WHERE=where is not None, BLOCK=BLOCK_BYTES // x.element_size(), num_warps=NUM_WARPS)  # fmt: skip
    return out


@triton.jit(do_not_specialize=["hold_ns"])
def _hold_norm(
    x_ptr, residual_ptr, weight_ptr, total_ptr, normed_ptr, num_rows, size, eps, hold_ns, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """As an all-reduce of x, with the residual add and the RMS norm of the sum on the way: rounded where the ops round."""
    deadline = globaltimer() + hold_ns
    at = tl.arange(0, BLOCK)
    is_in = at < size
    w = tl.load(weight_ptr + at, mask=is_in, other=0.0)
    for first in range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS):
        rows = first + tl.arange(0, ROWS)
        here = rows.to(tl.int64)[:, None] * size + at[None, :]
        mask = (rows < num_rows)[:, None] & is_in[None, :]
        a = tl.load(x_ptr + here, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(residual_ptr + here, mask=mask, other=0.0).to(tl.float32)
        s = (a + b).to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + here, s, mask=mask)
        f = s.to(tl.float32)
        n = (f * tl.rsqrt(tl.sum(f * f, 1) / size + eps)[:, None]).to(normed_ptr.dtype.element_ty)
        tl.store(normed_ptr + here, (n * w[None, :]).to(normed_ptr.dtype.element_ty), mask=mask)
    now = globaltimer()
    while now < deadline:
        now = globaltimer()


def hold_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, total: torch.Tensor, normed: torch.Tensor, hold_us: float,
    sms: int,
) -> None:  # fmt: skip
    """x + residual into `total`, its RMS norm times weight into `normed`; `sms` SMs are held for `hold_us` or longer. All contiguous."""
    size = x.shape[-1]
    block = triton.next_power_of_2(size)
    rows = max(1, BLOCK_BYTES // 2 // (block * x.element_size()))
    with torch.cuda.device_of(x):
        _hold_norm[(sms,)](x, residual, weight, total, normed, x.numel() // size, size, eps, round(hold_us * 1e3), ROWS=rows, BLOCK=block,
                           num_warps=NUM_WARPS)  # fmt: skip
