"""Which hooks a model's modules have, noticed at almost no cost per call.

Dynamo guards what hooks do, but not that a module has none: by default a hook that is registered after the capture is not run,
and the guards that would see it take time for every module on every call. So we look ourselves:

1. Every registration in the process counts up `RemovableHandle.next_id`; hooks that are removed make a dict shorter. Per call,
   one number and the few dicts that are not empty are compared.
2. Only when one of them changed, the modules are walked. Their state is which dicts of which modules hold hooks, and how many.
3. Captures belong to a state (`capture.py`). What the hooks are is up to Dynamo's guards.

Not seen: a hook put into a module's dict by hand, and a module with hooks from before the last call that is put into the model.
"""

from __future__ import annotations

from typing import Any, Iterator, Mapping

import torch
from torch.nn.modules import module as _global
from torch.utils.hooks import RemovableHandle

_OF_A_MODULE = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
    "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs",
)  # fmt: skip
_OF_ALL_MODULES = (
    "_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks",
    "_global_forward_hooks_with_kwargs", "_global_forward_hooks_always_called",
)  # fmt: skip

# longer containers in plain attributes (a vocabulary) are not searched for modules
MAX_ITEMS = 10_000
# (module, which dict, how many hooks are in it), for dicts that are not empty
State = tuple[tuple[int, str, int], ...]


class Hooks:
    """The hooks of a model's modules, as of the last look."""

    def __init__(self, model: torch.nn.Module):
        self._model = model
        self.state: State = ()
        self._next_id = -1
        self._full: tuple[tuple[Mapping[int, Any], int], ...] = ()

    def may_have_changed(self) -> bool:
        if RemovableHandle.next_id != self._next_id:
            return True
        return bool(self._full) and any(len(hooks) != count for hooks, count in self._full)

    def look(self) -> State:
        next_id = RemovableHandle.next_id  # before the walk: what is registered meanwhile is seen by the next look
        full = list(_full_dicts(self._model))
        self.state = tuple((i, name, len(hooks)) for i, name, hooks in full)
        self._full = tuple((hooks, len(hooks)) for _, _, hooks in full)
        self._next_id = next_id
        return self.state


def _full_dicts(model: torch.nn.Module) -> Iterator[tuple[int, str, Mapping[int, Any]]]:
    for name in _OF_ALL_MODULES:
        if hooks := getattr(_global, name, None):
            yield -1, name, hooks
    for i, module in enumerate(_modules(model)):
        attributes = module.__dict__
        for name in _OF_A_MODULE:
            if hooks := attributes.get(name):
                yield i, name, hooks


def _modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The model's modules, and those that it keeps in plain attributes, lists and dicts, where torch does not see them."""
    found: dict[int, torch.nn.Module] = {}
    stack = [model]
    while stack:
        module = stack.pop()
        if id(module) in found:
            continue
        found[id(module)] = module
        for name, value in module.__dict__.items():
            if name in _NO_MODULES:
                continue
            if isinstance(value, torch.nn.Module):
                stack.append(value)
            elif isinstance(value, (dict, list, tuple)) and len(value) <= MAX_ITEMS:
                items = value.values() if isinstance(value, dict) else value
                stack.extend(item for item in items if isinstance(item, torch.nn.Module))
    return list(found.values())


_NO_MODULES = set(torch.nn.Module().__dict__) - {"_modules"}
