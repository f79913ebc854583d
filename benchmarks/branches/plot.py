"""benchmarks/results/branches.svg and .png from the json: speedups with their interval, bounds as marks, targets as lines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.branches.report import MIN_ANY, MIN_GEOMEAN, timed
from benchmarks.branches.rows import BRANCHY, CONTROL, GROUPS, TRAINING
from benchmarks.store import Result

_COLOURS = {BRANCHY: "#4c78a8", CONTROL: "#bab0ac", TRAINING: "#f58518"}


def plot(rows: Sequence[Result], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = [(group, r) for group in GROUPS for r in timed(rows, group) if r["speedup"]]
    figure, axes = plt.subplots(figsize=(9, 1.4 + 0.27 * max(len(found), 4)))
    for group in GROUPS:
        at = [i for i, (own, _) in enumerate(found) if own == group]
        values = [found[i][1]["speedup"] for i in at]
        spans = [found[i][1].get("interval") or (v, v) for i, v in zip(at, values)]
        errors = [[max(0.0, v - low) for v, (low, _) in zip(values, spans)], [max(0.0, high - v) for v, (_, high) in zip(values, spans)]]
        if at:
            axes.barh(at, values, xerr=errors, color=_COLOURS[group], height=0.7, label=group, error_kw={"capsize": 2, "linewidth": 1})
    bounds = [(r["bound"], i) for i, (_, r) in enumerate(found) if r.get("bound")]
    if bounds:
        axes.plot(*zip(*bounds), "|", color="#e45756", markersize=11, markeredgewidth=2, label="bound, simulated")
    for value, style in ((1.0, "-"), (MIN_ANY, ":"), (MIN_GEOMEAN, "--")):
        axes.axvline(value, color="black", linewidth=0.8, linestyle=style)
    axes.set_yticks(range(len(found)), [r["row"] for _, r in found], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("speedup over the faster of torch.compile's baselines, 95% interval")
    if found:
        axes.legend(fontsize=8, loc="lower right")
    figure.tight_layout()
    for suffix in (".svg", ".png"):
        figure.savefig(path.with_suffix(suffix), dpi=130)
    plt.close(figure)
