"""Result rows -> json, the short table on stdout, docs/overlap.md. Every figure is emulated, and says so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import store
from benchmarks.overlap.rows import WORKLOADS, Workload
from benchmarks.overlap.sections import hidden, shown_share
from benchmarks.overlap.sections import targets as targets_of
from benchmarks.overlap.variants import BESIDE, COMPUTE, NETWORK, SEQUENTIAL, STRATEGIES, in_parts, one_stream
from benchmarks.store import Result, cell, geomean, line, shown, target

RESULTS = store.RESULTS / "overlap.json"
PAGE = store.DOCS / "overlap.md"
SECTIONS = ("time",)

# what a workload's configuration says of its link
LINK = ("link", "gbps", "latency_us", "sms")
# the best row of a strategy
GOALS = {"NanoFlow": 1.29, "DualBatch": 1.14, "CommOverlap": 1.15, "TokenWeave": 1.22}


def name_of(workload: str, strategy: str) -> str:
    return f"{workload}, {strategy}"


NAMES = [name_of(w.name, s) for s, kinds in STRATEGIES.items() for w in WORKLOADS if w.kind in kinds]


def config(workload: Workload, strategy: str, tiny: bool, options: Mapping[str, Any]) -> Result:
    return {"dtype": "bf16", "workload": workload.name, "strategy": strategy, **workload.config(tiny),
            **({"options": dict(options)} if options else {}), **({"tiny": True} if tiny else {})}  # fmt: skip


def has_changed(row: Result) -> bool:
    """Whether the workload is another one now than when this row was measured. (Another link was asked for.)"""
    then = row["config"]
    now = next((w.config(bool(then.get("tiny"))) for w in WORKLOADS if w.name == then["workload"]), {})
    return any(then.get(key) != value for key, value in now.items() if key not in LINK)


def merged(*shards: Iterable[Result]) -> list[Result]:
    """What follows from the medians is worked out anew: rows of one file are held against one rule."""
    return [_worked_out(row) for row in store.merged(SECTIONS, NAMES, *shards)]


def _worked_out(row: Result) -> Result:
    if not row["speedup"]:
        return row
    name = row["config"]["strategy"]
    figures = {**row["baselines"], **row.get("alone", {}), name: row["ours"]}
    stale = {key for key in row if key.startswith(("hidden", "hideable", "bound"))}
    kept = {key: value for key, value in row.items() if key not in stale}
    found = kept | hidden({n: f["median_ms"] for n, f in figures.items() if f}, name, bool(row["gave_up"]), bool(row["is_split"]))
    return found | {"targets": targets_of(found)}


def save(path: Path, rows: Sequence[Result]) -> None:
    store.save(path, "overlap", rows, summary(rows))


def targets(rows: Sequence[Result]) -> list[Result]:
    """Each row's own, and the best row of each strategy that has a goal."""
    found = [{"row": r["row"], "section": r["section"], **t} for r in rows for t in r["targets"]]
    for name, goal in GOALS.items():
        own = [r for r in rows if r["config"].get("strategy") == name and r["speedup"]]
        best, most = (max((r[key] for r in own if r.get(key)), default=None) for key in ("speedup", "bound_beside"))
        note = f"side by side, the same kernels reach {most:.2f}x at most on its rows" if most else ""
        note = note if best else "no row of it is measured"
        goal_of = target(f"best speedup of {name} (emulated)", best, goal, note, at_least=True)
        found.append({"row": "all rows", "section": "time", **goal_of})
    return found


def summary(rows: Sequence[Result]) -> Result:
    speedups = [r["speedup"] for r in rows if r["speedup"]]
    by_strategy = {
        name: {"rows": len(own), "geomean_speedup": round(geomean(own), 4), "max_speedup": max(own), "min_speedup": min(own)}
        for name in STRATEGIES
        if (own := [r["speedup"] for r in rows if r["config"].get("strategy") == name and r["speedup"]])
    }
    known, there = {r["config"].get("workload") for r in rows}, {r["row"] for r in rows}
    return {
        "rows": len(rows), "measured": len(speedups), "emulated": True, "not_run": [w.name for w in WORKLOADS if w.name not in known],
        "rows_changed": [r["row"] for r in rows if has_changed(r)],
        "rows_not_run": [name for name in NAMES if name not in there and name.rpartition(", ")[0] in known],
        "geomean_speedup": round(geomean(speedups), 4) if speedups else None, "min_speedup": min(speedups, default=None),
        "strategies": by_strategy, "not_available": sorted({r["config"]["strategy"] for r in rows if r.get("is_available") is False}),
        "not_equal": [r["row"] for r in rows if r["speedup"] and r["equal"] != "bit"], **store.counted(targets(rows)),
    }  # fmt: skip


# -- tables


def table(rows: Sequence[Result]) -> str:
    head = f"{'row (emulated network)':<46}{'sequential':>11}{'one stream':>11}{'ours':>9}{'compute':>9}{'network':>9}{'beside':>9}"
    lines = [head + f"{'parts':>9}{'speedup':>9}{'bound':>7}{'hidden':>8}  equal"]
    for r in rows:
        figures, widths = _figures(r), (11, 11, 9, 9, 9, 9, 9)
        cells = "".join(f"{f['median_ms']:>{w}.3f}" if f else f"{'-':>{w}}" for f, w in zip(figures, widths))
        gain = f"{_times(r['speedup']):>9}{_times(r.get('bound_beside') or r.get('bound')):>7}{shown_share(r):>8}  {r['equal']}"
        lines.append(f"{r['row']:<46}{cells}{gain}" + (f"   ({r['note'][:90]})" if r["note"] else ""))
    s = summary(rows)
    bad = [line(t) for t in targets(rows) if not t["is_met"]]
    counts = f"{s['met']} of {s['targets']} targets met, {s['measured']} of {s['rows']} rows measured; all emulated"
    return "\n".join([*lines, *bad, counts])


def _figures(r: Result) -> list[Result | None]:
    alone, baselines, strategy = r.get("alone", {}), r["baselines"], r["config"].get("strategy", "")
    return [baselines.get(SEQUENTIAL), baselines.get(one_stream(strategy)), r["ours"],
            *(alone.get(n) for n in (COMPUTE, NETWORK, BESIDE, in_parts(strategy)))]  # fmt: skip


def _times(value: float | None) -> str:
    return f"{value:.2f}x" if value else "-"


def markdown(rows: Sequence[Result]) -> str:
    s = summary(rows)
    lines = [
        "# What overlap hides", "",
        f"Made by `python -m benchmarks.overlap` on {store.where(rows)}: one rank of each model, eight layers (two of those with experts), "
        "bf16, random weights, in CUDA Graphs. **The network is emulated**: a kernel moves the bytes locally and holds the SMs and the "
        "time that a named link would take ([how](runtimes.md#an-emulated-network)). Do not edit. Every row carries its own date and "
        "commit in [overlap.json](../benchmarks/results/overlap.json).", "",
        f"{s['met']} of {s['targets']} targets are met; {s['measured']} of {s['rows']} rows are measured.", "",
        "Strategies run with `never_slower=True`: where none of a strategy's plans is measured to be faster, the sequential one runs, and "
        "the row says so. `one stream`: the strategy's parts and order, not overlapped. `beside`: compute and network at once on two "
        "streams, nothing waiting for anything; `in parts`: the strategy's own parts of both, likewise. `bound`: sequential over `beside`. "
        "`hidden`: what overlapping saves over one stream, of what these parts save side by side; of rows with a ~, which are older, of "
        "what unsplit kernels save against sequential.", "",
    ]  # fmt: skip
    if s["not_run"]:
        lines += ["Workloads that were not run:", "", *(f"- {name}" for name in s["not_run"]), ""]
    if s["rows_not_run"]:
        lines += ["Rows that were not run, of workloads that were:", "", *(f"- {name}" for name in s["rows_not_run"]), ""]
    if s["rows_changed"]:
        changed = [f"- {name}" for name in s["rows_changed"]]
        lines += ["Rows of workloads that have changed since, and are to be measured anew:", "", *changed, ""]
    lines += store.losses(s)
    missed = [t for t in targets(rows) if t["note"] and not t["is_met"]]
    if why := [f"- {t['what']}: {shown(t['value'])} of {shown(t['limit'])}; {t['note']}" for t in missed]:
        lines += ["Goals that were missed, and what could be reached:", "", *why, ""]
    for name in STRATEGIES:
        own = [r for r in rows if r["config"].get("strategy") == name]
        if own:
            columns = [*"workload, link, sequential (ms), one stream, overlapped, compute, network, beside, in parts".split(", "),
                       "speedup", "bound", "hidden", "equal"]  # fmt: skip
            lines += [f"## {name}", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *map(_line, own), ""]
    return "\n".join(lines)


def _line(r: Result) -> str:
    cells = [f"{f['median_ms']:.3f} ({f['spread_ms']:.3f})" if f else "-" for f in _figures(r)]
    low, high = r.get("interval") or (None, None)
    gain = f"{_times(r['speedup'])} ({low:.2f} to {high:.2f})" if low else "-"
    bound = _times(r.get("bound_beside") or r.get("bound"))
    note = f"; {r['note'][:160]}" if r["note"] else ""
    columns = [r["config"]["workload"], r["config"]["link"], *cells, gain, bound, shown_share(r), r["equal"] + cell(note)]
    return f"| {' | '.join(columns)} |"
