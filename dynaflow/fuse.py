"""Plan -> the same plan with neighbouring launches merged, to be compiled as one unit each.

    launch norm 0/2 @compute
    launch qkv 0/2 @compute         ->      launch [norm, qkv, rope] 0/2 @compute
    launch rope 0/2 @compute

Contract: runs between `synchronise` and `place`. The result has the same calls in the same order on every stream, and the same
records and waits: it needs no other. No wait is longer than before: nothing that was awaited now comes after more work, nothing
that waited now waits earlier.

1. Two launches are merged when they are next to each other on their stream (in host order, steps of other streams may lie between
   them), over the same part, neither is a replacement, and all their ops may be fused.
2. A record on that stream between them ends a unit: what waits for the first one must not wait for the second.
   A wait does, too: the first one must not wait for what only the second needs.
3. The unit stands at the first one's place in host order. The second one moves up, past steps of other streams alone. Whatever
   happens before it reached its stream through a wait that stands before the first one, so its record and all that is before
   that record stand there as well: what is ordered by streams and waits (users of the random state, collectives) is still issued
   in that order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from dynaflow.ir import Flow, Launch, Op, Plan, Step


def fuse(flow: Flow, plan: Plan, can_fuse: Callable[[Op], bool]) -> Plan:
    """`can_fuse(op)`: whether the op can be part of a compiled unit. Network ops, copies, and what cannot be captured are not."""
    answers: dict[str, bool] = {}

    def may(launch: Launch) -> bool:
        if launch.replace:
            return False
        for name, _ in launch.calls:
            if name not in answers:
                answers[name] = can_fuse(flow.op(name))
        return all(answers[name] for name, _ in launch.calls)

    steps: list[Step] = []
    # per stream: the place in `steps` of the launch that the stream's next one may join
    open_at: dict[str, int] = {}
    for step in plan.steps:
        # 2. records and waits end a unit
        if not isinstance(step, Launch) or not may(step):
            open_at.pop(step.stream, None)
        else:
            at = open_at.get(step.stream)
            first = None if at is None else steps[at]
            # 1. and 3. neighbours over one part: the second moves up to the first
            if at is not None and isinstance(first, Launch) and first.calls[0][1] == step.calls[0][1]:
                steps[at] = replace(first, calls=first.calls + step.calls)
                continue
            open_at[step.stream] = len(steps)
        steps.append(step)
    return replace(plan, steps=tuple(steps))
