"""A bound plan's instructions, issued for one call: what the runtimes have in common.

A `Run` is one call in flight: its tensors, what it has written of the caller's, and the first error. A runtime is a function
`issue(bound, run)`; after it returns (or raises), every launch has been issued and the caller may continue.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Callable, Iterable, Iterator, Mapping, Sequence

import torch

from dynaflow.errors import OptionError
from dynaflow.ir import Part
from dynaflow.runtime.program import LAUNCH, Bound, Call
from dynaflow.timeline import Span, Timeline


class Profile:
    """Collects the timelines of the calls inside `df.profile()`; `timeline` is the last one."""

    def __init__(self, outer: Profile | None = None) -> None:
        self.timelines: list[Timeline] = []
        self._outer = outer

    def add(self, timeline: Timeline) -> None:
        self.timelines.append(timeline)
        if self._outer is not None:
            self._outer.add(timeline)

    @property
    def timeline(self) -> Timeline:
        if not self.timelines:
            raise LookupError(
                "no plan ran inside df.profile(): call what df.compile returned there, without gradients; where it fell back, "
                "df.stats(fast).fallbacks says why")  # fmt: skip
        return self.timelines[-1]


_profile: ContextVar[Profile | None] = ContextVar("dynaflow_profile", default=None)


def is_profiling() -> bool:
    return _profile.get() is not None


@contextmanager
def profile() -> Iterator[Profile]:
    """Measure the calls inside: `with df.profile() as p: fast(x)`, then `p.timeline`. CUDA calls are synchronised."""
    holder = Profile(_profile.get())
    token = _profile.set(holder)
    try:
        yield holder
    finally:
        _profile.reset(token)


class Run:
    """One call in flight."""

    def __init__(self, bound: Bound, tensors: list[Any], part_contexts: Mapping[Part, Any] | None = None):
        self.bound, self.tensors = bound, tensors
        self.part_contexts = part_contexts or {}
        self.written: dict[str, list[str]] = {}
        self.error: BaseException | None = None
        self.profile = _profile.get()
        self.spans: list[Span] = []
        self._numbers = {id(call): n for n, call in enumerate(bound.calls)} if bound.plan.loose else {}
        self._left = Counter(i for views in bound.touched for i in views) if bound.plan.loose else Counter()
        self._dropping = threading.Lock()
        # the host issues what runs later: that a launch has returned does not mean that it is over
        self.is_ahead = False
        self._t0 = time.perf_counter()

    def launch(self, call: Call) -> None:
        """Run one launch here and now, inside its part's context. The first error is kept; later launches are skipped."""
        if self.error is not None:
            return
        begin = time.perf_counter()
        failure: BaseException | None = None
        try:
            with self.context(call):
                for name in call.mutates:
                    self.written.setdefault(name, []).append(call.label)
                call(self.tensors)
        except BaseException as error:
            failure = error
        if failure is not None:
            failure.add_note(story(self.bound, call, self.written))
            self.error = failure
        elif self._numbers and not self.is_ahead:
            self._drop(self._numbers[id(call)])
        if self.profile is not None:
            end = time.perf_counter()
            self.span(call, (begin - self._t0) * 1e6, (end - self._t0) * 1e6)

    def _drop(self, number: int) -> None:
        """Behind the last launch that touches it, a kept result goes."""
        with self._dropping:
            for i in self.bound.touched[number]:
                self._left[i] -= 1
                if not self._left[i]:
                    for view in (i, *self.bound.inside.get(i, ())):
                        self.tensors[view] = None

    def span(self, call: Call, start_us: float, end_us: float) -> None:
        self.spans.append(Span(self.stream_of(call), call.label, start_us, end_us, call.kind))

    def stream_of(self, call: Call) -> str:
        if not hasattr(self, "_streams"):
            self._streams = streams_of(self.bound)
        return self._streams[id(call)]

    def context(self, call: Call) -> Any:
        manager = self.part_contexts.get(call.part) if call.part is not None else None
        return nullcontext() if manager is None else Inside(manager)

    def close(self) -> None:
        """The end of the call: hand over the timeline, raise the first error."""
        if self.profile is not None and self.spans:
            spans = tuple(sorted(self.spans, key=lambda s: s.start_us))
            self.profile.add(Timeline(spans, self.bound.plan.flow, ("caller", *(s.name for s in self.bound.streams))))
        if self.error is not None:
            raise self.error


def part_contexts(function: Callable[[Sequence[Any]], Iterable[Any]], rows: Sequence[Any]) -> list[Any]:
    """One per part, in order."""
    managers = list(function(rows)) if rows else []
    if len(managers) != len(rows):
        raise OptionError(
            f"part_context returned {len(managers)} context managers for {len(rows)} parts.", fix="return one per part, in order")
    return managers


class Inside:
    """A part's context, entered around one launch after the other. An error that the manager swallows is raised all the same: the launch
    has failed."""

    def __init__(self, manager: Any):
        self._manager = manager
        # a generator-based manager can be entered once: each launch gets its own
        self._recreate: Callable[[], Any] | None = getattr(manager, "_recreate_cm", None)

    def __enter__(self) -> None:
        if self._recreate is not None:
            self._manager = self._recreate()
        self._manager.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            self._manager.__exit__(kind, error, trace)
        except Exception as other:
            if error is None:
                raise
            if other is not error:  # the launch's own error is the one to know
                error.add_note(f"dynaflow: leaving its part's context raised, too: {type(other).__name__}: {other}")


def streams_of(bound: Bound) -> dict[int, str]:
    """id of a call -> the name of its stream"""
    names = ["caller", *(s.name for s in bound.streams)]
    return {id(i.what): names[i.stream] for i in bound.instructions if i.code == LAUNCH}


def story(bound: Bound, call: Call, written: Mapping[str, Sequence[str]]) -> str:
    """What a person needs to know of a launch that raised, as a note on its error."""
    calls = bound.calls
    changed = ", ".join(f"{name} (by {', '.join(labels)})" for name, labels in written.items())
    where = f", scheduled at {call.where}" if call.where else ""
    number = [id(c) for c in calls].index(id(call)) + 1
    return (
        f"dynaflow: raised by '{call.label}' on {streams_of(bound)[id(call)]} (launch {number} of {len(calls)}{where}).\n"
        f"dynaflow: tensors of yours that this call may have changed already: {changed or 'none'}."
    )


@contextmanager
def without_autocast_cache() -> Iterator[None]:
    """Autocast keeps the casts of weights, wherever they lie and whenever they were made: on another stream, or in a recording's
    pool. Inside, it makes them anew."""
    is_on = torch.is_autocast_cache_enabled() and (torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"))
    if is_on:
        torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        if is_on:
            torch.set_autocast_cache_enabled(True)


class Ambient:
    """Grad mode, inference mode and autocast of the caller, to be entered on another thread."""

    def __init__(self) -> None:
        self.grad, self.inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self.num_threads = torch.get_num_threads()
        self.autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")
        ]
        self.cache = torch.is_autocast_cache_enabled()

    @contextmanager
    def enter(self) -> Iterator[None]:
        with torch.inference_mode(self.inference), torch.set_grad_enabled(self.grad):
            before = [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in ("cpu", "cuda")]
            self._set(self.autocast)
            try:
                yield
            finally:
                self._set(before)
                torch.clear_autocast_cache()

    @staticmethod
    def _set(states: list[tuple[str, bool, torch.dtype]]) -> None:
        for kind, enabled, dtype in states:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
