"""Result rows -> json, the short table on stdout, docs/backend.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks import store
from benchmarks.backend.models import ROWS
from benchmarks.backend.sections import MAX_GEOMEAN_RATIO
from benchmarks.backend.variants import COMPILE, COMPILE_GRAPH, OURS, OURS_BORROW, OURS_GRAPH, REPLAY
from benchmarks.store import Result, cell, geomean, line, shown, target

RESULTS = store.RESULTS / "backend.json"
PAGE = store.DOCS / "backend.md"
SECTIONS = ("time", "host", "split", "trace", "equal", "first", "layers")


def merged(*shards: Iterable[Result]) -> list[Result]:
    return store.merged(SECTIONS, [row.name for row in ROWS], *shards)


def save(path: Path, rows: Sequence[Result]) -> None:
    store.save(path, "backend", rows, summary(rows))


def summary(rows: Sequence[Result]) -> Result:
    speedups = [r["speedup"] for r in rows if r["speedup"]]
    return {
        "rows": len(rows), **store.counted(targets(rows)), "overall": overall(rows),
        "geomean_speedup": round(geomean(speedups), 4) if speedups else None, "min_speedup": min(speedups, default=None),
    }  # fmt: skip


def targets(rows: Sequence[Result]) -> list[Result]:
    """Each row's own, and those over all rows."""
    return [{"row": r["row"], "section": r["section"], **t} for r in rows for t in r["targets"]] + overall(rows)


def overall(rows: Sequence[Result]) -> list[Result]:
    """Targets over all rows: the geometric mean of the time ratios."""
    found = []
    for a, b in ((OURS, COMPILE), (OURS_BORROW, COMPILE_GRAPH)):
        timed = [r for r in rows if r["section"] == "time"]
        ratios = [pair["ratio"] for r in timed if (pair := r.get("ratios", {}).get(f"{a} / {b}")) is not None]
        if timed:
            note = "" if len(ratios) == len(timed) else f"{len(ratios)} of {len(timed)} rows have both"
            value = geomean(ratios) if ratios else None
            goal = target(f"time, geometric mean: {a} / {b}", value, MAX_GEOMEAN_RATIO, note)
            found.append({"row": "all rows", "section": "time", **goal})
    return found


# -- tables


def table(rows: Sequence[Result]) -> str:
    """Short: a line per target, misses marked; then the losses again."""
    lines = []
    for row in rows:
        lines.append(f"{row['section']:<7}{row['row']}" + (f"   ({row['note'][:150]})" if row["note"] else ""))
        lines += [*_figures(row), *map(line, row["targets"])]
    lines += ["all", *map(line, overall(rows))]
    s = summary(rows)
    return "\n".join([*lines, f"{s['met']} of {s['targets']} targets met"])


def _figures(row: Result) -> list[str]:
    """The row's main figures in one line."""
    if row["section"] == "time":
        known = {**row["baselines"], **row.get("variants", {})}
        return ["  ms: " + ", ".join(f"{n} {f['median_ms']:.4g} (spread {f['spread_ms']:.2g})" for n, f in known.items())]
    if row["section"] == "host":
        return ["  us: " + ", ".join(f"{n} {f['median_us']:.0f}" for n, f in row.get("host", {}).items())]
    if row["section"] == "split":
        return ["  slower: " + ", ".join(f"{n} {f['ratio']:.3f}" for n, f in row.get("slowdown", {}).items())]
    if row["section"] == "equal":
        return ["  errors: " + ", ".join(f"{n} {f:.2f}" for n, f in row.get("error_ratio", {}).items())]
    return []


def markdown(rows: Sequence[Result]) -> str:
    by_section = {s: [r for r in rows if r["section"] == s] for s in SECTIONS}
    s = summary(rows)
    lines = [
        "# What being under DynaFlow costs", "",
        f"Made by `python -m benchmarks.backend` on {store.where(rows)}, bf16, random weights. Do not edit. "
        "Every row carries its own date and commit in [backend.json](../benchmarks/results/backend.json).", "",
        f"{s['met']} of {s['targets']} targets are met.", "",
    ]  # fmt: skip
    lines += store.losses(s)
    writers = {"time": _time_table, "host": _host_table, "split": _split_table, "trace": _trace_table, "equal": _equal_table,
               "first": _first_table, "layers": _first_table}  # fmt: skip
    for section, found in by_section.items():
        if found:
            lines += [*writers[section](found), "", *_targets_table(found, section), ""]
    return "\n".join(lines)


def _trace_table(rows: Sequence[Result]) -> list[str]:
    return ["## In the profiler's trace", "",
            "Bytes that copy and concatenation kernels move in a split step and not in the unsplit one, and graph launches per step."]


def _targets_table(rows: Sequence[Result], section: str) -> list[str]:
    lines = ["| row | target | measured | at most | |", "|---|---|---|---|---|"]
    extra = overall(rows) if section == "time" else []
    for name, t in [(r["row"], t) for r in rows for t in r["targets"]] + [("all rows", t) for t in extra]:
        verdict = "met" if t["is_met"] else "not measured" if t["value"] is None else "**missed**"
        note = f"; {t['note'][:200]}" if t["note"] and not t["is_met"] else ""
        lines.append(f"| {name} | {t['what']} | {shown(t['value'])} | {shown(t['limit'])} | {verdict}{cell(note)} |")
    return lines


def _time_table(rows: Sequence[Result]) -> list[str]:
    names = (COMPILE, OURS, COMPILE_GRAPH, REPLAY, OURS_BORROW, OURS_GRAPH)
    lines = [
        "## Time", "",
        "Milliseconds per step, median (spread from the 10th to the 90th percentile), variants in turns in one process. "
        f"`{COMPILE_GRAPH}` is `torch.cuda.graph` around the compiled call, plus a copy of each input into the graph's own buffer, as any "
        "caller needs; DynaFlow's graph copies the same inputs. Neither copies outputs, except `dynaflow graph` (without `borrow=True`), "
        "which never overwrites what a caller still holds.", "",
        "| row | " + " | ".join(names) + " |", "|---|" + "---|" * len(names),
    ]  # fmt: skip
    for r in rows:
        figures = {**r["baselines"], **r.get("variants", {})}
        cells = [f"{f['median_ms']:.3f} ({f['spread_ms']:.3f})" if (f := figures.get(n)) else "-" for n in names]
        lines.append(f"| {r['row']} | " + " | ".join(cells) + " |")
    pairs = sorted({pair for r in rows for pair in r.get("ratios", {})})
    lines += ["", "Ratios with their 95% interval (bootstrap over rounds); in brackets the ratio of device times alone.", "",
              "| row | " + " | ".join(pairs) + " |", "|---|" + "---|" * len(pairs)]  # fmt: skip
    for r in rows:
        lines.append(f"| {r['row']} | " + " | ".join(_pair(r.get("ratios", {}).get(p)) for p in pairs) + " |")
    lines += ["", "Peak memory above weights and inputs in the steady state, MiB reserved (allocated).", "",
              "| row | " + " | ".join(n for n in names if n != REPLAY) + " |", "|---|" + "---|" * (len(names) - 1)]  # fmt: skip
    for r in rows:
        figures = {**r["baselines"], **r.get("variants", {})}
        cells = [f"{f['reserved_mib']:,.0f} ({f['allocated_mib']:,.0f})" if "reserved_mib" in (f := figures.get(n, {})) else "-"
                 for n in names if n != REPLAY]  # fmt: skip
        lines.append(f"| {r['row']} | " + " | ".join(cells) + " |")
    return lines


def _pair(pair: Result | None) -> str:
    if pair is None:
        return "-"
    device = f" [{pair['device_ratio']:.3f}]" if "device_ratio" in pair else ""
    return f"{pair['ratio']:.3f} ({pair['low']:.3f} to {pair['high']:.3f}){device}"


def _host_table(rows: Sequence[Result]) -> list[str]:
    names = list(dict.fromkeys(name for r in rows for name in r.get("host", {})))
    lines = ["## Host", "", "Microseconds until the call returns, median (spread); one variant a few times in a row, the queue kept "
             "short. Dynamo's guards: the same model with a backend that does nothing. The machine's cores are not equally fast at all "
             "times: the thread sits on the fastest, and turns are left out in which a fixed loop of Python took over 1.2x of the fastest "
             "that was seen (all count where all were slow); the loop's time says how fast that was.", "",
             "| row | " + " | ".join(names) + " | copied inputs | turns | loop |", "|---|" + "---|" * (len(names) + 3)]  # fmt: skip
    for r in rows:
        cells = [f"{f['median_us']:.0f} ({f['spread_us']:.0f})" if (f := r.get("host", {}).get(n)) else "-" for n in names]
        machine = r.get("machine", {})
        turns = f"{machine['turns_kept']} of {machine['turns']}" if machine else "-"
        cells += [str(r.get("copied_inputs", "-")), turns, str(machine.get("loop_us", "-"))]
        lines.append(f"| {r['row']} | " + " | ".join(cells) + " |")
    return lines


def _split_table(rows: Sequence[Result]) -> list[str]:
    names = list(dict.fromkeys(name for r in rows for name in r.get("slowdown", {})))
    lines = ["## Split", "", "Parts one after the other on one stream, against the unsplit plan: the price of splitting, which a "
             "strategy has to win back.", "", "| row | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]  # fmt: skip
    for r in rows:
        lines.append(f"| {r['row']} | " + " | ".join(_pair(r.get("slowdown", {}).get(n)) for n in names) + " |")
    return lines


def _equal_table(rows: Sequence[Result]) -> list[str]:
    names = list(dict.fromkeys(name for r in rows for name in r.get("error_ratio", {})))
    lines = ["## Equality", "", "Error against the same model in float32, in units of eager bf16's own error (by norm).", "",
             "| row | replays | " + " | ".join(names) + " |", "|---|---|" + "---|" * len(names)]  # fmt: skip
    for r in rows:
        cells = [f"{f:.2f}" if (f := r.get("error_ratio", {}).get(n)) is not None else "-" for n in names]
        lines.append(f"| {r['row']} | {r['repetitions']:,} | " + " | ".join(cells) + " |")
    return lines


def _first_table(rows: Sequence[Result]) -> list[str]:
    title = "Time to the first result" if rows[0]["section"] == "first" else "Compile time and the number of layers"
    return store.first_table(title, rows)
