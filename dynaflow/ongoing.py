"""The call that is going on: what a capture inside of it must know of its arguments."""

from __future__ import annotations

import weakref
from contextvars import ContextVar
from typing import Any, Callable

import torch


class Ongoing:
    """A call of what df.compile returned, as far as a capture inside of it must know: which tensors carry the batch, and where."""

    def __init__(self, find: Callable[[], list[tuple[torch.Tensor, int]]], is_static: bool = False):
        self._find: Callable[[], list[tuple[torch.Tensor, int]]] | None = find
        self._dims: list[tuple[weakref.ref[torch.Tensor], int]] = []
        self._marked: list[tuple[Any, str, int]] = []
        # captures of this call take the batch as it is: for a batch of 1 that the model broadcasts
        self.is_static = is_static
        # captured graphs that ran in this call
        self.num_graphs = 0

    def add(self, tensor: torch.Tensor, dim: int) -> None:
        self._dims.append((weakref.ref(tensor), dim))

    def find(self) -> None:
        if self._find is not None:
            found, self._find = self._find(), None
            for tensor, dim in found:
                self.add(tensor, dim)

    def mark(self) -> None:
        """Tell Dynamo, which is about to capture. dim -1: no batch."""
        self.find()
        for ref, dim in self._dims:
            tensor = ref()
            for d, size in enumerate(tensor.shape if tensor is not None else ()):
                if d == dim and not self.is_static:
                    self._mark(tensor, "_dynamo_weak_dynamic_indices", d)
                elif d == dim or size == 1:
                    # A dim that was once 1 and once not (a decode step) means two graphs, not one that is neither.
                    self._mark(tensor, "_dynamo_static_indices", d)

    def _mark(self, tensor: Any, name: str, dim: int) -> None:
        """What maybe_mark_dynamic and mark_static do; the latter does nothing once Dynamo has begun to capture, as it has here."""
        marks = tensor.__dict__.setdefault(name, set())
        if dim not in marks:
            marks.add(dim)
            tensor._has_dynamo_dim_marking = True
            self._marked.append((tensor, name, dim))

    def unmark(self) -> None:
        """The tensors are the caller's: what else captures them must not see our marks."""
        while self._marked:
            tensor, name, dim = self._marked.pop()
            tensor.__dict__[name].discard(dim)
            if not tensor.__dict__[name]:
                del tensor.__dict__[name]

    def has_one_row(self) -> bool:
        self.find()
        return any((t := ref()) is not None and 0 <= dim < t.dim() and t.shape[dim] == 1 for ref, dim in self._dims)

    def batch_dim(self, tensor: Any) -> int | None:
        return next((dim for ref, dim in self._dims if dim >= 0 and ref() is tensor), None)


ongoing: ContextVar[Ongoing | None] = ContextVar("dynaflow_ongoing", default=None)
