"""CPU lanes: each stream is a worker thread, so that a machine without a GPU sees real overlap.

The workers live as long as the process and are shared by all calls. A call's instructions are put on all lanes at once (one
lock), so that every lane sees the calls in the same order and two calls in flight cannot wait for each other in a circle.
"""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import Any

import torch

from dynaflow.runtime.lanes import Ambient, Run
from dynaflow.runtime.program import LAUNCH, RECORD, Bound, Instruction

_lanes: dict[int, SimpleQueue[Any]] = {}
_posting = threading.Lock()


def issue(bound: Bound, run: Run) -> None:
    if run.part_contexts:
        # Engines keep per-part state in globals: all launches under part contexts come from one thread, in host order.
        for code, _, what in bound.instructions:
            if code == LAUNCH:
                run.launch(what)
        return run.close()
    work: list[list[Instruction]] = [[] for _ in range(len(bound.streams) + 1)]
    for instruction in bound.instructions:
        work[instruction.stream].append(instruction)
    events = {what: threading.Event() for code, _, what in bound.instructions if code == RECORD}
    ambient = Ambient()
    finished = [threading.Event() for _ in work]

    def follow(s: int) -> None:
        for code, _, what in work[s]:
            if code == LAUNCH:
                run.launch(what)
            elif code == RECORD:
                events[what].set()
            else:
                events[what].wait()
        finished[s].set()

    with _posting:
        for s in range(1, len(work)):
            _lane(s).put((follow, s, ambient))
    follow(0)
    for s in range(1, len(work)):
        finished[s].wait()
    run.close()


def _lane(s: int) -> SimpleQueue[Any]:
    if s not in _lanes:
        queue: SimpleQueue[Any] = SimpleQueue()
        threading.Thread(target=_serve, args=(queue,), name=f"dynaflow-lane-{s}", daemon=True).start()
        _lanes[s] = queue
    return _lanes[s]


def _serve(queue: SimpleQueue[Any]) -> None:
    num_threads = None
    while True:
        follow, s, ambient = queue.get()
        if num_threads != ambient.threads:
            # Kernels choose their blocking by the number of threads: bit-equality needs the caller's number here too.
            num_threads = ambient.threads
            torch.set_num_threads(num_threads)
        with ambient.enter():
            follow(s)
