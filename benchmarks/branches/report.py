"""Result rows -> json, the short table on stdout, docs/branches.md. Targets are of the whole file: they are counted from its rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import store
from benchmarks.branches.ours import DEFAULT
from benchmarks.branches.rows import BRANCHY, CONTROL, GROUPS, HRNET, LORA, NAMES, ROWS, TRAINING, Row
from benchmarks.branches.variants import COMPILE, EAGER, EAGER_GRAPH, OURS
from benchmarks.store import Result, cell, geomean, line, shown, target

RESULTS = store.RESULTS / "branches.json"
PAGE = store.DOCS / "branches.md"
SECTIONS = ("time", "first")

MIN_GEOMEAN, MIN_HRNET, MIN_LORA, MIN_ANY = 1.4, 2.0, 1.4, 0.98
MAX_MEMORY = 1.25
MAX_FIRST = 1.3
MIN_REACHED = 0.8
_GROUP_OF = {row.name: row.group for row in ROWS}
_TITLES = {BRANCHY: "Branchy models", CONTROL: "Controls", TRAINING: "Training steps"}


def config(row: Row, tiny: bool, options: Mapping[str, Any]) -> Result:
    return {"dtype": "bf16", "group": row.group, **row.config, **({"options": dict(options)} if options else {}),
            **({"tiny": True} if tiny else {}), **({} if row.repeats else {"cudnn_attention": False})}  # fmt: skip


def merged(*shards: Iterable[Result]) -> list[Result]:
    return store.merged(SECTIONS, NAMES, *shards)


def save(path: Path, rows: Sequence[Result]) -> None:
    store.save(path, "branches", rows, summary(rows))


# -- targets


def timed(rows: Sequence[Result], *groups: str) -> list[Result]:
    return [r for r in rows if r["section"] == "time" and (not groups or _group(r) in groups)]


def _group(row: Result) -> str:
    return row["config"].get("group") or _GROUP_OF[row["row"]]


def speedups(rows: Sequence[Result], *groups: str) -> dict[str, float]:
    return {r["row"]: r["speedup"] for r in timed(rows, *groups) if r["speedup"]}


def targets(rows: Sequence[Result]) -> list[Result]:
    """Speedups are over the faster of torch.compile's baselines; rows without one are counted in the note."""
    branchy, every = speedups(rows, BRANCHY), speedups(rows)
    least = min(every, key=lambda name: every[name], default=None)
    wanted = sum(group == BRANCHY for group in _GROUP_OF.values())
    unequal = [r["row"] for r in timed(rows) if r["speedup"] and r["equal"] != "bit"]
    memory = {r["row"]: ratio for r in timed(rows) if (ratio := memory_ratio(r)) is not None}
    most = max(memory, key=lambda name: memory[name], default=None)
    some = "" if len(branchy) == wanted else f"{len(branchy)} of {wanted} branchy rows are measured"
    found = [
        target("speedup, geometric mean over branchy rows", geomean(list(branchy.values())) if branchy else None, MIN_GEOMEAN,
               some, at_least=True),
        target(f"speedup: {HRNET}", every.get(HRNET), MIN_HRNET, _why(rows, HRNET), at_least=True),
        target(f"speedup: {LORA}", every.get(LORA), MIN_LORA, _why(rows, LORA), at_least=True),
        target("speedup, least of all rows", every[least] if least else None, MIN_ANY, least or "no row is measured", at_least=True),
        target("peak memory, weights and inputs included, most of all rows", memory[most] if most else None, MAX_MEMORY,
               most or "no row says what it was given"),
        target("rows that are not bit-equal to one stream", len(unequal) if every else None, 0, ", ".join(unequal)),
        *(_first_target(rows, when) for when in ("cold", "warm")),
    ]  # fmt: skip
    return [{"row": "all rows", "section": "time", **t} for t in found]


def _first_target(rows: Sequence[Result], when: str) -> Result:
    """Over all rows of which it was measured."""
    found = {}
    for r in rows:
        ours, theirs = (r.get("first", {}).get(name, {}).get(when, {}).get("first_s") for name in (OURS, COMPILE))
        if ours and theirs:
            found[r["row"]] = ours / theirs
    most = max(found, key=lambda name: found[name], default=None)
    value = found[most] if most else None
    return target(f"time to first result, {when}: {OURS} / {COMPILE}, most of all rows", value, MAX_FIRST, most or "not run")


def memory_ratio(row: Result) -> float | None:
    """What the device holds at its peak, against the baseline's."""
    ours, theirs, given = row["ours"], row["baselines"].get(row["against"]), row.get("given_mib")
    if not given or not ours or not theirs or "reserved_mib" not in ours or "reserved_mib" not in theirs:
        return None
    return float((given + ours["reserved_mib"]) / (given + theirs["reserved_mib"]))


def _why(rows: Sequence[Result], name: str) -> str:
    """Why a row has no speedup."""
    row = next((r for r in timed(rows) if r["row"] == name), None)
    return "not run" if row is None else "" if row["speedup"] else row["note"][:160] or "no baseline"


def summary(rows: Sequence[Result]) -> Result:
    branchy, every = speedups(rows, BRANCHY), speedups(rows)
    return {
        "rows": len(timed(rows)), "measured": len(every), "not_run": [n for n in NAMES if n not in {r["row"] for r in timed(rows)}],
        "geomean_speedup": round(geomean(list(branchy.values())), 4) if branchy else None,
        "geomean_controls": round(geomean(list(c.values())), 4) if (c := speedups(rows, CONTROL)) else None,
        "geomean_training": round(geomean(list(t.values())), 4) if (t := speedups(rows, TRAINING)) else None,
        "min_speedup": min(every.values(), default=None), **store.counted(targets(rows)), "overall": targets(rows),
    }  # fmt: skip


# -- tables


def table(rows: Sequence[Result]) -> str:
    """Short: a line per row, a line per target."""
    lines = [f"{'row':<30}{'against':<22}{'ms':>9}{'dynaflow':>10}{'speedup':>9}{'in graph':>9}{'bound':>7}  equal"]
    for r in timed(rows):
        ours, theirs = r["ours"], r["baselines"].get(r["against"])
        figures = f"{_ms(theirs):>9}{_ms(ours):>10}{_times(r['speedup']):>9}{_times(r.get('speedup_in_graph')):>9}"
        figures += f"{_times(r.get('bound')):>7}  {r['equal']}"
        lines.append(f"{r['row']:<30}{r['against'] or '-':<22}{figures}" + (f"   ({r['note'][:110]})" if r["note"] else ""))
    lines += [f"{r['row']:<30}first result: {_first(r)}" for r in rows if r["section"] == "first"]
    s = summary(rows)
    return "\n".join([*lines, *map(line, targets(rows)), f"{s['met']} of {s['targets']} targets met, {s['measured']} rows measured"])


def _ms(figures: Result | None) -> str:
    return f"{figures['median_ms']:.3f}" if figures else "-"


def _times(value: float | None) -> str:
    return f"{value:.2f}x" if value else "-"


def _first(row: Result) -> str:
    children = [(name, when, c) for name, child in row.get("first", {}).items() for when, c in child.items()]
    return ", ".join(f"{name} {when} {c.get('first_s', '-')} s" for name, when, c in children)


def markdown(rows: Sequence[Result], folder: Path = PAGE.parent) -> str:
    s = summary(rows)
    lines = [
        "# What independent branches gain", "",
        '`torch.compile(model, backend="dynaflow")` against torch.compile. '
        f"Made by `python -m benchmarks.branches` on {store.where(rows)}, bf16, random weights. Do not edit. "
        "Every row carries its own date and commit in [branches.json](../benchmarks/results/branches.json).", "",
        f"{s['met']} of {s['targets']} targets are met; {s['measured']} of {len(NAMES)} rows are measured.", "",
        "| target | measured | wanted | |", "|---|---|---|---|", *map(_target_row, targets(rows)), "",
    ]  # fmt: skip
    failed = [f"{r['row']}: {r['note'][:200] or 'no speedup'}" for r in timed(rows) if not r["speedup"]]
    for title, found in (("Failed", failed), ("Not run", s["not_run"])):
        if found:
            lines += [f"{title}:", "", *(f"- {cell(text)}" for text in found), ""]
    lines += [
        "Milliseconds per step, median (spread from the 10th to the 90th percentile), variants in turns in one process. Of an inference "
        "row, all but dynaflow are put into a CUDA Graph by the suite or by Inductor, copies of inputs included; `against` is the "
        "faster of `torch.compile` in a CUDA Graph and `max-autotune`, for training the fastest of `torch.compile`, `reduce-overhead` and "
        "`max-autotune`. dynaflow is the faster of its own default and `mode=\"max-autotune\"`, where that was measured; it says which. "
        "Speedups carry their 95% interval. In a graph: dynaflow's callable inside of the caller's own CUDA Graph, against "
        "torch.compile in one; Dynamo's guards and our own host time, which show where a step is short, are out of the way there. Bound: "
        "what the longer of critical path and total work would give, simulated. Equal: to the same plan on one stream, fresh inputs, "
        "poisoned outputs; in brackets against torch.compile. Memory: peak reserved above weights and inputs, MiB, "
        "dynaflow / against.", "",
    ]  # fmt: skip
    for group in GROUPS:
        if found_rows := timed(rows, group):
            lines += [f"## {_TITLES[group]}", "", *_rows_table(found_rows, folder), "", *_mean(rows, group), ""]
    if short := [sentence for r in timed(rows) if (sentence := _why_short(r))]:
        lines += ["## Short of the bound", "", *(f"- {sentence}" for sentence in short), ""]
    if plans := [r for r in timed(rows) if r.get("plan")]:
        head = ["| row | chosen, and what was tried (us per call) | calls under a plan | fell back |", "|---|---|---|---|"]
        lines += ["## Plans", "", *head, *map(_plan_row, plans), ""]
    if notes := [r for r in timed(rows) if r["note"]]:
        lines += ["## Notes", "", *(f"- {r['row']}: {cell(r['note'])}" for r in notes), ""]
    if first := [r for r in rows if r["section"] == "first"]:
        lines += [*store.first_table("Time to the first result", first), ""]
    return "\n".join(lines).rstrip() + "\n"


def _target_row(t: Result) -> str:
    verdict = "MET" if t["is_met"] else "not measured" if t["value"] is None else "**MISSED**"
    note = f"; {cell(t['note'])}" if t["note"] else ""
    return f"| {t['what']} | {shown(t['value'])} | at {'least' if t.get('at_least') else 'most'} {shown(t['limit'])} | {verdict}{note} |"


def _rows_table(rows: Sequence[Result], folder: Path) -> list[str]:
    heads = "row, eager, against, ms, dynaflow (ms), speedup, in a graph, bound, reached, equal, memory".split(", ")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for r in rows:
        theirs, ours = r["baselines"].get(r["against"]), r["ours"]
        eager = next((f for n in (EAGER_GRAPH, EAGER) if (f := r["baselines"].get(n))), None)
        low, high = r.get("interval") or (0.0, 0.0)
        speedup = f"**{r['speedup']:.2f}x** ({low:.2f} to {high:.2f})" if r["speedup"] else "-"
        cells = (_picture(r["row"], folder), _spread(eager), r["against"] or "-", _spread(theirs), _spread(ours) + _mode(r), speedup,
                 _times(r.get("speedup_in_graph")), _times(r.get("bound")), _share(r), _equal(r), _mib(ours, theirs))  # fmt: skip
        lines.append("| " + " | ".join(map(cell, cells)) + " |")
    return lines


def _picture(row: str, folder: Path) -> str:
    from benchmarks.branches.pictures import path_of

    path = path_of(row, folder / "img")
    return f"[{row}](img/{path.name})" if path.exists() else row


def _spread(figures: Result | None) -> str:
    return f"{figures['median_ms']:.3f} ({figures['spread_ms']:.3f})" if figures else "-"


def _mode(row: Result) -> str:
    """Said where it is not the default."""
    return f", {row['mode']}" if row.get("mode", DEFAULT) != DEFAULT else ""


def _share(row: Result) -> str:
    """Of the bound's time saved: where the bound allows nothing, nothing is to be reached."""
    if not row.get("bound") or not row["speedup"]:
        return "-"
    return f"{max(row['speedup'], row.get('speedup_in_graph') or 0) / row['bound']:.0%}"


def _why_short(row: Result) -> str:
    """Of a row that reaches less than 80% of its bound: what its plan loses in simulation, where every launch takes time of its own, and
    what the device loses beyond that."""
    limit, speedup = row.get("bound_of") or {}, max(row["speedup"] or 0, row.get("speedup_in_graph") or 0)
    if not speedup or not row.get("bound") or speedup >= MIN_REACHED * row["bound"] or "plan_us" not in limit:
        return ""
    bound_us, plan_us, device_us = limit["ms"] * 1e3, limit["plan_us"], row["ours"].get("device_ms", row["ours"]["median_ms"]) * 1e3
    by = "longest chain of kernels" if limit["critical_path_us"] >= limit["total_work_us"] else "work of all kernels"
    rest = (f"{device_us / plan_us - 1:.0%} more: kernels that run together slow each other" if device_us > plan_us
            else f"{1 - device_us / plan_us:.0%} less: launches take less than is simulated")  # fmt: skip
    host = "; the rest of a step is the host's" if row["ours"]["median_ms"] * 1e3 > 1.05 * device_us else ""
    return (
        f"{row['row']}, {speedup / row['bound']:.0%}: the bound is the {by}, {bound_us:,.0f} us, as if nothing had to be launched. "
        f"With a launch per kernel its plan simulates to {plan_us:,.0f} us; the device takes {device_us:,.0f} us, {rest}{host}."
    )


def _equal(row: Result) -> str:
    found = row.get("differences", {}).get(COMPILE)
    return row["equal"] + (f" ({'bit' if found['bit_equal'] == found['inputs'] else format(found['max_abs'], '.1e')})" if found else "")


def _mib(ours: Result | None, theirs: Result | None) -> str:
    if not ours or not theirs or "reserved_mib" not in ours or "reserved_mib" not in theirs:
        return "-"
    return f"{ours['reserved_mib']:,.0f} / {theirs['reserved_mib']:,.0f}"


def _mean(rows: Sequence[Result], group: str) -> list[str]:
    found = speedups(rows, group)
    if not found:
        return ["No row has a speedup."]
    return [f"Geometric mean {geomean(list(found.values())):.3f}x over {len(found)} rows, least {min(found.values()):.3f}x."]


def _plan_row(row: Result) -> str:
    plan = row["plan"]
    fallbacks = "; ".join(f"{count}: {reason}" for reason, count in plan["fallbacks"].items()) or "-"
    chosen = "; ".join(f"{region.partition('.')[2] or region}: {choice}" for region, choice in plan["chosen"].items()) or "-"
    cells = (row["row"], chosen, f"{plan['planned_calls']} of {plan['calls']}", fallbacks)
    return "| " + " | ".join(map(cell, cells)) + " |"
