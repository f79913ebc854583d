"""What belongs to a collective: the wait for it, and the rearrangement of rows that torch wraps around it.

Contract: in the order that `tie` returns, the nodes that belong to a collective lie beside it, and `tied` says whose they are: one op
holds them all. When such an op returns, its message has arrived. So nothing else ever sees memory that is still being received, and
that waits for one collective and sends another may be on any streams.

1. Waits. A functional collective returns before its bytes are there. Its wait comes right behind it, wherever the model has it: what
   runs meanwhile is the plan's to say. One that is waited for in another graph cannot be planned.
2. Rows. Collectives work along dim 0: the blocks of ranks 0, 1, ... one behind the other. Along another dim, torch (and DTensor) puts
   the blocks in dim 0 before, or takes them out behind: `cat(chunk(x, ranks, dim), 0)`, `cat(chunk(x, ranks, 0), dim)`. Between the
   two the batch is not the outermost dim, and nothing there could be cut. But as one op, that is an exchange along `dim`, and no row of
   the batch meets another: part k of every rank goes to part k of every rank.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Sequence

import torch
from torch import fx
from torch.utils import _pytree as pytree

from dynaflow.batch_rules import Sizes
from dynaflow.batching import Facts
from dynaflow.errors import Unplannable
from dynaflow.sources import Sources

_FUNCTIONAL = ("_c10d_functional.", "_c10d_functional_autograd.")
_CUTS = {"aten.chunk.default", "aten.split.Tensor", "aten.split_with_sizes.default"}
_PLAIN = Sizes(())


def tie(nodes: Sequence[fx.Node], facts: Facts, sources: Sources) -> tuple[list[fx.Node], Facts, dict[fx.Node, fx.Node]]:
    """(the nodes in their new order, facts that know of step 2, node -> the collective that it belongs to)."""
    tied = _waits(nodes, facts)
    behind: dict[fx.Node, list[fx.Node]] = {}
    for wait, sender in tied.items():
        behind.setdefault(sender, []).append(wait)
    order = [n for node in nodes if node not in tied for n in (node, *behind.get(node, ()))]
    known = dict(facts.nodes)
    at = {node: i for i, node in enumerate(order)}
    for sender, waits in behind.items():
        before = order[at[sender] - 1] if at[sender] else None
        after = order[at[waits[-1]] + 1] if at[waits[-1]] + 1 < len(order) else None
        exchange = _exchange(sender, waits, before, after, facts)
        for node in exchange or waits:  # an op is cut whole, or not at all
            known[node] = replace(known[node], unsplittable="" if exchange else known[sender].unsplittable)
        tied.update({node: sender for node in exchange if sources.computes(node) and node is not sender})
        if after is not None and _is_copy_back(after, waits, facts) and known[after].unsplittable == known[sender].unsplittable:
            tied[after] = sender
    return order, replace(facts, nodes=known), tied


def _is_copy_back(node: fx.Node, waits: list[fx.Node], facts: Facts) -> bool:
    """What makes an in-place collective of a functional one."""
    return facts.nodes[node].calls == ("aten.copy_.default",) and list(node.args[1:]) == waits and facts.axis[node] == 0


# -- 1. waits


def _waits(nodes: Sequence[fx.Node], facts: Facts) -> dict[fx.Node, fx.Node]:
    """Wait -> the collective that it waits for."""
    sent: dict[int, fx.Node] = {}  # storage -> who receives into it
    under_way: set[int] = set()
    waits: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        calls = [call for call in facts.nodes[node].calls if call.startswith(_FUNCTIONAL)]
        if not calls:
            continue
        storages = {facts.storage(t) for t in pytree.tree_leaves(facts.fake[node]) if isinstance(t, torch.Tensor)}
        if "wait_tensor" not in calls[-1]:
            sent.update(dict.fromkeys(storages, node))
            under_way |= storages
        elif len(calls) == 1:
            senders = {sent[s] for s in storages if s in sent}
            under_way -= storages
            if len(senders) != 1:
                raise Unplannable(f"'{node}' waits for a collective that was sent before this graph began.",
                                  why="parts of its result would be used before they are there")  # fmt: skip
            waits[node] = senders.pop()
    if under_way:
        raise Unplannable(f"'{sent[min(under_way)]}' is sent in this graph and not waited for.",
                          why="its result would be used before it is there", fix="wait for it in the same forward pass")  # fmt: skip
    return waits


# -- 2. rows


def _exchange(sender: fx.Node, waits: list[fx.Node], before: fx.Node | None, after: fx.Node | None, facts: Facts) -> list[fx.Node]:
    """The nodes that may be split because an exchange along dim 0 is, with its neighbours, one along another dim; none where it is not."""
    name, source = facts.nodes[sender].calls[0].split(".")[1], sender.args[0]
    num_ranks = _num_ranks(name, sender, facts)
    if not num_ranks or len(waits) != 1 or not isinstance(source, fx.Node) or facts.axis[source] != 0:
        return []
    found = [sender, waits[0]]
    if name != "all_gather_into_tensor":
        to_ranks = _regrouped(source, num_ranks, facts, to_ranks=True) if before is source else []
        if not to_ranks or set(source.users) != {sender}:
            return []
        found += to_ranks[:-1]
    if name != "reduce_scatter_tensor":
        from_ranks = _regrouped(after, num_ranks, facts, to_ranks=False) if after is not None else []
        if not from_ranks or from_ranks[-1] is not waits[0] or len(waits[0].users) != 1:
            return []
        found += from_ranks[:-1]
    return found


def _num_ranks(name: str, sender: fx.Node, facts: Facts) -> int:
    """How many blocks dim 0 is made of; 0 where they are not one per rank, of one size."""
    _, *given = pytree.tree_map(lambda a: facts.fake[a] if isinstance(a, fx.Node) else a, list(sender.args))
    if name == "all_gather_into_tensor" and len(given) == 2:
        return int(given[0])
    if name == "reduce_scatter_tensor" and len(given) == 3:
        return int(given[1])
    if name == "all_to_all_single" and len(given) == 3:
        return len(given[0]) if len({_PLAIN.expr(n) for n in (*given[0], *given[1])}) == 1 else 0
    return 0


def _regrouped(cat: fx.Node, num_ranks: int, facts: Facts, *, to_ranks: bool) -> list[fx.Node]:
    """[cat, pieces ..., cut, source] where `cat` joins all pieces of equal size of one tensor, in order: those along some other dim in
    dim 0 (`to_ranks`), or those of dim 0 in some other dim. Nobody else uses the pieces."""
    if facts.nodes[cat].calls != ("aten.cat.default",) or len(cat.all_input_nodes) != num_ranks:
        return []
    pieces = cat.all_input_nodes
    cuts = {piece.args[0] for piece in pieces if piece.target is operator.getitem}
    if len(cuts) != 1 or [piece.args[1:] for piece in pieces] != [(i,) for i in range(num_ranks)]:
        return []
    (cut,) = cuts
    if not isinstance(cut, fx.Node) or not set(facts.nodes[cut].calls) <= _CUTS or set(cut.users) != set(pieces):
        return []
    if any(set(piece.users) != {cat} for piece in pieces) or len(cut.all_input_nodes) < 1:
        return []
    source = cut.all_input_nodes[0]
    if len({tuple(map(_PLAIN.expr, facts.fake[piece].shape)) for piece in pieces}) != 1:
        return []
    was, now = _changed_dim(facts.fake[source], facts.fake[pieces[0]]), _changed_dim(facts.fake[cat], facts.fake[pieces[0]])
    is_right = was not in (0, None) and now == 0 if to_ranks else was == 0 and now not in (0, None)
    return [cat, *pieces, cut, source] if is_right and facts.axis[source] == 0 == facts.axis[cat] else []


def _changed_dim(whole: torch.Tensor, piece: torch.Tensor) -> int | None:
    dims = [d for d, (a, b) in enumerate(zip(whole.shape, piece.shape)) if _PLAIN.expr(a) != _PLAIN.expr(b)]
    return dims[0] if len(dims) == 1 else None
