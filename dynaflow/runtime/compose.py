"""Several units, run one after the other on the same part -> one unit.

Values made inside are passed on directly, whether or not they also leave. The result is one fx graph, so that a compiler sees all of it.
"""

from __future__ import annotations

import operator
from typing import Any, Callable, Sequence

from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from dynaflow.runtime.program import Expr, Unit


def compose(units: Sequence[Unit], outs: Sequence[str]) -> Unit:
    """One unit that does what `units` do in order, over one part. It takes what none of them made before, in order of first use, and
    returns the values `outs`.
    """
    graph = fx.Graph()
    attributes: dict[str, Any] = {}
    args: dict[str | Expr, fx.Node] = {}
    made: dict[str, Any] = {}

    def load(arg: str | Expr) -> Any:
        if isinstance(arg, str) and arg in made:
            return made[arg]
        if arg not in args:
            with graph.inserting_after(next(reversed(args.values()), graph._root)):
                args[arg] = graph.placeholder(f"arg{len(args)}")
        return args[arg]

    for unit in units:
        inputs = [load(arg) for arg in unit.args]
        if isinstance(unit.fn, fx.GraphModule):
            results = _inline(graph, unit.fn, inputs, attributes)
        else:
            result = graph.call_function(_function(unit.fn), tuple(inputs))
            results = [graph.call_function(operator.getitem, (result, k)) for k in range(len(unit.outs))]
        made.update(zip(unit.outs, results))
    graph.output(tuple(made[name] for name in outs))
    graph.lint()
    fresh = frozenset().union(*(unit.fresh for unit in units)) & set(outs)
    ops = tuple(op for unit in units for op in unit.ops)
    return Unit(_LazyGraphModule(attributes, graph, class_name="fused"), tuple(args), tuple(outs), fresh, ops)


def _function(fn: Callable[..., Any]) -> Callable[..., Any]:
    """fx wants a name of what it calls."""
    return fn if hasattr(fn, "__name__") else lambda *args: fn(*args)


def _inline(graph: fx.Graph, module: fx.GraphModule, inputs: Sequence[Any], attributes: dict[str, Any]) -> Sequence[Any]:
    placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
    env: dict[fx.Node, Any] = dict(zip(placeholders, inputs))
    for node in module.graph.nodes:
        if node.op == "get_attr":
            attributes[node.target] = operator.attrgetter(node.target)(module)
    results = graph.graph_copy(module.graph, env)
    return list(results) if isinstance(results, (tuple, list)) else [results]
