"""What is measured of one workload: all ways in turns, in one process; then a result per strategy."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import dynaflow as df
from benchmarks import turn
from benchmarks.measure import Times, ratio, side_by_side
from benchmarks.overlap.rows import Case
from benchmarks.overlap.variants import BESIDE, COMPUTE, NETWORK, SEQUENTIAL, SHARED, Variants, in_parts, in_way, one_stream
from benchmarks.store import Result, target

MIN_SPEEDUP, MIN_HIDDEN = 0.99, 0.9
# strategies whose older rows, where they do not split, may be held against something else: the parts of their only other option, two; a
# product that sends on a stream of its own
HELD_AGAINST_OTHERS = ("CommOverlap", "TokenWeave", "FusedGemm")
# a strategy whose chunks are no parts
IN_CHUNKS = ("FusedGemm",)
# a row whose strategy gains so much is one where splitting pays
PAYS = 1.01


def ways(strategies: Sequence[str]) -> list[str]:
    """All that is built for a workload: what a strategy's parts are is known once it ran on one stream."""
    return [*SHARED, *(n for s in strategies for n in (one_stream(s), in_parts(s), s))]


def measured(case: Case, variants: Variants, strategies: Sequence[str], num_rounds: int) -> dict[str, Result]:
    """strategy -> result, of those strategies that there are; the others with the reason."""
    made = variants.some(*ways(strategies))
    turn.take()
    chosen = {s: variants.choose(s) for s in strategies if s in made}
    made = variants.some(*ways(strategies))  # held against the options that were fastest
    for variant in made.values():
        variants.steps(variant.call, 3)
    # strategies that cut alike are side by side in the same recording
    first = {n: next(m for m in made if made[m].call is variant.call) for n, variant in made.items()}
    times = side_by_side(case, {n: made[n].call for n in dict.fromkeys(first.values())}, variants.device, num_rounds, has_device=False)
    times = {n: times[same] for n, same in first.items()}
    return {s: _result(case, variants, times, s, *chosen.get(s, ("", False))) for s in strategies}


def _result(case: Case, variants: Variants, times: Mapping[str, Times], name: str, gave_up: str, is_split: bool) -> Result:
    figures = {n: t.figures() for n, t in times.items()}
    found: Result = {
        "repetitions": len(times[SEQUENTIAL].all) if SEQUENTIAL in times else 0, "emulated": True,
        "baselines": {n: figures[n] for n in (SEQUENTIAL, one_stream(name)) if n in figures},
        "alone": {n: figures[n] for n in (COMPUTE, NETWORK, BESIDE, in_parts(name)) if n in figures},
        "ours": figures.get(name), "against": SEQUENTIAL,
    }  # fmt: skip
    wanted = (*SHARED, one_stream(name), *((in_parts(name),) if is_split else ()), name)
    notes = [f"{n} not measured: {variants.missing[n]}" for n in wanted if n in variants.missing]
    if name not in times or SEQUENTIAL not in times:
        reason = variants.missing.get(name) or variants.missing.get(SEQUENTIAL, "")
        is_known = reason.startswith("dynaflow ")  # this version has no such strategy: nothing was missed
        missed = [] if is_known else [target("it could be measured", None, 0, reason)]
        return found | {"note": "; ".join(notes), "targets": missed, "is_available": not is_known}
    variant = variants.get(name)
    assert variant is not None, name
    notes += [f"gave up: {gave_up}"] if gave_up else [f"{name}: {w}" for w in variant.warnings]
    found |= gains(times, name, bool(gave_up), is_split) | equal(case, variants, name)
    found |= {"gave_up": gave_up, "is_split": is_split, "options": case.taken.get(one_stream(name), ""), "note": "; ".join(notes)}
    return found | {"targets": targets(found)}


def gains(times: Mapping[str, Times], name: str, gave_up: bool = False, is_split: bool = True) -> Result:
    """Speedup over sequential with its interval, and what follows from the medians."""
    speedup = ratio(times[SEQUENTIAL], times[name])
    found = {"speedup": speedup["ratio"], "interval": [speedup["low"], speedup["high"]]}
    return found | hidden({n: statistics.median(t.all) for n, t in times.items()}, name, gave_up, is_split)


def hidden(ms: Mapping[str, float], name: str, gave_up: bool = False, is_split: bool = True) -> Result:
    """How much of the time that could be hidden is.

    Hidden is what overlapping saves over the same launches on one stream: those of the option that was fastest. Hideable is what the same
    kernels save side by side, nothing waiting for anything, against one after the other: in the strategy's parts, or unsplit where its
    plan does not split. (Of older rows, unsplit ones alone are known, against the sequential plan; and the shorter of compute and
    network, each alone: a device that only computes gets hot, and slow.)
    """
    found: Result = {}
    one, beside = ms.get(one_stream(name)), ms.get(in_parts(name))
    if COMPUTE in ms and NETWORK in ms:
        found["bound"] = round(ms[SEQUENTIAL] / max(ms[COMPUTE], ms[NETWORK]), 4)
        found["hideable_ms"] = round(min(ms[COMPUTE], ms[NETWORK]), 5)
        if BESIDE in ms:
            found["bound_beside"] = round(ms[SEQUENTIAL] / ms[BESIDE], 4)
            found["hideable_beside_ms"] = round(ms[SEQUENTIAL] - ms[BESIDE], 5)
    if one is not None and is_split and beside is not None:
        found["hideable_in_parts_ms"] = round(one - beside, 5)
    if one is not None and not gave_up:
        found["hidden_ms"] = round(one - ms[name], 5)
        for what in ("", "_beside", "_in_parts"):
            if found.get(f"hideable{what}_ms", 0) > 0:
                found[f"hidden_share{what}"] = round(found["hidden_ms"] / found[f"hideable{what}_ms"], 4)
    return found


def hidden_share(found: Mapping[str, Any]) -> float | None:
    """By the best that is known of the row. None where nothing could be hidden, or where what is known is of other launches."""
    if "hideable_in_parts_ms" in found:
        return found.get("hidden_share_in_parts")
    known = (found.get(f"hidden_share{what}") for what in ("_beside", ""))
    return next((share for share in known if share is not None), None) if _is_of_its_own(found) else None


def shown_share(found: Mapping[str, Any]) -> str:
    """With a mark where parts, or chunks, are held against what unsplit kernels save."""
    share, strategy = hidden_share(found), found.get("config", {}).get("strategy")
    is_marked = "hideable_in_parts_ms" not in found and (found.get("is_split", True) or strategy in IN_CHUNKS)
    return "-" if share is None else f"{'~' * is_marked}{share:.0%}"


def _is_of_its_own(found: Mapping[str, Any]) -> bool:
    """Whether it is held against its own launches on one stream."""
    may_be_another = not found.get("is_split", True) and found.get("config", {}).get("strategy") in HELD_AGAINST_OTHERS
    return "options" in found or not may_be_another


def targets(found: Result) -> list[Result]:
    """No row may lose; one whose plan splits the batch, and gains by that, must hide what can be hidden."""
    wanted = [target("speedup over sequential (emulated)", found["speedup"], MIN_SPEEDUP, at_least=True)]
    if found["is_split"] and found["speedup"] >= PAYS:
        what = "share of the hideable network time hidden (emulated)"
        wanted.append(target(what, hidden_share(found), MIN_HIDDEN, at_least=True))
    return wanted


# -- equality


def equal(case: Case, variants: Variants, name: str) -> Result:
    """Bit for bit with the same plan launch by launch on one stream; and how far from the sequential one."""
    made = variants.some(name, SEQUENTIAL)
    got, plain = (_outputs(case, made[n].call) for n in (name, SEQUENTIAL))
    with in_way(case, name):
        want = _outputs(case, lambda number: df.run_serialised(made[name].call.fast, **case.args(number)))  # type: ignore[attr-defined]
    is_sound = all(bool(torch.isfinite(t).all()) and bool(t.any()) for t in plain)
    distance = max(_distance(a, b) for a, b in zip(got, plain))
    said = "bit" if all(map(torch.equal, got, want)) else f"max abs {max(float((a - b).abs().max()) for a, b in zip(got, want)):.1e}"
    return {"equal": said if is_sound else "says nothing: the reference is not finite, or zero", "distance_from_sequential": distance}


def _outputs(case: Case, call: Any) -> list[Tensor]:
    case.reset()
    return [t.clone() for t in case.outputs(call(0))]


def _distance(a: Tensor, b: Tensor) -> float:
    """Relative, by norm."""
    return round(float(torch.linalg.vector_norm(a.float() - b.float()) / torch.linalg.vector_norm(b.float()).clamp_min(1e-30)), 6)
