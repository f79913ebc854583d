"""What one process does for one row: warm or tune (fill the caches on disk), time, first."""

from __future__ import annotations

import json
import os
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from benchmarks import fresh, turn
from benchmarks.branches import ours, report
from benchmarks.branches.pictures import add_timelines
from benchmarks.branches.rows import ROWS, Case, Row
from benchmarks.branches.sections import equal_section, provisional, time_section
from benchmarks.branches.variants import TUNED, Variants, names, to_warm
from benchmarks.store import Result, failed, stamped


def run(text: str) -> int:
    wish = json.loads(text)
    (row,) = [r for r in ROWS if r.name == wish["row"]]
    torch.set_grad_enabled(row.is_training)
    torch.backends.cuda.enable_cudnn_sdp(row.repeats)
    if wish["phase"] == "first":
        build = Variants.builders[wish["variant"]]
        fresh.time_first(row.case(wish["device"], wish["tiny"]), build, wish["options"], wish["device"])
        return 0
    turn.expect(wish["turn"])
    if wish["phase"] == "time":
        return _time(row, wish)
    return _fill(row, wish)


def _names(row: Row, wish: dict[str, Any]) -> tuple[str, ...]:
    """The row's variants that were asked for."""
    found = names(row, wish["device"].startswith("cuda"))
    return tuple(n for n in found if not wish["variants"] or n in wish["variants"])


def _fill(row: Row, wish: dict[str, Any]) -> int:
    """Compile and call once; Inductor keeps what it made. What is chosen beside other processes is forgotten."""
    is_cuda = wish["device"].startswith("cuda")
    wanted = to_warm(row, is_cuda) if wish["phase"] == "warm" else tuple(n for n in _names(row, wish) if n in TUNED)
    with tempfile.TemporaryDirectory() as forgotten:
        os.environ["DYNAFLOW_DIR"] = forgotten
        variants = Variants(row.case(wish["device"], wish["tiny"]), wish["device"], wish["options"])
        variants.some(*(n for n in wanted if not wish["variants"] or n in wish["variants"]))
    return 1 if variants.missing else 0


def _time(row: Row, wish: dict[str, Any]) -> int:
    """The row is written before max-autotune is built, and again after: who ends this process loses that only."""
    began = time.perf_counter()
    try:
        case = row.case(wish["device"], wish["tiny"])
        variants = Variants(case, wish["device"], wish["options"])
        wanted = _names(row, wish)
        quick = tuple(n for n in wanted if n not in TUNED)
        with ours.before_trials(turn.take):  # they time plans
            variants.some(*quick)
        turn.take()
        found = time_section(case, variants, quick, wish["rounds"]) | equal_section(case, variants, quick)
        left_out = [n for n in names(row, variants.is_cuda) if n not in wanted]
        if left_out:
            found["note"] = "; ".join(filter(None, (found["note"], f"left out: {', '.join(left_out)}")))
        if wanted != quick:
            _keep(row, wish, provisional(found), began)
            found |= time_section(case, variants, wanted, wish["rounds"]) | equal_section(case, variants, wanted)
        _keep(row, wish, found, began)
        if wish["timelines"]:
            _timelines(case, variants, row, Path(wish["timelines"]))
    except Exception as error:  # what does not work stands in the file
        traceback.print_exc()
        _keep(row, wish, failed("time", error), began)
        return 1
    return 0


def _keep(row: Row, wish: dict[str, Any], found: Result, began: float) -> None:
    config = report.config(row, wish["tiny"], wish["options"])
    timed = found | {"seconds": round(time.perf_counter() - began, 1)}
    report.save(Path(wish["json"]), [stamped(row.name, "time", config, timed, wish["made_by"], wish["device"])])


def _timelines(case: Case, variants: Variants, row: Row, path: Path) -> None:
    variant = variants.get(ours.NAME)
    found = ours.timelines(case, variant.call) if variant is not None else None
    if found is not None:
        add_timelines(path, row.name, *found)
