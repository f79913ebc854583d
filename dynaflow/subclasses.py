"""DTensors (and other wrappers of plain tensors) are taken apart before a graph is looked at.

Contract: `take_apart` gives a graph over the plain tensors inside, in which the wrappers' own work (the collectives of a redistribution)
is there to be seen, and that computes the same. Nodes that touch no wrapper are kept as Dynamo made them; each of the others becomes
the ops that it comes down to, under its own name and module. Objects that are no tensors (a DeviceMesh) become constants; those that are
known by their value (a layer's name, which a serving engine gives its ops) stand where they are used.

Nothing is taken apart where gradients are needed, where the graph returns a wrapper, or where wrappers hold wrappers: such a graph
runs as it is.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import Any, Sequence

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch._library.fake_class_registry import FakeScriptObject
from torch._library.opaque_object import is_opaque_value_type
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

log = logging.getLogger("dynaflow")

# what a node that is traced again keeps of the one that it comes from
_KEPT = ("nn_module_stack", "stack_trace", "custom", "source_fn_stack")


@dataclass(frozen=True)
class Apart:
    gm: fx.GraphModule
    # per argument of the graph: the attributes that hold its plain tensors; None: it is one itself, or a number
    attributes: tuple[tuple[str, ...] | None, ...]

    def inside(self, args: Sequence[Any]) -> list[Any]:
        """The plain arguments of a call."""
        flat: list[Any] = []
        for arg, names in zip(args, self.attributes):
            flat.extend([arg] if names is None else [getattr(arg, name) for name in names])
        return flat


@dataclass(frozen=True)
class _Wrapped:
    """A wrapper while the graph is taken apart: its fake, and the nodes of what is inside."""

    fake: Any
    nodes: list[fx.Node]


@dataclass(frozen=True)
class _Constant:
    what: Any


@dataclass(frozen=True)
class _Value(_Constant):
    """A constant that may stand in a graph: equal ones are the same to every op. Dynamo makes it anew from what it guards."""


class _Stays(Exception):
    """The graph cannot be taken apart."""


def take_apart(gm: fx.GraphModule, inputs: Sequence[Any]) -> Apart | None:
    """None: there is nothing to take apart, or it cannot be done."""
    fakes = [n.meta.get("example_value") for n in gm.graph.nodes]
    if not any(is_traceable_wrapper_subclass(fake) or isinstance(fake, FakeScriptObject) for fake in fakes):
        return None
    if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs):
        return None
    try:
        return _Taking(gm, inputs).run()
    except _Stays:
        return None


class _Taking:
    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Any]):
        self.gm, self.inputs = gm, list(inputs)
        self.graph = fx.Graph()
        fake_mode = detect_fake_mode([n.meta["example_value"] for n in gm.graph.nodes if n.op == "placeholder"])
        if fake_mode is None:
            raise _Stays
        self.fake_mode = fake_mode
        self.env: dict[fx.Node, Any] = {}
        self.attributes: list[tuple[str, ...] | None] = []

    def run(self) -> Apart:
        (output,) = self.gm.graph.find_nodes(op="output")
        if any(_is_wrapped(arg) for arg in output.all_input_nodes):
            raise _Stays
        for node in self.gm.graph.nodes:
            if node.op == "placeholder":
                self.env[node] = self._placeholder(node)
            elif all(isinstance(self.env[arg], (fx.Node, _Value)) for arg in node.all_input_nodes) and not _is_wrapped(node):
                self.env[node] = self.graph.node_copy(node, self._as_argument)
            elif node.op == "output":
                raise _Stays
            else:
                self.env[node] = self._trace(node)
        self.graph.lint()
        return Apart(fx.GraphModule(self.gm, self.graph), tuple(self.attributes))

    def _as_argument(self, node: fx.Node) -> Any:
        have = self.env[node]
        return have.what if isinstance(have, _Value) else have

    def _placeholder(self, node: fx.Node) -> Any:
        fake, given = node.meta.get("example_value"), self.inputs[len(self.attributes)]
        if isinstance(fake, FakeScriptObject):
            self.attributes.append(())
            real = fake.real_obj
            return _Value(real) if is_opaque_value_type(type(real)) else _Constant(given)
        if not is_traceable_wrapper_subclass(fake):
            self.attributes.append(None)
            return self.graph.node_copy(node)
        names = tuple(_attributes(fake))
        self.attributes.append(names)
        nodes = []
        for name in names:
            new = self.graph.placeholder(node.name if len(names) == 1 else f"{node.name}_{name}")
            new.meta = {**node.meta, "example_value": getattr(fake, name)}
            nodes.append(new)
        return _Wrapped(fake, nodes)

    def _trace(self, node: fx.Node) -> Any:
        """The node as the ops that it comes down to."""
        sources = [arg for arg in node.all_input_nodes if not isinstance(self.env[arg], _Constant)]
        given: list[tuple[fx.Node, Any]] = []  # nodes of the new graph, and their fakes
        for source in sources:
            have = self.env[source]
            if isinstance(have, _Wrapped):
                given += [(n, n.meta["example_value"]) for n in have.nodes]
            else:
                given.append((have, source.meta["example_value"]))
        results: list[Any] = []

        def call(*flat: Any) -> list[Any]:
            left, values = list(flat), {}
            for source in sources:
                have = self.env[source]
                values[source] = _wrap(have.fake, [left.pop(0) for _ in have.nodes]) if isinstance(have, _Wrapped) else left.pop(0)
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: values[n] if n in values else self.env[n].what)
            target = getattr(args[0], node.target) if isinstance(node.target, str) else partial(node.target, args[0])
            result = target(*args[1:], **kwargs)
            results[:] = [result]
            return [t for leaf in pytree.tree_leaves(result) for t in _unwrap(leaf)]

        try:
            with torch.no_grad(), self.fake_mode:
                traced = make_fx(call, _allow_non_fake_inputs=True)(*[_in_mode(fake, self.fake_mode) for _, fake in given])
        except Exception as error:  # of a wrapper that torch cannot trace through
            log.info("a graph's wrapped tensors are left as they are, '%s' cannot be traced: %s: %s", node, type(error).__name__, error)
            raise _Stays from error
        made = self._inline(traced, [n for n, _ in given], node)
        return self._result(results[0], made)

    def _inline(self, traced: fx.GraphModule, args: list[fx.Node], origin: fx.Node) -> list[fx.Node]:
        env: dict[fx.Node, fx.Node] = dict(zip([n for n in traced.graph.nodes if n.op == "placeholder"], args))
        kept = {name: origin.meta[name] for name in _KEPT if name in origin.meta}
        for node in traced.graph.nodes:
            if node.op == "get_attr":
                raise _Stays  # a constant tensor: of this rank, at this capture
            if node.op == "call_function":
                env[node] = self.graph.node_copy(node, lambda n: env[n])
                env[node].meta = {**kept, "example_value": node.meta.get("val")}
            elif node.op == "output":
                return [env[n] for n in node.args[0]]
        raise AssertionError("a traced graph has an output")

    def _result(self, result: Any, made: list[fx.Node]) -> Any:
        if is_traceable_wrapper_subclass(result):
            return _Wrapped(result, made)
        if isinstance(result, torch.Tensor) and len(made) == 1:
            return made[0]
        raise _Stays  # several results, or numbers


def _is_wrapped(node: fx.Node) -> bool:
    return any(is_traceable_wrapper_subclass(leaf) for leaf in pytree.tree_leaves(node.meta.get("example_value")))


def _attributes(fake: Any) -> list[str]:
    """Those that hold plain tensors. (What else it is flattened to, a DeviceMesh, is the same in every call.)"""
    names, _ = fake.__tensor_flatten__()
    if any(is_traceable_wrapper_subclass(getattr(fake, name)) for name in names):
        raise _Stays
    return [name for name in names if isinstance(getattr(fake, name), torch.Tensor)]


def _in_mode(fake: Any, mode: FakeTensorMode) -> Any:
    """Dynamo gives a backend new fakes of the inputs; those of other nodes are still its own. Sizes are the same symbols."""
    if not isinstance(fake, FakeTensor) or fake.fake_mode is mode:
        return fake
    return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)


def _wrap(fake: Any, inner: list[Any]) -> Any:
    names, context = fake.__tensor_flatten__()
    parts = {name: getattr(fake, name) for name in names}
    parts = {name: part.real_obj if isinstance(part, FakeScriptObject) else part for name, part in parts.items()}
    parts.update(zip(_attributes(fake), inner))
    return type(fake).__tensor_unflatten__(parts, context, fake.shape, fake.stride())


def _unwrap(value: Any) -> list[Any]:
    if is_traceable_wrapper_subclass(value):
        return [getattr(value, name) for name in _attributes(value)]
    return [value] if isinstance(value, torch.Tensor) else []
