"""Random flows that run: exact integer arithmetic, so that any wrong order, row or byte changes the result.

    case = random_flow(7)
    expected = case.reference()                             # the ops in program order, on plain tensors
    outputs = fake.run(plan, case.program, case.inputs(), case.sizes)

An op hashes each input row to one number, mixes these numbers, and spreads the result over its outputs. Every wrong number
anywhere ends up in some output with near certainty.

    rows    [B, w]      the batch first
    cols    [w, B]      the batch second; the buffer still has it outermost
    twice   [2B, w]     two rows per row of the batch
    state   [w]         no batch axis

A piece is some of the columns of its home (of a state: some of its numbers). Who reads or changes it takes the home, and looks at
these; who makes it takes the home as well, and writes there.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dynaflow.ir import Flow, Launch, Op, Part, Value, evaluate
from dynaflow.runtime.binder import external_values
from dynaflow.runtime.program import Expr, Layout, Program, Unit

FORMS = ("rows", "cols", "twice", "state")
_WEIGHTS = torch.tensor([random.Random(0).getrandbits(62) * 2 + 1 for _ in range(64)], dtype=torch.int64)
_DTYPES = {"int64": torch.int64, "int32": torch.int32}


@dataclass(frozen=True, slots=True)
class Spec:
    """A value as the generator sees it."""

    name: str
    form: str
    # an expression over the symbols
    width: str
    dtype: str = "int64"
    # of a piece: the value that it is a piece of, and the column at which it begins there, as an expression
    home: str = ""
    start: str = ""

    @property
    def memory(self) -> str:
        """The value that a unit takes for it."""
        return self.home or self.name

    def seen(self, tensor: torch.Tensor, sizes: dict[str, int]) -> torch.Tensor:
        """Itself, in the tensor that a unit takes for it."""
        if not self.home:
            return tensor
        return tensor.narrow(1 if self.form == "rows" else 0, evaluate(self.start, sizes), evaluate(self.width, sizes))

    def value(self, role: str, storage: str) -> Value:
        rows = {"rows": "s0", "cols": "s0", "twice": "2*s0", "state": ""}[self.form]
        shape = {"rows": (rows, self.width), "cols": (self.width, rows), "twice": (rows, self.width), "state": (self.width,)}[self.form]
        nbytes = f"{_DTYPES[self.dtype].itemsize}*" + "*".join(part for part in (rows, self.width) if part)
        axis = {"rows": 0, "cols": 1, "twice": 0, "state": None}[self.form]
        return Value(self.name, shape, self.dtype, nbytes, axis, role, storage, self.home)

    def layout(self, is_mutated: bool, rng: random.Random) -> Layout:
        stride = {"rows": (self.width, "1"), "cols": ("1", self.width), "twice": (self.width, "1"), "state": ("1",)}[self.form]
        expected = ("s0", "1") if self.form == "cols" and not is_mutated and rng.random() < 0.3 else None
        return Layout(_DTYPES[self.dtype], torch.device("cpu"), stride, expected)


def _as_rows(tensor: torch.Tensor, form: str) -> torch.Tensor:
    """A view [B, n] of a value that carries the batch."""
    if form == "cols":
        return tensor.t()
    return tensor.view(tensor.shape[0] // 2, -1) if form == "twice" else tensor


def _hash(tensor: torch.Tensor, form: str) -> torch.Tensor:
    """One number per row of the batch; one number in all for a state."""
    if form == "state":
        return (tensor * _WEIGHTS[: tensor.shape[0]]).sum()
    rows = _as_rows(tensor, form)
    return (rows * _WEIGHTS[: rows.shape[1]]).sum(1)


@dataclass(frozen=True)
class Mixer:
    """An op's function. Takes its inputs, the homes of the pieces that it makes (and the number of rows, where it has no input with
    rows), writes the pieces, returns its other outputs."""

    key: int
    inputs: tuple[Spec, ...]
    outs: tuple[Spec, ...]
    # numbers of the inputs that are changed in place
    mutated: tuple[int, ...]
    mixes_batch: bool
    # widths are symbols or numbers
    sizes: dict[str, int]
    # the emulated random state: a counter, shared by all ops of the flow
    random_state: list[int] | None = None

    @property
    def pieces(self) -> list[Spec]:
        return [spec for spec in self.outs if spec.home]

    def __call__(self, *args: Any) -> tuple[torch.Tensor, ...]:
        number: Any = self.key
        constant: Any = torch.tensor(self.key)
        tensors = [spec.seen(tensor, self.sizes) for spec, tensor in zip((*self.inputs, *self.pieces), args)]
        for i, (spec, tensor) in enumerate(zip(self.inputs, tensors)):
            mixed = _hash(tensor, spec.form) * (2 * i + 3)
            number = number + mixed
            if spec.form == "state":
                constant = constant + mixed
        if self.random_state is not None:
            self.random_state[0] = (self.random_state[0] * 6364136223846793005 + self.key) % 2**62
            number = number + self.random_state[0]
        if len(args) > len(tensors):
            number = torch.zeros(int(args[-1]), dtype=torch.int64) + number
        number = number ^ (number >> 23)
        if self.mixes_batch and number.dim():
            number = number + number.cumsum(0) + number.sum() * 5
        for i in self.mutated:
            self._change(tensors[i], self.inputs[i], number)
        # An op that may be split makes the same state on every part: from its states alone.
        from_rows = {True: number, False: number if self.mixes_batch else constant}
        made = [self._make(spec, from_rows[spec.form != "state"], k) for k, spec in enumerate(self.outs)]
        for piece, result in zip(tensors[len(self.inputs) :], (m for m, spec in zip(made, self.outs) if spec.home)):
            piece.copy_(result)
        return tuple(m for m, spec in zip(made, self.outs) if not spec.home)

    def _change(self, tensor: torch.Tensor, spec: Spec, number: torch.Tensor) -> None:
        if spec.form == "state":
            tensor.mul_(5).add_(number.sum().to(tensor.dtype))
        else:
            rows = _as_rows(tensor, spec.form)
            rows.mul_(5).add_((number[:, None] if number.dim() else number).to(tensor.dtype))

    def _make(self, spec: Spec, number: torch.Tensor, k: int) -> torch.Tensor:
        width = evaluate(spec.width, self.sizes)
        if spec.form == "state":
            return (number.sum() * _WEIGHTS[:width] + k).to(_DTYPES[spec.dtype])
        columns = width * 2 if spec.form == "twice" else width
        made = (number[:, None] * _WEIGHTS[:columns] + k).to(_DTYPES[spec.dtype])
        return made.t() if spec.form == "cols" else made.view(-1, width)


def _numbers(value: Value, sizes: dict[str, int], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed * 1009 + sum(map(ord, value.storage)))
    shape = [evaluate(size, sizes) for size in value.shape]
    return torch.randint(-(2**30), 2**30, shape, generator=generator).to(_DTYPES[value.dtype])


@dataclass(frozen=True)
class Case:
    """A flow that runs: its program, sizes and inputs."""

    seed: int
    flow: Flow
    program: Program
    sizes: dict[str, int]
    given: dict[str, torch.Tensor]
    random_state: list[int] = field(repr=False)

    @property
    def batch_size(self) -> int:
        return self.sizes["s0"]

    def inputs(self) -> dict[str, torch.Tensor]:
        """Fresh inputs and parameters, aliased as the flow says; and the random state as it was."""
        self.random_state[0] = self.seed
        stored = {storage: tensor.clone() for storage, tensor in self.given.items()}
        return {v.name: stored[v.storage] for v in self.flow.values if v.role in ("input", "param")}

    def resized(self, **sizes: int) -> Case:
        """The same flow with other sizes (`s0` is the batch) and other inputs: plans hold for all of them."""
        new = {**self.sizes, **sizes}
        units = {name: replace(unit, fn=replace(unit.fn, sizes=new)) for name, unit in self.program.units.items()}  # type: ignore[type-var]
        given = {v.storage: _numbers(v, new, self.seed) for v in self.flow.values if v.role in ("input", "param")}
        return replace(self, program=replace(self.program, units=units), sizes=new, given=given)

    def reference(self) -> dict[str, torch.Tensor]:
        """Outputs and, after the call, inputs: from the ops in program order, on plain tensors."""
        tensors = {**self.inputs(), **{home: self._empty(home) for home in self.flow.pieces}}
        for op in self.flow.ops:
            unit = self.program.units[op.name]
            args = [self.sizes[arg.text] if isinstance(arg, Expr) else tensors[arg] for arg in unit.args]
            tensors.update(zip(unit.outs, unit.fn(*args)))
        kept = {*self.flow.outputs, *(v.name for v in self.flow.values if v.role in ("input", "param"))}
        return {name: tensor for name, tensor in tensors.items() if name in kept}

    def can_fuse(self, op: str) -> bool:
        """A replacement gets tensors alone, and returns what it makes: an op that takes a size, or makes a piece, stays as it is."""
        takes_sizes = any(isinstance(arg, Expr) for arg in self.program.units[op].args)
        return not takes_sizes and not any(self.flow.value[v].home for v in self.flow.op(op).writes)

    def fuse(self, calls: Sequence[tuple[str, Part]], name: str) -> Callable[..., tuple[torch.Tensor, ...]]:
        """One function in the place of several calls: their external inputs in order of first use, their external outputs in order."""
        inputs, outputs = external_values(self.flow, Launch(tuple(calls), "", name))
        made: dict[str, set[int]] = {}
        for op_name, part in calls:
            op = self.flow.op(op_name)
            for value in map(self.flow.home, (*op.reads, *op.mutates)):
                rows = self._rows(value, part)
                is_given = any(v == value and self._rows(v, p) == rows for v, p in inputs)
                assert not (is_given and made.get(value, set()) >= rows), f"{name} gets {value} {part}, which is made inside it"
            for value in op.writes:
                made.setdefault(value, set()).update(self._rows(value, part))

        def fused(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            whole = {value: self._empty(value) for value in made}
            for op_name, part in calls:
                unit = self.program.units[op_name]
                args = []
                for arg in unit.args:
                    assert isinstance(arg, str), "sizes are not given to a replacement"
                    rows = self._rows(arg, part)
                    given = (t for (value, p), t in zip(inputs, tensors) if value == arg and self._rows(value, p) == rows)
                    args.append(self._narrow(whole[arg], arg, part) if arg in made and made[arg] >= rows else next(given))
                for out, result in zip(unit.outs, unit.fn(*args)):
                    self._narrow(whole[out], out, part).copy_(result)
            return tuple(self._narrow(whole[value], value, part) for value, part in outputs)

        fused.__qualname__ = name
        return fused

    def _rows(self, value: str, part: Part) -> set[int]:
        """The part's rows of a value; of one without a batch axis, its only one."""
        return {0} if self.flow.value[value].axis is None else set(range(*part.bounds(self.batch_size)))

    def _empty(self, value: str) -> torch.Tensor:
        shape = [evaluate(size, self.sizes) for size in self.flow.value[value].shape]
        layout = self.program.layouts[value]
        stride = [evaluate(step, self.sizes) for step in layout.stride]
        return torch.full((self.batch_size * 64,), -1, dtype=layout.dtype).as_strided(shape, stride)

    def _narrow(self, tensor: torch.Tensor, value: str, part: Part) -> torch.Tensor:
        axis = self.flow.value[value].axis
        if axis is None:
            return tensor
        lo, hi = part.bounds(self.batch_size)
        each = tensor.shape[axis] // self.batch_size
        return tensor.narrow(axis, lo * each, (hi - lo) * each)


# ---------------------------------------------------------------------------- the generator


def random_flow(seed: int, num_ops: int | None = None) -> Case:
    """A random DAG of 4 to 30 ops, with everything in it that makes plans go wrong. The same for the same seed."""
    return _Generator(random.Random(seed)).make(seed, num_ops)


class _Generator:
    def __init__(self, rng: random.Random):
        self.rng = rng
        self.sizes = {"s0": rng.randint(4, 11), "s1": rng.randint(2, 5)}
        self.random_state = [0]
        # what ops may read, newest last; and per value where it comes from
        self.specs: list[Spec] = []
        self.role: dict[str, str] = {}
        self.storage: dict[str, str] = {}
        self.mutated: set[str] = set()
        self.ops: list[Op] = []
        self.mixers: dict[str, Mixer] = {}

    def make(self, seed: int, num_ops: int | None) -> Case:
        rng = self.rng
        self._inputs()
        choices = {
            self._row_wise: 9, self._mixing: 2, self._in_place: 3, self._counter: 2, self._random: 1.5, self._collective: 3,
            self._source: 0.5, self._reduce: 1, self._pieces: 1,
        }  # fmt: skip
        for i in range(num_ops or rng.randint(4, 30)):
            rng.choices(list(choices), list(choices.values()))[0](f"L{i // 4}.op{i}")
        outputs = self._outputs()
        values = tuple(spec.value(self.role[spec.name], self.storage[spec.name]) for spec in self.specs)
        flow = Flow("random", values, tuple(self.ops), outputs, ("s0",), ("s0", "s1"))
        units = {}
        for op in self.ops:
            mixer = self.mixers[op.name]
            rows = () if any(spec.form != "state" for spec in mixer.inputs) or _is_state_only(mixer) else (Expr("s0"),)
            args = (*(spec.memory for spec in (*mixer.inputs, *mixer.pieces)), *rows)
            units[op.name] = Unit(mixer, args, tuple(spec.name for spec in mixer.outs if not spec.home))
        layouts = {s.name: s.layout(s.name in self.mutated, rng) for s in self.specs if self.role[s.name] in ("temp", "output")}
        return Case(seed, flow, Program(flow, units, layouts), self.sizes, {}, self.random_state).resized()

    # -- values

    def _spec(self, name: str, form: str | None = None) -> Spec:
        form = form or self.rng.choices(FORMS[:3], (8, 1, 1))[0]
        return Spec(name, form, self.rng.choice(("1", "2", "3", "4", "s1")), self.rng.choices(("int64", "int32"), (4, 1))[0])

    def _add(self, spec: Spec, role: str, storage: str = "") -> Spec:
        self.specs.append(spec)
        self.role[spec.name], self.storage[spec.name] = role, storage or spec.name
        return spec

    def _inputs(self) -> None:
        rng = self.rng
        for i in range(rng.randint(1, 3)):
            self._add(self._spec(f"x{i}"), "input")
        for i in range(rng.randint(0, 2)):
            self._add(self._spec(f"weight{i}", "state"), "param")
        for i in range(rng.randint(0, 2)):
            self._add(self._spec(f"count{i}", "state"), "input")
        if rng.random() < 0.3:
            # One tensor under two names: a cache that is passed twice.
            cache = self._add(self._spec("cache"), "input")
            self._add(Spec("cache_alias", cache.form, cache.width, cache.dtype), "input", "cache")

    def _pick(self, count: int, accept: Callable[[Spec], bool] = lambda spec: True) -> list[Spec]:
        """Some values that exist, newer ones more often: deep flows, with a few long skips."""
        pool = [spec for spec in self.specs if accept(spec)]
        weights = [4.0 if len(pool) - i <= 4 else 1.0 for i in range(len(pool))]
        picked = self.rng.choices(pool, weights, k=count) if pool else []
        return list(dict.fromkeys(picked))

    def _outputs(self) -> tuple[str, ...]:
        """What nobody reads, mostly; some that are read as well; sometimes one of them twice; sometimes an input."""
        rng = self.rng
        read = {name for op in self.ops for name in op.reads}
        made = [spec.name for spec in self.specs if self.role[spec.name] == "temp"]
        outputs = [name for name in made if (name not in read and rng.random() < 0.97) or rng.random() < 0.1]
        outputs = outputs or made[-1:]
        for name in outputs:
            self.role[name] = "output"
        if rng.random() < 0.1:
            outputs.append(rng.choice(outputs))
        if rng.random() < 0.1:
            outputs.append("x0")
        return tuple(outputs)

    # -- ops

    def _op(self, name: str, inputs: list[Spec], outs: list[Spec], *, mutated: tuple[int, ...] = (), mixes: str = "",
            uses: tuple[str, ...] = (), kind: str = "", is_random: bool = False) -> None:  # fmt: skip
        kind = kind or self.rng.choices(("compute", "memory", "network", "copy"), (5, 2, 2, 1))[0]
        for spec in outs:
            if spec.name not in self.role:
                self._add(spec, "piece" if spec.home else "temp")
        names = tuple(spec.name for spec in inputs)
        changed = tuple(names[i] for i in mutated)
        self.mutated.update(inputs[i].memory for i in mutated)
        # Sometimes what is changed in place is listed as read, too: both are legal.
        reads = names if self.rng.random() < 0.5 else tuple(n for n in names if n not in changed)
        self.ops.append(Op(name, kind, reads, tuple(spec.name for spec in outs), changed, uses, mixes, f"model.{name}"))
        state = self.random_state if is_random else None
        self.mixers[name] = Mixer(self.rng.getrandbits(40) * 2 + 1, tuple(inputs), tuple(outs), mutated, bool(mixes), self.sizes, state)

    def _made(self, name: str, most: int = 2) -> list[Spec]:
        return [self._spec(f"{name}:{k}") for k in range(self.rng.randint(1, most))]

    def _batch_inputs(self, most: int = 3) -> list[Spec]:
        """At least one with rows; the others may be states."""
        first = self._pick(1, lambda spec: spec.form != "state")
        more = self._pick(self.rng.randint(0, most - 1))
        return list(dict.fromkeys(first + more))

    def _row_wise(self, name: str) -> None:
        outs = self._made(name, 3 if self.rng.random() < 0.2 else 1)
        if self.rng.random() < 0.1:
            outs.append(self._spec(f"{name}:{len(outs)}", "state"))
        self._op(name, self._batch_inputs(), outs)

    def _mixing(self, name: str) -> None:
        self._op(name, self._batch_inputs(), self._made(name), mixes="it sums over the batch")

    def _in_place(self, name: str) -> None:
        """A residual that is added in place, or a cache that is written."""
        target = self._pick(1, lambda spec: spec.form != "state")
        inputs = list(dict.fromkeys(target + self._batch_inputs(2)))
        mixes = "it scans over the batch" if self.rng.random() < 0.15 else ""
        self._op(name, inputs, self._made(name, 1) if self.rng.random() < 0.6 else [], mutated=(0,), mixes=mixes)

    def _counter(self, name: str) -> None:
        states = self._pick(1, lambda spec: spec.form == "state" and self.role[spec.name] != "param")
        if not states:
            return self._row_wise(name)
        inputs = list(dict.fromkeys(states + (self._batch_inputs(2) if self.rng.random() < 0.7 else [])))
        has_rows = any(spec.form != "state" for spec in inputs)
        outs = self._made(name, 1) if has_rows and self.rng.random() < 0.5 else []
        return self._op(name, inputs, outs, mutated=(0,), mixes="it changes a state that has no batch axis")

    def _random(self, name: str) -> None:
        self._op(name, self._batch_inputs(2), self._made(name, 1), mixes="it draws random numbers", uses=("rng",), is_random=True)

    def _collective(self, name: str) -> None:
        group = self.rng.choices(("group:tp", "group:ep"), (4, 1))[0]
        self._op(name, self._batch_inputs(2), self._made(name, 1), uses=(group,), kind="network")

    def _source(self, name: str) -> None:
        """Rows from nothing: an op that takes the batch size as an argument."""
        self._op(name, self._pick(1, lambda spec: spec.form == "state"), self._made(name, 1))

    def _pieces(self, name: str) -> None:
        """A concatenation: several ops each write some columns of one value. Perhaps one has written all of it before; then some columns
        may belong to no piece. Others read and change pieces in between, and the whole behind them."""
        rng = self.rng
        form = rng.choices(("rows", "cols", "state"), (6, 1, 1))[0]
        mixes = "it makes a value without a batch axis" if form == "state" else ""
        dtype = self._spec("").dtype
        widths = [self._spec("").width for _ in range(rng.randint(2, 4))]
        is_whole_first = rng.random() < 0.3
        starts = ["+".join(["0", *widths[:k]]) for k in range(len(widths))]
        gap = rng.choice(("0", "2")) if is_whole_first else "0"
        home = Spec(f"{name}:0", form, f"({'+'.join([*widths, gap])})", dtype)
        pieces = [Spec(f"{name}:0.{k}", form, width, dtype, home.name, starts[k]) for k, width in enumerate(widths)]
        self.mutated.add(home.name)
        if is_whole_first:
            self._op(f"{name}.all", self._batch_inputs(2), [home], mixes=mixes)
            for piece in pieces:
                self._add(piece, "piece")
            pieces = rng.sample(pieces, rng.randint(1, len(pieces)))
        while pieces:
            outs, pieces = (pieces[:2], pieces[2:]) if rng.random() < 0.2 else (pieces[:1], pieces[1:])
            self._op(f"{name}.{len(pieces)}", self._batch_inputs(2), outs, mixes=mixes)
            if rng.random() < 0.4:
                rng.choice((self._row_wise, self._in_place))(f"{name}.by{len(pieces)}")
        if not is_whole_first:
            self._add(home, "temp")
        if rng.random() < 0.7:
            self._op(f"{name}.cat", list(dict.fromkeys([home, *self._batch_inputs(2)])), self._made(name + ".cat"))

    def _reduce(self, name: str) -> None:
        """Sometimes changed in place by the next op: a convolution's result, which gets its bias."""
        state = self._spec(f"{name}:0", "state")
        self._op(name, self._batch_inputs(2), [state], mixes="it makes a value without a batch axis")
        if self.rng.random() < 0.5:
            inputs = list(dict.fromkeys([state, *self._batch_inputs(2)]))
            self._op(f"{name}.change", inputs, [], mutated=(0,), mixes="it changes a state that has no batch axis")


def _is_state_only(mixer: Mixer) -> bool:
    """Neither rows in nor rows out: no number of rows is needed."""
    return bool(mixer.inputs) and all(spec.form == "state" for spec in (*mixer.inputs, *mixer.outs))
