"""Capture a function and run its graph in uneven parts, as the analysis says it may: the oracle of test_batching.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable
from unittest import mock

import torch
from torch import fx
from torch.fx.experimental import _config as fx_config
from torch.utils import _pytree as pytree

from dynaflow.batching import Facts, analyse
from dynaflow.repeats import Repeats

B, S, H = 6, 5, 8
# one row, then the rest: a part of one row is where broadcasting and squeezing go wrong
CUTS = (0, 1, B)
# they hold for everything until they are closed, whatever part it is on
BRACKETS = ("_enter_autocast", "_exit_autocast", "_set_grad_enabled")


@dataclass
class Captured:
    gm: fx.GraphModule
    facts: Facts

    @property
    def reasons(self) -> dict[str, str]:
        return {node.name: facts.unsplittable for node, facts in self.facts.nodes.items() if facts.unsplittable}

    def node(self, target: str) -> fx.Node:
        """The first node that calls something of this name."""
        return next(n for n in self.gm.graph.nodes if target in (n.name, n.target, getattr(n.target, "__name__", "")))

    def __getitem__(self, target: str) -> Any:
        return self.facts.nodes[self.node(target)]


def capture(
    fn: Callable[..., Any], *args: Any, axes: tuple[int | None, ...] | None = None, cuts=CUTS, is_analysed_twice=True, **kwargs: Any
) -> Captured:
    """Compile `fn`, analyse the graph that Dynamo makes, and run it in parts against the whole. `axes`: one per argument."""
    axes = axes if axes is not None else tuple(0 for _ in args)
    for x, axis in (*zip(args, axes), *((x, 0) for x in kwargs.values())):
        if isinstance(x, torch.Tensor) and axis is not None:
            torch._dynamo.maybe_mark_dynamic(x, axis)
    captured = []

    def backend(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
        fakes = [n.meta["example_value"] for n in placeholders]
        found = {n.name: d for n, t in zip(placeholders, fakes) if isinstance(t, torch.Tensor) for d in symbolic_dims(t)}
        symbols = set().union(*(t.shape[found[n.name]].node.expr.free_symbols for n, t in zip(placeholders, fakes) if n.name in found))
        shape_env = torch._guards.detect_fake_mode(fakes).shape_env
        before = [getattr(t, "shape", t) for t in fakes], len(shape_env.guards)
        captured.append(Captured(gm, analyse(gm, fakes, found, symbols)))
        if is_analysed_twice:
            check_repeats(captured[-1].facts, gm, fakes, found, symbols)
        assert before == ([getattr(t, "shape", t) for t in fakes], len(shape_env.guards)), "the analysis left something behind"

        def run(*real: Any) -> Any:
            check_in_parts(captured[-1], real, {str(s) for s in symbols}, cuts)
            return gm.forward(*real)

        return run

    torch._dynamo.reset()
    # Dynamo times its guards with a cold cache, which costs more than everything that is tested here
    no_timing = mock.patch("torch._dynamo.guards.profile_guard_manager", return_value=0.0)
    with no_timing, torch.no_grad(), fx_config.patch(backed_size_oblivious=True, use_duck_shape=False):
        torch.compile(fn, backend=backend)(*args, **kwargs)
    assert len(captured) == 1, "the case breaks the graph"
    return captured[0]


def check_repeats(facts: Facts, gm: fx.GraphModule, fakes: list[Any], axes: dict[str, int], symbols: set[Any]) -> None:
    """The analysis says the same where it runs every node."""
    with mock.patch.object(Repeats, "signature", return_value=None):
        plain = analyse(gm, fakes, axes, symbols)
    assert facts.nodes == plain.nodes
    assert facts.axis == plain.axis
    for node, fake in plain.fake.items():
        assert pytree.tree_map(_layout, facts.fake[node]) == pytree.tree_map(_layout, fake), node


def _layout(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.shape} {value.stride()} {value.storage_offset()} {value.dtype}"
    return str(value) if isinstance(value, (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)) else type(value).__name__


def symbolic_dims(tensor: torch.Tensor) -> list[int]:
    return [d for d, size in enumerate(tensor.shape) if isinstance(size, torch.SymInt)]


def check_in_parts(captured: Captured, real: tuple[Any, ...], symbols: set[str], cuts: tuple[int, ...]) -> None:
    """Run the graph whole, and node by node in parts, on equal inputs; outputs and changed inputs must agree."""
    gm, facts = captured.gm, captured.facts
    expected_inputs, split_inputs = copies(real), copies(real)
    torch.manual_seed(0)
    expected = gm.forward(*expected_inputs)
    torch.manual_seed(0)
    parts = list(zip(cuts, cuts[1:]))
    feed = iter(split_inputs)
    # per node: the value over the whole batch, then the value on every part
    env: dict[fx.Node, list[Any]] = {}

    def rows(value: Any, axis: Any) -> list[Any]:
        return [value, *(pytree.tree_map(lambda v, a, p=part: cut(v, a, p, cuts[-1]), value, axis) for part in parts)]

    def run(node: fx.Node, which: int) -> Any:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: env[n][which])
        if not any(token.startswith("group:") for token in facts.nodes[node].uses):
            return getattr(runner, node.op)(node.target, args, kwargs)
        # collectives want their rows in one piece; the graph's own wait will be for the joined rows
        args = pytree.tree_map_only(torch.Tensor, torch.Tensor.contiguous, args)
        return torch.ops._c10d_functional.wait_tensor(node.target(*args, **kwargs))

    runner = fx.Interpreter(gm)
    for node in gm.graph.nodes:
        known, axis = facts.nodes[node], facts.axis[node]
        if node.op == "placeholder":
            value, fake = next(feed), facts.fake[node]
            is_batch_size = isinstance(fake, torch.SymInt) and str(fake.node.expr) in symbols
            env[node] = [value, *(hi - lo for lo, hi in parts)] if is_batch_size else rows(value, axis)
        elif node.op == "output":
            actual = fx.node.map_arg(node.args[0], lambda n: env[n][0])
        elif getattr(node.target, "__name__", "") in BRACKETS:
            env[node] = [run(node, 0)] * len(cuts)
        elif node.op == "get_attr" or known.unsplittable:
            env[node] = rows(run(node, 0), axis)
        elif known.is_view:
            env[node] = rows(run(node, 0), axis)
            for k in range(len(parts)):
                torch.testing.assert_close(run(node, k + 1), env[node][k + 1], equal_nan=True)
        else:
            results = [run(node, k + 1) for k in range(len(parts))]
            is_number = not any(isinstance(v, torch.Tensor) for v in pytree.tree_leaves(results))
            if known.writes:  # it went into the rows of what it was given
                env[node] = [None, *results] if is_number else env[node.args[0]]
            elif is_number:
                env[node] = [run(node, 0), *results]
            else:
                env[node] = rows(pytree.tree_map(lambda a, *vs: join(vs, a), axis, *results, is_leaf=lambda a: a is None), axis)
    torch.testing.assert_close(actual, type(actual)(expected), equal_nan=True)
    for x, y in zip(split_inputs, expected_inputs):
        torch.testing.assert_close(x, y, equal_nan=True)


def copies(values: tuple[Any, ...]) -> list[Any]:
    return [v.detach().clone() if isinstance(v, torch.Tensor) else v for v in values]


def cut(value: Any, axis: int | None, part: tuple[int, int], batch: int) -> Any:
    if axis is None:
        return value
    rows = value.shape[axis] // batch
    return value.narrow(axis, part[0] * rows, (part[1] - part[0]) * rows)


def join(values: tuple[Any, ...], axis: int | None) -> Any:
    if axis is not None:
        return torch.cat(values, axis)
    for other in values[1:]:
        torch.testing.assert_close(other, values[0], equal_nan=True)
    return values[0]
