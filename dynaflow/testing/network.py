"""An emulated network: collectives that move their bytes locally and take the time of a named link, on one device or none.

    add_collectives(model, ["*.o_proj", "*.down_proj"], link=NVLINK_H100, ranks=8)
    add_collectives(model, ["*.o_proj", "*.down_proj"], latency_us=200, gbps=10)

puts an emulated all-reduce behind the named modules, where a tensor-parallel model has its real ones. Shapes are those of the real
collective; every rank is taken to hold what this one holds:

    op                  result                                       bytes that a rank sends, of n ranks
    all_reduce(x)       x                                            2 (n-1)/n of x: ring, a reduce-scatter and an all-gather
    reduce_scatter(x)   the n blocks of x along `dim`, added up      (n-1)/n of x: ring
    all_gather(x)       x n times along `dim`                        (n-1) of x: ring
    all_to_all(x)       x, rows where they were                      (n-1)/n of x: to every other rank its share

Each takes latency + bytes/bandwidth. On the CPU the caller sleeps (other lanes compute meanwhile); on CUDA a kernel holds as many SMs
as the link says (`hold.py`). Whatever is measured with it is to be called emulated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dynaflow.errors import OptionError, PartitionError

# ---------------------------------------------------------------------------- links


@dataclass(frozen=True, slots=True)
class Link:
    """What a rank is connected by. Figures are per rank and direction, as collectives reach them, not line rates."""

    name: str
    latency_us: float
    # 10^9 bits per second; 0: infinitely fast
    gbps: float
    # SMs that a collective holds while it runs
    sms: int = 1

    def with_sms(self, sms: int) -> Link:
        """The same link, its collectives on as many SMs."""
        return replace(self, sms=sms)

    def duration_us(self, collective: str, num_bytes: float, ranks: int) -> float:
        """Of a collective over an input of so many bytes."""
        return _duration_us(collective, num_bytes, self.latency_us, self.gbps, ranks)


# Latencies are assumptions of ours: what a small message takes inside a CUDA Graph, rounded.
#
# NVLink 4 (H100, H200): 18 links of 25 GB/s each way are 450 GB/s by the vendor's sheet. NCCL's maintainer gives 370 GB/s after the
# protocol's share, the bus bandwidth of ring collectives (github.com/NVIDIA/nccl-tests/issues/212; a peer-to-peer copy gets 380:
# NVIDIA/nccl#1264). SMs: NCCL's in-switch all-reduce runs 16 channels, one CTA each, on this chip (NVLS_NCHANNELS_SM90 in nvls.cc).
NVLINK_H100 = Link("NVLink-H100", latency_us=10.0, gbps=8 * 370, sms=16)
# NVLink 5 (B200): 18 links of 50 GB/s each way are 900 GB/s by the vendor's sheet; the same share as above is assumed to be left of it.
# (An NVL72 rack's all-reduce shows 840 GB/s of bus bandwidth, in-switch: coreweave/nccl-tests#43.) SMs: NVLS_NCHANNELS_SM100_NVL.
NVLINK_B200 = Link("NVLink-B200", latency_us=10.0, gbps=8 * 740, sms=24)
# PCIe 5 x16: 64 GB/s each way by the standard; 8 GPUs without NVLink show 28 GB/s of bus bandwidth, 4 show 35 (NVIDIA/nccl#1639).
# Latency: small messages of 8 such GPUs take 40 us (NVIDIA/nccl#1530). SMs: an assumption, a few channels fill such a link.
PCIE5 = Link("PCIe5", latency_us=40.0, gbps=8 * 28, sms=4)
# InfiniBand NDR: 50 GB/s each way by the standard; DeepEP states 43 GB/s for dispatch and combine over 16 ranks on such a card, with
# 24 SMs (github.com/deepseek-ai/DeepEP, README and tests).
IB_400G = Link("400G-IB", latency_us=20.0, gbps=8 * 43, sms=24)

LINKS = {link.name: link for link in (NVLINK_H100, NVLINK_B200, PCIE5, IB_400G)}

_SENT: dict[str, Callable[[float, int], float]] = {
    "all_reduce": lambda size, n: 2 * size * (n - 1) / n,
    "reduce_scatter": lambda size, n: size * (n - 1) / n,
    "all_gather": lambda size, n: size * (n - 1),
    "all_to_all": lambda size, n: size * (n - 1) / n,
}


def wire_bytes(collective: str, num_bytes: float, ranks: int) -> float:
    """What one of `ranks` ranks sends, and receives, for a collective over an input of so many bytes."""
    if ranks < 1:
        raise OptionError(f"ranks={ranks} is no number of ranks.", fix="give 1 or more")
    return _SENT[collective](num_bytes, ranks)


def _duration_us(collective: str, num_bytes: float, latency_us: float, gbps: float, ranks: int) -> float:
    return latency_us + (wire_bytes(collective, num_bytes, ranks) * 8e-3 / gbps if gbps else 0.0)


def duration_us(x: Tensor, latency_us: float, gbps: float, ranks: int = 2, collective: str = "all_reduce") -> float:
    """Of a collective over `x`. (An all-reduce of two ranks sends as many bytes as x has.)"""
    return _duration_us(collective, x.numel() * x.element_size(), latency_us, gbps, ranks)


# ---------------------------------------------------------------------------- ops
# Numbers, not a Link, are their arguments: Dynamo takes numbers for constants, and graphs print them.


def _run(name: str, x: Tensor, dim: int, latency_us: float, gbps: float, ranks: int, sms: int) -> Tensor:
    """Wait, then the result; or, on CUDA, both in one kernel."""
    shape, time_us = _shape(name, x, dim, ranks), duration_us(x, latency_us, gbps, ranks, name)
    num_read, num_written = (ranks if name == which else 1 for which in ("reduce_scatter", "all_gather"))
    if x.is_cuda:
        from dynaflow.testing.hold import hold  # it needs Triton

        return hold(x, shape, dim, time_us, sms, num_read, num_written)
    time.sleep(time_us * 1e-6)
    if num_read > 1:
        wide = x.dtype if x.dtype == torch.float64 else torch.float32
        return reduce(torch.add, (block.to(wide) for block in x.chunk(ranks, dim))).to(x.dtype).contiguous()
    return torch.cat([x] * num_written, dim) if num_written > 1 else x.clone(memory_format=torch.contiguous_format)


def _shape(name: str, x: Tensor, dim: int, ranks: int) -> tuple[int, ...]:
    shape = list(x.shape)
    if name == "all_gather":
        shape[dim] = shape[dim] * ranks
    if name == "reduce_scatter":
        torch._check(shape[dim] % ranks == 0, lambda: f"reduce_scatter: {shape[dim]} rows cannot be divided among {ranks} ranks")
        shape[dim] = shape[dim] // ranks
    return tuple(shape)


@torch.library.custom_op("dynaflow_testing::all_reduce", mutates_args=())
def _all_reduce(x: Tensor, latency_us: float, gbps: float, ranks: int = 2, sms: int = 1) -> Tensor:
    return _run("all_reduce", x, 0, latency_us, gbps, ranks, sms)


@torch.library.custom_op("dynaflow_testing::all_to_all", mutates_args=())
def _all_to_all(x: Tensor, latency_us: float, gbps: float, ranks: int = 2, sms: int = 1) -> Tensor:
    return _run("all_to_all", x, 0, latency_us, gbps, ranks, sms)


@torch.library.custom_op("dynaflow_testing::all_gather", mutates_args=())
def _all_gather(x: Tensor, latency_us: float, gbps: float, ranks: int = 2, sms: int = 1, dim: int = 0) -> Tensor:
    return _run("all_gather", x, dim, latency_us, gbps, ranks, sms)


@torch.library.custom_op("dynaflow_testing::reduce_scatter", mutates_args=())
def _reduce_scatter(x: Tensor, latency_us: float, gbps: float, ranks: int = 2, sms: int = 1, dim: int = 0) -> Tensor:
    return _run("reduce_scatter", x, dim, latency_us, gbps, ranks, sms)


# the ops themselves: what graphs call, and what df.SplitFunc(all_reduce, kind="network") matches
all_reduce = torch.ops.dynaflow_testing.all_reduce.default
all_to_all = torch.ops.dynaflow_testing.all_to_all.default
all_gather = torch.ops.dynaflow_testing.all_gather.default
reduce_scatter = torch.ops.dynaflow_testing.reduce_scatter.default

OPS = {"all_reduce": all_reduce, "all_to_all": all_to_all, "all_gather": all_gather, "reduce_scatter": reduce_scatter}


def _fake(name: str) -> Callable[..., Tensor]:
    def fake(x: Tensor, latency_us: float, gbps: float, ranks: int = 2, sms: int = 1, dim: int = 0) -> Tensor:
        return x.new_empty(_shape(name, x, dim, ranks))

    return fake


def _keep(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.numbers = inputs[1:]


def _backward(name: str) -> Callable[..., Any]:
    """The gradient goes the other way, over the same link; that of a row-parallel linear's all-reduce is passed on as it is."""

    def backward(ctx: Any, grad: Tensor) -> Any:
        back = {"all_to_all": all_to_all, "all_gather": reduce_scatter, "reduce_scatter": all_gather}.get(name)
        return (grad if back is None else back(grad, *ctx.numbers), *(None for _ in ctx.numbers))

    return backward


for _name, _op in zip(OPS, (_all_reduce, _all_to_all, _all_gather, _reduce_scatter), strict=True):
    _op.register_fake(_fake(_name))
    _op.register_autograd(_backward(_name), setup_context=_keep)


# ---------------------------------------------------------------------------- in a model


def _set_link(module: Any, link: Link, ranks: int) -> None:
    module.emulated_latency_ns, module.emulated_bits_per_second = round(link.latency_us * 1e3), round(link.gbps * 1e9)
    module.emulated_ranks, module.emulated_sms = ranks, link.sms


def _numbers(module: Any) -> tuple[float, float, int, int]:
    """What `_set_link` set, as arguments of an op. They lie on the module, and are whole: those Dynamo takes as constants; floats and
    other objects' numbers as inputs of the graph."""
    return module.emulated_latency_ns / 1e3, module.emulated_bits_per_second / 1e9, module.emulated_ranks, module.emulated_sms


def _reduce_output(module: Any, args, output):
    """A forward hook: reduces the output, or the first of a tuple."""
    x = output[0] if isinstance(output, tuple) else output
    reduced = all_reduce(x, *_numbers(module))
    return (reduced, *output[1:]) if isinstance(output, tuple) else reduced


def find_link(link: Link | str) -> Link:
    """By name, or as it is."""
    if isinstance(link, Link):
        return link
    if link not in LINKS:
        raise OptionError(f"unknown link {link!r}.", fix=f"use {', '.join(map(repr, LINKS))} or a Link of your own")
    return LINKS[link]


class Collective(nn.Module):
    """An emulated collective as a module of a model, so that rules can name it: `Collective("all_to_all", NVLINK_H100, ranks=8)`."""

    def __init__(self, name: str, link: Link | str, ranks: int, dim: int = 0):
        super().__init__()
        self.collective, self.dim = name, dim
        _set_link(self, find_link(link), ranks)

    def forward(self, x: Tensor) -> Tensor:
        dims = (self.dim,) if self.collective in ("all_gather", "reduce_scatter") else ()
        return OPS[self.collective](x, *_numbers(self), *dims)


def add_collectives(
    model: nn.Module, names: str | Sequence[str], *, latency_us: float | None = None, gbps: float | None = None,
    link: Link | str | None = None, ranks: int = 2,
) -> list[RemovableHandle]:  # fmt: skip
    """Puts an emulated all-reduce behind every module whose name matches a glob. Returns the hooks, to `.remove()` them.

    It is of `ranks` ranks over `link`, or over one of `latency_us` (100 where nothing is said) and `gbps` (10^9 bits per second; 0, where
    nothing is said: infinitely fast). Two ranks send as many bytes as the output has.
    """
    if link is not None and (latency_us is not None or gbps is not None):
        raise OptionError("link= states latency and bandwidth.", fix="give link=, or latency_us= and gbps=")
    given = Link("given", 100.0 if latency_us is None else latency_us, gbps or 0.0) if link is None else find_link(link)
    globs = [names] if isinstance(names, str) else list(names)
    handles = []
    for glob in globs:
        found = [module for name, module in model.named_modules() if fnmatchcase(name, glob)]
        if not found:
            known = ", ".join(name for name, _ in list(model.named_modules())[1:6])
            what, why = f"no module of {type(model).__name__} matches {glob!r}.", f"its modules are {known}, ..."
            raise PartitionError(what, why=why, fix="see model.named_modules()")
        for module in found:
            _set_link(module, given, ranks)
            handles.append(module.register_forward_hook(_reduce_output))
    return handles


def _register_split_rules() -> None:
    """Rows stay apart in all of them, unless the batch is the very dim along which ranks exchange."""
    try:
        from dynaflow.batching import register_split_rule
    except ImportError:  # this module also serves without the engine
        return

    def keeps(call: Any) -> Any:
        return call.axis(call["x"])

    def along(call: Any) -> Any:
        axis = call.axis(call["x"])
        return "exchanges rows between ranks" if axis == call["dim"] % call["x"].ndim else axis

    for op in (all_reduce, all_to_all):
        register_split_rule(op, keeps)
    for op in (all_gather, reduce_scatter):
        register_split_rule(op, along)


_register_split_rules()


# ---------------------------------------------------------------------------- an all-reduce that adds and norms on the way


def _all_reduce_add_norm(
    x: Tensor, numbers: Sequence[Any], residual: Tensor, weight: Tensor, eps: float, total: Tensor, normed: Tensor, num_ctas: int | None
) -> None:
    """The kernel that TokenWeave writes for a real link, emulated: the all-reduce's time and SMs, and add and norm meanwhile. A real rank
    adds and norms its share of the rows, and gets the others' from the link; this one does all of them, in the same time or longer."""
    from dynaflow.testing.hold import hold_norm  # it needs Triton

    def run(latency_us: float, gbps: float, ranks: int = 2, sms: int = 1) -> None:
        hold_norm(x, residual, weight, eps, total, normed, duration_us(x, latency_us, gbps, ranks), num_ctas or sms)

    run(*numbers)


def _register_functions() -> None:
    try:
        from dynaflow.functions.add_rms_norm import register_reduce_add_norm
    except ImportError:  # this module also serves without the engine
        return
    register_reduce_add_norm(all_reduce, _all_reduce_add_norm)


_register_functions()
