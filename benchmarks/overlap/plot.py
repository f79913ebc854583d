"""benchmarks/results/overlap.svg and .png from the json: speedup per workload and strategy, bounds as marks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.overlap.rows import WORKLOADS
from benchmarks.overlap.sections import MIN_SPEEDUP
from benchmarks.overlap.variants import STRATEGIES
from benchmarks.store import Result


def plot(rows: Sequence[Result], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = [r for r in rows if r["speedup"]]
    names = [w.name for w in WORKLOADS if any(r["config"]["workload"] == w.name for r in found)]
    strategies = [s for s in STRATEGIES if any(r["config"]["strategy"] == s for r in found)]
    figure, axes = plt.subplots(figsize=(9, 1.6 + 0.45 * max(len(names), 3)))
    for number, strategy in enumerate(strategies):
        own = {r["config"]["workload"]: r for r in found if r["config"]["strategy"] == strategy}
        at = [i + 0.8 * (number + 0.5) / len(strategies) - 0.4 for i, n in enumerate(names) if n in own]
        axes.barh(at, [own[n]["speedup"] - 1 for n in names if n in own], left=1.0, height=0.8 / len(strategies), label=strategy)
    bounds = [(r.get("bound_beside") or r.get("bound"), names.index(r["config"]["workload"])) for r in found]
    bounds = [pair for pair in bounds if pair[0]]
    if bounds:
        axes.plot(*zip(*bounds), "|", color="black", markersize=14, markeredgewidth=1.5, label="bound: side by side")
    for value, style in ((1.0, "-"), (MIN_SPEEDUP, ":")):
        axes.axvline(value, color="black", linewidth=0.8, linestyle=style)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("speedup over the sequential graph; the network is emulated")
    if found:
        axes.legend(fontsize=7, loc="lower right")
    figure.tight_layout()
    for suffix in (".svg", ".png"):
        figure.savefig(path.with_suffix(suffix), dpi=130)
    plt.close(figure)
