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
        """Two or more calls for one function: r and a user of it on the same rows; or r and another ready op; across parts or not."""
        assert self._case is not None
        fusible = self._case.can_fuse
        if not fusible(r.name):
            return []
        successors = flow._successors[r._item]
        users = [u for u in r.users if u.part == r.part and successors.count(u._item) == flow._num_unmet[u._item] and fusible(u.name)]
        others = [x for x in ready if x is not r and fusible(x.name)]
        if users and rng.random() < 0.7:
            return [r, rng.choice(users)]
        return [r, *rng.sample(others, min(len(others), rng.randint(1, 2)))] if others else []
