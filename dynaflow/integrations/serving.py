"""A serving engine that DynaFlow works inside of: what is asked for, what is said, what is counted. Nothing here knows which engine it is.

An engine's own file says where its hooks are, and what only it can know:

1. It makes one `Engine` per process, and asks `read_options` what its configuration wants. None: nothing of the engine is touched.
2. Why a model cannot be cut at all is a table of its own, of which `first_that_holds` is given to `Engine.refuse`.
3. It names its ops (`ops.py`) and puts `Steps` of its own between itself and its model (`steps.py`).
4. Under the strategy "branches" steps run as they are. It shows what it compiles, and when it captures, to `Pieces` (`pieces.py`).

Promised: off until asked for; an unknown option is refused by name; what holds for good is logged once, in the engine's own log, and
stands in `Stats.refusal`; ranks that are configured alike are refused alike.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dynaflow.errors import OptionError
from dynaflow.settings import read_settings, read_strategy
from dynaflow.strategies import NanoFlow
from dynaflow.strategy import Strategy

DEFAULTS = {"strategy": "two_batch", "min_tokens": 512, "compiler": "auto", "runtime": "auto"}

# why "auto" does not even try: parts of a step would only read the weights twice
NOTHING_TO_HIDE = "auto: one rank has no collectives to hide behind compute"


@dataclass
class Stats:
    """Plain data: an engine sends it from its workers."""

    steps: int = 0
    split_steps: int = 0
    # under a plan of the strategy's that has no parts
    uncut_steps: int = 0
    # parts of split steps that begin inside of a request
    cut_requests: int = 0
    # reason -> steps that ran as the engine has them
    fallbacks: Counter[str] = field(default_factory=Counter)
    # why the model is left to the engine for good
    refusal: str = ""
    # under "branches": pieces that the engine compiled, and those that run under a plan in its CUDA Graphs; fallbacks are of these
    regions: int = 0
    planned_regions: int = 0


class Engine:
    """A serving engine, in this process."""

    def __init__(self, name: str, shown: logging.Logger):
        """`name`: what reasons and the log call it. `shown`: its logger, whose handlers show what the engine says."""
        self.name, self.stats, self._shown = name, Stats(), shown
        self.log = shown.getChild("dynaflow")

    def refuse(self, reason: str) -> None:
        """Leave the model to the engine for good. An empty reason is none: the model is not refused, or no longer."""
        self.stats.refusal = reason
        if reason:
            self.log.warning("dynaflow leaves this model to %s: %s", self.name, reason)

    def show_log(self) -> None:
        """What DynaFlow says of captures, plans and fallbacks stands in the engine's log."""
        ours = logging.getLogger("dynaflow")
        if not ours.handlers:
            ours.handlers, ours.propagate = list(self._shown.handlers), False
            ours.setLevel(self._shown.level)


@dataclass(frozen=True)
class Options:
    """What was asked for."""

    strategy: Strategy
    # steps of fewer are left to the engine
    min_tokens: int
    # df.compile's
    compiler: str
    runtime: str
    # the strategy where it is measured to be faster, and nothing else
    is_auto: bool
    # plans of kernels in the engine's own CUDA Graphs, steps as they are
    is_branches: bool


def read_options(given: Any, where: str) -> Options | None:
    """From the engine's configuration (a strategy, options by name, or None) before DYNAFLOW_<OPTION> of the environment, where one that
    is empty is none; None where neither asks. `where` it stands in the configuration, for an error.

    What is wrong with them is said here, before anything is loaded."""
    variables = {name: value for name in DEFAULTS if (value := os.environ.get(f"DYNAFLOW_{name.upper()}"))}
    if given is None and "strategy" not in variables:
        return None
    by_name = {"strategy": given} if isinstance(given, str) else {} if given is None else given
    if not isinstance(by_name, Mapping):
        raise OptionError(f"{where} is {given!r}.", fix=f"a strategy's name, or a dict of {', '.join(DEFAULTS)}; leave it out for none")
    if unknown := sorted(set(by_name) - set(DEFAULTS)):
        raise OptionError(f"{where} has {unknown[0]!r}.", fix=f"use {', '.join(DEFAULTS)}")
    options = {**DEFAULTS, **variables, **by_name}
    is_auto, is_branches = options["strategy"] in (None, "auto"), options["strategy"] == "branches"
    strategy = NanoFlow() if is_auto else read_strategy(options["strategy"])
    read_settings(compiler=options["compiler"], runtime=options["runtime"])
    return Options(strategy, _read_number(options["min_tokens"]), options["compiler"], options["runtime"], is_auto, is_branches)


def _read_number(min_tokens: Any) -> int:
    """A variable's text, too. `True` is a number to Python."""
    if isinstance(min_tokens, bool) or not str(min_tokens).isdecimal():
        raise OptionError(f"min_tokens (DYNAFLOW_MIN_TOKENS) is {min_tokens!r}.", fix="a number of tokens, 0 or more")
    return int(min_tokens)


def first_that_holds(against: Mapping[str, Any]) -> str:
    """Of reasons, each with whether it holds; empty where none does."""
    return next((reason for reason, holds in against.items() if holds), "")
