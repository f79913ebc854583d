"""Units and their arguments, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable

import torch
from torch import fx
from torch.nn import functional as F

from dynaflow.inductor import CompiledUnit, Spec
from dynaflow.runtime.program import Expr

CPU = torch.device("cpu")


def spec(*shape: Any, dtype: torch.dtype = torch.float32) -> Spec:
    """A contiguous tensor."""
    stride, strides = "1", []
    for d in reversed(shape):
        strides.append(stride)
        stride = str(d) if stride == "1" else str(int(d) * int(stride)) if f"{d}{stride}".isdigit() else f"({d})*{stride}"
    return Spec(tuple(map(str, shape)), tuple(reversed(strides)), dtype, CPU)


def unit(fn: Callable[..., Any], *args: Spec | Expr, symbols: tuple[str, ...] = ("s0",), dynamo: bool = False) -> CompiledUnit:
    """`dynamo`: fn has contexts or sub-graphs, which fx does not trace."""
    return CompiledUnit(captured(fn, *tensors(args, s0=6)) if dynamo else fx.symbolic_trace(fn), args, symbols)


def captured(fn: Callable[..., Any], *args: Any) -> fx.GraphModule:
    graphs: list[fx.GraphModule] = []
    torch._dynamo.reset()
    torch.compile(fn, backend=lambda gm, _: graphs.append(gm) or gm.forward, dynamic=False)(*args)
    return graphs[0]


def tensors(args: tuple[Spec | Expr, ...], **sizes: int) -> list[Any]:
    """Random arguments."""
    made: list[Any] = []
    for arg in args:
        if isinstance(arg, Expr):
            made.append(eval(arg.text, {}, dict(sizes)))
        else:
            shape, stride = ([eval(e, {}, dict(sizes)) for e in exprs] for exprs in (arg.shape, arg.stride))
            made.append(torch.empty_strided(shape, stride, dtype=arg.dtype).copy_(torch.randn(shape)))
    return made


@dataclass(frozen=True)
class Case:
    fn: Callable[..., Any]
    args: tuple[Spec | Expr, ...]
    # per output: a word of the reason why it is not redirected, or ""
    own: tuple[str, ...] = ("",)
    # the batch dim of every output
    batch: int = 0
    dynamo: bool = False


X, X3, W, W2, Q = spec("s0", 32), spec("s0", 4, 32), spec(32, 32), spec(32, 64), spec("s0", 2, 8, 32)


def _relu_mm(x, w):
    return (torch.relu(x @ w),)


def _mlp(x, w, w2, v):
    h = F.gelu(x @ w2) @ v + x
    return h, torch.relu(h @ w)


def _sdpa_merged(q):
    return (F.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(q.shape[0], 8, 64),)


def _write_cache(x, cache, slot):
    cache[:, 2].copy_(x * 2)
    return (cache.sum(1) + slot,)


def _split_heads(x, rows, width):
    return (x.view(rows, 4, width).transpose(1, 2).contiguous() * rows,)


def _autocast(x, w):
    with torch.autocast("cpu", torch.bfloat16):
        y = x @ w
    return y, torch.relu(y.float() + x)


@torch.library.custom_op("dynaflow_test::product", mutates_args=())
def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w


@product.register_fake
def _(x, w):
    return torch.empty(x.shape[0], w.shape[1], dtype=x.dtype, device=x.device)


def product_without_autocast(x, w):
    with torch.autocast("cpu", enabled=False):
        y = product(x, w)
    return y, x @ w


CASES = {
    "relu_mm": Case(_relu_mm, (X, W)),
    "mm_3d": Case(lambda x, w: (x @ w,), (X3, W)),
    "mlp": Case(_mlp, (X, W, W2, spec(64, 32)), ("", "")),
    "transposed": Case(lambda x, w: (torch.relu(x @ w).t(),), (X, W), batch=1),
    "sdpa_merged": Case(_sdpa_merged, (Q,)),
    "sdpa_last": Case(lambda q: (F.scaled_dot_product_attention(q, q, q),), (Q,), ("allocates its own result",)),
    "write_cache": Case(_write_cache, (X, spec("s0", 5, 32), spec("s0", 1))),
    "sizes": Case(_split_heads, (spec("8*s0", 16), Expr("2*s0"), Expr("max(16, 3)"))),
    "autocast": Case(_autocast, (X, W), ("", ""), dynamo=True),
    "view": Case(lambda x: (x.t(),), (X,), ("alias of input",), batch=1),
    "input": Case(lambda x, w: (x, x @ w), (X, W), ("is input", "beside an output that is an alias")),
    "only_input": Case(lambda x: (x,), (X,), ("did not compile",)),
    "twice": Case(lambda x, w: (lambda y: (y, y))(x @ w), (X, W), ("returned twice", "returned twice")),
    "halves": Case(lambda x, w: tuple((x @ w).split(16, -1)[i] for i in range(2)), (X, W), ("not all of", "view into")),
}
