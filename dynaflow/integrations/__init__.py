"""Systems that DynaFlow works inside of, a file each; and `df.optimize`, one call for the models of all of them.

A file that `df.optimize` asks (it has the name of the system's package, and is imported when an object of that package is given) has

    models(target)                      the modules that do the work, by name
    options(module)                     where needed: how calls of one are to be read (the batch)
    attach(holder, optimized, options)  where needed: what else must change, by `optimized.set`; for each of the modules, then for target

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

from dynaflow.capture import Compiled, compile, of
from dynaflow.errors import OptionError
from dynaflow.settings import TOTAL, Stats, summed

# packages whose classes have a file here
PACKAGES = ("diffusers", "peft", "transformers")
# the attribute in which df.optimize writes down what it changed
OPTIMIZED = "_dynaflow_optimized"


@dataclass
class Optimized:
    """What df.optimize changed about a module, or about a pipeline beside its modules. It is an attribute of that: whoever holds the module
    later (another wrapper, another pipeline) finds it. A copy takes a copy along; what was saved and loaded is as it was before."""

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


def optimize(target: Any, **options: Any) -> Any:
    """Compile, in place, what does the work in `target`: a module, a model of Transformers or PEFT, a pipeline of diffusers.

    The options are df.compile's. `df.restore(target)` undoes it, `df.stats(target)` says what happened. Returns `target`.
    """
    models = _models(target)
    for name, module in models.items():
        _check(name, module)
    records = {id(holder): (holder, Optimized()) for holder in (*models.values(), target)}
    try:
        for module in models.values():
            # a hook of accelerate (offloading) is a forward around the module's own
            attribute = "_old_forward" if "_old_forward" in vars(module) else "forward"
            read: Any = getattr(_system(module), "options", None)
            fast = compile(getattr(module, attribute), **{**(read(module) if read is not None else {}), **options})
            record = records[id(module)][1]
            record.parts.append(fast)
            record.set(module, attribute, fast)
        for holder, record in records.values():
            if (attach := getattr(_system(holder), "attach", None)) is not None:
                attach(holder, record, options)
    except BaseException:
        _undo([record for _, record in records.values()])
        raise
    for holder, record in records.values():
        if record.changes:
            vars(holder)[OPTIMIZED] = record
    return target


def restore(target: Any) -> Any:
    """Undo df.optimize, of all that does the work in `target`. Returns `target`."""
    records = _records(target)
    if not records:
        raise OptionError(f"this {type(target).__name__} was not given to df.optimize.", fix="df.optimize(it) first")
    _undo([record for _, record in records])
    for holder, _ in records:
        del vars(holder)[OPTIMIZED]
    return target


def stats(fast: Any = None) -> Stats:
    """Counters of what df.compile returned, or of all that df.optimize compiled in a model or pipeline; without an argument, of the
    whole process."""
    if fast is None:
        return TOTAL
    if records := _records(fast):
        return summed([part.settings.stats for _, record in records for part in record.parts])
    return of(fast).settings.stats


def _undo(records: list[Optimized]) -> None:
    """All or nothing."""
    changes = [change for record in records for change in record.changes]
    last = {(id(owner), name): (owner, name, value) for owner, name, _, value in changes}
    for owner, name, value in last.values():
        if vars(owner).get(name) is not value:
            raise OptionError(
                f"the {name} of this {type(owner).__name__} was replaced since df.optimize.",
                why="a hook, another wrapper, or the pipeline that it was optimized in", fix="undo that first: what came last goes first")
    for owner, name, before, _ in reversed(changes):
        if before is None:
            vars(owner).pop(name, None)
        else:
            vars(owner)[name] = before


def _records(target: Any) -> list[tuple[Any, Optimized]]:
    """By whom they are held: modules that do the work in `target`, and then `target`."""
    system = _system(target)
    modules = _models(target).values() if system is not None else ()
    holders = {id(holder): holder for holder in (*modules, target)}.values()
    found = [(holder, getattr(holder, "__dict__", {}).get(OPTIMIZED)) for holder in holders]
    return [(holder, record) for holder, record in found if isinstance(record, Optimized)]


def _models(target: Any) -> dict[str, torch.nn.Module]:
    system = _system(target)
    return {"": target} if system is None else system.models(target)


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
    if (record := vars(module).get(OPTIMIZED)) is not None and record.parts:
        raise OptionError(f"this {type(module).__name__} is optimized already.", where=where, fix="df.restore(it) first")
    if hasattr(type(module), "_dynaflow") or isinstance(vars(module).get("forward"), Compiled):
        raise OptionError(f"this {type(module).__name__} is compiled by DynaFlow already.", where=where, fix="compile it once")
