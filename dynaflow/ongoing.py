"""The call that is going on: what a capture inside of it must know of its arguments."""

from __future__ import annotations

import functools
import weakref
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Callable, Iterator, Sequence

import torch

Find = Callable[[tuple[Any, ...], dict[str, Any]], list[tuple[torch.Tensor, int]]]
# what torch 2.13 sets beside its marks, and guards
_MARKED = "_has_dynamo_dim_marking"


class Ongoing:
    """A call of what df.compile returned, as far as a capture inside of it must know: which tensors carry the batch, and where."""

    __slots__ = ("_find", "_args", "_kwargs", "_dims", "_marked", "asks_sizes", "watches_hooks", "cuts_batch", "num_graphs")

    def __init__(
        self, find: Find, args: tuple[Any, ...], kwargs: dict[str, Any], asks_sizes: bool = False, watches_hooks: bool = False,
        cuts_batch: Callable[[], bool] = bool,
    ):  # fmt: skip
        self._find: Find | None = find
        self._args, self._kwargs = args, kwargs
        self._dims: list[tuple[weakref.ref[torch.Tensor], int]] = []
        self._marked: list[Callable[[], Any]] = []
        # captures of this call may depend on its sizes: for a model that broadcasts a batch of 1, or rows of which it cannot be told
        # how many they are
        self.asks_sizes = asks_sizes
        # hooks are seen without Dynamo's guards
        self.watches_hooks = watches_hooks
        # whether a capture now is one whose batch may be cut: then one capture should serve all batch sizes
        self.cuts_batch = cuts_batch
        # captured graphs that ran in this call
        self.num_graphs = 0

    def add(self, tensor: torch.Tensor, dim: int) -> None:
        self._dims.append((weakref.ref(tensor), dim))

    def find(self) -> None:
        if self._find is not None:
            found, self._find, self._args, self._kwargs = self._find(self._args, self._kwargs), None, (), {}
            for tensor, dim in found:
                self.add(tensor, dim)

    def mark(self) -> None:
        """Tell Dynamo, which is about to capture. dim -1: no batch."""
        self.find()
        for ref, dim in self._dims:
            tensor = ref()
            for d, size in enumerate(tensor.shape if tensor is not None else ()):
                if d == dim and not (self.asks_sizes and size <= 1):
                    self._mark(tensor, "_dynamo_weak_dynamic_indices", d)
                elif d == dim or size <= 1:
                    # A dim that was once 1 and once not (a decode step) means two graphs, not one that is neither. And one of 0
                    # (nothing cached yet) is no other size: while captures may not depend on sizes, Dynamo takes every size for at least 2.
                    self._mark(tensor, "_dynamo_static_indices", d)

    def _mark(self, tensor: Any, name: str, dim: int) -> None:
        """What maybe_mark_dynamic and mark_static do; the latter does nothing once Dynamo has begun to capture, as it has here."""
        attributes = tensor.__dict__
        if name not in attributes:
            attributes[name] = set()
            self._marked.append(functools.partial(attributes.pop, name, None))
        if dim not in attributes[name]:
            attributes[name].add(dim)
            self._marked.append(functools.partial(attributes[name].discard, dim))
        if _MARKED not in attributes:
            attributes[_MARKED] = True
            self._marked.append(functools.partial(attributes.pop, _MARKED, None))

    def unmark(self) -> None:
        """The tensors are the caller's: what else captures them must not see our marks."""
        while self._marked:
            self._marked.pop()()

    def batch_axes(self, names: Sequence[str], inputs: Sequence[Any]) -> dict[str, int]:
        """Which inputs of a graph carry the batch, and where, in the order of the call's arguments."""
        place: dict[int, tuple[int, int]] = {}
        for i, (ref, dim) in enumerate(self._dims):
            if dim >= 0 and (tensor := ref()) is not None:
                place.setdefault(id(tensor), (i, dim))
        found = sorted((*place[id(x)], name) for name, x in zip(names, inputs) if id(x) in place)
        return {name: dim for _, dim, name in found}


ongoing: ContextVar[Ongoing | None] = ContextVar("dynaflow_ongoing", default=None)


_serialised: ContextVar[bool] = ContextVar("dynaflow_serialised", default=False)


# whether calls run the same launches on one stream; on the path of every call
is_serialised: Callable[[], bool] = _serialised.get


@contextmanager
def serialised() -> Iterator[None]:
    """Calls inside run the same launches on one stream."""
    token = _serialised.set(True)
    try:
        yield
    finally:
        _serialised.reset(token)
