"""Kernels that compute next to nothing, so that a program which is only to be compiled runs to its end without a GPU.

Contract: what is compiled is what a machine with the GPU would compile, or it is not kept.

1. An op of torch's on small tensors is computed, on the host: what a compiler or a model looks at is small (a uniform value that is folded,
   a mask that may be left out). All else is given memory, and what lies there is unknown; so is what comes of it.
2. Who looks at an unknown number is told so (`Unknown`): no graph depends on it.
3. Inductor's kernels are compiled, with every candidate, loaded, and not launched: so none is chosen.
4. Where Inductor would measure which way is faster, one is taken, and what is written down of it is not kept (`choices`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree

from tests.systems.cuda_on_host import kernels as on_host

# elements of all arguments up to which an op is computed
SMALL = 1 << 16
# addresses of memory whose values nobody knows
_unknown: set[int] = set()
# ops that only look at a tensor's place, and the choice of an attention, which torch makes from shapes
_PLAIN = {*on_host._NO_KERNEL, "_fused_sdp_choice"} - {"_local_scalar_dense"}
# ops that change a tensor, whatever was there
_WRITERS = "copy_ fill_ zero_ normal_ uniform_ random_ bernoulli_ exponential_".split()
# what was decided that a GPU would have measured: the way of padding a product; an algorithm
choices: dict[str, list[str]] = {"padding": [], "algorithm": []}
# how products are padded where that would be measured, and was not: `measured` has what the GPU found, by Inductor's own name of the case
is_padding = False
measured: dict[str, Any] = {}


class Unknown(RuntimeError):
    """A number was asked for that nobody computed."""


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _on_device(values: Any) -> list[torch.Tensor]:
    return [v for v in pytree.tree_leaves(values) if isinstance(v, torch.Tensor) and v.is_cuda]


def mark(values: Any, is_known: bool) -> None:
    for tensor in _on_device(values):
        (_unknown.discard if is_known else _unknown.add)(_address(tensor))


def is_known(values: Any) -> bool:
    return not any(_address(t) in _unknown for t in _on_device(values))


# -- 1. ops


def _op(op: Any, compute: Callable[..., Any] | None) -> Callable[..., Any]:
    schema = op._schema
    names = [a.name for a in schema.arguments]
    is_only_written = schema.overload_name.endswith("out") or schema.name.removeprefix("aten::") in _WRITERS
    changed = [(i, a.name) for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]

    def call(*args: Any, **kwargs: Any) -> Any:
        targets = [args[i] if i < len(args) else kwargs.get(name) for i, name in changed]
        tensors = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
        is_small = sum(t.numel() for t in tensors) <= SMALL and not torch.cuda.is_current_stream_capturing()
        written = [t for t in pytree.tree_leaves(targets) if isinstance(t, torch.Tensor)] if is_only_written else []
        read = [t for t in tensors if not any(t is target for target in written)]
        if compute is not None and is_small and is_known(read) and _is_small_result(op, args):
            found = compute(*args, **kwargs)
            if not targets:
                mark(found, True)
            mark([t for t in written if t.numel() * t.itemsize == t.untyped_storage().nbytes()], True)
            return found
        if targets:
            if any(isinstance(t, torch.Tensor) and not t.is_cuda for t in pytree.tree_leaves(targets)):
                if not is_known(tensors):
                    raise Unknown(f"{op} copies what nobody computed to the host")
                return compute(*args, **kwargs) if compute is not None else None
            mark(targets, False)
            return _returned(op, schema, names, args, kwargs, targets, changed)
        found = _memory(op, args, kwargs)
        mark(found, False)
        return found

    return call


def _is_small_result(op: Any, args: Any) -> bool:
    """Of an op that makes a tensor from sizes alone."""
    sizes = [a for a in args[:1] if isinstance(a, (list, tuple)) and all(isinstance(n, int) for n in a)]
    return not sizes or torch.Size(sizes[0]).numel() <= SMALL


def _returned(op: Any, schema: Any, names: list[str], args: Any, kwargs: Any, targets: list[Any], changed: Any) -> Any:
    """The targets, in the shape that the op gives them (out=: an empty one takes the result's)."""
    if any(isinstance(t, torch.Tensor) and not t.numel() for t in pytree.tree_leaves(targets)):
        rest = {k: v for k, v in kwargs.items() if k not in {name for _, name in changed}}
        plain = getattr(op.overloadpacket, "default", None)
        shapes = pytree.tree_leaves(_fake(plain, args, rest)) if plain is not None and schema.overload_name else []
        for tensor, made in zip(pytree.tree_leaves(targets), shapes):
            tensor.resize_(made.shape)
    returned = [t for t, r in zip(targets, schema.returns) if r.alias_info is not None]
    return None if not returned else returned[0] if len(returned) == 1 else tuple(returned)


def _convolution(x: Any, weight: Any, padding: Any, stride: Any, dilation: Any, groups: int, *_: Any, **__: Any) -> Any:
    return torch.ops.aten.convolution.default(x, weight, None, stride, padding, dilation, False, [0] * len(stride), groups)


def _depthwise(x: Any, weight: Any, _: Any, bias: Any, stride: Any, padding: Any, dilation: Any) -> Any:
    return torch.ops.aten.convolution.default(x, weight, bias, stride, padding, dilation, False, [0, 0], x.shape[1])


_mode = FakeTensorMode(allow_fallback_kernels=False)
# ops that have no fake of their own
_FAKES: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.cudnn_convolution.default: _convolution, torch.ops.aten._conv_depthwise2d.default: _depthwise,
}  # fmt: skip


def _fake(op: Any, args: Any, kwargs: Any) -> Any:
    def same(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)

    with _mode:
        args, kwargs = pytree.tree_map_only(torch.Tensor, same, (args, kwargs))
        return _FAKES.get(op, op)(*args, **kwargs)


def _memory(op: Any, args: Any, kwargs: Any) -> Any:
    """Memory for the op's results."""

    def made(value: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)

    return pytree.tree_map_only(torch.Tensor, made, _fake(op, args, kwargs))


def _item(x: torch.Tensor) -> Any:
    if not is_known(x):
        raise Unknown("a number is read back that nobody computed")
    return on_host.on_host(x).item()


def _install_ops(library: torch.library.Library) -> None:
    known = torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
    for name in sorted({*(n.removeprefix("aten::") for n in known if n.startswith("aten::")), "copy_", "convolution_backward"}):
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if op is None or name in _PLAIN:
            continue
        can = not any(word in name for word in (*on_host._NOT_ON_CPUS, "convolution_backward"))
        library.impl(name, _item if name == "_local_scalar_dense" else _op(op, on_host._computed(op) if can else None), "CUDA")


# -- 3. Inductor's kernels


def _run(tuner: Any, *args: Any, **kwargs: Any) -> None:
    """In the place of CachingAutotuner.run."""
    if not tuner.launchers:
        tuner.precompile()
    if choices["algorithm"]:  # no graph of this process is kept any more: one way is taken, so that the rest is compiled too
        del tuner.launchers[1:]
    # what Inductor's own kernels only read is called so
    written = [arg for name, arg in zip(tuner.fn.arg_names, args) if not name.startswith("in_ptr")]
    mark((written, args[len(tuner.fn.arg_names) :], kwargs), False)


# -- 4. what would be measured


def _should_pad(match: Any, mat1: torch.Tensor, mat2: torch.Tensor, op: Any, input: Any = None) -> bool:
    """In the place of Inductor's function, which measures."""
    from torch._inductor.fx_passes import pad_mm

    if not pad_mm.can_pad(mat1, mat2, op, input):
        return False
    m, k = mat1.shape[-2:]
    if not pad_mm.is_mm_compute_bound(m, k, mat2.shape[-1], mat1.dtype):
        return False
    name = pad_mm.should_pad_bench_key(match, mat1, mat2, op, input)
    if isinstance(measured.get(name), bool):
        return measured[name]
    choices["padding"].append(f"{op} {tuple(mat1.shape)} {tuple(mat2.shape)}")
    return is_padding


def _install_inductor() -> None:
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache
    from torch._inductor.codecache import FxGraphCache
    from torch._inductor.fx_passes import pad_mm
    from torch._inductor.runtime import benchmarking
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from torch._inductor.select_algorithm import AlgorithmSelectorCache

    from dynaflow.inductor import kept

    triton.knobs.compilation.listener = _listen
    CachingAutotuner.run = _run
    pad_mm.should_pad = _should_pad
    # a graph's key is made behind the padding; these are made ahead of it
    AOTAutogradCache.save = staticmethod(_unless(("padding", "algorithm"), AOTAutogradCache.save))
    kept.save = _unless(("padding", "algorithm"), kept.save)
    FxGraphCache._save_graph = staticmethod(_unless(("algorithm",), FxGraphCache._save_graph))
    select = AlgorithmSelectorCache.__call__

    def selected(self: Any, name: str, given: Any, *args: Any, **kwargs: Any) -> Any:
        if len(given) > 1:
            choices["algorithm"].append(name)
        return select(self, name, given, *args, **kwargs)

    AlgorithmSelectorCache.__call__ = selected
    for one in (benchmarking.Benchmarker, benchmarking.TritonBenchmarker, benchmarking.InductorBenchmarker):
        for name in ("benchmark", "benchmark_gpu"):
            setattr(one, name, _not_measured)


def _not_measured(_: Any, *__: Any, **___: Any) -> float:
    """In the place of whatever Inductor measures: nothing that it decides by this is kept."""
    choices["algorithm"].append("a time")
    return 1.0


def _unless(kinds: tuple[str, ...], save: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: None if any(choices[kind] for kind in kinds) else save(*args, **kwargs)


def num_compiled() -> int:
    """Kernels that were compiled by Triton in this process, not found."""
    return len(_compiled)


_compiled: list[str] = []


def _listen(*, src: Any, cache_hit: bool, **_: Any) -> None:
    if not cache_hit:
        _compiled.append(src.name)


_libraries: list[torch.library.Library] = []


def install() -> None:
    """For good, in this process."""
    _libraries.append(torch.library.Library("aten", "IMPL"))
    _install_ops(_libraries[-1])
    _install_inductor()
