"""What a wrapper's text does not say: how the results of extern kernels lie in memory."""

from __future__ import annotations

import ast
from typing import Any, Sequence

import torch

from dynaflow.inductor.places import Place, are_disjoint
from dynaflow.inductor.source import find_call, read
from dynaflow.runtime.program import Geometry


class Observed:
    """The wrapper's `call`, with a look at every result of an extern kernel.

    Not reported are results in the memory of an argument, or where another one lies, and those that are no plain tensors.
    """

    def __init__(self, text: str, scope: dict[str, Any]):
        tree = ast.parse(text)
        wrapper = read(text)
        self._names = {s.makes for s in wrapper.statements if s.kind in ("own", "item")}
        function = find_call(tree)
        self._is_method = function not in tree.body
        function.body = self._watched(function.body)
        make = ast.parse("def make(_df_see):\n    return call").body[0]
        assert isinstance(make, ast.FunctionDef)
        make.body.insert(0, function)
        found: dict[str, Any] = {}
        exec(compile(ast.fix_missing_locations(ast.Module([make], [])), "<observed>", "exec"), scope, found)  # noqa: S102
        self._make = found["make"]

    def _watched(self, body: list[ast.stmt]) -> list[ast.stmt]:
        lines: list[ast.stmt] = []
        for node in body:
            if isinstance(node, ast.With):
                node.body = self._watched(node.body)
            lines.append(node)
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in self._names:
                name = node.targets[0].id
                lines.append(ast.parse(f"_df_see({name!r}, {name})").body[0])
        return lines

    def __call__(self, args: list[Any], runner: Any = None) -> tuple[Sequence[Any], dict[str, Geometry]]:
        """What `call` returns, and what was seen."""
        seen: dict[str, Geometry] = {}
        memory = _Memory(args)

        def see(name: str, value: Any) -> None:
            if type(value) is torch.Tensor and memory.takes(value):
                seen[name] = Geometry(tuple(value.shape), value.stride(), value.dtype, value.device)

        call = self._make(see)
        try:
            return (call(runner, args) if self._is_method else call(args)), seen
        finally:
            memory.forget()


class _Memory:
    """Who lies in which storage. Nothing is kept alive: a storage that is gone has left its address to others."""

    def __init__(self, args: Sequence[Any]):
        # address -> weak reference to the storage, and the places in it that are taken; None: an argument's, all of it
        self._taken: dict[int, tuple[int, list[Place] | None]] = {}
        for arg in args:
            if isinstance(arg, torch.Tensor):
                self._enter(arg.untyped_storage(), None)

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies where no other does. From now on it lies there."""
        if not tensor.numel():
            return True
        storage: Any = tensor.untyped_storage()
        mine = Place(int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())
        places = self._enter(storage, [])
        if places is None:
            return False
        is_alone = all(are_disjoint(mine, other) for other in places)
        places.append(mine)
        return is_alone

    def _enter(self, storage: Any, places: list[Place] | None) -> list[Place] | None:
        address = storage.data_ptr()
        reference, found = self._taken.get(address, (None, places))
        if reference is not None and torch.UntypedStorage._expired(reference):
            torch.UntypedStorage._free_weak_ref(reference)
            reference, found = None, places
        if reference is None:
            self._taken[address] = storage._weak_ref(), found
        return found

    def forget(self) -> None:
        for reference, _ in self._taken.values():
            torch.UntypedStorage._free_weak_ref(reference)
        self._taken.clear()
