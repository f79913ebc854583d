"""What planning costs, phase by phase, on one core and without a GPU.

    python -m benchmarks.planning [--repetitions 15] [--json benchmarks/results/planning.json]

The flow is a transformer's: layers of norm, attention, all-reduce and MLP, with a residual around them. It is planned by TwoBatch
(and, for the verifier, by others), so 625 layers of 4 ops in 2 parts make 5,000 launches.

Every repetition plans a fresh flow: nothing is cached from the one before. "again" means a flow that was planned before, as for
the second context of a strategy. Times are of this process (what other processes take of the machine is left out).
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import dynaflow as df
from benchmarks import provenance
from dynaflow.context import Context
from dynaflow.ir import Flow, Op, Plan, Value
from dynaflow.memory import bind_memory, place
from dynaflow.planner import Planner
from dynaflow.planner import plan as make_plan
from dynaflow.runtime.binder import Binder
from dynaflow.runtime.program import Layout, Program, Unit
from dynaflow.strategies import Branches, NanoBatch, TwoBatch
from dynaflow.sync import synchronise
from dynaflow.verify import verify, verify_memory

LAYER = (("norm", "memory"), ("attn", "compute"), ("all_reduce", "network"), ("mlp", "compute"))
HIDDEN = 64
TOGETHER = "plan + synchronise + place"


class Hop(df.Strategy):
    """Two parts, every op on the next of three streams: as many waits as a plan can need."""

    def schedule(self, flow: Planner) -> None:
        flow.split(2)
        number = 0
        while ready := flow.get_ready_ops():
            r = min(ready, key=lambda r: (r.depth, r.part))
            flow.execute(r, stream=("compute", "comm", "copy")[number // 2 % 3])
            number += 1


@dataclass(frozen=True, slots=True)
class Row:
    row: str
    config: dict[str, Any]
    repetitions: int
    # median_ms, spread_ms (10th to 90th percentile) and min_ms
    ours: dict[str, float]
    # None: no target
    target_ms: float | None
    note: str = ""

    @property
    def is_met(self) -> bool:
        return self.target_ms is None or self.ours["median_ms"] <= self.target_ms


def layered_flow(num_layers: int) -> Flow:
    def value(name: str, role: str, rows: bool = True) -> Value:
        shape = ("s0", str(HIDDEN)) if rows else (str(HIDDEN), str(HIDDEN))
        nbytes = f"{4 * HIDDEN}*s0" if rows else str(4 * HIDDEN**2)
        return Value(name, shape, "float32", nbytes, 0 if rows else None, role, name)

    values, ops, last = [value("x", "input")], [], "x"
    for layer in range(num_layers):
        weight, residual = f"layers.{layer}.weight", last
        values.append(value(weight, "param", rows=False))
        for name, kind in LAYER:
            op = f"layers.{layer}.{name}"
            reads = {"attn": (last, weight), "mlp": (last, residual, weight)}.get(name, (last,))
            is_last = layer == num_layers - 1 and name == "mlp"
            values.append(value(f"{op}:0", "output" if is_last else "temp"))
            ops.append(Op(op, kind, reads, (f"{op}:0",), uses=("group:tp",) if kind == "network" else ()))
            last = f"{op}:0"
    return Flow("layers", tuple(values), tuple(ops), (last,), ("s0",), ("s0",))


def program_of(flow: Flow) -> Program:
    layout = Layout(torch.float32, torch.device("cpu"), (str(HIDDEN), "1"))
    units = {op.name: Unit(lambda *tensors: tensors[:1], op.reads, op.writes) for op in flow.ops}
    return Program(flow, units, {v.name: layout for v in flow.values if v.role in ("temp", "output")})


# ---------------------------------------------------------------------------- measuring


def timed(phase: Callable[[], Any]) -> tuple[float, Any]:
    """Without the garbage collector, as timeit does: a full collection of torch's modules takes 0.1 s, whoever triggers it."""
    gc.disable()
    began = time.process_time()
    result = phase()
    elapsed_ms = (time.process_time() - began) * 1e3
    gc.enable()
    return elapsed_ms, result


def row(name: str, config: dict[str, Any], times_ms: list[float], target_ms: float | None = None, note: str = "") -> Row:
    ordered = sorted(times_ms)
    spread = ordered[int(0.9 * (len(ordered) - 1))] - ordered[int(0.1 * (len(ordered) - 1))]
    ours = {"median_ms": round(statistics.median(ordered), 4), "spread_ms": round(spread, 4), "min_ms": round(ordered[0], 4)}
    return Row(name, config, len(ordered), ours, target_ms, note)


def planning_rows(num_layers: int, repetitions: int) -> list[Row]:
    """Phase by phase on fresh flows, and again on one that was planned before."""
    times: dict[str, list[float]] = {}
    config: dict[str, Any] = {"layers": num_layers, "strategy": "TwoBatch"}
    flow = layered_flow(num_layers)
    for is_fresh in (True, False):
        for _ in range(repetitions):
            flow = layered_flow(num_layers) if is_fresh else flow
            plan_ms, launches = timed(lambda: make_plan(flow, TwoBatch(), Context({"batch_size": 64})))
            sync_ms, ordered = timed(lambda: synchronise(flow, launches))
            place_ms, plan = timed(lambda: place(flow, ordered))
            verify_ms, report = timed(lambda: verify(plan, flow))
            again = "" if is_fresh else ", again"
            together_ms = plan_ms + sync_ms + place_ms
            phases = {"plan": plan_ms, "synchronise": sync_ms, "place": place_ms, TOGETHER: together_ms, "verify": verify_ms}
            for phase, ms in phases.items():
                times.setdefault(phase + again, []).append(ms)
    config |= {"launches": report.num_launches, "waits": report.num_waits, "steps": len(plan.steps)}
    targets = {TOGETHER: 100.0, "verify": 25.0}
    size = f"{report.num_launches:,} launches"
    return [row(f"{name}, {size}", config, ms, targets.get(name.removesuffix(", again"))) for name, ms in times.items()]


def verify_rows(repetitions: int) -> list[Row]:
    """Other shapes of plans of 5,000 launches: more streams, more parts, more waits."""
    rows = []
    for strategy, num_layers in ((NanoBatch(4), 313), (NanoBatch(8), 157), (Branches(3), 1250), (Hop(), 625)):
        flow = layered_flow(num_layers)
        plan = finished(flow, strategy)
        times = [timed(lambda: verify(plan, flow))[0] for _ in range(repetitions)]
        config = {"strategy": repr(strategy), "launches": len(plan.launches), "waits": len(plan.waits), "steps": len(plan.steps)}
        rows.append(row(f"verify {strategy!r}, {len(plan.launches):,} launches", config, times, 25.0))
    return rows


def bind_rows(repetitions: int) -> list[Row]:
    """A new size for a plan of 500 launches."""
    flow = layered_flow(63)
    plan = finished(flow, TwoBatch())
    made_ms, binder = timed(lambda: Binder(plan, program_of(flow)))
    config = {"launches": len(plan.launches), "strategy": "TwoBatch"}
    memory_ms, check_ms, bind_ms = [], [], []
    for number in range(max(repetitions, 50)):
        sizes = {"s0": 100 + number}
        ms, memory = timed(lambda: bind_memory(flow, plan, sizes))
        memory_ms.append(ms)
        check_ms.append(timed(lambda: verify_memory(flow, plan, memory, sizes))[0])
        bind_ms.append(timed(lambda: binder.bind(sizes))[0])
    size = f"{len(plan.launches)} launches"
    return [
        row(f"bind a new size, {size}", config, bind_ms, 1.0, "offsets, views and instructions"),
        row(f"bind_memory, {size}", config, memory_ms, None, "part of the row above: the offsets"),
        row(f"verify_memory, {size}", config, check_ms, None, "not part of it"),
        row(f"Binder, {size}", config, [made_ms], None, "once per plan"),
    ]


def finished(flow: Flow, strategy: df.Strategy) -> Plan:
    return place(flow, synchronise(flow, make_plan(flow, strategy, Context({"batch_size": 64}))))


# ---------------------------------------------------------------------------- reporting


def table(rows: list[Row]) -> str:
    lines = [f"{'':<64}{'median':>10}{'spread':>10}{'min':>10}{'target':>10}"]
    for r in rows:
        target = "" if r.target_ms is None else f"{r.target_ms:g} ms"
        verdict = "" if r.target_ms is None else "  met" if r.is_met else "  MISSED"
        figures = "".join(f"{r.ours[k]:>7.2f} ms" for k in ("median_ms", "spread_ms", "min_ms"))
        lines.append(f"{r.row:<64}{figures}{target:>10}{verdict}")
    return "\n".join(lines)


def as_json(rows: list[Row], made_by: str) -> dict[str, Any]:
    return {
        "suite": "planning", "made_by": made_by, "commit": provenance.commit() or "not committed",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": {"gpu": None, "cpu": _cpu(), "note": "no GPU is used; process time on one core, garbage collector off as in timeit"},
        "versions": {"torch": torch.__version__, "dynaflow": df.__version__, "python": platform.python_version()},
        "rows": [{**asdict(r), "is_met": r.is_met} for r in rows],
        "summary": {
            "rows": len(rows), "targets": sum(r.target_ms is not None for r in rows), "missed": [r.row for r in rows if not r.is_met],
        },
    }  # fmt: skip


def _cpu() -> str:
    try:
        names = [line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--layers", type=int, default=625)
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "planning.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = planning_rows(args.layers, args.repetitions) + verify_rows(args.repetitions) + bind_rows(args.repetitions)
    print(table(rows))
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(as_json(rows, "python -m benchmarks.planning"), indent=1) + "\n", encoding="utf-8")
    return 0 if all(r.is_met for r in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
