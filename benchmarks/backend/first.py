"""Time to the first result, in fresh processes with fresh caches on disk; and how it grows with the number of equal layers.

A child builds the model and runs it once eagerly (libraries load), then times: compile, first call, synchronise. Cold: the caches'
folder is empty. Warm: the same folder again, in a new process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

import dynaflow as df
from benchmarks.backend import models
from benchmarks.backend.models import Case, Row
from benchmarks.backend.sections import Result, target
from benchmarks.backend.variants import BUILDERS, COMPILE, GUARDS, OURS, SPLITS, Call, Interleaved, NotAvailable, df_compile

MAX_RATIO = 1.3
FEW, MANY = 4, 32
LAYERED = "per layer, two streams"
_ROOT = Path(__file__).parents[2]


def first_section(row: Row, tiny: bool, device: str, options: dict[str, Any], variants: tuple[str, ...] = ()) -> Result:
    names = [n for n in variants or (COMPILE, OURS, SPLITS[2][0]) if n in (OURS, COMPILE) or row.batch >= 2]
    found: dict[str, Result] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            caches = Path(folder) / name.replace(" ", "-")
            for when in ("cold", "warm"):
                found.setdefault(name, {})[when] = _child(row.name, name, tiny, device, options, caches)
    targets = []
    for name in names[1:]:
        for when in ("cold", "warm"):
            ours, theirs = found[name][when], found[COMPILE][when]
            value = ours["first_s"] / theirs["first_s"] if "first_s" in ours and "first_s" in theirs else None
            note = ours.get("note", "") or theirs.get("note", "")
            targets.append(target(f"time to first result, {when}: {name} / {COMPILE}", value, MAX_RATIO, note))
    return {"repetitions": 1, "first": found, "against": COMPILE, "targets": targets}


def layers_section(tiny: bool, device: str, options: dict[str, Any]) -> Result:
    """4 and 32 equal layers, a plan cut per layer, cold. Dynamo's own part (a backend that does nothing) is measured and taken off."""
    found: dict[str, Result] = {}
    with tempfile.TemporaryDirectory() as folder:
        for count in (FEW, MANY):
            for name in (LAYERED, GUARDS):
                caches = Path(folder) / f"{count}-{name.replace(' ', '-')}"
                found[f"{count} layers, {name}"] = _child(f"layers {count}", name, tiny, device, options, caches)
    seconds = {key: child.get("first_s") for key, child in found.items()}
    value = whole = None
    if None not in seconds.values():
        own = {n: max(seconds[f"{n} layers, {LAYERED}"] - seconds[f"{n} layers, {GUARDS}"], 1e-3) for n in (FEW, MANY)}  # type: ignore[operator]
        value = own[MANY] / own[FEW]
        whole = seconds[f"{MANY} layers, {LAYERED}"] / seconds[f"{FEW} layers, {LAYERED}"]  # type: ignore[operator]
    note = "; ".join(child["note"] for child in found.values() if child.get("note"))
    targets = [target(f"compile time, {MANY} / {FEW} equal layers, Dynamo's own tracing taken off", value, MAX_RATIO, note)]
    return {"repetitions": 1, "first": found, "ratio_with_dynamo": whole and round(whole, 3), "targets": targets}


def _child(row: str, variant: str, tiny: bool, device: str, options: dict[str, Any], caches: Path) -> Result:
    wish = {"row": row, "variant": variant, "tiny": tiny, "device": device, "options": options}
    places = {name: str(caches / sub) for name, sub in (
        ("TORCHINDUCTOR_CACHE_DIR", "inductor"), ("TRITON_CACHE_DIR", "triton"),
        ("CUDA_CACHE_PATH", "cuda"))}  # fmt: skip
    began = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.backend", "--child", json.dumps(wish)]
    environment = {**os.environ, **places, "PYTHONPATH": f"{_ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, env=environment)
    wall_s = round(time.perf_counter() - began, 2)
    last = (done.stdout.strip().splitlines() or [""])[-1]
    try:
        result = json.loads(last)
    except json.JSONDecodeError:
        result = {"note": f"child failed ({done.returncode}): {done.stderr.strip()[-300:]}"}
    print(f"    {row}, {variant}: {result.get('first_s', result.get('note'))} (process {wall_s} s)", flush=True)
    size = sum(f.stat().st_size for f in caches.rglob("*") if f.is_file()) if caches.exists() else 0
    return {**result, "process_s": wall_s, "cache_mib": round(size / 2**20, 1)}


def run_child(text: str) -> None:
    """Inside the fresh process: prints one line of json."""
    wish = json.loads(text)
    torch.set_grad_enabled(False)
    case, build = _wanted(wish)
    sync = torch.cuda.synchronize if wish["device"].startswith("cuda") else lambda: None
    case.run(case.sets[0])
    sync()
    seconds = []
    try:
        began = time.perf_counter()
        call: Call = build(case, wish["options"])
        for number in range(3):
            case.reset()
            call(number)
            sync()
            seconds.append(round(time.perf_counter() - began, 3))
    except NotAvailable as error:
        print(json.dumps({"note": str(error)}))
        return
    print(json.dumps({"first_s": seconds[0], "third_s": seconds[2]}))


def _wanted(wish: dict[str, Any]) -> tuple[Case, Any]:
    name, tiny = wish["row"], wish["tiny"]
    if name.startswith("layers "):
        count = int(name.split()[1])
        row = Row(name, partial(_small_llama, count), 8, 64)
        build = BUILDERS[GUARDS] if wish["variant"] == GUARDS else _layered
    else:
        (row,) = [r for r in models.ROWS if r.name == name]
        build = BUILDERS[wish["variant"]]
    return row.case(wish["device"], torch.bfloat16, tiny), build


def _small_llama(num_layers: int, tiny: bool) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    width = 64 if tiny else 512
    return LlamaForCausalLM(LlamaConfig(
        hidden_size=width, intermediate_size=2 * width, num_attention_heads=8, num_key_value_heads=8, vocab_size=997,
        max_position_embeddings=256, num_hidden_layers=num_layers))  # fmt: skip


def _layered(case: Case, options: dict[str, Any]) -> Call:
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    fast = df_compile(case.module, strategy=Interleaved(), partition=[df.SplitModule(LlamaDecoderLayer)], **options)

    def call(number: int) -> Any:
        result = fast(**case.args(number))
        if df.stats(fast).fallbacks:
            raise NotAvailable(f"fell back: {next(iter(df.stats(fast).fallbacks))[:200]}")
        return result

    return call
