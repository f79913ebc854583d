"""All-reduce, residual add and RMS norm as one function: one kernel where the collective has one, else it and one pass over the rows.

`read_norm` looks at the graph of the ops behind the collective: it knows the add of two values and the RMS norm of their sum as
Transformers and torch write it, and says None of all else. Then, and on the CPU, the ops themselves run. On CUDA the one pass is a Triton
kernel; it rounds where the ops round: after the add, and before the product with the weight.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

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


_ADD, _MUL, _POW = (operator.add, torch.add, "add"), (operator.mul, torch.mul, "mul"), (operator.pow, torch.pow, "pow")


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
    given = _arguments(calls[0], "input", "normalized_shape", "weight", "eps")
    shape, eps = given.get("normalized_shape"), given.get("eps")
    is_last = isinstance(shape, (tuple, list)) and len(shape) == 1
    return (given.get("weight"), eps) if given.get("input") is total and is_last and isinstance(eps, float) else None


def _written_out(calls: list[fx.Node], total: fx.Node) -> tuple[Any, float] | None:
    """weight * (f * rsqrt(mean(f ** 2) + eps)).to(dtype), where f is the sum in float32; the casts may be missing."""
    rest = list(calls)

    def take(targets: tuple[Any, ...], *operands: Any) -> fx.Node | None:
        """The next call, if it is one of these, of these operands and nothing else."""
        node = rest[0] if rest else None
        is_it = node is not None and node.target in targets and not node.kwargs
        swapped = operands[::-1] if targets in (_ADD, _MUL) else operands
        return rest.pop(0) if is_it and node is not None and node.args in (operands, swapped) else None

    wide = take(("to",), total, torch.float32) or take(("float",), total) or total
    square = take(_POW, wide, 2)
    mean = rest.pop(0) if rest and rest[0].target in ("mean", torch.mean) else None
    if square is None or mean is None or _arguments(mean, "input", "dim", "keepdim") != {"input": square, "dim": -1, "keepdim": True}:
        return None
    eps = next((x for x in rest[0].args if isinstance(x, float)), None) if rest else None
    root = take((torch.rsqrt, "rsqrt"), take(_ADD, mean, eps))
    scaled = take(_MUL, wide, root)
    if eps is None or root is None or scaled is None:
        return None
    narrow = rest.pop(0) if rest and rest[0].target in ("to", "type_as") and rest[0].args[0] is scaled else scaled
    weight = next((x for x in rest[0].args if x is not narrow), None) if rest else None
    return (weight, eps) if take(_MUL, weight, narrow) is not None and not rest else None


def _arguments(node: fx.Node, *names: str) -> dict[str, Any]:
    return dict(zip(names, node.args)) | node.kwargs


class OneKernel(Protocol):
    """A collective's own kernel for it: `x` is what is reduced, `numbers` the collective's other arguments. It adds the residual into
    `total`, and puts the norm times the weight into `normed`; all are contiguous. `num_ctas`: None for the collective's own choice."""

    def __call__(
        self, x: torch.Tensor, numbers: Sequence[Any], residual: torch.Tensor, weight: torch.Tensor, eps: float, total: torch.Tensor,
        normed: torch.Tensor, num_ctas: int | None,
    ) -> None: ...  # fmt: skip


# collective, as graphs call it -> its kernel
_kernels: dict[Any, OneKernel] = {}


def register_reduce_add_norm(collective: Any, kernel: OneKernel) -> None:
    """A collective that can add and norm rows as they arrive."""
    _kernels[collective] = kernel


def read_reduce(reduce: Body) -> tuple[OneKernel, int, tuple[Any, ...]] | None:
    """(the collective's own kernel, which of the inputs it reduces, its other arguments); None if it has none, or there is more to it."""
    graph = reduce.unit.fn.graph if isinstance(reduce.unit.fn, fx.GraphModule) else None
    calls = [n for n in graph.nodes if n.op.startswith("call_")] if graph is not None else []
    if graph is None or len(calls) != 1 or len(reduce.unit.outs) != 1 or calls[0].target not in _kernels or calls[0].kwargs:
        return None
    given = dict(zip((n for n in graph.nodes if n.op == "placeholder"), reduce.unit.args))
    x, *numbers = calls[0].args
    if given.get(x) not in reduce.inputs or any(isinstance(n, fx.Node) for n in numbers):
        return None
    return _kernels[calls[0].target], reduce.inputs.index(given[x]), tuple(numbers)


class ReduceAddNorm:
    """In the place of a collective and the ops behind it: `whole` is all of them, `reduce` the collective, `tail` the rest."""

    takes_outs = True

    def __init__(self, whole: Body, reduce: Body, tail: Body, num_ctas: int, own_ctas: int | None = None):
        """`num_ctas`: of the one pass; `own_ctas`: of a collective's own kernel, None for its own choice."""
        self.whole, self.reduce, self.tail, self.num_ctas, self.own_ctas = whole, reduce, tail, num_ctas, own_ctas
        self.norm, self.kernel = read_norm(tail), read_reduce(reduce)
        own = f"own_ctas={own_ctas}, " if self.kernel is not None else ""
        self.__qualname__ = f"reduce_add_norm({own}num_ctas={num_ctas})"  # what plans call it

    def __call__(self, *inputs: torch.Tensor, outs: Sequence[torch.Tensor] = ()) -> tuple[torch.Tensor, ...]:
        """Returns what the ops return; with `outs`, leaves it there."""
        places = dict(zip(self.whole.unit.outs, outs))
        if self.norm is None or not is_on_gpu(inputs[0]):
            made = dict(zip(self.whole.unit.outs, self.whole(*inputs), strict=True))
        else:
            made = self._in_one_pass(dict(zip(self.whole.inputs, inputs, strict=True)), places)
        for name, place in places.items():
            if made[name] is not place:
                place.copy_(made[name])
        return tuple(made[name] for name in self.whole.unit.outs)

    def _in_one_pass(self, values: dict[str, torch.Tensor], places: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        assert self.norm is not None
        if self.kernel is not None and (made := self._in_one_kernel(values, places)) is not None:
            return made
        values.update(zip(self.reduce.unit.outs, self.reduce(*(values[v] for v in self.reduce.inputs)), strict=True))
        taken = [values[v] for v in self.tail.inputs]
        x, residual, weight = taken[self.norm.reduced], taken[self.norm.residual], taken[self.norm.weight]
        if not can_add_rms_norm(x, residual, weight):
            return values | dict(zip(self.tail.unit.outs, self.tail(*taken), strict=True))
        named = dict(zip(self.norm.outs, self.tail.unit.outs, strict=True))
        total, normed = (places.get(named.get(out, "")) for out in ("sum", "norm"))
        made = dict(zip(("sum", "norm"), add_rms_norm(x, residual, weight, self.norm.eps, self.num_ctas, total, normed), strict=True))
        return values | {name: made[out] for out, name in named.items()}


    def _in_one_kernel(self, values: dict[str, torch.Tensor], places: dict[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
        """None where a tensor lies as the kernel does not expect it."""
        assert self.norm is not None and self.kernel is not None
        kernel, at, numbers = self.kernel
        x = values[self.reduce.inputs[at]]
        added = [self.tail.inputs[i] for i in (self.norm.reduced, self.norm.residual)]
        if sum(name in self.reduce.unit.outs for name in added) != 1:
            return None  # what is reduced is added to itself, or to nothing
        (residual,) = (values[name] for name in added if name not in self.reduce.unit.outs)
        weight = values[self.tail.inputs[self.norm.weight]]
        if not can_add_rms_norm(x, residual, weight):
            return None
        named = dict(zip(self.norm.outs, self.tail.unit.outs, strict=True))
        if {*self.whole.unit.outs} - {*named.values()}:
            return None  # somebody else reads what was reduced
        total, normed = (_contiguous_like(x, places.get(named.get(out, ""))) for out in ("sum", "norm"))
        kernel(x.contiguous(), numbers, residual.contiguous(), weight.contiguous(), self.norm.eps, total, normed, self.own_ctas)
        made = {"sum": total, "norm": normed}
        return {name: made[out] for out, name in named.items()}


def is_on_gpu(x: torch.Tensor) -> bool:
    return x.is_cuda and not isinstance(x, FakeTensor)


def can_add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> bool:
    """Nothing is broadcast but the weight over the rows, all have one dtype, and a row fits into the registers of a CTA."""
    has_rows = x.shape == residual.shape and weight.shape == x.shape[-1:] and x.shape[-1] <= 16384
    return has_rows and x.dtype == residual.dtype == weight.dtype and x.dtype in (torch.float32, torch.bfloat16, torch.float16)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, num_ctas: int, total: torch.Tensor | None = None,
    normed: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """x + residual, and its RMS norm over the last dim times weight, in one pass on CUDA; into `total` and `normed` where it can."""
    from dynaflow.functions import triton_add_rms_norm  # there is no Triton without a GPU

    x, residual = x.contiguous(), residual.contiguous()
    total, normed = _contiguous_like(x, total), _contiguous_like(x, normed)
    triton_add_rms_norm.launch(x, residual, weight.contiguous(), total, normed, eps, num_ctas)
    return total, normed


def _contiguous_like(x: torch.Tensor, place: torch.Tensor | None) -> torch.Tensor:
    return place if place is not None and place.is_contiguous() else torch.empty_like(x, memory_format=torch.contiguous_format)
