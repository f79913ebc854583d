"""Nodes that do what another one did: equal layers are analysed once.

Contract: a node whose `Signature` is that of one before it comes down to the same ops, touches the memory of its arguments in the same
way and returns tensors of the same geometry; so the walk need not run it. What it returns are then the fakes that Dynamo's own tracing
left on the node, if they lie in memory as the signature says; where they do not, the node is run.

1. A signature is the target, the arguments (tensors by geometry and by who shares whose memory), and the settings that change what a call
   comes down to. A node without one is always run: inside of a functorch transform, with arguments that carry the batch in secret, that
   hold a known value, or that are neither tensors nor plain numbers.
2. Not remembered is what uses more than its arguments (random numbers, process groups, state), what a user's rule has judged, what gives
   a tensor another shape in place (Dynamo's fakes have the last one), and what returns anything but tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Mapping, NamedTuple, Sequence

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, SymNumberMemoDescriptor
from torch.utils import _pytree as pytree

from dynaflow.batch_rules.call import tensors_in
from dynaflow.batch_rules.judge import Memory, storage_key

_PLAIN = (bool, int, str, bytes, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format)
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_MEMOS = tuple(name for name, memo in vars(FakeTensor).items() if isinstance(memo, SymNumberMemoDescriptor))
_ENTER, _EXIT = torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast
# devices whose autocast is part of a signature
_CASTING = ("cpu", "cuda")


class Signature(NamedTuple):
    key: tuple[Any, ...]
    # of the arguments, in order of first use
    storages: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Known:
    """What a node did, by the positions of its arguments' storages."""

    # a NodeFacts, whose storages are those of the node that was run
    facts: Any
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    # how the results lie in memory, and which of them carry the batch in some dim
    results: tuple[Any, ...]
    carriers: tuple[bool, ...]
    axis: Any


class Repeats:
    def __init__(self, fake_mode: FakeTensorMode, memory: Memory):
        self._fake_mode, self._memory = fake_mode, memory
        self._known: dict[tuple[Any, ...], Known] = {}
        # by id; all fakes are kept alive while there is a walk
        self._geometries: dict[int, tuple[Any, ...]] = {}
        self._num_changes = 0

    def begin_anew(self, node: fx.Node) -> None:
        """The node did something that is no op on tensors, or gave one another shape: what comes behind it is not what came before."""
        if not _changes_signatures(node):
            self._num_changes += 1
            self._geometries.clear()

    # -- 1. signatures

    def signature(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> Signature | None:
        if node.op not in ("call_function", "call_method") or "unbacked_bindings" in node.meta:
            return None
        storages: dict[Any, int] = {}
        tensors: dict[int, int] = {}

        def describe(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                if type(value) is not FakeTensor or _is_known(value) or id(value) in self._memory.opaque:
                    raise _NotPlain
                key = storage_key(value)
                return (storages.setdefault(key, len(storages)), tensors.setdefault(id(value), len(tensors)),
                        key in self._memory.with_batch, self._geometry(value))  # fmt: skip
            if isinstance(value, fx.Node):
                return describe(values[value])
            if isinstance(value, _SYMBOLIC):
                return (type(value), value.node.expr)
            if isinstance(value, (tuple, list)):
                return (type(value), *map(describe, value))
            if isinstance(value, dict):
                return (dict, *((key, describe(item)) for key, item in value.items()))
            if isinstance(value, slice):
                return (slice, describe(value.start), describe(value.stop), describe(value.step))
            if isinstance(value, float):
                return (float, repr(value))  # -0.0 is not 0.0, nan is nan
            if isinstance(value, _PLAIN):
                return (type(value), value)
            raise _NotPlain

        try:
            key = (node.target, describe(node.args), describe(node.kwargs), _settings(), self._num_changes)
        except _NotPlain:
            return None
        return Signature(key, tuple(storages)) if storages else None

    def _geometry(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        if id(tensor) not in self._geometries:
            self._geometries[id(tensor)] = (
                tuple(map(_size, tensor.shape)), tuple(map(_size, tensor.stride())), _size(tensor.storage_offset()), tensor.dtype,
                tensor.device, tensor.layout, tensor.requires_grad, tensor.is_conj(), tensor.is_neg(), tensor.is_inference(),
            )  # fmt: skip
        return self._geometries[id(tensor)]

    # -- 2. what is known

    def find(self, signature: Signature, node: fx.Node) -> tuple[Known, Any] | None:
        """What an equal node did, and what this one returns."""
        known = self._known.get(signature.key)
        theirs = node.meta.get("example_value")
        return None if known is None or self._results(theirs, signature.storages) != known.results else (known, theirs)

    def borrowed(self, signature: Signature, node: fx.Node, value: Any) -> Any:
        """Dynamo's fakes in the place of ours, where they lie in memory as ours do. Of them, all nodes that come later have fakes."""
        theirs = node.meta.get("example_value")
        results = self._results(value, signature.storages)
        return theirs if results is not None and results == self._results(theirs, signature.storages) else value

    def add(self, signature: Signature, facts: Any, value: Any, axis: Any) -> None:
        """`facts` and `value`: a NodeFacts, and what the node has handed out, with its storages numbered."""
        positions = {self._memory.ids[key]: i for i, key in enumerate(signature.storages) if key in self._memory.ids}
        results = self._results(value, signature.storages, facts.makes)
        if facts.uses or not facts.calls or results is None or not {*facts.reads, *facts.writes} <= positions.keys():
            return
        reads, writes = (tuple(positions[i] for i in touched) for touched in (facts.reads, facts.writes))
        carriers = tuple(storage_key(t) in self._memory.with_batch for t in tensors_in(value))
        self._known[signature.key] = Known(facts, reads, writes, results, carriers, axis)

    def _results(self, value: Any, storages: Sequence[Any], made: frozenset[int] = frozenset()) -> tuple[Any, ...] | None:
        """How tensors lie: in which argument's storage, or in which of their own. None where they are no plain fakes, or lie elsewhere.
        `made`: numbers of storages that count as their own."""
        leaves, spec = pytree.tree_flatten(value)
        own: dict[Any, int] = {}
        found: list[Any] = [spec]
        for leaf in leaves:
            if leaf is None:
                found.append(None)
                continue
            if type(leaf) is not FakeTensor or leaf.fake_mode is not self._fake_mode or leaf.requires_grad or _is_known(leaf):
                return None
            key = storage_key(leaf)
            if key not in storages and self._memory.ids.get(key, -1) not in (-1, *made):
                return None
            place = ("argument", storages.index(key)) if key in storages else ("own", own.setdefault(key, len(own)))
            found.append((place, self._geometry(leaf)))
        return tuple(found) if leaves else None


class _NotPlain(Exception):
    pass


def _settings() -> tuple[Any, ...]:
    """Of this thread, as nodes before this one have left them."""
    casts = tuple((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _CASTING)
    return (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *casts)


def _changes_signatures(node: fx.Node) -> bool:
    """Whether all that a node changes is in the signatures of those behind it."""
    if node.target is torch._C._set_grad_enabled:
        return True
    entered = node.args[0] if node.target is _EXIT else node
    return isinstance(entered, fx.Node) and entered.target is _ENTER and entered.args[0] in _CASTING


def _is_known(fake: FakeTensor) -> bool:
    """Whether the fake holds a value, or remembers a number that somebody has asked of its data (`item`, `nonzero`)."""
    return fake.constant is not None or any(getattr(fake, name) is not None for name in _MEMOS)


def _size(size: Any) -> Any:
    if not isinstance(size, torch.SymInt):
        return size
    expr = size.node.expr
    return int(expr) if expr.is_Integer else expr
