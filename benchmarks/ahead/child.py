"""What one process compiles: a row of a suite, under CUDA on the host, over the caches that the environment names."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch

import dynaflow as df
from benchmarks import cases
from benchmarks.ahead import host, nothing


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


def _once(variants: Any, names: Any) -> dict[str, str]:
    """One call of each: what is compiled is compiled by the first. Why there is none, where there is none."""
    missing = {}
    for name in names:
        began = time.perf_counter()
        try:
            call = variants.builders[name](variants.case, variants.options)
            variants.case.reset()
            call(0)
        except Exception as error:  # noqa: BLE001 (the others can be compiled)
            missing[name] = f"{type(error).__name__}: {str(error).strip()[:600]}"
        finally:
            variants.case.unmark()
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
    from benchmarks.overlap.variants import SHARED, Variants, one_stream

    (workload,) = [w for w in WORKLOADS if w.name == wish["row"]]
    torch.set_grad_enabled(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    names = wish["variants"] or [*SHARED, *(name for s in strategies_of(workload, "") for name in (one_stream(s), s))]
    with df.unmeasured():
        return _once(Variants(workload.case("cuda", wish.get("tiny", False)), "cuda"), names)


def rows(suite: str, pattern: str) -> list[str]:
    if suite == "branches":
        from benchmarks.branches.rows import ROWS
    elif suite == "backend":
        from benchmarks.backend.models import ROWS
    elif suite == "overlap":
        from benchmarks.overlap.rows import WORKLOADS as ROWS
    else:
        raise SystemExit(f"--suite {suite}: no such suite can be compiled ahead; those that can: {', '.join(SUITES)}")
    return [row.name for row in cases.select(ROWS, pattern)]


SUITES = {"branches": _branches, "backend": _backend, "overlap": _overlap}
