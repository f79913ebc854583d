"""A model that is twice as large as its memory budget: weights stream from the host, against accelerate's cpu_offload.

    python -m benchmarks.offload [--rows GLOBS] [--json FILE]                    measure, merge into the file
    python -m benchmarks.offload --merge FILE ... | --plot | --list
    python -m benchmarks.offload --tiny --device cpu --json out/offload.json     small, without a GPU

Variants of a row, in turns in one process: `dynaflow` (df.Offload, launch by launch), `dynaflow graph` (the same in one CUDA Graph),
`accelerate` (cpu_offload, eager), and what bounds them: `resident` (all weights on the device, torch.compile: the compute time) and
`copies` (all weights copied one behind the other on one stream). The score is max(resident, copies) over dynaflow's time.
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dynaflow as df
from benchmarks import cases, store
from benchmarks.backend.models import LLAMA_3_8B
from benchmarks.cases import Call, built
from benchmarks.measure import Times, side_by_side
from benchmarks.store import Result, command, failed, load, publish, stamped, target
from dynaflow.offload import MIN_BYTES

ROOT = Path(__file__).resolve().parent
RESULTS, PAGE = ROOT / "results" / "offload.json", ROOT.parent / "docs" / "offload.md"
OURS, GRAPH, ACCELERATE, RESIDENT, COPIES = "dynaflow", "dynaflow graph", "accelerate", "resident", "copies"
NAMES = (RESIDENT, COPIES, ACCELERATE, OURS, GRAPH)
MIN_SCORE = 0.95
# weights over what of them may be on the device at once
TIMES_LARGER = 2


@dataclass(frozen=True)
class Row:
    name: str
    tokens: int
    num_layers: int = 16

    def settings(self, tiny: bool) -> dict[str, Any]:
        small = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256}
        return {**LLAMA_3_8B, **(small if tiny else {}), "num_hidden_layers": 4 if tiny else self.num_layers}


ROWS = (Row("llama 1 token", 1), Row("llama 4,096 tokens", 4096), Row("llama 16,384 tokens", 16384))


@dataclass(kw_only=True)
class Case(cases.Case):
    row: Row

    def fresh(self) -> dict[str, Tensor]:
        tokens = min(self.row.tokens, 8) if self.tiny else self.row.tokens
        width = self.row.settings(self.tiny)["hidden_size"]
        noise = torch.randn(1, tokens, width, generator=self.generator, device=self.generator.device)
        return {"inputs_embeds": noise.to(self.dtype)}

    def outputs(self, result: Any) -> list[Tensor]:
        return [result.last_hidden_state]


def _case(row: Row, device: str, tiny: bool) -> Case:
    from transformers import LlamaConfig, LlamaModel

    module = built(lambda: LlamaModel(LlamaConfig(**row.settings(tiny))), device, torch.bfloat16, 0)
    generator = torch.Generator(device).manual_seed(0)
    case = Case(row=row, module=module, state={"use_cache": False}, generator=generator, dtype=torch.bfloat16, tiny=tiny)
    case.sets = [case.fresh() for _ in range(cases.NUM_SETS)]
    return case


def _step(case: Case, fast: Callable[..., Any]) -> Call:
    return lambda number: fast(**case.args(number))


class Models:
    """The model in the forms that variants need, each with weights of its own where it moves them."""

    def __init__(self, case: Case, device: str):
        self.case, self.device = case, device
        self.min_bytes = 1 if case.tiny else MIN_BYTES
        self.offloaded = df.offload(copy.deepcopy(case.module), device, min_bytes=self.min_bytes)
        self.weights = [p for p in self.offloaded.parameters() if p.device.type == "cpu" and p.numel() * p.element_size() >= self.min_bytes]
        self.num_bytes = sum(p.numel() * p.element_size() for p in self.weights)
        self.budget = self.num_bytes // TIMES_LARGER

    def calls(self) -> dict[str, Callable[[], Call]]:
        return {RESIDENT: self._resident, COPIES: self._copies, ACCELERATE: self._accelerate, OURS: partial(self._ours, "auto"),
                GRAPH: partial(self._ours, "graph")}  # fmt: skip

    def _resident(self) -> Call:
        module = self.case.module
        return _step(self.case, torch.compile(module, fullgraph=True) if self.device.startswith("cuda") else module)

    def _copies(self) -> Call:
        place = [torch.empty_like(p, device=self.device) for p in self.weights[:8]]

        def copy_all(number: int) -> None:
            for i, weight in enumerate(self.weights):
                into = place[i % len(place)]
                if into.shape != weight.shape:
                    into = place[i % len(place)] = torch.empty_like(weight, device=self.device)
                into.copy_(weight, non_blocking=True)

        return copy_all

    def _accelerate(self) -> Call:
        from accelerate import cpu_offload

        return _step(self.case, cpu_offload(copy.deepcopy(self.case.module), execution_device=torch.device(self.device)))

    def _ours(self, runtime: str) -> Call:
        fast = df.compile(self.offloaded, strategy=df.Offload(self.budget), runtime=runtime, strict=True, borrow=runtime == "graph")
        call = _step(self.case, fast)
        call.fast = fast  # type: ignore[attr-defined]
        return call


def measure(row: Row, device: str, tiny: bool, num_rounds: int) -> Result:
    case = _case(row, device, tiny)
    models = Models(case, device)
    made: dict[str, Call] = {}
    missing: dict[str, str] = {}
    for name, build in models.calls().items():
        try:
            call = build()
            for number in range(4):
                call(number)
            made[name] = call
            print(f"    {name}: built", flush=True)
        except Exception as error:
            missing[name] = f"{type(error).__name__}: {str(error).strip()[:200]}"
            print(f"    {name}: NOT MEASURED, {missing[name]}", flush=True)
    times = side_by_side(case, made, device, num_rounds, has_device=False)  # accelerate takes seconds per step
    figures = {name: t.figures() for name, t in times.items()}
    ours = min((n for n in (OURS, GRAPH) if n in figures), key=lambda n: figures[n]["median_ms"], default=None)
    bound = max((figures[n]["median_ms"] for n in (RESIDENT, COPIES) if n in figures), default=None)
    value = bound / figures[ours]["median_ms"] if ours and bound else None
    return {
        "repetitions": min((len(t.all) for t in times.values()), default=0), "ours": {"variant": ours, **figures[ours]} if ours else None,
        "baselines": {n: f for n, f in figures.items() if n != ours}, "against": ACCELERATE,
        "speedup": _speedup(times, ours), "bound_ms": bound, "equal": _equality(case, made), "score": value,
        "weights_mib": round(models.num_bytes / 2**20, 1), "budget_mib": round(models.budget / 2**20, 1),
        "peak_mib": _peaks(made), "note": "; ".join(f"{n} not measured: {why}" for n, why in missing.items()),
        "targets": [target("max(copies, resident) / dynaflow", value, MIN_SCORE, at_least=True)],
    }  # fmt: skip


def _speedup(times: Mapping[str, Times], ours: str | None) -> float | None:
    if ours is None or ACCELERATE not in times:
        return None
    return round(times[ACCELERATE].figures()["median_ms"] / times[ours].figures()["median_ms"], 4)


def _peaks(made: Mapping[str, Call]) -> dict[str, float]:
    """What the plans hold: arena, outputs, and what launches allocate."""
    return {name: round(df.stats(call.fast).peak_bytes / 2**20, 1) for name, call in made.items() if hasattr(call, "fast")}


def _equality(case: Case, made: Mapping[str, Call]) -> str:
    """Against the same plan on one stream, on fresh inputs."""
    before, worst = case.sets, 0.0
    try:
        for name in (n for n in (OURS, GRAPH) if n in made):
            for _ in range(3):
                case.sets = [case.fresh()]
                (got,) = (t.clone() for t in case.outputs(made[name](0)))
                (want,) = case.outputs(df.run_serialised(made[name].fast, **case.args(0)))  # type: ignore[attr-defined]
                worst = max(worst, float((got.float() - want.float()).abs().max()) if not torch.equal(got, want) else 0.0)
    finally:
        case.sets = before
    return "bit" if not worst else f"max abs {worst:.1e}"


# -- report: what benchmarks.store.publish asks for


def merged(*shards: Sequence[Result]) -> list[Result]:
    return store.merged(("time",), [row.name for row in ROWS], *shards)


def save(path: Path, rows: Sequence[Result]) -> None:
    targets = [{**t, "row": r["row"], "section": r["section"]} for r in rows for t in r["targets"]]
    speedups = [r["speedup"] for r in rows if r["speedup"]]
    summary = {"rows": len(rows), **store.counted(targets)}
    if speedups:
        summary |= {"geomean_speedup": round(store.geomean(speedups), 4), "min_speedup": min(speedups)}
    store.save(path, "offload", rows, summary)


def _known(row: Result) -> dict[str, Result]:
    """Figures by variant."""
    return {**row["baselines"], **({row["ours"]["variant"]: row["ours"]} if row["ours"] else {})}


def table(rows: Sequence[Result]) -> str:
    lines = [f"{'row':24}{'weights':>10}{'budget':>10}" + "".join(f"{n:>16}" for n in NAMES) + "  score"]
    for r in rows:
        known = _known(r)
        cells = [f"{known[n]['median_ms']:.3f} ms" if n in known else "-" for n in NAMES]
        score = f"{r['score']:.3f}" if r.get("score") else "-"
        lines.append(f"{r['row']:24}{r.get('weights_mib', 0):>10,.0f}{r.get('budget_mib', 0):>10,.0f}" + "".join(f"{c:>16}" for c in cells)
                     + f"  {score}  {r['equal']} {r['note'][:100]}")  # fmt: skip
    return "\n".join(lines)


def markdown(rows: Sequence[Result]) -> str:
    lines = ["# Offload, measured", "",
             f"Made by `python -m benchmarks.offload` on {store.where(rows)}, bf16, random weights. Do not edit. Weights are "
             f"{TIMES_LARGER} times as large as what of them may be on the device at once.", "",
             "| row | weights, MiB | " + " | ".join(f"{n}, ms" for n in NAMES) + " | score | equal |",
             "|---|---|" + "---|" * (len(NAMES) + 2)]  # fmt: skip
    for r in rows:
        known = _known(r)
        cells = [f"{known[n]['median_ms']:.2f} ({known[n]['spread_ms']:.2f})" if n in known else "-" for n in NAMES]
        score = f"{r['score']:.3f}" if r.get("score") else "-"
        lines.append(f"| {r['row']} | {r.get('weights_mib', 0):,.0f} | " + " | ".join(cells) + f" | {score} | {r['equal']} |")
    return "\n".join([*lines, "", "Score: the longer of `copies` and `resident` over the faster of dynaflow's; 1 is all hidden.", ""])


def plot(rows: Sequence[Result], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, max(len(rows), 1), figsize=(4 * max(len(rows), 1), 3), squeeze=False, layout="constrained")
    for axis, r in zip(axes[0], rows):
        known = _known(r)
        shown = [n for n in reversed(NAMES) if n in known]
        axis.barh(shown, [known[n]["median_ms"] for n in shown], color=["#c44" if "dynaflow" in n else "#888" for n in shown])
        axis.set_title(r["row"], fontsize=9)
        axis.set_xlabel("ms per step")
    for suffix in (".svg", ".png"):
        figure.savefig(path.with_suffix(suffix), dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="*")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--merge", type=Path, nargs="+", default=[])
    parser.add_argument("--plot", action="store_true")
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    if args.list:
        print("\n".join(row.name for row in ROWS))
        return 0
    if args.tiny and args.json == RESULTS:
        parser.error("--tiny does not go into benchmarks/results: give --json")
    if publish(args, sys.modules[__name__], plot):
        return 0
    torch.set_grad_enabled(False)
    done: list[Result] = []
    for row in cases.select(ROWS, args.rows):
        print(row.name, flush=True)
        try:
            found = measure(row, args.device, args.tiny, args.rounds)
        except Exception as error:  # what does not work stands in the file
            found = failed("time", error)
        config = {"dtype": "bf16", "tokens": row.tokens, "layers": row.settings(args.tiny)["num_hidden_layers"], "tiny": args.tiny}
        done.append(stamped(row.name, "time", config, found, command("offload", sys.argv[1:]), args.device))
        save(args.json, merged(load(args.json), done))
        torch._dynamo.reset()
        gc.collect()
    print(table(done))
    return 0 if all(t["is_met"] for r in done for t in r["targets"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
