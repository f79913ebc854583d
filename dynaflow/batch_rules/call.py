"""What a split rule sees: one call of one op, and sizes read as multiples of the batch.

A tensor's batch axis is a fact of its shape. It is the dim whose size is `batch * c`, where neither `c` nor any other dim
contains the batch; the batch is then the outermost factor of that dim, and rows [lo, hi) of the batch are its slice
[lo * c, hi * c). A tensor with the batch in its shape but without such a dim (B x B, or B + 1) cannot be cut by rows.
"""

from __future__ import annotations

from typing import Any, Callable, Iterable, Sequence

import sympy
import torch
from torch.utils import _pytree as pytree

# stands for every symbol that means the batch size
BATCH = sympy.Symbol("batch", integer=True, positive=True)

# reasons that several rules give
DIFFERENT_ROWS = "combines different rows of the batch"
PICKS_ROWS = "picks rows of the batch"
REDUCES = "reduces over the batch"
ROW_NUMBER = "depends on the row number"
ALONG_BATCH = "works along the batch"
STATE = "changes state without a batch axis"

# one axis for all outputs, or one per output tensor; None: an output that does not depend on the batch; str: why not
Verdict = int | None | tuple[int | None, ...] | str
Rule = Callable[["Call"], Verdict]


class Sizes:
    """Sizes as sympy expressions in which every batch symbol is `BATCH`."""

    def __init__(self, symbols: Iterable[sympy.Symbol], shape_env: Any = None):
        found = set(symbols)
        if shape_env is not None:
            # a guard may have put another symbol in the place of this one since it was made
            for symbol in tuple(found):
                found |= shape_env.replace(symbol).free_symbols
        self._to_batch = dict.fromkeys(found, BATCH)
        self._is_multiple: dict[sympy.Expr, bool] = {}

    def expr(self, size: Any) -> sympy.Expr:
        if isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return size.node.expr.xreplace(self._to_batch)
        return sympy.sympify(size)

    def has_batch(self, value: Any) -> bool:
        """Whether a number, or any number in a pytree of them, contains the batch size."""
        if isinstance(value, (int, torch.Tensor)):
            return False
        return any(
            isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)) and self.has_batch_symbol(leaf.node.expr)
            for leaf in pytree.tree_leaves(list(value) if isinstance(value, torch.Size) else value)
        )

    def has_batch_symbol(self, expr: sympy.Basic) -> bool:
        # where several symbols mean the batch, 11*s1//s2 is 11
        return not expr.free_symbols.isdisjoint(self._to_batch) and expr.xreplace(self._to_batch).has(BATCH)

    def is_multiple(self, size: Any) -> bool:
        """Whether size == batch * c, with c free of the batch."""
        if not self.has_batch(size):
            return False
        expr = self.expr(size)
        if expr not in self._is_multiple:
            self._is_multiple[expr] = not sympy.expand(expr / BATCH).has(BATCH)
        return self._is_multiple[expr]

    def axis(self, tensor: torch.Tensor) -> int | None:
        """The dim that the batch can be cut along."""
        dims = [d for d, size in enumerate(tensor.shape) if self.has_batch(size)]
        return dims[0] if len(dims) == 1 and self.is_multiple(tensor.shape[dims[0]]) else None

    def is_whole(self, tensor: torch.Tensor) -> bool:
        """Whether the shape contains the batch, but not as an axis."""
        return self.axis(tensor) is None and any(self.has_batch(size) for size in tensor.shape)

    def outer(self, tensor: torch.Tensor, dim: int) -> sympy.Expr:
        """How many times all of `dim` is repeated in the row-major order of the elements."""
        return sympy.expand(sympy.prod([self.expr(size) for size in tensor.shape[:dim]]))


class Call:
    """Arguments by the names of the op's schema, defaults filled in: `call["dim"]`."""

    def __init__(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any, sizes: Sizes):
        self.func, self.args, self.kwargs, self.sizes = func, args, kwargs, sizes
        # a higher-order op without a rule: its body is not seen, and may do anything
        self.is_opaque = False
        schema = getattr(func, "_schema", None)
        if schema is None:  # a higher-order op: by position
            self.arguments: dict[str, Any] = {**{str(i): arg for i, arg in enumerate(args)}, **kwargs}
            written: list[Any] = []
        else:
            given = {**dict(zip((a.name for a in schema.arguments), args)), **kwargs}
            names = [a.name for a in schema.arguments if a.name in given or a.has_default_value()]
            defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
            self.arguments = {name: given[name] if name in given else defaults[name] for name in names}
            written = [self.arguments.get(a.name) for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        self.tensors = tensors_in(self.arguments)
        self.written = tensors_in(written)
        self.outs = tensors_in(result)

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.arguments.get(name, default)

    @property
    def first(self) -> torch.Tensor:
        return self.tensors[0]

    def axis(self, tensor: torch.Tensor | None) -> int | None:
        return None if tensor is None else self.sizes.axis(tensor)

    def batched(self, *tensors: torch.Tensor | None) -> bool:
        """Whether any of these carries the batch."""
        return any(self.axis(t) is not None for t in tensors)

    def dims(self, name: str, tensor: torch.Tensor) -> tuple[int, ...]:
        """The dims that an argument names, counted from the left; no dim at all means every dim, as in `sum`."""
        given = self.get(name)
        given = (given,) if isinstance(given, int) else given or range(tensor.ndim)
        return tuple(d % max(tensor.ndim, 1) for d in given)

    def aligned(self, tensors: Iterable[torch.Tensor | None], ndim: int) -> int | None | str:
        """The batch axis that these tensors have in common when they are broadcast to `ndim` dims."""
        given = [t for t in tensors if t is not None]
        axes = {ndim - t.ndim + a for t in given if (a := self.axis(t)) is not None}
        axis = axes.pop() if axes else None
        return axis if not axes and all(self.fits(t, ndim, axis) for t in given) else DIFFERENT_ROWS

    def fits(self, tensor: torch.Tensor | None, ndim: int, axis: int | None) -> bool:
        """Whether a tensor, broadcast to `ndim` dims, has the batch in `axis` or is the same for every row.

        A dim of the batch's present size is neither. Not every fake kernel looks at that.
        """
        if tensor is None or axis is None:
            return tensor is None or not self.batched(tensor)
        at = axis - ndim + tensor.ndim
        if self.batched(tensor):
            return self.axis(tensor) == at
        return at < 0 or (isinstance(tensor.shape[at], int) and tensor.shape[at] == 1)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
