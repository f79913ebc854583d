"""The call that is going on: what a capture inside of it must know of its arguments."""

from __future__ import annotations

import weakref
from contextvars import ContextVar
from typing import Any, Callable

import torch


class Ongoing:
    """A call of what df.compile returned, as far as a capture inside of it must know: which tensors carry the batch, and where."""

    def __init__(self, find: Callable[[], list[tuple[torch.Tensor, int]]]):
        self._find: Callable[[], list[tuple[torch.Tensor, int]]] | None = find
        self._dims: list[tuple[weakref.ref[torch.Tensor], int]] = []
        self._num_marked = 0
        # captured graphs that ran in this call
        self.num_graphs = 0

    def add(self, tensor: torch.Tensor, dim: int) -> None:
        self._dims.append((weakref.ref(tensor), dim))

    def mark(self) -> None:
        """Tell Dynamo, which is about to capture. dim -1: no batch."""
        if self._find is not None:
            found, self._find = self._find(), None
            for tensor, dim in found:
                self.add(tensor, dim)
        for ref, dim in self._dims[self._num_marked :]:
            alive = ref()
            for d, size in enumerate(alive.shape if alive is not None else ()):
                if d == dim:
                    _mark(alive, "_dynamo_weak_dynamic_indices", d)
                elif size == 1:
                    # A dim that was once 1 and once not (a decode step) means two graphs, not one that is neither.
                    _mark(alive, "_dynamo_static_indices", d)
        self._num_marked = len(self._dims)

    def batch_dim(self, tensor: Any) -> int | None:
        return next((dim for ref, dim in self._dims if dim >= 0 and ref() is tensor), None)


def _mark(tensor: Any, name: str, dim: int) -> None:
    """What maybe_mark_dynamic and mark_static do; the latter does nothing once Dynamo has begun to capture, which is when we mark."""
    tensor.__dict__.setdefault(name, set()).add(dim)
    tensor._has_dynamo_dim_marking = True


ongoing: ContextVar[Ongoing | None] = ContextVar("dynaflow_ongoing", default=None)
