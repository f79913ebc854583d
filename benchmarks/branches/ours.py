"""DynaFlow as this suite sees it: all that depends on its insides stands here.

What a version does not have yet is None or empty, and the report says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch

import dynaflow as df
from benchmarks.cases import Call, Case
from benchmarks.store import Result
from benchmarks.variants import entry
from dynaflow.timeline import Timeline

NAME = "dynaflow"


def build(case: Case, options: Mapping[str, Any]) -> Call:
    """`torch.compile(model, backend="dynaflow")` and nothing else; `options` are those of --options."""
    fast = torch.compile(entry(case.module), backend=_backend(), **({"options": dict(options)} if options else {}))
    return lambda number: case.finish(fast(**case.args(number)))


def _backend() -> Any:
    """The name, where torch finds it; a copy of the tree that is not installed gives the function."""
    if NAME in torch._dynamo.list_backends(exclude_tags=()):
        return NAME
    from dynaflow.capture import backend

    return backend


def one_stream(call: Call) -> Call:
    """The same compiled callable, its plans on one stream: what the plans must be bit-equal to."""
    from dynaflow.engine import serialised

    def alone(number: int) -> Any:
        with serialised():
            return call(number)

    return alone


def bound() -> Result | None:
    """What no schedule of this process's plan can be faster than: the longer of its critical path and its total work, simulated.

    Read from df.stats(): `bound_us`, and `critical_path_us` and `total_work_us` where it has them.
    """
    stats = df.stats()
    bound_us = getattr(stats, "bound_us", None)
    if not bound_us:
        return None
    parts = {name: value for name in ("critical_path_us", "total_work_us") if (value := getattr(stats, name, None))}
    return {"ms": round(bound_us / 1e3, 5), **{name: round(value, 2) for name, value in parts.items()}}


def choice() -> Result:
    """Which plan was chosen in this process, and why: df.stats()'s `chosen` and `why` where it has them, and calls that fell back."""
    stats = df.stats()
    found = {name: str(value) for name in ("chosen", "why") if (value := getattr(stats, name, None))}
    fallbacks = {str(reason).splitlines()[0][:200]: count for reason, count in stats.fallbacks.items()}
    return {**found, "captures": stats.captures, "calls": stats.calls, "planned_calls": stats.planned_calls,
            "launches": stats.num_launches, "fallbacks": fallbacks}  # fmt: skip


def timelines(case: Case, call: Call) -> tuple[Timeline, Timeline] | None:
    """One step on one stream and one as planned, measured; None where no plan runs."""
    found = []
    for title, step in (("one stream", one_stream(call)), ("dynaflow", call)):
        with suppress(LookupError), df.profile() as measured:
            case.reset()
            step(0)
            found.append(Timeline(measured.timeline.spans, title, measured.timeline.lanes))
    return (found[0], found[1]) if len(found) == 2 else None
