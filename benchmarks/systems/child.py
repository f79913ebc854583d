"""A row's own process.

1. Every variant is compiled, beside other rows' processes.
2. In the row's turn: variants are warmed up (DynaFlow times plans here), timed in turns, and compared with float32.
"""

from __future__ import annotations

import gc
import json
import math
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._dynamo import pgo

import dynaflow as df
from benchmarks import store, turn
from benchmarks.branches.ours import before_trials, choice
from benchmarks.measure import Times, ratio
from benchmarks.store import failed, stamped, target
from benchmarks.systems import report
from benchmarks.systems import variants as v
from benchmarks.systems.rows import WIDE, Inputs, Result, Row, Way, rows, twin
from benchmarks.variants import NOT_MEASURED
from dynaflow.errors import OptionError

NUM_SETS = 3
# what one block of calls may take, and how many they are at most
BLOCK_MS, MAX_CALLS = 60.0, 10
# the error against float32 may be so many times torch.compile's, or so much where that is less
MAX_ERROR, TOLERANCE = 1.5, {torch.float32: 1e-5, torch.bfloat16: 2e-3}


def run(text: str) -> int:
    wish = json.loads(text)
    row = rows()[wish["row"]]
    turn.expect(wish["turn"])
    rc = 0
    with torch.no_grad():
        try:
            found = measure(row, wish["device"], wish["tiny"], wish["rounds"], wish["variants"])
        except Exception as error:  # what does not work stands in the file
            traceback.print_exc()
            found, rc = failed("time", error), 1
    config = {"dtype": "fp32" if wish["tiny"] else "bf16", "tiny": wish["tiny"], **row.config(wish["tiny"])}
    report.save(Path(wish["json"]), [stamped(row.name, "time", config, found, wish["made_by"], wish["device"])])
    return rc


def measure(row: Row, device: str, tiny: bool, num_rounds: int, names: Sequence[str]) -> Result:
    dtype = torch.float32 if tiny else torch.bfloat16
    made = row.make(tiny, device, dtype)
    sets = [row.inputs(made, tiny, seed) for seed in range(NUM_SETS)]
    ways: dict[str, Way] = {}
    targets: dict[str, Any] = {}
    missing: dict[str, str] = {}
    wanted = [n for n in row.variants() if n in names and (n not in v.ON_CUDA_ONLY or device.startswith("cuda"))]
    with before_trials(turn.take):
        for name in wanted:
            try:
                pgo.reset_code_state()  # which sizes have changed in other variants, Dynamo knows by the name of the code
                targets[name] = twin(made)
                row.switch(targets[name], name)
                way = row.way(targets[name], name, sets, device, tiny)
                way.first()
            except Exception as error:
                _say_missing(missing, name, error)
            else:
                ways[name] = way
                print(f"    {name}: compiled", flush=True)
    turn.take()
    for name, way in list(ways.items()):
        try:
            way.warm()
        except Exception as error:
            _say_missing(missing, name, error)
            del ways[name]
    times = _in_turns(ways, num_rounds, row.num_steps(tiny))
    results = {name: way.results() for name, way in ways.items()}
    errors = _errors(results, _reference(row, made, sets, device, tiny))
    found = _compared(row, times, errors, tiny, dtype)
    counts = {name: _counts(targets[name]) for name in ways if name in v.OPTIONS}
    note = "; ".join(f"{name} not measured: {why}" for name, why in missing.items())
    return {**found, "counts": counts, "plans": choice(), "note": note}


def _say_missing(missing: dict[str, str], name: str, error: Exception) -> None:
    missing[name] = f"{type(error).__name__}: {str(error).strip()[:200]}".replace(f"{store.ROOT}/", "")
    traceback.print_exception(error)
    print(f"    {name}: {NOT_MEASURED}, {missing[name]}", flush=True)


def _counts(made: Any) -> Result:
    """Of what df.optimize compiled; the Trainer's own is the process's."""
    try:
        stats = df.stats(made)
    except OptionError:
        stats = df.stats()
    return {"captures": stats.captures, "calls": stats.calls, "planned_calls": stats.planned_calls, "split_calls": stats.split_calls,
            "fallbacks": dict(stats.fallbacks)}  # fmt: skip


def _in_turns(ways: Mapping[str, Way], num_rounds: int, num_steps: int) -> dict[str, Times]:
    names, times = list(ways), {name: Times() for name in ways}
    call_ms = {name: way.block(1)[0] * num_steps for name, way in ways.items()}
    counts = {name: max(1, min(MAX_CALLS, int(BLOCK_MS / ms))) for name, ms in call_ms.items()}
    gc.collect()
    gc.disable()
    try:
        for number in range(num_rounds):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                times[name].rounds.append(ways[name].block(counts[name]))
    finally:
        gc.enable()
    return times


def _reference(row: Row, made: Any, sets: Sequence[Inputs], device: str, tiny: bool) -> list[torch.Tensor]:
    """In float32. `made` is not needed any more."""
    row.widen(made)
    way = row.way(made, WIDE, sets, device, tiny)
    way.first()
    way.warm()
    return way.results()


def _errors(results: Mapping[str, Sequence[torch.Tensor]], reference: Sequence[torch.Tensor]) -> dict[str, float]:
    """Relative, of all results together."""
    for expected in reference:
        if not expected.isfinite().all() or not expected.std() > 0:
            raise ValueError("the result is not finite, or the same everywhere: these weights say nothing")
    size = torch.stack([r.norm() for r in reference]).norm()
    errors = {name: float(torch.stack([(a - b).norm() for a, b in zip(found, reference, strict=True)]).norm() / size)
              for name, found in results.items()}  # fmt: skip
    # what is not a number is larger than any: max() would drop it
    return {name: error if math.isfinite(error) else math.inf for name, error in errors.items()}


def _compared(row: Row, times: Mapping[str, Times], errors: Mapping[str, float], tiny: bool, dtype: torch.dtype) -> Result:
    figures = {name: {**t.figures(), **row.rate(t.figures()["median_ms"]), "error": errors[name]} for name, t in times.items()}

    def fastest(names: Sequence[str]) -> str | None:
        return min((n for n in names if n in figures), key=lambda n: figures[n]["median_ms"], default=None)

    theirs, best = fastest(v.BASELINES), fastest(tuple(v.OPTIONS))
    ours = v.OURS if v.OURS in figures else best
    compared, at_best = (ratio(times[theirs], times[n]) if n and theirs else {} for n in (ours, best))
    limit = MAX_ERROR * max(TOLERANCE[dtype], *(e for n in v.BASELINES[1:] if math.isfinite(e := errors.get(n, math.inf))), 0.0)
    worst = max((errors[n] for n in v.OPTIONS if n in errors), default=None)
    wanted = [target("error against float32; limit: 1.5 times the baselines'", worst, limit)]
    if not tiny:
        wanted.append(target("fastest baseline / dynaflow", compared.get("ratio"), 1.0, at_least=True))
    return {
        "repetitions": min((len(t.all) for t in times.values()), default=0), "ours": {"variant": ours, **figures[ours]} if ours else None,
        "baselines": {n: f for n, f in figures.items() if n != ours}, "against": theirs, "speedup": compared.get("ratio"),
        "interval": [compared.get("low"), compared.get("high")], "best": {"variant": best, "speedup": at_best.get("ratio")},
        "equal": "-" if worst is None else f"{worst:.1e}", "targets": wanted,
    }  # fmt: skip
