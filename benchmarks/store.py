"""Files of results (shared/results.md's form): rows with their own date, commit, hardware and versions, in shards that are merged.

A row of a file is one model in one section; shards are merged by (section, row), the later date wins. Rows of other hardware, or tiny
ones, do not belong into one file. Targets are data: a value that could not be had is None, with the reason in `note`, and is not met.
"""

from __future__ import annotations

import contextlib
import json
import math
import platform
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import dynaflow as df
from benchmarks import provenance

ROOT = Path(__file__).parents[1]
RESULTS, DOCS = ROOT / "benchmarks" / "results", ROOT / "docs"

Result = dict[str, Any]


def target(what: str, value: float | None, limit: float, note: str = "", at_least: bool = False) -> Result:
    """A limit, from above unless said otherwise."""
    rounded = None if value is None else round(value, 4)
    is_met = value is not None and (value >= limit if at_least else value <= limit)
    sense = {"at_least": True} if at_least else {}
    return {"what": what, "value": rounded, "limit": round(limit, 4), "is_met": is_met, "note": note, **sense}


def failed(section: str, error: Exception) -> Result:
    """What stands in the file for something that could not be measured."""
    text = f"{type(error).__name__}: {str(error).strip()[:400]}"
    return {"note": text, "targets": [target(f"{section} could be measured", None, 0, text)]}


def command(suite: str, words: Sequence[str]) -> str:
    """How a shard was made: what it was asked to measure, not where it put the figures nor how long it might take."""
    kept, skip = [], False
    for word in words:
        if not skip and word not in ("--json", "--limit-s", "--timelines", "--logs"):
            kept.append(shlex.quote(word))
        skip = word in ("--json", "--limit-s", "--timelines", "--logs")
    return f"python -m benchmarks.{suite} {' '.join(kept)}"


def stamped(row: str, section: str, config: Result, found: Result, made_by: str, device: str) -> Result:
    """A row of the file."""
    packages = provenance.versions("transformers", "timm", "triton", "peft")
    versions = {"torch": torch.__version__, "dynaflow": df.__version__, **packages}
    now = datetime.now(UTC).isoformat(timespec="seconds")
    where = {"commit": provenance.commit(), "date": now, "hardware": _hardware(device), "versions": versions}
    form: Result = {"repetitions": 0, "ours": None, "baselines": {}, "against": None, "speedup": None, "equal": "", "emulated": False,
                    "note": "", "targets": []}  # fmt: skip
    return {"row": row, "section": section, "config": config, **form, **found, "made_by": made_by, **where}


def load(path: Path) -> list[Result]:
    return json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []


def merged(sections: Sequence[str], names: Sequence[str], *shards: Iterable[Result]) -> list[Result]:
    """One row per (section, row), in the order of `sections` and `names`; the later date wins."""
    kept: dict[tuple[str, str], Result] = {}
    for row in (row for shard in shards for row in shard):
        key = row["section"], row["row"]
        if key not in kept or row["date"] >= kept[key]["date"]:
            kept[key] = row
    kinds = {(r["hardware"].get("gpu"), bool(r["config"].get("tiny"))) for r in kept.values()}
    if len(kinds) > 1:
        raise SystemExit(f"rows of different kinds do not go into one file: {sorted(map(str, kinds))}; use another --json")
    order = {name: i for i, name in enumerate(names)}
    return sorted(kept.values(), key=lambda r: (sections.index(r["section"]), order.get(r["row"], len(order))))


def save(path: Path, suite: str, rows: Sequence[Result], summary: Mapping[str, Any]) -> None:
    newest = max(rows, key=lambda r: r["date"])
    head = {k: newest[k] for k in ("commit", "date", "hardware", "versions")}
    whole = {"suite": suite, "made_by": f"python -m benchmarks.{suite}", **head, "rows": list(rows), "summary": summary}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def publish(args: Any, report: Any, plot: Callable[[Sequence[Result], Path], None]) -> bool:
    """--merge and --plot of a suite's command: other machines' files into its own; plot and page from it. False: neither was asked for."""
    if args.merge:
        report.save(args.json, report.merged(load(args.json), *map(load, args.merge)))
    if args.plot:
        rows = load(args.json)
        plot(rows, args.json)
        args.page.write_text(report.markdown(rows), encoding="utf-8")
        print(f"wrote {args.json.with_suffix('.svg')}, {args.json.with_suffix('.png')} and {args.page}")
    if args.merge or args.plot:
        print(report.table(load(args.json)))
    return bool(args.merge or args.plot)


def counted(targets: Sequence[Result]) -> Result:
    """How many of the targets are met, and which are not. A target says its row and section."""
    bad = [(t["value"] is None, said(t)) for t in targets if not t["is_met"]]
    missed, unknown = ([text for is_unknown, text in bad if is_unknown == which] for which in (False, True))
    return {"targets": len(targets), "met": len(targets) - len(bad), "missed": missed, "not_measured": unknown}


def geomean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


# -- words


def said(t: Result) -> str:
    limit = f"at {'least' if t.get('at_least') else 'most'} {shown(t['limit'])}"
    measured = f"{shown(t['value'])}, {limit}" if t["value"] is not None else t["note"][:160] or "not measured"
    return f"{t['section']}, {t['row']}: {t['what']}: {measured}"


def shown(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def line(t: Result) -> str:
    """A target in a terminal."""
    mark = "met   " if t["is_met"] else "n/a   " if t["value"] is None else "MISSED"
    note = f"   {t['note'][:80]}" if t["note"] and not t["is_met"] else ""
    sense = ">=" if t.get("at_least") else "<="
    return f"  {mark} {t['what']:<68}{shown(t['value']):>10} {sense} {shown(t['limit']):<7}{note}".rstrip()


def cell(text: str) -> str:
    """Text that stands in a table of markdown."""
    return text.replace("|", "/").replace("\n", " ")


def where(rows: Sequence[Result]) -> str:
    gpu = rows[0]["hardware"].get("gpu") or rows[0]["hardware"]["cpu"]
    return f"{gpu}, torch {rows[0]['versions']['torch']}"


def losses(summary: Mapping[str, Any]) -> list[str]:
    """What was missed or not measured, for the top of a page."""
    lines = []
    for title, found in (("Missed", summary["missed"]), ("Not measured", summary["not_measured"])):
        if found:
            lines += [f"{title}:", "", *(f"- {cell(text)}" for text in found), ""]
    return lines


def first_table(title: str, rows: Sequence[Result]) -> list[str]:
    """Times to the first result (benchmarks/fresh.py)."""
    lines = [f"## {title}", "", "Seconds, each in a fresh process, in which the model has not run before, except where it says so; cold: "
             "caches on disk empty.", "", "| row | variant | first result | cache, MiB |", "|---|---|---|---|"]  # fmt: skip
    for r in rows:
        for name, child in r.get("first", {}).items():
            for when, c in ([("", child)] if "process_s" in child else child.items()):
                seconds = f"{c['first_s']:.1f}" if "first_s" in c else cell(c.get("note", "-")[:120])
                before = ", after an eager run" if "first_s" in c and c.get("has_run", True) else ""
                lines.append(f"| {r['row']} | {name}{when and ', '}{when}{before} | {seconds} | {c.get('cache_mib', '-')} |")
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
