"""`df.explain` where ops are the kernels that Inductor makes: what was chosen for each region, and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from dynaflow.costs import critical_path_us, total_work_us
from dynaflow.engine import CapturedGraph
from dynaflow.ir import CALLER, Flow, Plan
from dynaflow.region import Case, Choice
from dynaflow.simulate import simulate
from dynaflow.timeline import Timeline
from dynaflow.trials import in_order

# plans of more launches are not drawn
MAX_DRAWN = 40


@dataclass(frozen=True)
class ExplainedKernels:
    """One graph that Inductor compiled, or was to."""

    name: str
    # why it runs as Inductor has it, or as it was captured; flow and choice are None then
    refusal: str
    flow: Flow | None = None
    # what runs, and Inductor's own order
    plan: Plan | None = None
    serial: Plan | None = None
    choice: Choice | None = None
    peak_bytes: int = 0
    serial_bytes: int = 0
    # Inductor could not compile it
    is_eager: bool = False

    def timelines(self) -> tuple[Timeline, Timeline]:
        """Inductor's own order and the plan that was chosen, both simulated from the costs that were measured."""
        if self.flow is None or self.choice is None or not self.choice.costs or self.plan is None or self.serial is None:
            why = self.refusal or (self.choice and self.choice.untried) or "the strategy was asked for by name"
            raise LookupError(f"{self.name}: no costs were measured: {why}")
        return simulate(self.flow, self.serial, self.choice.costs), simulate(self.flow, self.plan, self.choice.costs)

    def __str__(self) -> str:
        if self.flow is None or self.plan is None or self.choice is None:
            return f"region {self.name}: runs as {'it was captured' if self.is_eager else 'Inductor has it'}: {self.refusal}"
        flow, plan, costs = self.flow, self.plan, self.choice.costs
        names = {op.name.rsplit(".", 1)[0] for op in flow.ops}
        lines = [f"region {flow.label}: {len(flow.ops)} kernels ({len(names)} different), {len(flow.edges)} dependencies"]
        pinned = [op for op in flow.ops if CALLER in op.uses]
        if pinned:
            lines.append(f"  on the caller's stream, in order: {', '.join(op.name for op in pinned[:4])}"
                         + (f" and {len(pinned) - 4} more" if len(pinned) > 4 else ""))  # fmt: skip
        lines.append(f"chosen     {self.choice}")
        if costs:
            path, work, alone = critical_path_us(flow, costs), total_work_us(flow, costs), sum(c.us for c in costs.values())
            lines.append(f"costs      one by one {alone:,.0f} us, critical path {path:,.0f} us, work of the whole device {work:,.0f} us")
        launches = Counter(launch.stream for launch in plan.launches)
        lines.append(f"plan       {len(plan.launches)} launches, {len(plan.waits)} waits: "
                     + ", ".join(f"{n} on {stream}" for stream, n in launches.most_common()))  # fmt: skip
        if len(plan.launches) <= MAX_DRAWN:
            lines.append(plan.grid())
        ratio = f" ({self.peak_bytes / self.serial_bytes:.2f}x)" if self.serial_bytes else ""
        lines.append(f"place      peak {self.peak_bytes:,} bytes, in Inductor's order {self.serial_bytes:,}{ratio}")
        return "\n".join(lines)


def explain_case(case: Case) -> ExplainedKernels:
    region = case.region
    if case.kernels is None or case.choice is None:
        return ExplainedKernels(region.name, region.refusal or "it was not called")
    flow = case.kernels.flow
    serial = case.kernels.bind(in_order(case.kernels))
    bound = case.bound or serial
    return ExplainedKernels(region.name, "", flow, bound.plan, serial.plan, case.choice, bound.peak_bytes, serial.peak_bytes)


class InspectedRegions(CapturedGraph):
    """Calls what Inductor compiled until its regions have chosen; undoes what the calls changed."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.settings.graphs.append(self)

    def __call__(self, *args: Any) -> Any:
        tensors = [a for a in args if isinstance(a, torch.Tensor) and not isinstance(a, torch.nn.Parameter)]
        before = [t.clone() for t in tensors]
        with torch.no_grad():
            for _ in range(2):
                result = super().__call__(*args)
                for tensor, old in zip(tensors, before):
                    _put_back(tensor, old)
        return result

    @property
    def explained(self) -> list[ExplainedKernels]:
        if self.why_eager:
            return [ExplainedKernels(self.settings.name, self.why_eager, is_eager=True)]
        return [explain_case(case) for region in self.regions for case in region.cases.values()]


def _put_back(tensor: torch.Tensor, old: torch.Tensor) -> None:
    """Where nothing was changed nothing is written: it may be expanded, or saved for a backward, which would take it for changed."""
    if not torch.equal(tensor, old):
        with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
            tensor.copy_(old)
