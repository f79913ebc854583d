"""Where a recording reads its inputs: slots, or the caller's own memory. On the path of every call."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any, Callable, Mapping, NamedTuple, Sequence

import torch

from dynaflow.runtime.native import FitCheck, native


def same_addresses(args: list[Any], table: list[Any], indices: list[int]) -> bool:
    """Whether these arguments are where the table says, by their own numbers."""
    return all(args[i].data_ptr() == table[i] for i in indices)


# torch's own check of static inputs, in C++, where this build has it
_same_addresses: Any = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", same_addresses)


class Slot(NamedTuple):
    tensor: torch.Tensor
    # the argument that it is for, and its class; its batch dim and how many rows there are with padding, where it has one
    arg: int
    type: type
    rows: tuple[int, int] | None
    # whether what lies like it can be copied byte by byte
    is_piece: bool
    address: int
    nbytes: int


class Slots:
    def __init__(
        self, args: Sequence[Any], copied: Mapping[int, tuple[int, int] | None], changed: Sequence[int], promised: Sequence[int] = ()
    ):
        """`copied`: argument -> (batch dim, its size with all rows), None where it has no batch dim. `changed`: those changed in place.
        `promised`: those that are not looked at, where they are parameters (a buffer is replaced by a plain assignment)."""
        kept = {i for i in promised if isinstance(args[i], torch.nn.Parameter)}
        self.each = [_slot(args[i], i, rows) for i, rows in copied.items()]
        self._of = {slot.arg: slot.tensor for slot in self.each}
        # Of what is bound by address, the address alone is kept: the caller's caches are the caller's to drop.
        # What must be where it was, and where that is, by the argument's own number.
        self.checked = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor) and i not in copied and i not in kept]
        self.table: list[Any] = [None] * len(args)
        for i in self.checked:
            self.table[i] = args[i].data_ptr()
        # memory that is changed: where it begins, in order, and where it ends
        storages = {storage.data_ptr(): storage.nbytes() for storage in (args[i].untyped_storage() for i in changed)}
        self._begins = sorted(storages)
        self._ends = [begin + storages[begin] for begin in self._begins]
        made = native()
        memory = list(zip(self._begins, self._ends))
        self.check = None if made is None else FitCheck(made, args, [slot.arg for slot in self.each], memory, self.checked, changed)
        # whether all is where it was, as far as a quick look can tell
        self._function: Callable[[Sequence[Any]], bool] = (lambda args: False) if self.check is None else self.check.function

    def given(self, args: Sequence[Any]) -> list[Any]:
        """What a recording reads: the slots, and the caller's own."""
        return [self._of.get(i, arg) for i, arg in enumerate(args)]

    def fit(self, args: Sequence[Any]) -> bool:
        """Whether all that is bound by address is where it was, and nothing that is copied lies in memory that is changed."""
        return self._function(args) or self._fit(args)

    def _fit(self, args: Sequence[Any]) -> bool:
        """The same, slower; an argument may be of another class than it was."""
        if self._begins:
            for slot in self.each:
                address = args[slot.arg].data_ptr()
                at = bisect_right(self._begins, address)
                if at and address < self._ends[at - 1]:
                    return False
        return _same_addresses(list(args), self.table, self.checked)  # type: ignore[no-any-return]

    def fill(self, args: Sequence[Any]) -> bool:
        for slot in self.each:
            fill(slot, args)
        return True


def fill(slot: Slot, args: Sequence[Any]) -> None:
    arg, tensor, rows = args[slot.arg], slot.tensor, slot.rows
    if rows is not None and arg.shape[rows[0]] != rows[1]:
        tensor = tensor.narrow(rows[0], 0, arg.shape[rows[0]])
    tensor.copy_(arg, True)


def _slot(arg: torch.Tensor, number: int, rows: tuple[int, int] | None) -> Slot:
    """Memory for an input of `rows` rows. Rows beyond the first call's repeat its own: they must be valid, if only for indices."""
    shape = list(arg.shape) if rows is None else [rows[1] if dim == rows[0] else size for dim, size in enumerate(arg.shape)]
    tensor = torch.empty_strided(shape, arg.stride(), dtype=arg.dtype, device=arg.device)
    if rows is not None and arg.shape[rows[0]] != rows[1]:
        index = torch.arange(rows[1], device=arg.device) % arg.shape[rows[0]]
        tensor.copy_(arg.index_select(rows[0], index))
    # complex tensors may be conjugated by a flag: none of their facts tells, and one call's may be, another's not
    is_plain = type(arg) in (torch.Tensor, torch.nn.Parameter) and not arg.is_complex() and not arg.is_neg()
    nbytes = tensor.numel() * tensor.itemsize
    is_piece = is_plain and 0 < nbytes == tensor.untyped_storage().nbytes()  # it lies without gaps
    return Slot(tensor, number, type(arg), rows, is_piece, tensor.data_ptr(), nbytes)
