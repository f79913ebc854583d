"""All-reduce, residual add and RMS norm as one function: the collective, then one pass over the rows.

`read_norm` looks at the graph of the ops behind the collective: it knows the add of two values and the RMS norm of their sum as
Transformers and torch write it, and says None of all else. Then, and on the CPU, the ops themselves run. On CUDA the one pass is a Triton
kernel; it rounds where the ops round: after the add, and before the product with the weight.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._subclasses import FakeTensor

from dynaflow.replacement import Body


class Norm(NamedTuple):
    """Where the ops behind a collective find what they add and scale; numbers count the inputs of their body."""

    reduced: int
    residual: int
    weight: int
    eps: float
    # outputs of the body: "sum" and "norm", in its order
    outs: tuple[str, ...]


_ADD, _MUL = (operator.add, operator.iadd, torch.add, "add"), (operator.mul, torch.mul, "mul")


def read_norm(tail: Body) -> Norm | None:
    """The add and RMS norm that a body consists of; None if it is anything else."""
    graph = tail.unit.fn.graph if isinstance(tail.unit.fn, fx.GraphModule) else None
    if graph is None or len(tail.inputs) != 3 or len(tail.unit.args) != 3 or not all(isinstance(a, str) for a in tail.unit.args):
        return None
    given = {n: tail.inputs.index(str(a)) for n, a in zip((n for n in graph.nodes if n.op == "placeholder"), tail.unit.args)}
    calls = [n for n in graph.nodes if n.op in ("call_function", "call_method")]
    (output,) = [n for n in graph.nodes if n.op == "output"]
    if not calls or calls[0].target not in _ADD or len(calls[0].args) != 2 or any(a not in given for a in calls[0].args) or calls[0].kwargs:
        return None
    total, a, b = calls[0], given[calls[0].args[0]], given[calls[0].args[1]]
    found = _torch_norm(calls[1:], total) or _written_out(calls[1:], total)
    if found is None or found[0] not in given:
        return None
    weight, eps = given[found[0]], found[1]
    named = {total: "sum", calls[-1]: "norm"}
    if {a, b, weight} != {0, 1, 2} or any(n not in named for n in output.args[0]):
        return None
    return Norm(a, b, weight, eps, tuple(named[n] for n in output.args[0]))


def _torch_norm(calls: list[fx.Node], total: fx.Node) -> tuple[Any, float] | None:
    """F.rms_norm(sum, (size,), weight, eps)"""
    if len(calls) != 1 or calls[0].target not in (torch.nn.functional.rms_norm, torch.rms_norm):
        return None
    names = dict(zip(("input", "normalized_shape", "weight", "eps"), calls[0].args)) | calls[0].kwargs
    shape, eps = names.get("normalized_shape"), names.get("eps")
    is_last = isinstance(shape, (tuple, list)) and len(shape) == 1
    return (names.get("weight"), float(eps)) if names["input"] is total and is_last and isinstance(eps, float) else None


def _written_out(calls: list[fx.Node], total: fx.Node) -> tuple[Any, float] | None:
    """weight * (f * rsqrt(mean(f ** 2) + eps)).to(dtype), where f is the sum in float32; the casts may be missing."""
    rest = list(calls)

    def take(targets: tuple[Any, ...], *operands: Any) -> fx.Node | None:
        """The next call, if it is one of these and takes these first; in any order where there are two."""
        node = rest[0] if rest else None
        takes = {*(node.args[: len(operands)] if node is not None else ())}
        if node is None or node.target not in targets or takes != {*operands} or (node.kwargs and node.target not in ("mean", torch.mean)):
            return None
        return rest.pop(0)

    wide = take(("to", "float"), total) or total
    square = take((operator.pow, torch.pow, "pow"), wide, 2)
    mean = take(("mean", torch.mean), *((square, -1) if square is not None and rest and len(rest[0].args) > 1 else (square,)))
    if square is None or mean is None or not mean.kwargs.get("keepdim", mean.args[2:] == (True,)) or mean.kwargs.get("dim", -1) != -1:
        return None
    added = rest[0] if rest and rest[0].target in _ADD else None
    eps = next((float(x) for x in added.args if isinstance(x, float)), None) if added is not None and mean in added.args else None
    if added is None or eps is None:
        return None
    rest.pop(0)
    root = take((torch.rsqrt, "rsqrt"), added)
    scaled = take(_MUL, wide, root)
    if root is None or scaled is None:
        return None
    narrow = take(("to", "type_as"), scaled) or scaled if rest and rest[0].target in ("to", "type_as") and len(rest) > 1 else scaled
    last = rest[0] if len(rest) == 1 and rest[0].target in _MUL and narrow in rest[0].args else None
    return (next(x for x in last.args if x is not narrow), eps) if last is not None and len(last.args) == 2 else None


class ReduceAddNorm:
    """In the place of a collective and the ops behind it: `whole` is all of them, `reduce` the collective, `tail` the rest."""

    def __init__(self, whole: Body, reduce: Body, tail: Body, num_ctas: int):
        self.whole, self.reduce, self.tail, self.num_ctas = whole, reduce, tail, num_ctas
        self.norm = read_norm(tail)
        self.__qualname__ = f"reduce_add_norm(num_ctas={num_ctas})"  # what plans call it

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        norm = self.norm
        if norm is None or not _has_kernel(inputs[0]):
            return self.whole(*inputs)
        values = dict(zip(self.whole.inputs, inputs, strict=True))
        values.update(zip(self.reduce.unit.outs, self.reduce(*(values[v] for v in self.reduce.inputs)), strict=True))
        taken = [values[v] for v in self.tail.inputs]
        total, normed = add_rms_norm(taken[norm.reduced], taken[norm.residual], taken[norm.weight], norm.eps, self.num_ctas)
        values.update((v, total if out == "sum" else normed) for v, out in zip(self.tail.unit.outs, norm.outs, strict=True))
        return tuple(values[v] for v in self.whole.unit.outs)


def _has_kernel(x: torch.Tensor) -> bool:
    return x.is_cuda and not isinstance(x, FakeTensor)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, num_ctas: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """x + residual, and its RMS norm over the last dim times weight, in one pass on CUDA."""
    from dynaflow.kernels import triton_add_rms_norm  # there is no Triton without a GPU

    x, residual = x.contiguous(), residual.contiguous()
    total, normed = torch.empty_like(x), torch.empty_like(x)
    triton_add_rms_norm.launch(x, residual, weight.contiguous(), total, normed, eps, num_ctas)
    return total, normed
