"""Every model of the zoo under every strategy: is the answer right, and what did the engine do?

    python -m benchmarks.models [--models GLOB] [--device cpu|cuda] [--dtype float32|bfloat16] [--out docs/models.md] [--json FILE]

For each model, strategy and batch size, on fresh random inputs:

1. The error against the same model in float64 is at most twice eager's own, with a floor of `FLOOR_ULP` units in the
   last place of the largest output.
2. The result is bit-equal to the same plan run on one stream.
3. Captures, fallbacks with their reasons, ops, ops that cannot be split, and launches on a proper part are counted.

A model that raises stays in the table with its reason.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dynaflow as df
from benchmarks import provenance
from benchmarks.zoo import Entry, prompts, select

# The first one is captured; the others must not capture again, except 1.
BATCH_SIZES = (8, 3, 17, 2, 1)
FLOOR_ULP = 4
MAX_RATIO = 2.0
NEW_TOKENS = 12


class Uneven(df.Strategy):
    """Three parts of different sizes, each on a stream of its own; what cannot be split on another.

    part0 | A0 B0    D0
    part1 | A1 B1    D1
    part2 | A2 B2    D2
    whole |       C
    """

    def schedule(self, flow: Any) -> None:
        flow.split([0.5, 0.3, 0.2])
        lanes: dict[Any, str] = {}
        while ready := flow.get_ready_ops():
            r = min(ready, key=lambda r: (r.depth, r.part))
            lane = "whole" if r.part.is_whole else lanes.setdefault(r.part, f"part{len(lanes)}")
            flow.execute(r, stream=lane)


STRATEGIES: dict[str, type[df.Strategy]] = {
    "sequential": df.Sequential,
    "2-way": df.TwoBatch,
    "3-way": Uneven,
    "branches": df.Branches,
}


@dataclass(frozen=True, slots=True)
class Case:
    """One model under one strategy at one batch size."""

    model: str
    strategy: str
    batch: int
    # error against float64, in units of eager's own (or of the floor); None when there is no result
    error_ratio: float | None
    is_bit_equal: bool
    # launches that ran on a proper part of the batch
    num_part_launches: int = 0
    # why the call fell back to the sequential graph; empty when it did not
    fallback: str = ""
    # what went wrong; empty when nothing did
    failure: str = ""

    @property
    def is_right(self) -> bool:
        return self.error_ratio is not None and self.error_ratio <= MAX_RATIO and self.is_bit_equal


@dataclass(frozen=True, slots=True)
class Row:
    """One model under one strategy at all its batch sizes."""

    model: str
    strategy: str
    cases: tuple[Case, ...]
    # graphs captured over all batch sizes
    captures: int = 0
    # of the graph captured first
    num_ops: int = 0
    num_unsplittable: int = 0
    seconds: float = 0.0

    @property
    def num_part_launches(self) -> int:
        return max(c.num_part_launches for c in self.cases)

    @property
    def verdict(self) -> str:
        """`ok`, or what is wrong with the first case that is not right."""
        wrong = next((c for c in self.cases if not c.is_right), None)
        if wrong is None:
            return "ok"
        if wrong.failure:
            return f"b={wrong.batch}: {wrong.failure}"
        if not wrong.is_bit_equal:
            return f"b={wrong.batch}: not bit-equal to the serialised plan"
        return f"b={wrong.batch}: error {wrong.error_ratio:.1f}x eager's"


def error_ratio(got: Sequence[Tensor], eager: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
    """The worst tensor's error against float64, in units of eager's own error. Not finite where the truth is: infinite."""
    worst = 0.0
    for ours, theirs, exact in zip(got, eager, truth, strict=True):
        floor = FLOOR_ULP * torch.finfo(ours.dtype).eps * exact.abs().max().item() / MAX_RATIO
        own = max((theirs.double() - exact).abs().max().item(), floor)
        error = (ours.double() - exact).abs().max().item()
        worst = max(worst, error / own if error == error else float("inf"))
    return worst


def same_bits(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def check_model(
    entry: Entry,
    strategies: Iterable[str] = tuple(STRATEGIES),
    batch_sizes: Sequence[int] = BATCH_SIZES,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> list[Row]:
    """One row per strategy; a strategy that raises gives a row that says so."""
    module = entry.build().to(device, dtype)
    return [_check_strategy(entry, module, name, batch_sizes, device, dtype) for name in strategies]


def _check_strategy(entry: Entry, module: nn.Module, strategy: str, batch_sizes: Sequence[int], device: str, dtype: torch.dtype) -> Row:
    began = time.perf_counter()
    fast = df.compile(module, strategy=STRATEGIES[strategy](), compiler="eager")
    cases, ops = [], (0, 0)
    for batch in batch_sizes:
        inputs = _move(entry.inputs(batch, seed=len(strategy)), device, dtype)
        try:
            cases.append(_check_call(entry, module, fast, strategy, batch, inputs))
        except Exception as error:  # what does not work stands in the table
            traceback.print_exc()
            cases.append(Case(entry.name, strategy, batch, None, False, failure=_one_line(error)))
        if batch == batch_sizes[0]:
            ops = df.stats(fast).num_ops, df.stats(fast).num_unsplittable
    return Row(entry.name, strategy, tuple(cases), df.stats(fast).captures, *ops, time.perf_counter() - began)


def _check_call(entry: Entry, module: nn.Module, fast: Any, strategy: str, batch: int, inputs: dict[str, Tensor]) -> Case:
    stats = df.stats(fast)
    fallbacks, part_launches = dict(stats.fallbacks), stats.num_part_launches
    got = entry.outputs(fast(**inputs))
    reasons = [reason for reason, count in stats.fallbacks.items() if count > fallbacks.get(reason, 0)]
    part_launches = stats.num_part_launches - part_launches
    serial = entry.outputs(df.run_serialised(fast, **inputs))
    eager = entry.outputs(module(**inputs))
    ratio = error_ratio(got, eager, entry.reference(module, inputs))
    return Case(entry.name, strategy, batch, ratio, same_bits(got, serial), part_launches, "; ".join(map(_one_line, reasons)))


def _move(inputs: dict[str, Tensor], device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    return {k: v.to(device, dtype if v.is_floating_point() else None) for k, v in inputs.items()}


def _one_line(reason: object) -> str:
    """The first line, fit for a table cell; of an error that Dynamo wrapped, the error itself."""
    reason = getattr(reason, "inner_exception", reason)
    text = (str(reason).strip().splitlines() or [""])[0].replace("|", "/")
    return f"{type(reason).__name__}: {text}"[:160] if isinstance(reason, Exception) else text


@dataclass(frozen=True, slots=True)
class Generation:
    """`generate()` with a KV cache, under TwoBatch, against eager."""

    model: str
    # "dynamic" grows by a token per step; "static" is written in place
    cache: str
    is_same: bool
    captures: int
    # calls of forward that fell back, by reason
    fallbacks: dict[str, int] = field(default_factory=dict)
    failure: str = ""

    @property
    def verdict(self) -> str:
        return self.failure or ("same tokens" if self.is_same else "different tokens")


def check_generate(entry: Entry, cache: str, batch: int = 4, device: str = "cpu", strategy: df.Strategy | None = None) -> Generation:
    """Greedy, left-padded prompts, `NEW_TOKENS` new tokens; the model's forward is replaced, nothing else."""
    model: Any = entry.build().to(device)
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "use_cache": True, "eos_token_id": None, "disable_compile": True}
    if cache == "static":
        settings["cache_implementation"] = "static"
    expected = model.generate(**prompts(batch, device), **settings)
    fast = model.forward = df.compile(model.forward, strategy=strategy or df.TwoBatch(), compiler="eager")
    try:
        tokens = model.generate(**prompts(batch, device), **settings)
    except Exception as error:
        traceback.print_exc()
        return Generation(entry.name, cache, False, df.stats(fast).captures, failure=_one_line(error))
    stats = df.stats(fast)
    return Generation(entry.name, cache, torch.equal(tokens, expected), stats.captures, dict(stats.fallbacks))


# The table


def markdown(rows: Sequence[Row], generations: Sequence[Generation], made_by: str, where: str) -> str:
    by_model: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_model.setdefault(row.model, {})[row.strategy] = row
    batches = sorted({c.batch for row in rows for c in row.cases})
    lines = [
        "# Models",
        "",
        f"Made by `{made_by}` on {where}. Do not edit.",
        "",
        f"Unmodified models of transformers and timm, small, with random weights, at batch sizes {', '.join(map(str, batches))}.",
        "",
        "- **ok**: at every batch size the error against float64 is at most twice eager's own (floor: "
        f"{FLOOR_ULP} units in the last place of the largest output) and the result is bit-equal to the same plan on one stream.",
        "- **sequential**: the captured graph as it is. **2-way**: `TwoBatch`. **3-way**: half, three tenths and a fifth of the batch, "
        "a stream for each. **branches**: independent ops of the whole batch on two streams.",
        "- **unsplittable**: ops that run over the whole batch, because they mix it or do not depend on it.",
        "- **captures**: graphs captured over all batch sizes, the most of any strategy.",
        "- **parts**: launches on a proper part of the batch, 2-way / 3-way; in files older than 2026-11-19, the ops in them.",
        "- **error**: the worst error over all strategies and batch sizes, in units of eager's own.",
        "",
        "| model | ops | unsplittable | captures | " + " | ".join(STRATEGIES) + " | parts | error | bit-equal |",
        "|---|---|---|---|" + "---|" * len(STRATEGIES) + "---|---|---|",
    ]
    for model, table in by_model.items():
        cases = [c for row in table.values() for c in row.cases]
        verdicts = [table[s].verdict if s in table else "" for s in STRATEGIES]
        parts = " / ".join(str(table[s].num_part_launches) for s in ("2-way", "3-way") if s in table)
        sizes = {(row.num_ops, row.num_unsplittable) for row in table.values()}
        num_ops, num_unsplittable = max(sizes)
        captures = max(row.captures for row in table.values())
        lines.append(
            f"| {model} | {num_ops} | {num_unsplittable} | {captures} | {' | '.join(verdicts)} | {parts} "
            f"| {max(c.error_ratio or 0.0 for c in cases):.2f} | {'yes' if all(c.is_bit_equal for c in cases) else 'no'} |"
        )
    fallbacks: dict[str, set[str]] = {}
    for row in rows:
        for c in row.cases:
            if c.fallback and row.strategy != "sequential":
                fallbacks.setdefault(f"{row.strategy}, b={c.batch}: {c.fallback}", set()).add(row.model)
    lines += ["", "## Fallbacks", "", "Calls that ran the sequential graph, and why.", ""]
    lines += [f"- {reason}: {_names(models, by_model)}" for reason, models in sorted(fallbacks.items())] or ["- none"]
    if generations:
        lines += ["", "## generate()", ""]
        lines += [f"Greedy, batch 4, left-padded prompts, {NEW_TOKENS} new tokens, `model.forward` under TwoBatch."]
        lines += ["", "| model | cache | against eager | captures | fallbacks |", "|---|---|---|---|---|"]
        for g in generations:
            reasons = "; ".join(f"{n} x {_one_line(r)}" for r, n in g.fallbacks.items()) or "none"
            lines.append(f"| {g.model} | {g.cache} | {g.verdict} | {g.captures} | {reasons} |")
    return "\n".join(lines) + "\n"


def _names(models: set[str], of: dict[str, Any]) -> str:
    return "all models" if models == set(of) else ", ".join(m for m in of if m in models)


def as_json(rows: Sequence[Row], generations: Sequence[Generation], made_by: str, device: str, dtype: str) -> dict[str, Any]:
    """The shared form of a result (`suite`, `rows`, `summary`); nothing is timed here, so the rows carry equality instead."""
    hardware: dict[str, Any] = {"cpu": platform.processor() or platform.machine()}
    if device == "cuda":
        gpu = torch.cuda.get_device_properties(0)
        hardware = {"gpu": gpu.name, "sms": gpu.multi_processor_count, **hardware}
    cases = [c for row in rows for c in row.cases]
    return {
        "suite": "models",
        "made_by": made_by,
        "commit": provenance.commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": hardware,
        "versions": {"torch": torch.__version__, "dynaflow": df.__version__, **provenance.versions("transformers", "timm")},
        "rows": [
            {
                "row": f"{row.model} {row.strategy}",
                "config": {"device": device, "dtype": dtype, "strategy": row.strategy},
                "captures": row.captures,
                "ops": row.num_ops,
                "unsplittable": row.num_unsplittable,
                "part_launches": row.num_part_launches,
                "cases": [{k: v for k, v in asdict(c).items() if k not in ("model", "strategy")} for c in row.cases],
                "equal": "bit" if all(c.is_bit_equal for c in row.cases) else "no",
                "emulated": False,
                "note": "" if row.verdict == "ok" else row.verdict,
            }
            for row in rows
        ],
        "generate": [asdict(g) for g in generations],
        "summary": {
            "rows": len(rows),
            "ok": sum(row.verdict == "ok" for row in rows),
            "cases": len(cases),
            "bit_equal": sum(c.is_bit_equal for c in cases),
            "max_error_ratio": max((c.error_ratio or 0.0 for c in cases), default=0.0),
            "generate_same": sum(g.is_same for g in generations),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="*", help="comma-separated globs")
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--out", type=Path, help="Markdown file")
    parser.add_argument("--json", type=Path, help="JSON file")
    args = parser.parse_args()

    dtype = getattr(torch, args.dtype)
    made_by = " ".join(["python -m benchmarks.models", *sys.argv[1:]])
    rows: list[Row] = []
    for entry in select(args.models):
        if entry.is_routed and dtype != torch.float32:
            continue
        for row in check_model(entry, args.strategies.split(","), device=args.device, dtype=dtype):
            rows.append(row)
            print(f"{row.model:16} {row.strategy:10} {row.seconds:5.1f} s  {row.captures} captures  {row.verdict}", flush=True)
    generations = []
    for entry in select("llama,qwen3"):
        if entry in select(args.models) and dtype == torch.float32:
            for cache in ("dynamic", "static"):
                generations.append(check_generate(entry, cache, device=args.device))
                print(f"{entry.name:16} generate, {cache} cache: {generations[-1].verdict}", flush=True)

    where = torch.cuda.get_device_name() if args.device == "cuda" else "a CPU"
    table = markdown(rows, generations, made_by, f"{where}, {args.dtype}, torch {torch.__version__}")
    result = as_json(rows, generations, made_by, args.device, args.dtype)
    print("\n" + table)
    for path, text in ((args.out, table), (args.json, json.dumps(result, indent=1) + "\n")):
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
