"""Outputs that are handed out again and again over the same memory, and who still has them.

For each output stands one tensor over its memory, in a storage that is not the output's own and that nobody else uses. A caller gets a
tensor made anew over that storage, and has the output as long as more uses the storage than what stands there: a tensor, a view, Python's
object for the storage. Of what is saved for a backward there are hundreds, which nobody else sees and which take on no history of their
own: what stands for it is handed out itself, and somebody has it as long as it is referred to from elsewhere, by Python or by autograd.
Beside all that, a loss is next to nothing, and many a loop has the last one while it asks for the next: such outputs are copied, so that
nobody has them, and a second set of all that is saved is not needed.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from sys import getrefcount
from typing import Any, Iterable, Mapping, Sequence

import torch

from dynaflow.runtime.native import Native, Words, native, word_at
from dynaflow.runtime.program import copy_as_it_lies

# a storage over memory that is somebody else's
_storage_at: Any = torch._C._construct_storage_from_data_pointer
# a tensor from how it lies in a storage, in one step, where this build has it
_construct: Any = getattr(torch._C, "_construct_CUDA_Tensor_From_Storage_And_Metadata", None)
# how many tensors, views and others have a storage, by its handle
_num_uses: Any = torch._C._storage_Use_Count

# address, device, bytes
_Memory = tuple[int, torch.device, int]


class Lent:
    """The outputs of one recording."""

    def __init__(self, outputs: Sequence[torch.Tensor], saved: Sequence[int] = (), copied: Sequence[int] = ()):
        """`saved`: those that nobody but a backward gets. `copied`: those of which the caller gets copies."""
        self._outputs = list(outputs)
        memory = [_memory_of(output) for output in outputs]
        self._addresses = {address for address, _, _ in memory}
        _homes.add(self._addresses)
        shared = [m for n, m in enumerate(memory) if n not in saved]
        self.saved = [n for n in saved if memory[n] not in shared]
        self._copied = [n for n in copied if memory.count(memory[n]) == 1]
        self._callers = [n for n in range(len(memory)) if n not in self.saved and n not in self._copied]
        # what stands for what is saved, with its storage and the storage's handle; references that one has to which nobody else refers
        self.standing = [_over(_storage_at(*memory[n]), outputs[n]) for n in self.saved]
        self._alone = _references(self.standing[:1])
        # The same for the caller's; those that share their memory share a storage, which they all use. Of each memory: Python's object
        # for the storage, its handle, where it is, and how much uses it while nobody has any of it.
        self._memory = memory
        self._shared: list[Any] = [None] * len(self._callers)
        self._unused: dict[_Memory, tuple[Any, int, int, int]] = {}
        for each in dict.fromkeys(memory[n] for n in self._callers):
            self._stand(each)
        self._refs_unused = _references_to_storage(self._unused)
        made = native()
        # where references to all that stands here are counted; by memory, None for what is saved: what is counted while nobody has any
        self.counts = None if made is None else Words(made)
        self._nobodys: dict[_Memory | None, list[tuple[int, int]]] = {}
        for which in (None, *self._unused):
            self._count(which)

    def _stand(self, memory: _Memory) -> None:
        storage = _storage_at(*memory)
        for k, n in enumerate(self._callers):
            if self._memory[n] == memory:
                self._shared[k] = _tensor_over(storage, _lie(self._outputs[n]))
        self._unused[memory] = (storage, storage._cdata, memory[0], _num_uses(storage._cdata))

    def _count(self, which: _Memory | None) -> None:
        """What was made for this memory just now: nobody else has any of it yet."""
        if self.counts is not None:
            self._nobodys[which] = [(at, word_at(at)) for at in self._counted(which, self.counts.native)]
            self.counts.watch([word for words in self._nobodys.values() for word in words])

    def _counted(self, which: _Memory | None, made: Native) -> list[int]:
        """Where references are counted, and where storages say where their memory is."""
        if which is not None:
            storage, handle, _, _ = self._unused[which]
            return [id(storage) + made.by_python_at, handle + made.by_torch_at, handle + made.facts.data_at]
        found = []
        for tensor, storage, handle in self.standing:
            found += [id(tensor) + made.by_python_at, tensor._cdata + made.by_torch_at]
            found += [id(storage) + made.by_python_at, handle + made.by_torch_at]
        return found

    def lend(self) -> list[torch.Tensor]:
        if not self.saved and not self._copied:
            return [tensor.data for tensor in self._shared]
        found: list[Any] = [None] * len(self._outputs)
        for n, tensor in zip(self._callers, self._shared):
            found[n] = tensor.data
        for n in self._copied:
            found[n] = copy_as_it_lies(self._outputs[n])
        for n, (tensor, _, _) in zip(self.saved, self.standing):
            found[n] = tensor
        return found

    def is_gone(self) -> bool:
        """Whether nobody refers to what was handed out last. Of hundreds on the path of every call: all counts are as they were, mostly."""
        if self.counts is not None and self.counts.hold():
            return True
        for memory, (storage, handle, address, num_uses) in self._unused.items():
            if storage.data_ptr() != address:  # somebody moved it to memory that processes share: it is theirs, and ours is free
                self._stand(memory)
                self._count(memory)
                return self.is_gone()
            if _num_uses(handle) > num_uses or getrefcount(storage) > self._refs_unused:
                return False
        return _are_alone(self.standing, *self._alone)

    def leave(self) -> None:
        """Nothing is handed out any more. The memory stays for as long as somebody has what was."""
        _homes.remove(self._addresses)
        if not self.is_gone():
            outlived[next(_numbers)] = self


def _references_to_storage(unused: Mapping[_Memory, tuple[Any, int, int, int]]) -> int:
    """As `Lent.is_gone` counts them."""
    for _, (storage, _, _, _) in unused.items():
        return getrefcount(storage)
    return 0


def _are_alone(standing: Sequence[tuple[Any, Any, int]], by_python: int, by_autograd: int, of_storage: int, by_views: int) -> bool:
    """Whether nobody but the list refers to them."""
    for tensor, storage, handle in standing:
        if getrefcount(tensor) > by_python or tensor._use_count() > by_autograd or getrefcount(storage) > of_storage or (
                _num_uses(handle) > by_views):  # fmt: skip
            return False
    return True


def _references(standing: Sequence[tuple[Any, Any, int]]) -> tuple[int, int, int, int]:
    """As `_are_alone` counts them."""
    for tensor, storage, handle in standing:
        return getrefcount(tensor), tensor._use_count(), getrefcount(storage), _num_uses(handle)
    return 0, 0, 0, 0


# -- tensors over memory


def _memory_of(tensor: torch.Tensor) -> _Memory:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.device, storage.nbytes()


def _lie(tensor: torch.Tensor) -> dict[str, Any]:
    return {"size": tensor.shape, "stride": tensor.stride(), "storage_offset": tensor.storage_offset(), "dtype": tensor.dtype,
            "device": tensor.device}  # fmt: skip


def _tensor_over(storage: Any, lie: dict[str, Any]) -> torch.Tensor:
    if _construct is not None and lie["device"].type == "cuda":
        return _construct(lie, storage)  # type: ignore[no-any-return]
    empty = torch.empty(0, dtype=lie["dtype"], device=lie["device"])
    return empty.set_(storage, lie["storage_offset"], lie["size"], lie["stride"])


def _over(storage: Any, output: torch.Tensor) -> tuple[torch.Tensor, Any, int]:
    """A tensor that lies in this storage as the output does in its own, Python's object for the storage, and its handle."""
    tensor = _tensor_over(storage, _lie(output))
    return tensor, tensor.untyped_storage(), storage._cdata


def tensor_at(address: int, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`count` elements that lie there. It holds nothing."""
    lie = {"size": (count,), "stride": (1,), "storage_offset": 0, "dtype": dtype, "device": device}
    return _tensor_over(_storage_at(address, device, count * dtype.itemsize), lie)


def by_address(arg: Any) -> Any:
    """What a CUDA Graph keeps of a tensor: where it lies. It holds nobody's saved tensors."""
    if type(arg) not in (torch.Tensor, torch.nn.Parameter) or not arg.numel() or arg.is_conj() or arg.is_neg():
        return arg
    return _tensor_over(_storage_at(*_memory_of(arg)), _lie(arg))


# -- whose memory it is


class _Homes:
    """Addresses of the outputs of recordings."""

    def __init__(self) -> None:
        self._count: Counter[int] = Counter()
        self.version = 0

    def add(self, addresses: Iterable[int]) -> None:
        self._count.update(addresses)
        self.version += 1

    def remove(self, addresses: Iterable[int]) -> None:
        for address in addresses:
            self._count[address] -= 1
            if not self._count[address]:
                del self._count[address]
        self.version += 1  # behind the change: who asks in between keeps nothing for longer

    def __contains__(self, address: int) -> bool:
        return address in self._count


_homes = _Homes()


def is_lent(tensor: torch.Tensor) -> bool:
    """Whether it lies in the outputs of a recording: the next call's may well lie there, too."""
    return tensor.untyped_storage().data_ptr() in _homes


def version() -> int:
    """Changes whenever what is lent may have changed for an address."""
    return _homes.version


# Outputs that are still referred to, of recordings that are gone. Entries come while others are looked through (a recording may die at any
# time): none but those found to be gone is ever taken out.
outlived: dict[int, Lent] = {}
_numbers = itertools.count()
_letting_go = threading.Lock()


def let_go() -> None:
    """Called under a pool's lock, and by one thread at a time."""
    if not outlived:
        return
    with _letting_go:
        for number, lent in list(outlived.items()):
            if lent.is_gone():
                outlived.pop(number, None)
