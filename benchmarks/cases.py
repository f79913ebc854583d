"""A case: a model that was built, sets of fresh random inputs to rotate among, and what a step changes in place.

A decode step is HF's own call with a `StaticCache`: keys, values and the cache's length are changed inputs. `case.reset()` puts the length
back to `CONTEXT` before each step, outside of every timed region, so that all steps do the same work.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import dynaflow.testing.torchvision_shim  # noqa: F401  (before anything imports torchvision)
from benchmarks.zoo import _roughen

# tokens in the KV cache before a decode step, and room in it
CONTEXT, MAX_CONTEXT = 512, 640
TINY_CONTEXT, TINY_MAX_CONTEXT = 20, 32
NUM_SETS = 4

# one step of a variant, by its number
Call = Callable[[int], Any]
# anything with a name
Named = TypeVar("Named")


@dataclass(kw_only=True)
class Case(ABC):
    module: nn.Module
    # arguments that are the same in every step
    state: dict[str, Any]
    generator: torch.Generator
    dtype: torch.dtype
    tiny: bool
    sets: list[dict[str, Tensor]] = field(default_factory=list)

    @abstractmethod
    def fresh(self) -> dict[str, Tensor]:
        """New random inputs: what a caller passes anew in every step."""

    @abstractmethod
    def outputs(self, result: Any) -> list[Tensor]:
        """The tensors to compare."""

    def finish(self, result: Any) -> Any:
        """What a step does with the module's result: nothing, or a backward pass."""
        return result

    def args(self, number: int) -> dict[str, Any]:
        return {**self.sets[number % len(self.sets)], **self.state}

    @property
    def num_inputs(self) -> int:
        """Tensors that a graph's owner must copy in every step; caches are bound by address."""
        return len(self.sets[0])

    @property
    def num_bytes(self) -> int:
        """What is there before a step: weights, caches, inputs."""
        caches = (t for layer in self.layers for t in (layer.keys, layer.values))
        tensors = (*self.module.parameters(), *self.module.buffers(), *caches, *(t for inputs in self.sets for t in inputs.values()))
        return sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}.values())

    @property
    def layers(self) -> list[Any]:
        cache = self.state.get("past_key_values")
        return [] if cache is None else cache.layers

    def reset(self) -> None:
        for layer in self.layers:
            layer.cumulative_length.fill_(self.context)

    @property
    def context(self) -> int:
        return TINY_CONTEXT if self.tiny else CONTEXT

    def unmark(self) -> None:
        """Take off what a capture left on the tensors: Dynamo's other captures would see it and be made anew."""
        tensors = [t for inputs in self.sets for t in inputs.values()]
        tensors += [t for layer in self.layers for t in (layer.keys, layer.values, layer.cumulative_length)]
        for tensor in tensors:
            if not tensor.__dict__.keys() & {"_dynamo_weak_dynamic_indices", "_dynamo_static_indices", "_dynamo_dynamic_indices"}:
                tensor.__dict__.pop("_has_dynamo_dim_marking", None)

    def changed(self) -> list[Tensor]:
        """What the last step wrote into the cache."""
        at = self.context
        rows = [t[:, :, at] for layer in self.layers for t in (layer.keys, layer.values)]
        return [t.clone() for t in (*rows, *(layer.cumulative_length for layer in self.layers))]

    def run(self, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        """Eager."""
        self.reset()
        typed = {k: v.to(self.dtype) if v.is_floating_point() else v for k, v in inputs.items()}
        return self.outputs(self.finish(self.module(**typed, **self.state)))


def built(make: Callable[[], nn.Module], device: str, dtype: torch.dtype, seed: int) -> nn.Module:
    """Made on the device, in the type, with random weights that matter everywhere."""
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            module = make().eval()
    finally:
        torch.set_default_dtype(before)
    # not module.to(dtype): a buffer that its library makes in float32 (rotary frequencies) stays so, as after from_pretrained
    for parameter in module.parameters():
        parameter.data = parameter.data.to(device, dtype)
    _roughen(module)
    return module.requires_grad_(False)


def static_cache(module: Any, batch: int, dtype: torch.dtype, tiny: bool, generator: torch.Generator) -> Any:
    from transformers import StaticCache

    config = module.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache = StaticCache(config=config, max_cache_len=TINY_MAX_CONTEXT if tiny else MAX_CONTEXT)
    cache.early_initialization(batch, config.num_key_value_heads, head_dim, dtype, generator.device)
    for layer in cache.layers:
        layer.keys.normal_(generator=generator)
        layer.values.normal_(generator=generator)
    return cache


def select(rows: Sequence[Named], pattern: str = "*") -> list[Named]:
    """The rows whose name matches one of the comma-separated globs."""
    names = {id(row): row.name for row in rows}  # type: ignore[attr-defined]
    chosen = [row for row in rows if any(fnmatch(names[id(row)], p) for p in pattern.split(","))]
    if not chosen:
        raise SystemExit(f"--rows {pattern}: no row matches; rows: {', '.join(names.values())}")
    return chosen
