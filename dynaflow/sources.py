"""What every node of a captured graph is, for whoever needs its result: an input, a size, a view, a computation.

Memory is made by inputs and computations; everything else is a way to look at it. `Sources.keys` follows a node through views,
projections of tuples and results of in-place calls down to the memory behind it.
"""

from __future__ import annotations

import operator
import re
from typing import Any

import sympy
import torch
from torch import fx
from torch._library.fake_class_registry import FakeScriptObject
from torch.utils import _pytree as pytree
from torch.utils._sympy.printers import PythonPrinter

from dynaflow.batching import Facts
from dynaflow.errors import Unplannable
from dynaflow.ir import SIZE_FUNCTIONS

ITEM = -1

# A value: the node that made it, and the path to it where the node returns a tuple.
Key = tuple[fx.Node, tuple[int, ...]]

ENTER, EXIT = torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast
_IGNORED = {torch._C._set_grad_enabled, getattr(torch._C, "_log_api_usage_once", None)}


# in-place ops that change a tensor's shape: what crosses a border afterwards would have the old one
_RESHAPES = tuple(
    f"aten.{name}_." for name in "t transpose squeeze unsqueeze swapaxes swapdims resize resize_as as_strided set".split()
)


def leaves(value: Any) -> list[Any]:
    return pytree.tree_leaves(value)


class Sources:
    """What every node of the graph is, for whoever needs its result."""

    def __init__(self, graph: fx.Graph, facts: Facts):
        self.graph, self.facts = graph, facts
        self.kind: dict[fx.Node, str] = {}
        # result of an in-place node -> the argument that it changed and returned
        self.alias: dict[fx.Node, fx.Node] = {}
        # autocast regions around a node, outermost first
        self.brackets: dict[fx.Node, tuple[fx.Node, ...]] = {}
        # storages that some node changes
        self.written = frozenset().union(*(info.writes for info in facts.nodes.values()))
        open_brackets: list[fx.Node] = []
        for node in graph.nodes:
            self.kind[node] = self._kind(node)
            if node.target is ENTER:
                open_brackets.append(node)
            elif node.target is EXIT:
                open_brackets.remove(node.args[0])
            self.brackets[node] = tuple(open_brackets)
            if self.kind[node] == "compute" and facts.nodes[node].writes:
                target = self._changed_argument(node)
                if target is not None:
                    self.alias[node] = target
        self._drop_dead()
        self._users: dict[fx.Node, set[fx.Node]] | None = None
        self._known: dict[tuple[fx.Node, tuple[int, ...]], tuple[Key, ...]] = {}
        for node in graph.nodes:  # in order, so that no look-up goes deep
            self._keys(node, ())

    def _kind(self, node: fx.Node) -> str:
        if node.op in ("placeholder", "get_attr", "output"):
            if node.op == "placeholder" and not isinstance(self.facts.fake[node], torch.Tensor):
                if isinstance(fake := self.facts.fake[node], FakeScriptObject):
                    raise Unplannable(f"'{node}' is a {fake.script_class_name}.", why="it is no tensor and no number")
                return "size"
            return {"placeholder": "input", "get_attr": "constant", "output": "output"}[node.op]
        if node.target in (ENTER, EXIT) or node.target in _IGNORED:
            return "bracket"
        if getattr(node.target, "__name__", "").endswith("_increment_nesting"):
            raise Unplannable(f"the graph holds a functorch transform ('{node}').", why="what is inside of it cannot be cut into ops")
        info, fake = self.facts.nodes[node], self.facts.fake[node]
        tensors = [x for x in leaves(fake) if isinstance(x, torch.Tensor)]
        reshaped = next((call for call in info.calls if call.startswith(_RESHAPES)), "")
        if reshaped:
            raise Unplannable(f"'{node}' changes the shape of a tensor in place ({reshaped}).", fix="use the function that returns a view")
        if node.target is operator.getitem and isinstance(self.facts.fake[node.args[0]], (tuple, list)):  # type: ignore[index]
            return "project" if tensors else "size"
        if info.writes or info.uses or info.makes:
            return "compute"
        if tensors:
            return "view"
        if info.reads:
            raise Unplannable(f"'{node.format_node()}' reads a number back from a tensor.", why="the host would wait for the device")
        return "size"

    def _changed_argument(self, node: fx.Node) -> fx.Node | None:
        result = self.facts.fake[node]
        if not isinstance(result, torch.Tensor):
            return None
        for arg in node.all_input_nodes:
            fake = self.facts.fake[arg]
            if isinstance(fake, torch.Tensor) and self.facts.storage(fake) == self.facts.storage(result) and _same_geometry(fake, result):
                return arg
        return None

    def _drop_dead(self) -> None:
        alive: set[fx.Node] = set()
        for node in reversed(list(self.graph.nodes)):
            info = self.facts.nodes.get(node)
            has_effect = node.op == "output" or (info is not None and (info.writes or info.uses))
            if has_effect or any(user in alive for user in node.users):
                alive.add(node)
        self._alive = alive

    def computes(self, node: fx.Node) -> bool:
        return self.kind[node] == "compute" and node in self._alive

    def keys(self, node: fx.Node) -> list[Key]:
        """The values behind a node, through views, projections and in-place results; none for sizes and constants."""
        return list(self._keys(node, ()))

    def _keys(self, node: fx.Node, path: tuple[int, ...]) -> tuple[Key, ...]:
        if (node, path) not in self._known:
            self._known[node, path] = tuple(dict.fromkeys(self._find_keys(node, path)))
        return self._known[node, path]

    def _find_keys(self, node: fx.Node, path: tuple[int, ...]) -> Any:
        kind = self.kind[node]
        if node in self.alias:
            yield from self._keys(self.alias[node], ())
        elif kind == "view":
            for arg in node.all_input_nodes:
                yield from self._keys(arg, ())
        elif kind == "project":
            yield from self._keys(node.args[0], (node.args[1], *path))  # type: ignore[arg-type]
        elif kind == "input":
            yield (node, ())
        elif kind == "compute":
            for tail in _paths(_at(self.facts.fake[node], path)):
                yield (node, (*path, *tail))

    def root_inputs(self, node: fx.Node) -> list[fx.Node]:
        """The nodes whose memory `node` reads or changes, through views."""
        return list(dict.fromkeys(owner for arg in node.all_input_nodes for owner, _ in self.keys(arg)))

    def users_of_roots(self) -> dict[fx.Node, set[fx.Node]]:
        """Node that owns memory -> the nodes that use it through views; the graph's output node counts as a user."""
        if self._users is None:
            self._users = {}
            for node in self.graph.nodes:
                if self.computes(node) or node.op == "output":
                    for owner in self.root_inputs(node):
                        if owner is not node:
                            self._users.setdefault(owner, set()).add(node)
        return self._users

    def axis(self, key: Key) -> int | None:
        return _at(self.facts.axis[key[0]], key[1])

    def fake(self, key: Key) -> torch.Tensor:
        return _at(self.facts.fake[key[0]], key[1])

    def carries_batch(self, node: fx.Node) -> bool:
        if any(isinstance(a, int) for a in leaves(self.facts.axis[node])):
            return True
        return bool(self.facts.nodes[node].writes) and any(self.axis(k) is not None for a in node.all_input_nodes for k in self.keys(a))

    def unsplittable(self, node: fx.Node) -> str:
        """Why a node cannot run on a part: for its own reason, or because a view that it would make anew mixes the batch (`x[0]`)."""
        seen: set[fx.Node] = set()
        stack = [node]
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            if reason := self.facts.nodes[node].unsplittable:
                return reason
            for arg in reversed(node.all_input_nodes):
                while arg in self.alias:
                    arg = self.alias[arg]
                if self.kind[arg] in ("view", "project"):
                    stack.append(arg)
        return ""

    def is_fresh(self, node: fx.Node) -> bool:
        """Whether what a node returns is sure to be memory of its own. `contiguous`, `reshape` and `to` copy only if they must."""
        calls = set(self.facts.nodes[node].calls)
        copies = {"aten.clone.default", "aten._to_copy.default"} & calls
        return bool(calls) and (not copies or node.target in ("clone", torch.clone))

    def may_alias(self, node: fx.Node) -> bool:
        """Whether a node copies only if it must (contiguous, reshape, to), and its copy or what it copied is changed in place later."""
        info, result = self.facts.nodes[node], self.facts.fake[node]
        copies = {"aten.clone.default", "aten._to_copy.default"} & set(info.calls)
        if not copies or not isinstance(result, torch.Tensor) or node.target in ("clone", torch.clone):
            return False
        return not self.written.isdisjoint(info.reads | {self.facts.storage(result)})

    def is_parameter(self, node: fx.Node) -> bool:
        return self.kind[node] == "input" and not self.carries_batch(node)


def _same_geometry(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a is b:
        return True
    return a.dim() == b.dim() and bool(a.shape == b.shape and a.stride() == b.stride() and a.storage_offset() == b.storage_offset())


def _at(tree: Any, path: tuple[int, ...]) -> Any:
    for i in path:
        tree = tree[i]
    return tree


def _paths(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        yield ()
    elif isinstance(tree, (tuple, list)):
        for i, sub in enumerate(tree):
            for tail in _paths(sub):
                yield (i, *tail)


def clean_name(name: str) -> str:
    """`L['self']._modules['layers']._modules['0'].attn` -> `layers.0.attn`"""
    name = re.sub(r"(\.__dict__\['_modules'\]|\._modules)\['([^']+)'\]", r".\2", name)  # the former where the class has a __getattr__
    name = re.sub(r"^.*\.cell_contents\.?", "", name)  # a module that a function closes over
    name = re.sub(r"^[LG]\['[^']+'\]\.?", "", name)
    name = re.sub(r"^((forward\.)?model\.)?__self__(\.|$)", "", name)  # a module whose method was compiled, maybe in its own place
    name = re.sub(r"\[['\"]?([^'\"\]]+)['\"]?\]", r".\1", name)
    return re.sub(r"[\s@,\[\]#]", "_", name).strip(".")


# -- sizes

_PRINTER = PythonPrinter()
_ALLOWED = re.compile(r"[\w\s+\-*/%(),.]*")


def expression(size: Any) -> str:
    """A size as Python text over the graph's symbols."""
    if isinstance(size, (int, float)):
        return str(size)
    text = _PRINTER.doprint(sympy.sympify(size.node.expr))
    for theirs, ours in (("torch._sym_sqrt", "sqrt"), ("math.sqrt", "sqrt"), ("torch.sym_float", "float")):
        text = text.replace(theirs, ours)
    names = set(re.findall(r"(?<![\w.])[A-Za-z_]\w*", text)) - {str(s) for s in size.node.expr.free_symbols}
    if not _ALLOWED.fullmatch(text) or names - set(SIZE_FUNCTIONS):
        raise Unplannable(f"a size cannot be computed ahead of the call: {text}.", why="it is not an expression over input sizes")
    return text


def hint(size: Any) -> int:
    """The number that a size had at capture."""
    if isinstance(size, int):
        return size
    if size.node.hint is None:
        raise Unplannable(f"the size {size} is known only when the graph runs.", why="it depends on data, or is computed inside the graph")
    return int(size.node.hint)


def symbols_in(fakes: Any) -> set[str]:
    found: set[str] = set()
    for fake in leaves(fakes):
        for size in (*fake.shape, *fake.stride()) if isinstance(fake, torch.Tensor) else (fake,):
            if isinstance(size, (torch.SymInt, torch.SymFloat)):
                found.update(str(s) for s in size.node.expr.free_symbols)
    return found
