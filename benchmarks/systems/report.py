"""The file, the table, the page, the picture; and what the systems' own pages quote."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from benchmarks import store
from benchmarks.store import Result
from benchmarks.systems.rows import rows as known_rows
from benchmarks.systems.variants import NAMES, OPTIONS, OURS, SPLIT

RESULTS, PAGE = store.RESULTS / "systems.json", store.DOCS / "systems" / "measured.md"
# in a page: rows whose names match these globs are quoted between the two
QUOTED = re.compile(r"(<!-- measured: (?P<globs>[^>]*?) -->\n).*?(<!-- end of measured -->)", re.DOTALL)
NOT_YET = "Not measured yet."


def merged(*shards: Sequence[Result]) -> list[Result]:
    return store.merged(("time",), list(known_rows()), *shards)


def targets(rows: Sequence[Result]) -> list[Result]:
    return [{**t, "row": r["row"], "section": r["section"]} for r in rows for t in r["targets"]]


def save(path: Path, rows: Sequence[Result]) -> None:
    speedups = [r["speedup"] for r in rows if r["speedup"]]
    summary = {"rows": len(rows), **store.counted(targets(rows))}
    if speedups:
        summary |= {"geomean_speedup": round(store.geomean(speedups), 4), "min_speedup": min(speedups)}
    store.save(path, "systems", rows, summary)


def _known(row: Result) -> dict[str, Result]:
    return {**row["baselines"], **({row["ours"]["variant"]: row["ours"]} if row["ours"] else {})}


def _shown(rows: Sequence[Result]) -> list[str]:
    """Variants that were measured."""
    return [n for n in NAMES if any(n in _known(r) for r in rows)]


def _speedups(row: Result) -> tuple[str, str]:
    """Of `dynaflow`, and of the fastest of ours."""
    if not row["speedup"]:
        return "-", "-"
    best = row["best"]
    low, high = row["interval"]
    return f"{row['speedup']:.3f} ({low:.2f}-{high:.2f})", f"{best['speedup']:.3f} {best['variant'].removeprefix(OURS).strip()}".strip()


def _splits(row: Result) -> str:
    counts = row.get("counts", {}).get(SPLIT)
    return f", {counts['split_calls']} of {counts['calls']} calls split" if counts else ""


def table(rows: Sequence[Result]) -> str:
    names = _shown(rows)
    head = "".join(f"{n:>16}" for n in names) + f"  {'against':16}  {'speedup':19}  {'best of ours':12}  error"
    lines = [f"{'row':32}{'ms per':>8}{head}"]
    for r in rows:
        known = _known(r)
        cells = [f"{known[n]['median_ms']:.3f}" if n in known else "-" for n in names]
        ours, best = _speedups(r)
        said = f"  {r['against'] or '-':16}  {ours:19}  {best:12}  {r['equal']}{_splits(r)} {r['note'][:100]}"
        lines.append((f"{r['row']:32}{r['config'].get('unit', ''):>8}" + "".join(f"{c:>16}" for c in cells) + said).rstrip())
    return "\n".join([*lines, *(f"{store.line(t)}   {t['row']}" for t in targets(rows) if not t["is_met"])])


def _cells(rows: Sequence[Result]) -> list[str]:
    """A table of markdown."""
    names = _shown(rows)
    lines = ["| row | ms per | " + " | ".join(names) + " | speedup | best of ours | error |", "|---|---|" + "---|" * (len(names) + 3)]
    for r in rows:
        known = _known(r)
        cells = []
        for n in names:
            text = f"{known[n]['median_ms']:.3f}" if n in known else "-"
            if n in known and "tokens_per_s" in known[n]:
                text += f" ({known[n]['tokens_per_s']:,.0f} tokens/s)"
            cells.append(f"**{text}**" if n == r["against"] else text)
        ours, best = _speedups(r)
        cells += [ours, best, f"{r['equal']}{_splits(r)}"]
        lines.append(f"| {r['row']} | {r['config'].get('unit', '')} | {' | '.join(cells)} |")
    return lines


def markdown(rows: Sequence[Result]) -> str:
    if not rows:
        return f"# Systems, measured\n\n{NOT_YET} `python -m benchmarks.systems` measures, with `--plot` it makes this page.\n"
    notes = [f"- {r['row']}: {store.cell(r['note'][:300])}" for r in rows if r["note"]]
    lines = [
        "# Systems, measured", "", f"Made by `python -m benchmarks.systems` on {store.where(rows)}, random weights, bf16. Do not edit.", "",
        "Milliseconds of a whole call of the system, per token, step or call: eager; `torch.compile` of the model, without and with CUDA "
        "Graphs (`reduce-overhead`); the system's own setting (`generate` with a static cache compiles its decode steps and records them; "
        "diffusers: `compile_repeated_blocks`); DynaFlow switched on by one line, and with `fixed_weights=True`. The fastest baseline is "
        "bold; the speedup is its time over `dynaflow`'s, with a 95% interval. The error is that of ours against float32, relative; at "
        "most 1.5 times the baselines'.",
        "", *_cells(rows), "", *store.losses(store.counted(targets(rows))),
        *(["Notes:", "", *notes, ""] if notes else []),
    ]  # fmt: skip
    return "\n".join(lines).rstrip() + "\n"


def quoted(page: str, rows: Sequence[Result]) -> str:
    """The page, with what was measured in its places."""

    def block(match: re.Match[str]) -> str:
        globs = [g.strip() for g in match["globs"].split(",")]
        chosen = [r for r in rows if any(fnmatch(r["row"], g) for g in globs)]
        text = "\n".join([f"{store.where(chosen)}:", "", *_cells(chosen)]) if chosen else NOT_YET
        return f"{match[1]}{text}\n{match[3]}"

    return QUOTED.sub(block, page)


def pages() -> list[Path]:
    return [path for path in sorted((store.DOCS / "systems").glob("*.md")) if QUOTED.search(path.read_text(encoding="utf-8"))]


def quote(rows: Sequence[Result]) -> None:
    for path in pages():
        path.write_text(quoted(path.read_text(encoding="utf-8"), rows), encoding="utf-8")


def plot(rows: Sequence[Result], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(rows), 1, figsize=(7, 1.6 * len(rows)), squeeze=False, layout="constrained")
    for axis, r in zip(axes[:, 0], rows):
        known = _known(r)
        shown = [n for n in reversed(NAMES) if n in known]
        axis.barh(shown, [known[n]["median_ms"] for n in shown], color=["#c44" if n in OPTIONS else "#888" for n in shown])
        axis.set_title(f"{r['row']}, ms per {r['config'].get('unit', 'call')}", fontsize=9)
    for suffix in (".svg", ".png"):
        figure.savefig(path.with_suffix(suffix), dpi=120)
