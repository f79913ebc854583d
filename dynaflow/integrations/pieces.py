"""Pieces of a model that somebody else compiles with Inductor and captures in CUDA Graphs of his own: regions with plans in his graphs.

An engine hands over what it compiles, by compiling inside of `taken`, and when it captures, by capturing inside of `opened`; it runs each
size once, in there, before it captures it.

Promised:
1. Every piece that is compiled, or found in a cache, becomes a region (`dynaflow/region.py`). Equal layers share one.
2. In the run before a capture, the region measures plans of its kernels against Inductor's order, both as recordings, and keeps the faster
   one; near sizes take what was found. What an op reads on the host tells cases apart, as sizes do.
3. In a capture, the region issues its plan into the engine's graph. All other calls run Inductor's own callable, untouched.
4. A piece that cannot be planned runs as it is, said and counted; where there is none at all, the model is refused.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch._inductor.output_code import CompiledFxGraph

from dynaflow.inductor.accumulating import Accumulates, apart
from dynaflow.inductor.entries import wrapped_by
from dynaflow.inductor.structure import NotCompiled
from dynaflow.integrations.serving import Engine
from dynaflow.region import Region
from dynaflow.settings import Settings
from dynaflow.strategies import Auto
from dynaflow.way import Boxed


class Pieces:
    """What an engine compiled in this process."""

    def __init__(self, engine: Engine, name: str, why_none: str):
        """`name`: regions' names begin with it. `why_none`: what it means if nothing was compiled."""
        self.engine, self.name, self.why_none = engine, name, why_none
        # nothing is recorded here: the engine does that
        self.settings = Settings(Auto(), partition="kernels", runtime="cuda", name=name)
        self.regions: list[Region] = []
        # the engine captures, or runs what it is about to capture
        self.is_open = False

    def taken(self, ops: Mapping[str, Accumulates]) -> AbstractContextManager[None]:
        """Around what the engine compiles. `ops`: those that are taken apart, see `dynaflow/inductor/accumulating.py`."""
        return wrapped_by(functools.partial(self._region, ops))

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Around the engine's captures. Of a model that is refused, no piece is looked at."""
        if self.engine.stats.refusal:
            yield
            return
        self.is_open = True
        try:
            yield
        finally:
            self.is_open = False
            self.sum_up()

    def _region(self, ops: Mapping[str, Accumulates], compiled: CompiledFxGraph, is_backward: bool, static: Sequence[int]) -> Boxed:
        """In the place of Inductor's own callable (`wrapped_by`). Engines ask a callable for its code: it has to be a function."""
        plain = compiled.current_callable
        assert plain is not None, "Inductor has compiled it"
        name = f"{self.name}.{hashlib.sha256(compiled.source_code.encode()).hexdigest()[:8]}"
        try:
            text = apart(compiled.source_code, ops)
            made = Region(name, compiled, self.settings, static, is_backward, in_captures=True, text=text)
        except NotCompiled as error:
            self.settings.count_fallback(str(error))
            self.engine.log.warning("dynaflow: a piece is left to %s: %s", self.engine.name, error)
            return plain
        if all(region.module is not made.module for region in self.regions):  # equal layers have equal code
            self.regions.append(made)
        # by number: engines look for code in whatever callable a function closes over (vLLM does), and a region has none
        number = [region.module for region in self.regions].index(made.module)

        def run(args: list[Any]) -> Sequence[Any]:
            return self.regions[number](args) if self.is_open else plain(args)

        return run

    def sum_up(self) -> None:
        """After a capture."""
        name, stats, of_pieces = self.engine.name, self.engine.stats, self.settings.stats
        planned = [r for r in self.regions if any(case.choice is not None and case.choice.plan for case in r.cases.values())]
        stats.regions, stats.planned_regions = len(self.regions), len(planned)
        stats.fallbacks.update(of_pieces.fallbacks - stats.fallbacks)
        if not self.regions:
            self.engine.refuse(self.why_none)
            return
        num_cases = sum(len(r.cases) for r in self.regions)
        self.engine.log.info(
            "dynaflow: branches: %d of %d pieces run under plans of their kernels in %s's CUDA Graphs, %d cases, %d issues%s", len(planned),
            len(self.regions), name, num_cases, of_pieces.planned_calls,
            "".join(f" | left to {name}: {reason}" for reason in of_pieces.fallbacks))  # fmt: skip
