"""What is measured of one row: times, equality, memory, the plan and its bound."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.branches import ours
from benchmarks.branches.rows import Case
from benchmarks.branches.variants import (
    BASELINES,
    COMPILE,
    COMPILE_GRAPH,
    EAGER,
    EAGER_GRAPH,
    MAX_AUTOTUNE,
    MINE,
    OURS,
    OURS_GRAPH,
    OURS_TUNED,
    Variants,
)
from benchmarks.cases import Call
from benchmarks.measure import ratio, side_by_side
from benchmarks.store import Result
from benchmarks.variants import Variant

NUM_EQUAL = 3
TUNED_ALONE = f"one stream, {ours.TUNED}"


def time_section(case: Case, variants: Variants, names: Sequence[str], num_rounds: int) -> Result:
    """All variants in turns; the speedup is that of the fastest of ours against the fastest that torch.compile offers."""
    made = variants.some(*names)
    times = side_by_side(case, {name: v.call for name, v in made.items()}, variants.device, num_rounds)
    figures = {name: t.figures() | _memory(made[name]) | {"build_s": made[name].build_s} for name, t in times.items()}
    baselines = {name: f for name, f in figures.items() if name not in (*MINE, OURS_GRAPH)}
    against = min((n for n in BASELINES if n in baselines), key=lambda n: baselines[n]["median_ms"], default=None)
    best = min((n for n in MINE if n in figures), key=lambda n: figures[n]["median_ms"], default=OURS)
    mode = ours.TUNED if best == OURS_TUNED else ours.DEFAULT
    found: Result = {
        "repetitions": min((len(t.all) for t in times.values()), default=0), "ours": figures.get(best), "baselines": baselines,
        "against": against, "plan": ours.choice(mode), "given_mib": round(case.num_bytes / 2**20, 1),
        "modes": {n: figures[n] for n in MINE if n in figures}, "mode": mode,
    }  # fmt: skip
    if against is not None and best in times:
        pair = ratio(times[against], times[best])
        limit = ours.bound(mode)
        found |= {"speedup": pair["ratio"], "interval": [pair["low"], pair["high"]], "device_speedup": pair.get("device_ratio"),
                  "bound": round(baselines[against]["median_ms"] / limit["ms"], 4) if limit else None, "bound_of": limit}  # fmt: skip
    if OURS_GRAPH in times and COMPILE_GRAPH in times:  # both in the caller's own CUDA Graph
        pair = ratio(times[COMPILE_GRAPH], times[OURS_GRAPH])
        found |= {"in_graph": figures[OURS_GRAPH], "speedup_in_graph": pair["ratio"], "interval_in_graph": [pair["low"], pair["high"]]}
    return found | {"note": "; ".join(_notes(made, variants, names, baselines, against))}


def _memory(variant: Variant) -> Result:
    if variant.reserved_mib is None:
        return {}
    return {"allocated_mib": variant.allocated_mib, "reserved_mib": variant.reserved_mib}


def _notes(made: dict[str, Variant], variants: Variants, names: Sequence[str], baselines: Result, against: str | None) -> list[str]:
    """What a reader of the row has to know."""
    notes = [f"{v.name}: {w}" for v in made.values() for w in v.warnings]
    notes += [f"{name} not measured: {variants.missing[name]}" for name in names if name in variants.missing]
    breaks = dict(torch._dynamo.utils.counters["graph_break"])
    notes += [f"{n} graph breaks: {str(reason)[:80]}" for reason, n in breaks.items()]
    if OURS in made and not ours.has_plan(ours.DEFAULT):
        notes.append("no call ran under a plan: `equal` is against torch.compile")
    eager = next((n for n in (EAGER_GRAPH, EAGER) if n in baselines), None)
    if eager and against and baselines[eager]["median_ms"] < baselines[against]["median_ms"]:
        notes.append(f"{eager} is faster than {against}: {baselines[eager]['median_ms']:.4g} ms")
    return notes


# -- equality


def equal_section(case: Case, variants: Variants, names: Sequence[str], count: int = NUM_EQUAL) -> Result:
    """dynaflow against the same callable on one stream, and against torch.compile, on fresh inputs, outputs poisoned before.

    `equal` is "bit" or says what was found. Kernels that do not repeat bit-equal (some attention, atomics) are shown by a second run of
    the reference.
    """
    made = variants.some(*(n for n in (*MINE, COMPILE_GRAPH, COMPILE) if n in names))
    if OURS not in made:
        return {"equal": "not measured", "differences": {}}
    call = made[OURS].call
    references = {"one stream": ours.one_stream(call)}
    if OURS_GRAPH in names and (in_graph := variants.get(OURS_GRAPH)) is not None:
        references[OURS_GRAPH] = in_graph.call
    if (plain := made.get(COMPILE_GRAPH) or made.get(COMPILE)) is not None:
        references[COMPILE] = plain.call
    before = case.sets
    try:
        found = {name: compared(case, call, reference, count) for name, reference in references.items()}
        if OURS_TUNED in made:
            found[TUNED_ALONE] = compared(case, made[OURS_TUNED].call, ours.one_stream(made[OURS_TUNED].call), count)
    finally:
        case.sets = before
    for name, mode in (("one stream", ours.DEFAULT), (TUNED_ALONE, ours.TUNED)):
        if not ours.has_plan(mode):  # it equals itself
            found.pop(name, None)
    return {"equal": headline(found), "differences": found}


def headline(found: dict[str, Result]) -> str:
    """Against one stream, in both modes; where no plan ran, torch.compile is what is left to be held against."""
    verdicts = [verdict(each) for name, each in found.items() if name in ("one stream", TUNED_ALONE)]
    if verdicts:
        return next((v for v in verdicts if v != "bit"), "bit")
    return verdict(found[COMPILE]) if COMPILE in found else "no plan ran"


def compared(case: Case, call: Call, reference: Call, count: int) -> Result:
    """Over `count` fresh inputs: the largest absolute difference, how many were bit-equal, whether the reference repeats itself."""
    worst, equal, repeats, sound = 0.0, 0, True, True
    last: list[Tensor] = []
    for _ in range(count):
        case.sets = [case.fresh()]
        want = _outputs(case, reference, [])
        again = _outputs(case, reference, [])
        if not last:
            _outputs(case, call, last)
        for tensor in last:  # what the next call must write again
            tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
        last.clear()
        got = _outputs(case, call, last)
        worst = max(worst, *(difference(a, b) for a, b in zip(got, want)))
        equal += all(map(torch.equal, got, want))
        repeats &= all(map(torch.equal, again, want))
        sound &= all(bool(torch.isfinite(t).all()) and bool(t.any()) for t in want[: len(last)])
    return {"inputs": count, "bit_equal": equal, "max_abs": worst, "reference_repeats": repeats, "reference_sound": sound}


def _outputs(case: Case, call: Call, kept: list[Tensor]) -> list[Tensor]:
    """Copies of what a step returns and writes; the returned tensors themselves go into `kept`."""
    case.reset()
    kept += [t.detach() for t in case.outputs(call(0))]
    return [t.clone() for t in kept] + case.changed()


def difference(a: Tensor, b: Tensor) -> float:
    """The largest, absolute; infinite where one is not finite."""
    distance = float((a.float() - b.float()).abs().max()) if a.numel() else 0.0
    return distance if distance == distance else float("inf")


def verdict(found: Result) -> str:
    if not found["reference_sound"]:
        return "says nothing: the reference is not finite, or zero"
    if found["bit_equal"] == found["inputs"]:
        return "bit"
    text = f"max abs {found['max_abs']:.1e}"
    return text if found["reference_repeats"] else f"{text}; the reference does not repeat itself"


def provisional(result: Result) -> Result:
    """The row as it stands before max-autotune is there."""
    note = f"{MAX_AUTOTUNE} not measured: the row was ended before it was built"
    return result | {"note": "; ".join(filter(None, (result["note"], note)))}
