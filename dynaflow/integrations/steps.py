"""Steps of a serving engine, in parts or as the engine has them.

A step is one call of the engine's model on the tokens of several requests, which lie request by request. An engine's own `Steps` stand
between it and its model: it calls `step` where it called the model, and hands over what the methods below say:

    why_whole   reasons of its own to leave a step alone         starts     where the step's requests begin
    in_parts    the call of `self.fast`, the model under a plan  tables     who reads and writes which blocks of its prefix cache
    whole       its own call of its model                        contexts   per part: what its model looks at beside arguments
                                                                 group      the ranks that run these steps together

Its ops that read or write a cache of its own name it (`uses=` of a split rule): parts then run it in the order of their rows, so that a
request may be cut inside, its later tokens reading what its earlier ones wrote. At the one cut between requests that prefill and those
that decode, parts may run side by side, where the engine says what requests have each for itself (`own_state`).

Promised:
1. A step that is too small costs two comparisons, and one that `why_whole` is against what that compares: nothing of its metadata is
   looked at.
2. Every step runs once. One that cannot be cut, or that the strategy gives up, runs as a whole; it is counted under its reason, and the
   next one is tried. One that runs under a plan without parts is not counted as split.
3. What holds for good (a mistake of the strategy's, a model that cannot be captured) is logged once; all later steps are whole ones.
4. Ranks decide alike: by what all of them know of the step and, under "auto", by times that they add up. Where one of them is missing,
   that is raised: what the others run is not known.
5. Cuts move to requests' first tokens (`requests.py`). None lies between a reader of the prefix cache and a writer that comes behind it.
6. Parts that run side by side have no reader on one side whose writer is on the other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch._dynamo.exc import TorchDynamoException

import dynaflow as df
from dynaflow.context import APART
from dynaflow.engine import Rows
from dynaflow.errors import BatchTooSmall, DynaFlowError, FellBack, RankMissing
from dynaflow.integrations.requests import place_cuts, readers_and_writers
from dynaflow.integrations.serving import Engine, Options
from dynaflow.integrations.step_trials import Kind, Trials, kind_of

# as a reason; how many they are changes from step to step
TOO_FEW = "fewer tokens than the strategy has parts for"


class Steps(ABC):
    # State (a glob over what its ops' `uses=` name) in which a request touches nothing but what is its own, and blocks of the prefix
    # cache that `tables` tells: no memory that its ops compute in. Empty: attentions of parts run one after the other, always.
    own_state = ""

    def __init__(self, engine: Engine, options: Options, model: Any, **reading: Any):
        """`reading`: how calls of the model are to be read and cut, df.compile's `batch=` and `partition=`."""
        self.engine, self.min_tokens = engine, options.min_tokens
        self.trials = Trials(engine.name, engine.log, self._added_up) if options.is_auto else None
        # why no further step is split: a process may have several engines, of which each has its own reasons
        self.refusal = ""
        # of the step that is being split: where its requests begin, parts that begin inside of one, and who reads what whom writes
        self._starts, self._num_cut = np.zeros(1, np.int64), 0
        self._shared: set[tuple[int, int]] | None = None
        self.fast = df.compile(
            model, strategy=options.strategy, compiler=options.compiler, runtime=options.runtime, strict=True, part_context=self.contexts,
            align=self._align, **reading,
        )  # fmt: skip
        name, where = type(options.strategy).__name__, ", where they are measured to be faster so" if options.is_auto else ""
        engine.log.info("dynaflow: steps of %d tokens or more run under %s%s", self.min_tokens, name, where)

    # -- what an engine hands over. `call`, `named`: the arguments of `step`, which are those of the engine's own call

    @abstractmethod
    def why_whole(self, *call: Any, **named: Any) -> str:
        """Why this step is left alone, from what is at hand; empty where it need not be. Only steps that are large enough come here."""

    @abstractmethod
    def starts(self) -> np.ndarray:
        """The first token of each request, and the end. The first that is asked of a step, and once."""

    @abstractmethod
    def tables(self) -> Iterable[tuple[np.ndarray, np.ndarray, int, int | None]]:
        """Of its prefix cache: tokens computed per request, blocks per request, tokens per block, and the window where attention slides, as
        `readers_and_writers` takes them.
        None where there is no such cache, or where a request is never admitted on blocks that its own step computes."""

    @abstractmethod
    def in_parts(self, num_tokens: int, *call: Any, **named: Any) -> Any:
        """Call `self.fast` with the first `num_tokens` tokens: the others pad the step."""

    @abstractmethod
    def whole(self, *call: Any, **named: Any) -> Any:
        """The engine's own call."""

    @abstractmethod
    def contexts(self, parts: Sequence[Rows]) -> Sequence[AbstractContextManager[Any]]:
        """One per part, entered around its launches. `requests_of` says whose tokens a part has."""

    @abstractmethod
    def group(self) -> Any:
        """The process group, on the host, of the ranks that run these steps together; None where this one is alone."""

    # -- what it gets

    def step(self, num_tokens: int, *call: Any, **named: Any) -> Any:
        """In the place of the engine's call. `num_tokens`: without those that pad the step."""
        stats = self.engine.stats
        reason = self.refusal or (
            f"fewer than {self.min_tokens} tokens" if num_tokens < self.min_tokens else self.why_whole(*call, **named))  # fmt: skip
        stats.steps += 1
        kind = None
        if not reason:
            self._starts, self._shared = self.starts(), None
            tags = tags_of(self._starts, num_tokens)
            if self.trials is not None:
                kind = kind_of(tags["phase"], num_tokens, tags["mostly"])
                reason = "" if self.trials.wants_parts(kind) else "auto: no faster in parts, or its turn as a whole"
        if not reason:
            try:
                with self._timed(kind, num_tokens, True), df.context(**tags, **self._apart(tags)):
                    split_before = df.stats(self.fast).split_calls
                    result = self.in_parts(num_tokens, *call, **named)
                    if df.stats(self.fast).split_calls > split_before:
                        stats.split_steps += 1
                        stats.cut_requests += self._num_cut
                    else:
                        stats.uncut_steps += 1
                    return result
            except (FellBack, BatchTooSmall) as error:
                reason = TOO_FEW if isinstance(error, BatchTooSmall) else str(error).splitlines()[0]
                if self.trials is not None and kind is not None:
                    self.trials.refused(kind)
            except RankMissing:
                raise
            except (DynaFlowError, TorchDynamoException) as error:
                reason = self.refusal = stats.refusal = str(error).splitlines()[0]
                self.engine.log.error("dynaflow leaves this model to %s from here on: %s", self.engine.name, error)
        stats.fallbacks[reason] += 1
        with self._timed(kind, num_tokens, False):
            return self.whole(*call, **named)

    def requests_of(self, part: Rows) -> slice:
        """The requests that a part has tokens of; the first and the last of them may be cut."""
        first = int(np.searchsorted(self._starts, part.start, side="right")) - 1
        return slice(first, int(np.searchsorted(self._starts, part.stop)))

    def _apart(self, tags: Mapping[str, Any]) -> dict[str, Any]:
        """The tag that vouches for the cut between phases: no reader is on its one side and the writer on the other."""
        if not self.own_state or tags["phase"] != "mixed" or tags["first"] == "neither":
            return {}
        cut = tags["num_prefill"] if tags["first"] == "prefill" else int(self._starts[-1]) - tags["num_prefill"]
        is_behind = self._starts >= cut
        return {} if any(is_behind[r] != is_behind[w] for r, w in self._pairs()) else {APART: (self.own_state, (cut,))}

    def _pairs(self) -> set[tuple[int, int]]:
        if self._shared is None:
            pairs = (readers_and_writers(computed, self._starts, blocks, size, window) for computed, blocks, size, window in self.tables())
            self._shared = set[tuple[int, int]]().union(*pairs)
        return self._shared

    def _align(self, cuts: Sequence[int]) -> list[int]:
        moved = place_cuts(cuts, self._starts, {(r, w) for r, w in self._pairs() if r < w})
        self._num_cut = int((~np.isin(moved, self._starts)).sum())
        return moved

    def _timed(self, kind: Kind | None, num_tokens: int, in_parts: bool) -> AbstractContextManager[None]:
        return nullcontext() if self.trials is None or kind is None else self.trials.timed(kind, num_tokens, in_parts)

    def _added_up(self, numbers: list[float]) -> list[float]:
        group = self.group()
        if group is None:
            return numbers
        total = torch.tensor(numbers, dtype=torch.float64)
        torch.distributed.all_reduce(total, group=group)
        return total.tolist()


def tags_of(starts: np.ndarray, num_tokens: int) -> dict[str, Any]:
    """What a strategy is told of a step: its phase, the requests that make one token, and what most of its tokens are. And where one cut
    parts the phases: `first` is the one that comes first, `num_prefill` has the tokens on the side that prefills. On the other side are
    requests of one token alone, and at least half of all of them; "neither" where they lie so that no cut does that."""
    is_longer = np.diff(starts) != 1
    num_decoding = int((~is_longer).sum())
    phase = "prefill" if not num_decoding else "decode" if not is_longer.any() else "mixed"
    mostly = "decode" if 2 * num_decoding >= num_tokens else "prefill"
    before, behind = (int(side.argmax()) if side.any() else num_decoding for side in (is_longer, is_longer[::-1]))
    alone = max(before, behind)
    first = "neither" if 2 * alone < num_decoding else "decode" if before and before >= behind else "prefill"
    return {"phase": phase, "num_decoding": num_decoding, "mostly": mostly, "first": first, "num_prefill": num_tokens - alone}
