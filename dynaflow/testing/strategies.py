"""Strategies for tests: RandomStrategy does everything that the interface allows, at random."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from dynaflow.planner import Planner, ReadyOp
from dynaflow.strategy import Strategy

if TYPE_CHECKING:
    from dynaflow.testing.flows import Case


class RandomStrategy(Strategy):
    """Random splits (even, uneven, per op), streams and order; sometimes one launch over adjacent parts, sometimes a replacement."""

    def __init__(self, seed: int, case: Case | None = None):
        # case: what replacements are made of; without it there are none
        self.seed, self._case = seed, case

    def schedule(self, flow: Planner) -> None:
        rng = random.Random(self.seed)
        batch_size = int(flow.context.batch_size)
        self._split(flow, rng, batch_size)
        streams = ["compute", "comm", "copy", "aux0"][: rng.randint(1, 4)] + ["caller"] * (rng.random() < 0.3)
        if rng.random() < 0.5 and "comm" in streams:
            flow.stream("comm", priority=-1)
        # Some strategies keep to one stream for a while, some jump.
        stays = rng.choice((0.0, 0.5, 0.8))
        stream = rng.choice(streams)
        number = 0
        while ready := flow.get_ready_ops():
            r = rng.choice(ready)
            if rng.random() > stays:
                stream = rng.choice(streams)
            roll = rng.random()
            group = self._replaced(flow, rng, r, ready) if roll < 0.12 and self._case is not None else []
            if group and self._case is not None:
                number += 1
                function = self._case.fuse([(x.name, x.part) for x in group], f"fused_{number}")
                flow.execute(group, stream=stream, replace=function)
            elif roll > 0.8:
                flow.execute(self._adjacent(r, ready), stream=stream)
            else:
                flow.execute(r, stream=stream)

    def _split(self, flow: Planner, rng: random.Random, batch_size: int) -> None:
        def random_split() -> Any:
            num_parts = rng.randint(1, min(4, batch_size))
            if rng.random() < 0.5:
                return num_parts
            return [0, *sorted(rng.sample(range(1, batch_size), num_parts - 1)), batch_size]

        flow.split(random_split())
        if rng.random() < 0.4:
            for op in flow.ops:
                if not op.unsplittable and rng.random() < 0.3:
                    flow.split(random_split(), ops=op.name)

    def _adjacent(self, r: ReadyOp, ready: list[ReadyOp]) -> list[ReadyOp]:
        """r and what is ready of the same op on the rows right behind it."""
        run = [r]
        for other in sorted((x for x in ready if x.op is r.op), key=lambda x: x.part):
            if other.part.lo == run[-1].part.hi and other.part.of == r.part.of:
                run.append(other)
        return run

    def _replaced(self, flow: Planner, rng: random.Random, r: ReadyOp, ready: list[ReadyOp]) -> list[ReadyOp]:
        """Calls for one function: all that a user of r still waits for, and that user; or some ready ops. Across parts or not."""
        assert self._case is not None
        can_fuse = self._case.can_fuse
        others = [x for x in ready if x is not r and can_fuse(x.name)]
        users = r.users
        if users and rng.random() < 0.7:
            user = rng.choice(users)
            before = [h for h in flow._handles if user._item in flow._successors[h._item]]
            open_ones = [h for h in before if not flow._done[h._item]]
            # What is made inside must be made there for all of the user's rows.
            is_half = any(h.name == g.name and flow._done[h._item] for h in before for g in open_ones)
            group = [*open_ones, user]
            if not is_half and all(x.is_ready for x in open_ones) and all(can_fuse(x.name) for x in group):
                return group
        return [r, *rng.sample(others, min(len(others), rng.randint(1, 2)))] if others and can_fuse(r.name) else []
