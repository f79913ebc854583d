"""DynaFlow as this suite sees it: all that depends on its insides stands here.

What is not known is None or empty, and the report says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

import dynaflow as df
from benchmarks.cases import Call, Case
from benchmarks.store import Result
from benchmarks.variants import NotAvailable, entry
from dynaflow.costs import bound_us, critical_path_us, total_work_us
from dynaflow.explain_kernels import ExplainedKernels, explain_case
from dynaflow.ongoing import serialised
from dynaflow.region import living
from dynaflow.timeline import Timeline
from dynaflow.trials import Trials

NAME = "dynaflow"
DEFAULT, TUNED = "default", "max-autotune"


def build(case: Case, options: Mapping[str, Any]) -> Call:
    """`torch.compile(model, backend="dynaflow")` and nothing else; `options` are those of --options."""
    fast = torch.compile(entry(case.module), backend=_backend(), **({"options": dict(options)} if options else {}))
    _compiled[id(case)] = fast
    return lambda number: case.finish(fast(**case.args(number)))


def build_tuned(case: Case, options: Mapping[str, Any]) -> Call:
    """The same with mode="max-autotune" (torch.compile takes a mode or options)."""
    fast = torch.compile(entry(case.module), backend=_backend(), options={**options, "mode": TUNED})
    return lambda number: case.finish(fast(**case.args(number)))


# id of a case -> what `build` made of it
_compiled: dict[int, Any] = {}


def compiled(case: Case) -> Any:
    """What `build` made and calls have warmed up, to be put into the caller's own CUDA Graph."""
    if id(case) not in _compiled:
        raise NotAvailable(f"{NAME} itself was not built")
    return _compiled[id(case)]


def _backend() -> Any:
    """The name, where torch finds it; a copy of the tree that is not installed gives the function."""
    if NAME in torch._dynamo.list_backends(exclude_tags=()):
        return NAME
    from dynaflow.capture import backend

    return backend


@contextmanager
def before_trials(act: Callable[[], None]) -> Iterator[None]:
    """Do this before plans are timed against each other."""
    choose = Trials.choose

    def act_and_choose(self: Trials) -> Any:
        act()
        return choose(self)

    Trials.choose = act_and_choose  # type: ignore[method-assign]
    try:
        yield
    finally:
        Trials.choose = choose  # type: ignore[method-assign]


def one_stream(call: Call) -> Call:
    """The same compiled callable, its kernels in Inductor's own order: what plans must be bit-equal to."""

    def alone(number: int) -> Any:
        with serialised():
            return call(number)

    return alone


def _chosen(mode: str = DEFAULT) -> list[ExplainedKernels]:
    """What was chosen in this process, region by region, forward first."""
    found = [explain_case(case) for region in living if region.settings.mode == mode for case in region.cases.values()]
    return sorted(found, key=lambda e: e.name)


def _measured(mode: str = DEFAULT) -> list[ExplainedKernels]:
    return [e for e in _chosen(mode) if e.flow is not None and e.choice is not None and e.choice.costs]


def bound(mode: str = DEFAULT) -> Result | None:
    """What no schedule of this process's kernels can be faster than: the longer of their critical path and their total work, from the
    costs that were measured; regions one after the other. And what the chosen plans come to in simulation, launches included."""
    measured = [(e.flow, e.choice.costs) for e in _measured(mode) if e.flow is not None and e.choice is not None]
    if not measured:
        return None
    path, work, both = (sum(f(flow, costs) for flow, costs in measured) for f in (critical_path_us, total_work_us, bound_us))
    plan = sum(e.timelines()[1].total_us for e in _measured(mode))
    return {"ms": round(both / 1e3, 5), "critical_path_us": round(path, 2), "total_work_us": round(work, 2), "plan_us": round(plan, 2)}


def has_plan(mode: str) -> bool:
    """Whether calls run under a plan of kernels, and not Inductor's own callable."""
    return any(e.choice is not None and e.choice.plan for e in _chosen(mode))


def choice(mode: str = DEFAULT) -> Result:
    """Which plan was chosen in this process for each region, and why; and what fell back (counts are of all modes)."""
    stats = df.stats()
    fallbacks = {str(reason).splitlines()[0][:200]: count for reason, count in stats.fallbacks.items()}
    return {"chosen": {e.name: str(e.choice or e.refusal) for e in _chosen(mode)}, "captures": stats.captures, "calls": stats.calls,
            "planned_calls": stats.planned_calls, "launches": stats.num_launches, "fallbacks": fallbacks}  # fmt: skip


def timelines(case: Case, call: Call) -> tuple[Timeline, Timeline] | None:
    """The largest region in Inductor's order and as planned, simulated from the costs that were measured; None where there are none."""
    measured = _measured()
    if not measured:
        return None
    one, many = max(measured, key=lambda e: len(e.flow.ops) if e.flow is not None else 0).timelines()
    return Timeline(one.spans, "one stream (simulated)", one.lanes), Timeline(many.spans, "dynaflow (simulated)", many.lanes)
