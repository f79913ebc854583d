"""The records that every phase reads and writes: frozen, ordered, printable.

    Value   a tensor that crosses an op boundary           layers.0.attn:0  f32[s0,16,64]  batch axis 0
    Op      one schedulable unit                           layers.0.attn  compute  reads x  writes layers.0.attn:0
    Part    rows [lo/of, hi/of) of the batch               1/2        3:8/17        (nothing for the whole batch)
    Flow    the ops in program order, their values and what depends on what
    Plan    streams, steps (launch, record, wait) in host order, and which values share memory

Nothing here imports torch. `dynaflow.text` prints plans and parses them back.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from math import gcd
from typing import Any, Iterable, Mapping, NamedTuple

from dynaflow.errors import OptionError

KINDS = ("compute", "memory", "network", "copy")

# The stream that the caller's own work is on. It exists in every plan: steps start after it, and it continues after them.
CALLER = "caller"

# The event that the caller's stream records before the first step.
START = "start"


class Part(NamedTuple):
    """Rows [lo/of, hi/of) of the batch. Of B rows it holds [B*lo//of, B*hi//of): parts that tile, tile for every B."""

    lo: int
    hi: int
    of: int

    def bounds(self, batch_size: int) -> tuple[int, int]:
        return batch_size * self.lo // self.of, batch_size * self.hi // self.of

    @property
    def is_whole(self) -> bool:
        return self.lo == 0 and self.hi == self.of

    @property
    def lowest_terms(self) -> Part:
        """The same rows with the smallest numbers: 2:4/4 is 1/2."""
        divisor = gcd(self.lo, self.hi, self.of)
        return Part(self.lo // divisor, self.hi // divisor, self.of // divisor)

    def __str__(self) -> str:
        if self.is_whole:
            return "" if self.of == 1 else f"0:{self.of}/{self.of}"
        return f"{self.lo}/{self.of}" if self.hi == self.lo + 1 else f"{self.lo}:{self.hi}/{self.of}"


WHOLE = Part(0, 1, 1)


def equal_parts(num_parts: int) -> tuple[Part, ...]:
    return tuple(Part(k, k + 1, num_parts) for k in range(num_parts))


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that crosses an op boundary (or is an input, a parameter or an output of the flow)."""

    # unique; `op:index` for what an op makes, the argument's name for inputs
    name: str
    # sizes as expressions over the flow's symbols: ("s0", "16", "64")
    shape: tuple[str, ...]
    # torch's name without the prefix: "float32"
    dtype: str
    # bytes as an expression over the flow's symbols; a multiple of the batch size where `axis` is not None
    nbytes: str
    # the dim that the batch is cut along; None: every part sees the whole value
    axis: int | None
    # "input" and "param" come from the caller, "temp" lives in the arena, "output" goes to the caller, "piece" lies in its home
    role: str
    # values with the same storage are the same memory (aliased inputs); mostly the value's own name
    storage: str
    # of a piece: the "temp" or "output" whose memory it lies in, beside the home's other pieces and over none of them, each row of it
    # in the same row of the home (whoever makes the flow vouches for that); empty: it has memory of its own
    home: str = ""


@dataclass(frozen=True, slots=True)
class Op:
    """One schedulable unit. What it touches is complete: values read, values made, values changed in place, tokens used."""

    name: str
    # one of KINDS
    kind: str
    # values read
    reads: tuple[str, ...]
    # values made
    writes: tuple[str, ...]
    # values changed in place
    mutates: tuple[str, ...] = ()
    # tokens: "rng" and state that a split rule names (users keep program order, parts that of their rows), "group:<name>" (users are
    # ordered, in any order that all ranks share)
    uses: tuple[str, ...] = ()
    # why it must run over the whole batch; empty when it may be split
    unsplittable: str = ""
    # the module it came from, for people
    module: str = ""


def is_state(token: str) -> bool:
    """Whether a token is one that a split rule names, none of the engine's own."""
    return token not in ("rng", CALLER) and not token.startswith("group:")


class Access(NamedTuple):
    """One op's touch of one storage. `by_rows`: a part touches its own rows only."""

    storage: int
    by_rows: bool
    is_write: bool


class Edge(NamedTuple):
    """Op `before` must finish before op `after`: row by row, or (not by_rows) all parts before any."""

    before: int
    after: int
    by_rows: bool


NOMINAL_BATCH, NOMINAL_SIZE = 64, 128


@dataclass(frozen=True)
class Flow:
    """The partitioned graph: ops in program order."""

    name: str
    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    # values handed to the caller, in order (a value may appear twice)
    outputs: tuple[str, ...]
    # symbols that mean the batch size, and all symbols
    batch: tuple[str, ...] = ()
    symbols: tuple[str, ...] = ()
    # state (a glob over tokens) that a part touches in its own rows only: so says the caller, of calls that are cut in one way
    apart: str = ""

    @cached_property
    def value(self) -> dict[str, Value]:
        return {v.name: v for v in self.values}

    @cached_property
    def index(self) -> dict[str, int]:
        return {op.name: i for i, op in enumerate(self.ops)}

    def op(self, name: str) -> Op:
        return self.ops[self.index[name]]

    @cached_property
    def nominal_sizes(self) -> dict[str, int]:
        """Stand-ins for sizes: what is decided once for all sizes must not depend on those of the first call."""
        return {s: NOMINAL_BATCH if s in self.batch else NOMINAL_SIZE for s in self.symbols}

    @cached_property
    def pieces(self) -> dict[str, tuple[str, ...]]:
        """Home -> its pieces."""
        table: dict[str, tuple[str, ...]] = {}
        for v in self.values:
            if v.home:
                table[v.home] = (*table.get(v.home, ()), v.name)
        return table

    def home(self, name: str) -> str:
        """The value in whose memory this one lies: a piece's home, any other value itself."""
        return self.value[name].home or name

    @cached_property
    def home_storage(self) -> tuple[int, ...]:
        """Per storage: that of the memory it lies in. A piece's is its home's; any other's, and a token's, is itself."""
        table = list(range(len(self.storages)))
        for name, pieces in self.pieces.items():
            for piece in pieces:
                table[self.storage_index[self.value[piece].storage]] = self.storage_index[self.value[name].storage]
        return tuple(table)

    @cached_property
    def storages(self) -> tuple[str, ...]:
        """Storages and tokens, in order of first appearance."""
        names = dict.fromkeys(v.storage for v in self.values)
        names.update(dict.fromkeys(token for op in self.ops for token in op.uses))
        return tuple(names)

    @cached_property
    def storage_index(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.storages)}

    @cached_property
    def accesses(self) -> tuple[tuple[Access, ...], ...]:
        """Per op: every storage touched, once; a write covers a read. Aliased storages are never touched by rows.

        Who touches a piece touches its storage alone. Who touches a home touches the storages of all its pieces and the home's own,
        which stands for what no piece covers: so it conflicts with whoever touches any of them, and two pieces never conflict.
        """
        num_views: dict[str, int] = {}
        for v in self.values:
            num_views[v.storage] = num_views.get(v.storage, 0) + 1
        table = []
        for op in self.ops:
            touched: dict[int, Access] = {}

            def touch(name: str, is_write: bool, has_rows: bool = True) -> None:
                v = self.value[name]
                s = self.storage_index[v.storage]
                by_rows = not op.unsplittable and v.axis is not None and num_views[v.storage] == 1 and has_rows
                old = touched.get(s)
                touched[s] = Access(s, by_rows and (old is None or old.by_rows), is_write or (old is not None and old.is_write))
                for piece in self.pieces.get(name, ()):
                    touch(piece, is_write, v.axis is not None)

            for name in op.reads:
                touch(name, False)
            for name in (*op.mutates, *op.writes):
                touch(name, True)
            for token in op.uses:
                s = self.storage_index[token]
                by_rows = bool(self.apart) and is_state(token) and fnmatchcase(token, self.apart) and not op.unsplittable
                touched[s] = Access(s, by_rows, True)
            table.append(tuple(touched.values()))
        return tuple(table)

    @cached_property
    def conflicts(self) -> tuple[tuple[Access, ...], ...]:
        """`accesses` without the storages that no op writes: those can be read in any order."""
        written = {a.storage for accesses in self.accesses for a in accesses if a.is_write}
        return tuple(tuple(a for a in accesses if a.storage in written) for accesses in self.accesses)

    @cached_property
    def temps(self) -> tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]:
        """Per op: the arena's values that it makes, and those that it reads or changes. Of a piece: its home."""
        temp = {v.name: v.name for v in self.values if v.role == "temp"}
        temp.update({piece: name for name, pieces in self.pieces.items() if name in temp for piece in pieces})
        return tuple(
            (tuple(temp[v] for v in op.writes if v in temp), tuple(temp[v] for v in (*op.reads, *op.mutates) if v in temp))
            for op in self.ops
        )

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        """Program order over conflicting accesses, without what is already implied by a write in between.

        Tokens of process groups make no edge: their users may run in any order, as long as it is one order.
        """
        last_write: dict[int, tuple[int, bool]] = {}
        reads_since: dict[int, list[tuple[int, bool]]] = {}
        free_order = {self.storage_index[t] for op in self.ops for t in op.uses if t.startswith("group:")}
        edges: dict[tuple[int, int], bool] = {}

        def edge(before: int, after: int, by_rows: bool) -> None:
            edges[before, after] = edges.get((before, after), True) and by_rows

        for i, accesses in enumerate(self.conflicts):
            for s, by_rows, is_write in accesses:
                if s in free_order:
                    continue
                if s in last_write:
                    j, rows = last_write[s]
                    edge(j, i, rows and by_rows)
                if is_write:
                    for j, rows in reads_since.pop(s, ()):
                        if j != i:
                            edge(j, i, rows and by_rows)
                    last_write[s] = (i, by_rows)
                else:
                    reads_since.setdefault(s, []).append((i, by_rows))
        return tuple(Edge(a, b, rows) for (a, b), rows in edges.items())

    @cached_property
    def fingerprint(self) -> str:
        """Eight hex digits over everything a plan depends on; the same in every process."""
        # without pieces, and without state that is apart, it is what it was before there were any
        text = repr((self.values, self.ops, self.outputs, self.batch, self.symbols)).replace(", home=''", "") + self.apart
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    @property
    def label(self) -> str:
        return f"{self.name}.{self.fingerprint}"


@dataclass(frozen=True, slots=True)
class Stream:
    name: str
    # lower runs first, as in CUDA
    priority: int = 0
    # how many SMs it gets for itself; None: it shares those that no other stream of the plan has for itself
    sms: int | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """One op on one part on a stream; or several as one unit: fused (one part, run in the order of `calls`), or one function in the
    place of several (`replace`, over any parts)."""

    calls: tuple[tuple[str, Part], ...]
    stream: str
    # qualified name of the function that stands in for the calls
    replace: str = ""
    # file:line of the strategy, for errors; no part of the plan's identity
    where: str = field(default="", compare=False)
    # numbers of launches that must be over before it although nothing else orders them; `synchronise` makes waits of them
    after: tuple[int, ...] = field(default=(), compare=False)

    @property
    def is_group(self) -> bool:
        """Whether several calls run as one: what is made and used inside alone then needs no memory of the plan's."""
        return len(self.calls) > 1 or bool(self.replace)

    @property
    def label(self) -> str:
        """For people: `attn 0/2`; fused ops by the first and the last of them, `attn..mlp 0/2`; `pkg.fn[ar 0/2, norm 0/2]`."""
        if self.replace:
            return f"{self.replace}[{', '.join(f'{op} {part}'.rstrip() for op, part in self.calls)}]"
        (first, part), (last, _) = self.calls[0], self.calls[-1]
        return f"{first if len(self.calls) == 1 else f'{first}..{last}'} {part}".rstrip()


@dataclass(frozen=True, slots=True)
class Record:
    event: str
    stream: str


@dataclass(frozen=True, slots=True)
class Wait:
    event: str
    stream: str


Step = Launch | Record | Wait


@dataclass(frozen=True)
class Plan:
    """What will run, in host order. Immutable; `str(plan)` and `Plan.parse` are inverse."""

    # label of the flow it belongs to
    flow: str
    streams: tuple[Stream, ...]
    steps: tuple[Step, ...]
    # (value, slot): values of one slot share memory, one after the other; values without a slot do not live in the arena
    slots: tuple[tuple[str, int], ...] = ()
    # values without a slot that leave their launch: each stays in the memory in which its op returned it
    loose: tuple[str, ...] = field(default=(), kw_only=True)
    # what the strategy read from its context: ("batch_size >= 64",)
    context: tuple[str, ...] = ()
    # why this plan is sequential; empty when a strategy made it
    reason: str = ""
    # how many rows its parts 0/n, 1/n, ... have in each call: numbers, tags, and -1 for the rest; empty: parts are shares of the batch
    rows: tuple[str, ...] = field(default=(), kw_only=True)

    @property
    def launches(self) -> tuple[Launch, ...]:
        return tuple(s for s in self.steps if type(s) is Launch)

    @property
    def waits(self) -> tuple[Wait, ...]:
        return tuple(s for s in self.steps if type(s) is Wait)

    @property
    def parts(self) -> tuple[Part, ...]:
        """Distinct parts that are launched, without the whole batch, in order of first use."""
        seen = dict.fromkeys(part for launch in self.launches for _, part in launch.calls)
        return tuple(part for part in seen if not part.is_whole)

    def serialised(self) -> Plan:
        """The same launches (fused ones too), parts and replacements on the caller's stream: the reference for bit-equality."""
        steps = tuple(replace(s, stream=CALLER) for s in self.launches)
        return replace(self, streams=(), steps=steps)

    def __str__(self) -> str:
        from dynaflow import text

        return text.print_plan(self)

    @staticmethod
    def parse(source: str) -> Plan:
        from dynaflow import text

        if not isinstance(source, str):
            raise OptionError(f"Plan.parse reads text, not a {type(source).__name__}.", fix="Plan.load(path) reads a file")
        return text.parse_plan(source)

    def save(self, path: Any) -> None:
        with open(path, "w", encoding="utf-8") as file:
            file.write(str(self))

    @staticmethod
    def load(path: Any) -> Plan:
        with open(path, encoding="utf-8") as file:
            return Plan.parse(file.read())

    def grid(self) -> str:
        from dynaflow.view.grid import grid

        return grid(self)

    def diff(self, other: Plan) -> str:
        from dynaflow.view.diff import diff

        if not isinstance(other, Plan):
            raise OptionError(f"Plan.diff got a {type(other).__name__}.", fix="Plan.parse(text) makes a plan of a text")
        return diff(self, other)


def check_kinds(call: str, flow: Any, plan: Any) -> None:
    """Who is given a plan and its flow says so where one is something else, or stands in the other's place."""
    if not (isinstance(flow, Flow) and isinstance(plan, Plan)):
        raise OptionError(
            f"{call}: the flow is a {type(flow).__name__}, and the plan is a {type(plan).__name__}.",
            fix="give them in this order; df.explain(...) has .flow and .plan, df.Plan.parse(text) makes a plan of a text")  # fmt: skip


# ---------------------------------------------------------------------------- sizes

# what a size expression may call
SIZE_FUNCTIONS: dict[str, Any] = {"max": max, "min": min, "abs": abs, "int": int, "float": float, "sqrt": math.sqrt}
_SCOPE: dict[str, Any] = {"__builtins__": {}, **SIZE_FUNCTIONS}


@lru_cache(maxsize=65536)
def _code(expression: str) -> Any:
    return compile(expression, "<size>", "eval")


def evaluate(expression: str, sizes: Mapping[str, Any]) -> Any:
    """The number that a size expression means under `sizes`. Expressions are Python over the flow's symbols."""
    if expression.isdigit():
        return int(expression)
    return eval(_code(expression), _SCOPE, sizes)  # noqa: S307 (expressions are ours, printed from shapes)


def tiles(parts: Iterable[Part]) -> bool:
    """Whether the parts cover the batch exactly once, for every batch size."""
    at = (0, 1)
    for part in sorted(parts, key=lambda p: p.lo / p.of):
        if part.lo * at[1] != at[0] * part.of or part.hi <= part.lo or part.hi > part.of:
            return False
        at = (part.hi, part.of)
    return at[0] == at[1]


def overlap(a: Part, b: Part) -> bool:
    """Whether two parts have rows in common."""
    return a.lo * b.of < b.hi * a.of and b.lo * a.of < a.hi * b.of


def covers(parts: Iterable[Part], part: Part) -> bool:
    """Whether every row of `part` is in one of `parts`."""
    lo, of = part.lo, part.of
    for p in sorted(parts, key=lambda p: p.lo / p.of):
        if p.lo * of > lo * p.of:
            break
        if p.hi * of > lo * p.of:
            lo, of = p.hi, p.of
    return lo * part.of >= part.hi * of
