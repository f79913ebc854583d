"""Systems that DynaFlow works inside of, a file each; and `df.optimize`, one call for the models of all of them.

A file that `df.optimize` asks (it has the name of the system's package, and is imported when an object of that package is given) has

    models(target)                      the modules that do the work, by name
    options(module)                     where needed: how calls of one are to be read (the batch)
    attach(target, optimized, options)  where needed: what else must change, by `optimized.set`

All changes are attributes of the caller's objects, written down, and undone by `df.restore`. The other files are imported by their systems
(a plugin) or by the user; what a serving engine's file does, and what it finds here, is in `serving.py`.
"""

from __future__ import annotations

import copy
import importlib
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from dynaflow.capture import OPTIMIZED, Compiled, compile
from dynaflow.errors import OptionError

# packages whose classes have a file here
PACKAGES = ("diffusers", "peft", "transformers")


@dataclass
class Optimized:
    """What df.optimize changed. A copy of the target takes a copy of it along; one that was saved and loaded is as it was before."""

    # (object, attribute, what stood there (None: nothing), what stands there now), in order
    changes: list[tuple[Any, str, Any, Any]] = field(default_factory=list)
    # all that is compiled
    parts: list[Compiled] = field(default_factory=list)

    def __deepcopy__(self, memo: dict[int, Any]) -> Optimized:
        return Optimized(copy.deepcopy(self.changes, memo), copy.deepcopy(self.parts, memo))

    def __reduce__(self) -> Any:
        return Optimized, ()

    def set(self, owner: Any, name: str, value: Any) -> None:
        self.changes.append((owner, name, vars(owner).get(name), value))
        vars(owner)[name] = value

    def undo(self) -> None:
        last = {(id(owner), name): (owner, name, value) for owner, name, _, value in self.changes}
        for owner, name, value in last.values():
            if vars(owner).get(name) is not value:
                raise OptionError(
                    f"the {name} of this {type(owner).__name__} was replaced since df.optimize.", why="a hook, or another wrapper",
                    fix="remove that first: what came last goes first")  # fmt: skip
        while self.changes:
            owner, name, before, _ = self.changes.pop()
            if before is None:
                vars(owner).pop(name, None)
            else:
                vars(owner)[name] = before


def optimize(target: Any, **options: Any) -> Any:
    """Compile, in place, what does the work in `target`: a module, a model of Transformers or PEFT, a pipeline of diffusers.

    The options are df.compile's. `df.restore(target)` undoes it, `df.stats(target)` says what happened. Returns `target`.
    """
    record = getattr(target, "__dict__", {}).get(OPTIMIZED)
    if record is not None and record.parts:
        raise OptionError(f"this {type(target).__name__} is optimized already.", fix="df.restore(it) first")
    system = _system(target)
    models: dict[str, torch.nn.Module] = system.models(target) if system is not None else {"": target}
    for name, module in models.items():
        _check(name, module)
    optimized = Optimized()
    try:
        for module in models.values():
            # a hook of accelerate (offloading) is a forward around the module's own
            attribute = "_old_forward" if "_old_forward" in vars(module) else "forward"
            read: Any = getattr(_system(module), "options", None)
            fast = compile(getattr(module, attribute), **{**(read(module) if read is not None else {}), **options})
            optimized.parts.append(fast)
            optimized.set(module, attribute, fast)
        for part in dict.fromkeys((*models.values(), target)):
            if (attach := getattr(_system(part), "attach", None)) is not None:
                attach(part, optimized, options)
    except BaseException:
        optimized.undo()
        raise
    vars(target)[OPTIMIZED] = optimized
    return target


def restore(target: Any) -> Any:
    """Undo df.optimize. Returns `target`."""
    _record(target).undo()
    del vars(target)[OPTIMIZED]
    return target


def _record(target: Any) -> Optimized:
    record = getattr(target, "__dict__", {}).get(OPTIMIZED)
    if not isinstance(record, Optimized):
        raise OptionError(f"this {type(target).__name__} was not given to df.optimize.", fix="df.optimize(it) first")
    return record


def _system(target: Any) -> ModuleType | None:
    for cls in type(target).__mro__:
        package = cls.__module__.partition(".")[0]
        if package in PACKAGES:
            return importlib.import_module(f"dynaflow.integrations.{package}")
    return None


def _check(name: str, module: Any) -> None:
    where = name or "df.optimize(target)"
    if not isinstance(module, torch.nn.Module):
        raise OptionError(
            f"{type(module).__name__} is nothing that df.optimize knows.", where=where,
            why="it is no nn.Module, and no pipeline of diffusers", fix="give it the modules that do the work, one by one")  # fmt: skip
    if isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None:
        raise OptionError(
            f"this {type(module).__name__} is compiled by torch.compile already.", where=where, why="one capture cannot hold the other",
            fix="give df.optimize the model itself, or torch.compile backend='dynaflow'")  # fmt: skip
    if hasattr(type(module), "_dynaflow") or isinstance(vars(module).get("forward"), Compiled):
        raise OptionError(f"this {type(module).__name__} is compiled by DynaFlow already.", where=where, fix="compile it once")
