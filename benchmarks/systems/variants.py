"""How a system is told to be fast: by torch.compile, by its own setting, by us."""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree

import dynaflow as df

EAGER, COMPILE, REDUCE, SYSTEM = "eager", "torch.compile", "reduce-overhead", "own setting"
OURS, FIXED, SPLIT, BRANCHES = "dynaflow", "dynaflow fixed", "dynaflow split", "dynaflow branches"
BASELINES = (EAGER, COMPILE, REDUCE, SYSTEM)
OPTIONS: dict[str, dict[str, Any]] = {
    OURS: {}, FIXED: {"fixed_weights": True}, SPLIT: {"strategy": df.TwoBatch()}, BRANCHES: {"strategy": df.Branches()},
}  # fmt: skip
NAMES = (*BASELINES, *OPTIONS)
# without the GPU's own
DEFAULT = (*BASELINES, OURS, FIXED)
ON_CUDA_ONLY = frozenset({REDUCE, FIXED})

_numbers = itertools.count()


def compile_forward(modules: Iterable[Any], name: str) -> None:
    """torch.compile of the modules' forward, in place. With CUDA Graphs, a call of the last of them (the one that runs first) begins a new
    step; what it returns is copied where others take it: their own recordings may overwrite it."""
    modules = list(modules)
    for module in modules:
        module.forward = torch.compile(_own(module.forward), mode="reduce-overhead" if name == REDUCE else None)
    if name == REDUCE:
        modules[-1].forward = _beginning(modules[-1].forward, is_copied=len(modules) > 1)


def _beginning(forward: Callable[..., Any], is_copied: bool) -> Callable[..., Any]:
    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        result = forward(*args, **kwargs)
        return pytree.tree_map_only(torch.Tensor, torch.clone, result) if is_copied else result

    return call


def _own(forward: Callable[..., Any]) -> Callable[..., Any]:
    """With a code object of its own: Dynamo keeps captures, and which sizes have changed, per code object. Systems read the signature."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    name = f"call_{next(_numbers)}"
    own = types.FunctionType(call.__code__.replace(co_name=name), call.__globals__, name, None, call.__closure__)
    return functools.update_wrapper(own, forward)
