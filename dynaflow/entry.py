"""The way into a captured function: what torch.compile does on every call, less what a call of ours has no need of.

torch.compile's own wrapper looks, on every call, whether it runs inside an export, a trace, another compilation, or under a stance. We
look for the same in a few cheap steps, and where all is as usual go straight to Dynamo: guards, then the captured code. Where it is not,
or inside of other compiled code, torch.compile's own wrapper takes over.
"""

from __future__ import annotations

import re
import types
from typing import Any, Callable

import torch
from torch._C._dynamo.eval_frame import set_eval_frame
from torch._C._functorch import get_dynamic_layer_stack_depth, pop_dynamic_layer_stack_and_undo_to_depth
from torch._dynamo import eval_frame
from torch._dynamo.convert_frame import compile_lock

# Captures of one function, where nobody said how many Dynamo may make of it: adapters, caches, kinds of steps have one each, and Dynamo's
# own limit is used up by three adapters of a model that generates.
MAX_CAPTURES = 32
_DYNAMOS_LIMIT = 8

_is_fx_tracing = torch.fx._symbolic_trace.is_fx_symbolic_tracing
_is_jit_tracing = torch._C._is_tracing
_tracing = torch._guards.TracingContext.try_get


class Entry:
    """A function that Dynamo captures from, under a backend."""

    def __init__(self, function: types.FunctionType, backend: Callable[..., Any]):
        self.function = function
        context: Any = torch._dynamo.optimize(backend=backend)
        if getattr(context, "callback", None) is not None:
            context.callback = _Capturing(context.callback)
        # torch.compile's own wrapper
        self.wrapper: Callable[..., Any] = context(function)
        # None where Dynamo is switched off
        self._callback = getattr(context, "callback", None)
        # one of them tags modules with their generation, once for all; others (compiled autograd) belong around every call
        self._is_plain = self._callback is not None and len(context.enter_exit_hooks) <= 1

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """For calls after the first."""
        stance = eval_frame._stance
        if (not self._is_plain or stance.stance != "default" or stance.backend is not None or stance.skip_guard_eval_unsafe
                or _is_fx_tracing() or _is_jit_tracing() or _tracing() is not None or torch.compiler.is_exporting()):  # fmt: skip
            return self.wrapper(*args, **kwargs)
        depth = get_dynamic_layer_stack_depth()
        prior = set_eval_frame(None)
        try:  # an interrupt may come between any two steps: from here on what was there before is put back
            if prior is None:
                set_eval_frame(self._callback)
                return self.function(*args, **kwargs)
        finally:
            set_eval_frame(prior)
            # what the captured code pushed before it failed
            pop_dynamic_layer_stack_and_undo_to_depth(depth)
        return self.wrapper(*args, **kwargs)

    def forget(self) -> None:
        torch._dynamo.reset_code(self.function.__code__)


class _Capturing:
    """Dynamo's callback, which captures, under a limit of ours."""

    def __init__(self, callback: Any):
        self._callback = callback
        # where Dynamo looks for the backend: as deep as it was
        self._torchdynamo_orig_backend = callback._torchdynamo_orig_backend

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        config = torch._dynamo.config
        with compile_lock:  # settings are the process's
            limit = config.recompile_limit
            config.recompile_limit = MAX_CAPTURES if limit == _DYNAMOS_LIMIT else limit
            try:
                return self._callback(*args, **kwargs)
            finally:
                config.recompile_limit = limit


def entry_of(model: Any, is_forward: bool) -> types.FunctionType:
    """A function with a code object of its own around `model`: Dynamo keeps its captures, and their limit, per code object; and, under
    the code's name, which sizes have changed: those of another model are none of this one's business."""
    module_class = torch.nn.Module

    # A function without any op is left alone by Dynamo, for all arguments and for good, unless it has a module class as a local.
    def call(*args: Any, **kwargs: Any) -> Any:
        kept = module_class  # noqa: F841
        return model(*args, **kwargs)

    def forward(*args: Any, **kwargs: Any) -> Any:
        kept = module_class  # noqa: F841
        return model.forward(*args, **kwargs)

    wanted = forward if is_forward else call
    name = f"{wanted.__name__}_{_identity(model)}"
    return types.FunctionType(wanted.__code__.replace(co_name=name), wanted.__globals__, name, None, wanted.__closure__)


def _identity(model: Any) -> str:
    """A model's class, a function's place: what torch.compile would tell models apart by."""
    named = type(model) if isinstance(model, torch.nn.Module) else model
    code = getattr(model, "__code__", None)
    words = [getattr(named, "__module__", None), getattr(named, "__qualname__", type(model).__qualname__), code and code.co_firstlineno]
    return re.sub(r"\W+", "_", "_".join(str(word) for word in words if word is not None))
