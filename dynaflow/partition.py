"""Graph -> groups of nodes, one per op.

Contract: every node that computes or changes something is in exactly one group, groups are in program order (waits for collectives
aside), and running the groups one after the other is running the graph. Views and sizes belong to no group: whoever needs one makes
its own (`units.py`).

1. Every node gets a key: the user's mark, function or module rule that claims it; else (partition="auto") its module, with
   attention, collectives and large matrix products on their own; else nothing. What belongs to a collective has its key, and was
   moved beside it (`exchange.py`).
2. Consecutive nodes with the same key form a group.
3. What must not be in the same op as its neighbours moves out: a change of state without batch axis happens once, behind its
   group; nodes that mix the batch and nodes that do not depend on it are parted from those that can be split.
4. auto: a group that only continues its predecessor joins it.
5. A group is recordable unless a rule or mark around one of its nodes says otherwise, one that did not get the node included.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, Iterable, Sequence

import torch
from torch import fx

from dynaflow.annotate import MARK, UNRECORDABLE, Rule, SplitFunc, SplitModule, read_rules
from dynaflow.batching import Facts
from dynaflow.errors import PartitionError
from dynaflow.exchange import tie
from dynaflow.offload import FETCH
from dynaflow.sources import Sources, clean_name

# A matrix product is large when it is at least this share of the graph's multiply-accumulates.
LARGE_SHARE = 1e-3

COLLECTIVES = ("_c10d_functional.", "_c10d_functional_autograd.", "c10d.", "_dtensor.")
ATTENTION = ("scaled_dot_product", "flex_attention", "flash_attn", "_attention")


@dataclass
class Group:
    """The nodes of one op."""

    name: str
    nodes: list[fx.Node]
    module: str = ""
    kind: str | None = None
    splittable: bool | None = None
    # "rule": the user said so and it stays whole; "auto" and "rest" may be cut further; "shared", "state" were moved out
    origin: str = "rest"
    is_anchor: bool = False
    # False: it is never part of a CUDA Graph
    recordable: bool = True
    extra: dict[str, Any] = field(default_factory=dict)


def partition(graph: fx.Graph, facts: Facts, sources: Sources, rules: str | Sequence[Rule | str] = "auto") -> list[Group]:
    is_auto, given = read_rules(rules)
    nodes, facts, tied = tie([n for n in graph.nodes if sources.computes(n)], facts, sources)
    sources.facts = facts  # what is asked of sources from here on knows which exchanges may be split
    keys = _keys(nodes, facts, given, is_auto)
    keys.update({node: keys[collective] for node, collective in tied.items()})
    groups: list[Group] = []
    previous: Any = None
    for node in nodes:
        key, group = keys[node]
        if key != previous:
            groups.append(replace(group, nodes=[]))
            previous = key
        groups[-1].nodes.append(node)
    groups = [piece for group in groups for piece in _part_state(group, facts)]
    groups = [piece for group in groups for piece in _part_mixing(group, sources)]
    groups = _part_shared(groups, facts, sources)
    if is_auto:
        groups = _join_chains(groups, sources)
    for group in groups:
        group.recordable = not any(_is_unrecordable(node, facts, given) for node in group.nodes)
    in_all = _macs(nodes, facts)
    for group in groups:
        if group.origin == "rest":
            group.name = _main_module(_macs(group.nodes, facts), in_all) or group.name
    _name(groups)
    return groups


# -- 1. keys


def module_path(node: fx.Node) -> list[tuple[str, Any]]:
    """The modules around a node, outermost first: (qualified name, class)."""
    stack = node.meta.get("nn_module_stack") or {}
    return [(clean_name(name), cls) for name, cls in stack.values()]


def _keys(nodes: list[fx.Node], facts: Facts, rules: Sequence[Rule], is_auto: bool) -> dict[fx.Node, tuple[Any, Group]]:
    total_macs = sum(facts.nodes[n].macs for n in nodes)
    matched: set[Rule] = set()
    keys: dict[fx.Node, tuple[Any, Group]] = {}
    called: dict[fx.Node, tuple[Any, Group]] = {}
    run = 0
    last_trace: dict[Any, tuple[int, str]] = {}
    for position, node in enumerate(nodes):
        info, path = facts.nodes[node], module_path(node)
        module = path[-1][0] if path else ""
        rule = next((r for r in rules if isinstance(r, SplitFunc) and _calls(node, info.calls, r.function)), None)
        module_rules = _module_rules(path, rules)
        matched.update(r for _, r in module_rules)
        if rule is not None:
            matched.add(rule)
        custom = (node.meta.get("custom") or {}).get(MARK)
        if custom:
            name, _, kind = custom.rpartition("|")
            before = keys[nodes[position - 1]] if position else None
            if before is not None and before[0] == ("mark", custom) and _is_inside(module, before[1].module):
                keys[node] = before
                continue
            base = _outermost_marked(nodes, position, custom)
            keys[node] = (("mark", custom), Group(f"{base}.{name}".strip("."), [], base, kind or None, None, "rule"))
            continue
        producer = next((called[a] for a in node.all_input_nodes if a in called), None)
        if rule is None and producer is not None and _continues_collective(node, info.calls):
            keys[node] = called[node] = producer
            continue
        if rule is not None:
            frame = _frame(node, rule.function)
            if frame and last_trace.get(rule) == (position - 1, frame):
                keys[node] = keys[nodes[position - 1]]
            else:
                run += 1
                function = getattr(rule.function, "_opoverload", rule.function)  # what torch.library.custom_op returns
                called_as = rule.name or getattr(function, "__name__", str(function)).split(".")[0]
                name = f"{module}.{called_as}".strip(".")
                keys[node] = (("function", run), Group(name, [], module, rule.kind, rule.splittable, "rule"))
            last_trace[rule] = (position, frame)
            called[node] = keys[node]
            continue
        if module_rules:
            name, rule_ = module_rules[-1]
            keys[node] = (("module", name), Group(name, [], name, rule_.kind, rule_.splittable, "rule"))
        elif is_auto:
            is_anchor = is_large(info, total_macs)
            label = _anchor_name(info, module) if is_anchor else module
            keys[node] = (("anchor", node.name) if is_anchor else ("auto", module), Group(label, [], module, None, None, "auto", is_anchor))
        else:
            keys[node] = (("rest",), Group(module or node.name, [], module, None, None, "rest"))
    for unmatched in rules:
        if unmatched not in matched:
            known = sorted({n for node in nodes for n, _ in module_path(node) if n})
            told = [*known[:6], *([f"{len(known) - 6} more"] if len(known) > 6 else [])]
            raise PartitionError(
                f"{unmatched} matches nothing in the captured graph.", why=f"modules there: {', '.join(told) or 'none'}",
                fix="print df.explain(model, inputs) for the names; functions must be called in the forward pass")  # fmt: skip
    return keys


def _is_inside(module: str, base: str) -> bool:
    return not base or module == base or module.startswith(f"{base}.")


def _outermost_marked(nodes: list[fx.Node], position: int, custom: str) -> str:
    """The module whose code holds the mark: the outermost one among the marked lines that follow."""
    base = None
    for node in nodes[position:]:
        if (node.meta.get("custom") or {}).get(MARK) != custom:
            break
        path = module_path(node)
        module = path[-1][0] if path else ""
        if base is not None and not _is_inside(module, base) and not _is_inside(base, module):
            break
        base = module if base is None or _is_inside(base, module) else base
    return base or ""


def _module_rules(path: list[tuple[str, Any]], rules: Sequence[Rule]) -> list[tuple[str, SplitModule]]:
    """(module, rule) for every module rule that claims a node, outermost first. A rule's own choice is its outermost match:
    `layers.*` means layers.0, not the modules inside of it."""
    found = []
    for rule in rules:
        if isinstance(rule, SplitModule):
            depth = next((d for d, (name, cls) in enumerate(path) if name and rule.matches(name, cls)), None)
            if depth is not None:
                found.append((depth, path[depth][0], rule))
    return [(name, rule) for _, name, rule in sorted(found, key=lambda f: f[0])]


def is_large(info: Any, total_macs: int) -> bool:
    is_alone = any(c == FETCH or _is_collective(c) or any(a in c for a in ATTENTION) for c in info.calls)
    return info.macs > LARGE_SHARE * total_macs or is_alone or _uses_what_is_shared(info)


def _uses_what_is_shared(info: Any) -> bool:
    """A process group or other state, by its split rule's word: a serving engine's own all-reduce, or its attention."""
    return any(token != "rng" for token in info.uses)


def _is_collective(call: str) -> bool:
    return call.startswith(COLLECTIVES)


def _anchor_name(info: Any, module: str) -> str:
    for call in info.calls:
        if call == FETCH:
            return re.sub(r"[.]parametrizations[.](\w+)[.]\d+$", r".\1", module) + ".fetch"
        if "scaled_dot_product" in call:
            return f"{module}.sdpa".strip(".")
        if _is_collective(call) or any(a in call for a in ATTENTION) or _uses_what_is_shared(info):
            return f"{module}.{call.split('.')[1]}".strip(".")
    return module


def _continues_collective(node: fx.Node, calls: tuple[str, ...]) -> bool:
    """wait_tensor, and the copy back into the argument, belong to the collective before them."""
    return any("wait_tensor" in c for c in calls) or (bool(calls) and all(c.startswith("aten.copy_") for c in calls))


_IN_PLACE_COLLECTIVES = {
    "all_reduce": "all_reduce", "all_gather_into_tensor": "all_gather_into_tensor", "reduce_scatter_tensor": "reduce_scatter_tensor",
    "all_to_all_single": "all_to_all_single", "broadcast": "broadcast", "all_gather": "all_gather_into_tensor",
}  # fmt: skip


def _calls(node: fx.Node, calls: tuple[str, ...], function: Any) -> bool:
    """Whether a node is (part of) a call of `function`."""
    function = getattr(function, "_opoverload", function)  # what torch.library.custom_op returns
    if node.target is function:
        return True
    if isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        name = str(function)
        return any(c == name or c.rpartition(".")[0] == name for c in calls)
    if getattr(function, "__module__", "").startswith("torch.distributed"):
        wanted = _IN_PLACE_COLLECTIVES.get(function.__name__.rstrip("_"), function.__name__)
        return any(_is_collective(c) and c.split(".")[1].rstrip("_").startswith(wanted) for c in calls)
    if node.op == "call_method" and getattr(function, "__name__", None) == node.target:
        return getattr(torch.Tensor, str(node.target), None) is function
    return bool(_frame(node, function))


def _frame(node: fx.Node, function: Any) -> str:
    """The stack trace down to the call of a Python function, if the node was made inside of it; else empty."""
    code = getattr(function, "__code__", None)
    if code is None:
        return ""
    own_lines = [line for _, _, line in code.co_lines() if line]
    lines = (node.meta.get("stack_trace") or "").splitlines()
    for i, line in enumerate(lines):
        match = re.match(r'\s*File "(.+)", line (\d+), in (.+)', line)
        is_file = match is not None and match[1] == code.co_filename and match[3].split(".")[-1] == code.co_name
        if match is not None and is_file and min(own_lines) <= int(match[2]) <= max(own_lines):
            return "\n".join(lines[:i])  # without the lines inside: all of one call share it
    return ""


# -- 3. what moves out


def _part_state(group: Group, facts: Facts) -> list[Group]:
    """A change of state without batch axis moves behind the group, if nothing that stays minds."""
    moved: list[fx.Node] = []
    for i, node in reversed(list(enumerate(group.nodes))):
        if facts.nodes[node].writes_state and not any(_conflict(facts, node, n) for n in group.nodes[i + 1 :] if n not in moved):
            moved.insert(0, node)
    if not moved or len(moved) == len(group.nodes):
        return [group]
    rest = replace(group, nodes=[n for n in group.nodes if n not in moved])
    return [rest, Group(f"{group.name}.state", moved, group.module, "memory", None, "state")]


def _conflict(facts: Facts, a: fx.Node, b: fx.Node) -> bool:
    """Whether the order of two nodes matters."""
    x, y = facts.nodes[a], facts.nodes[b]
    return bool(x.writes & (y.reads | y.writes) or y.writes & x.reads or set(x.uses) & set(y.uses))


def _part_mixing(group: Group, sources: Sources) -> list[Group]:
    if group.origin not in ("auto", "rest"):
        return [group]
    pieces: list[Group] = []
    for node in group.nodes:
        mixes = bool(sources.unsplittable(node))
        if not pieces or pieces[-1].extra["mixes"] != mixes:
            pieces.append(replace(group, nodes=[], extra={"mixes": mixes}))
        pieces[-1].nodes.append(node)
    return pieces


def _part_shared(groups: list[Group], facts: Facts, sources: Sources) -> list[Group]:
    """In a group that can be split, what does not depend on the batch and is needed elsewhere is computed once, before it."""
    home = {node: i for i, group in enumerate(groups) for node in group.nodes}
    users = sources.users_of_roots()
    result: list[Group] = []
    for i, group in enumerate(groups):
        if group.splittable is not True and any(sources.unsplittable(n) for n in group.nodes):
            result.append(group)
            continue
        lonely = [n for n in group.nodes if not sources.carries_batch(n)]
        seeds = [n for n in lonely if any(home.get(u) != i for u in users.get(n, ()))]
        if not seeds or len(lonely) == len(group.nodes):
            result.append(group)
            continue
        wanted: set[fx.Node] = set()
        stack = list(seeds)
        inside = set(group.nodes)
        while stack:
            node = stack.pop()
            if node in wanted:
                continue
            wanted.add(node)
            stack.extend(r for r in sources.root_inputs(node) if r in inside)
        # Nothing may overtake a node that it conflicts with. (The op then makes a value without batch axis, and runs whole.)
        if any(_conflict(facts, n, m) for i, n in enumerate(group.nodes) if n in wanted for m in group.nodes[:i] if m not in wanted):
            result.append(group)
            continue
        result.append(Group(f"{group.name}.shared", [n for n in group.nodes if n in wanted], group.module, None, None, "shared"))
        result.append(replace(group, nodes=[n for n in group.nodes if n not in wanted]))
    return result


# -- 4. auto: chains


def _join_chains(groups: list[Group], sources: Sources) -> list[Group]:
    users = sources.users_of_roots()
    result: list[Group] = []
    for group in groups:
        before = result[-1] if result else None
        if before is not None and _continues(before, group, sources, users):
            before.nodes.extend(group.nodes)
            continue
        result.append(replace(group, nodes=list(group.nodes)))
    return result


def _continues(before: Group, group: Group, sources: Sources, users: dict[fx.Node, set[fx.Node]]) -> bool:
    """All that the group takes comes from `before` (or is a parameter), and nobody else takes from `before`."""
    if group.is_anchor or group.origin != "auto" or before.origin != "auto":
        return False
    if before.extra.get("mixes", False) != group.extra.get("mixes", False):
        return False
    inside, own = set(before.nodes), set(group.nodes)
    if before.extra.get("mixes", False):
        return before.module == group.module
    for node in group.nodes:
        for root in sources.root_inputs(node):
            if root not in own and root not in inside and not sources.is_parameter(root):
                return False
    return all(user in own or user in inside for node in before.nodes for user in users.get(node, ()))


# -- 5. recordings


def _is_unrecordable(node: fx.Node, facts: Facts, rules: Sequence[Rule]) -> bool:
    if UNRECORDABLE in (node.meta.get("custom") or {}):
        return True
    against = [r for r in rules if not r.recordable]
    is_called = any(isinstance(r, SplitFunc) and _calls(node, facts.nodes[node].calls, r.function) for r in against)
    return is_called or bool(against and _module_rules(module_path(node), against))


def _macs(nodes: Iterable[fx.Node], facts: Facts) -> Counter[str]:
    """Module -> products of the nodes inside of it."""
    macs: Counter[str] = Counter()
    for node in nodes:
        macs.update({name: facts.nodes[node].macs for name, _ in module_path(node) if name and facts.nodes[node].macs})
    return macs


def _main_module(mine: Counter[str], in_all: Counter[str]) -> str:
    """Of the modules whose products are all among mine the one with the most, of equal ones the innermost; empty where there is none."""
    whole = [name for name in mine if mine[name] == in_all[name]]
    return max(whole, key=lambda name: (mine[name], name.count(".")), default="")


def _name(groups: Iterable[Group]) -> None:
    taken: set[str] = set()
    for group in groups:
        base = re.sub(r"[\s@,\[\]#]", "_", group.name or _function_name(group.nodes[0]))
        name, number = base, 0
        while name in taken:
            number += 1
            name = f"{base}.{number}"
        taken.add(name)
        group.name = name


def _function_name(node: fx.Node) -> str:
    target = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    return name.rpartition(".")[2] if target is not operator.getitem else node.name
