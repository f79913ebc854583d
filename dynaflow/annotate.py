"""Where operators begin and end, as the user says it.

    df.SplitModule("*.mlp")                              every module whose name matches is one op
    df.SplitModule(LlamaAttention)                       ... or whose class is this one
    df.SplitFunc(dist.all_reduce, kind="network")        every call of a function, torch op or custom op is one op
    with df.mark("router", kind="memory"): ...           the lines inside, in model code that one may touch

`splittable=True` says that rows of the batch are independent although the engine cannot see it (a routed expert layer);
`splittable=False` keeps an op whole. `recordable=False` keeps an op out of recordings (runtime="graph"): it is called anew on every call,
as one must that reads or changes something on the host (a serving engine's attention).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any, Callable, ContextManager, Iterable

import torch
import torch.fx.traceback

from dynaflow.errors import OptionError, PartitionError
from dynaflow.ir import KINDS

MARK = "dynaflow_mark"
# beside MARK, under recordable=False; a mark inside keeps it
UNRECORDABLE = "dynaflow_unrecordable"


def _check(kind: str | None, recordable: bool, splittable: bool | None = None) -> None:
    if kind is not None and kind not in KINDS:
        raise OptionError(f"unknown kind {kind!r}.", fix=f"use one of {', '.join(KINDS)}")
    if not isinstance(recordable, bool):
        raise OptionError(f"recordable is {recordable!r}.", fix="recordable=False, or leave it out")
    if splittable is not None and not isinstance(splittable, bool):
        raise OptionError(
            f"splittable is {splittable!r}.", fix="True vouches that rows are independent, False keeps an op whole, None looks")


def _as_written(rule: Any) -> str:
    """As the user wrote it: without what is as it is by default."""
    first, *others = fields(rule)
    given = getattr(rule, first.name)
    name = repr(given) if isinstance(given, str) else getattr(given, "__name__", str(given))
    settings = [f"{f.name}={getattr(rule, f.name)!r}" for f in others if getattr(rule, f.name) != f.default]
    return f"{type(rule).__name__}({', '.join([name, *settings])})"


@dataclass(frozen=True, repr=False)
class SplitModule:
    """Every module of a class, or whose qualified name matches a glob, is one op. Where a rule matches a module and others inside of it,
    it means the outermost; where several rules match, the innermost of theirs wins."""

    module: str | type
    kind: str | None = None
    splittable: bool | None = None
    recordable: bool = True

    def __post_init__(self) -> None:
        _check(self.kind, self.recordable, self.splittable)
        if not isinstance(self.module, (str, type)):
            kind = type(self.module).__name__
            raise PartitionError(
                f"SplitModule takes a class or a name pattern, not a {kind} that is made.",
                fix=f"SplitModule('*.mlp'), or SplitModule({kind})")  # fmt: skip

    __repr__ = _as_written

    def matches(self, name: str, cls: Any) -> bool:
        if isinstance(self.module, str):
            return fnmatchcase(name, self.module) or fnmatchcase(f".{name}", self.module)
        if isinstance(cls, str):
            return cls.rpartition(".")[2] == self.module.__name__
        return isinstance(cls, type) and issubclass(cls, self.module)


@dataclass(frozen=True, repr=False)
class SplitFunc:
    """Every call of a Python function, a torch function, a torch op (`torch.ops...`) or a collective is one op."""

    function: Callable[..., Any]
    kind: str | None = None
    splittable: bool | None = None
    recordable: bool = True
    # what the op is called, behind the module that calls the function; the function's own name, unless said otherwise
    name: str | None = None

    def __post_init__(self) -> None:
        _check(self.kind, self.recordable, self.splittable)
        if not callable(self.function):
            raise PartitionError(f"SplitFunc takes a function or an op, not {self.function!r}.", fix="SplitFunc(torch.matmul)")

    __repr__ = _as_written


Rule = SplitModule | SplitFunc


def read_rules(partition: Any) -> tuple[bool, tuple[Rule, ...]]:
    """(whether what no rule claims is cut as the engine sees fit, the rules) of a `partition=`; refused by name where it is neither."""
    is_one = isinstance(partition, (str, SplitModule, SplitFunc)) or not isinstance(partition, Iterable)
    given = (partition,) if is_one else tuple(partition)
    for rule in given:
        if not isinstance(rule, (SplitModule, SplitFunc)) and rule != "auto":
            raise OptionError(
                f"partition got {rule!r}.",
                fix='use "auto", df.SplitModule(...), df.SplitFunc(...) or a list of them; or "kernels", alone')  # fmt: skip
    return "auto" in given, tuple(rule for rule in given if not isinstance(rule, str))


def mark(name: str, kind: str | None = None, recordable: bool = True) -> ContextManager[Any]:
    """The ops inside form one op with this name. Outside of a capture it does nothing."""
    _check(kind, recordable)
    said = {MARK: f"{name}|{kind or ''}"}
    return torch.fx.traceback.annotate(said if recordable else {**said, UNRECORDABLE: "yes"})
