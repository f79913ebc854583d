"""Whole calls of real systems, with DynaFlow switched on by one line: generate of Transformers, PEFT's adapters, pipelines of diffusers.

    python -m benchmarks.systems [--rows GLOBS] [--json FILE]                     measure, merge into the file
    python -m benchmarks.systems --merge FILE ... | --plot | --list
    python -m benchmarks.systems --tiny --device cpu --json out/systems.json      small, without a GPU

A row is a process with all its variants, each with a model of its own, in turns: `eager`; `torch.compile` of what does the work, and the
same with mode="reduce-overhead" (CUDA Graphs); `dynaflow` (df.optimize(target), "auto"); `dynaflow split` (df.TwoBatch) and `dynaflow
branches` (df.Branches over ops). A speedup is the fastest baseline's time over the fastest of ours. Results are compared with eager's.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import dynaflow as df
from benchmarks import runner, store, turn
from benchmarks import system_models as systems
from benchmarks.cases import Call, select
from benchmarks.measure import Times, ratio, side_by_side
from benchmarks.store import Result, command, failed, load, stamped, target
from benchmarks.variants import NOT_MEASURED

RESULTS, PAGE = store.RESULTS / "systems.json", store.DOCS / "systems" / "measured.md"
EAGER, COMPILE, REDUCE = "eager", "torch.compile", "torch.compile reduce-overhead"
OURS, SPLIT, BRANCHES = "dynaflow", "dynaflow split", "dynaflow branches"
BASELINES = (EAGER, COMPILE, REDUCE)
OPTIONS: dict[str, dict[str, Any]] = {OURS: {}, SPLIT: {"strategy": df.TwoBatch()}, BRANCHES: {"strategy": df.Branches()}}
NAMES = (*BASELINES, *OPTIONS)
# the largest difference from eager's result, as a share of its standard deviation
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}


# -- rows


@dataclass(frozen=True)
class Row:
    name: str
    # (tiny, device, dtype) -> what df.optimize is given
    make: Callable[[bool, str, torch.dtype], Any]
    # (target, tiny) -> one call of the system, and its result
    call: Callable[[Any, bool], torch.Tensor]
    # names of the modules that torch.compile is given, where it is not the target itself
    modules: tuple[str, ...] = ()


def _placed(make: Callable[..., Any], is_tiny: bool, device: str, dtype: torch.dtype) -> Any:
    with torch.device(device):
        made = make(is_tiny)
    return made.to(device, dtype)


def _tokens(target: Any, batch_size: int, length: int) -> torch.Tensor:
    return torch.randint(1, 60, (batch_size, length), generator=torch.Generator().manual_seed(0)).to(target.device)


def _generate(cache: str, batch_size: int, num_tokens: int) -> Callable[[Any, bool], torch.Tensor]:
    def call(target: Any, is_tiny: bool) -> torch.Tensor:
        ids = _tokens(target, 4 if is_tiny else batch_size, 8 if is_tiny else 256)
        cached = {"cache_implementation": cache} if cache == "static" else {}
        new = 4 if is_tiny else num_tokens
        output = target.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False,
                                 eos_token_id=None, return_dict_in_generate=True, output_logits=True, **cached)  # fmt: skip
        return torch.stack(output.logits[:1])  # of the first step: where two tokens are as likely, the rest may go another way

    return call


def _forward(num_tokens: int) -> Callable[[Any, bool], torch.Tensor]:
    return lambda target, is_tiny: target(input_ids=_tokens(target, 2, 8 if is_tiny else num_tokens)).logits


def _pipeline(name: str) -> Row:
    def make(is_tiny: bool, device: str, dtype: torch.dtype) -> Any:
        return _placed(systems.PIPELINES[name], is_tiny, device, dtype)

    def call(target: Any, is_tiny: bool) -> torch.Tensor:
        denoiser = getattr(target, "transformer", None) or target.unet
        wanted = systems.request(name, 1 if name in ("sd3", "sdxl") else 2, 2 if is_tiny else 4, is_tiny, target.device, denoiser.dtype)
        return systems.pixels(target(**wanted))

    return Row(name, make, call, ("unet", "controlnet") if name == "sdxl" else ("transformer",))


def _llama(is_tiny: bool, device: str, dtype: torch.dtype) -> Any:
    return _placed(systems.llama, is_tiny, device, dtype)


def _lora(is_tiny: bool, device: str, dtype: torch.dtype) -> Any:
    target = _placed(lambda tiny: systems.lora(tiny, rank=4 if tiny else 16), is_tiny, device, dtype)
    target.base_model.set_adapter(["a0", "a1"])
    return target


ROWS = (
    Row("llama generate dynamic", _llama, _generate("dynamic", 16, 32)),
    Row("llama generate static", _llama, _generate("static", 16, 32)),
    Row("lora-llama 16 tokens", _lora, _forward(16)),
    *(_pipeline(name) for name in systems.PIPELINES),
)


# -- a row's own process


def _switched(row: Row, name: str, tiny: bool, device: str, dtype: torch.dtype) -> tuple[Any, Call]:
    """A target of its own with one variant switched on, and its step."""
    made = row.make(tiny, device, dtype)
    if name in OPTIONS:
        df.optimize(made, **OPTIONS[name])
    elif name != EAGER:
        for module in [getattr(made, part) for part in row.modules] or [made.get_base_model() if hasattr(made, "get_base_model") else made]:
            module.forward = torch.compile(module.forward, mode="reduce-overhead" if name == REDUCE else None)
    return made, lambda number: row.call(made, tiny)


class _Nothing:
    """A case whose steps change nothing that must be put back."""

    def reset(self) -> None:
        return


def measure(row: Row, device: str, tiny: bool, num_rounds: int, variants: Sequence[str]) -> Result:
    dtype = torch.float32 if tiny else torch.bfloat16
    calls: dict[str, Call] = {}
    targets: dict[str, Any] = {}
    results: dict[str, torch.Tensor] = {}
    missing: dict[str, str] = {}
    for name in variants:
        if name == REDUCE and not device.startswith("cuda"):
            continue
        try:
            targets[name], calls[name] = _switched(row, name, tiny, device, dtype)
            for number in range(3):
                results[name] = calls[name](number).float().cpu()
            print(f"    {name}: built", flush=True)
        except Exception as error:
            calls.pop(name, None)
            missing[name] = f"{type(error).__name__}: {str(error).strip()[:200]}"
            print(f"    {name}: {NOT_MEASURED}, {missing[name]}", flush=True)
    turn.take()
    times = side_by_side(_Nothing(), calls, device, num_rounds)  # type: ignore[arg-type]
    found = _compared(times, results, tiny, dtype)
    counts = {name: _counts(df.stats(targets[name])) for name in times if name in OPTIONS}
    return {**found, "counts": counts, "note": "; ".join(f"{n} not measured: {why}" for n, why in missing.items())}


def _counts(stats: Any) -> Result:
    return {"captures": stats.captures, "calls": stats.calls, "split_calls": stats.split_calls, "fallbacks": dict(stats.fallbacks)}


def _compared(times: Mapping[str, Times], results: Mapping[str, torch.Tensor], tiny: bool, dtype: torch.dtype) -> Result:
    figures = {name: t.figures() for name, t in times.items()}

    def fastest(names: Sequence[str]) -> str | None:
        return min((n for n in names if n in figures), key=lambda n: figures[n]["median_ms"], default=None)

    ours, theirs = fastest(tuple(OPTIONS)), fastest(BASELINES)
    compared = ratio(times[theirs], times[ours]) if ours and theirs else {}
    expected = results.get(EAGER)
    errors = {n: float((results[n] - expected).abs().max() / expected.std()) for n in OPTIONS if n in results and expected is not None}
    worst = max(errors.values(), default=None)
    wanted = [target("difference from eager, in standard deviations of its result", worst, TOLERANCE[dtype])]
    if not tiny:
        wanted.append(target("fastest baseline / fastest of dynaflow's", compared.get("ratio"), 1.0, at_least=True))
    return {
        "repetitions": min((len(t.all) for t in times.values()), default=0), "ours": {"variant": ours, **figures[ours]} if ours else None,
        "baselines": {n: f for n, f in figures.items() if n != ours}, "against": theirs, "speedup": compared.get("ratio"),
        "interval": [compared.get("low"), compared.get("high")], "equal": "bit" if worst == 0 else f"{worst:.1e} sd" if worst else "-",
        "targets": wanted,
    }  # fmt: skip


def child(text: str) -> int:
    wish = json.loads(text)
    (row,) = [r for r in ROWS if r.name == wish["row"]]
    turn.expect(wish["turn"])
    rc = 0
    with torch.no_grad():
        try:
            found = measure(row, wish["device"], wish["tiny"], wish["rounds"], wish["variants"])
        except Exception as error:  # what does not work stands in the file
            traceback.print_exc()
            found, rc = failed("time", error), 1
    config = {"dtype": "fp32" if wish["tiny"] else "bf16", "tiny": wish["tiny"]}
    save(Path(wish["json"]), [stamped(row.name, "time", config, found, wish["made_by"], wish["device"])])
    return rc


class Suite(runner.Shard):
    def __init__(self, args: argparse.Namespace):
        super().__init__("systems", args)

    def run(self) -> int:
        args = self.args
        wish = {"tiny": args.tiny, "device": args.device, "rounds": args.rounds, "made_by": command("systems", sys.argv[1:]),
                "variants": [name for name in NAMES if not args.variants or name in args.variants.split(",")]}  # fmt: skip
        jobs = [runner.Job("time", row.name, wish) for row in select(ROWS, args.rows)]
        for done in self.each(jobs, runner.default_jobs(args), in_turns=True):
            if new := load(done.json):
                save(args.json, merged(load(args.json), new))
        return self.end(sys.modules[__name__], True)


# -- report: what benchmarks.runner and benchmarks.store ask for


def merged(*shards: Sequence[Result]) -> list[Result]:
    return store.merged(("time",), [row.name for row in ROWS], *shards)


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


def _splits(row: Result) -> str:
    counts = row.get("counts", {}).get(SPLIT)
    return f"{counts['split_calls']} of {counts['calls']}" if counts else "-"


def table(rows: Sequence[Result]) -> str:
    lines = [f"{'row':34}" + "".join(f"{n[-16:]:>18}" for n in NAMES) + "   speedup  split calls  equal"]
    for r in rows:
        known = _known(r)
        cells = [f"{known[n]['median_ms']:.2f} ms" if n in known else "-" for n in NAMES]
        speedup = f"{r['speedup']:.3f}" if r["speedup"] else "-"
        counted = f"{speedup:>10}  {_splits(r):>11}  {r['equal']} {r['note'][:100]}"
        lines.append(f"{r['row']:34}" + "".join(f"{c:>18}" for c in cells) + counted)
    return "\n".join([*lines, *(store.line(t) for t in targets(rows) if not t["is_met"])])


def markdown(rows: Sequence[Result]) -> str:
    lines = ["# Systems, measured", "", f"Made by `python -m benchmarks.systems` on {store.where(rows)}, random weights. Do not edit.", "",
             "Milliseconds per call (spread), the fastest baseline over the fastest of dynaflow's, calls of a model that were split under "
             "`dynaflow split`, and the largest difference from eager's result.", "",
             "| row | " + " | ".join(NAMES) + " | speedup | split calls | equal |", "|---|" + "---|" * (len(NAMES) + 3)]  # fmt: skip
    for r in rows:
        known = _known(r)
        cells = [f"{known[n]['median_ms']:.1f} ({known[n]['spread_ms']:.1f})" if n in known else "-" for n in NAMES]
        speedup = f"{r['speedup']:.3f}" if r["speedup"] else "-"
        lines.append(f"| {r['row']} | " + " | ".join(cells) + f" | {speedup} | {_splits(r)} | {r['equal']} |")
    return "\n".join([*lines, "", *store.losses(store.counted(targets(rows)))]).rstrip() + "\n"


def plot(rows: Sequence[Result], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(rows), 1, figsize=(7, 1.6 * len(rows)), squeeze=False, layout="constrained")
    for axis, r in zip(axes[:, 0], rows):
        known = _known(r)
        shown = [n for n in reversed(NAMES) if n in known]
        axis.barh(shown, [known[n]["median_ms"] for n in shown], color=["#c44" if n in OPTIONS else "#888" for n in shown])
        axis.set_title(r["row"], fontsize=9)
    axes[-1, 0].set_xlabel("ms per call")
    for suffix in (".svg", ".png"):
        figure.savefig(path.with_suffix(suffix), dpi=120)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="*", help="comma-separated globs over row names")
    parser.add_argument("--variants", default="", help="comma-separated variants; all")
    parser.add_argument("--rounds", type=int, default=20)
    runner.add_options(parser, sys.modules[__name__])
    args = parser.parse_args()
    if unknown := set(args.variants.split(",")) - {*NAMES, ""}:
        parser.error(f"unknown variant {', '.join(sorted(unknown))}; known: {', '.join(NAMES)}")
    if args.tiny and args.json == RESULTS:
        parser.error("--tiny does not go into benchmarks/results: give --json")
    return args


def main() -> int:
    listing = f"rows      {', '.join(row.name for row in ROWS)}\nvariants  {', '.join(NAMES)}"
    return runner.main(_arguments(), Suite, child, listing, sys.modules[__name__], plot)


if __name__ == "__main__":
    raise SystemExit(main())
