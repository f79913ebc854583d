"""CPU lanes: each stream is a worker thread, so that a machine without a GPU sees real overlap.

The workers are shared by all calls and live as long as the process, which ends them before it takes Python down. A call's
instructions are put on all lanes at once (one lock), so that every lane sees the calls in the same order and two calls in flight
cannot wait for each other in a circle. A call made from inside a launch runs where it is: the lanes may be waiting for that launch.

A call that waits for other ranks has lanes to itself while it runs: behind another thread's call, which another rank may have begun in
another order, both would wait for each other. They are kept for the next such call.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import Context, copy_context
from queue import SimpleQueue
from typing import Any, Callable, NamedTuple

import torch

from dynaflow.runtime import ranks
from dynaflow.runtime.lanes import Ambient, Run
from dynaflow.runtime.program import LAUNCH, RECORD, Bound, Instruction

# how long the end of the process waits for a lane that is still at work for some other thread
LEAVE_S = 10.0

# stream -> its worker
Lanes = dict[int, tuple[SimpleQueue[Any], threading.Thread]]

_shared: Lanes = {}
# those of calls that wait for other ranks, and which of them no call has now
_own: list[Lanes] = []
_idle: list[Lanes] = []
_posting = threading.Lock()
_here = threading.local()


class _Work(NamedTuple):
    """A call's share of one lane. `done` is set when the lane keeps nothing of it."""

    done: threading.Event
    follow: Callable[[int], None]
    s: int
    ambient: Ambient
    context: Context


def issue(bound: Bound, run: Run) -> None:
    if run.part_contexts or getattr(_here, "is_launching", False):
        # Engines keep per-part state in globals: all launches under part contexts come from one thread, in host order.
        for code, _, what in bound.instructions:
            if code == LAUNCH:
                run.launch(what)
        return run.close()
    with _lanes_of(bound) as lanes:
        _issue(bound, run, lanes)


@contextmanager
def _lanes_of(bound: Bound) -> Iterator[Lanes]:
    if not bound.is_waited_for:
        yield _shared
        return
    with _posting:
        if not _idle:
            _own.append({})
            _idle.append(_own[-1])
        lanes = _idle.pop()
    try:
        yield lanes
    finally:
        _idle.append(lanes)


def _issue(bound: Bound, run: Run, lanes: Lanes) -> None:
    work: list[list[Instruction]] = [[] for _ in range(len(bound.streams) + 1)]
    for instruction in bound.instructions:
        work[instruction.stream].append(instruction)
    events = {what: threading.Event() for code, _, what in bound.instructions if code == RECORD}
    finished = [threading.Event() for _ in work]

    def follow(s: int) -> None:
        try:
            _here.is_launching = True
            for code, _, what in work[s]:
                if code == LAUNCH:
                    run.launch(what)
                elif code == RECORD:
                    events[what].set()
                else:
                    events[what].wait()
        finally:
            _here.is_launching = False

    def end() -> None:
        """No lane may hold on to this call: launches are skipped from here on, and nobody waits."""
        _here.is_launching = False
        for event in events.values():
            event.set()
        for s in range(num_posted + 1, len(work)):  # the first of these may have been posted: following twice does no harm
            _lane(lanes, s).put(_Work(finished[s], follow, s, ambient, copy_context()))
        for done in finished[1:]:
            done.wait()

    ambient = Ambient()
    num_posted = 0
    try:
        with _posting:
            for s in range(1, len(work)):
                _lane(lanes, s).put(_Work(finished[s], follow, s, ambient, copy_context()))
                num_posted = s
        follow(0)
        for done in finished[1:]:
            done.wait()
    except BaseException as error:  # Ctrl-C, here or there: let the lanes run empty before the caller goes on
        run.error = run.error or error
        _in_spite_of_ctrl_c(end)
    run.close()


def side_by_side(function: Callable[[], Any]) -> None:
    """Call it here and, at the same time, on the first lane. Inside of a launch: twice, one after the other."""
    if getattr(_here, "is_launching", False):
        function()
        return function()
    failed: list[BaseException] = []

    def follow(_: int) -> None:
        try:
            function()
        except BaseException as error:
            failed.append(error)

    done = threading.Event()
    with _posting:
        _lane(_shared, 1).put(_Work(done, follow, 1, Ambient(), copy_context()))
    try:
        function()
    finally:
        done.wait()
    if failed:
        raise failed[0]


def _in_spite_of_ctrl_c(end: Callable[[], None]) -> None:
    """A second one while the first is dealt with must not cut that short. (`end` may run several times.)"""
    while True:
        try:
            return end()
        except KeyboardInterrupt:
            continue


def _lane(lanes: Lanes, s: int) -> SimpleQueue[Any]:
    if s not in lanes:
        queue: SimpleQueue[Any] = SimpleQueue()
        thread = threading.Thread(target=_serve, args=(queue,), name=f"dynaflow-lane-{s}", daemon=True)
        thread.start()
        lanes[s] = queue, thread
    return lanes[s][0]


def _serve(queue: SimpleQueue[Any]) -> None:
    while (work := queue.get()) is not None:
        done = work.done
        try:
            _follow(work)  # in a frame of its own
        finally:
            del work  # whoever waits may rely on it that the lane keeps nothing of the call
            done.set()
        del done


@atexit.register
def _leave() -> None:
    """End the lanes while Python is whole: a thread that is inside of torch when Python goes away takes the process down with it
    ("terminate called without an active exception"). So may one that sent a lane's message."""
    with _posting:
        lanes = [lane for each in (_shared, *_own) for lane in each.values()]
        _forget()
        for queue, _ in lanes:
            queue.put(None)
    until = time.monotonic() + LEAVE_S
    for _, thread in lanes:
        thread.join(max(0.0, until - time.monotonic()))
        # Python is done with a thread before the thread is: what torch keeps per thread goes last, and may need Python
        while os.path.exists(f"/proc/self/task/{thread.native_id}") and time.monotonic() < until:
            time.sleep(0.001)
    ranks.settle(until)


def _follow(work: _Work) -> None:
    ambient = work.ambient
    if torch.get_num_threads() != ambient.num_threads:
        # Kernels choose their blocking by the number of threads: bit-equality needs the caller's number here too.
        torch.set_num_threads(ambient.num_threads)
    with ambient.enter():
        work.context.run(work.follow, work.s)


def _forget_lanes() -> None:
    """A forked child has the queues but not the threads."""
    global _posting
    _forget()
    _posting = threading.Lock()


def _forget() -> None:
    for known in (_shared, _own, _idle):
        known.clear()


os.register_at_fork(after_in_child=_forget_lanes)
