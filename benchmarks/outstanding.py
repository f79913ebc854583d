"""What the result files do not show yet, suite by suite, and the steps of benchmarks.lent that would measure it.

    python -m benchmarks.outstanding                        all of it, with the reasons
    python -m benchmarks.lent ... "overlap --rows missing" "branches --only tune,time --rows missed,missing"

    missing     no figure is there, or one of what was another model, load or workload then, or one without a baseline that it wants
    missed      a figure is there, and short of its target

benchmarks.lent puts names in the place of both words (vLLM's suite: `--suites missing`), so that a row says what it was made by. What is
looked at are the committed files. With `--only`, sections or phases that are not named do not count. (Suites are imported where they are
asked for: benchmarks.ahead comes by without torch.)
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.store import Result

MISSING, MISSED = "missing", "missed"


@dataclass(frozen=True)
class Open:
    # as --only takes it
    section: str
    # as --rows takes it, or --suites
    name: str
    kind: str
    why: str


def _by_targets(section: str, name: str, row: Result | None, is_older: str = "") -> Iterator[Open]:
    """Of a row whose targets are its own."""
    from benchmarks.store import shown

    if row is None:
        yield Open(section, name, MISSING, "not run")
        return
    if is_older:
        yield Open(section, name, MISSING, is_older)
    for t in row["targets"]:
        if t["value"] is None:
            yield Open(section, name, MISSING, t["note"] or f"{t['what']}: not measured")
        elif not t["is_met"]:
            yield Open(section, name, MISSED, f"{t['what']}: {shown(t['value'])} for {shown(t['limit'])}")


def _backend(rows: Sequence[Result]) -> Iterator[Open]:
    from benchmarks.backend import __main__ as command
    from benchmarks.backend import models, report

    known = {(r["section"], r["row"]): r for r in rows}
    first = {row.name for row in models.select(command.FIRST_ROWS)}
    for section in report.SECTIONS:
        names = [command.LAYERS_ROW] if section == "layers" else [r.name for r in models.ROWS if section != "first" or r.name in first]
        for name in names:
            yield from _by_targets(section, name, known.get((section, name)))


def _branches(rows: Sequence[Result]) -> Iterator[Open]:
    """Its targets are of all rows: a row is short where it alone would miss one."""
    from benchmarks.branches import __main__ as command
    from benchmarks.branches import report
    from benchmarks.branches.rows import NAMES, select
    from benchmarks.branches.variants import MAX_AUTOTUNE

    timed = {r["row"]: r for r in report.timed(rows)}
    for name in NAMES:
        row = timed.get(name)
        if row is None or not row["speedup"]:
            yield Open("time", name, MISSING, "not run" if row is None else row["note"][:160] or "no speedup")
            continue
        if MAX_AUTOTUNE not in row["baselines"]:
            yield Open("time", name, MISSING, "without max-autotune")
        if row["speedup"] < report.MIN_ANY:
            yield Open("time", name, MISSED, f"speedup {row['speedup']:.3f} for {report.MIN_ANY}")
        if (memory := report.memory_ratio(row)) is not None and memory > report.MAX_MEMORY:
            yield Open("time", name, MISSED, f"peak memory {memory:.2f}x for {report.MAX_MEMORY}x")
        if row["equal"] != "bit":
            yield Open("time", name, MISSED, f"not bit-equal to one stream: {row['equal']}")
    started = {r["row"]: r for r in rows if r["section"] == "first"}
    for name in (row.name for row in select(command.FIRST_ROWS)):
        if name not in started:
            yield Open("first", name, MISSING, "not run")


def _overlap(rows: Sequence[Result]) -> Iterator[Open]:
    """A workload is measured with all of its strategies."""
    from benchmarks.overlap import report

    known = {r["row"]: r for r in rows}
    for name in report.NAMES:
        row = known.get(name)
        older = "of another workload" if row is not None and report.has_changed(row) else ""
        for found in _by_targets("time", name.rpartition(", ")[0], row, older):
            yield Open(found.section, found.name, found.kind, f"{name.rpartition(', ')[2]}: {found.why}")


def _systems(rows: Sequence[Result]) -> Iterator[Open]:
    from benchmarks.systems.rows import rows as known_rows

    known = {r["row"]: r for r in rows}
    for name in known_rows():
        row = known.get(name)
        yield from _by_targets("time", name, row, row["note"][:160] if row is not None and "not measured" in row["note"] else "")


def _offload(rows: Sequence[Result]) -> Iterator[Open]:
    from benchmarks.offload import ROWS

    known = {r["row"]: r for r in rows}
    for row in ROWS:
        yield from _by_targets("time", row.name, known.get(row.name))


def _vllm_serving(rows: Sequence[Result]) -> Iterator[Open]:
    """A suite is measured with all of its loads. Baselines and controls have no rows."""
    from benchmarks.vllm_serving import report
    from benchmarks.vllm_serving.suites import SUITES

    known = {r["row"]: r for r in rows}
    for suite in SUITES:
        for load in suite.loads:
            for way in filter(report.has_rows, suite.ways):
                row = known.get(suite.row(load, way))
                older = "of another suite" if row is not None and report.has_changed(row) else ""
                for found in _by_targets("serving", suite.name, row, older):
                    yield Open(found.section, found.name, found.kind, f"{load}, {way}: {found.why}")


# suite -> what is open in its file's rows; in the order in which results stand on each other
SUITES: dict[str, Callable[[Sequence[Result]], Iterator[Open]]] = {
    "backend": _backend, "branches": _branches, "overlap": _overlap, "offload": _offload, "systems": _systems,
    "vllm_serving": _vllm_serving,
}  # fmt: skip


def find(suite: str, sections: Collection[str] = (), kinds: Collection[str] = (MISSING, MISSED)) -> list[Open]:
    from benchmarks import store

    rows = store.load(store.RESULTS / f"{suite}.json")
    return [each for each in SUITES[suite](rows) if each.kind in kinds and (not sections or each.section in sections)]


def names(found: Iterable[Open]) -> list[str]:
    return list(dict.fromkeys(each.name for each in found))


def _option(suite: str) -> tuple[str, str]:
    """By which rows are chosen, and what stands between them."""
    return ("--suites", ";") if suite == "vllm_serving" else ("--rows", ",")


def spelled_out(suite: str, words: Sequence[str]) -> list[str] | None:
    """A suite's arguments, with rows in the place of `missing` and `missed`; None where nothing is left to measure."""
    option, between = _option(suite)
    if suite not in SUITES or option not in words[:-1]:
        return list(words)
    at = words.index(option) + 1
    asked = words[at].split(between)
    if not (kinds := {MISSING, MISSED} & {*asked}):
        return list(words)
    sections = words[words.index("--only") + 1].split(",") if suite in ("backend", "branches") and "--only" in words[:-1] else ()
    rows = [*(name for name in asked if name not in kinds), *names(find(suite, sections, kinds))]
    return [*words[:at], between.join(dict.fromkeys(rows)), *words[at + 1 :]] if rows else None


def main() -> int:
    for suite, (option, between) in ((suite, _option(suite)) for suite in SUITES):
        found = find(suite)
        print(f"{suite}: {sum(each.kind == MISSING for each in found)} missing, {sum(each.kind == MISSED for each in found)} missed")
        for section, name in dict.fromkeys((each.section, each.name) for each in found):
            own = [each for each in found if (each.section, each.name) == (section, name)]
            print(f"  {section:<8}{name}: " + "; ".join(dict.fromkeys(f"{each.kind}, {each.why}" for each in own)))
        if found:
            print(f'  -> "{suite} {option} {shlex.quote(between.join((MISSING, MISSED)))}"')
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
