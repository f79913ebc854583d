"""`df.check`: run every op split and unsplit on random inputs, and every replacement beside its ops; name the first that differs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Mapping, Sequence

import torch

from dynaflow.errors import OptionError, ReplacementMismatch, SplitMismatch
from dynaflow.explain import InspectedGraph, inspected, read_inputs
from dynaflow.ir import Flow, Launch, Op, Part, evaluate
from dynaflow.runtime.binder import external_values
from dynaflow.runtime.program import Expr


@dataclass(frozen=True)
class Checked:
    """What was compared: ops that the plan splits, replacements, and the largest difference, relative to the largest value of an output."""

    num_ops: int
    num_split_ops: int
    # an op, or what a replacement stands in for
    worst_op: str
    worst_difference: float
    # launches of a function in the place of ops
    num_replacements: int = 0

    def __str__(self) -> str:
        worst = f", worst difference {self.worst_difference:.1e} at '{self.worst_op}'" if self.worst_op else ""
        beside = f", and {self.num_replacements} replacements beside their ops," if self.num_replacements else ""
        return f"checked: {self.num_split_ops} of {self.num_ops} ops split and unsplit{beside} on random inputs: same results{worst}"


def check(
    model: Any, inputs: Any, strategy: Any = "auto", *, partition: Any = "auto", batch: int | Mapping[str, int] | None = None, seed: int = 0
) -> Checked:
    """Plan (raising the strategy's mistakes), then test that splitting is right: each op runs over the whole batch and over the
    plan's parts, on the same random inputs, and must agree within the dtype's tolerance. So must each function that the plan puts in the
    place of ops agree with those. Raises SplitMismatch at the first op that does not, ReplacementMismatch at the first function.
    `inputs` as in `df.explain`: floats are replaced by random ones, rows of integers are shuffled.
    """
    if partition == "kernels":
        raise OptionError(
            "df.check is about splitting a batch, and kernels are made for all of it.", why="partition='kernels'",
            fix="leave partition='kernels' out; df.run_serialised(fast, ...) is what kernel plans are bit-equal to")  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    args, kwargs = read_inputs(inputs)
    args = tuple(_randomised(a, generator) for a in args)
    kwargs = {k: _randomised(v, generator) for k, v in kwargs.items()}
    graphs = inspected(model, (args, kwargs), CheckedGraph, strategy=strategy, partition=partition, batch=batch, compiler="eager")
    found = [c for g in graphs for c in g.checked]
    worst = max(found, key=lambda c: c.worst_difference, default=None)
    return Checked(
        sum(c.num_ops for c in found), sum(c.num_split_ops for c in found),
        worst.worst_op if worst else "", worst.worst_difference if worst else 0.0, sum(c.num_replacements for c in found),
    )  # fmt: skip


def _randomised(value: Any, generator: torch.Generator) -> Any:
    if not isinstance(value, torch.Tensor) or not value.numel():
        return value
    if value.is_floating_point():
        scale = float(value.double().std()) if value.numel() > 1 else 1.0
        return (torch.randn(value.shape, generator=generator, dtype=torch.float64) * (scale or 1.0)).to(value)
    return value[torch.randperm(value.shape[0], generator=generator).to(value.device)] if value.dim() else value


class CheckedGraph(InspectedGraph):
    def __init__(self, *args: Any):
        super().__init__(*args)
        self.checked: list[Checked] = []

    def inspect(self, args: Sequence[Any], sizes: Mapping[str, int]) -> None:
        super().inspect(args, sizes)
        plan = self.explained[-1].plan
        parts_of: dict[str, list[Part]] = {}
        for launch in plan.launches:
            for name, part in launch.calls:
                if not part.is_whole:
                    parts_of.setdefault(name, []).append(part)
        values = {name: value.clone() for name, value in self.boundary.values(args).items()}
        replacements = [Replacement(self.flow, launch) for launch in plan.launches if launch.replace]
        worst_op, worst = "", 0.0
        with torch.no_grad():
            for op in self.flow.ops:
                for each in replacements:
                    each.keep_inputs(op, values)
                before = {m: values[m].clone() for m in op.mutates} if op.name in parts_of else {}
                self._run(op, values, sizes)
                if op.name in parts_of:
                    difference = self._compare(op, parts_of[op.name], values, before, sizes)
                    if difference >= worst:
                        worst_op, worst = op.name, difference
                for each in replacements:
                    if each.is_over(op):
                        difference = self._compare_replacement(each, values, sizes)
                        if difference >= worst:
                            worst_op, worst = each.names, difference
        self.checked.append(Checked(len(self.flow.ops), len(parts_of), worst_op, worst, len(replacements)))

    def _run(self, op: Op, values: dict[str, torch.Tensor], sizes: Mapping[str, int]) -> None:  # type: ignore[override]
        unit = self.built.program.units[op.name]
        results = unit.fn(*[evaluate(a.text, sizes) if isinstance(a, Expr) else values[a] for a in unit.args])
        values.update(zip(unit.outs, results))

    def _compare(
        self, op: Op, parts: list[Part], values: Mapping[str, torch.Tensor], before: Mapping[str, torch.Tensor], sizes: Mapping[str, int]
    ) -> float:
        worst = 0.0
        for part in parts:
            start, stop = part.bounds(sizes[self.flow.batch[0]])
            part_sizes = {**sizes, **dict.fromkeys(self.flow.batch, stop - start)}
            mine = {**values, **before}
            mine = {name: self._rows(name, mine[name], start, stop, sizes, part_sizes) for name in {*op.reads, *op.mutates}}
            self._run(op, mine, part_sizes)
            for name in (*op.writes, *op.mutates):
                wanted = self._rows(name, values[name], start, stop, sizes, part_sizes)
                difference, allowed = _difference(mine[name], wanted)
                if not difference <= allowed:
                    raise SplitMismatch(
                        f"'{op.name}' gives other results on part {part} than on the whole batch.",
                        region=f"{name}, rows {start}:{stop}", why=f"relative difference {difference:.1e}, allowed {allowed:.1e}",
                        fix="it mixes rows: take splittable=True away, or keep it out of the split")  # fmt: skip
                worst = max(worst, difference)
        return worst

    def _compare_replacement(self, one: Replacement, values: Mapping[str, torch.Tensor], sizes: Mapping[str, int]) -> float:
        def rows(name: str, part: Part, tensor: torch.Tensor) -> torch.Tensor:
            start, stop = part.bounds(sizes[self.flow.batch[0]]) if self.flow.batch else (0, 1)
            return self._rows(name, tensor, start, stop, sizes, {**sizes, **dict.fromkeys(self.flow.batch, stop - start)})

        given = [rows(name, part, one.inputs[name]) for name, part in one.takes]
        results = self.functions[one.launch.replace](*given)
        results = list(results) if isinstance(results, (tuple, list)) else [results]
        changed = [(name, part, mine) for (name, part), mine in zip(one.takes, given) if name in one.changes]
        worst = 0.0
        for name, part, mine in [*((name, part, mine) for (name, part), mine in zip(one.gives, results)), *changed]:
            difference, allowed = _difference(mine, rows(name, part, values[name]))
            if not difference <= allowed:
                raise ReplacementMismatch(
                    f"the replacement for {one.names} gives other results than the ops.", where=one.launch.where,
                    region=f"{name} {part}".rstrip(), why=f"relative difference {difference:.1e}, allowed {allowed:.1e}",
                    fix="it gets the group's external inputs in order of first use, and returns its external outputs in order",
                )  # fmt: skip
            worst = max(worst, difference)
        return worst

    def _rows(
        self, name: str, tensor: torch.Tensor, start: int, stop: int, sizes: Mapping[str, int], part_sizes: Mapping[str, int]
    ) -> torch.Tensor:
        """A part of a value, in memory of its own and in the layout that ops expect."""
        axis = self.flow.value[name].axis
        if axis is None:
            return tensor.clone()
        per_row = tensor.shape[axis] // sizes[self.flow.batch[0]]
        part = tensor.narrow(axis, start * per_row, (stop - start) * per_row)
        layout = self.built.program.layouts.get(name)
        if layout is None or layout.expected is None:
            return part.clone(memory_format=torch.preserve_format)
        stride = tuple(evaluate(s, part_sizes) for s in layout.expected)
        return torch.empty_strided(part.shape, stride, dtype=part.dtype, device=part.device).copy_(part)


class Replacement:
    """A function in the place of ops, while these run one by one: `inputs` are what it would be given."""

    def __init__(self, flow: Flow, launch: Launch):
        self.launch, self._flow = launch, flow
        self.takes, self.gives = external_values(flow, launch)
        self.names = ", ".join(f"{op} {part}".rstrip() for op, part in launch.calls)
        self.changes = {value for op, _ in launch.calls for value in flow.op(op).mutates}
        self.inputs: dict[str, torch.Tensor] = {}
        self._left = {op for op, _ in launch.calls}

    def keep_inputs(self, op: Op, values: Mapping[str, torch.Tensor]) -> None:
        """Before its ops change them."""
        if op.name in self._left:
            for name, _ in self.takes:
                if name in (*op.reads, *op.mutates) and name not in self.inputs:
                    self.inputs[name] = values[name].clone()

    def is_over(self, op: Op) -> bool:
        """Whether the last of its ops just ran."""
        if op.name not in self._left:
            return False
        self._left.remove(op.name)
        return not self._left


def _difference(got: torch.Tensor, wanted: torch.Tensor) -> tuple[float, float]:
    """(largest difference relative to the largest value, what the dtype allows)"""
    if not wanted.numel():
        return 0.0, 0.0
    if not wanted.is_floating_point() and not wanted.is_complex():
        return (0.0 if torch.equal(got, wanted) else float("inf")), 0.0
    if got.shape != wanted.shape or not torch.equal(got.isnan(), wanted.isnan()):
        return float("inf"), 0.0
    a, b = got.nan_to_num().double(), wanted.nan_to_num().double()
    scale = float(b.abs().max()) or 1.0
    return float((a - b).abs().max()) / scale, 64 * torch.finfo(wanted.dtype).eps
