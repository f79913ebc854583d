"""What cuBLAS keeps: a workspace for every stream that it runs on, for good.

torch allocates it at the first product on a stream, once per thread that issues. In a capture that is memory of the capture's own pool,
which it then holds for ever; so it is made before, and only where a product runs.

Recordings have a workspace's address in them. torch gives all workspaces back now and then (its own CUDA Graphs do), and what they lay in
would be somebody else's tensor next: so they lie in memory of their own, which nobody else is given.
"""

from __future__ import annotations

import os
import re
import threading

import torch

_PRODUCT = re.compile(r"(?:^|[.])(?:_?mm|addmm|bmm|baddbmm|mv|addmv|dot|linear|matmul|_\w*_mm|_addmm_activation)(?:[.]|$)")
_CONVOLUTION = re.compile(r"(?:^|[.])convolution(?:_backward)?(?:[.]|$)")

# streams that have one, of the thread at hand
_mine = threading.local()
# by device: where they lie
_memory: dict[int, torch.cuda.MemPool] = {}


def is_product(target: str) -> bool:
    """Whether what a kernel calls is, or may be, a product of matrices by cuBLAS. Convolutions are cuDNN's, where that is there."""
    if _PRODUCT.search(target) is not None:
        return True
    return _CONVOLUTION.search(target) is not None and not (torch.backends.cudnn.enabled and torch.backends.cudnn.is_available())


def workspace_bytes(device: torch.device) -> int:
    """Per stream: what CUBLAS_WORKSPACE_CONFIG says (":4096:8", in KiB), else torch's own choice."""
    if device.type != "cuda":
        return 0
    numbers = [int(n) for n in re.findall(r"\d+", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))]
    if numbers and len(numbers) % 2 == 0:
        return 1024 * sum(size * count for size, count in zip(numbers[::2], numbers[1::2]))
    return 32 * 2**20 if torch.cuda.get_device_capability(device)[0] >= 9 else 8 * 2**20 + 2**17


def make_workspace(stream: torch.cuda.Stream, is_recorded: bool = False) -> None:
    """Now, not in the middle of a plan. Nothing can be made for a stream while another one is captured. `is_recorded`: the stream is about
    to be captured; where torch gave the workspace back meanwhile, there is a new one then."""
    made: set[int] = _mine.__dict__.setdefault("made", set())
    if (stream.cuda_stream in made and not is_recorded) or torch.cuda.is_current_stream_capturing():
        return
    index = stream.device_index
    if index not in _memory:
        with torch.cuda.device(index):
            _memory[index] = torch.cuda.MemPool()
    with torch.cuda.stream(stream), torch.cuda.use_mem_pool(_memory[index], index):
        torch.cuda.current_blas_handle()
    made.add(stream.cuda_stream)
