"""Fuzzing of planner, synchronise, fuse, place, verify and the fake runtime against each other.

    python -m dynaflow.testing.fuzz --flows 1000 --interleavings 10 --mutants 10000 --json benchmarks/results/fuzz.json

1. Valid plans: random flows x 7 strategies, each plan as it is, and with random launches fused and random values loose. Each must be
   accepted (and its text, its serialised form and harmless edits of it), refused without any one of its waits, and give the
   program's result, bit by bit, under every interleaving, and for other sizes.
2. Mutants: plans with one mistake. Each one that an interleaving shows wrong must be refused.

A violation is anything else. They are printed with their seeds; the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from itertools import product
from multiprocessing import get_context
from typing import Any

import torch

from dynaflow.context import Context
from dynaflow.errors import DynaFlowError
from dynaflow.fuse import fuse
from dynaflow.ir import Plan, Wait
from dynaflow.memory import bind_memory, internal_values, loose_values, pack, place
from dynaflow.planner import run_strategy
from dynaflow.replacement import body
from dynaflow.runtime import fake
from dynaflow.runtime.binder import bind
from dynaflow.runtime.lanes import Run
from dynaflow.strategies import (
    Branches,
    CommOverlap,
    DualBatch,
    FusedGemm,
    Mixed,
    NanoBatch,
    NanoFlow,
    PrefillDecode,
    Sequential,
    SingleBatch,
    TokenWeave,
    TwoBatch,
)  # fmt: skip
from dynaflow.strategy import Strategy
from dynaflow.sync import synchronise
from dynaflow.testing.edits import harmless_edit, mutate_memory
from dynaflow.testing.flows import Case, random_flow
from dynaflow.testing.mutate import MUTATIONS, apply
from dynaflow.testing.oracle import show_wrong
from dynaflow.testing.strategies import RandomStrategy
from dynaflow.verify import verify, verify_memory

MUTANTS_PER_FLOW = 12
Functions = dict[str, Callable[..., Any]]


@dataclass
class Tally:
    """What was counted. Tallies of several processes add up."""

    counts: Counter[str] = field(default_factory=Counter)
    # per class of mutants: made, refused, wrong, ...
    mutants: dict[str, Counter[str]] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.counts.update(other.counts)
        for name, counts in other.mutants.items():
            self.mutants.setdefault(name, Counter()).update(counts)
        self.violations += other.violations


def strategies(case: Case) -> list[Strategy]:
    field = overlaps(case)
    in_turn = [field[(2 * case.seed + k) % len(field)] for k in range(2)]
    return [Sequential(), TwoBatch(), NanoBatch(3), Branches(3), RandomStrategy(case.seed, case), *in_turn]


def overlaps(case: Case) -> list[Strategy]:
    """The strategies of the field, with thresholds that small batches pass. Of each flow, two of them in turn are tried."""
    half, memory = case.batch_size // 2, ("*.op1", "*.op?3", "*.op?7")
    return [
        NanoFlow(min_tokens=1, memory_ops=memory), DualBatch(0, lead=1 + case.seed % 2), SingleBatch(), CommOverlap(3, 1), TokenWeave(1, 0),
        FusedGemm(2, 1), PrefillDecode(half, attention="*"), Mixed(TwoBatch(), Branches(2)), Mixed(NanoBatch(3), Branches(3)),
    ]  # fmt: skip


def make_plan(case: Case, strategy: Strategy, rng: random.Random | None = None) -> tuple[Plan, Functions]:
    """With `rng`, neighbouring launches of some ops are fused, and some values are loose."""
    facts = {"batch_size": case.batch_size, "device": "cpu"}
    planner = run_strategy(case.flow, strategy, Context(facts), make_body=partial(body, case.program))
    plan, loose = synchronise(case.flow, planner.finish()), frozenset[str]()
    if rng is not None:
        share = rng.choice((0.5, 0.9, 1.0))
        fusible = {op.name for op in case.flow.ops if rng.random() < share}
        plan = fuse(case.flow, plan, lambda op: op.name in fusible) if rng.random() < 0.85 else plan
        share = rng.choice((0.0, 0.3, 1.0))
        loose = frozenset(v.name for v in case.flow.values if rng.random() < share)
    return place(case.flow, plan, loose), planner.functions


# ---------------------------------------------------------------------------- 1. valid plans


def check_flow(seed: int, num_interleavings: int) -> Tally:
    tally = Tally()
    case = random_flow(seed)
    expected = case.reference()
    tally.counts["flows"] += 1
    tally.counts["ops"] += len(case.flow.ops)
    tally.counts["flows with pieces"] += bool(case.flow.pieces)
    tally.counts["pieces"] += sum(map(len, case.flow.pieces.values()))
    changed = {v for op in case.flow.ops for v in op.mutates}
    for strategy, is_varied in product(strategies(case), (False, True)):
        name = f"flow {seed}, {type(strategy).__name__}" + (", fused and loose" if is_varied else "")
        try:
            plan, functions = make_plan(case, strategy, random.Random(f"{name}") if is_varied else None)
            tally.counts["fused plans" if is_varied else "plans"] += 1
            tally.counts["fused"] += sum(len(launch.calls) > 1 and not launch.replace for launch in plan.launches)
            tally.counts["loose"] += len(plan.loose)
            tally.counts["changed loose"] += sum(value in changed for value in plan.loose)
            tally.counts["internal"] += len(internal_values(case.flow, plan))
            tally.counts["launches"] += len(plan.launches)
            tally.counts["streams"] += len(plan.streams)
            tally.counts["waits"] += len(plan.waits)
            tally.counts["replacements"] += sum(bool(launch.replace) for launch in plan.launches)
            for problem in (*plan_problems(plan, case, seed), *run_problems(plan, functions, case, expected, num_interleavings, tally)):
                tally.violations.append(f"{name}: {problem}")
            if not functions:
                larger = case.resized(s0=case.sizes["s0"] + 1 + seed % 9, s1=case.sizes["s1"] % 5 + 1)
                for problem in run_problems(plan, functions, larger, larger.reference(), 1, tally):
                    tally.violations.append(f"{name}, for sizes {larger.sizes}: {problem}")
        except Exception as error:
            tally.violations.append(f"{name}: {type(error).__name__}: {error}")
    return tally


def plan_problems(plan: Plan, case: Case, seed: int) -> Iterator[str]:
    flow, rng = case.flow, random.Random(seed)
    report = verify(plan, flow)
    verify_memory(flow, plan, bind_memory(flow, plan, case.sizes), case.sizes)
    verify_memory(flow, plan, pack(flow, plan, case.sizes), case.sizes)
    verify(plan.serialised(), flow)
    if frozenset(plan.loose) != loose_values(flow, plan):
        yield "what it lists as loose is not what has no slot"
    if Plan.parse(str(plan)) != plan:
        yield "its text does not parse back to the same plan"
    if verify(Plan.parse(str(plan)), flow) != report:
        yield "its text verifies differently"
    edited = harmless_edit(plan, rng)
    try:
        verify(edited, flow)
    except DynaFlowError as error:
        yield f"a harmless edit is refused: {error}\n{edited}"
    is_asked = any(launch.after for launch in plan.launches)  # waits that a strategy asked for need not be needed
    for at, step in enumerate(plan.steps):
        if type(step) is Wait and not is_asked:
            try:
                verify(replace(plan, steps=plan.steps[:at] + plan.steps[at + 1 :]), flow)
            except DynaFlowError:
                continue
            yield f"wait {step.event} @{step.stream} (step {at}) can be left out"


def run_problems(
    plan: Plan, functions: Functions, case: Case, expected: dict[str, torch.Tensor], count: int, tally: Tally
) -> Iterator[str]:
    program = replace(case.program, functions=functions)
    serialised = bind(plan.serialised(), program, case.sizes)
    bound, packed = (bind(plan, program, case.sizes, memory) for memory in (None, pack(case.flow, plan, case.sizes)))
    orders: list[str | int] = ["issue", "lazy", "greedy", *range(count)]
    for which, order in [(serialised, "issue"), *((packed if i % 2 else bound, order) for i, order in enumerate(orders[:count]))]:
        inputs = case.inputs()
        tensors = which.tensors(inputs, poison=True)
        fake.issue(which, Run(which, tensors), order)
        outputs = which.results(tensors)
        tally.counts["runs"] += 1
        for name, tensor in expected.items():
            found = outputs.get(name, inputs.get(name))
            if found is None or not torch.equal(found, tensor):
                yield f"'{name}' differs under order={order!r}" + (" of the serialised plan" if which is serialised else "")
                break


# ---------------------------------------------------------------------------- 2. mutants


def check_mutants(seed: int, num_interleavings: int, count: int = MUTANTS_PER_FLOW) -> Tally:
    """`count` mutants of one plan, of different classes where possible; one of them of the bound memory."""
    tally = Tally()
    rng = random.Random(seed)
    case = random_flow(seed)
    expected = case.reference()
    strategy = rng.choice(strategies(case)[1:] + [RandomStrategy(seed + k, case) for k in range(3)])
    plan, functions = make_plan(case, strategy, rng if seed % 3 else None)
    verify(plan, case.flow)
    memory = bind_memory(case.flow, plan, case.sizes)
    classes = rng.sample(list(MUTATIONS), len(MUTATIONS))
    made = 0
    while made < count:
        name, changed, mutant = classes[made % len(classes)], None, plan
        if made == 0 and memory.offsets:
            name, changed = mutate_memory(memory, rng)
            refused = _refused(partial(verify_memory, case.flow, plan, changed, case.sizes))
        else:
            found = apply(name, plan, case.flow, rng)
            if found is None:
                classes.remove(name)
                continue
            mutant = found
            refused = _refused(partial(verify, mutant, case.flow))
        wrong = show_wrong(
            mutant, case, expected, num_interleavings=num_interleavings, seed=seed + made, memory=changed, functions=functions)
        text = f"{changed or ''}\n{mutant}"
        made += 1
        counts = tally.mutants.setdefault(name, Counter())
        counts["made"] += 1
        counts["refused" if refused else "accepted"] += 1
        counts["wrong"] += bool(wrong)
        counts["refused, not shown wrong"] += bool(refused and not wrong)
        if refused:
            counts[f"by {refused}"] += 1
        if wrong and not refused:
            counts["missed"] += 1
            tally.violations.append(f"mutants of flow {seed} ({strategy}), {name}: accepted, and wrong: {wrong}\n{text}")
        if refused.startswith("crash"):
            tally.violations.append(f"mutants of flow {seed} ({strategy}), {name}: {refused}\n{text}")
    return tally


def _refused(check: Callable[[], object]) -> str:
    """The name of the error; empty when accepted."""
    try:
        check()
    except DynaFlowError as error:
        return type(error).__name__
    except Exception as error:
        return f"crash: {type(error).__name__}: {error}"
    return ""


# ---------------------------------------------------------------------------- driver


def fuzz(num_flows: int, num_interleavings: int, num_mutants: int, *, first_seed: int = 0, num_jobs: int = 1, quiet: bool = False) -> Tally:
    total = Tally()
    rounds = -(-num_mutants // MUTANTS_PER_FLOW)
    work: list[tuple[str, Callable[[int], Tally], Iterable[int]]] = [
        ("flows", partial(check_flow, num_interleavings=num_interleavings), range(first_seed, first_seed + num_flows)),
        ("mutants", partial(check_mutants, num_interleavings=num_interleavings), range(first_seed + 10**6, first_seed + 10**6 + rounds)),
    ]
    for title, check, seeds in work:
        for tally in _progress(title, _map(check, list(seeds), num_jobs), len(list(seeds)), quiet):
            total.add(tally)
    return total


def _map(check: Callable[[int], Tally], seeds: list[int], num_jobs: int) -> Iterator[Tally]:
    if num_jobs == 1:
        yield from map(check, seeds)
        return
    with ProcessPoolExecutor(num_jobs, mp_context=get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        yield from pool.map(check, seeds, chunksize=8)


def _progress(title: str, items: Iterator[Tally], total: int, quiet: bool) -> Iterator[Tally]:
    if quiet:
        yield from items
        return
    try:
        from rich.progress import track
    except ImportError:
        for number, item in enumerate(items, 1):
            if number % max(1, total // 20) == 0:
                print(f"{title} {number}/{total}", flush=True)
            yield item
        return
    yield from track(items, description=title, total=total)


def report(tally: Tally, elapsed_s: float) -> str:
    c = tally.counts
    lines = [
        f"{c['flows']:,} flows ({c['ops']:,} ops), {c['flows with pieces']:,} of them with pieces ({c['pieces']:,})",
        f"{c['plans']:,} plans and {c['fused plans']:,} fused ones ({c['launches']:,} launches, "
        f"{c['fused']:,} of them fused, {c['waits']:,} waits, {c['replacements']:,} replacements, {c['internal']:,} internal and "
        f"{c['loose']:,} loose values, {c['changed loose']:,} of these changed in place), {c['runs']:,} runs compared bit by bit",
        "",
        f"{'mutants':<44}{'made':>7}{'wrong':>7}{'refused':>9}{'accepted':>10}{'missed':>8}   refused, not shown wrong",
    ]
    columns = ("made", "wrong", "refused", "accepted", "missed", "refused, not shown wrong")
    for name, counts in sorted(tally.mutants.items()):
        lines.append(f"{name:<44}" + _row(counts, columns))
    lines.append(f"{f'all {len(tally.mutants)} classes':<44}" + _row(sum(tally.mutants.values(), Counter()), columns))
    lines.append(f"{len(tally.violations)} violations, {elapsed_s:.0f} s")
    return "\n".join(lines)


def _row(counts: Counter[str], columns: tuple[str, ...]) -> str:
    return "".join(f"{counts[name]:>{width},}" for name, width in zip(columns, (7, 7, 9, 10, 8, 8)))


def as_json(tally: Tally, elapsed_s: float, made_by: str) -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=os.path.dirname(__file__)).stdout.strip()
    mutants = sum(tally.mutants.values(), Counter())
    return {
        "suite": "fuzz", "made_by": made_by, "commit": commit or "not committed",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": {"gpu": None, "cpu": platform.processor() or platform.machine()},
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "rows": [{"row": name, **counts} for name, counts in sorted(tally.mutants.items())],
        "summary": {
            **tally.counts, "classes": len(tally.mutants), "mutants": mutants["made"], "wrong": mutants["wrong"],
            "missed": mutants["missed"],
            "refused_not_shown_wrong": mutants["refused, not shown wrong"], "violations": len(tally.violations),
            "elapsed_s": round(elapsed_s),
        },
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dynaflow.testing.fuzz", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--flows", type=int, default=1000)
    parser.add_argument("--interleavings", type=int, default=10)
    parser.add_argument("--mutants", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--json", metavar="PATH", help="write the figures there")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    started = time.perf_counter()
    tally = fuzz(args.flows, args.interleavings, args.mutants, first_seed=args.seed, num_jobs=args.jobs)
    elapsed_s = time.perf_counter() - started
    print(report(tally, elapsed_s))
    for violation in tally.violations[:10]:
        print(f"\nVIOLATION {violation}")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(as_json(tally, elapsed_s, "python -m dynaflow.testing.fuzz " + " ".join(argv or sys.argv[1:])), file, indent=1)
            file.write("\n")
    return 1 if tally.violations else 0


if __name__ == "__main__":
    sys.exit(main())
