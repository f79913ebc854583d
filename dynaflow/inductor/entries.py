"""Units of a flow -> entries that Inductor compiled; and the graph as a whole, compiled as torch.compile would."""

from __future__ import annotations

import logging
from collections import Counter
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Callable, Iterator, Mapping, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import fx
from torch._guards import TracingContext
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.output_code import CompiledFxGraph
from torch.fx._lazy_graph_module import _LazyGraphModule

from dynaflow import collector, disk
from dynaflow.inductor.structure import NotCompiled, Spec
from dynaflow.inductor.units import ALIGNMENT, CompiledUnit
from dynaflow.ir import Flow, is_state
from dynaflow.runtime.program import Entry, Expr, Layout, Unit
from dynaflow.units import own

log = logging.getLogger("dynaflow")

# kinds of ops that gain nothing from a compiler
_AS_THEY_ARE = ("network", "copy")


class Inductor:
    """Entries for the units of one flow. Equal units, of any flow, are compiled once."""

    def __init__(self, flow: Flow, layouts: Mapping[str, Layout], is_recorded: bool, options: Mapping[str, Any]):
        """`options`: of Inductor's configuration, for all that is compiled here."""
        self._flow, self._layouts, self._is_recorded, self._options = flow, layouts, is_recorded, dict(options)
        # what is compiled of a unit, or None where it runs eagerly, for as long as a plan has that unit
        self._units: WeakKeyDictionary[Unit, CompiledUnit | None] = WeakKeyDictionary()
        self._eager = {op.name: f"{op.kind} ops run as they are" for op in flow.ops if op.kind in _AS_THEY_ARE}
        # What a split rule names (a layer's cache) is in the graph as a name or a number: compiled, each layer would be a unit of its own.
        self._eager |= {op.name: "it uses state beside its arguments" for op in flow.ops if any(map(is_state, op.uses))}
        changed = {flow.value[v].storage for op in flow.ops for v in op.mutates}
        num_views = Counter(v.storage for v in flow.values)
        # Memory behind several arguments, and changed: Inductor takes every argument for memory of its own.
        self._aliased = frozenset(storage for storage in changed if num_views[storage] > 1)
        # why units run eagerly
        self.reasons: dict[str, str] = {}

    def can_fuse(self, name: str) -> bool:
        op = self._flow.op(name)
        return name not in self._eager and not any(self._flow.value[v].storage in self._aliased for v in (*op.reads, *op.mutates))

    @property
    def eager(self) -> dict[str, str]:
        """What runs eagerly, of the ops that a plan has asked for, and why."""
        return {**self._eager, **self.reasons}

    def entry(self, unit: Unit, sizes: Mapping[str, Any]) -> Entry | None:
        try:
            compiled = self._compiled(unit)
            if compiled is None:
                return None
            variant = compiled.variant(sizes, static=self._is_recorded and _has_convolution(unit))
            strides = variant.strides(sizes)
        except NotCompiled as error:
            self._note(unit, str(error))
            return None
        return Entry(
            variant.call, variant.own,
            tuple((sizes[x],) if isinstance(x, str) else x if isinstance(x, int) else (x,) for x in variant.inputs), strides,
            ALIGNMENT if self._is_cuda(unit) or "assert_alignment(" in variant.source else 1,
            variant.peak_bytes(sizes) or 0, variant.source, variant.path, variant.allocates, variant.shared,
        )  # fmt: skip

    def _compiled(self, unit: Unit) -> CompiledUnit | None:
        if unit not in self._units:
            self._units[unit] = self._prepare(unit)
        return self._units[unit]

    def _prepare(self, unit: Unit) -> CompiledUnit | None:
        if not isinstance(unit.fn, fx.GraphModule) or any(name in self._eager for name in unit.ops):
            return None
        storages = Counter(self._flow.value[arg].storage for arg in unit.args if isinstance(arg, str))
        if any(storage in self._aliased and count > 1 for storage, count in storages.items()):
            self._note(unit, "it takes arguments that share memory, which is changed in place")
            return None
        args = [arg if isinstance(arg, Expr) else self._spec(arg) for arg in unit.args]
        return CompiledUnit(_copies_always(unit.fn), args, self._flow.symbols, self._options)

    def _spec(self, name: str) -> Spec:
        layout = self._layouts[name]
        return Spec(self._flow.value[name].shape, layout.expected or layout.stride, layout.dtype, layout.device)

    def _is_cuda(self, unit: Unit) -> bool:
        names = [a for a in (*unit.args, *unit.outs) if isinstance(a, str)]
        return any(self._layouts[name].device.type == "cuda" for name in names)

    def _note(self, unit: Unit, reason: str) -> None:
        label = unit.ops[0] if len(unit.ops) == 1 else f"{unit.ops[0]}..{unit.ops[-1]}"
        if self.reasons.setdefault(label, reason) is reason:
            log.warning("%s runs eagerly: %s", label, reason)


def _has_convolution(unit: Unit) -> bool:
    """Under symbolic sizes Inductor gives up the layouts that convolutions want."""
    assert isinstance(unit.fn, fx.GraphModule)
    return any("conv" in str(getattr(n.target, "__name__", n.target)) for n in unit.fn.graph.nodes if n.op == "call_function")


def _copies_always(module: fx.GraphModule) -> fx.GraphModule:
    """`own` looks at addresses, which a compiler does not have: a copy that may be changed in place is always made."""
    if not any(n.target is own for n in module.graph.nodes):
        return module
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in graph.nodes:
        if node.target is own:
            node.target, node.args = torch.clone, node.args[:1]
    return _LazyGraphModule(module, graph)


# -- the graph as a whole


def compile_captured(
    gm: fx.GraphModule, examples: Sequence[Any], options: Mapping[str, Any], wrap: Wrap | None = None
) -> Callable[..., Any]:
    """What torch.compile would make of the graph, gradients included, from the inputs that Dynamo gives a compiler. To be called while
    Dynamo captures: its guards then cover what Inductor assumes of sizes. The graph is used up; a copy would not do, it is not known to
    be Dynamo's (which parameters stay where they are, for one). Raises NotCompiled where torch.compile's code would fail as it runs: on
    inputs without an address.

    `options`: of Inductor's configuration. `wrap` gets every graph that Inductor compiles for it or finds in its cache, now or (a
    backward) later, and what it returns is called in the place of Inductor's own callable.
    """
    from torch._inductor.compile_fx import compile_fx

    for node in gm.graph.nodes:
        example = getattr(node.meta.get("grapharg"), "example", None)
        if isinstance(example, torch.Tensor) and example.is_mkldnn:
            raise NotCompiled(f"{node.name} is an mkldnn tensor, which has no address")

    def inner(*args: Any, **kwargs: Any) -> Any:
        with wrapped_by(wrap), collector.let_go():
            return compile_fx_inner(*args, **kwargs)

    with wrapped_by(wrap):
        return compile_fx(gm, examples, inner_compile=inner, config_patches=dict(options))  # type: ignore[return-value]


# (graph, whether it is a backward, arguments that stay where they are) -> what is called
Wrap = Callable[[CompiledFxGraph, bool, Sequence[int]], Callable[[list[Any]], Sequence[Any]]]
_wrap: ContextVar[Wrap | None] = ContextVar("dynaflow_wrap", default=None)


@contextmanager
def wrapped_by(wrap: Wrap | None) -> Iterator[None]:
    token = _wrap.set(wrap)
    try:
        yield
    finally:
        _wrap.reset(token)


def _post_compile(self: CompiledFxGraph, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
    """Runs for every graph, compiled or from a cache, and leaves no trace in caches. (`graph_kwargs` has less to say of one that AOT's
    cache has; what the graph itself was compiled with is kept with it.)"""
    _plain_post_compile(self, example_inputs, constants, graph_kwargs)
    wrap, known = _wrap.get(), self.fx_kwargs
    if wrap is not None:
        self.current_callable = wrap(self, bool(known["is_backward"]), tuple(known["static_input_idxs"] or ()))


def num_returned(graph: CompiledFxGraph, digest: str) -> int | None:
    """How many of a forward's results the caller gets: the others are saved for its backward. None where there is no backward, and where
    that is not known. To be asked while it is compiled: then AOT knows, and it is written down under the `digest` of the code, for
    AOT's cache does not."""
    if graph.fx_kwargs["is_backward"] or graph.fx_kwargs["is_inference"]:
        return None
    path, context = disk.directory("returned") / digest[:32], TracingContext.try_get()
    if context is None or context.fw_metadata is None:
        text = disk.load(path) or ""
        return int(text) if text.isdigit() else None
    found: int = context.fw_metadata.num_forward
    disk.save(path, str(found))
    return found


_plain_post_compile = CompiledFxGraph.post_compile
CompiledFxGraph.post_compile = _post_compile  # type: ignore[method-assign]
