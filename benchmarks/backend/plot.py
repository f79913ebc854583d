"""benchmarks/results/backend.svg from the json: how far each row is from its baseline, with the target as a line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.backend.sections import MAX_ROW_RATIO
from benchmarks.backend.variants import COMPILE, COMPILE_GRAPH, OURS, OURS_BORROW, OURS_GRAPH
from benchmarks.store import Result

_COLOURS = {OURS: "#4c78a8", OURS_BORROW: "#f58518", OURS_GRAPH: "#bab0ac"}


def plot(rows: Sequence[Result], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (times, splits) = plt.subplots(1, 2, figsize=(13, 4.8))
    _ratios(times, [r for r in rows if r["section"] == "time"], "ratios",
            [f"{OURS} / {COMPILE}", f"{OURS_BORROW} / {COMPILE_GRAPH}", f"{OURS_GRAPH} / {COMPILE_GRAPH}"])  # fmt: skip
    times.axvline(MAX_ROW_RATIO, color="#e45756", linestyle="--", linewidth=1, label=f"target {MAX_ROW_RATIO}")
    times.set_title("sequential plan, time against torch.compile")
    split_rows = [r for r in rows if r["section"] == "split"]
    _ratios(splits, split_rows, "slowdown", list(dict.fromkeys(p for r in split_rows for p in r.get("slowdown", {}))))
    splits.set_title("split on one stream, time against unsplit")
    for axes in (times, splits):
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.set_xlabel("ratio, 95% interval; left is faster")
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7)
    figure.tight_layout()
    for suffix in (".svg", ".png"):
        figure.savefig(path.with_suffix(suffix), dpi=130)
    plt.close(figure)


def _ratios(axes: Any, rows: Sequence[Result], key: str, pairs: Sequence[str]) -> None:
    height = 0.8 / max(len(pairs), 1)
    for i, pair in enumerate(pairs):
        found = [(n, r[key][pair]) for n, r in enumerate(rows) if pair in r.get(key, {})]
        if not found:
            continue
        middle = [p["ratio"] for _, p in found]
        errors = [[max(0.0, p["ratio"] - p["low"]) for _, p in found], [max(0.0, p["high"] - p["ratio"]) for _, p in found]]
        axes.errorbar(middle, [n + i * height for n, _ in found], xerr=errors, fmt="o", markersize=4, capsize=2, label=pair,
                      color=_COLOURS.get(pair.split(" / ")[0]))  # fmt: skip
    axes.set_yticks([n + 0.3 for n in range(len(rows))], [r["row"] for r in rows], fontsize=8)
    axes.invert_yaxis()
