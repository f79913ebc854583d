"""Groups of nodes -> ops, values and the functions that run them.

Contract: what crosses an op's border is memory (a value: something that an op allocated, or an input) or a size. Views never
cross: an op that needs a view of a value makes it anew from the value, which costs nothing and keeps aliasing exact. Sizes are
expressions over the graph's symbols, so that a part gets its own.

1. Each group becomes an fx graph of its own, whose placeholders are values and sizes and whose outputs are the values that others
   need; the graph's outputs become an epilogue of views.
2. Values get their records (shape, batch axis, role) and layouts; ops get what they read, write, mutate and use, and why they
   cannot be split, if they cannot.
"""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable, Sequence

import sympy
import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dynaflow.batching import Facts
from dynaflow.copies import LooseCopy, loose_copies
from dynaflow.errors import PartitionError, Unplannable
from dynaflow.ir import SIZE_FUNCTIONS, Flow, Op, Value
from dynaflow.offload import FETCH, fetch_into
from dynaflow.runtime.program import Expr, Layout, Program, Unit
from dynaflow.sources import ENTER, EXIT, ITEM, Key, Sources, clean_name, expression, hint, leaves, symbols_in

if TYPE_CHECKING:
    from dynaflow.partition import Group


@dataclass(frozen=True)
class Built:
    """A captured graph, ready for planning."""

    program: Program
    # per placeholder of the graph: the value's name, or None for a size
    inputs: tuple[str | None, ...]
    # symbol -> (placeholder, dim; None when the placeholder is the number itself, ITEM when it is a tensor that holds it)
    sizes: dict[str, tuple[int, int | None]]
    # views of values that make up the graph's outputs, made on the caller's stream
    epilogue: Unit
    # values as fakes, at the sizes of the capture
    fakes: dict[str, torch.Tensor]
    # op -> the aten and custom ops that it comes down to
    calls: dict[str, tuple[str, ...]]
    # copies that torch makes only if it must, where they or what they copy are changed in place later
    loose_copies: tuple[LooseCopy, ...]
    # ops that the partition says recordable=False of
    unrecordable: frozenset[str]

    def plain_outputs(self, outputs: Sequence[str]) -> list[int] | None:
        """Which of the flow's outputs the graph returns, where it returns nothing else: then there is no epilogue to run."""
        returned = self.epilogue.fn
        if not isinstance(returned, fx.GraphModule) or any(n.op not in ("placeholder", "output") for n in returned.graph.nodes):
            return None
        names = dict(zip([n for n in returned.graph.nodes if n.op == "placeholder"], self.epilogue.args))
        (output,) = [n for n in returned.graph.nodes if n.op == "output"]
        values = [names.get(node) for node in output.args[0]] if all(isinstance(node, fx.Node) for node in output.args[0]) else [None]
        return [outputs.index(v) for v in values] if all(v in outputs for v in values) else None  # type: ignore[arg-type]


class _UnitGraph:
    """One group as an fx graph: takes values and sizes, returns what others need."""

    def __init__(self, sources: Sources, name_of: Callable[[Key], str]):
        self.sources, self.name_of = sources, name_of
        self.graph = fx.Graph()
        self.args: dict[str | Expr, fx.Node] = {}
        self.env: dict[fx.Node, Any] = {}
        self.values: dict[Key, None] = {}
        self._open: tuple[fx.Node, ...] = ()
        self._tokens: list[fx.Node] = []

    def emit(self, node: fx.Node) -> None:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.load)
        self._switch(self.sources.brackets[node])
        new = self.graph.create_node(node.op, node.target, args, kwargs, node.name)
        new.meta = dict(node.meta)
        self.env[node] = self.graph.call_function(own, (new, *args[:1])) if self.sources.may_alias(node) else new

    def _switch(self, brackets: tuple[fx.Node, ...]) -> None:
        if brackets == self._open:
            return
        for token in reversed(self._tokens):
            self.graph.call_function(EXIT, (token,))
        self._tokens = [self.graph.call_function(ENTER, b.args) for b in brackets]
        self._open = brackets

    def load(self, node: fx.Node) -> Any:
        """The node's result, as something that this graph can use. Not recursive: chains of views may be long."""
        stack = [node] if node not in self.env else []
        while stack:
            missing = [arg for arg in self._needs(stack[-1]) if arg not in self.env]
            if missing:
                stack.extend(reversed(missing))
            else:
                last = stack.pop()
                if last not in self.env:
                    self.env[last] = self._load(last)
        return self.env[node]

    def _needs(self, node: fx.Node) -> list[fx.Node]:
        """What must be loaded before the node."""
        kind = self.sources.kind[node]
        if kind in ("project", "view", "constant"):
            return node.all_input_nodes
        return [self.sources.alias[node]] if node in self.sources.alias and kind != "size" else []

    def _load(self, node: fx.Node) -> Any:
        sources = self.sources
        kind = sources.kind[node]
        if kind == "size":
            return pytree.tree_map(self._size, _plain(sources.facts.fake[node]))
        if kind == "project":
            base, index = self.load(node.args[0]), operator.index(node.args[1])  # type: ignore[arg-type]
            return base[index] if isinstance(base, (tuple, list)) else self.graph.call_function(operator.getitem, (base, index))
        if kind in ("view", "constant"):
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.load)
            new = self.graph.create_node(node.op, node.target, args, kwargs, node.name)
            new.meta = dict(node.meta)
            return new
        if node in sources.alias:
            return self.load(sources.alias[node])
        if kind == "bracket":
            raise Unplannable(f"'{node}' is used across ops.")
        return self._values(node, sources.facts.fake[node], ())

    def _values(self, node: fx.Node, fake: Any, path: tuple[int, ...]) -> Any:
        if isinstance(fake, torch.Tensor):
            return self.value((node, path))
        if isinstance(fake, (tuple, list)):
            return tuple(self._values(node, sub, (*path, i)) for i, sub in enumerate(fake))
        return self._size(fake)

    def value(self, key: Key) -> fx.Node:
        self.values[key] = None
        return self._placeholder(self.name_of(key))

    def _size(self, size: Any) -> Any:
        if not isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return size
        if size.node.expr.is_number:
            return size.node.pytype(size.node.expr)
        return self._placeholder(Expr(expression(size)))

    def _placeholder(self, arg: str | Expr) -> fx.Node:
        if arg not in self.args:
            with self.graph.inserting_after(next(reversed(self.args.values()), self.graph._root)):
                self.args[arg] = self.graph.placeholder(f"arg{len(self.args)}")
        return self.args[arg]

    def finish(self, root: fx.GraphModule, outputs: Sequence[Any], label: str) -> Callable[..., Any]:
        self._switch(())
        self.graph.output(tuple(outputs))
        self.graph.lint()
        # most units are compiled by others, and never called: their code is written when they are
        return _LazyGraphModule(root, self.graph, class_name=re.sub(r"\W", "_", label) or "unit")

    def export(self, key: Key) -> fx.Node:
        result = self.env[key[0]]
        for i in key[1]:
            result = result[i] if isinstance(result, (tuple, list)) else self.graph.call_function(operator.getitem, (result, i))
        return result


def own(result: torch.Tensor, source: Any) -> torch.Tensor:
    """`x.t().contiguous()` copies, except where a part has one row. What is changed in place later must be a copy always."""
    is_alias = isinstance(source, torch.Tensor) and result.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
    return result.clone() if is_alias else result


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, torch.Size) else value


def build(gm: fx.GraphModule, facts: Facts, sources: Sources, groups: Sequence[Group], batch: Sequence[str], name: str,
          parameters: Sequence[str] = ()) -> Built:  # fmt: skip
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    names: dict[Key, str] = {}
    for node in placeholders:
        if sources.kind[node] == "input":
            names[node, ()] = _input_name(node, parameters, set(names.values()))
    home = {node: group for group in groups for node in group.nodes}
    made: dict[str, list[Key]] = {group.name: [] for group in groups}

    def name_of(key: Key) -> str:
        if key not in names:
            group = home[key[0]]
            names[key] = f"{group.name}:{len(made[group.name])}"
            made[group.name].append(key)
        return names[key]

    # Names follow the order in which values are first needed, group by group, then by the outputs.
    graphs: list[_UnitGraph] = []
    for group in groups:
        unit = _UnitGraph(sources, name_of)
        for node in group.nodes:
            unit.emit(node)
        graphs.append(unit)
    epilogue = _UnitGraph(sources, name_of)
    (output_node,) = [n for n in gm.graph.nodes if n.op == "output"]
    results = fx.node.map_arg(output_node.args[0], epilogue.load)

    values = _Values(sources, names, batch, set(epilogue.values))
    ops, units = [], {}
    for group, unit in zip(groups, graphs):
        ops.append(_op(group, unit, made[group.name], facts, sources, values, names))
        exported = [unit.export(key) for key in made[group.name]]
        fn = unit.finish(gm, exported, group.name)
        fresh = frozenset(names[k] for k in made[group.name] if sources.is_fresh(k[0]))
        into = fetch_into if [facts.nodes[n].calls for n in group.nodes] == [(FETCH,)] else None
        units[group.name] = Unit(fn, tuple(unit.args), tuple(names[k] for k in made[group.name]), fresh, (group.name,), into)
    epilogue_fn = epilogue.finish(gm, tuple(results), "epilogue")  # Dynamo's outputs are a flat tuple
    _LazyGraphModule.force_recompile(epilogue_fn)  # type: ignore[arg-type]
    records = [values.record(key) for key in names]
    outputs = tuple(names[key] for key in epilogue.values)
    sizes = _size_sources(placeholders, facts)
    needed = set().union(*(symbols_in(facts.fake[n]) for n in placeholders), set())
    for unit in (*graphs, epilogue):
        needed.update(name for arg in unit.args if isinstance(arg, Expr) for name in re.findall(r"(?<![\w.])[A-Za-z_]\w*", arg.text))
    all_symbols = sorted(needed - set(SIZE_FUNCTIONS))
    for symbol in all_symbols:
        if symbol not in sizes:
            raise Unplannable(f"the number {symbol} cannot be read from the inputs.", why="it is computed inside the graph")
    flow = Flow(name, tuple(records), tuple(ops), outputs, tuple(s for s in batch if s in all_symbols), tuple(all_symbols))
    return Built(
        Program(flow, units, values.layouts),
        tuple(names.get((n, ())) for n in placeholders),
        sizes,
        Unit(epilogue_fn, tuple(epilogue.args), ()),
        {name: sources.fake(key) for key, name in names.items()},
        {group.name: tuple(dict.fromkeys(c for n in group.nodes for c in facts.nodes[n].calls)) for group in groups},
        loose_copies([n for group in groups for n in group.nodes], sources),
        frozenset(group.name for group in groups if not group.recordable),
    )


def _size_sources(placeholders: list[fx.Node], facts: Facts) -> dict[str, tuple[int, int | None]]:
    found: dict[str, tuple[int, int | None]] = {}
    for i, node in enumerate(placeholders):
        fake = facts.fake[node]
        for dim, size in enumerate(fake.shape) if isinstance(fake, torch.Tensor) else [(None, fake)]:
            if isinstance(size, (torch.SymInt, torch.SymFloat)) and isinstance(size.node.expr, sympy.Symbol):
                found.setdefault(str(size.node.expr), (i, dim))
    for node in placeholders[0].graph.nodes if placeholders else ():
        # Dynamo passes a Python float as a tensor of no dims on the CPU, and reads it back with item().
        if node.target == "item" and node.args[0] in placeholders and isinstance(facts.fake[node], torch.SymFloat):
            source = facts.fake[node.args[0]]
            if source.device.type == "cpu" and isinstance(facts.fake[node].node.expr, sympy.Symbol):
                found[str(facts.fake[node].node.expr)] = (placeholders.index(node.args[0]), ITEM)
    return found


def _input_name(node: fx.Node, parameters: Sequence[str], taken: set[str]) -> str:
    """`L['args'][0]` -> `x`, `L['kwargs']['mask']` -> `mask`, `L['model']._modules['a']._parameters['weight']` -> `a.weight`"""
    arg = node.meta.get("grapharg")
    source = getattr(getattr(arg, "source", None), "name", None)
    text = source() if callable(source) else source
    text = re.sub(r"\._(?:parameters|buffers)\['([^']+)'\]", r".\1", text or node.name)
    text = re.sub(r"^L\['args'\]\[(\d+)\]", lambda m: parameters[int(m[1])] if int(m[1]) < len(parameters) else f"arg{m[1]}", text)
    text = re.sub(r"^L\['kwargs'\]\['(\w+)'\]", r"\1", text)
    match = re.fullmatch(r"[LG]\['([^']+)'\]", text)
    base = match[1] if match else clean_name(text)
    base = re.sub(r"[^\w.]+", "_", base).strip("._") or node.name
    name, number = base, 0
    while name in taken:
        number += 1
        name = f"{base}.{number}"
    return name


class _Values:
    """Value records and layouts, made when first asked for."""

    def __init__(self, sources: Sources, names: dict[Key, str], batch: Sequence[str], outputs: set[Key]):
        self.sources, self.names, self.batch, self.outputs = sources, names, batch, outputs
        self.layouts: dict[str, Layout] = {}
        self._records: dict[Key, Value] = {}
        counts: dict[int, int] = {}
        for key in names:
            storage = sources.facts.storage(sources.fake(key))
            counts[storage] = counts.get(storage, 0) + 1
        self._shared = {s for s, n in counts.items() if n > 1}
        self._quantised = _quantised(sources)
        for key in names:
            storage = sources.facts.storage(sources.fake(key))
            if key[0].op != "placeholder" and storage in self._shared and storage in sources.written:
                raise Unplannable(f"'{key[0]}' returns several views of one memory, which is changed in place later.")

    def is_batch_outermost(self, key: Key) -> bool:
        axis, fake = self.sources.axis(key), self.sources.fake(key)
        if axis is None:
            return True
        mine = fake.stride(axis)
        for d, (size, stride) in enumerate(zip(fake.shape, fake.stride())):
            if d != axis and hint(size) != 1 and (hint(stride) > hint(mine) or symbols_in(stride) & set(self.batch)):
                return False
        return True

    def record(self, key: Key) -> Value:
        if key not in self._records:
            self._records[key] = self._make(key)
        return self._records[key]

    def _make(self, key: Key) -> Value:
        sources, name = self.sources, self.names[key]
        fake, axis = sources.fake(key), sources.axis(key)
        if is_traceable_wrapper_subclass(fake) or fake.is_quantized or fake.layout is not torch.strided:
            raise Unplannable(f"{name} is a {type(fake).__name__} ({fake.layout}).", why="only plain strided tensors can be placed")
        example = getattr(key[0].meta.get("grapharg"), "example", None)
        if key[0] in self._quantised or (isinstance(example, torch.Tensor) and (example.is_quantized or example.is_mkldnn)):
            kind = "an mkldnn tensor" if example is not None and example.is_mkldnn else "quantised"
            raise Unplannable(f"{name} is {kind}.", why="only plain strided tensors can be placed")
        shape = tuple(expression(d) for d in fake.shape)
        is_input = key[0].op == "placeholder"
        storage = sources.facts.storage(fake)
        own = name if storage not in self._shared or not is_input else f"alias.{storage}"
        itemsize = fake.dtype.itemsize
        numel = fake.numel()
        nbytes = expression(numel * itemsize)
        role = "output" if key in self.outputs else "temp"
        if is_input:
            node = key[0]
            arg = node.meta.get("grapharg")
            # what belongs to a module (parameters, buffers, plain attributes) stays where it is from call to call
            is_state = any(mark in node.name for mark in ("_parameters_", "_buffers_", "_modules_"))
            role = "param" if is_state or isinstance(getattr(arg, "example", None), torch.nn.Parameter) else "input"
        seen = tuple(expression(s) for s in fake.stride())
        has_gaps = not is_input and not _is_dense(fake)
        if has_gaps and storage in sources.written:
            raise Unplannable(f"{name} has gaps in memory and is changed in place.", why="it would be placed without the gaps")
        # Outputs are allocated one by one, and may keep their gaps; in the arena there are none.
        stride = _contiguous(fake) if has_gaps and (role == "temp" or not all(hint(s) for s in fake.stride())) else seen
        is_relaid = stride != seen or (not self.is_batch_outermost(key) and storage not in sources.written)
        self.layouts[name] = Layout(fake.dtype, fake.device, stride, seen if is_relaid else None)
        return Value(name, shape, str(fake.dtype).removeprefix("torch."), nbytes, axis, role, own)


def _quantised(sources: Sources) -> set[fx.Node]:
    """Nodes that return quantised tensors. Their fakes are floats and do not say so."""
    found: set[fx.Node] = set()
    for node in sources.graph.nodes:
        calls = sources.facts.nodes[node].calls
        if any("dequantize" in call or "int_repr" in call for call in calls):
            continue
        if any(call.startswith("aten.quantize_per_") for call in calls) or any(arg in found for arg in node.all_input_nodes):
            found.add(node)
    return found


def _is_dense(fake: torch.Tensor) -> bool:
    """Whether the elements fill a block of memory without holes or overlap, in some order of dims."""
    dims = sorted((hint(stride), hint(size)) for size, stride in zip(fake.shape, fake.stride()) if hint(size) != 1)
    expected = 1
    for stride, size in dims:
        if stride != expected:
            return False
        expected *= size
    return True


def _contiguous(fake: torch.Tensor) -> tuple[str, ...]:
    strides: list[Any] = []
    size: Any = 1
    for d in reversed(fake.shape):
        strides.append(size)
        size = size * d
    return tuple(expression(s) for s in reversed(strides))


def _op(
    group: Group, unit: _UnitGraph, made: list[Key], facts: Facts, sources: Sources, values: _Values, names: dict[Key, str]
) -> Op:
    infos = [facts.nodes[n] for n in group.nodes]
    written = {s for info in infos for s in info.writes}
    mutated = [k for k in unit.values if facts.storage(sources.fake(k)) in written]
    for node in group.nodes:
        for arg in node.all_input_nodes:
            if sources.kind[arg] == "constant" and isinstance(facts.fake[arg], torch.Tensor) and facts.storage(facts.fake[arg]) in written:
                raise Unplannable(f"'{node}' changes a constant of the graph in place.")
    uses = tuple(dict.fromkeys(token for info in infos for token in info.uses))
    return Op(
        group.name,
        group.kind or _kind(group.nodes, infos, facts),
        tuple(names[k] for k in unit.values),
        tuple(names[k] for k in made),
        tuple(names[k] for k in mutated),
        uses,
        _why_whole(group, unit, made, mutated, sources, values, names),
        group.module,
    )


def _kind(nodes: Sequence[fx.Node], infos: Sequence[Any], facts: Facts) -> str:
    if any(token.startswith("group:") for info in infos for token in info.uses):
        return "network"
    if any(FETCH in info.calls for info in infos):
        return "copy"
    if any(info.macs or any("attention" in call for call in info.calls) for info in infos):
        return "compute"
    devices = {x.device for n in nodes for a in (n, *n.all_input_nodes) for x in leaves(facts.fake[a]) if isinstance(x, torch.Tensor)}
    return "copy" if len({d.type for d in devices}) > 1 else "memory"


def _why_whole(
    group: Group, unit: _UnitGraph, made: list[Key], mutated: list[Key], sources: Sources, values: _Values, names: dict[Key, str]
) -> str:  # fmt: skip
    """Why the op must run over the whole batch; empty when it may be split."""
    if group.splittable is False:
        return "splittable=False in the partition"
    touched = [*unit.values, *made]
    if not values.batch:
        return "no dim of this graph's inputs is the batch"
    if not any(sources.axis(k) is not None for k in touched):
        return "does not depend on the batch"
    for key in mutated:
        if sources.axis(key) is not None and not values.is_batch_outermost(key):
            return f"changes {names[key]} in place, where the batch is not the outermost dim"
    if group.splittable is not True:
        for node in group.nodes:
            if reason := sources.unsplittable(node):
                return f"{reason} at {node.name}"
    for key in made:
        if sources.axis(key) is None:
            if group.splittable is True:
                raise PartitionError(
                    f"'{group.name}' is declared splittable=True, but its output {names[key]} has no batch axis.",
                    fix="leave splittable out, or cut the op so that what it returns carries the batch")  # fmt: skip
            return f"makes {names[key]}, which has no batch axis"
    return ""
