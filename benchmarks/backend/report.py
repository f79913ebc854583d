"""Result rows -> json, the short table on stdout, docs/backend.md.

A row of the file is one model in one section, with its own date, commit, hardware and versions: shards are merged by (row, section), the
later date wins. Rows of other hardware, or tiny ones, do not belong into one file.
"""

from __future__ import annotations

import contextlib
import json
import math
import platform
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

import dynaflow as df
from benchmarks import provenance
from benchmarks.backend.models import ROWS
from benchmarks.backend.sections import MAX_GEOMEAN_RATIO, Result, target
from benchmarks.backend.variants import COMPILE, COMPILE_GRAPH, OURS, OURS_BORROW, OURS_GRAPH, REPLAY

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "backend.json"
PAGE = ROOT / "docs" / "backend.md"
SECTIONS = ("time", "host", "split", "equal", "first", "layers")


def stamped(row: str, section: str, config: Result, found: Result, made_by: str, device: str) -> Result:
    """A row of the file."""
    versions = {"torch": torch.__version__, "dynaflow": df.__version__, **provenance.versions("transformers", "timm", "triton")}
    now = datetime.now(UTC).isoformat(timespec="seconds")
    where = {"commit": provenance.commit(), "date": now, "hardware": _hardware(device), "versions": versions}
    form = {"repetitions": 0, "ours": None, "baselines": {}, "against": None, "speedup": None, "equal": "", "emulated": False, "note": "",
            "targets": []}  # fmt: skip
    return {"row": row, "section": section, "config": config, **form, **found, "made_by": made_by, **where}


def load(path: Path) -> list[Result]:
    return json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []


def merged(*shards: Iterable[Result]) -> list[Result]:
    """One row per (row, section); the later date wins."""
    kept: dict[tuple[str, str], Result] = {}
    for row in (row for shard in shards for row in shard):
        key = row["section"], row["row"]
        if key not in kept or row["date"] >= kept[key]["date"]:
            kept[key] = row
    kinds = {(r["hardware"].get("gpu"), bool(r["config"].get("tiny"))) for r in kept.values()}
    if len(kinds) > 1:
        raise SystemExit(f"rows of different kinds do not go into one file: {sorted(map(str, kinds))}; use another --json")
    order = {row.name: i for i, row in enumerate(ROWS)}
    return sorted(kept.values(), key=lambda r: (SECTIONS.index(r["section"]), order.get(r["row"], 99)))


def save(path: Path, rows: Sequence[Result]) -> None:
    newest = max(rows, key=lambda r: r["date"])
    head = {k: newest[k] for k in ("commit", "date", "hardware", "versions")}
    whole = {"suite": "backend", "made_by": "python -m benchmarks.backend", **head, "rows": list(rows), "summary": summary(rows)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def summary(rows: Sequence[Result]) -> Result:
    targets = [{"row": r["row"], "section": r["section"], **t} for r in rows for t in r["targets"]] + overall(rows)
    bad = [(t["value"] is None, _said(t)) for t in targets if not t["is_met"]]
    missed, unknown = ([text for is_unknown, text in bad if is_unknown == which] for which in (False, True))
    speedups = [r["speedup"] for r in rows if r["speedup"]]
    return {
        "rows": len(rows), "targets": len(targets), "met": len(targets) - len(bad), "missed": missed, "not_measured": unknown,
        "overall": overall(rows),
        "geomean_speedup": round(_geomean(speedups), 4) if speedups else None, "min_speedup": min(speedups, default=None),
    }  # fmt: skip


def _said(t: Result) -> str:
    measured = f"{_value(t['value'])}, at most {_value(t['limit'])}" if t["value"] is not None else t["note"][:160] or "not measured"
    return f"{t['section']}, {t['row']}: {t['what']}: {measured}"


def overall(rows: Sequence[Result]) -> list[Result]:
    """Targets over all rows: the geometric mean of the time ratios."""
    found = []
    for a, b in ((OURS, COMPILE), (OURS_BORROW, COMPILE_GRAPH)):
        timed = [r for r in rows if r["section"] == "time"]
        ratios = [pair["ratio"] for r in timed if (pair := r.get("ratios", {}).get(f"{a} / {b}")) is not None]
        if timed:
            note = "" if len(ratios) == len(timed) else f"{len(ratios)} of {len(timed)} rows have both"
            value = _geomean(ratios) if ratios else None
            goal = target(f"time, geometric mean: {a} / {b}", value, MAX_GEOMEAN_RATIO, note)
            found.append({"row": "all rows", "section": "time", **goal})
    return found


def _geomean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


# -- tables


def table(rows: Sequence[Result]) -> str:
    """Short: a line per target, misses marked; then the losses again."""
    lines = []
    for row in rows:
        lines.append(f"{row['section']:<7}{row['row']}" + (f"   ({row['note'][:150]})" if row["note"] else ""))
        lines += [*_figures(row), *map(_line, row["targets"])]
    lines += ["all", *map(_line, overall(rows))]
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


def _line(t: Result) -> str:
    return f"  {_mark(t)} {t['what']:<68}{_value(t['value']):>10} <= {_value(t['limit']):<7}{_note(t, 80)}".rstrip()


def _mark(t: Result) -> str:
    return "met   " if t["is_met"] else "n/a   " if t["value"] is None else "MISSED"


def _note(t: Result, width: int) -> str:
    return f"   {t['note'][:width]}" if t["note"] and not t["is_met"] else ""


def _value(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def markdown(rows: Sequence[Result]) -> str:
    by_section = {s: [r for r in rows if r["section"] == s] for s in SECTIONS}
    first = rows[0]
    gpu = first["hardware"].get("gpu") or first["hardware"]["cpu"]
    s = summary(rows)
    lines = [
        "# What being under DynaFlow costs", "",
        f"Made by `python -m benchmarks.backend` on {gpu}, torch {first['versions']['torch']}, bf16, random weights. Do not edit. "
        "Every row carries its own date and commit in [backend.json](../benchmarks/results/backend.json).", "",
        f"{s['met']} of {s['targets']} targets are met.", "",
    ]  # fmt: skip
    for title, found in (("Missed", s["missed"]), ("Not measured", s["not_measured"])):
        if found:
            lines += [f"{title}:", "", *(f"- {_cell(text)}" for text in found), ""]
    writers = {"time": _time_table, "host": _host_table, "split": _split_table, "equal": _equal_table, "first": _first_table,
               "layers": _first_table}  # fmt: skip
    for section, found in by_section.items():
        if found:
            lines += [*writers[section](found), "", *_targets_table(found, section), ""]
    return "\n".join(lines)


def _targets_table(rows: Sequence[Result], section: str) -> list[str]:
    lines = ["| row | target | measured | at most | |", "|---|---|---|---|---|"]
    extra = overall(rows) if section == "time" else []
    for name, t in [(r["row"], t) for r in rows for t in r["targets"]] + [("all rows", t) for t in extra]:
        verdict = "met" if t["is_met"] else "not measured" if t["value"] is None else "**missed**"
        note = f"; {t['note'][:200]}" if t["note"] and not t["is_met"] else ""
        lines.append(f"| {name} | {t['what']} | {_value(t['value'])} | {_value(t['limit'])} | {verdict}{_cell(note)} |")
    return lines


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")


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
    lines += ["", "Ratios of medians with their 95% interval (bootstrap over rounds); in brackets the ratio of device times alone.", "",
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
    lines = ["## Host", "", "Microseconds until the call returns, median (spread), the device's queue kept short. "
             "Dynamo's guards: the same model with a backend that does nothing.", "",
             "| row | " + " | ".join(names) + " | copied inputs |", "|---|" + "---|" * (len(names) + 1)]  # fmt: skip
    for r in rows:
        cells = [f"{f['median_us']:.0f} ({f['spread_us']:.0f})" if (f := r.get("host", {}).get(n)) else "-" for n in names]
        lines.append(f"| {r['row']} | " + " | ".join(cells) + f" | {r.get('copied_inputs', '-')} |")
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
    lines = [f"## {title}", "", "Seconds, each in a fresh process; cold: caches on disk empty.", "",
             "| row | variant | first result | cache, MiB |", "|---|---|---|---|"]  # fmt: skip
    for r in rows:
        for name, child in r.get("first", {}).items():
            for when, c in ([("", child)] if "process_s" in child else child.items()):
                seconds = f"{c['first_s']:.1f}" if "first_s" in c else _cell(c.get("note", "-")[:120])
                lines.append(f"| {r['row']} | {name}{when and ', '}{when} | {seconds} | {c.get('cache_mib', '-')} |")
    return lines


# -- where this ran


def _hardware(device: str) -> Result:
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        cpu = next(x.split(":", 1)[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name"))
    if not device.startswith("cuda"):
        return {"gpu": None, "cpu": cpu}
    gpu = torch.cuda.get_device_properties(0)
    return {"gpu": gpu.name, "sms": gpu.multi_processor_count, "cpu": cpu}
