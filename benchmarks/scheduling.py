"""How good the plans for kernel flows are, in simulated time: no GPU, no tensors.

    python -m benchmarks.scheduling [--max-streams 16] [--json PATH]

Nets and their costs are made up to look like real ones (`kernel_nets.py`). Columns are simulated microseconds:

    one stream   every kernel in program order
    greedy       the rule without costs, at its best number of streams (in brackets)
    Branches     as it is by default
    search       the best of all settings that `dynaflow.search` tries
    bound        what no plan can be faster than, were dependencies free: the longest path, or all work at full load
    path         the longest path with the latency of each of its edges: no plan is faster than this, either
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.kernel_nets import NETS
from dynaflow.costs import Cost, Costs, bound_us, critical_path_us
from dynaflow.ir import Flow
from dynaflow.planner import plan
from dynaflow.search import NUM_STREAMS, search
from dynaflow.simulate import Device, simulate
from dynaflow.strategies import Branches, Greedy
from dynaflow.strategy import Strategy
from dynaflow.sync import synchronise


@dataclass(frozen=True, slots=True)
class Row:
    net: str
    num_kernels: int
    one_stream_us: float
    greedy_us: float
    greedy_streams: int
    branches_us: float
    search_us: float
    best: str
    bound_us: float
    path_us: float
    search_s: float


def planned_us(flow: Flow, costs: Costs, strategy: Strategy) -> float:
    return simulate(flow, synchronise(flow, plan(flow, strategy, costs=costs)), costs).total_us


def row(flow: Flow, costs: Costs, max_streams: int) -> Row:
    greedy = {n: planned_us(flow, costs, Greedy(n)) for n in NUM_STREAMS if n <= max_streams}
    fewest = min(greedy, key=lambda n: greedy[n])
    edge_us = Device().edge_us
    with_edges = {name: Cost(cost.us + edge_us, cost.share) for name, cost in costs.items()}
    began = time.process_time()
    best = search(flow, costs, max_streams=max_streams)[0]
    search_s = time.process_time() - began
    return Row(
        flow.name, len(flow.ops), greedy[1], greedy[fewest], fewest, planned_us(flow, costs, Branches()),
        best.simulated_us, str(best), bound_us(flow, costs), critical_path_us(flow, with_edges) - edge_us, search_s)  # fmt: skip


def table(rows: list[Row]) -> str:
    heads = f"{'one stream':>11}{'greedy':>12}{'Branches':>10}{'search':>9}{'bound':>8}{'path':>8}{'Branches':>11}{'search':>8}"
    lines = [f"{'net':<11}{'kernels':>8}{heads}{'took':>9}", f"{'':<11}{'':>8}{'us':>11}{'':>47}{'over one stream':>19}"]
    for r in rows:
        greedy = f"{r.greedy_us:.0f} ({r.greedy_streams})"
        gains = f"{r.one_stream_us / r.branches_us:>10.2f}x{r.one_stream_us / r.search_us:>7.2f}x"
        times = f"{r.one_stream_us:>11.0f}{greedy:>12}{r.branches_us:>10.0f}{r.search_us:>9.0f}{r.bound_us:>8.0f}{r.path_us:>8.0f}"
        lines.append(f"{r.net:<11}{r.num_kernels:>8}{times}{gains}{r.search_s:>7.1f} s")
    return "\n".join([*lines, "", *(f"{r.net:<11}{r.best}" for r in rows)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--max-streams", type=int, default=max(NUM_STREAMS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = [row(*make(), args.max_streams) for make in NETS]
    print(table(rows))
    if args.json:
        args.json.write_text(json.dumps([asdict(r) for r in rows], indent=1) + "\n", encoding="utf-8")
    lost = [r.net for r in rows if r.branches_us > min(r.greedy_us, r.one_stream_us) + 1e-6]
    if lost:
        print(f"Branches is slower than greedy or one stream: {', '.join(lost)}")
    return 1 if lost else 0


if __name__ == "__main__":
    raise SystemExit(main())
