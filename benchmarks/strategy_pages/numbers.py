"""What the result files say of a strategy, as markdown. Every figure is from a file; what is emulated or missed is called so."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import store
from benchmarks.overlap.report import GOALS
from benchmarks.overlap.sections import PAYS, shown_share
from benchmarks.store import Result, cell, geomean, load

RESULTS = "../../benchmarks/results"
# strategy -> what the vLLM suite calls it
WAYS = {"NanoFlow": "dynaflow:NanoFlow", "TwoBatch": "two_batch", "Branches": "branches"}


def numbers(strategy: str) -> str:
    """All that was measured of a strategy; or that nothing was."""
    found = [text for text in (_overlap(strategy), _branches(strategy), _vllm(strategy), _loopback(strategy), _offload(strategy)) if text]
    return "\n\n".join(found) or "Not measured yet: no file of results has a row of it."


def summary(strategy: str) -> str:
    """A cell of the table of all strategies."""
    rows = _overlap_rows(strategy)
    if rows:
        return f"{_best_and_mean(rows)}, emulated"
    if strategy == "NanoBatch":
        rows = _of("loopback", "NanoBatch(4)")
        return f"{max(r['speedup'] for r in rows):.2f}x at best on a CPU, emulated" if rows else "not measured yet"
    if strategy == "Branches":
        rows = [r for r in _rows("branches") if r["section"] == "time" and r["speedup"]]
        return _best_and_mean(rows)
    return "measured" if strategy == "Offload" and _rows("offload") else "not measured yet"


def _best_and_mean(rows: Sequence[Result]) -> str:
    speedups = [r["speedup"] for r in rows]
    return f"{max(speedups):.2f}x at best, {geomean(speedups):.2f}x over {len(speedups)} rows"


# -- per file


def _rows(name: str) -> list[Result]:
    return load(store.RESULTS / f"{name}.json")


def _of(name: str, strategy: str) -> list[Result]:
    return [r for r in _rows(name) if r["config"].get("strategy") == strategy and r["speedup"]]


def _overlap_rows(strategy: str) -> list[Result]:
    return _of("overlap", strategy)


def _overlap(strategy: str) -> str:
    rows = _overlap_rows(strategy)
    if not rows:
        return ""
    # where the sequential plan ran, a gain is the noise of the run
    gains, best = [r for r in rows if r["speedup"] >= PAYS and not r["gave_up"]], max(rows, key=lambda r: r["speedup"])
    least, mean = min(r["speedup"] for r in rows), geomean([r["speedup"] for r in rows])
    text = (
        f"**On one H200, over an emulated network**, with `never_slower=True` ([overlap.json]({RESULTS}/overlap.json), "
        f"[what the columns mean](../overlap.md)): it gains on {len(gains)} of {len(rows)} rows, {best['speedup']:.2f}x at best, "
        f"{mean:.2f}x in the geometric mean, {least:.3f}x at least."
    )
    if goal := GOALS.get(strategy):
        most = max(r["bound_beside"] for r in rows)
        verdict = "met" if best["speedup"] >= goal else f"missed; side by side, the same kernels reach {most:.2f}x at most"
        text += f" The goal, {goal:.2f}x on its best row, is {verdict}."
    lines = [
        f"| {r['config']['workload']} | {r['config']['link']} | {r['baselines']['sequential']['median_ms']:.2f} | "
        f"{r['ours']['median_ms']:.2f} | {_gain(r)} | {r['bound_beside']:.2f}x | {shown_share(r)} | {_outcome(r)} |"
        for r in rows
    ]
    return _table(text, "workload, link, sequential (ms), overlapped (ms), speedup (95%), bound, hidden, what ran", lines)


def _branches(strategy: str) -> str:
    if strategy != "Branches":
        return ""
    rows = [r for r in _rows("branches") if r["section"] == "time" and r["speedup"]]
    text = (
        f'**On one H200, under `"auto"`**, which searches over settings of this strategy, kernel by kernel ([branches.json]({RESULTS}/'
        "branches.json), [all that was measured](../branches.md)), against the fastest that was measured of `torch.compile`'s ways:"
    )
    return _plain_table(text, rows)


def _vllm(strategy: str) -> str:
    rows = [r for r in _rows("vllm_serving") if strategy in WAYS and r["config"]["way"] == WAYS[strategy] and r["speedup"]]
    if not rows:
        return ""
    is_emulated = "; the other ranks' all-reduce is emulated" if any(r["emulated"] for r in rows) else ""
    text = (
        f"**Inside vLLM {rows[0]['config']['vllm']['vllm']}, on one H200**, against the fastest of vLLM's own ways{is_emulated} "
        f"([vllm_serving.json]({RESULTS}/vllm_serving.json), [all ways](../systems/vllm-measured.md)), in tokens per second:"
    )
    lines = [
        f"| {r['row'].rsplit(', ', 1)[0]} | {r['baselines'][r['against']]['tokens_per_s']:,} | {r['ours']['tokens_per_s']:,} | "
        f"{_gain(r)} | {_how_much(r)} | {r['equal']}{_missed(r, '; ')} |"
        for r in rows
    ]
    return _table(text, "load, vLLM's best, ours, speedup (95%), runs under a plan, equal", lines)


def _how_much(r: Result) -> str:
    if r.get("regions"):
        return f"{r['planned_regions']} of {r['regions']} pieces"
    return f"{r['split_steps']} of {r['steps']} steps"


def _loopback(strategy: str) -> str:
    rows = _of("loopback", {"NanoBatch": "NanoBatch(4)"}.get(strategy, strategy))
    if not rows:
        return ""
    text = (
        f"**On two CPU cores, over gloo**, on a slow link that is emulated ([loopback.json]({RESULTS}/loopback.json), "
        "[how](../../benchmarks/loopback.py)), against the sequential plan:"
    )
    return _plain_table(text, rows)


def _offload(strategy: str) -> str:
    if strategy != "Offload":
        return ""
    rows = _rows("offload")
    if not rows:
        return (
            "Not measured yet: no file of results has a row of it. `make bench-offload` measures it on a GPU: a Llama twice as large as "
            "the budget, against accelerate's `cpu_offload` and against the longer of its copies and its compute."
        )
    return _plain_table(f"**On {store.where(rows)}** ([offload.json]({RESULTS}/offload.json)):", [r for r in rows if r["speedup"]])


# -- cells


def _plain_table(text: str, rows: Sequence[Result]) -> str:
    lines = [
        f"| {r['row']} | {r['against']} | {r['baselines'][r['against']]['median_ms']:.2f} | {r['ours']['median_ms']:.2f} | {_gain(r)} | "
        f"{cell(r['equal'])}{_missed(r, '; ')} |"
        for r in rows
    ]
    return _table(text, "row, against, theirs (ms), ours (ms), speedup (95%), equal", lines)


def _table(text: str, heads: str, lines: Sequence[str]) -> str:
    columns = heads.split(", ")
    return "\n".join([text, "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *lines])


def _gain(r: Result) -> str:
    low, high = r.get("interval") or (None, None)
    return f"{r['speedup']:.2f}x ({low:.2f} to {high:.2f})" if low else f"{r['speedup']:.2f}x"


def _missed(r: Result, before: str) -> str:
    missed = [f"target missed: {store.shown(t['value'])}, at {'least' if t.get('at_least') else 'most'} {store.shown(t['limit'])}"
              for t in r["targets"] if not t["is_met"]]  # fmt: skip
    return before + "; ".join(missed) if missed else ""


def _outcome(r: Result) -> str:
    ran = f"sequential: {cell(r['gave_up'].split(':')[0])}" if r["gave_up"] else "its plan"
    short = {"speedup over sequential (emulated)": "speedup", "share of the hideable network time hidden (emulated)": "hidden"}
    missed = [f"{short.get(t['what'], t['what'])} missed (at least {t['limit']:g})" for t in r["targets"] if not t["is_met"]]
    return "; ".join([ran, *missed])
