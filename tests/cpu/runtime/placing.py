"""A compiler for tests: units that write their results where they are told, take arguments in another order, and want them aligned."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any, Mapping, Sequence

import torch

from dynaflow.ir import evaluate
from dynaflow.runtime.program import Entry, Layout, Program, Unit


@dataclass(frozen=True)
class Placing:
    program: Program
    seed: int
    alignment: int = 1

    def entry(self, unit: Unit, sizes: Mapping[str, Any]) -> Entry | None:
        rng = random.Random(f"{self.seed} {unit.args} {unit.outs}")
        if rng.random() < 0.1:
            return None
        own = tuple("it allocates its own result" if rng.random() < 0.3 else "" for _ in unit.outs)
        order = rng.sample(range(len(unit.args)), len(unit.args))
        inputs = (*order, ("a constant",))

        def call(args: list[Any]) -> Sequence[Any]:
            given, destinations = args[: len(inputs)], iter(args[len(inputs) :])
            assert given.pop() == "a constant"
            for tensor in args:
                assert not isinstance(tensor, torch.Tensor) or tensor.storage_offset() * tensor.itemsize % self.alignment == 0
            args.clear()  # as Inductor's do
            results = unit.fn(*[given[order.index(i)] for i in range(len(order))])
            return [result if why else next(destinations).copy_(result) for result, why in zip(results, own)]

        return Entry(call, own, inputs, tuple(self._stride(name, sizes, rng) for name in unit.outs), self.alignment, source="test")

    def _stride(self, name: str, sizes: Mapping[str, Any], rng: random.Random) -> tuple[int, ...] | None:
        shape = [evaluate(size, sizes) for size in self.program.flow.value[name].shape]
        return rng.choice((None, torch.empty(shape, device="meta").stride()))


def with_fresh_results(program: Program) -> Program:
    """The same units, which are known to return memory of their own."""
    return replace(program, units={name: replace(unit, fresh=frozenset(unit.outs)) for name, unit in program.units.items()})


def with_layouts_of_inputs(program: Program) -> Program:
    """Inputs are contiguous."""
    layouts = dict(program.layouts)
    for value in program.flow.values:
        if value.role in ("input", "param"):
            stride = ("1",) if len(value.shape) == 1 else (value.shape[1], "1")
            layouts[value.name] = Layout(getattr(torch, value.dtype), torch.device("cpu"), stride)
    return replace(program, layouts=layouts)


def placing(program: Program, seed: int, alignment: int = 1) -> Program:
    program = with_layouts_of_inputs(with_fresh_results(program))
    return replace(program, compiler=Placing(program, seed, alignment))
