"""What kernels cost on the device at hand, and which of several ways to run a call is the fastest.

Contract: measuring changes nothing that the caller can see. What a kernel changes in place is put back; whoever measures gives copies of
the arguments that a call changes, and keeps the state of random numbers.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any, Callable, Mapping, Protocol, Sequence

import torch

from dynaflow.costs import Cost
from dynaflow.ir import CALLER, Stream
from dynaflow.runtime import threads
from dynaflow.runtime.cuda import side_streams
from dynaflow.runtime.graphs import Pool, as_replay, capture_stream
from dynaflow.runtime.program import Bound, Call
from dynaflow.runtime.workspaces import make_workspace

# launches of one kernel in a row, in one recording; rows side by side; replays, of which the fastest counts
NUM_IN_A_ROW, NUM_ROWS, NUM_REPLAYS = 8, 8, 3
# on the CPU: what a row takes, where one launch takes less; launches in it, at most; and what is replayed no more once it took that long
ROW_US, MAX_IN_A_ROW, LONG_US = 1000, 64, 50_000
# of a GPU's clock, at most
CYCLES_PER_US = 2000
# of a way to run a call: rounds, and seconds for all rounds of one way together
NUM_ROUNDS, LIMIT_S = 7, 0.2

# what gains less is not worth its memory
MIN_GAIN = 0.02
# elements of a floating-point tensor that may be a counter; all others are
MAX_COUNTER = 4096
# segments that torch's allocator takes from the device: for what has up to 1 MiB, for what has up to 10, and in steps of which for more
SMALL_SEGMENT, LARGE_SEGMENT, SEGMENT_STEP = 2 * 2**20, 20 * 2**20, 2 * 2**20
FILLS_A_SEGMENT = 10 * 2**20


def segment_bytes(small: int, large: int, num_large: int) -> int:
    """What the allocator takes from the device for so many bytes, in so many pieces of more than 1 MiB: at most, since a kernel that lets
    go of one piece before it asks for the next may get the same segment."""
    step = LARGE_SEGMENT if large < num_large * FILLS_A_SEGMENT else SEGMENT_STEP
    return -(-small // SMALL_SEGMENT) * SMALL_SEGMENT + -(-large // step) * step


class Clock(Protocol):
    # calls before it starts
    num_warm: int

    def cost(self, launch: Callable[[], Any], has_workspace: bool = False, is_alone: bool = False) -> Cost:
        """`has_workspace`: it computes in memory that a library keeps for the stream that it is launched on, or may. `is_alone`: not
        to be run twice at once. It moves a counter on, which both would move too far, or is code that we know nothing about."""
        ...

    def synchronise(self) -> None: ...


class HostClock:
    """Kernels that run while the host waits for them: a row of launches alone; then two rows, the second on a lane. Where those take as
    long as one, a kernel fills half of the machine or less; where they take twice as long, all of it. So it is with a kernel that has a
    thread for every core, and with Inductor's C++ kernels, which hold Python's lock.
    """

    num_warm = 1

    def cost(self, launch: Callable[[], Any], has_workspace: bool = False, is_alone: bool = False) -> Cost:
        once = _least_us(launch)
        count = max(1, min(MAX_IN_A_ROW, int(ROW_US / max(once, 1.0))))

        def row() -> None:
            for _ in range(count):
                launch()

        alone = once if count == 1 else _least_us(row)
        half = 1.0 if is_alone else _least_us(lambda: threads.side_by_side(row)) / alone / 2
        return Cost(alone / count, _share(half, 1 / max(num_lanes(), 2)))

    def synchronise(self) -> None:
        pass


def num_lanes() -> int:
    """Lanes that there are cores for, each with as many threads as torch gives an op. With more, OpenMP puts its threads to sleep behind
    every op, as long as the lanes live, and all ops of the process wait for them to wake up."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return num_cores // torch.get_num_threads()


def _least_us(run: Callable[[], Any]) -> float:
    times: list[float] = []
    while len(times) < NUM_REPLAYS and sum(times) < LONG_US:
        began = time.perf_counter()
        run()
        times.append((time.perf_counter() - began) * 1e6)
    return min(times)


def _share(half: float, least: float) -> float:
    """Of a kernel, two of which side by side take 2 * `half` times as long as one. They tell nothing below a half: what can be told, from
    1/2 to 1, stands for all there is, from `least` to 1."""
    return min(max(1 - (1 - half) * 2 * (1 - least), 0.0), 1.0)


class CudaClock:
    """A kernel alone, several times in a row in one recording; then n rows side by side. Where those take as long as one, it fills 1/n
    of the device or less; where they take n times as long, all of it.

    What the allocator holds for its work on one stream, it holds for every stream that it runs on.

    What has a workspace runs on streams that may have one: each keeps 32 MiB for good. Nor may two of its rows share a workspace: where a
    product's parts take turns, they wait for counters there, for ever if another product resets those. Where there is room for few, two
    rows it is, which have one anyway: launches on the current stream, and a recording.
    """

    num_warm = 4

    def __init__(self, device: torch.device, spare: Callable[[Sequence[Stream]], Sequence[Stream]] = lambda streams: ()):
        """`spare`: which of these streams may have a workspace."""
        self._device = device
        streams = tuple(Stream(f"aux{i}") for i in range(NUM_ROWS - 1))  # plans run on these, too
        self._side = side_streams(device, streams)
        self._spare = lambda: spare(streams)
        self._beside_products: list[torch.cuda.Stream] | None = None
        self._pool = Pool()

    def cost(self, launch: Callable[[], Any], has_workspace: bool = False, is_alone: bool = False) -> Cost:
        launch()  # kernels load, libraries make their workspaces
        held_bytes = self._held_bytes(launch)
        us, share = self._us_and_share(launch, has_workspace, is_alone)
        return Cost(us, share, held_bytes)

    def _us_and_share(self, launch: Callable[[], Any], has_workspace: bool, is_alone: bool) -> tuple[float, float]:
        def row() -> None:
            for _ in range(NUM_IN_A_ROW):
                launch()

        if has_workspace:
            make_workspace(capture_stream(self._device), is_recorded=True)
        recorded = as_replay(self._pool, self._device, row)
        alone = self._us([recorded])
        if alone <= 0:
            return alone, 1.0
        if is_alone:  # taken to fill little: what is tried for that is measured then
            return alone, 1 / NUM_ROWS
        sides = self._sides_for_products() if has_workspace else self._side
        if sides:
            share = self._us([as_replay(self._pool, self._device, lambda: self._in_rows(row, sides))]) / alone / (1 + len(sides))
            return alone, min(max(share, 0.0), 1.0)
        return alone, _share(self._us([row, recorded]) / alone / 2, 1 / NUM_ROWS)

    def _held_bytes(self, launch: Callable[[], Any]) -> int:
        """By what the allocator is asked for meanwhile. It would be seen in a pool of the kernel's own; but torch ends the process where a
        pool goes while anybody captures, or once a capture has failed."""
        if torch.cuda.get_allocator_backend() != "native":
            return 0  # it has no segments
        before = torch.cuda.memory_stats_as_nested_dict(self._device)
        launch()
        after = torch.cuda.memory_stats_as_nested_dict(self._device)

        def more(what: str, pool: str) -> int:
            return int(after[what][pool]["allocated"] - before[what][pool]["allocated"])

        small, large = (more("requested_bytes", pool) for pool in ("small_pool", "large_pool"))
        return segment_bytes(small, large, more("allocation", "large_pool"))

    def _sides_for_products(self) -> list[torch.cuda.Stream]:
        """Asked for once, with the first product."""
        if self._beside_products is None:
            self._beside_products = self._side[: len(self._spare())]
        for side in self._beside_products:
            make_workspace(side, is_recorded=True)
        return self._beside_products

    def _us(self, rows: Sequence[Callable[[], Any]]) -> float:
        """Of one launch in a row: the first row on the current stream, the others beside it. They wait until all are issued, behind a
        kernel that takes that long."""
        main = torch.cuda.current_stream(self._device)
        times, host_us = [], 0.0
        for _ in range(1 + NUM_REPLAYS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(int(CYCLES_PER_US * 2 * host_us))
            began = time.perf_counter()
            begin.record(main)
            for side, row in zip(self._side, rows[1:]):
                side.wait_event(begin)
                with torch.cuda.stream(side):
                    row()
            rows[0]()
            for side, _ in zip(self._side, rows[1:]):
                main.wait_stream(side)
            end.record(main)
            host_us = (time.perf_counter() - began) * 1e6
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3)
        return min(times[1:]) / NUM_IN_A_ROW

    def _in_rows(self, row: Callable[[], Any], sides: Sequence[torch.cuda.Stream]) -> None:
        main = torch.cuda.current_stream(self._device)
        for side in sides:
            side.wait_stream(main)
            with torch.cuda.stream(side):
                row()
        row()
        for side in sides:
            main.wait_stream(side)

    def synchronise(self) -> None:
        torch.cuda.synchronize(self._device)


def clock_for(device: torch.device, spare: Callable[[Sequence[Stream]], Sequence[Stream]] = lambda streams: ()) -> Clock:
    return CudaClock(device, spare) if device.type == "cuda" else HostClock()


class Before:
    """Tensors as they are now. Counters are what must not run on while a call is repeated: a position that grows leaves its cache."""

    def __init__(self, tensors: Sequence[torch.Tensor], has_counters_only: bool = False):
        """`has_counters_only`: nothing else is kept."""
        self._kept = [(t, t.clone()) for t in tensors if not has_counters_only or _may_count(t)]
        self._counters = [(t, old) for t, old in self._kept if _may_count(t)]

    def put_back(self) -> None:
        for tensor, old in self._kept:
            tensor.copy_(old)

    def put_back_counters(self) -> None:
        for tensor, old in self._counters:
            tensor.copy_(old)


def _may_count(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() or tensor.numel() <= MAX_COUNTER


def measure_costs(bound: Bound, values: Mapping[str, torch.Tensor], keys: Mapping[str, Any], clock: Clock) -> dict[str, Cost]:
    """Every kernel of a plan, each where its turn is, so that what it reads is what it would read. Kernels with the same key cost the
    same; each is measured once."""
    tensors = bound.tensors(values)
    flow, products = bound.program.flow, bound.program.products
    known: dict[Any, Cost] = {}
    found: dict[str, Cost] = {}
    for launch, call, drops in zip(bound.plan.launches, bound.calls, bound.drops):
        for i in drops:
            tensors[i] = None
        (name, _), = launch.calls
        key = keys[name]
        if key not in known:
            changed = {flow.value[v].home or v for v in flow.op(name).mutates}
            mine = [tensors[arg.view] for arg in call.args if arg.view >= 0 and bound.views[arg.view].value in changed]
            before = Before(mine)

            def again(call: Call = call, before: Before = before) -> None:
                before.put_back_counters()
                call(list(tensors))  # results go nowhere: they would take the place of those that later kernels read

            is_alone = CALLER in flow.op(name).uses or any(not t.is_floating_point() for t in mine)
            known[key] = clock.cost(again, products is None or name in products, is_alone)
            before.put_back()
        found[name] = known[key]
        call(tensors)
    clock.synchronise()
    return found


def compare(ways: Sequence[Callable[[], Any]], clock: Clock, num_calls: int | None = None) -> list[list[float]]:
    """Microseconds per call of each way, round by round. The ways take turns: what slows the machine down slows all of them.

    `num_calls`: calls of a way per round, where others count on it; else as many as there is time for.
    """
    for way in ways:
        for _ in range(clock.num_warm):
            way()
    clock.synchronise()
    counts = []
    for way in ways:
        began = time.perf_counter()
        way()
        clock.synchronise()
        fitting = int(LIMIT_S / NUM_ROUNDS / max(time.perf_counter() - began, 1e-6))
        counts.append(num_calls or max(1, min(50, fitting)))
    rounds: list[list[float]] = [[] for _ in ways]
    for _ in range(NUM_ROUNDS):
        for times, way, n in zip(rounds, ways, counts):
            began = time.perf_counter()
            for _ in range(n):
                way()
            clock.synchronise()
            times.append((time.perf_counter() - began) / n * 1e6)
    return rounds


def is_faster(mine: Sequence[float], other: Sequence[float]) -> bool:
    """Whether `mine` gained enough, and not by chance: it was faster in almost every round."""
    ratios = [a / b for a, b in zip(mine, other, strict=True)]
    num_lost = sum(ratio >= 1 for ratio in ratios)
    return statistics.median(ratios) < 1 - MIN_GAIN and num_lost <= len(ratios) // 7


class same_random_numbers:
    """What is drawn inside does not show outside."""

    def __init__(self, device: torch.device):
        self._device = device

    def __enter__(self) -> None:
        is_cuda = self._device.type == "cuda"
        self._state = torch.cuda.get_rng_state(self._device) if is_cuda else torch.get_rng_state()

    def __exit__(self, *_: Any) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(self._state, self._device)
        else:
            torch.set_rng_state(self._state)
