"""What is measured of one case, section by section. A section returns the part of a result row that is its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import dynaflow as df
from benchmarks.backend import trace
from benchmarks.backend.models import Case
from benchmarks.backend.variants import (
    BARE,
    COMPILE,
    COMPILE_GRAPH,
    EAGER_SPLIT,
    GUARDS,
    OURS,
    OURS_BORROW,
    OURS_FIXED,
    OURS_GRAPH,
    REPLAY,
    SPLITS,
    TWO_BATCH,
    TWO_BATCH_GRAPH,
    Variants,
)  # fmt: skip
from benchmarks.measure import host_us, ratio, side_by_side
from benchmarks.store import Result, target
from benchmarks.variants import Variant

MAX_ROW_RATIO, MAX_GEOMEAN_RATIO = 1.02, 1.01
MAX_EXTRA_SHARE, MAX_EXTRA_MIB = 0.02, 32.0
# per stream, on Hopper (":4096:8")
CUBLAS_WORKSPACE_MIB = 32.0
HOST_US, HOST_US_PER_INPUT = 25.0, 5.0
MAX_TWO_BATCH_MEMORY = 1.05
MAX_ERROR_RATIO = 2.0
NUM_KEPT = 20


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    num_rounds: int = 40
    host_steps: int = 200
    replays: int = 1000


def _why(variants: Variants, *names: str) -> str:
    return "; ".join(f"{name}: {variants.missing[name]}" for name in names if name in variants.missing)


def needed(section: str, case: Case) -> tuple[str, ...]:
    """The variants that a section measures; `equal` makes its own, in settings of its own."""
    shared, split = (COMPILE, COMPILE_GRAPH, OURS, OURS_BORROW, OURS_GRAPH), [name for n in _parts(case) for name in SPLITS[n]]
    return {
        "host": (*shared, OURS_FIXED, GUARDS), "time": shared, "trace": (OURS, OURS_BORROW, OURS_GRAPH, *split), "equal": (),
        "split": (OURS, OURS_BORROW, *split, TWO_BATCH, TWO_BATCH_GRAPH) if split else (),
    }[section]  # fmt: skip


# -- 1. host


def host_section(case: Case, variants: Variants, effort: Effort) -> Result:
    made = variants.some(*needed("host", case))
    calls = {name: v.call for name, v in made.items()}
    if COMPILE_GRAPH in calls:
        calls[REPLAY] = calls[COMPILE_GRAPH].without_copies  # type: ignore[attr-defined]
        if GUARDS in calls:
            # what a step takes that has guards and a graph, and nothing else: a launch leaves the host's caches to the guards that follow
            guards, graph = calls[GUARDS], calls[COMPILE_GRAPH]
            calls[BARE] = lambda number: (guards(number), graph(number))
    figures, machine = host_us(case, calls, variants.device, effort.host_steps, GUARDS, launched=(COMPILE, OURS))
    limit = HOST_US + HOST_US_PER_INPUT * case.num_inputs
    bare = [figures.get(name, {}).get(what) for name, what in ((REPLAY, "median_us"), (COMPILE_GRAPH, "median_us"), (BARE, "over_base_us"))]
    note = f"a graph's launch alone takes {bare[0]}, with its copies {bare[1]}, behind the guards {bare[2]}" if None not in bare else ""
    targets = [
        target(f"host: {name} - {GUARDS}, us", figures.get(name, {}).get("over_base_us"), limit, _why(variants, name, GUARDS) or note)
        for name in (OURS_FIXED, OURS_BORROW, OURS_GRAPH)
    ]
    guards = figures.get(GUARDS, {}).get("median_us")
    return {"repetitions": effort.host_steps, "host": figures, "copied_inputs": case.num_inputs, "guards_us": guards,
            "machine": machine, "targets": targets}  # fmt: skip


# -- 2. time


def time_section(case: Case, variants: Variants, effort: Effort) -> Result:
    made = variants.some(*needed("time", case))
    calls = {name: v.call for name, v in made.items()}
    if COMPILE_GRAPH in calls:
        calls[REPLAY] = calls[COMPILE_GRAPH].without_copies  # type: ignore[attr-defined]
    times = side_by_side(case, calls, variants.device, effort.num_rounds)
    figures = {name: t.figures() | _memory(made.get(name)) for name, t in times.items()}
    ours = next((name for name in (OURS_BORROW, OURS_GRAPH, OURS) if name in times), None)
    against = COMPILE_GRAPH if COMPILE_GRAPH in times else COMPILE
    pairs = {f"{a} / {b}": ratio(times[a], times[b])
             for a, b in ((OURS, COMPILE), (OURS_BORROW, COMPILE_GRAPH), (OURS_GRAPH, COMPILE_GRAPH), (OURS, COMPILE_GRAPH))
             if a in times and b in times}  # fmt: skip
    targets = []
    for a, b in ((OURS, COMPILE), (OURS_BORROW, COMPILE_GRAPH)):
        found = pairs.get(f"{a} / {b}")
        targets.append(target(f"time: {a} / {b}", found and found["ratio"], MAX_ROW_RATIO, _why(variants, a, b)))
        targets.append(_memory_target(variants, a, b))
    return {
        "repetitions": min(len(t.all) for t in times.values()),
        "ours": {"variant": ours, **figures[ours]} if ours else None,
        "baselines": {name: figures[name] for name in (COMPILE, COMPILE_GRAPH, REPLAY) if name in figures},
        "variants": {name: figures[name] for name in (OURS, OURS_BORROW, OURS_GRAPH) if name in figures},
        "against": against,
        "speedup": ratio(times[against], times[ours])["ratio"] if ours and against in times else None,
        "ratios": pairs,
        "targets": targets,
    }


def _memory(variant: Variant | None) -> Result:
    if variant is None or variant.reserved_mib is None:
        return {}
    return {"allocated_mib": variant.allocated_mib, "reserved_mib": variant.reserved_mib}


def _memory_target(variants: Variants, ours: str, theirs: str) -> Result:
    """With graphs: reserved memory, for what a graph's pool holds is allocated to nobody. Without: allocated memory, for what is
    reserved beyond it is chance."""
    a, b = variants.get(ours), variants.get(theirs)
    what = f"peak memory: {ours} - {theirs}, MiB"
    which = "reserved_mib" if theirs == COMPILE_GRAPH else "allocated_mib"
    mine, other = (getattr(v, which) if v is not None else None for v in (a, b))
    if mine is None or other is None:
        return target(what, None, MAX_EXTRA_MIB, _why(variants, ours, theirs) or "no CUDA")
    return target(what, mine - other, max(MAX_EXTRA_MIB, MAX_EXTRA_SHARE * other))


# -- 3. split


def _parts(case: Case) -> list[int]:
    return [n for n in SPLITS if next(iter(case.sets[0].values())).shape[0] >= n]


def split_section(case: Case, variants: Variants, effort: Effort) -> Result:
    parts = _parts(case)
    if not parts:
        return {"note": "a batch of one row cannot be split", "targets": []}
    unsplit = variants.some(OURS, OURS_BORROW)
    split = variants.some(*(name for name in needed("split", case) if name not in unsplit))
    times = side_by_side(case, {name: v.call for name, v in (unsplit | split).items()}, variants.device, max(2, effort.num_rounds // 2))
    figures = {name: t.figures() | _memory((unsplit | split)[name]) for name, t in times.items()}
    slowdown = {}
    for names in (*(SPLITS[n] for n in parts), (TWO_BATCH, TWO_BATCH_GRAPH)):
        for name, base in zip(names, (OURS, OURS_BORROW)):
            if name in times and base in times:
                slowdown[f"{name} / {base}"] = ratio(times[name], times[base])
    targets = []
    for name, num_streams in ((SPLITS[parts[0]][0], 0), (TWO_BATCH, 1)):
        targets.append(planned_target(name, split.get(name), num_streams))
    targets.append(_two_batch_target(case, variants, TWO_BATCH, OURS, "allocated_mib"))
    targets.append(_two_batch_target(case, variants, TWO_BATCH_GRAPH, OURS_BORROW, "reserved_mib"))
    return {"repetitions": min(len(t.all) for t in times.values()), "variants": figures, "slowdown": slowdown, "targets": targets}


def planned_target(name: str, variant: Variant | None, num_streams: int) -> Result:
    """Whether the peak that the engine plans is what the allocator shows. A side stream brings cuBLAS's workspace with it."""
    what = f"peak memory: {name}, allocated against planned, MiB"
    if variant is None or variant.allocated_mib is None:
        return target(what, None, MAX_EXTRA_MIB, "no CUDA" if variant is not None else "not built")
    planned = df.stats(variant.call.fast).peak_bytes / 2**20 + num_streams * CUBLAS_WORKSPACE_MIB  # type: ignore[attr-defined]
    limit = max(MAX_EXTRA_MIB, MAX_EXTRA_SHARE * planned)
    return target(what, abs(variant.allocated_mib - planned), limit, f"planned {planned:.1f}, allocated {variant.allocated_mib:.1f}")


# -- 4. trace


def trace_section(case: Case, variants: Variants, effort: Effort) -> Result:
    """What the profiler sees of a step. Behind all times of the process: once it has run, launches stay slower."""
    parts = _parts(case)
    unsplit = variants.some(OURS, OURS_BORROW)
    split = variants.some(*(name for n in parts for name in SPLITS[n]))
    seen = {name: trace.copies_of(case, v.call, variants.device) for name, v in (unsplit | split).items()}
    copies, targets = {}, []
    for n in parts:
        for name, base, launched in zip(SPLITS[n], (OURS, OURS_BORROW), (None, seen.get(SPLITS[n][0]))):
            found = None
            if name in split and base in unsplit:
                found = copies[name] = trace.excess(seen[name], seen[base], n, launched)
            targets.append(copies_target(name, found, _fallbacks(split.get(name)) or _why(variants, name, base)))
    if variants.is_cuda:
        targets += [_launch_target(case, variants, name) for name in (OURS_BORROW, OURS_GRAPH)]
    return {"repetitions": 1, "copies": copies, "targets": targets}


def _launch_target(case: Case, variants: Variants, name: str) -> Result:
    """One graph launch per step; none at all means that the plan was not recorded."""
    variant = variants.get(name)
    found = trace.copies_of(case, variant.call, variants.device).num_graph_launches if variant is not None else None
    note = "" if found else _why(variants, name) or "no graph was launched"
    return target(f"CUDA Graph launches per step: {name}", found or None, 1, note)


def copies_target(name: str, found: Result | None, problem: str = "") -> Result:
    """No byte may be copied, in a plan that did split: one that fell back copies nothing, and shows nothing."""
    unsized = found["unsized_kernels"] if found else {}
    note = problem or ("; ".join(f"{k} +{b:,}" for k, b in found["by_kernel"].items()) if found else "")
    if unsized:
        note += "; copies of unknown size: " + ", ".join(f"{k} {a} times, {b} expected" for k, (a, b) in unsized.items())
    # a sum is only a sum when nothing is missing from it
    value = None if found is None or problem or (unsized and not found["bytes"]) else found["bytes"]
    return target(f"copied for split and merge: {name}, bytes", value, 0, note)


def _fallbacks(variant: Variant | None) -> str:
    stats = variant.stats if variant is not None else None
    if stats is None:
        return ""
    if stats.fallbacks:
        return "fell back: " + "; ".join(reason.splitlines()[0][:120] for reason in stats.fallbacks)
    return "" if stats.num_part_launches else "nothing ran on a part"


def _two_batch_target(case: Case, variants: Variants, name: str, base: str, which: str) -> Result:
    """What the device holds at its peak, weights, caches and inputs included; the ratio without them stands beside."""
    a, b = variants.get(name), variants.get(base)
    what = f"peak memory: {name} / {base}, {which.split('_')[0]}"
    ours, theirs = (getattr(v, which) if v is not None else None for v in (a, b))
    if ours is None or not theirs:
        return target(what, None, MAX_TWO_BATCH_MEMORY, _why(variants, name, base) or "no CUDA")
    given = case.num_bytes / 2**20
    note = _fallbacks(a) or f"without weights, caches and inputs {ours / theirs:.3f}"
    return target(what, (given + ours) / (given + theirs), MAX_TWO_BATCH_MEMORY, note)


# -- 5. equal


def equal_section(case: Case, variants: Variants, effort: Effort) -> Result:
    """cuDNN's attention does not repeat bit-equal (the same call twice, on one stream, differs): it is off in this section, and what
    was recorded while it was on is made anew."""
    before = list(case.sets)
    is_cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    if variants.is_cuda:
        variants = variants.anew()
    try:
        replays = _replays(case, variants, OURS_GRAPH, effort.replays, is_kept=True)
        graph, plain = SPLITS[2][1], SPLITS[2][0]
        can_split = next(iter(before[0].values())).shape[0] >= 2
        split = _replays(case, variants, graph, max(5, effort.replays // 10)) if can_split else None
        eager = _replays(case, variants, EAGER_SPLIT, 5) if can_split else None
        errors = _errors(case, variants, (COMPILE, OURS, OURS_GRAPH, *((plain, graph, EAGER_SPLIT) if can_split else ())))
    finally:
        case.sets = before
        torch.backends.cuda.enable_cudnn_sdp(is_cudnn)
    ours = [error for name, error in errors.items() if name != COMPILE]
    targets = [
        target(f"replays of {OURS_GRAPH} that differ from the serialised plan", replays.get("different"), 0, replays["note"]),
        target("earlier outputs that did not stay as they were", replays.get("overwritten"), 0, replays["note"]),
        target("error, in units of eager's own", max(ours, default=None), MAX_ERROR_RATIO),
    ]
    for what, found in ((f"replays of {graph} that differ from the serialised plan", split),
                        (f"calls of {EAGER_SPLIT} that differ from the serialised plan", eager)):  # fmt: skip
        if found is not None:
            targets.append(target(what, found.get("different"), 0, found["note"]))
    is_bit = all(t["is_met"] for t in targets)
    return {"repetitions": effort.replays, "equal": "bit" if is_bit else "see targets", "replays": replays, "split": split,
            "eager ops": eager, "error_ratio": errors, "targets": targets}  # fmt: skip


def _replays(case: Case, variants: Variants, name: str, count: int, is_kept: bool = False) -> Result:
    """New inputs in every call, each compared bit for bit with the same compiled plan launch by launch on one stream, caches included."""
    made = variants.get(name)
    if made is None:
        return {"note": _why(variants, name)}
    fast = made.call.fast  # type: ignore[attr-defined]
    chosen = set(random.Random(0).sample(range(count), min(NUM_KEPT, count))) if is_kept else set()
    kept: list[tuple[list[Tensor], list[Tensor]]] = []
    different, worst = 0, 0.0
    for number in range(count):
        case.sets = [case.fresh()]
        case.reset()
        got = case.outputs(made.call(0))
        mine = case.changed()
        if number in chosen:
            kept.append((got, [t.clone() for t in got]))
        if not is_kept:  # borrowed: the next call may overwrite it
            got = [t.clone() for t in got]
        case.reset()
        want = case.outputs(df.run_serialised(fast, **case.args(0)))
        if not all(map(torch.equal, (*got, *mine), (*want, *case.changed()))):
            different += 1
            worst = max(worst, *(_distance(a, b) for a, b in zip(got, want)))
    overwritten = sum(not all(map(torch.equal, now, then)) for now, then in kept)
    note = f"largest relative distance {worst:.1e}" if different else ""
    problem = _fallbacks(made) if not is_kept else ""
    if not problem and variants.is_cuda and name != EAGER_SPLIT:
        launches = trace.copies_of(case, made.call, variants.device).num_graph_launches
        problem = "" if launches else "no CUDA Graph was launched"
    if problem:  # equal to itself: that shows nothing
        return {"count": count, "note": problem}
    return {"count": count, "different": different, "kept": len(kept), "overwritten": overwritten, "note": note}


def _errors(case: Case, variants: Variants, names: tuple[str, ...]) -> dict[str, float]:
    """Norm of the error against float32, over that of eager in the case's own type; the worst of two inputs and all outputs."""
    wide = case.wide()
    found: dict[str, float] = {}
    precision = torch.get_float32_matmul_precision()
    for _ in range(2):
        case.sets = [case.fresh()]
        torch.set_float32_matmul_precision("highest")
        truth = wide.run(case.sets[0])
        torch.set_float32_matmul_precision(precision)
        own = [_distance(a, b) for a, b in zip([t.clone() for t in case.run(case.sets[0])], truth)]
        for name, variant in variants.some(*names).items():
            case.reset()
            errors = [_distance(a, b) for a, b in zip(case.outputs(variant.call(0)), truth)]
            found[name] = round(max(found.get(name, 0.0), *(e / max(o, 1e-9) for e, o in zip(errors, own))), 3)
    return found


def _distance(a: Tensor, b: Tensor) -> float:
    """Relative, by norm; not finite where the truth is: infinite."""
    distance = (torch.linalg.vector_norm(a.float() - b.float()) / torch.linalg.vector_norm(b.float()).clamp_min(1e-30)).item()
    return distance if distance == distance else float("inf")


SECTIONS: dict[str, Callable[[Case, Variants, Effort], Result]] = {
    "host": host_section, "time": time_section, "split": split_section, "trace": trace_section, "equal": equal_section,
}  # fmt: skip
