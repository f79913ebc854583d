"""Places in a tensor's memory, and whether two of them overlap."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch._C._dynamo.guards import _reinterpret_tensor  # type: ignore[attr-defined]


class Place(NamedTuple):
    """Elements of a value's memory."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def extent(self) -> int:
        """From the first element to behind the last."""
        return 0 if 0 in self.shape else 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride))

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """It, in a tensor that is all of the memory. No view in autograd's eyes, as in the wrapper's text."""
        found: torch.Tensor = _reinterpret_tensor(tensor, self.shape, self.stride, self.offset)
        return found


def are_disjoint(a: Place, b: Place) -> bool:
    """Whether two places of one memory share no element; False where that is not sure.

    Places with the same steps are boxes on one grid, if no step reaches over the next larger one: then they are disjoint exactly if they
    are along one of its axes.
    """
    if a.extent == 0 or b.extent == 0 or a.offset + a.extent <= b.offset or b.offset + b.extent <= a.offset:
        return True
    if a.offset > b.offset:
        a, b = b, a
    sizes: dict[int, list[int]] = {}
    for k, place in enumerate((a, b)):
        for size, step in zip(place.shape, place.stride):
            if step > 0 or size > 1:
                row = sizes.setdefault(step, [1, 1])
                if step <= 0 or (size > 1 and row[k] > 1):
                    return False
                row[k] = max(row[k], size)
    distance, reach, is_apart = b.offset - a.offset, 0, False
    axes = []
    for step, (mine, other) in sorted(sizes.items(), reverse=True):
        start, distance = divmod(distance, step)
        axes.append((step, max(mine, start + other)))
        is_apart = is_apart or start >= mine
    if distance:
        return False
    for step, length in reversed(axes):
        if reach >= step:
            return False
        reach += (length - 1) * step
    return is_apart
