"""Random torch programs, as Python source: what a model may do to tensors, in odd combinations.

    program = random_program(7); print(program.source); model = program.model(); args, kwargs = program.inputs(8)
    python -m dynaflow.testing.programs --programs 200
    python -m dynaflow.testing.programs --programs 20 --compiler inductor       # units compiled: minutes
    python -m dynaflow.testing.programs --programs 20 --kernels                 # ops are Inductor's kernels: minutes
    python -m dynaflow.testing.programs --programs 20 --train                   # the same, and gradients: minutes
    python -m dynaflow.testing.programs --programs 200 --odd                    # more of what models do now and then
    python -m dynaflow.testing.programs --device cuda                           # streams, and recordings whose outputs somebody keeps

A program is a tree of modules over inputs [B, ...] (or [S, B, ...]), parameters and buffers. It is valid in eager mode for every
batch size, and deterministic. Whatever decides by comparison (a mask, an argmax) is computed exactly, so that no rounding flips it.

1. `random_program` chooses inputs, ops (`program_ops.py`; those for training `program_train_ops.py`, odd ones `program_odd_ops.py`)
   and outputs. Odd programs have inputs that share memory and lie in other things, return more than tensors, and are called in several
   modes (autocast, inference mode).
2. The command runs many under their oracle: of calls without gradients (`program_oracle.py`), or of histories of forwards, backwards
   and steps (`program_histories.py`).
"""

from __future__ import annotations

import argparse
import linecache
import logging
import random
import sys
import types
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Callable, Iterable, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dynaflow as df
import dynaflow.testing.program_odd_ops
import dynaflow.testing.program_train_ops
from dynaflow.testing.program_histories import check_training
from dynaflow.testing.program_ops import D, S, Scope, Shape, T, Var, steps
from dynaflow.testing.program_oracle import Tally, check_program, is_valid

# ---------------------------------------------------------------------------- 1. programs


@dataclass
class Program:
    seed: int
    rng: random.Random
    device: str = "cpu"
    # the dim that carries the batch, as df.compile's batch=
    batch: int = 0
    partition: Any = "auto"
    tolerance: float = 1e-4
    source: str = ""
    classes: list[str] = field(default_factory=list)
    # root -> computed without rounding
    exact: dict[int, bool] = field(default_factory=dict)
    given: list[Var] = field(default_factory=list)
    # how an input is laid out: "", "transposed", "strided", "sliced", "expanded", or "tied" to an earlier one: the same tensor, or
    # "shifted" by a row of the same memory, or the columns "beside" it
    layouts: dict[str, str] = field(default_factory=dict)
    keywords: tuple[str, ...] = ()
    # it is to be trained: parameters require gradients, but for some that are frozen
    is_trained: bool = False
    # inputs that require gradients: as a "leaf", or "made" from one, so that they may be changed
    learned: dict[str, str] = field(default_factory=dict)
    # it draws random numbers, as Inductor does: others than eager mode's
    is_random: bool = False
    # it is called under autocast
    is_autocast: bool = False
    # it does what models do now and then (`program_odd_ops.py`), and takes and returns more than tensors
    is_odd: bool = False
    # inputs that lie in one argument, `box`
    boxed: tuple[str, ...] = ()
    _counts: Counter[str] = field(default_factory=Counter)

    def count(self, what: str) -> int:
        self._counts[what] += 1
        return self._counts[what] - 1

    def name(self) -> str:
        return f"v{self.count('var')}"

    def root(self) -> int:
        return self.count("root")

    def model(self) -> nn.Module:
        """A fresh model; the same weights every time."""
        generator = torch.Generator().manual_seed(self.seed)

        def rand(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator) * 0.5

        def linear(width: int, out: int) -> nn.Linear:
            layer = nn.Linear(width, out)
            layer.weight.data, layer.bias.data = rand(out, width), rand(out)
            return layer

        # Dynamo looks for globals in the module by its name; tracebacks look for the source by its path.
        path = f"<program {self.seed}>"
        linecache.cache[path] = (len(self.source), None, self.source.splitlines(True), path)
        home = sys.modules["dynaflow_random_program"] = types.ModuleType("dynaflow_random_program")
        vars(home).update(torch=torch, nn=nn, F=nn.functional, df=df, rand=rand, linear=linear, checkpoint=checkpoint, seeded=self._seeded,
                          Pair=Pair, Record=Record)  # fmt: skip
        exec(compile(self.source, path, "exec"), vars(home))  # noqa: S102 (we wrote it)
        model: nn.Module = home.Model().train(self.is_trained).requires_grad_(self.is_trained).to(self.device)
        frozen = random.Random(self.seed)
        for parameter in model.parameters() if frozen.random() < 0.3 else ():
            parameter.requires_grad_(self.is_trained and frozen.random() < 0.7)
        return model

    def _seeded(self, make: Callable[[], nn.Module]) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            return make()

    def inputs(
        self, batch_size: int, draw: int = 0, leaves: dict[str, torch.Tensor] | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """`draw`: other numbers of the same sizes. `leaves`: where those go that gradients are wanted of; None: of none."""
        made = self.made(batch_size, draw, leaves)
        args = tuple(made[v.name] for v in self.given if v.name not in (*self.keywords, *self.boxed))
        box = {"box": BOXES[self.seed % len(BOXES)][1]([made[name] for name in self.boxed])} if self.boxed else {}
        return args, {name: made[name] for name in (*self.keywords, "scale", "number")} | box

    def made(self, batch_size: int, draw: int = 0, leaves: dict[str, torch.Tensor] | None = None) -> dict[str, Any]:
        """Inputs by their names, wherever they go."""
        generator = torch.Generator().manual_seed(1000 * self.seed + batch_size + draw * 10**9)
        made: dict[str, Any] = {"scale": 1.5, "number": 2}
        for var in self.given:
            shape = [batch_size if isinstance(d, str) else d for d in var.shape]
            twin = next(v.name for v in self.given if v.root == var.root)
            if self.layouts[var.name] == "tied":
                made[var.name] = made[twin]
            elif self.layouts[var.name] in ("shifted", "beside"):
                made[twin], made[var.name] = _in_one_place(made[twin], self.layouts[var.name], var.axis)
            else:
                made[var.name] = _laid_out(shape, var.dtype, self.layouts[var.name], generator, max(var.axis, 0), self.device)
                if leaves is not None and var.name in self.learned:
                    leaf = leaves[var.name] = made[var.name].requires_grad_()
                    made[var.name] = leaf.clone() if self.learned[var.name] == "made" else leaf
        return made


class Pair(NamedTuple):
    first: Any
    second: Any = None


@dataclass
class Record:
    tensors: Any
    name: str = "record"
    size: int | None = None


# how a program finds what lies in a box, and how that is made
BOXES: list[tuple[str, Callable[[list[torch.Tensor]], Any]]] = [
    ("box['tensors'][{}]", lambda tensors: {"tensors": tensors, "none": None, "text": "a", "flag": True}),
    ("box.first[{}]", lambda tensors: Pair(tuple(tensors))),
    ("box.tensors[{}]", Record),
    ("box.tensors[{}].first", lambda tensors: Record([Pair(t, 0.5) for t in tensors])),
    ("box[1][{}][0]", lambda tensors: (None, {i: [t] for i, t in enumerate(tensors)})),
]


def _in_one_place(given: torch.Tensor, layout: str, axis: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two inputs of the same shape in one storage: `given`, and one beside it."""
    dim, by = (axis, 1) if layout == "shifted" else (given.dim() - 1, given.shape[-1])
    both = torch.cat([given, given.narrow(dim, 0, by) * 2], dim)
    return both.narrow(dim, 0, given.shape[dim]), both.narrow(dim, by, given.shape[dim])


def _laid_out(shape: list[int], dtype: str, layout: str, generator: torch.Generator, axis: int, device: str) -> torch.Tensor:
    def values(*sizes: int) -> torch.Tensor:
        if dtype == "int64":
            return torch.randint(0, 3, sizes, generator=generator).to(device)
        return torch.randn(sizes, generator=generator, dtype=getattr(torch, dtype)).to(device)

    if layout == "transposed" and len(shape) >= 2:
        return values(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)
    if layout == "strided":
        return values(*shape[:-1], 2 * shape[-1])[..., ::2]
    if layout == "sliced":
        return values(shape[0] + 3, *shape[1:])[2 : 2 + shape[0]]
    if layout == "expanded":
        return values(*shape[:axis], 1, *shape[axis + 1 :]).expand(shape)
    return values(*shape)


def random_program(seed: int, device: str = "cpu", is_trained: bool = False, is_odd: bool = False) -> Program:
    rng = random.Random(seed)
    program = Program(seed, rng, device, batch=int(rng.random() < 0.2), is_trained=is_trained, is_odd=is_odd)
    shapes: list[Shape] = [("1B", S, D), ("1B", D), ("1B", D), ("1B", T, D), ("1B", S)]
    if program.batch == 1:
        shapes = [(S, "1B", D), (T, "1B", D), (S, "1B"), (D, "1B")]
    first = shapes.pop(rng.randrange(2))
    shapes += [first] * is_odd
    for number, shape in enumerate([first, *rng.sample(shapes, rng.randint(0, 3)), *[(D,)] * (rng.random() < 0.3)]):
        dtype = "float32" if number == 0 else rng.choices(["float32", "int64", "float64"], [8, 1, 1])[0]
        var = Var("xyzuvw"[number], shape, dtype, program.root())
        layout = rng.choices(["", "transposed", "strided", "sliced", "expanded", "tied"], [12, 1, 1, 1, 1, 8 if is_odd else 3])[0]
        if layout == "tied":
            twin = next((v for v in program.given if v.shape == shape and v.dtype == dtype), None)
            layout, var.root, var.is_dense = ("tied", twin.root, twin.is_dense) if twin else ("", var.root, True)
            layout = _together(program, twin, var) if twin else layout
        program.layouts[var.name] = layout
        var.is_dense = var.is_dense and layout != "expanded"
        program.exact[var.root] = True
        program.given.append(var)
    program.keywords = tuple(v.name for v in program.given[1:] if rng.random() < 0.3)

    if is_odd and not is_trained:
        program.boxed = tuple(v.name for v in program.given[1:] if v.name not in program.keywords and rng.random() < 0.5)

    model = Scope(program, "Model", list(program.given), 0)
    for number, name in enumerate(program.boxed):
        model.line(f"{name} = {BOXES[seed % len(BOXES)][0].format(number)}")
    steps(model, rng.randint(4, 16))
    results = [v.name for v in (model.pick() for _ in range(rng.randint(1, 4))) if v]
    results += [rng.choice(program.given).name] * (rng.random() < 0.15)
    one, all_of_them = results[0], f"({', '.join(results)},)"
    result = rng.choices([one, all_of_them, f"{{'a': {one}, 'b': [{', '.join(results[1:])}]}}"], [2, 5, 3])[0]
    if is_odd:
        others = ["None", "number", "'text'", "scale", "x.shape[0]", "True", "x.dtype", f"Record({one}, 'out', number)",
                  f"Pair({one}, [{one}])"]  # fmt: skip
        result = rng.choice([result, f"Pair({result}, {rng.choice(others)})", f"Record({result}, size={rng.choice(others)})",
                             f"({rng.choice(others)}, {result}, {rng.choice(others)})"])  # fmt: skip
    arguments = [*(v.name for v in program.given if v.name not in (*program.keywords, *program.boxed)), "*", *program.keywords,
                 "scale=1.0", "number=0", *["box=None"] * bool(program.boxed)]  # fmt: skip
    program.source = "\n".join([*program.classes, model.source(", ".join(arguments), result)])
    rules: list[Any] = ["auto", "auto", [], []]
    if "Block0()" in program.source:
        rules += [[df.SplitModule("*a*")], ["auto", df.SplitModule("*a*")], [df.SplitModule(nn.Linear), df.SplitModule("a*")]]
    program.partition = rng.choice(rules)
    if is_trained:
        may_learn = [v for v in program.given if v.is_float and program.layouts[v.name] != "tied"]
        program.learned = {v.name: rng.choice(["leaf", "made"]) for v in may_learn if v is program.given[0] or rng.random() < 0.7}
        program.is_autocast = rng.random() < 0.1
        program.tolerance = 5e-2 if program.is_autocast else program.tolerance
    return program


def _together(program: Program, twin: Var, var: Var) -> str:
    """Inputs may share memory without being the same."""
    is_alone = program.layouts[twin.name] == "" and "tied" not in program.layouts.values()
    if not program.is_odd or program.is_trained or not is_alone or var.axis < 0 or not var.width:
        return "tied"
    return program.rng.choice(["tied", "shifted", "beside"])


# ---------------------------------------------------------------------------- 2. the command


def check_many(
    seeds: Iterable[int], show: bool = False, compiler: str = "eager", kernels: bool = False, device: str = "cpu", train: bool = False,
    odd: bool = False,
) -> Tally:  # fmt: skip
    tally = Tally()
    for seed in seeds:
        program = random_program(seed, device, train, odd)
        if show:
            print(f"# program {seed}: batch={program.batch}, partition={program.partition}, layouts={program.layouts}, "
                  f"learned={program.learned}\n{program.source}")  # fmt: skip
        if train:
            check_training(program, tally, show)
        elif is_valid(program) and not (program.is_random and (kernels or compiler != "eager")):  # Inductor's random numbers are others
            check_program(program, tally, compiler, kernels)
        else:
            tally.counts["invalid"] += 1
    torch._dynamo.reset()
    return tally


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dynaflow.testing.programs", description="random torch programs against eager mode")
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--compiler", choices=("eager", "inductor"), default="eager")
    parser.add_argument("--kernels", action="store_true", help="ops are the kernels that Inductor makes; against its own order, too")
    parser.add_argument("--train", action="store_true", help="the same with gradients: random histories of forwards, backwards and steps")
    parser.add_argument("--odd", action="store_true", help="programs that do more of what models do now and then")
    parser.add_argument("--show", action="store_true", help="print the source of every program")
    options = parser.parse_args(argv)
    logging.getLogger("dynaflow").setLevel(logging.ERROR)  # fall backs are counted
    tally = check_many(range(options.seed, options.seed + options.programs), options.show, options.compiler, options.kernels,
                       options.device, options.train, options.odd)  # fmt: skip
    print(tally)
    return 1 if tally.violations else 0


if __name__ == "__main__":
    sys.exit(main())
