"""Shows that a plan is wrong, by running it. Knows nothing of the verifier.

The plan runs on real memory, launch by launch, under several interleavings that its streams and waits allow. Around it is a
caller: his work before the plan and his work after it are instructions of his stream, like any other. A plan is wrong when

    a result differs from the program's          (rows that were never written are poison)
    a launch raises, or writes outside its memory
    memory that was dropped goes to another launch, and somebody still reads it
    every stream waits                           (deadlock)
    a launch runs before the caller's work is done, or after he went on
    two interleavings use a process group in different order     (two ranks could wait for each other)

"not wrong" proves nothing: another interleaving may still be.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from dynaflow.errors import BatchTooSmall
from dynaflow.ir import CALLER, WHOLE, Launch, Plan, Record
from dynaflow.memory import Memory
from dynaflow.runtime.binder import bind
from dynaflow.runtime.loose import overwrite, recycled
from dynaflow.runtime.program import LAUNCH, Bound, Call, View
from dynaflow.testing.flows import Case

BEFORE, AFTER, RUN, RECORDED, WAITING = range(5)


def show_wrong(
    plan: Plan, case: Case, expected: dict[str, torch.Tensor], *, num_interleavings: int = 10, seed: int = 0, memory: Memory | None = None,
    functions: dict[str, Callable[..., Any]] | None = None,
) -> str:  # fmt: skip
    """What an interleaving showed to be wrong; empty when none did."""
    program = replace(case.program, functions=functions or {})
    try:
        bound = bind(plan, program, case.sizes, memory)
    except BatchTooSmall:
        return ""
    except Exception as error:
        return f"it does not bind: {type(error).__name__}: {error}"
    collectives: dict[str, list[str]] | None = None
    for pick in pickers(len(plan.streams) + 1, num_interleavings, seed):
        problem, used = run_once(plan, bound, case, expected, pick)
        if problem:
            return problem
        if collectives is not None and used != collectives:
            return "two interleavings use a process group in different order"
        collectives = used
    return ""


def run_once(
    plan: Plan, bound: Bound, case: Case, expected: dict[str, torch.Tensor], pick: Callable[[list[int]], int]
) -> tuple[str, dict[str, list[str]]]:
    """What went wrong (or nothing), and per process group the calls that used it, in the order in which they ran."""
    inputs = case.inputs()
    try:
        tensors = bound.tensors(inputs, poison=True)
    except Exception as error:
        return f"its memory cannot be made: {type(error).__name__}: {error}", {}
    queues = _queues(plan, bound)
    launches = plan.launches
    dropped = {id(launches[k]): views for k, views in recycled(bound).items()}
    groups = {op.name: [t for t in op.uses if t.startswith("group:")] for op in case.flow.ops}
    used: dict[str, list[str]] = {}
    recorded: set[int] = set()
    is_before, is_after = True, False
    left = sum(map(len, queues))
    while left:
        able = [s for s, queue in enumerate(queues) if queue and (queue[0][0] != WAITING or queue[0][1] is None or queue[0][1] in recorded)]
        if not able:
            return "deadlock: every stream waits", used
        code, what, launch = queues[pick(able)].popleft()
        left -= 1
        if code == RUN:
            if is_before:
                return f"'{launch.label}' ran before the caller's work was done", used
            if is_after:
                return f"'{launch.label}' ran after the caller went on", used
            try:
                overwrite(tensors, dropped.get(id(launch), ()))
                _poison_pieces(launch, bound, case, tensors)
                _run(what, tensors)
            except Exception as error:
                return f"'{launch.label}' raised {type(error).__name__}: {error}", used
            for name, part in launch.calls:
                for group in groups[name]:
                    used.setdefault(group, []).append(f"{name} {part}")
        elif code == RECORDED:
            recorded.add(what)
        elif code == BEFORE:
            is_before = False
        elif code == AFTER:
            is_after = True
            outputs = bound.results(tensors)
            for name, tensor in expected.items():
                found = outputs.get(name, inputs.get(name))
                if found is None or not torch.equal(found, tensor):
                    return f"'{name}' is wrong", used
    return "", used


def _run(call: Call, tensors: list[Any]) -> None:
    """A kernel may write any of its outputs before it has read all of its inputs."""
    for out in call.outs:
        if tensors[out.view] is not None:
            tensors[out.view].fill_(-1)
    call(tensors)


def _poison_pieces(launch: Launch, bound: Bound, case: Case, tensors: list[Any]) -> None:
    """The same for pieces that the launch writes and nobody in it reads."""
    flow = case.flow
    ops = [flow.op(name) for name, _ in launch.calls]
    if not any(flow.value[v].home for op in ops for v in op.writes):
        return
    read = {v for op in ops for v in (*op.reads, *op.mutates)}
    made = {v for op in ops for v in op.writes}
    for name, part in launch.calls:
        mixer: Any = case.program.units[name].fn
        for spec in mixer.pieces:
            rows = part.lowest_terms if flow.value[spec.home].axis is not None else WHOLE
            # a home that is made inside comes as a result; its pieces are written there
            if not {spec.name, spec.home} & read and spec.home not in made:
                spec.seen(tensors[bound.views.index(View(spec.home, rows))], case.sizes).fill_(-1)


def _queues(plan: Plan, bound: Bound) -> list[deque[tuple[int, Any, Any]]]:
    """One FIFO per stream; the caller's begins and ends with his own work. A wait means what was recorded by then, if anything."""
    stream_index = {CALLER: 0, **{s.name: i for i, s in enumerate(plan.streams, 1)}}
    queues: list[deque[tuple[int, Any, Any]]] = [deque() for _ in stream_index]
    queues[0].append((BEFORE, None, None))
    recorded_at: dict[str, int] = {}
    calls = (instruction.what for instruction in bound.instructions if instruction.code == LAUNCH)
    for number, step in enumerate(plan.steps):
        queue = queues[stream_index[step.stream]]
        if type(step) is Launch:
            queue.append((RUN, next(calls), step))
        elif type(step) is Record:
            recorded_at[step.event] = number
            queue.append((RECORDED, number, None))
        else:
            queue.append((WAITING, recorded_at.get(step.event), None))  # type: ignore[union-attr]
    queues[0].append((AFTER, None, None))
    return queues


def pickers(num_streams: int, count: int, seed: int) -> Iterator[Callable[[list[int]], int]]:
    """Interleavings that find races early: the caller first, the caller last, each stream starved or hurried, then random ranks
    that change now and then (most races need one or two changes), then plain random."""
    rng = random.Random(seed)
    ranks = [list(range(num_streams)), list(range(num_streams))[::-1]]
    for s in range(1, num_streams):
        others = [t for t in range(num_streams) if t != s]
        ranks += [[s, *others], [*others, s]]
    fixed = [_by_rank({s: i for i, s in enumerate(rank)}, rng, 0.0) for rank in ranks[: max(2, count // 2)]]
    yield from fixed[:count]
    for number in range(len(fixed), count):
        if number % 3 == 2:
            yield rng.choice
        else:
            order = list(range(num_streams))
            rng.shuffle(order)
            yield _by_rank({s: i for i, s in enumerate(order)}, rng, rng.choice((0.02, 0.1, 0.3)))


def _by_rank(rank: dict[int, int], rng: random.Random, change: float) -> Callable[[list[int]], int]:
    def pick(able: list[int]) -> int:
        if change and rng.random() < change:
            rank[rng.choice(able)] = rng.choice((-1, 1)) * rng.randint(1, 1000)
        return min(able, key=lambda s: rank[s])

    return pick
