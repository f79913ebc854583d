"""What cuBLAS keeps: a workspace for every stream that it runs on, for good.

torch allocates it at the first product on a stream, once per thread that issues. In a capture that is memory of the capture's own pool,
which it then holds for ever; so it is made before, and only where a product runs. cuBLASLt may have one of its own.

Recordings have a workspace's address in them. torch gives all workspaces back now and then (its own CUDA Graphs do), and what they lay in
would be somebody else's tensor next: so they lie in memory of their own, which nobody else is given.
"""

from __future__ import annotations

import os
import re
import threading
from contextlib import nullcontext
from typing import Any

import torch

_PRODUCT = re.compile(r"(?:^|[.])(?:_?mm|addmm|bmm|baddbmm|mv|addmv|dot|linear|matmul|_\w*_mm|_addmm_activation)(?:[.]|$)")
_CONVOLUTION = re.compile(r"(?:^|[.])convolution(?:_backward)?(?:[.]|$)")

_lock = threading.Lock()
# by device: where they lie
_memory: dict[int, torch.cuda.MemPool] = {}


def is_product(target: str) -> bool:
    """Whether what a kernel calls is, or may be, a product of matrices by cuBLAS: all that Inductor leaves to libraries under names of its
    own is, but for convolutions, which are cuDNN's where that is there."""
    if _CONVOLUTION.search(target) is not None:
        return not (torch.backends.cudnn.enabled and torch.backends.cudnn.is_available())
    return target.startswith("extern_kernels.") or _PRODUCT.search(target) is not None


def workspace_bytes(device: torch.device) -> int:
    """Per stream: what torch says, where it does; else what CUBLAS_WORKSPACE_CONFIG says (":4096:8", in KiB), or torch's own choice."""
    if device.type != "cuda":
        return 0
    says = getattr(torch.backends.cuda, "cublas_workspace_size", None)
    if says is not None and torch.cuda.is_available():
        return int(says())
    numbers = [int(n) for n in re.findall(r"\d+", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))]
    if numbers and len(numbers) % 2 == 0:
        return 1024 * sum(size * count for size, count in zip(numbers[::2], numbers[1::2]))
    return 32 * 2**20 if torch.cuda.get_device_capability(device) == (9, 0) else 8 * 2**20 + 2**17


def make_workspace(stream: torch.cuda.Stream, is_recorded: bool = False) -> None:
    """Now, not in the middle of a plan; where torch gave it back meanwhile, anew. Nothing can be made for a stream while another one is
    captured. `is_recorded`: the stream is about to be captured; cuBLASLt's is made, too."""
    if torch.cuda.is_current_stream_capturing():
        return
    index = stream.device_index
    with _lock, torch.cuda.stream(stream), _own_memory(index):  # torch refuses memory that another thread allocates from
        torch.cuda.current_blas_handle()
        if is_recorded and _may_multiply():
            ones = torch.ones(16, 16, device=stream.device)
            with torch.no_grad():
                torch.addmm(ones[0], ones, ones)  # with a bias it is cuBLASLt's


def _own_memory(index: int) -> Any:
    if torch.cuda.get_allocator_backend() != "native":
        return nullcontext()  # it knows no memory of one's own
    if index not in _memory:
        with torch.cuda.device(index):
            _memory[index] = torch.cuda.MemPool()
    return torch.cuda.use_mem_pool(_memory[index], index)


def _may_multiply() -> bool:
    """Not where torch would refuse it."""
    return not torch.are_deterministic_algorithms_enabled() or "CUBLAS_WORKSPACE_CONFIG" in os.environ
