"""What the user asked for, checked once; and what happened, counted."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import threading
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, Callable, Iterable, Mapping, Sequence

import torch
from torch._inductor import list_mode_options
from torch._inductor.cpp_builder import get_cpp_compiler

from dynaflow import strategies
from dynaflow.annotate import Rule, read_rules
from dynaflow.errors import OptionError
from dynaflow.runtime.fake import ORDERS
from dynaflow.runtime.graphs import Pool
from dynaflow.strategies import Auto
from dynaflow.strategy import Strategy

_NAMED: dict[str, type[Strategy]] = {
    "sequential": strategies.Sequential, "two_batch": strategies.TwoBatch, "prefill_decode": strategies.PrefillDecode,
    "nano_batch": strategies.NanoBatch, "branches": strategies.Branches,
}  # fmt: skip
COMPILERS = ("auto", "inductor", "eager")
# torch.compile's
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
# which dim of which argument is the batch: one for all, one per argument, or a function from a call's arguments to one of these
Batch = int | Mapping[str, int] | Callable[[Mapping[str, Any]], int | Mapping[str, int] | None] | None
# sizes that `Stats.measured` keeps
MAX_MEASURED = 64
RUNTIMES = ("auto", "cuda", "graph", "threads", "serial", "fake")


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def why_uncompiled(device: torch.device) -> str:
    """Why Inductor cannot compile for a device; empty where it can, as far as that can be told before it tries."""
    if device.type == "cuda":
        return "" if has_triton() else "there is no Triton"
    if device.type != "cpu":
        return f"nothing is compiled for {device.type}"
    try:
        get_cpp_compiler()  # which torch keeps
    except (RuntimeError, OSError) as error:
        return f"there is no C++ compiler: {error}"
    return ""


@dataclass(frozen=True)
class Measured:
    """What `never_slower=True` measured for one size of a graph, or found on disk."""

    graph: str
    sizes: tuple[Any, ...]
    # per plan, which option the first, second, ... `flow.any_of` of the strategy gave; 0 for those that are not named
    options: tuple[tuple[int, ...], ...]
    # microseconds per call
    plans_us: tuple[float, ...]
    sequential_us: float
    # which of the plans is kept; None: the sequential one
    winner: int | None

    @property
    def chosen(self) -> tuple[int, ...]:
        """The options of the plan that is kept."""
        return () if self.winner is None else self.options[self.winner]

    def __str__(self) -> str:
        return f"{', '.join(f'{us:,.0f} us' for us in self.plans_us)}; sequential {self.sequential_us:,.0f} us"


@dataclass
class Stats:
    """Counters of one compiled callable (`df.stats(fast)`) or of the process (`df.stats()`)."""

    captures: int = 0
    # ops of the graph that was captured last, and those of them that run over the whole batch
    num_ops: int = 0
    num_unsplittable: int = 0
    # strategies run
    plans: int = 0
    # plans bound to new sizes
    binds: int = 0
    # calls of captured graphs; those that ran under a plan; and those of them whose batch was split
    calls: int = 0
    planned_calls: int = 0
    split_calls: int = 0
    # launches issued, and those of them that ran on a part of the batch
    num_launches: int = 0
    num_part_launches: int = 0
    # the most that a plan that was bound is planned to hold, beside parameters and inputs
    peak_bytes: int = 0
    # reason -> calls that ran the sequential graph because of it
    fallbacks: Counter[str] = field(default_factory=Counter)
    # with never_slower=True: what was measured last, the newest behind (of several callables, one after the other)
    measured: list[Measured] = field(default_factory=list)


def summed(several: Sequence[Stats]) -> Stats:
    total = Stats()
    for stats in several:
        for name, value in vars(stats).items():
            before = getattr(total, name)
            setattr(total, name, max(before, value) if name == "peak_bytes" else before + value)
    return total


TOTAL = Stats()
_counting = threading.Lock()


@dataclass
class Settings:
    strategy: Strategy
    partition: str | Sequence[Rule | str] = "auto"
    batch: Batch = None
    strict: bool = False
    runtime: str = "auto"
    compiler: str = "auto"
    mode: str = "default"
    buckets: str | Sequence[int] | None = None
    borrow: bool = False
    fixed_weights: bool = False
    # a plan is kept where it is measured to be faster than the sequential one
    never_slower: bool = False
    # a plan of kernels that is chosen may hold this many times what Inductor's own order would; None: see dynaflow/trials.py
    max_memory: float | None = None
    part_context: Callable[[Sequence[Any]], Sequence[Any]] | None = None
    align: Callable[[Sequence[int]], Sequence[int]] | None = None
    name: str = "flow"
    # names of the model's arguments, in order
    parameters: tuple[str, ...] = ()
    stats: Stats = field(default_factory=Stats)
    # graphs of df.explain and df.check, in order of capture
    graphs: list[Any] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)
    # memory that all recordings share
    pool: Pool = field(default_factory=Pool)

    def wants_inductor(self, device: torch.device) -> bool:
        is_asked = self.compiler == "inductor" or bool(self.inductor_options) or self.has_kernels(device)
        return is_asked or (self.compiler == "auto" and device.type == "cuda" and has_triton())

    def has_kernels(self, device: torch.device) -> bool:
        """Whether the ops to be planned are the kernels that Inductor makes of the graph: where that is asked for, and where nothing is
        and Inductor can compile."""
        return self.partition == "kernels" or (self.is_open and not why_uncompiled(device))

    @property
    def inductor_options(self) -> dict[str, Any]:
        """What the mode says of Inductor. Whether anything is recorded in a CUDA Graph is ours to say."""
        return {name: value for name, value in list_mode_options(self.mode).items() if name != "triton.cudagraphs"}

    @property
    def is_open(self) -> bool:
        """Whether it was left to us what to do."""
        return self.partition == "auto" and self.runtime == "auto" and self.compiler != "eager" and isinstance(self.strategy, Auto)

    def count(self, **amounts: int) -> None:
        with _counting:
            for stats in (self.stats, TOTAL):
                for name, amount in amounts.items():
                    setattr(stats, name, getattr(stats, name) + amount)

    def note_peak(self, peak_bytes: int) -> None:
        with _counting:
            for stats in (self.stats, TOTAL):
                stats.peak_bytes = max(stats.peak_bytes, peak_bytes)

    def note_measured(self, measured: Measured) -> None:
        with _counting:
            for stats in (self.stats, TOTAL):
                stats.measured.append(measured)
                del stats.measured[:-MAX_MEASURED]

    def count_call(self) -> None:
        with _counting:  # spelt out: this is on the path of every call
            self.stats.calls += 1
            TOTAL.calls += 1

    def count_planned(self, num_launches: int, num_part_launches: int, num_calls: int = 0) -> None:
        """`num_calls`: 1 where the call itself is not counted yet."""
        mine, total = self.stats, TOTAL
        with _counting:
            mine.calls += num_calls
            total.calls += num_calls
            mine.planned_calls += 1
            total.planned_calls += 1
            mine.num_launches += num_launches
            total.num_launches += num_launches
            if num_part_launches:
                mine.split_calls += 1
                total.split_calls += 1
                mine.num_part_launches += num_part_launches
                total.num_part_launches += num_part_launches

    def count_fallback(self, reason: str) -> bool:
        """Returns whether it is the first of its kind."""
        with _counting:
            self.stats.fallbacks[reason] += 1
            TOTAL.fallbacks[reason] += 1
            return self.stats.fallbacks[reason] == 1

    def fresh(self) -> Settings:
        """The same wishes for another model."""
        return replace(self, stats=Stats(), graphs=[], lock=threading.RLock(), pool=Pool())


def read_strategy(strategy: Any) -> Strategy:
    if strategy is None or strategy == "auto":
        return Auto()
    if isinstance(strategy, str) and ":" in strategy:
        strategy = _imported(strategy)
    if isinstance(strategy, str):
        if strategy not in _NAMED:
            raise OptionError(
                f"unknown strategy {strategy!r}.", fix=f"use 'auto', {', '.join(map(repr, _NAMED))}, 'module:Class' or a df.Strategy")
        return _NAMED[strategy]()
    if isinstance(strategy, type) and issubclass(strategy, Strategy):
        try:
            strategy = strategy()
        except TypeError as error:
            raise OptionError(
                f"strategy {strategy.__name__} cannot be made of its name alone.", why=str(error),
                fix="give it a strategy that is made, or name a subclass whose __init__ takes nothing") from error  # fmt: skip
    if not callable(getattr(strategy, "schedule", None)):
        raise OptionError(f"{strategy!r} is no strategy.", why="it has no schedule(flow)", fix="subclass df.Strategy")
    return strategy


def _imported(path: str) -> Any:
    """`package.module:Class`, for settings that are text: an environment variable, a command line."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise OptionError(f"there is no strategy {path!r}.", why=str(error), fix="name it as 'package.module:Class'") from error


def read_settings(**options: Any) -> Settings:
    """Settings from keyword arguments; unknown or impossible ones are refused by name."""
    known = {"strategy", "partition", "batch", "strict", "runtime", "compiler", "mode", "buckets", "borrow", "fixed_weights",
             "never_slower", "max_memory", "part_context", "align", "name"}  # fmt: skip
    unknown = sorted(set(options) - known)
    if unknown:
        raise OptionError(f"unknown option {', '.join(map(repr, unknown))}.", fix=f"known options: {', '.join(sorted(known))}")
    options["strategy"] = read_strategy(options.get("strategy"))
    partition = options.get("partition", "auto")
    if isinstance(partition, Iterable) and not isinstance(partition, str):
        options["partition"] = tuple(partition)  # it is read for every graph
    settings = Settings(**options)
    if settings.partition != "kernels":
        read_rules(settings.partition)
    if type(settings.strict) is not bool:
        raise OptionError(f"strict={settings.strict!r} is neither True nor False.", fix="strict=True raises instead of falling back")
    runtime, colon, order = settings.runtime.partition(":") if isinstance(settings.runtime, str) else ("", "", "")
    is_ordered = runtime == "fake" and (order.isdigit() or order in ORDERS)
    if runtime not in RUNTIMES or (colon and not is_ordered):
        raise OptionError(
            f"unknown runtime {settings.runtime!r}.", fix=f"use one of {', '.join(RUNTIMES)} ('fake:lazy', 'fake:7' choose an order)")
    if settings.compiler not in COMPILERS:
        raise OptionError(f"unknown compiler {settings.compiler!r}.", fix=f"use one of {', '.join(COMPILERS)}")
    if settings.mode not in MODES:
        raise OptionError(f"unknown mode {settings.mode!r}.", fix=f"use one of {', '.join(MODES)}")
    if settings.mode != "default" and settings.compiler == "eager":
        raise OptionError(f"mode={settings.mode!r} needs a compiler.", why="it is a mode of Inductor", fix="leave compiler='eager' out")
    has_graphs = settings.runtime == "graph" or settings.is_open or (settings.partition == "kernels" and settings.runtime == "auto")
    if settings.mode == "reduce-overhead" and not has_graphs:
        raise OptionError(
            "mode='reduce-overhead' is about CUDA Graphs, which runtime= decides on here.", fix="runtime='graph', and leave mode out")
    if settings.partition == "kernels" and settings.compiler == "eager":
        raise OptionError("partition='kernels' needs a compiler.", why="kernels are what Inductor makes", fix="leave compiler='eager' out")
    factor = settings.max_memory
    if factor is not None and (isinstance(factor, bool) or not isinstance(factor, (int, float)) or not factor >= 1):
        raise OptionError(f"max_memory={settings.max_memory!r} is no factor.", fix="give a number from 1 up, such as 1.25")
    buckets = settings.buckets
    if buckets is not None and settings.runtime != "graph":
        raise OptionError("buckets= is about recordings.", why=f"runtime={settings.runtime!r} records nothing", fix="add runtime='graph'")
    is_list = isinstance(buckets, Sequence) and not isinstance(buckets, str) and all(type(n) is int and n > 0 for n in buckets)
    if buckets not in (None, "powers") and not (is_list and buckets):
        raise OptionError(f"buckets={buckets!r} names no batch sizes.", fix="give 'powers' (of two) or a list of batch sizes")
    if type(settings.borrow) is not bool:
        raise OptionError(
            f"borrow={settings.borrow!r} is neither True nor False.", fix="borrow=True, where outputs are used before the next call")
    if settings.borrow and settings.runtime != "graph":
        raise OptionError("borrow=True is about recordings.", why="without them outputs are the caller's", fix="add runtime='graph'")
    if type(settings.fixed_weights) is not bool:
        raise OptionError(
            f"fixed_weights={settings.fixed_weights!r} is neither True nor False.", fix="fixed_weights=True, where nobody moves weights")
    if settings.fixed_weights and settings.runtime not in ("auto", "graph"):
        raise OptionError(
            "fixed_weights=True is about recordings.", why=f"runtime={settings.runtime!r} records nothing", fix="add runtime='graph'")
    if type(settings.never_slower) is not bool:
        raise OptionError(f"never_slower={settings.never_slower!r} is neither True nor False.", fix="never_slower=True lets it be measured")
    callers = next((name for name in ("part_context", "align") if getattr(settings, name) is not None), "")
    if settings.never_slower and (callers or settings.runtime.startswith("fake")):
        what = f"{callers}=" if callers else f"runtime={settings.runtime!r}"
        why = "it is the caller's, of one call: calls cannot be repeated" if callers else "it is no way to be fast"
        raise OptionError(f"never_slower=True cannot be had with {what}.", why=why, fix="leave one of them out")
    if not callable(settings.batch):
        check_batch(settings.batch)
    if settings.part_context is not None and not callable(settings.part_context):
        raise OptionError("part_context must be a function of the parts.", fix="part_context=lambda parts: [manager for part in parts]")
    if settings.align is not None and not callable(settings.align):
        raise OptionError("align must be a function of the rows that are cut at.", fix="align=lambda rows: [nearest(r) for r in rows]")
    if settings.align is not None and settings.runtime == "graph":
        raise OptionError(
            "align= moves cuts from call to call, and runtime='graph' records them.", why="each move would be a recording",
            fix="leave one of them out")  # fmt: skip
    return settings


def check_batch(batch: Any) -> int | Mapping[str, int] | None:
    dims = list(batch.values()) if isinstance(batch, Mapping) else [0 if batch is None else batch]
    if not all(type(d) is int and d >= 0 for d in dims):
        raise OptionError(f"batch={batch!r} names no dim.", fix="give a dim counted from 0, or a mapping from argument to dim")
    return batch
