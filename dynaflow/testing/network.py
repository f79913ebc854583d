"""An emulated network: a collective that costs time and changes nothing, for machines with one device or none.

    add_collectives(model, ["*.o_proj", "*.down_proj"], latency_us=200, gbps=10)

puts an emulated all-reduce behind the named modules, where a tensor-parallel model has its real ones. Numbers do not change: each
"rank" is alone, so the sum over ranks is the value itself. On the CPU the caller sleeps (other lanes compute meanwhile); on CUDA the
current stream is held by a one-thread kernel (other streams compute meanwhile).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from dynaflow.errors import PartitionError


@torch.library.custom_op("dynaflow_testing::all_reduce", mutates_args=())
def _all_reduce(x: torch.Tensor, latency_us: float, gbps: float) -> torch.Tensor:
    """A copy of `x` after `latency_us` plus its bytes over `gbps` (10^9 bits per second; 0: infinitely fast)."""
    time.sleep(duration_us(x, latency_us, gbps) * 1e-6)
    return x.clone()


@_all_reduce.register_fake
def _(x: torch.Tensor, latency_us: float, gbps: float) -> torch.Tensor:
    return torch.empty_like(x)


@_all_reduce.register_kernel("cuda")
def _(x: torch.Tensor, latency_us: float, gbps: float) -> torch.Tensor:
    result = x.clone()
    torch.cuda._sleep(int(duration_us(x, latency_us, gbps) * _cycles_per_us(x.device.index)))
    return result


@cache
def _cycles_per_us(device: int) -> float:
    """How many cycles of `torch.cuda._sleep` make a microsecond: measured, or while a graph is being captured, as the driver says."""
    if torch.cuda.is_current_stream_capturing():
        return torch.cuda.get_device_properties(device).clock_rate / 1e3
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    cycles = 20_000_000
    torch.cuda._sleep(cycles // 10)  # the first launch loads the kernel
    start.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    return cycles / (start.elapsed_time(end) * 1e3)


def _backward(ctx, grad: torch.Tensor):
    # the gradient of a row-parallel linear's all-reduce is passed on as it is
    return grad, None, None


_all_reduce.register_autograd(_backward)

# the op itself: what graphs call, and what df.SplitFunc(all_reduce, kind="network") matches
all_reduce = torch.ops.dynaflow_testing.all_reduce.default


def duration_us(x: torch.Tensor, latency_us: float, gbps: float) -> float:
    return latency_us + (x.numel() * x.element_size() * 8e-3 / gbps if gbps else 0.0)


def _reduce_output(module: Any, args, output):
    """A forward hook: reduces the output, or the first of a tuple.

    The numbers lie on the module, and are whole: those Dynamo takes as constants; floats and other objects' numbers as inputs of the graph.
    """
    x = output[0] if isinstance(output, tuple) else output
    reduced = all_reduce(x, module.emulated_latency_ns / 1e3, module.emulated_bits_per_second / 1e9)
    return (reduced, *output[1:]) if isinstance(output, tuple) else reduced


def add_collectives(model: nn.Module, names: str | Sequence[str], *, latency_us: float = 100.0, gbps: float = 0.0) -> list[RemovableHandle]:
    """Puts an emulated all-reduce behind every module whose name matches a glob. Returns the hooks, to `.remove()` them."""
    globs = [names] if isinstance(names, str) else list(names)
    handles = []
    for glob in globs:
        found = [module for name, module in model.named_modules() if fnmatchcase(name, glob)]
        if not found:
            known = ", ".join(name for name, _ in list(model.named_modules())[1:6])
            what, why = f"no module of {type(model).__name__} matches {glob!r}.", f"its modules are {known}, ..."
            raise PartitionError(what, why=why, fix="see model.named_modules()")
        for module in found:
            module.emulated_latency_ns, module.emulated_bits_per_second = round(latency_us * 1e3), round(gbps * 1e9)
            handles.append(module.register_forward_hook(_reduce_output))
    return handles


def _register_split_rule() -> None:
    """The emulated all-reduce works row by row: the engine may split it."""
    try:
        from dynaflow.batching import register_split_rule, rowwise
    except ImportError:  # this module also serves without the engine
        return
    register_split_rule(all_reduce, rowwise)


_register_split_rule()
