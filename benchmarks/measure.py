"""Times of several variants side by side, and what they are worth.

1. Variants take turns in short blocks of steps, in an order that moves on by one each round, so that drifting clocks meet all of them.
2. A step's time is that between two CUDA events around its call; the steps of a block are issued back to back, and the first is dropped.
   Where the host is slower than the device, the host's time shows: that is what a caller gets. `device_ms` is measured with the stream
   held until the whole block is issued, so that only the device's time shows.
3. A ratio is the median, over rounds, of the ratio of the two blocks that ran in that round: what slows the machine down for a while slows
   both. Its interval comes from drawing rounds anew (bootstrap, 95%).
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.cases import Call, Case
from benchmarks.pace import Core

# what one block of steps may take
BLOCK_MS = 25.0
MIN_STEPS, MAX_STEPS = 3, 20


@dataclass
class Times:
    """One variant's step times, round by round."""

    rounds: list[list[float]] = field(default_factory=list)
    device: list[float] = field(default_factory=list)

    @property
    def all(self) -> list[float]:
        return [ms for block in self.rounds for ms in block]

    def figures(self) -> dict[str, float]:
        ordered = sorted(self.all)
        found = {"median_ms": _rounded(statistics.median(ordered)), "spread_ms": _rounded(spread(ordered))}
        if self.device:
            found["device_ms"] = _rounded(statistics.median(self.device))
        return found


def spread(ordered: Sequence[float]) -> float:
    """From the 10th to the 90th percentile."""
    return ordered[int(0.9 * (len(ordered) - 1))] - ordered[int(0.1 * (len(ordered) - 1))]


def _rounded(ms: float) -> float:
    return round(ms, 5)


def ratio(ours: Times, theirs: Times, draws: int = 400) -> dict[str, float]:
    """Round by round, with a 95% interval over rounds."""
    paired = [statistics.median(a) / statistics.median(b) for a, b in zip(ours.rounds, theirs.rounds)]
    rng = random.Random(0)
    drawn = sorted(statistics.median(rng.choices(paired, k=len(paired))) for _ in range(draws))
    found = {"ratio": statistics.median(paired), "low": drawn[int(0.025 * draws)], "high": drawn[int(0.975 * draws)]}
    if ours.device and theirs.device:
        found["device_ratio"] = statistics.median(ours.device) / statistics.median(theirs.device)
    return {name: round(value, 4) for name, value in found.items()}


def side_by_side(case: Case, calls: Mapping[str, Call], device: str, num_rounds: int = 40, has_device: bool = True) -> dict[str, Times]:
    """Step times of each call, taken in turns; where they are wanted, the device's own, too."""
    names = list(calls)
    timer = _on_cuda if device.startswith("cuda") else _on_cpu
    num_steps: dict[str, int] = {}
    for name in names:
        step_ms = statistics.median(timer(case, calls[name], 4))
        num_steps[name] = max(MIN_STEPS, min(MAX_STEPS, int(BLOCK_MS / max(step_ms, 1e-3))))
    times = {name: Times() for name in names}
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for number in range(num_rounds):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                times[name].rounds.append(timer(case, calls[name], num_steps[name]))
        if device.startswith("cuda") and has_device:
            for _ in range(max(3, num_rounds // 4)):
                for name in names:
                    times[name].device += _held(case, calls[name])
    finally:
        if was_on:
            gc.enable()
    return times


_step = 0


def _next() -> int:
    global _step
    _step += 1
    return _step


def _on_cuda(case: Case, call: Call, count: int) -> list[float]:
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count + 1)]
    torch.cuda.synchronize()
    for start, end in pairs:
        case.reset()
        number = _next()
        start.record()
        call(number)
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairs[1:]]


def _held(case: Case, call: Call, count: int = 3) -> list[float]:
    """As `_on_cuda`, with the stream held until all steps are issued."""
    began = time.perf_counter()
    case.reset()
    call(_next())
    host_s = time.perf_counter() - began
    torch.cuda.synchronize()
    torch.cuda._sleep(int(min(0.1, 0.001 + 1.5 * count * host_s) * 2e9))
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    for start, end in pairs:
        case.reset()
        start.record()
        call(_next())
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairs]


def _on_cpu(case: Case, call: Call, count: int) -> list[float]:
    times = []
    for _ in range(count):
        case.reset()
        number = _next()
        began = time.perf_counter()
        call(number)
        times.append((time.perf_counter() - began) * 1e3)
    return times


# Steps of one variant in a row, and those of them that are dropped: who is bound by the host calls one model again and again, and what
# ran before has filled the host's caches with its own. Of many launches fewer steps: their queue pushes back.
HOST_STEPS, HOST_DROPPED = 10, 4
LAUNCHED_STEPS, LAUNCHED_DROPPED = 4, 1
# turns on a slow machine are made up for, up to so many times as many
MAX_TURNS = 3


def host_us(
    case: Case, calls: Mapping[str, Call], device: str, count: int = 200, base: str = "", launched: Collection[str] = ()
) -> tuple[dict[str, dict[str, float]], dict[str, Any]]:
    """Time on the host until a call returns, of each variant, taken in turns, on one core; and what is to be known of the machine. The
    queue is emptied before each turn, so that it never pushes back. Turns while the machine was slow are left out, unless they all were,
    and others are taken for them.
    `over_base_us`: the median, over turns, of what a variant took more than the base did in the same turn. `launched`: variants that
    launch kernel by kernel."""
    times: dict[str, list[list[float]]] = {name: [] for name in calls}
    was_fast: list[bool] = []
    num_turns = -(-count // (HOST_STEPS - HOST_DROPPED))
    result: Any = None
    gc.collect()
    gc.disable()
    try:
        with Core() as core:
            while sum(was_fast) < num_turns and len(was_fast) < MAX_TURNS * num_turns:
                core.settle()
                for name, call in calls.items():
                    block = []
                    num_steps, num_dropped = (LAUNCHED_STEPS, LAUNCHED_DROPPED) if name in launched else (HOST_STEPS, HOST_DROPPED)
                    if device.startswith("cuda"):
                        torch.cuda.synchronize()
                    for _ in range(num_steps):
                        case.reset()
                        inputs = _next()
                        result = None  # freed outside of the timed call
                        began = time.perf_counter()
                        result = call(inputs)
                        block.append((time.perf_counter() - began) * 1e6)
                    times[name].append(block[num_dropped:])
                was_fast.append(core.is_fast())
    finally:
        gc.enable()
    del result
    num_kept = sum(was_fast) or len(was_fast)
    machine = {"turns": len(was_fast), "turns_kept": num_kept, "loop_us": round(core.best_us, 1), "moves": core.num_moves}
    if any(was_fast):
        times = {name: [block for block, fast in zip(blocks, was_fast) if fast] for name, blocks in times.items()}
    turns = {name: [statistics.median(block) for block in blocks] for name, blocks in times.items()}
    found = {}
    for name, blocks in times.items():
        us = sorted(us for block in blocks for us in block)
        found[name] = {"median_us": statistics.median(us), "spread_us": spread(us), "tenth_us": us[len(us) // 10]}
        if base in turns:
            found[name]["over_base_us"] = statistics.median(a - b for a, b in zip(turns[name], turns[base]))
    return {name: {what: round(us, 1) for what, us in figures.items()} for name, figures in found.items()}, machine
