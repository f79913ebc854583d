"""Copies that torch makes only if it must: `contiguous`, `reshape` and `to` give a view where that will do.

Of one row more will do than of several (`x.t().contiguous()`): where the graph was captured there was a copy, and now it may be a view,
through which a later change in place is seen. Most of them copy at every size (keys that are repeated for groups of heads); which do is
asked of torch itself, on tensors without memory (device "meta") that have the sizes of a call.
"""

from __future__ import annotations

from typing import Any, Callable, Mapping, NamedTuple, Sequence

import torch
from torch import fx
from torch.utils import _pytree as pytree

from dynaflow.ir import evaluate
from dynaflow.sources import Sources, expression


class _Like(NamedTuple):
    """A tensor, by expressions over the graph's symbols."""

    shape: tuple[str, ...]
    stride: tuple[str, ...]
    dtype: torch.dtype


class _Size(NamedTuple):
    text: str


class LooseCopy(NamedTuple):
    """A node that copies only if it must."""

    target: Callable[..., Any] | str
    # args and kwargs, as pytree leaves and their structure
    leaves: tuple[Any, ...]
    structure: pytree.TreeSpec

    def is_view(self, sizes: Mapping[str, Any]) -> bool:
        """Whether it is a view of what it is given, where the graph's symbols have these sizes."""

        def at(leaf: Any) -> Any:
            if isinstance(leaf, _Size):
                return evaluate(leaf.text, sizes)
            if not isinstance(leaf, _Like):
                return leaf
            shape, stride = ([evaluate(text, sizes) for text in texts] for texts in (leaf.shape, leaf.stride))
            return torch.empty_strided(shape, stride, dtype=leaf.dtype, device="meta")

        given = [at(leaf) for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(given, self.structure)
        result = getattr(args[0], self.target)(*args[1:], **kwargs) if isinstance(self.target, str) else self.target(*args, **kwargs)
        storages = {x.untyped_storage()._cdata for x in given if isinstance(x, torch.Tensor)}
        return result.untyped_storage()._cdata in storages


def loose_copies(nodes: Sequence[fx.Node], sources: Sources) -> tuple[LooseCopy, ...]:
    """Those of the nodes that copy only if they must, where they or what they copy are changed in place later; equal ones once."""
    # by their text: a slice has no hash
    return tuple({repr(copied): copied for node in nodes if sources.may_alias(node) for copied in (_loose_copy(node, sources),)}.values())


def _loose_copy(node: fx.Node, sources: Sources) -> LooseCopy:
    def like(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            shape, stride = (tuple(expression(d) for d in dims) for dims in (leaf.shape, leaf.stride()))
            return _Like(shape, stride, leaf.dtype)
        return _Size(expression(leaf)) if isinstance(leaf, (torch.SymInt, torch.SymFloat)) else leaf

    def elsewhere(leaf: Any) -> Any:
        # `x.to("cuda")`: were x there already, there would be no copy. Not to know is to be careful.
        is_device = isinstance(leaf, torch.device) or (isinstance(leaf, str) and leaf.partition(":")[0] in ("cpu", "cuda"))
        return torch.device("meta") if is_device else leaf

    args = fx.node.map_arg((node.args, node.kwargs), lambda n: pytree.tree_map(like, sources.facts.fake[n]))
    leaves, structure = pytree.tree_flatten(args, is_leaf=lambda leaf: isinstance(leaf, (_Like, _Size)))
    return LooseCopy(node.target, tuple(elsewhere(leaf) for leaf in leaves), structure)
