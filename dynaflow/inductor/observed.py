"""What a wrapper's text does not say: how the results of extern kernels lie in memory."""

from __future__ import annotations

import ast
from typing import Any, Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef

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
        # Who lies in a storage. Told by the storage, not by its address: `call` lets go of arguments and results as it goes, and what
        # comes later may well lie where they did. What has no bytes has no address at all.
        places: dict[StorageWeakRef, list[Place]] = {}
        given = {StorageWeakRef(a.untyped_storage()) for a in args if isinstance(a, torch.Tensor)}

        def see(name: str, value: Any) -> None:
            if type(value) is not torch.Tensor:
                return
            storage = StorageWeakRef(value.untyped_storage())
            mine, others = Place(int(value.storage_offset()), tuple(value.shape), value.stride()), places.setdefault(storage, [])
            if storage not in given and all(are_disjoint(mine, other) for other in others):
                seen[name] = Geometry(mine.shape, mine.stride, value.dtype, value.device)
            others.append(mine)

        call = self._make(see)
        return (call(runner, args) if self._is_method else call(args)), seen
