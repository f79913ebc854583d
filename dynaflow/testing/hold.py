"""The CUDA side of the emulated network: one kernel that moves the bytes and holds k SMs until the time is over.

It is launched with k CTAs of 512 threads, on the current stream, like any other kernel: a CUDA Graph records it. Each CTA
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
    with torch.cuda.device(x.device):
        _hold[(sms,)](
            x, out, out if where is None else where, num, inner, round(hold_us * 1e3), NUM_READ=num_read, NUM_WRITTEN=num_written, SUM=wide,
            HAS_WHERE=where is not None, BLOCK=BLOCK_BYTES // x.element_size(), num_warps=NUM_WARPS)  # fmt: skip
    return out
