"""Where a captured graph meets its caller: arguments are values of the flow, values are what the graph returns.

Sizes are read from arguments, what a strategy may look at is told by them, and compiled code wants them aligned and apart. Outputs of a
plan are handed out as the graph hands out its own: some of them views, of others or of inputs.
"""

from __future__ import annotations

from contextlib import nullcontext
from itertools import combinations
from typing import Any, Callable, Mapping, Sequence

import torch
from torch import fx

from dynaflow import errors
from dynaflow.batching import Facts
from dynaflow.context import ALL
from dynaflow.inductor.units import ALIGNMENT
from dynaflow.ir import evaluate
from dynaflow.runtime.program import copy_as_it_lies
from dynaflow.sources import ITEM
from dynaflow.units import Built

_NOTHING = nullcontext()


class Boundary:
    def __init__(self, graph: fx.Graph, facts: Facts, built: Built):
        flow = self._flow = built.program.flow
        self._order = tuple(built.sizes[s] for s in flow.symbols)
        self._args = built.epilogue.args
        self._epilogue: Callable[..., Any] = getattr(built.epilogue.fn, "forward", built.epilogue.fn)
        # argument and value of the tensors among the arguments
        self.names: list[tuple[int, str]] = [(i, name) for i, name in enumerate(built.inputs) if name is not None]
        self._mutated = {flow.value[v].storage for op in flow.ops for v in op.mutates if flow.value[v].role in ("input", "param")}
        # arguments that are changed in place
        self.changed: list[int] = [i for i, name in self.names if flow.value[name].storage in self._mutated]
        # the caller's own tensors, parameters that nobody changes aside: argument and storage
        self._own = [(i, s) for i, name in self.names if (s := flow.value[name].storage) in self._mutated or self.role(name) == "input"]
        # inputs that lay in one storage at capture, one of which is changed: argument and the dim that carries the batch
        groups: dict[str, list[tuple[int, int | None]]] = {}
        for i, name in self.names:
            if flow.value[name].storage in self._mutated:
                groups.setdefault(flow.value[name].storage, []).append((i, flow.value[name].axis))
        pairs = [pair for group in groups.values() for pair in combinations(group, 2)]
        self._together = [(one, other) for one, other in pairs if (one[1], other[1]) != (None, None)]
        self._output_names = tuple(name for name in dict.fromkeys(flow.outputs) if flow.value[name].role == "output")
        (output,) = [n for n in graph.nodes if n.op == "output"]
        # per result of the graph: the dim that carries the batch
        self.output_axes: list[int | None] = [facts.axis[a] if isinstance(a, fx.Node) else None for a in output.args[0]]
        # which of the plan's outputs the graph returns; None where it returns views of them, or something else
        self.plain_outputs: list[int] | None = built.plain_outputs(self._output_names)
        # it returns them all, as they are
        self.is_in_order = self.plain_outputs is not None and list(self.plain_outputs) == list(range(len(self._output_names)))

    # -- arguments

    def read_sizes(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """The values of the flow's symbols in this call."""
        if not self._order:
            return ()
        return tuple([args[i] if d is None else args[i].item() if d == ITEM else args[i].shape[d] for i, d in self._order])

    def numbers(self, sizes: tuple[Any, ...]) -> dict[str, Any]:
        """Symbol -> its value."""
        return dict(zip(self._flow.symbols, sizes))

    def values(self, args: Sequence[Any]) -> dict[str, torch.Tensor]:
        return {name: args[i] for i, name in self.names}

    def role(self, name: str) -> str:
        return self._flow.value[name].role

    def facts(self, args: Sequence[Any], batch_size: int, device: torch.device, tags: Mapping[str, Any]) -> dict[str, Any]:
        """What a strategy may look at."""
        facts: dict[str, Any] = {"batch_size": batch_size, "device": device.type, "needs_grad": False}
        for i, name in self.names:
            if self.role(name) == "input":
                facts[f"shape.{name}"] = tuple(int(d) for d in args[i].shape)
                facts[f"dtype.{name}"] = str(args[i].dtype).removeprefix("torch.")
        facts.update((f"tag.{name}", value) for name, value in tags.items())
        for group in ("shape.", "dtype.", "tag."):
            facts[group + ALL] = tuple(sorted(name for name in facts if name.startswith(group)))
        return facts

    def has_captured_aliases(self, args: Sequence[Any]) -> bool:
        """No input that the graph changes shares its storage with another one, unless it did so at capture."""
        if not self._mutated:
            return True
        owner: dict[int, str] = {}
        for i, mine in self._own:
            if pointer := args[i].untyped_storage().data_ptr():
                other = owner.setdefault(pointer, mine)
                if other != mine and (mine in self._mutated or other in self._mutated):
                    return False
        return True

    def rows_are_apart(self, args: Sequence[Any]) -> bool:
        """Whether parts may run one after the other where inputs share what the graph changes: a part must not see what another's rows
        became (x = t[:8] is changed, y = t[1:9] is read)."""
        return not any(rows_meet(args[i], a, args[j], b) for (i, a), (j, b) in self._together)

    def misaligned(self, args: Sequence[Any]) -> list[int]:
        """Arguments that compiled code must not read where they lie."""
        return [i for i, _ in self.names if args[i].data_ptr() % ALIGNMENT]

    def aligned(self, args: Sequence[Any]) -> Sequence[Any]:
        """Compiled code assumes that its inputs are aligned. Views of the caller's may not be."""
        odd = self.misaligned(args)
        if not odd:
            return args
        if changed := [name for i, name in self.names if i in odd and i in self.changed]:
            raise errors.Misaligned(
                f"{', '.join(changed)} is changed in place, and does not start at a multiple of {ALIGNMENT} bytes.",
                why="compiled kernels read and write 16 bytes at a time",
                fix="pass a tensor that is no slice of another, or compiler='eager'")  # fmt: skip
        return [copy_as_it_lies(a) if i in odd else a for i, a in enumerate(args)]

    # -- results

    def note_changes(self, args: Sequence[Any]) -> None:
        """Compiled code and recordings change tensors behind autograd's back; what was saved for a backward must be seen to be stale."""
        if self.changed:
            torch._C._increment_version([args[i] for i in self.changed])

    def results(self, sizes: tuple[Any, ...], args: Sequence[Any], outputs: Sequence[torch.Tensor]) -> Any:
        """The graph's outputs from the plan's: views of them, and of inputs, as the graph has them."""
        if self.is_in_order:
            return outputs
        if self.plain_outputs is not None:
            return [outputs[i] for i in self.plain_outputs]
        values = self.values(args)
        values.update(zip(self._output_names, outputs))
        numbers = self.numbers(sizes)
        with torch.no_grad() if torch.is_grad_enabled() else _NOTHING:
            return self._epilogue(*[values[a] if isinstance(a, str) else evaluate(a.text, numbers) for a in self._args])


# -- whose rows meet


def rows_meet(a: torch.Tensor, a_axis: int | None, b: torch.Tensor, b_axis: int | None) -> bool:
    """Whether some row of one tensor may lie where another row of the other does. Not sure: yes. axis None: every row meets all of it."""
    if not a.numel() or not b.numel() or a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False
    distance = b.data_ptr() - a.data_ptr()
    if distance >= _extent_bytes(a) or -distance >= _extent_bytes(b):
        return False
    if a_axis is None or a_axis != b_axis or a.stride() != b.stride() or a.dtype != b.dtype or distance % a.itemsize:
        return True
    steps = [(stride, max(n, m) - 1, d == a_axis) for d, (stride, n, m) in enumerate(zip(a.stride(), a.shape, b.shape))]
    return _adds_up(sorted(steps, reverse=True), distance // a.itemsize, False)


def _extent_bytes(tensor: torch.Tensor) -> int:
    return (sum(stride * (n - 1) for stride, n in zip(tensor.stride(), tensor.shape)) + 1) * tensor.itemsize


def _adds_up(steps: Sequence[tuple[int, int, bool]], distance: int, is_along_batch: bool) -> bool:
    """Whether steps (how far, how many at most either way, along the batch?) lead over a distance, some of them along the batch."""
    if not steps:
        return is_along_batch and distance == 0
    (stride, most, is_batch), *rest = steps
    if stride == 0:
        return _adds_up(rest, distance, is_along_batch or (is_batch and most > 0))
    reach = sum(s * n for s, n, _ in rest)
    numbers = range(max(-most, -((reach - distance) // stride)), min(most, (distance + reach) // stride) + 1)
    # where dims lie in each other like boxes there are two at most
    return len(numbers) > 8 or any(_adds_up(rest, distance - k * stride, is_along_batch or (is_batch and k != 0)) for k in numbers)
