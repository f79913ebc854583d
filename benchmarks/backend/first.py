"""Time to the first result (benchmarks/fresh.py); and how it grows with the number of equal layers."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

import dynaflow as df
from benchmarks import fresh
from benchmarks.backend import models
from benchmarks.backend.models import Case, Row
from benchmarks.backend.variants import BUILDERS, COMPILE, COMPILE_DYNAMIC, GUARDS, OURS, SPLITS, Interleaved, df_compile
from benchmarks.cases import Call
from benchmarks.store import Result, target
from benchmarks.variants import NotAvailable

MAX_RATIO = 1.3
FEW, MANY = 4, 32
LAYERED = "per layer, two streams"


def first_section(row: Row, tiny: bool, device: str, options: dict[str, Any], variants: tuple[str, ...] = ()) -> Result:
    names = [n for n in variants or (COMPILE, OURS, COMPILE_DYNAMIC, SPLITS[2][0]) if n in (OURS, COMPILE) or row.batch >= 2]
    wishes = {name: _wish(row.name, name, tiny, device, options) for name in names}
    found = fresh.cold_and_warm("backend", wishes, once=(COMPILE_DYNAMIC,))
    targets = []
    for name in names:
        if name in (COMPILE, COMPILE_DYNAMIC):
            continue
        for when in ("cold", "warm"):
            ours, theirs = found[name][when], found[COMPILE][when]
            value = ours["first_s"] / theirs["first_s"] if "first_s" in ours and "first_s" in theirs else None
            note = ours.get("note", "") or theirs.get("note", "")
            targets.append(target(f"time to first result, {when}: {name} / {COMPILE}", value, MAX_RATIO, note))
    return {"repetitions": fresh.NUM_WARM, "first": found, "against": COMPILE, "targets": targets}


def layers_section(tiny: bool, device: str, options: dict[str, Any]) -> Result:
    """4 and 32 equal layers, a plan cut per layer, cold. Dynamo's own part (a backend that does nothing) is measured and taken off."""
    wanted = [(count, name) for count in (FEW, MANY) for name in (LAYERED, GUARDS)]
    with tempfile.TemporaryDirectory() as folder:
        # each alone: of two side by side, the longer one would be alone at its end
        turns = [[("backend", _wish(f"layers {count}", name, tiny, device, options), Path(folder) / f"{count}-{name.replace(' ', '-')}")]
                 for count, name in wanted]  # fmt: skip
        found = {f"{count} layers, {name}": result for (count, name), (result,) in zip(wanted, fresh.in_turns(turns))}
    seconds = {key: child.get("first_s") for key, child in found.items()}
    value = whole = None
    if None not in seconds.values():
        own = {n: max(seconds[f"{n} layers, {LAYERED}"] - seconds[f"{n} layers, {GUARDS}"], 1e-3) for n in (FEW, MANY)}  # type: ignore[operator]
        value = own[MANY] / own[FEW]
        whole = seconds[f"{MANY} layers, {LAYERED}"] / seconds[f"{FEW} layers, {LAYERED}"]  # type: ignore[operator]
    note = "; ".join(child["note"] for child in found.values() if child.get("note"))
    targets = [target(f"compile time, {MANY} / {FEW} equal layers, Dynamo's own tracing taken off", value, MAX_RATIO, note)]
    return {"repetitions": 1, "first": found, "ratio_with_dynamo": whole and round(whole, 3), "targets": targets}


def _wish(row: str, variant: str, tiny: bool, device: str, options: dict[str, Any]) -> Result:
    return {"row": row, "variant": variant, "tiny": tiny, "device": device, "options": options}


def run_child(wish: Result) -> None:
    """Inside the fresh process: prints one line of json."""
    case, build = _wanted(wish)
    fresh.time_first(case, build, wish["options"], wish["device"])


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
