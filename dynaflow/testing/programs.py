"""Random torch programs, as Python source: what a model may do to tensors, in odd combinations.

    program = random_program(7); print(program.source); model = program.model(); args, kwargs = program.inputs(8)
    python -m dynaflow.testing.programs --programs 200
    python -m dynaflow.testing.programs --programs 20 --compiler inductor       # units compiled: minutes
    python -m dynaflow.testing.programs --programs 20 --kernels                 # ops are Inductor's kernels: minutes
    python -m dynaflow.testing.programs --device cuda                           # streams, and recordings whose outputs somebody keeps

A program is a tree of modules over inputs [B, ...] (or [S, B, ...]), parameters and buffers. It is valid in eager mode for every
batch size, and deterministic. Whatever decides by comparison (a mask, an argmax) is computed exactly, so that no rounding flips it.

1. `Scope` writes one module: variables with their shapes, and what memory they share.
2. The ops: each adds some lines to a scope, or gives up. Simple ones are rows of a table.
3. `random_program` chooses inputs, ops and outputs.
4. `check_program` is the oracle: under every strategy, runtime and batch size, through one compiled callable, a program must do
   what eager mode does (results, strides, changed inputs and buffers, what shares memory with what), and bit for bit what its
   serialised plan does.
"""

from __future__ import annotations

import argparse
import functools
import linecache
import logging
import random
import re
import sys
import types
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Callable, Iterable

import torch
from torch import nn
from torch.utils import _pytree as pytree

import dynaflow as df
from dynaflow.capture import Compiled
from dynaflow.engine import CapturedGraph
from dynaflow.settings import read_settings
from dynaflow.strategies import Auto
from dynaflow.strategy import Strategy
from dynaflow.testing.program_ops import D, S, Scope, Shape, T, Var, steps
from dynaflow.testing.strategies import RandomStrategy

BATCH_SIZES = (8, 3, 2, 5, 17, 1)


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
    # how an input is laid out: "", "transposed", "strided", "sliced", "expanded", or "tied" to an earlier one
    layouts: dict[str, str] = field(default_factory=dict)
    keywords: tuple[str, ...] = ()
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
        vars(home).update(torch=torch, nn=nn, F=nn.functional, df=df, rand=rand, linear=linear)
        exec(compile(self.source, path, "exec"), vars(home))  # noqa: S102 (we wrote it)
        return home.Model().eval().requires_grad_(False).to(self.device)

    def inputs(self, batch_size: int, draw: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """`draw`: other numbers of the same sizes."""
        generator = torch.Generator().manual_seed(1000 * self.seed + batch_size + draw * 10**9)
        made: dict[str, Any] = {"scale": 1.5, "number": 2}
        for var in self.given:
            shape = [batch_size if isinstance(d, str) else d for d in var.shape]
            if self.layouts[var.name] == "tied":
                made[var.name] = next(made[v.name] for v in self.given if v.root == var.root)
            else:
                made[var.name] = _laid_out(shape, var.dtype, self.layouts[var.name], generator, max(var.axis, 0), self.device)
        args = tuple(made[v.name] for v in self.given if v.name not in self.keywords)
        return args, {name: made[name] for name in (*self.keywords, "scale", "number")}


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


def random_program(seed: int, device: str = "cpu") -> Program:
    rng = random.Random(seed)
    program = Program(seed, rng, device, batch=int(rng.random() < 0.2))
    shapes: list[Shape] = [("1B", S, D), ("1B", D), ("1B", D), ("1B", T, D), ("1B", S)]
    if program.batch == 1:
        shapes = [(S, "1B", D), (T, "1B", D), (S, "1B"), (D, "1B")]
    first = shapes.pop(rng.randrange(2))
    for number, shape in enumerate([first, *rng.sample(shapes, rng.randint(0, 3)), *[(D,)] * (rng.random() < 0.3)]):
        dtype = "float32" if number == 0 else rng.choices(["float32", "int64", "float64"], [8, 1, 1])[0]
        var = Var("xyzuvw"[number], shape, dtype, program.root())
        layout = rng.choices(["", "transposed", "strided", "sliced", "expanded", "tied"], [12, 1, 1, 1, 1, 3])[0]
        if layout == "tied":
            twin = next((v for v in program.given if v.shape == shape and v.dtype == dtype), None)
            layout, var.root, var.is_dense = ("tied", twin.root, twin.is_dense) if twin else ("", var.root, True)
        program.layouts[var.name] = layout
        var.is_dense = var.is_dense and layout != "expanded"
        program.exact[var.root] = True
        program.given.append(var)
    program.keywords = tuple(v.name for v in program.given[1:] if rng.random() < 0.3)

    model = Scope(program, "Model", list(program.given), 0)
    steps(model, rng.randint(4, 16))
    results = [v.name for v in (model.pick() for _ in range(rng.randint(1, 4))) if v]
    results += [rng.choice(program.given).name] * (rng.random() < 0.15)
    one, all_of_them = results[0], f"({', '.join(results)},)"
    result = rng.choices([one, all_of_them, f"{{'a': {one}, 'b': [{', '.join(results[1:])}]}}"], [2, 5, 3])[0]
    arguments = [*(v.name for v in program.given if v.name not in program.keywords), "*", *program.keywords, "scale=1.0", "number=0"]
    program.source = "\n".join([*program.classes, model.source(", ".join(arguments), result)])
    rules: list[Any] = ["auto", "auto", [], []]
    if "Block0()" in program.source:
        rules += [[df.SplitModule("*a*")], ["auto", df.SplitModule("*a*")], [df.SplitModule(nn.Linear), df.SplitModule("a*")]]
    program.partition = rng.choice(rules)
    return program


# ---------------------------------------------------------------------------- 2. the oracle


@dataclass
class Tally:
    """What was checked, why calls fell back, and what went wrong."""

    counts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        c = self.counts
        share = c["split"] / max(c["programs"], 1)
        return "\n".join([
            f"{c['programs']} programs ({c['invalid']} more not valid in eager mode), {c['lines']} lines, {c['captures']} captures",
            f"{c['split']} ran split ({share:.0%}), {c['whole']} were planned but never split, {c['never']} never planned",
            f"{c['calls']} calls of graphs, {c['planned calls']} under plans: {c['launches']} launches, {c['part launches']} on parts",
            f"{c['ops']} ops, {c['whole ops']} of them only over the whole batch",
            f"{c['runs']} runs compared with eager mode, and bit for bit with the serialised plan",
            *(f"  fell back {n:>5} times: {reason}" for reason, n in self.reasons.most_common(12)),
            *(f"VIOLATION {v}" for v in self.violations),
            f"{len(self.violations)} violations",
        ])  # fmt: skip


class World:
    """Everything that the outside can see of one call: results, inputs, buffers, and what shares memory with what."""

    def __init__(self, program: Program, batch_size: int, function: Callable[..., Any], model: nn.Module, draw: int = 0):
        args, kwargs = program.inputs(batch_size, draw)
        with torch.no_grad():
            result = function(*args, **kwargs)
        self.outputs = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
        self._tensors = {f"output {i}": t for i, t in enumerate(self.outputs)}
        self._tensors.update((f"input {i}", t) for i, t in enumerate((*args, *kwargs.values())) if isinstance(t, torch.Tensor))
        self._tensors.update((f"buffer {name}", t) for name, t in model.named_buffers())
        owners: dict[int, list[str]] = {}
        for name, tensor in self._tensors.items():
            if tensor.numel():
                owners.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
        self.shared = sorted(names for names in owners.values() if len(names) > 1)
        self.look()

    def look(self) -> None:
        """Buffers live on in later worlds: what is compared are copies."""
        self.seen = {name: (t.clone(), t.stride()) for name, t in self._tensors.items()}

    def touch(self) -> World:
        """Change every output in place: whatever shares its memory shows it."""
        for number, output in enumerate(self.outputs):
            if output.is_floating_point() and not any(n > 1 and stride == 0 for n, stride in zip(output.shape, output.stride())):
                output.mul_(0.5).add_(number + 1)
        self.look()
        return self


def difference(got: World, wanted: World, tolerance: float, has_rows: bool = True) -> str:
    """What differs first; empty if nothing does. Tolerance 0: bit for bit. With one row, copies may be views: only numbers count."""
    if got.seen.keys() != wanted.seen.keys():
        return f"returned {len(got.outputs)} tensors, not {len(wanted.outputs)}"
    for name, (a, stride) in got.seen.items():
        b, wanted_stride = wanted.seen[name]
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return f"{name} is {a.dtype}{list(a.shape)}, not {b.dtype}{list(b.shape)}"
        if has_rows and a.numel() and any(n > 1 and x != y for n, x, y in zip(a.shape, stride, wanted_stride)):
            return f"{name} of shape {list(a.shape)} has strides {stride}, not {wanted_stride}"
        allowed = tolerance * max(1.0, float(b.abs().max())) if b.is_floating_point() and b.numel() else 0.0
        if not (torch.allclose(a, b, rtol=0, atol=allowed) if allowed else torch.equal(a, b)):
            return f"{name} is off by {float((a.double() - b.double()).abs().max()):.2g}, allowed {allowed:.2g}"
    return "" if got.shared == wanted.shared or not has_rows else f"shares memory as {got.shared}, not {wanted.shared}"


def is_valid(program: Program) -> bool:
    """Eager mode accepts it at every size, and its numbers stay small."""
    try:
        worlds = [World(program, n, model, model) for n in BATCH_SIZES if (model := program.model())]
    except Exception:  # whatever eager mode refuses is no program
        return False
    return all(bool((t.double().abs() < 1e4).all()) for world in worlds for t, _ in world.seen.values())


class _Kept(CapturedGraph):
    """A graph that can be planned anew, by another strategy: captures are what takes time."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.settings.graphs.append(self)

    def forget(self) -> None:
        if self._is_analysed and self.refusal is None:
            self.bindings.clear()
        for region in self.regions:
            region.forget()


def _ways_to_run(seed: int, rng: random.Random, device: str, compiler: str, kernels: bool = False) -> list[tuple[Strategy, str, int]]:
    """(strategy, runtime, calls per size). Compiling takes seconds: two strategies per program. What is recorded is recorded by the
    second call and replayed by the third; whether anything is recorded is decided at capture."""
    strategies: list[Strategy] = [df.TwoBatch(), df.NanoBatch(3), df.Branches(3), RandomStrategy(seed)]
    for_kernels = [df.Branches(3), RandomStrategy(seed), Auto()]
    if device == "cuda":
        runtime = "graph" if rng.random() < 0.8 else "auto"
        return [(strategy, runtime, 3) for strategy in rng.sample(for_kernels if kernels else strategies, 2)]
    fakes = ["fake:lazy", "fake:greedy", f"fake:{seed}", f"fake:{seed + 1}", "threads"]
    if kernels:  # looked at by the first call, planned by the second
        return [(strategy, rng.choice(["serial", "graph", *fakes]), 3) for strategy in for_kernels]
    if compiler == "eager":
        return [(strategy, rng.choice(fakes), 1) for strategy in strategies]
    # Sequential last: a graph that is captured under it is never planned
    strategies = sorted(rng.sample([df.Sequential(), *strategies], 2), key=lambda s: isinstance(s, df.Sequential))
    if rng.random() < 0.3:
        return [(strategy, "graph", 3) for strategy in strategies]
    return [(strategy, rng.choice(["auto", "serial", *fakes]), 1) for strategy in strategies]


def _ways_to_record(rng: random.Random) -> dict[str, Any]:
    """Options of df.compile's that are about recordings."""
    buckets = rng.choice([None, None, "powers", [4, 8]])
    return {"runtime": "graph", "buckets": buckets, "borrow": rng.random() < 0.1, "fixed_weights": rng.random() < 0.2}


def check_program(program: Program, tally: Tally, compiler: str = "eager", kernels: bool = False) -> None:
    rng = random.Random(program.seed)
    model = program.model()
    torch._dynamo.reset()
    partition = "kernels" if kernels else program.partition
    ways = _ways_to_run(program.seed, rng, program.device, compiler, kernels)
    recording = _ways_to_record(rng) if program.device == "cuda" and ways[0][1] == "graph" and not kernels else {}
    settings = read_settings(
        strategy="two_batch", partition=partition, batch=program.batch, compiler="auto" if kernels else compiler, **recording)
    fast, stats = Compiled(model, settings, _Kept), settings.stats
    sizes = list(BATCH_SIZES)
    if rng.random() < 0.3:
        rng.shuffle(sizes)
    kept = None if settings.borrow else Kept(rng)
    for strategy, runtime, num_calls in ways:
        settings.runtime, settings.strategy = runtime, strategy
        for graph in settings.graphs:
            graph.forget()
        calls = [n for n in sizes for _ in range(num_calls)]
        if runtime == "graph":
            calls += rng.choices(sizes, k=len(sizes))  # replays in any order
        for number, n in enumerate(calls):
            # a replay of what was recorded must be of this call's numbers, and leave those of earlier calls alone
            draw = number if program.device == "cuda" else 0
            # what is padded is bit-equal to the plan of that size
            is_padded = settings.buckets is not None and n not in (settings.buckets if settings.buckets != "powers" else (1, 2, 8))
            problem = check_call(program, model, fast, n, kept, program.tolerance if is_padded else 0.0, draw)
            tally.counts["runs"] += 1
            if problem:
                name = f"{type(strategy).__name__} on {runtime}, batch {n}"
                tally.violations.append(f"program {program.seed}, {name}: {problem}")
                break
    is_split, is_planned = stats.num_part_launches > 0, stats.planned_calls > 0
    tally.counts.update({
        "programs": 1, "lines": program.source.count("\n"), "captures": stats.captures, "calls": stats.calls,
        "planned calls": stats.planned_calls, "launches": stats.num_launches, "part launches": stats.num_part_launches,
        "ops": stats.num_ops, "whole ops": stats.num_unsplittable,
        "split": is_split, "whole": is_planned and not is_split, "never": not is_planned,
    })  # fmt: skip
    for reason, count in stats.fallbacks.items():
        tally.reasons[re.sub(r"'[^']*'|\d+|\[.*?\]", "_", reason.splitlines()[0])[:110]] += count


class Kept:
    """Results that somebody keeps while the model is called again: no later call may change them."""

    def __init__(self, rng: random.Random):
        self._rng, self._worlds = rng, list[World]()

    def keep(self, world: World) -> None:
        if self._rng.random() < 0.5:
            self._worlds.append(world)
        if len(self._worlds) > 6:
            self._worlds.pop(self._rng.randrange(6))

    def changed(self) -> str:
        """What no longer is what it was; empty where all is. (What lies in a buffer of the model's is everybody's.)"""
        for world in self._worlds:
            of_the_model = {name for names in world.shared if any(n.startswith("buffer") for n in names) for name in names}
            for i, output in enumerate(world.outputs):
                if (name := f"output {i}") not in of_the_model and not torch.equal(output, world.seen[name][0]):
                    return f"{name} of an earlier call was changed"
        return ""


def check_call(
    program: Program, model: nn.Module, fast: Any, batch_size: int, kept: Kept | None = None, tolerance: float = 0.0, draw: int = 0
) -> str:  # fmt: skip
    """One call, against eager mode and against its serialised plan. Every world starts from the same weights and buffers."""
    start = {name: buffer.clone() for name, buffer in program.model().named_buffers()}

    def world(function: Callable[..., Any], owner: nn.Module) -> World:
        for name, buffer in owner.named_buffers():
            buffer.copy_(start[name])
        return World(program, batch_size, function, owner, draw)

    try:
        eager = program.model()
        wanted, serial = world(eager, eager), world(functools.partial(df.run_serialised, fast), model)
        got = world(fast, model)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    problem = difference(got, serial, tolerance) or difference(got, wanted, program.tolerance, batch_size > 1)
    if not problem and batch_size > 1 and (problem := difference(got.touch(), wanted.touch(), program.tolerance)):
        problem = f"after the outputs were changed in place: {problem}"
    if problem or kept is None:
        return problem
    kept.keep(got)
    return kept.changed()


def check_many(seeds: Iterable[int], show: bool = False, compiler: str = "eager", kernels: bool = False, device: str = "cpu") -> Tally:
    tally = Tally()
    for seed in seeds:
        program = random_program(seed, device)
        if show:
            print(f"# program {seed}: batch={program.batch}, partition={program.partition}, layouts={program.layouts}\n{program.source}")
        if is_valid(program):
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
    parser.add_argument("--show", action="store_true", help="print the source of every program")
    options = parser.parse_args(argv)
    logging.getLogger("dynaflow").setLevel(logging.ERROR)  # fall backs are counted
    tally = check_many(range(options.seed, options.seed + options.programs), options.show, options.compiler, options.kernels,
                       options.device)  # fmt: skip
    print(tally)
    return 1 if tally.violations else 0


if __name__ == "__main__":
    sys.exit(main())
