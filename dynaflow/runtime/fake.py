"""The fake runtime: a plan on the CPU under a chosen interleaving, on real memory poisoned with NaN.

Each stream is a FIFO of instructions; a scheduler picks which stream runs next among those that can. A wait for an event that
was not recorded before it in host order passes at once, as CUDA has it: a racy plan shows its race here. A launch overwrites the
memory of loose values that was dropped before it on its stream.

    order="issue"    host order, as a machine with one stream would
    order="greedy"   the first declared stream runs as far as it can, then the next
    order="lazy"     the last declared stream first; the caller's stream last
    order=<int>      random, with that seed
"""

from __future__ import annotations

import random
from collections import deque
from typing import Any, Mapping

import torch

from dynaflow.errors import OptionError
from dynaflow.ir import Plan
from dynaflow.runtime.binder import bind
from dynaflow.runtime.lanes import Run
from dynaflow.runtime.loose import overwrite, recycled
from dynaflow.runtime.program import LAUNCH, RECORD, WAIT, Bound, Program

# beside a number, which is a random seed
ORDERS = ("issue", "greedy", "lazy")
Order = str | int


class Deadlock(RuntimeError):
    """No stream can go on. A plan that verifies never gets here."""


def issue(bound: Bound, run: Run, order: Order = "issue") -> None:
    run.is_ahead = True  # what is dropped, and overwritten by its next owner, is decided in host order
    queues: list[deque[tuple[int, Any, Any]]] = [deque() for _ in range(len(bound.streams) + 1)]
    recorded_at: dict[str, int] = {}
    host_order = []
    for number, (code, s, what) in enumerate(bound.instructions):
        # What the wait will wait for is fixed when it is issued: the event as recorded by then, or nothing.
        target = recorded_at.get(what) if code == WAIT else number
        if code == RECORD:
            recorded_at[what] = number
        queues[s].append((code, what, target))
        host_order.append(s)
    done: set[int] = set()
    numbers = [number for number, instruction in enumerate(bound.instructions) if instruction.code == LAUNCH]
    dropped = {numbers[k]: views for k, views in recycled(bound).items()}

    def can_go(s: int) -> bool:
        code, _, target = queues[s][0]
        return code != WAIT or target is None or target in done

    pick = _picker(order, host_order)
    left = len(host_order)
    while left:
        able = [s for s, queue in enumerate(queues) if queue and can_go(s)]
        if not able:
            raise Deadlock(f"{left} instructions are left and every stream waits")
        s = pick(able)
        code, what, target = queues[s].popleft()
        left -= 1
        if code == LAUNCH:
            overwrite(run.tensors, dropped.get(target, ()))
            run.launch(what)
        elif code == RECORD:
            done.add(target)
    run.close()


def _picker(order: Order, host_order: list[int]) -> Any:
    if isinstance(order, int):
        return random.Random(order).choice
    if order == "issue":
        queue = iter(host_order)
        return lambda able: next(queue)
    if order == "greedy":
        return lambda able: min(able, key=lambda s: (s == 0, s))
    if order == "lazy":
        return lambda able: max(able)
    raise OptionError(f"unknown order {order!r}.", fix="use 'issue', 'greedy', 'lazy' or an int (a random seed)")


def run(
    plan: Plan, program: Program, inputs: Mapping[str, torch.Tensor], sizes: Mapping[str, int] | None = None, order: Order = "issue"
) -> dict[str, torch.Tensor]:
    """Bind and run `plan` on poisoned memory; the outputs by name. `inputs` are changed in place where the flow says so."""
    bound = bind(plan, program, dict(sizes or {}))
    tensors = bound.tensors(inputs, poison=True)
    issue(bound, Run(bound, tensors), order)
    return bound.results(tensors)
