"""What one process does for one row: its sections, one after another, all variants built once; or the time to a first result."""

from __future__ import annotations

import json
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from benchmarks import turn
from benchmarks.backend import first, report
from benchmarks.backend.models import Row, select
from benchmarks.backend.sections import SECTIONS, Effort, needed
from benchmarks.backend.variants import Variants
from benchmarks.store import Result, failed, stamped


def run(text: str) -> int:
    wish = json.loads(text)
    torch.set_grad_enabled(False)
    if "sections" not in wish:
        first.run_child(wish)
        return 0
    (row,) = select(wish["row"])
    turn.expect(wish["turn"])
    return _Sections(row, wish).run()


class _Sections:
    """The file is written after every one."""

    def __init__(self, row: Row, wish: dict[str, Any]):
        self.row, self.wish = row, wish
        self.effort = Effort(wish["rounds"], wish["host_steps"], wish["replays"])
        self.done: list[Result] = []

    def run(self) -> int:
        wish = self.wish
        case = self.row.case(wish["device"], torch.bfloat16, wish["tiny"])
        variants = Variants(case, wish["device"], wish["options"])
        variants.some(*(name for section in wish["sections"] for name in needed(section, case)))
        if wish["phase"] == "time":
            turn.take()
        is_good = True
        for section in wish["sections"]:
            began = time.perf_counter()
            try:
                found = SECTIONS[section](case, variants, self.effort)
            except Exception as error:  # what does not work stands in the file
                traceback.print_exc()
                found, is_good = failed(section, error), False
            found |= _notes(found, variants) | {"seconds": round(time.perf_counter() - began, 1)}
            print(f"  {section}: {found['seconds']} s", flush=True)
            self.done.append(stamp(self.row, section, found, wish))
            report.save(Path(wish["json"]), report.merged(self.done))
        return 0 if is_good else 1


def config(own: Result, wish: Result) -> Result:
    return {"dtype": "bf16", **own, **wish["options"], **({"tiny": True} if wish["tiny"] else {})}


def stamp(row: Row, section: str, found: Result, wish: Result) -> Result:
    return stamped(row.name, section, config(row.config(wish["tiny"]), wish), found, wish["made_by"], wish["device"])


def _notes(found: Result, variants: Variants) -> Result:
    """What a reader of the row has to know: variants that are missing, warnings, graph breaks, how long variants took to build."""
    built = variants._made.values()
    breaks = dict(torch._dynamo.utils.counters["graph_break"])
    notes = [found.get("note", ""), *(f"{v.name}: {w}" for v in built for w in v.warnings)]
    notes += [f"{n} graph breaks: {str(reason)[:80]}" for reason, n in breaks.items()]
    notes += [f"{name} not measured: {reason}" for name, reason in variants.missing.items()]
    return {"note": "; ".join(filter(None, notes)), "build_s": {v.name: v.build_s for v in built}}
