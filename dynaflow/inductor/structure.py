"""One unit's graph in canonical form: what Inductor is given, and the key under which equal units share a compilation.

Contract: two units with equal keys compute the same from their arguments, whatever their nodes, parameters and symbols are called; what
differs between them (constants, names of symbols) is passed as an argument or kept per unit. Node metadata is dropped: it holds names
and the fake tensors of another tracing. Grad mode is dropped too: units run with autograd off.

1. Symbols are renamed n0, n1, ... in order of first use in the arguments' shapes, strides and expressions.
2. The key: every node's op, target and arguments, nodes by number, scalars with their type, sub-graphs by their own key.
3. The graph: numbers first, tensors next, constants last; sizes that the unit takes are computed from the numbers.
"""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
from typing import Any, Mapping, Sequence

import torch
from torch import fx

from dynaflow.ir import SIZE_FUNCTIONS
from dynaflow.runtime.program import Expr

_NAME = re.compile(r"(?<![\w.])[A-Za-z_]\w*")

# Size functions that symbolic numbers and graph nodes understand: max() of them would have to know which is larger.
_SYMBOLIC: dict[str, Any] = {
    "max": torch.sym_max, "min": torch.sym_min, "abs": operator.abs, "int": torch.sym_int, "float": torch.sym_float,
    "sqrt": torch._sym_sqrt,  # type: ignore[attr-defined]
}  # fmt: skip


# Units are compiled, and called, with autograd off: changes of grad mode inside mean nothing, and must not reach the caller.
_DROPPED = (torch._C._set_grad_enabled,)


class NotCompiled(Exception):
    """Inductor cannot compile the unit, or not in a way that is safe to use. It runs eagerly."""


@dataclass(frozen=True, slots=True)
class Spec:
    """A tensor argument: shape and strides are expressions over the flow's symbols."""

    shape: tuple[str, ...]
    stride: tuple[str, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class Structure:
    # equal for units that can share a compilation
    key: tuple[Any, ...]
    graph: fx.Graph
    # arguments with symbols n0, n1, ...
    args: tuple[Spec | Expr, ...]
    # the flow's names of n0, n1, ...
    symbols: tuple[str, ...]
    # tensors that the graph holds, in order of first use
    constants: tuple[torch.Tensor, ...]


def evaluate(text: str, values: Mapping[str, Any]) -> Any:
    """The expression over numbers, symbolic numbers or graph nodes."""
    if text.isdigit():
        return int(text)
    is_plain = all(isinstance(v, (int, float)) for v in values.values())
    return eval(text, {"__builtins__": {}, **(SIZE_FUNCTIONS if is_plain else _SYMBOLIC)}, dict(values))  # noqa: S307 (printed from shapes)


def structure(fn: fx.GraphModule, args: Sequence[Spec | Expr], symbols: Sequence[str]) -> Structure:
    # 1. symbols
    renamed: dict[str, str] = {}

    def rename(match: re.Match[str]) -> str:
        name = match[0]
        if name in symbols:
            return renamed.setdefault(name, f"n{len(renamed)}")
        if name in SIZE_FUNCTIONS:
            return name
        raise NotCompiled(f"the size {match.string} uses {name}, which is no symbol of the flow")

    def canonical(text: str) -> str:
        return _NAME.sub(rename, text)

    specs: list[Spec | Expr] = []
    for arg in args:
        if isinstance(arg, Expr):
            specs.append(Expr(canonical(arg.text)))
        else:
            specs.append(Spec(tuple(map(canonical, arg.shape)), tuple(map(canonical, arg.stride)), arg.dtype, arg.device))
    placeholders = [n for n in fn.graph.nodes if n.op == "placeholder"]
    if len(placeholders) != len(specs):
        raise NotCompiled(f"the graph takes {len(placeholders)} arguments, {len(specs)} are described")
    # 2. key
    constants: list[torch.Tensor] = []
    key = _key(fn, constants)
    described = tuple((tuple(c.shape), c.stride(), c.dtype, c.device) for c in constants)
    return Structure((key, tuple(specs), described), fn.graph, tuple(specs), tuple(renamed), tuple(constants))


@dataclass(frozen=True, eq=False)
class Same:
    """Equal to nothing but itself; keeps the object alive, so that its id stays its own."""

    what: Any

    def __hash__(self) -> int:
        return id(self.what)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.what is self.what


def _key(gm: fx.GraphModule, constants: list[torch.Tensor] | None) -> tuple[Any, ...]:
    """`constants` collects the tensors that become arguments; None inside a sub-graph, where they stay what they are."""
    nodes = [node for node in gm.graph.nodes if node.target not in _DROPPED]
    number = {node: i for i, node in enumerate(nodes)}

    def of(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return ("node", number[value])
        if isinstance(value, (tuple, list)):
            return (type(value), *map(of, value))
        if isinstance(value, dict):
            return (dict, *((of(k), of(v)) for k, v in value.items()))
        if isinstance(value, slice):
            return (slice, of(value.start), of(value.stop), of(value.step))
        if isinstance(value, (float, complex)):
            return (type(value), repr(value))  # -0.0 is not 0.0, nan is nan
        if value is None or isinstance(value, (bool, int, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format)):
            return (type(value), value)
        return Same(value)

    lines: list[tuple[Any, ...]] = []
    for node in nodes:
        if node.op == "get_attr":
            lines.append(("get_attr", _attribute_key(gm, node.target, constants)))
        elif node.op == "call_module":
            raise NotCompiled(f"the graph calls the module {node.target}")
        else:
            target = "" if node.op in ("placeholder", "output") else node.target
            lines.append((node.op, target if isinstance(target, str) else Same(target), of(node.args), of(node.kwargs)))
    return tuple(lines)


def _attribute_key(gm: fx.GraphModule, target: str, constants: list[torch.Tensor] | None) -> Any:
    value = attribute(gm, target)
    if isinstance(value, fx.GraphModule):
        return _key(value, None)
    if isinstance(value, torch.Tensor) and constants is not None:
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            raise NotCompiled(f"the constant {target} is a {type(value).__name__}")
        known = [i for i, c in enumerate(constants) if c is value]
        if not known:
            constants.append(value)
        return ("constant", known[0] if known else len(constants) - 1)
    return Same(value)


def attribute(gm: torch.nn.Module, target: str) -> Any:
    value: Any = gm
    for name in target.split("."):
        value = getattr(value, name)
    return value


# -- 3. the graph


def canonical_graph(fn: fx.GraphModule, structure: Structure, sizes: Mapping[str, int] | None) -> fx.GraphModule:
    """Takes (numbers, tensors, constants); no numbers when `sizes` fix them. A new graph every time: Inductor changes what it is given."""
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    names = [f"n{i}" for i in range(len(structure.symbols))]
    numbers: dict[str, Any] = dict(sizes) if sizes is not None else {n: fx.Proxy(graph.placeholder(n), tracer) for n in names}
    tensors = [graph.placeholder(f"t{i}") if isinstance(arg, Spec) else None for i, arg in enumerate(structure.args)]
    constants = [graph.placeholder(f"c{i}") for i in range(len(structure.constants))]
    env: dict[fx.Node, Any] = {}
    attributes: dict[str, Any] = {}
    given = iter(zip(structure.args, tensors))
    for node in fn.graph.nodes:
        if node.op == "placeholder":
            arg, tensor = next(given)
            value = evaluate(arg.text, numbers) if isinstance(arg, Expr) else tensor
            env[node] = value.node if isinstance(value, fx.Proxy) else value
            continue
        if node.target in _DROPPED:
            continue
        if node.op == "get_attr":
            value = attribute(fn, node.target)
            known = [c for c, constant in zip(constants, structure.constants) if constant is value]
            if known:
                env[node] = known[0]
                continue
        env[node] = _copied(fn, node, graph, env, attributes)
    return fx.GraphModule(attributes, graph)


def _copied(gm: fx.GraphModule, node: fx.Node, graph: fx.Graph, env: dict[fx.Node, Any], attributes: dict[str, Any]) -> fx.Node:
    target = node.target
    if node.op == "get_attr":
        value = attribute(gm, str(target))
        target = f"a{len(attributes)}"
        attributes[target] = _clean(value) if isinstance(value, fx.GraphModule) else value
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
    name = None if node.op in ("placeholder", "output") else f"v{len(env)}"
    return graph.create_node(node.op, target if node.op != "placeholder" else f"p{len(env)}", args, kwargs, name)


def _clean(gm: fx.GraphModule) -> fx.GraphModule:
    """A sub-graph with canonical names and no metadata."""
    graph = fx.Graph()
    env: dict[fx.Node, Any] = {}
    attributes: dict[str, Any] = {}
    for node in gm.graph.nodes:
        if node.target in _DROPPED:
            continue
        env[node] = _copied(gm, node, graph, env, attributes)
    return fx.GraphModule(attributes, graph)
