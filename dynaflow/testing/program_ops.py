"""What a random program may do: each op adds some lines of torch code to a module, or gives up.

1. `Scope` writes one module: variables with their shapes, and what memory they share.
2. The ops, registered with a weight; `steps` draws them. Programs that are trained have more: `program_train_ops.py`.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable, Iterable, Sequence

if TYPE_CHECKING:
    from dynaflow.testing.programs import Program

S, D, T = 3, 4, 5  # sequence, features, cache length

# A size: a number, or "kB" for k times the batch.
Dim = int | str
Shape = tuple[Dim, ...]


@dataclass
class Var:
    name: str
    shape: Shape
    dtype: str
    # variables with one root may share memory
    root: int
    # every element has a place of its own: it may be written
    is_dense: bool = True

    @property
    def axis(self) -> int:
        """The dim of the batch; -1 without one."""
        return next((i for i, d in enumerate(self.shape) if isinstance(d, str)), -1)

    @property
    def is_float(self) -> bool:
        return self.dtype in ("float32", "float64")

    @property
    def width(self) -> int:
        """Size of the last dim; 0 if that is the batch."""
        return self.shape[-1] if self.shape and isinstance(self.shape[-1], int) else 0

    @property
    def other_dims(self) -> list[int]:
        return [d for d in range(len(self.shape)) if d != self.axis]


# ---------------------------------------------------------------------------- 1. one module


class Scope:
    """The source of one module, while it is written."""

    def __init__(self, program: Program, name: str, env: list[Var], depth: int):
        self.program, self.name, self.env, self.depth = program, name, env, depth
        self.rng = program.rng
        self.init: list[str] = []
        self.body: list[str] = []
        self.indent = ""

    def line(self, text: str) -> None:
        self.body.append(self.indent + text)

    def new(self, expr: str, shape: Iterable[Dim], like: Var, *others: Var, exact: bool = False, view: bool = False,
            dtype: str = "", is_dense: bool = True) -> Var:  # fmt: skip
        """`name = expr`. `view`: it may share the memory of `like`. `exact`: no rounding, if what it is made of had none."""
        var = Var(self.program.name(), tuple(shape), dtype or like.dtype, like.root if view else self.program.root())
        if view:
            var.is_dense = is_dense and like.is_dense
        else:
            self.program.exact[var.root] = exact and all(self.program.exact[v.root] for v in (like, *others))
        self.line(f"{var.name} = {expr}")
        self.env.append(var)
        return var

    def several(self, expr: str, shapes: list[Shape], like: Var) -> list[Var]:
        """`a, b = expr`, views of `like`."""
        found = [Var(self.program.name(), shape, like.dtype, like.root, like.is_dense) for shape in shapes]
        self.line(f"{', '.join(v.name for v in found)}, = {expr}")
        self.env.extend(found)
        return found

    def change(self, target: Var, call: str, *sources: Var) -> Var:
        """A call that changes `target` in place; its result is used now and then."""
        exact = self.program.exact
        exact[target.root] = exact[target.root] and all(exact[v.root] for v in sources)
        if self.rng.random() < 0.3 and call.startswith(f"{target.name}.") and ")." not in call:
            return self.new(call, target.shape, target, view=True)
        self.line(call)
        return target

    def pick(self, accepts: Callable[[Var], Any] = lambda v: True) -> Var | None:
        """A variable, rather a recent one."""
        found = [v for v in self.env if accepts(v)]
        return found[-1 - min(int(self.rng.expovariate(0.45)), len(found) - 1)] if found else None

    def same_as(self, v: Var | None, *, other_root: bool = False, exact: bool = False) -> Var | None:
        """Another variable of the same shape and dtype, maybe in other memory."""
        if v is None:
            return None
        shape, dtype, root = v.shape, v.dtype, v.root
        return self.pick(lambda w: w.shape == shape and w.dtype == dtype and not (other_root and w.root == root)
                         and not (exact and not self.program.exact[w.root]))  # fmt: skip

    def member(self, text: str) -> str:
        """A parameter, buffer or child: `self.a3 = ...`"""
        name = f"a{len(self.init)}"
        self.init.append(text.replace("NAME", name))
        return f"self.{name}"

    def parameter(self, *shape: int) -> str:
        return self.member(f"self.NAME = nn.Parameter(rand{shape})")

    def buffer(self, value: str) -> str:
        return self.member(f"self.register_buffer('NAME', {value})")

    def source(self, arguments: str, result: str) -> str:
        init = "".join(f"        {line}\n" for line in self.init)
        body = "".join(f"        {line}\n" for line in self.body)
        return (f"class {self.name}(nn.Module):\n    def __init__(self):\n        super().__init__()\n{init}"
                f"    def forward(self, {arguments}):\n{body}        return {result}\n")  # fmt: skip


# ---------------------------------------------------------------------------- 2. ops

Op = Callable[[Scope], Any]
OPS: list[tuple[float, Op]] = []
# those besides, of programs that are trained: `program_train_ops.py`
TRAINED: list[tuple[float, Op]] = []
# those besides, of programs that are odd: `program_odd_ops.py`
ODD: list[tuple[float, Op]] = []


def op(weight: float = 1.0, into: list[tuple[float, Op]] = OPS) -> Callable[[Op], Op]:
    def add(function: Op) -> Op:
        into.append((weight, function))
        return function

    return add


def _without(shape: Shape, dim: int) -> Shape:
    return shape[:dim] + shape[dim + 1 :]


def _with(shape: Shape, dim: int, size: Dim) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _times(a: Dim, b: Dim) -> Dim:
    if isinstance(a, int) and isinstance(b, int):
        return a * b
    number, rows = (a, b) if isinstance(a, int) else (b, a)
    return f"{int(number) * int(str(rows)[:-1])}B"


# In the texts: v the operand, a its batch dim, d another dim, k the name of a parameter or buffer.
_NEEDS: dict[str, Callable[[Var], Any]] = {
    "float": lambda v: v.is_float,
    "dim": lambda v: v.is_float and any(v.shape[d] != 0 for d in v.other_dims),
    "rows": lambda v: v.is_float and v.axis >= 0,
    "wide": lambda v: v.is_float and len(v.shape) >= 2 and v.width > 0,
    "matrix": lambda v: v.is_float and len(v.shape) == 2 and v.axis == 0,
    "int": lambda v: v.dtype == "int64",
}
_SHAPES: dict[str, Callable[[Var, int], Shape]] = {
    "same": lambda v, d: v.shape,
    "drop d": lambda v, d: _without(v.shape, d),
    "drop a": lambda v, d: _without(v.shape, v.axis),
    "drop last": lambda v, d: v.shape[:-1],
    "two last": lambda v, d: (*v.shape[:-1], 2),
    "one last": lambda v, d: (*v.shape[:-1], 1),
    "and two": lambda v, d: (*v.shape, 2),
}
# weight, operand, result's shape, flags (exact, view, a dtype), texts
_TABLE: list[tuple[float, str, str, str, str]] = [
    (2, "float", "same", "exact", "torch.relu(v) | -v | v.abs() | v * 0.5 | v + 1.0 | v.clamp(-1, 1) | torch.zeros_like(v) + v"),
    (2, "float", "same", "", "v.sin() | torch.tanh(v) | torch.sigmoid(v) | F.gelu(v) | F.silu(v) | (v * v + 1).rsqrt()"),
    (0.8, "float", "same", "view", "v.contiguous() | F.dropout(v, 0.5, False) | v.to(v.dtype) | v.reshape(v.shape) | v.expand_as(v)"),
    (1, "dim", "same", "", "torch.softmax(v, d) | torch.log_softmax(v, d) | v.cumsum(d) * 0.3 | F.normalize(v, dim=d) | v.roll(1, d)"),
    (0.7, "wide", "same", "", "F.layer_norm(v, (v.shape[-1],)) | F.rms_norm(v, (v.shape[-1],))"),
    (1, "dim", "drop d", "", "v.mean(d) | v.sum(d) * 0.5 | v.amax(d) | v.max(d).values | torch.logsumexp(v, d) | v.std(d, unbiased=False)"),
    # the whole batch is needed
    (1, "rows", "same", "", "v - v.mean(a, keepdim=True) | v.cumsum(a) * 0.2 | torch.softmax(v, a) | v / v.shape[a] | v / (v.norm() + 1)"),
    (1, "rows", "same", "exact",
     "v.sort(a).values | v.flip(a) | v.roll(1, a) | v.index_select(a, torch.arange(v.shape[a], device=v.device).flip(0))"),
    (0.7, "rows", "same", "exact", "torch.cat([v.narrow(a, 1, v.shape[a] - 1), v.narrow(a, 0, 1)], a)"),
    (0.7, "rows", "same", "exact", "v + v.select(a, 0).unsqueeze(a) * 0.5 | v - v.select(a, -1).unsqueeze(a) | v.clone()"),
    (0.5, "matrix", "same", "", "(v @ v.t() * 0.1).softmax(-1) @ v | torch.tril(v) | torch.cdist(v, v).mean(1, keepdim=True) + v"),
    (0.4, "rows", "drop a", "", "v.mean(a) | v.sum(a) * 0.1 | v.amax(a)"),
    (0.5, "rows", "drop a", "view", "v.select(a, 0) | v.select(a, -1)"),
    # parameters, tables, comparisons of exact numbers
    (0.5, "exact", "same", "exact", "v.masked_fill(v < -0.5, 0.25) | v.gather(-1, (v > 0).long() % v.shape[-1])"),
    (0.4, "exact", "drop last", "exact int64", "v.argmax(-1) | (v > 0).long().sum(-1)"),
    (0.3, "exact", "one last", "exact int64", "v.topk(1, -1).indices"),
    (0.4, "int", "same", "exact float32", "v.float() * 0.1"),
    (0.3, "int", "same", "exact", "(v + 1) % 3"),
    (0.3, "int", "and two", "exact float32", "F.one_hot(v.contiguous() % 2, 2).float()"),
    (0.3, "wide", "drop last", "", "v[..., :0].sum(-1)"),
    (0.3, "wide", "same", "exact", "torch.cat([v[..., :0], v], -1)"),
    (0.3, "float", "same", "exact float64", "v.double()"),
    (0.3, "float", "same", "float32", "v.float() * 1.0"),
]


def _simple(needs: str, shape: str, flags: str, texts: list[str], s: Scope) -> Any:
    accepts = _NEEDS.get(needs) or (lambda v: v.is_float and v.width > 0 and s.program.exact[v.root])
    v = s.pick(accepts)
    if v:
        d = s.rng.choice([d for d in v.other_dims if v.shape[d] != 0] or [0])
        text = re.sub(r"\b[vad]\b", lambda m: {"v": v.name, "a": str(v.axis), "d": str(d)}[m[0]], s.rng.choice(texts))
        if s.program.is_trained and text.startswith(("torch.zeros_like", "F.dropout")):
            text = f"-{v.name}"  # torch.compile returns an input itself that zeros are added to, and a copy of what loses nothing
        dtype = next((f for f in flags.split() if f[-1].isdigit()), "")
        s.new(text, _SHAPES[shape](v, d), v, exact="exact" in flags, view="view" in flags, dtype=dtype)
    return v


for _weight, _operand, _shape, _flags, _texts in _TABLE:
    OPS.append((_weight, functools.partial(_simple, _operand, _shape, _flags, _texts.split(" | "))))


@op(2)
def linear(s: Scope) -> Any:
    v = s.pick(lambda v: v.dtype == "float32" and len(v.shape) >= 2 and v.width > 0)
    if v:
        out = s.rng.choice([2, 4, 6])
        layer = s.member(f"self.NAME = linear({v.width}, {out})") if s.rng.random() < 0.7 else ""
        s.new(f"{layer}({v.name})" if layer else f"{v.name} @ {s.parameter(v.width, out)} * 0.5", (*v.shape[:-1], out), v)
    return v


@op(0.5)
def autocast(s: Scope) -> Any:
    v = s.pick(lambda v: v.dtype == "float32" and len(v.shape) >= 2 and v.width > 0)
    if v:
        name = s.member(f"self.NAME = linear({v.width}, 4)")
        s.line(f'with torch.autocast("{s.program.device}", dtype=torch.bfloat16):')
        s.line(f"    low = torch.relu({name}({v.name} * 1.0))")
        s.new("low.float()", (*v.shape[:-1], 4), v)
        s.program.tolerance = 5e-2
    return v


@op(0.7)
def attention(s: Scope) -> Any:
    v = s.pick(lambda v: v.is_float and len(v.shape) == 3 and v.axis in (0, 1) and v.width > 0)
    if v is None or v.axis == 1:
        return v and s.new(f"torch.softmax({v.name} @ {v.name}.transpose(1, 2), -1) @ {v.name}", v.shape, v)
    if s.rng.random() < 0.3:
        return s.new(f"torch.einsum('bsd,btd->bst', {v.name}, {v.name}) * 0.3", (*v.shape[:2], v.shape[1]), v)
    heads = f"{v.name}.unsqueeze(1)"
    return s.new(f"F.scaled_dot_product_attention({heads}, {heads}, {heads}).squeeze(1)", v.shape, v)


@op(0.5)
def convolve(s: Scope) -> Any:
    v = s.pick(lambda v: v.dtype == "float32" and len(v.shape) == 3 and v.axis == 0 and 0 not in v.shape)
    return v and s.new(f"F.conv1d({v.name}, {s.parameter(2, int(v.shape[1]), 3)}, padding=1) * 0.3", (v.shape[0], 2, v.width), v)


@op(2.5)
def binary(s: Scope) -> Any:
    v = s.pick(lambda v: v.is_float)
    w = s.same_as(v)
    if v and w:
        texts = ["{} + {}", "{} - {}", "{} * {} * 0.5", "torch.maximum({}, {})", "torch.lerp({}, {}, 0.25)"]
        text = s.rng.choice(texts + ["torch.where({0} > 0, {0}, {1})"] * s.program.exact[v.root])
        return s.new(text.format(v.name, w.name), v.shape, v, w, exact="lerp" not in text)


@op(1.5)
def broadcast(s: Scope) -> Any:
    """A parameter, or something of fewer dims, onto something of more: a mean onto what it is the mean of."""
    v = s.pick(lambda v: v.is_float and v.width > 0)
    if v is None or s.rng.random() < 0.4:
        return v and s.new(f"{v.name} {s.rng.choice('+*')} {s.parameter(v.width)}", v.shape, v, exact=True, dtype=v.dtype)
    shape, dtype = v.shape, v.dtype
    w = s.pick(lambda w: w.dtype == dtype and 0 < len(w.shape) < len(shape) and w.shape == shape[-len(w.shape) :])
    return w and s.new(f"{v.name} - {w.name}", v.shape, v, w, exact=True)


@op(1.5)
def reorder(s: Scope) -> Any:
    v = s.pick(lambda v: len(v.shape) >= 2)
    if v:
        order = s.rng.sample(range(len(v.shape)), len(v.shape))
        return s.new(f"{v.name}.permute({', '.join(map(str, order))})", [v.shape[d] for d in order], v, view=True)


@op(1.5)
def flatten(s: Scope) -> Any:
    """[B, S, D] -> [SB, D], and others; where the batch is not first, rows interleave."""
    v = s.pick(lambda v: len(v.shape) >= 2 and 0 not in v.shape)
    if v:
        d = s.rng.randrange(len(v.shape) - 1)
        sizes = [f"{v.name}.shape[{i}]" if isinstance(n, str) else str(n) for i, n in enumerate(v.shape)]
        sizes[d : d + 2] = [f"{sizes[d]} * {sizes[d + 1]}"]
        text = s.rng.choice([f"flatten({d}, {d + 1})", f"reshape({', '.join(sizes)})", f"view({', '.join(sizes)})"])
        return s.new(f"{v.name}.{text}", (*v.shape[:d], _times(*v.shape[d : d + 2]), *v.shape[d + 2 :]), v, view=True)


@op(1.5)
def unflatten(s: Scope) -> Any:
    def factors(size: Dim) -> list[int]:
        number = int(size[:-1]) if isinstance(size, str) else size
        return [k for k in (2, 3, 4) if number > (k if isinstance(size, int) else 1) and number % k == 0]

    v = s.pick(lambda v: any(map(factors, v.shape)))
    if v:
        dim = s.rng.choice([i for i, size in enumerate(v.shape) if factors(size)])
        size = v.shape[dim]
        k = s.rng.choice(factors(size))
        rest: Dim = size // k if isinstance(size, int) else f"{int(size[:-1]) // k}B"
        pair, text = ((rest, k), f"(-1, {k})") if s.rng.random() < 0.7 else ((k, rest), f"({k}, -1)")
        return s.new(f"{v.name}.unflatten({dim}, {text})", (*v.shape[:dim], *pair, *v.shape[dim + 1 :]), v, view=True)


@op(2)
def cut(s: Scope) -> Any:
    """Chunks, splits and slices along a dim that is not the batch."""
    v = s.pick(lambda v: any(v.shape[d] not in (0, 1) for d in v.other_dims))
    if v:
        dim = s.rng.choice([d for d in v.other_dims if v.shape[d] not in (0, 1)])
        n, name = int(v.shape[dim]), v.name
        halves, rest = _with(v.shape, dim, n // 2), _with(v.shape, dim, n - 1)
        several = [
            (f"{name}.chunk(2, {dim})", [halves] * 2) if n % 2 == 0 else (f"{name}.unbind({dim})", [_without(v.shape, dim)] * n),
            (f"{name}.split([1, {n - 1}], {dim})", [_with(v.shape, dim, 1), rest]),
        ]  # fmt: skip
        one = [(f"{name}.select({dim}, -1)", _without(v.shape, dim)), (f"{name}.narrow({dim}, 1, {n - 1})", rest),
               (f"{name}[{':, ' * dim}::2]", _with(v.shape, dim, (n + 1) // 2))]  # fmt: skip
        return s.several(*s.rng.choice(several), v) if s.rng.random() < 0.5 else s.new(*s.rng.choice(one), v, view=True)


@op()
def guidance(s: Scope) -> Any:
    """Two batches in one, and apart again."""
    v = s.pick(lambda v: v.is_float and v.axis >= 0)
    if v:
        both = s.new(f"torch.cat([{v.name}, {v.name} * 0.5], {v.axis})", _with(v.shape, v.axis, _times(2, v.shape[v.axis])), v, exact=True)
        if s.rng.random() < 0.6:
            both = s.new(f"torch.relu({both.name})", both.shape, both, exact=True)
        a, b = s.several(f"{both.name}.chunk(2, {v.axis})", [v.shape] * 2, both)
        s.new(f"{a.name} + 0.5 * ({a.name} - {b.name})", v.shape, a, b, exact=True)
    return v


@op()
def join(s: Scope) -> Any:
    v = s.pick(lambda v: v.shape)
    w = s.same_as(v)
    if v and w:
        if v.other_dims and s.rng.random() < 0.6:
            dim = s.rng.choice(v.other_dims)
            return s.new(f"torch.cat([{v.name}, {w.name}], {dim})", _with(v.shape, dim, _times(2, v.shape[dim])), v, w, exact=True)
        dim = s.rng.randrange(len(v.shape) + 1)
        return s.new(f"torch.stack([{v.name}, {w.name}], {dim})", (*v.shape[:dim], 2, *v.shape[dim:]), v, w, exact=True)


@op(1.3)
def other_dims(s: Scope) -> Any:
    """A dim of size 1, which may go again; or an expanded one."""
    v = s.pick(lambda v: 1 in v.shape) if s.rng.random() < 0.3 else None
    if v:
        return s.new(f"{v.name}.squeeze({v.shape.index(1)})", _without(v.shape, v.shape.index(1)), v, view=True)
    v = s.pick(lambda v: len(v.shape) < 4)
    if v:
        dim = s.rng.randrange(len(v.shape) + 1)
        shape = (*v.shape[:dim], 1, *v.shape[dim:])
        if s.rng.random() < 0.6:
            return s.new(f"{v.name}.unsqueeze({dim})", shape, v, view=True)
        sizes = ", ".join("2" if d == dim else "-1" for d in range(len(shape)))
        return s.new(f"{v.name}.unsqueeze({dim}).expand({sizes})", _with(shape, dim, 2), v, view=True, is_dense=False)


@op()
def to_rows(s: Scope) -> Any:
    """Something without batch, repeated for every row of a batch; or the number of the row."""
    rows = s.pick(lambda v: "1B" in v.shape)
    v = s.pick(lambda v: v.is_float and v.shape and v.axis < 0)
    if rows is None:
        return None
    n = f"{rows.name}.shape[{rows.axis}]"
    if v is None or s.rng.random() < 0.4:
        text = s.rng.choice(["torch.arange({}, dtype=torch.float32, device={}) * 0.1", "torch.ones({}, device={})",
                             "torch.full(({},), 0.5, device={})"])  # fmt: skip
        return s.new(text.format(n, f"{rows.name}.device"), ("1B",), rows, dtype="float32", exact=True)
    if s.rng.random() < 0.5:
        return s.new(f"{v.name}.repeat({n}, {', '.join('1' for _ in v.shape)})", ("1B", *v.shape), v, exact=True)
    return s.new(f"{v.name}.expand({n}, {', '.join('-1' for _ in v.shape)})", ("1B", *v.shape), v, view=True, is_dense=False)


@op(0.7)
def look_up(s: Scope) -> Any:
    v = s.pick(lambda v: v.is_float and v.width > 0 and s.program.exact[v.root])
    if v:
        n = v.name
        if v.axis == 0 and v.shape[0] == "1B" and s.rng.random() < 0.5:
            return s.new(f"{n}[{n}.shape[0] - 1 - torch.arange({n}.shape[0], device={n}.device)]", v.shape, v, exact=True)
        if s.rng.random() < 0.5:
            return s.new(f"{n}[..., {s.buffer('torch.tensor([0, 0])')}]", (*v.shape[:-1], 2), v, exact=True)
        return s.new(f"F.embedding(({n} > 0).long(), {s.parameter(2, 4)})", (*v.shape, 4), v, exact=True, dtype="float32")


@op(0.5)
def scaled(s: Scope) -> Any:
    v = s.pick(lambda v: v.is_float) if s.depth == 0 else None
    return v and s.new(f"{v.name} * {s.rng.choice(['scale', '(1 + number)'])} * 0.5", v.shape, v, exact=True)


# -- what changes memory


@op(2.5)
def change(s: Scope) -> Any:
    v = s.pick(lambda v: v.is_float and v.is_dense and v.shape)
    w = s.same_as(v, other_root=True) if s.rng.random() < 0.5 else None
    if v:
        alone = ["{}.mul_(0.5)", "{}.add_(1.0)", "{}.relu_()", "{}.neg_()", "{}.neg_().mul_(0.5)"]
        both = ["{} += {}", "{}.copy_({})", "{}.mul_({}.clamp(-1, 1))", "torch.add({0}, {1}, out={0})"]
        text = s.rng.choice(both if w else alone).format(v.name, w.name if w else "")
        s.change(v, text, *([w] if w else []))
    return v


@op(2)
def change_some(s: Scope) -> Any:
    """In place, on columns or on rows, by a number or by another tensor's."""
    v = s.pick(lambda v: v.is_float and v.is_dense and len(v.shape) >= 2 and 0 not in v.shape)
    if v:
        d = s.rng.choice(v.other_dims)
        if v.axis >= 0 and s.rng.random() < 0.5:
            d = v.axis
        where = s.rng.choice([f"select({d}, 0)", f"select({d}, -1)", f"narrow({d}, 0, 1)", f"narrow({d}, 1, {v.name}.shape[{d}] - 1)"])
        w = s.same_as(v, other_root=True) if s.rng.random() < 0.5 else None
        if w:
            return s.change(v, f"{v.name}.{where}.{s.rng.choice(['copy_', 'add_'])}({w.name}.{where.replace(v.name, w.name)})", w)
        call = f"{v.name}.{where}.{s.rng.choice(['mul_(0.5)', 'fill_(0.25)', 'neg_().add_(1.0)', 'neg_().mul_(0.5)'])}"
        return s.new(call, _without(v.shape, d), v, view=True) if "select" in where and s.rng.random() < 0.5 else s.change(v, call)


@op(1.5)
def copy_if_needed(s: Scope) -> Any:
    """A copy for most sizes and a view for others, one of the two changed afterwards."""
    v = s.pick(lambda v: v.is_float and v.is_dense and len(v.shape) >= 2)
    if v:
        a, b = s.rng.sample(range(len(v.shape)), 2)
        shape, turned = list(v.shape), f"{v.name}.transpose({a}, {b})"
        shape[a], shape[b] = shape[b], shape[a]
        text = s.rng.choice([".contiguous()", ".reshape({}.shape)", ".clone(memory_format=torch.contiguous_format)", ".to({}.dtype)"])
        made = s.new(turned + text.format(turned), shape, v, view=True)
        s.line(f"{s.rng.choice([v, made]).name}.{s.rng.choice(['add_(0.5)', 'mul_(0.5)'])}")
    return v


@op(0.7)
def scatter(s: Scope) -> Any:
    v = s.pick(lambda v: v.is_float and v.is_dense and v.shape[:-1] == ("1B",) and v.width > 0)
    w = s.same_as(v, other_root=True, exact=True)
    if v and w:
        n, m = v.name, w.name
        rows = f"torch.arange({n}.shape[0], device={n}.device)"
        return s.change(v, s.rng.choice([
            f"{n}.scatter_(1, ({m} > 0).long() % {v.width}, 0.5)", f"{n}.index_add_(0, {rows}.flip(0), {m})",
            f"{n}.index_copy_(1, {s.buffer('torch.tensor([0])')}, {m}[:, :1])", f"{n}[{m} > 0.5] = 0.25", f"{n}[..., 0] = {m}[..., 0]",
            f"{n}[{rows}, 0] = {m}[:, 0]", f"{n}.masked_fill_({m} > 0, 0.5)",
        ]), w)  # fmt: skip


@op()
def cache(s: Scope) -> Any:
    """Rows into a cache [B, T, D] (or [T, B, D]) at a position."""
    v = s.pick(lambda v: v.shape == ("1B", D) and v.dtype == "float32")
    c = s.pick(lambda c: c.shape in (("1B", T, D), (T, "1B", D)) and c.is_dense and c.dtype == "float32")
    if v and c and c.root != v.root:
        t, row = c.shape.index(T), f"{v.name}.unsqueeze({c.shape.index(T)})"
        return s.change(c, s.rng.choice([
            f"{c.name}.index_copy_({t}, {s.buffer('torch.tensor([1])')}, {row})", f"{c.name}.select({t}, 2).copy_({v.name})",
            f"{c.name}.narrow({t}, 0, 1).add_({row})",
        ]), v)  # fmt: skip


@op()
def state(s: Scope) -> Any:
    """Buffers without a batch axis: counters, statistics, tables by row number. (Those of training are not read.)"""
    if s.program.is_trained:
        return None
    like = s.pick(lambda v: v.dtype == "float32" and v.shape)
    v = s.pick(lambda v: v.dtype == "float32" and v.shape == ("1B", D))
    kind = s.rng.choice(["counter", "chain", "mean", "table"] if v else ["counter", "chain"])
    if like and kind == "counter":
        name = s.buffer("torch.zeros(())")
        s.line(s.rng.choice([f"{name} += 1", f"{name}.add_(1)"]))
        return s.new(f"{like.name} * (1 / ({name} + 1))", like.shape, like)
    if like and kind == "chain":
        a, b = s.buffer("torch.zeros(4)"), s.buffer("torch.ones(4)")
        s.line(f"{a} += {b}")
        s.line(f"{b}.copy_({v.name}.mean(0))" if v else f"{b}.mul_(0.5)")
        return s.new(f"{like.name} + {a}.sum() * 0.01", like.shape, like)
    if v and kind == "mean":
        name = s.buffer("torch.zeros(4)")
        s.line(f"{name}.mul_(0.5).add_({v.name}.mean(0) * 0.5)")
        return s.new(f"{v.name} - {name}", v.shape, v)
    if v:
        name = s.buffer("torch.zeros(40, 4)")
        s.line(f"{name}[: {v.name}.shape[0]] = {v.name}")
        return s.new(f"{v.name} + {name}[: {v.name}.shape[0]]", v.shape, v)


# -- structure


@op(2)
def module(s: Scope) -> Any:
    """Some ops in a module of their own."""
    if s.depth >= 2:
        return None
    given = list({v.name: v for v in (s.pick() for _ in range(s.rng.randint(1, 4))) if v}.values())
    inner = Scope(s.program, f"Block{s.program.count('block')}", list(given), s.depth + 1)
    steps(inner, s.rng.randint(2, 5))
    returned = list({v.name: v for v in (inner.pick() for _ in range(s.rng.randint(1, 3))) if v}.values())
    s.program.classes.append(inner.source(", ".join(v.name for v in given), f"{', '.join(v.name for v in returned)},"))
    made = [Var(s.program.name(), v.shape, v.dtype, v.root, v.is_dense) for v in returned]
    block = s.member(f"self.NAME = {inner.name}()")
    s.line(f"{', '.join(v.name for v in made)}, = {block}({', '.join(v.name for v in given)})")
    s.env.extend(made)
    return True


@op(0.6)
def marked(s: Scope) -> Any:
    if s.indent:
        return None
    s.line(f'with df.mark("mark{s.program.count("mark") % 3}"):')
    s.indent = "    "
    s.line("pass")
    steps(s, s.rng.randint(1, 3))
    s.indent = ""
    return True


@op(0.15)
def broken(s: Scope) -> Any:
    if s.depth == 0 and not s.indent:
        s.line("torch._dynamo.graph_break()")
        return True


def steps(s: Scope, number: int, ops: Sequence[tuple[float, Op]] = ()) -> None:
    """`number` ops that found something to work on. `ops`: of these; by default of all."""
    ops = ops or OPS + TRAINED * s.program.is_trained + 2 * ODD * s.program.is_odd
    functions, weights = [f for _, f in ops], [w for w, _ in ops]
    for _ in range(8 * number):
        if number <= 0:
            return
        number -= bool(s.rng.choices(functions, weights)[0](s))
