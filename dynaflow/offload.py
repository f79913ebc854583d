"""Weights that stay on the host: `df.offload(model, "cuda")`, then `df.compile(model, strategy=df.Offload(budget))`.

Each large weight becomes a parameter in (pinned) host memory that is fetched where it is used: `dynaflow::fetch` is an op of the
captured graph, of kind "copy", and a strategy decides when it runs and where. Without a strategy, and without df.compile, the model
still runs: every weight is fetched when its turn comes, and gone when nobody needs it.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dynaflow.errors import OptionError

# weights smaller than this are kept on the device: a copy of its own would cost more time than it saves memory
MIN_BYTES = 1 << 20


@torch.library.custom_op("dynaflow::fetch", mutates_args=())
def fetch(weight: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on the device; on the stream of the caller, who goes on at once where the weight is pinned."""
    return weight.to(device, non_blocking=True, copy=True)


@fetch.register_fake
def _(weight: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_like(weight, device=device)


def fetch_into(weight: torch.Tensor, place: torch.Tensor) -> None:
    """The same, to a given place."""
    place.copy_(weight, non_blocking=True)


# as captured graphs call it
FETCH = "dynaflow.fetch.default"


class _Fetched(nn.Module):
    """What a weight is seen through."""

    def __init__(self, device: torch.device):
        super().__init__()
        self.device = device

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return fetch(weight, self.device)


def offload(model: nn.Module, device: str | torch.device, *, min_bytes: int = MIN_BYTES) -> nn.Module:
    """Keep the large weights of `model` on the host and move the rest to `device`. Changes the model and returns it.

    Weights of embeddings stay on the device: of these, a few rows are used. Weights that modules share are fetched by each of them.
    For inference: a weight that needs a gradient is refused; so is one that wraps others (a DTensor). The way back is
    `onload(model, device)`.
    """
    target = torch.device(device)
    if any(isinstance(module, _Fetched) for module in model.modules()):
        raise OptionError(f"{type(model).__name__} is offloaded already.", fix="df.onload(model, device) first, to offload it anew")
    owners = [(module, name) for module in model.modules() for name, p in module.named_parameters(recurse=False)
              if not isinstance(module, nn.Embedding) and p.numel() * p.element_size() >= min_bytes]  # fmt: skip
    if not owners:
        raise OptionError(
            f"no weight of {type(model).__name__} has {min_bytes:,} bytes or more.", why="nothing would be offloaded",
            fix="pass a smaller min_bytes, or leave the model as it is")  # fmt: skip
    large = {id(module._parameters[name]) for module, name in owners}
    trained = [name for name, p in model.named_parameters() if id(p) in large and p.requires_grad]
    if trained and torch.is_grad_enabled():
        raise OptionError(
            f"{len(trained)} weights need gradients: {', '.join(trained[:3])}.", why="offloaded weights are for inference",
            fix="model.requires_grad_(False) first, or call it under torch.no_grad()")  # fmt: skip
    wrapped = [name for name, p in model.named_parameters() if id(p) in large and is_traceable_wrapper_subclass(p.data)]
    if wrapped:
        raise OptionError(
            f"{len(wrapped)} weights wrap other tensors: {', '.join(wrapped[:3])} ({type(model.get_parameter(wrapped[0]).data).__name__}).",
            why="a fetch copies a plain tensor, and whoever divided the model looks for its own",
            fix="offload a model whose ranks hold plain shards")  # fmt: skip
    for parameter in model.parameters():
        if id(parameter) in large:
            on_host = parameter.data.cpu()
            parameter.data = on_host.pin_memory() if target.type == "cuda" else on_host
        else:
            parameter.data = parameter.data.to(target)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(target)
    for module, name in owners:
        parametrize.register_parametrization(module, name, _Fetched(target), unsafe=True)
    return model


def onload(model: nn.Module, device: str | torch.device) -> nn.Module:
    """All weights on `device` again, and nothing fetched."""
    for module in list(model.modules()):
        if parametrize.is_parametrized(module):
            for name, seen in list(module.parametrizations.items()):  # type: ignore[union-attr, operator]
                if any(isinstance(step, _Fetched) for step in seen):
                    parametrize.remove_parametrizations(module, name, leave_parametrized=False)
    return model.to(device)
