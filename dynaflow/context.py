"""What a strategy may look at, and the record of what it did look at.

A plan is valid wherever the strategy would have seen the same. So every look is written down as a predicate that holds:
`batch_size >= 64` for a comparison, `tag.phase == 'decode'` for a value. A strategy that only compares the batch size with
64 gets one plan for all sizes from 64 up. What is compared with another fact is written down so: `tag.num_prefill < batch_size`.
"""

from __future__ import annotations

import operator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Callable, Iterator, Mapping, Sequence

from dynaflow.errors import OptionError

_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
_OPPOSITE = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "=="}

_tags: ContextVar[Mapping[str, Any]] = ContextVar("dynaflow_tags", default=MappingProxyType({}))


@contextmanager
def context(**tags: Any) -> Iterator[None]:
    """Tags for the calls inside: `with df.context(phase="decode"): fast(x)`. Strategies read them as `flow.context.tags`; the planner
    reads one of them, `apart`."""
    for name, value in tags.items():
        if not _is_plain(value):
            raise OptionError(f"the tag {name} ({type(value).__name__}) cannot tell contexts apart.", fix="use strings, numbers or tuples")
    token = _tags.set({**_tags.get(), **tags})
    try:
        yield
    finally:
        _tags.reset(token)


def _is_plain(value: Any) -> bool:
    try:
        hash(value)
        return type(value == value) is bool
    except TypeError:
        return False


def current_tags() -> Mapping[str, Any]:
    return _tags.get()


@dataclass(frozen=True, slots=True)
class Fact:
    """What something was compared with, where that was no constant."""

    name: str

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Look:
    """One predicate that held when the strategy looked."""

    name: str
    compare: str
    value: Any

    def holds(self, facts: Mapping[str, Any]) -> bool:
        value = facts.get(self.value.name) if isinstance(self.value, Fact) else self.value
        try:
            return _COMPARE[self.compare](facts.get(self.name), value)
        except TypeError:  # a tag that is no number now: it did not look like that
            return False

    def __str__(self) -> str:
        return f"{self.name} {self.compare} {self.value!r}"


# the tag by which a caller vouches: (state, rows). Where this call is cut at these rows and nowhere else, parts touch nothing in common
# of the state of that name (a glob over what split rules' `uses=` names)
APART = "apart"


@dataclass(frozen=True, slots=True)
class ApartLook:
    """Whether the caller vouched for a cut that is made behind so many `rows` (`cuts_of`)."""

    rows: tuple[str, ...]
    # what it vouched for; empty: for nothing, or for another cut
    state: str
    name: str = f"tag.{APART}"

    def holds(self, facts: Mapping[str, Any]) -> bool:
        return state_apart(self.rows, facts) == self.state

    def __str__(self) -> str:
        return f"{self.name} at {' '.join(self.rows)} == {self.state!r}"


# in the order in which they were made
Looks = dict[Look | ApartLook, None]


def state_apart(rows: Sequence[str], facts: Mapping[str, Any]) -> str:
    """The state that parts of so many rows have nothing in common of; empty where nobody vouches for these very cuts."""
    match facts.get(f"tag.{APART}"):
        case (str(state), tuple(cuts)) if cuts == cuts_of(rows, facts):
            return state
    return ""


def cuts_of(rows: Sequence[str], facts: Mapping[str, Any]) -> tuple[int, ...]:
    """Where a call is cut whose parts have so many rows: each a number, a tag that counts them, or -1 (once) for the rest."""
    sizes = [int(n) if _is_number(n) else _count(n, facts.get(f"tag.{n}")) for n in rows]
    sizes[sizes.index(-1)] = facts["batch_size"] - (sum(sizes) + 1)
    return tuple(accumulate(sizes[:-1]))


def _is_number(row: str) -> bool:
    return row.removeprefix("-").isdecimal()


def _count(tag: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise OptionError(f"the tag {tag} is {value!r}.", why="it counts rows of the batch", fix=f"df.context({tag}=3), say")
    return value


class Size:
    """A number that remembers how it was looked at: comparisons as such, everything else as its exact value."""

    __slots__ = ("_name", "_value", "_looks")

    def __init__(self, name: str, value: int, looks: Looks):
        self._name, self._value, self._looks = name, value, looks

    def _compared(self, compare: str, other: Any) -> bool:
        held = _COMPARE[compare](self._value, other._value if isinstance(other, Size) else other)
        value = Fact(other._name) if isinstance(other, Size) else other
        self._looks[Look(self._name, compare if held else _OPPOSITE[compare], value)] = None
        return held

    def __lt__(self, other: Any) -> bool:
        return self._compared("<", other)

    def __le__(self, other: Any) -> bool:
        return self._compared("<=", other)

    def __gt__(self, other: Any) -> bool:
        return self._compared(">", other)

    def __ge__(self, other: Any) -> bool:
        return self._compared(">=", other)

    def __eq__(self, other: object) -> bool:
        return self._compared("==", other)

    def __ne__(self, other: object) -> bool:
        return self._compared("!=", other)

    def __index__(self) -> int:
        self._looks[Look(self._name, "==", self._value)] = None
        return self._value

    __int__ = __index__

    def __hash__(self) -> int:
        return hash(int(self))

    def __bool__(self) -> bool:
        return self._compared("!=", 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(int(self), name)

    def __repr__(self) -> str:
        return repr(int(self))

    def __format__(self, spec: str) -> str:
        return format(int(self), spec)


def _arithmetic(function: Callable[..., Any]) -> Any:
    def forward(self: Size, other: Any) -> Any:
        return function(int(self), int(other) if isinstance(other, Size) else other)

    def backward(self: Size, other: Any) -> Any:
        return function(other, int(self))

    return forward, backward


_BINARY: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "floordiv": operator.floordiv, "truediv": operator.truediv,
    "mod": operator.mod, "pow": operator.pow, "divmod": divmod, "and": operator.and_, "or": operator.or_, "xor": operator.xor,
    "lshift": operator.lshift, "rshift": operator.rshift,
}  # fmt: skip
for _name, _function in _BINARY.items():
    _forward, _backward = _arithmetic(_function)
    setattr(Size, f"__{_name}__", _forward)
    setattr(Size, f"__r{_name}__", _backward)
for _name in ("neg", "pos", "abs", "invert", "round", "trunc", "floor", "ceil", "float"):
    setattr(Size, f"__{_name}__", lambda self, *args, _name=_name: getattr(int, f"__{_name}__")(int(self), *args))


# the fact that lists the names of a group: "tag.*"
ALL = "*"


class _Facts(Mapping[str, Any]):
    """A mapping whose every look-up is written down."""

    def __init__(self, prefix: str, facts: Mapping[str, Any], looks: Looks):
        self._prefix, self._facts, self._looks = prefix, facts, looks

    def _look(self, key: str) -> Any:
        value = self._facts.get(self._prefix + key)
        self._looks[Look(self._prefix + key, "==", value)] = None
        return value

    def __getitem__(self, key: str) -> Any:
        value = self._look(key)
        if value is None:
            there = ", ".join(self._names()) or "none"
            raise KeyError(f"{key!r}: this call's {self._prefix.rstrip('.')}s are {there}")
        return value

    def get(self, key: str, default: Any = None) -> Any:
        value = self._look(key)
        return default if value is None else value

    def __contains__(self, key: object) -> bool:
        return self._look(str(key)) is not None

    def __iter__(self) -> Iterator[str]:
        names = self._names()
        self._look(ALL)  # that there were no others is a look, too
        for name in names:
            self._look(name)
        return iter(names)

    def _names(self) -> list[str]:
        names = sorted(name.removeprefix(self._prefix) for name in self._facts if name.startswith(self._prefix))
        return [name for name in names if name != ALL]

    def __len__(self) -> int:
        return len(list(iter(self)))


class Context:
    """`flow.context`: the facts of one call. `looks` is what the strategy read, the key of its plan.

    `batch_size`, `shapes[arg]`, `dtypes[arg]`, `device`, `needs_grad`, `tags[name]`, `count(name)`.
    """

    def __init__(self, facts: Mapping[str, Any]):
        self._facts = facts
        self._looks: Looks = {}
        self.shapes = _Facts("shape.", facts, self._looks)
        self.dtypes = _Facts("dtype.", facts, self._looks)
        self.tags = _Facts("tag.", facts, self._looks)

    @property
    def batch_size(self) -> Any:
        return Size("batch_size", self._facts["batch_size"], self._looks)

    @property
    def device(self) -> str:
        return self._exact("device")

    @property
    def needs_grad(self) -> bool:
        return self._exact("needs_grad")

    def count(self, tag: str) -> Any:
        """A tag that counts rows, as `batch_size` does: comparisons with it are looks, its value is one where it is used as a number.
        None where there is no such tag."""
        if self._facts.get(f"tag.{tag}") is None:
            return self.tags.get(tag)
        number = _count(tag, self._facts[f"tag.{tag}"])
        self._looks[Look(f"tag.{tag}", "!=", None)] = None
        return Size(f"tag.{tag}", number, self._looks)

    def state_apart(self, rows: tuple[str, ...]) -> str:
        state = state_apart(rows, self._facts)
        self._looks[ApartLook(rows, state)] = None
        return state

    def _exact(self, name: str) -> Any:
        self._looks[Look(name, "==", self._facts.get(name))] = None
        return self._facts.get(name)

    @property
    def looks(self) -> tuple[Look | ApartLook, ...]:
        return tuple(self._looks)
