"""What kernels compute where CUDA is on the host: torch's ops by torch's own CPU kernels, Triton's by its interpreter.

A pytest plugin, for a process that was started under the library (`library.py`); for other programs see `site/`. Device memory is the
host's: an op gets the same memory as CPU tensors. What is launched on a stream that captures is kept, and computed by every replay.
Random numbers are the CPU's.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from torch._inductor.runtime import triton_compat, triton_helpers
from torch._inductor.runtime.triton_heuristics import CachingAutotuner, GridExpr
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, TensorHandle

from dynaflow.testing import hold

DEVICE = torch.device("cuda", 0)

_library = ctypes.CDLL("libcuda.so.1")
_Kernel = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_library.host_cuda_launch.argtypes = [_Kernel, ctypes.c_void_p, ctypes.c_void_p]
_library.host_cuda_is_capturing.argtypes = [ctypes.c_void_p]
_library.host_cuda_not_computed.restype = ctypes.c_char_p
# kernels of graphs, for good: a graph may be replayed until the process ends
_recorded: list[Any] = []
# what kernels raised: a launch cannot, so `every_kernel_is_computed` does
failures: list[str] = []


def fail(text: str) -> None:
    """To the file that the environment names, too: programs are ended in all kinds of ways."""
    failures.append(text)
    if path := os.environ.get("CUDA_ON_HOST_FAILURES"):
        with open(path, "a") as file:
            file.write(f"== {' '.join(sys.orig_argv)[:300]}\n{text}\n")


def launch(compute: Callable[[], Any], stream: int | None = None) -> None:
    stream = torch._C._cuda_getCurrentRawStream(0) if stream is None else stream

    def call(_: Any) -> None:
        try:
            with torch.no_grad(), torch._C.DisableTorchFunction():  # whoever launches may have another device as the default
                compute()
        except Exception:
            fail(traceback.format_exc())

    kernel = _Kernel(call)
    if _library.host_cuda_is_capturing(stream):
        _recorded.append(kernel)
    if status := _library.host_cuda_launch(kernel, None, stream):
        raise RuntimeError(f"CUDA error {status}: a kernel cannot be launched")


def not_computed() -> str:
    """A kernel that was launched since this was asked last, and that nobody computed; empty where there was none."""
    return _library.host_cuda_not_computed().decode()


def on_host(value: Any) -> Any:
    """The same memory as a CPU tensor. It does not keep the memory: a kernel does not either."""
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if isinstance(value, torch.Generator):
        return None
    if not isinstance(value, torch.Tensor) or not value.is_cuda:
        return value
    storage, size = value.untyped_storage(), value.element_size()
    num_bytes = storage.nbytes() // size * size
    if not num_bytes or not value.numel():
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    memory = torch.frombuffer((ctypes.c_char * num_bytes).from_address(storage.data_ptr()), dtype=torch.uint8)
    found = memory.view(value.dtype).as_strided(value.shape, value.stride(), value.storage_offset())
    found = found.conj() if value.is_conj() else found
    return torch._neg_view(found) if value.is_neg() else found


def like(value: Any) -> Any:
    """Memory on the device for a result."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=DEVICE) if isinstance(value, torch.Tensor) else value


def on_device(op: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Memory for results that lie as this op's do on a device."""
    with FakeTensorMode() as mode:
        args, kwargs = pytree.tree_map_only(torch.Tensor, mode.from_tensor, (args, kwargs))
        found = op(*args, **kwargs)
    made = (v if not isinstance(v, torch.Tensor) or v.is_cuda else torch.empty_strided(v.shape, v.stride(), dtype=v.dtype) for v in found)
    return tuple(like(v) if isinstance(v, torch.Tensor) and v.is_cuda else v for v in made)


# ---------------------------------------------------------------------------- torch's ops

# They make tensors, or look at them: nothing is launched.
_NO_KERNEL = """empty.memory_format empty_strided as_strided view view_as_real view_as_complex _reshape_alias set_.source_Storage unfold
    set_.source_Storage_storage_offset set_.source_Tensor set_ resize_ resize_as_ alias record_stream is_set_to is_pinned _pin_memory
    _fused_sdp_choice _local_scalar_dense cudnn_is_acceptable""".split()
# Ops that a CPU has under other names, or not at all.
_NOT_ON_CPUS = ("cudnn", "histc", "miopen", "flash", "efficient", "nccl", "sparse", "nested", "_fused_", "quant", "jagged")


def _computed(op: Any) -> Callable[..., Any]:
    """An op as a CPU computes it."""
    schema = op._schema
    names = [a.name for a in schema.arguments]
    changed = [i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]

    is_tensor = [isinstance(a.type, torch.TensorType) for a in schema.arguments]

    def given(args: Any, kwargs: Any) -> tuple[Any, Any]:
        host_args, host_kwargs = pytree.tree_map(on_host, (args, kwargs))
        # a number in a tensor's place, which comes here as the number that it was
        host_args = tuple(torch.tensor(v) if wanted and isinstance(v, (int, float)) else v for v, wanted in zip(host_args, is_tensor))
        return host_args, host_kwargs | ({"generator": None} if "generator" in host_kwargs else {})

    def make(*args: Any, **kwargs: Any) -> Any:
        a, k = given(args, kwargs)
        results = op(*a, **k)  # computed once for its shapes, and again by the kernel where that is recorded
        leaves, spec = pytree.tree_flatten(results)
        made = [like(v) for v in leaves]
        places = [on_host(v) for v in made]
        is_recorded, first = torch.cuda.is_current_stream_capturing(), [leaves]
        del results, leaves

        def kernel() -> None:
            values = first.pop() if first and not is_recorded else pytree.tree_leaves(op(*a, **k))
            for place, value in zip(places, values, strict=True):
                if isinstance(place, torch.Tensor):
                    place.copy_(value)

        launch(kernel)
        return pytree.tree_unflatten(made, spec)

    def change(*args: Any, **kwargs: Any) -> Any:
        targets = {i: args[i] if i < len(args) else kwargs.get(names[i]) for i in changed}
        tensors = [t for t in pytree.tree_leaves(list(targets.values())) if isinstance(t, torch.Tensor)]
        a, k = given(args, kwargs)
        if any(t.is_cuda and not t.numel() for t in tensors):  # out=: it takes its shape from the result
            made = [v for v in pytree.tree_leaves(op(*a, **k)) if isinstance(v, torch.Tensor)]
            for tensor, result in zip(tensors, made):
                if tensor.shape != result.shape:
                    tensor.resize_(result.shape).as_strided_(result.shape, result.stride())
            a, k = given(args, kwargs)
        if not all(t.is_cuda for t in tensors) and not _named(op, args, kwargs).get("non_blocking"):
            torch.cuda.current_stream().synchronize()  # to the host: the caller waits
        launch(lambda: op(*a, **k))
        of = {name: t for i, t in targets.items() for name in schema.arguments[i].alias_info.before_set}
        found = [of[next(iter(r.alias_info.before_set))] for r in schema.returns if r.alias_info is not None]
        return None if not schema.returns else found[0] if len(found) == 1 else tuple(found)

    return change if changed else make


def _item(x: torch.Tensor) -> Any:
    torch.cuda.current_stream().synchronize()
    return on_host(x).item()


def _convolution(x: Any, weight: Any, padding: Any, stride: Any, dilation: Any, groups: int, *_: Any, out: Any = None) -> torch.Tensor:
    given = (on_host(x), on_host(weight), None, stride, padding, dilation, False, [0] * len(stride), groups)
    out = like(torch.convolution(*given)) if out is None else out
    place = on_host(out)
    launch(lambda: place.copy_(torch.convolution(*given)))
    return out


def _histc(x: Any, bins: int = 100, low: Any = 0, high: Any = 0) -> torch.Tensor:
    """Of whole numbers too."""
    given, out = on_host(x), torch.empty(bins, dtype=x.dtype, device=DEVICE)
    place = on_host(out)
    launch(lambda: place.copy_(torch.histc(given.double(), bins, low, high)))
    return out


def _batch_norm(*args: Any) -> tuple[Any, ...]:
    made = on_device(torch.ops.aten.cudnn_batch_norm.default, args, {})
    given, places = [on_host(v) for v in args], [on_host(v) for v in made]

    def kernel() -> None:
        for place, value in zip(places, torch.ops.aten.native_batch_norm(*given)):
            place.copy_(value)

    launch(kernel)
    return made


def _rms_norm(x: Any, shape: Any, weight: Any, eps: float | None) -> tuple[Any, Any]:
    wide, scale = on_host(x), None if weight is None else on_host(weight)
    dims = list(range(-len(shape), 0))
    factors = torch.empty((*x.shape[: x.dim() - len(shape)], *[1] * len(shape)), dtype=torch.float32, device=DEVICE)
    made = torch.empty_like(x, memory_format=torch.contiguous_format), factors
    out, inverse = map(on_host, made)

    def kernel() -> None:
        inverse.copy_(torch.rsqrt(wide.float().pow(2).mean(dims, keepdim=True) + (torch.finfo(x_dtype).eps if eps is None else eps)))
        out.copy_(wide.float() * inverse if scale is None else wide.float() * inverse * scale.float())

    x_dtype = x.dtype
    del x, weight
    launch(kernel)
    return made


def _named(op: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    defaults = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}
    return {**defaults, **dict(zip((a.name for a in op._schema.arguments), args)), **kwargs}


def _attention(op: Any) -> Callable[..., Any]:
    """(Nothing is dropped, and what only the backward pass of a GPU reads is not computed.)"""
    is_backward = "backward" in op._schema.name

    def call(*args: Any, **kwargs: Any) -> Any:
        made, named = on_device(op, args, kwargs), _named(op, args, kwargs)
        *given, bias, grad = (on_host(named.get(name)) for name in ("query", "key", "value", "attn_bias", "grad_out"))
        grad = on_host(named["grad_out_"]) if grad is None and is_backward else grad
        bias = None if bias is None or not bias.numel() else bias
        more = {"is_causal": named["is_causal"], "scale": named.get("scale"), "enable_gqa": given[0].shape[1] != given[1].shape[1]}
        places = [on_host(v) for v in made[:3]]
        del named

        def kernel() -> None:
            if is_backward:
                values = _attention_gradients(grad, *given, bias, **more)
            else:
                values = (torch.nn.functional.scaled_dot_product_attention(*given, bias, **more),)
            for place, value in zip(places, values):
                place.copy_(value)

        launch(kernel)
        return made

    return call


def _attention_gradients(grad: Any, q: Any, k: Any, v: Any, bias: Any, is_causal: bool, scale: float | None, enable_gqa: bool) -> list[Any]:
    """By hand: below autograd, where ops are computed, there is none."""
    num_groups, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5 if scale is None else scale
    grad, q, k, v = grad.float(), q.float(), *(x.float().repeat_interleave(num_groups, 1) for x in (k, v))
    scores = q @ k.mT * scale
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    weights = torch.softmax(scores if bias is None else scores + bias, -1)
    inner = grad @ v.mT
    inner = weights * (inner - (inner * weights).sum(-1, keepdim=True)) * scale
    each = inner.mT @ q, weights.mT @ grad
    return [inner @ k, *(x.unflatten(1, (-1, num_groups)).sum(2) for x in each)]


def _install_ops(library: torch.library.Library) -> None:
    known = torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
    for name in (*(n.removeprefix("aten::") for n in known if n.startswith("aten::")), "copy_"):
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if op is not None and name not in _NO_KERNEL and not any(word in name for word in _NOT_ON_CPUS):
            library.impl(name, _computed(op), "CUDA")
    others = {
        "_local_scalar_dense": _item, "cudnn_convolution": _convolution, "cudnn_convolution.out": _convolution,
        "cudnn_batch_norm": _batch_norm, "_fused_rms_norm": _rms_norm, "histc": _histc, "_fused_sdp_choice": lambda *_, **__: 0,
    }  # fmt: skip
    for name, function in others.items():
        library.impl(name, function, "CUDA")
    for kind in ("cudnn", "flash", "efficient"):
        for name in (f"_scaled_dot_product_{kind}_attention", f"_scaled_dot_product_{kind}_attention_backward"):
            library.impl(name, _attention(getattr(torch.ops.aten, name).default), "CUDA")


# ---------------------------------------------------------------------------- Inductor's kernels

# elements that a program has at most: here, a program costs more than what it computes
_TILE = 65536


def _config(tuner: Any) -> Any:
    return max(tuner.configs or [tuner.launchers[0].config], key=_tile)


def _tile(config: Any) -> int:
    return math.prod(size for name, size in config.kwargs.items() if name.endswith("BLOCK"))


def _with_large_blocks(config: Any, numel: int | None, depth: int) -> Any:
    """Where blocks divide what they cover, Inductor may have left out the masks: they still do. `depth`: elements that a program adds up
    at once, where no block says so."""
    if numel is None or "XBLOCK" not in config.kwargs:
        return config
    config = deepcopy(config)
    is_whole = numel % config.kwargs["XBLOCK"] == 0
    while depth * _tile(config) < _TILE and config.kwargs["XBLOCK"] < numel and not (is_whole and numel % (2 * config.kwargs["XBLOCK"])):
        config.kwargs["XBLOCK"] *= 2
    return config


def _run(tuner: Any, *args: Any, stream: int, benchmark_run: bool = False, **_: Any) -> None:
    """In the place of CachingAutotuner.run."""
    config, names = _config(tuner), tuner.fn.arg_names
    values = dict(zip([n for n in names if n not in config.kwargs], args))
    config = _with_large_blocks(config, values.get("xnumel"), 1 if "R0_BLOCK" in config.kwargs else values.get("r0_numel", 1))
    values |= {n: config.kwargs[n] for n in names if n in config.kwargs}
    constants = {names[n[0]] if isinstance(n, tuple) else n: v for n, v in tuner.triton_meta.get("constants", {}).items()}
    values = constants | values
    grid, scope = GridExpr.from_meta(tuner.inductor_meta, config), dict(values)
    exec("\n".join([*grid.prefix, f"grid = ({grid.x_grid}, {grid.y_grid}, {grid.z_grid})"]), {}, scope)
    given, kernel, shape = {n: on_host(v) for n, v in values.items()}, tuner.fn, scope["grid"]
    launch(lambda: _interpret(kernel, shape, **given), stream)


class _Launcher:
    def __init__(self, config: Any):
        self.config = config


def _precompile(tuner: Any, *_: Any, **__: Any) -> None:
    tuner.launchers = tuner.launchers or [_Launcher(_config(tuner))]


# functions that the kernel under way has called
_called: set[Any] = set()


_interpreted = InterpretedFunction.run


def _interpret(kernel: InterpretedFunction, shape: Any, *args: Any, **kwargs: Any) -> None:
    _called.clear()
    _interpreted(kernel, *args, grid=shape, warmup=False, **kwargs)


def _launch(kernel: InterpretedFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    """In the place of InterpretedFunction.run."""
    host_args, host_kwargs = pytree.tree_map(on_host, (args, kwargs))
    launch(lambda: _interpret(kernel, grid, *host_args, **host_kwargs))


def _helper(function: InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
    """A function that a kernel calls: the language it knows becomes the interpreter's once per kernel, not once per call."""
    if function.fn not in _called:
        _called.add(function.fn)
        interpreter._patch_lang(function.fn)
    return function.rewrite()(*args, **kwargs)


class _Libdevice:
    """Its functions, which the interpreter has not."""

    _OTHERS = {"nearbyint": torch.round, "llrint": torch.round, "rint": torch.round, "fabs": torch.abs}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _libdevice(name, self._OTHERS.get(name) or getattr(torch, name))


@cache
def _libdevice(name: str, function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    def call(*given: Any, **_: Any) -> Any:
        first = next(x for x in given if isinstance(x, tl.core.tensor))
        found = function(*(torch.as_tensor(x.handle.data if isinstance(x, tl.core.tensor) else x) for x in given))
        kind, dtype = (tl.int32, "int32") if found.dtype == torch.bool else (first.dtype, first.handle.data.dtype)
        kind, dtype = (tl.int64, "int64") if name == "llrint" else (kind, dtype)
        return _made(found.numpy().astype(dtype), kind)

    return call


def _welford(mean: Any, m2: Any, weight: Any, dim: int) -> tuple[Any, ...]:
    """Moments of several parts together, for all of them at once: the interpreter would add one element at a time."""
    dim = getattr(dim, "value", dim)
    means, squares, weights = (x.handle.data for x in (mean, m2, weight))
    total = weights.sum(dim, keepdims=True)
    whole = (means * weights).sum(dim, keepdims=True) / total
    found = whole, (squares + weights * (means - whole) ** 2).sum(dim, keepdims=True), total
    kind = mean.dtype
    return tuple(_made(x.squeeze(dim).astype(means.dtype), kind) for x in found)


def _made(data: Any, kind: Any) -> Any:
    return tl.core.tensor(TensorHandle(data, kind), tl.block_type(kind, list(data.shape)) if data.ndim else kind)


def _install_triton() -> None:
    triton_helpers.welford = _welford
    CachingAutotuner.run, CachingAutotuner.precompile = _run, _precompile
    InterpretedFunction.__call__, InterpretedFunction.run = _helper, _launch
    triton_helpers.libdevice = triton_helpers.math = triton_compat.libdevice = _Libdevice()
    interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)


_ops = torch.library.Library("aten", "IMPL")


def install() -> None:
    """For good, in this process."""
    _install_ops(_ops)
    _install_triton()


def clock(times_ns: Iterator[int]) -> Callable[[], Any]:
    """The device's clock, as kernels read it, which the interpreter lacks: numbers of 64 bits."""
    return lambda: tl.core.tensor(TensorHandle(np.array([next(times_ns)], dtype=np.int64), tl.int64), tl.int64)


# ---------------------------------------------------------------------------- for pytest


@pytest.fixture(autouse=True)
def ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A microsecond for every look."""
    monkeypatch.setattr(hold, "globaltimer", clock(itertools.count(0, 1000)))
    monkeypatch.setattr(hold, "smid", lambda: 7)


@pytest.fixture(autouse=True)
def every_kernel_is_computed() -> Iterator[None]:
    yield
    raised = failures[:]
    failures.clear()
    unknown = not_computed()
    assert not unknown, f"nobody computed {unknown}"
    assert not raised, f"{len(raised)} kernels could not be computed, the first of them:\n{raised[0]}"


def pytest_configure() -> None:
    install()
