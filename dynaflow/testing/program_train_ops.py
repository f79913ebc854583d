"""What a random program may do besides, where it is trained."""

from __future__ import annotations

from typing import Any

from dynaflow.testing.program_ops import OPS, TRAINED, Op, Scope, broken, op, steps

# ops of a block whose values are computed anew in the backward: nothing that changes memory or state, which would change twice
_PURE: list[tuple[float, Op]] = []


def pure(weight: float = 1.0) -> Any:
    def add(function: Op) -> Op:
        _PURE.append((weight, function))
        return op(weight, TRAINED)(function)

    return add


@op(1.0, TRAINED)
def statistics(s: Scope) -> Any:
    """Buffers that are changed, and not read: AOT reads a buffer again in the backward, where it has changed, and torch.compile's
    gradients are wrong (2.13)."""
    like = s.pick(lambda v: v.dtype == "float32" and v.shape and v.shape[-1] == 4)
    kind = s.rng.choice(["counter", "chain", "mean", "table"])
    if kind == "counter" or like is None:
        s.line(f"{s.buffer('torch.zeros(())')}.add_(1)")
    elif kind == "chain":
        a, b = s.buffer("torch.zeros(4)"), s.buffer("torch.ones(4)")
        s.line(f"{a} += {b}")
        s.line(f"{b}.copy_({like.name}.detach().flatten(0, -2).mean(0))" if len(like.shape) > 1 else f"{b}.mul_(0.5)")
    elif kind == "mean":
        s.line(f"{s.buffer('torch.zeros(4)')}.mul_(0.5).add_({like.name}.detach().reshape(-1, 4).mean(0) * 0.5)")
    elif like.shape[0] == "1B":
        s.line(f"{s.buffer('torch.zeros(40, *' + repr(like.shape[1:]) + ')')}[: {like.name}.shape[0]] = {like.name}.detach()")
    return True


@pure(1.0)
def normalised(s: Scope) -> Any:
    """By its own batch while it is trained, by what was seen so far otherwise."""
    v = s.pick(lambda v: v.dtype == "float32" and len(v.shape) == 3 and v.axis == 0 and isinstance(v.shape[1], int) and v.width > 1)
    if v and int(v.shape[1]) > 0:
        return s.new(f"{s.member(f'self.NAME = nn.BatchNorm1d({v.shape[1]})')}({v.name})", v.shape, v)
    return None


@pure(0.5)
def dropped(s: Scope) -> Any:
    v = s.pick(lambda v: v.is_float and v.shape)
    if v:
        s.program.is_random = True
        return s.new(f"F.dropout({v.name}, 0.5, self.training)", v.shape, v)
    return None


@pure(1.0)
def shared_weights(s: Scope) -> Any:
    """A parameter that is used twice: its gradients add up."""
    v = s.pick(lambda v: v.dtype == "float32" and len(v.shape) >= 2 and v.width > 0)
    if v:
        name = s.parameter(v.width, v.width)
        return s.new(f"torch.tanh({v.name} @ {name}) @ {name}.t() * 0.5", v.shape, v)
    return None


@pure(0.7)
def without_gradient(s: Scope) -> Any:
    v = s.pick(lambda v: v.is_float)
    if v:
        return s.new(s.rng.choice([f"{v.name}.detach().clone()", f"{v.name} - {v.name}.detach() * 0.5"]), v.shape, v)
    return None


@op(0.5, TRAINED)
def under_no_grad(s: Scope) -> Any:
    if s.indent:
        return None
    s.line("with torch.no_grad():")
    s.indent = "    "
    s.line("pass")
    steps(s, s.rng.randint(1, 2), _PURE)
    s.indent = ""
    return True


@op(1.2, TRAINED)
def checkpointed(s: Scope) -> Any:
    """A block whose values are computed anew in the backward, of what nobody changes."""
    if s.depth >= 2:
        return None
    given = list({v.name: v for v in (s.pick(lambda v: v.is_float and v.shape) for _ in range(s.rng.randint(1, 3))) if v}.values())
    if not given:
        return None
    inner = Scope(s.program, f"Block{s.program.count('block')}", list(given), s.depth + 1)
    steps(inner, s.rng.randint(2, 5), _PURE)
    made = [v for v in inner.env if v not in given][-2:]
    if not made:
        return None
    s.program.classes.append(inner.source(", ".join(v.name for v in given), f"{', '.join(v.name for v in made)},"))
    block = s.member(f"self.NAME = {inner.name}()")
    names = ", ".join(f"{v.name}.clone()" for v in given)
    s.line(f"{', '.join(v.name for v in made)}, = checkpoint({block}, {names}, use_reentrant=False)")
    s.env.extend(made)
    return True


# more often than without: each piece has a forward and a backward
TRAINED.append((0.3, broken))
# of the ops of all programs, what computes something new: products, and what tables say of single operands
_PURE += [(w, f) for w, f in OPS if getattr(f, "__name__", "simple") in ("simple", "linear", "binary", "attention", "broadcast")]
