"""diffusers: `df.optimize(pipe, strategy=...)`, then `pipe(...)` as before. The denoiser is compiled: the transformer, or the UNet.

A pipeline with classifier-free guidance that batches both halves is split between them by `df.TwoBatch()`. One with a ControlNet calls it
first, and the UNet with its results, which the UNet's encoder has no need of. So that both are branches of one graph, the ControlNet's call
is put off until the UNet's:

    pipe     | controlnet(...) -> Later, Later     unet(..., Later, Later)
    captured |                                     Controlled(unet, controlnet)(...)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, Mapping

import torch
from torch.utils import _pytree as pytree

from dynaflow.capture import Compiled, compile, of
from dynaflow.errors import OptionError

if TYPE_CHECKING:
    from dynaflow.integrations import Optimized

DENOISERS = ("transformer", "transformer_2", "unet", "controlnet")
RESIDUALS = ("down_block_additional_residuals", "mid_block_additional_residual")


def models(target: Any) -> dict[str, torch.nn.Module]:
    components: Mapping[str, Any] | None = getattr(target, "components", None)
    if isinstance(target, torch.nn.Module) or components is None:
        return {"": target}
    found = {name: components[name] for name in DENOISERS if isinstance(components.get(name), torch.nn.Module)}
    if not found:
        raise OptionError(
            f"df.optimize finds no denoiser in this {type(target).__name__}.", why=f"its components: {', '.join(components)}",
            fix="give it the modules that do the work, one by one")  # fmt: skip
    return found


def attach(target: Any, optimized: Optimized, options: Mapping[str, Any]) -> None:
    unet, controlnet = getattr(target, "unet", None), getattr(target, "controlnet", None)
    if isinstance(target, torch.nn.Module) or unet is None or controlnet is None:
        return
    if not all(_is_own(module) for module in (unet, controlnet)):
        return  # somebody else's forward is in the way (a hook, a patch): each is compiled for itself
    joint = of(compile(Controlled(unet, controlnet), **options))
    optimized.parts.append(joint)
    optimized.set(controlnet, "forward", PutOff(vars(controlnet)["forward"]))
    optimized.set(unet, "forward", WithControl(vars(unet)["forward"], joint))


def _is_own(module: torch.nn.Module) -> bool:
    """Whether what is compiled is the class's own forward."""
    forward = vars(module).get("forward")
    return isinstance(forward, Compiled) and getattr(forward.model, "__func__", None) is type(module).forward


class Controlled(torch.nn.Module):
    """A UNet and the ControlNet whose results it takes: one call, one graph."""

    def __init__(self, unet: torch.nn.Module, controlnet: torch.nn.Module):
        super().__init__()
        self.unet, self.controlnet = unet, controlnet

    def forward(self, control: tuple[tuple[Any, ...], dict[str, Any]], *args: Any, **kwargs: Any) -> Any:
        # the classes' own: those of the objects are ours
        down, mid = type(self.controlnet).forward(self.controlnet, *control[0], **control[1])
        return type(self.unet).forward(self.unet, *args, **dict(zip(RESIDUALS, (down, mid))), **kwargs)


class Call:
    """A call that was put off. It is made at most once."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.function, self.args, self.kwargs = function, args, kwargs
        self.results: Any = None

    def made(self) -> Any:
        if self.results is None:
            self.results = self.function(*self.args, **self.kwargs)
        return self.results


class Later:
    """One result of a call that was put off. Whoever looks into it makes the call."""

    def __init__(self, call: Call, index: int):
        self.call, self.index = call, index

    def value(self) -> Any:
        return self.call.made()[self.index]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.value(), name)

    def __getitem__(self, index: Any) -> Any:
        return self.value()[index]

    def __iter__(self) -> Any:
        return iter(self.value())

    def __len__(self) -> int:
        return len(self.value())

    def __add__(self, other: Any) -> Any:
        return self.value() + now(other)

    def __mul__(self, other: Any) -> Any:
        return self.value() * now(other)

    __radd__, __rmul__ = __add__, __mul__

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*pytree.tree_map(now, args), **pytree.tree_map(now, kwargs or {}))


def now(thing: Any) -> Any:
    return thing.value() if isinstance(thing, Later) else thing


class PutOff:
    """A ControlNet's forward that returns what it will return."""

    def __init__(self, compiled: Callable[..., Any]):
        self.compiled = compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("return_dict", True) or kwargs.get("guess_mode"):
            return self.compiled(*args, **kwargs)  # the pipeline works on the results itself
        call = Call(self.compiled, args, kwargs)
        return Later(call, 0), Later(call, 1)


class WithControl:
    """A UNet's forward that makes the ControlNet's call too, where it was put off."""

    def __init__(self, compiled: Callable[..., Any], joint: Callable[..., Any]):
        self.compiled, self.joint = compiled, joint

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        down, mid = (kwargs.get(name) for name in RESIDUALS)
        if isinstance(down, Later) and isinstance(mid, Later) and down.call is mid.call and down.call.results is None:
            others = {name: value for name, value in kwargs.items() if name not in RESIDUALS}
            return self.joint((down.call.args, down.call.kwargs), *args, **others)
        return self.compiled(*pytree.tree_map(now, args), **pytree.tree_map(now, kwargs))
