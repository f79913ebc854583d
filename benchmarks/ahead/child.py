"""What one process compiles: a row of a suite, under CUDA on the host, over the caches that the environment names."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch._dynamo import pgo

import dynaflow as df
from benchmarks import cases
from benchmarks.ahead import host, nothing
from benchmarks.variants import NotAvailable


def run(text: str) -> int:
    wish = json.loads(text)
    nothing.is_padding = wish.get("padding", False)
    if wish.get("measured"):
        nothing.measured = json.loads(Path(wish["measured"]).read_text())["cache"]
    nothing.install()
    torch.set_num_threads(host.NUM_THREADS)
    began = time.perf_counter()
    missing = SUITES[wish["suite"]](wish)
    torch.cuda.synchronize()
    counters = torch._dynamo.utils.counters
    inductor, autograd = counters["inductor"], counters["aot_autograd"]
    print(json.dumps({
        "row": wish["row"], "seconds": round(time.perf_counter() - began, 1), "missing": missing, "choices": nothing.choices,
        "graphs": {k.removeprefix("fxgraph_cache_"): v for k, v in inductor.items() if k.startswith("fxgraph_cache")},
        "autograd": {k.removeprefix("autograd_cache_"): v for k, v in autograd.items() if k.startswith("autograd_cache")},
        "kernels compiled": nothing.num_compiled(), "breaks": len(counters["graph_break"]),
    }))  # fmt: skip
    return 1 if missing else 0


def _branches(wish: dict[str, Any]) -> dict[str, str]:
    from benchmarks.branches.rows import ROWS
    from benchmarks.branches.variants import Variants, to_warm

    (row,) = [r for r in ROWS if r.name == wish["row"]]
    torch.set_grad_enabled(row.is_training)
    torch.backends.cuda.enable_cudnn_sdp(row.repeats)
    case = row.case("cuda", wish.get("tiny", False))
    variants = Variants(case, "cuda")
    return _once(variants, wish["variants"] or to_warm(row, True))


def _once(variants: Any, names: Iterable[str]) -> dict[str, str]:
    """One call of each: what is compiled is compiled by the first. Why there is none, where there is none."""

    def first(name: str) -> None:
        try:
            call = variants.builders[name](variants.case, variants.options)
            variants.case.reset()
            call(0)
        finally:
            variants.case.unmark()

    return _each(first, names)


def _each(first: Callable[[str], None], names: Iterable[str]) -> dict[str, str]:
    missing = {}
    for name in names:
        began = time.perf_counter()
        try:
            first(name)
        except NotAvailable as why:  # there is none on the GPU either
            print(f"    {name}: {why}", flush=True)
        except Exception as error:  # noqa: BLE001 (the others can be compiled)
            missing[name] = f"{type(error).__name__}: {str(error).strip()[:600]}"
        print(f"    {name}: {time.perf_counter() - began:.1f} s {missing.get(name, '')}", flush=True)
    return missing


def _backend(wish: dict[str, Any]) -> dict[str, str]:
    from benchmarks.backend.models import select
    from benchmarks.backend.sections import SECTIONS, needed
    from benchmarks.backend.variants import Variants

    (row,) = select(wish["row"])
    torch.set_grad_enabled(False)
    case = row.case("cuda", torch.bfloat16, wish.get("tiny", False))
    names = wish["variants"] or dict.fromkeys(name for section in SECTIONS for name in needed(section, case))
    with df.unmeasured():
        return _once(Variants(case, "cuda"), names)


def _overlap(wish: dict[str, Any]) -> dict[str, str]:
    from benchmarks.overlap.__main__ import strategies_of
    from benchmarks.overlap.rows import WORKLOADS
    from benchmarks.overlap.sections import ways
    from benchmarks.overlap.variants import Variants

    (workload,) = [w for w in WORKLOADS if w.name == wish["row"]]
    torch.set_grad_enabled(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    names = wish["variants"] or ways(strategies_of(workload, ""))
    with df.unmeasured():
        return _once(Variants(workload.case("cuda", wish.get("tiny", False)), "cuda"), names)


def _systems(wish: dict[str, Any]) -> dict[str, str]:
    from benchmarks.systems.child import NUM_SETS
    from benchmarks.systems.rows import rows, twin
    from benchmarks.systems.training import Run
    from benchmarks.systems.variants import DEFAULT

    row, tiny = rows()[wish["row"]], wish.get("tiny", False)
    torch.set_grad_enabled(False)
    made = row.make(tiny, "cuda", torch.float32 if tiny else torch.bfloat16)
    sets = [row.inputs(made, tiny, seed) for seed in range(NUM_SETS)]
    # Dynamo drops the captures of what is gone, and those of code that variants share would not be as they are there
    kept = []

    def first(name: str) -> None:
        pgo.reset_code_state()
        kept.append(target := twin(made))
        row.switch(target, name)
        kept.append(way := row.way(target, name, sets, "cuda", tiny))
        if isinstance(way, Run):
            _know_losses(way)
        way.first()

    with df.unmeasured():
        return _each(first, [name for name in row.variants() if name in (wish["variants"] or DEFAULT)])


def _know_losses(way: Any) -> None:
    """The Trainer looks at each loss once more, behind the step: whether it is a number."""
    trainer = way._trainer
    step = trainer.training_step
    trainer.training_step = lambda *args, **kwargs: torch.zeros_like(step(*args, **kwargs))


def rows(suite: str, pattern: str) -> list[str]:
    if suite == "branches":
        from benchmarks.branches.rows import ROWS
    elif suite == "backend":
        from benchmarks.backend.models import ROWS
    elif suite == "overlap":
        from benchmarks.overlap.rows import WORKLOADS as ROWS
    elif suite == "systems":
        from benchmarks.systems import rows as systems

        ROWS = tuple(systems.rows().values())
    else:
        raise SystemExit(f"--suite {suite}: no such suite can be compiled ahead; those that can: {', '.join(SUITES)}")
    return [row.name for row in cases.select(ROWS, pattern)]


SUITES = {"branches": _branches, "backend": _backend, "overlap": _overlap, "systems": _systems}
