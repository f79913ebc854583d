"""Steps of a serving engine in parts, or as it has them: whichever is faster, from steps that have to be run anyway.

1. Steps are of kinds: the phase (of a mixed one, what most of its tokens are), and the tokens up to a factor of two. Of a kind, the first
   few take turns: in parts, as a whole, in parts ... Nothing is run twice, nothing is run for its time alone.
2. A step's time is that between two marks on the device's stream, per token. The first one each way does not count: it compiles.
3. Each step in parts is compared with the whole one that comes behind it: what changes from step to step changes for both. When there are
   enough such pairs, all ranks add up their medians, and so come to the same verdict. It stands for good.
4. A step that cannot be run in parts (too few tokens, no place to cut) is run as a whole. Where that is all there is, the kind is given up.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

# pairs of steps that count
NUM_STEPS = 7
# what parts must take at most, of what the whole takes
WORTH = 0.98

# phase, and the tokens' number of binary digits
Kind = tuple[str, int]


class Trials:
    def __init__(
        self, engine: str, log: logging.Logger, added_up: Callable[[list[float]], list[float]], mark: Callable[[], Any] | None = None
    ):
        """`engine`: its name; `log`: the one that it shows. `added_up`: over all ranks. `mark`: a point in time; the device's, unless
        said otherwise."""
        self._engine, self._log, self._added_up, self._mark = engine, log, added_up, mark or _on_device
        # per kind that is undecided: (tokens, begin, end) of steps in parts, and of whole ones
        self._steps: dict[Kind, tuple[list[Any], list[Any]]] = {}
        # per kind: steps that could not be run in parts
        self._refused: Counter[Kind] = Counter()
        self.in_parts: dict[Kind, bool] = {}

    def wants_parts(self, kind: Kind) -> bool:
        """Whether the next step of this kind is to be run in parts."""
        if kind not in self.in_parts:
            parts, whole = self._steps.setdefault(kind, ([], []))
            if min(len(parts), len(whole)) <= NUM_STEPS:
                return len(parts) <= len(whole)
            self._decide(kind, parts, whole)
        return self.in_parts[kind]

    @contextmanager
    def timed(self, kind: Kind, num_tokens: int, in_parts: bool) -> Iterator[None]:
        """Around a step. One that fails does not count."""
        begin = self._mark() if kind in self._steps else None
        yield
        if begin is not None:
            self._steps[kind][not in_parts].append((num_tokens, begin, self._mark()))

    def refused(self, kind: Kind) -> None:
        """A step of this kind could not be run in parts. Others may: a verdict stands, and turns go on."""
        self._refused[kind] += 1
        if kind in self._steps and not self._steps[kind][0] and self._refused[kind] > NUM_STEPS:
            del self._steps[kind]
            self.in_parts[kind] = False

    def _decide(self, kind: Kind, parts: list[Any], whole: list[Any]) -> None:
        us = [[_us(begin, end) / tokens for tokens, begin, end in steps[1:]] for steps in (parts, whole)]
        share = statistics.median(a / b for a, b in zip(*us))
        parts_us, whole_us, shares, num_ranks = self._added_up([*map(statistics.median, us), share, 1.0])
        self.in_parts[kind] = shares < WORTH * num_ranks
        del self._steps[kind]
        phase, digits = kind
        verdict = "in parts" if self.in_parts[kind] else f"left to {self._engine}"
        self._log.info("dynaflow: auto: %s steps of %d to %d tokens take %.2f us per token in parts, %.2f as %s has them: %s", phase,
                       2 ** (digits - 1), 2**digits - 1, parts_us / num_ranks, whole_us / num_ranks, self._engine, verdict)  # fmt: skip


def kind_of(phase: str, num_tokens: int, mostly: str = "") -> Kind:
    return f"{phase}, mostly {mostly}," if phase == "mixed" and mostly else phase, num_tokens.bit_length()


def _on_device() -> Any:
    if not torch.cuda.is_initialized():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _us(begin: Any, end: Any) -> float:
    if isinstance(begin, float):
        return (end - begin) * 1e6
    end.synchronize()
    return begin.elapsed_time(end) * 1e3
