"""Hugging Face Transformers: `df.optimize(model, strategy=...)`, then `model(...)`, `generate`, `generate_batch` and `Trainer` as before.

Continuous batching (`generate_batch`) packs the tokens of all requests into one row. There the tokens are the batch.
"""

from __future__ import annotations

import logging
from types import MethodType
from typing import TYPE_CHECKING, Any, Mapping
from weakref import WeakSet

import torch

if TYPE_CHECKING:
    from dynaflow.integrations import Optimized

log = logging.getLogger("dynaflow")
# models whose compile_config was spoken of
_warned: WeakSet[Any] = WeakSet()


def models(target: Any) -> dict[str, torch.nn.Module]:
    return {"": target}


def options(module: Any) -> dict[str, Any]:
    return {"batch": batch}


def batch(arguments: Mapping[str, Any]) -> dict[str, int] | None:
    """Where the batch is in a call of a model: in dim 0, or, where continuous batching writes into its paged cache, among the tokens."""
    if arguments.get("cache") is None or arguments.get("write_index") is None:
        return None
    dims = {"input_ids": 1, "inputs_embeds": 1, "position_ids": 1, "attention_mask": 2, "write_index": 0}
    return {name: dim for name, dim in dims.items() if arguments.get(name) is not None}


def attach(target: Any, optimized: Optimized, options: Mapping[str, Any]) -> None:
    if hasattr(target, "get_compiled_call"):
        optimized.set(target, "get_compiled_call", MethodType(get_compiled_call, target))


def get_compiled_call(model: Any, compile_config: Any) -> Any:
    """In the place of the model's own, with which `generate` compiles its decode steps (static cache, GPU): they are ours."""
    if compile_config is not None and model not in _warned:
        _warned.add(model)
        log.warning("%s: generate's compile_config is not used, df.optimize compiled the model; df.restore(model) undoes that",
                    type(model).__name__)  # fmt: skip
    return model.__call__
