from collections import Counter

from dynaflow.ir import Part
from dynaflow.planner import Planner
from dynaflow.strategy import Strategy


class NanoBatch(Strategy):
    """n parts, one behind the other; network ops on their own stream, copies on theirs.

    compute | A0 A1 A2 B0 A3 B1 B2 ...
    comm    |    a0 a1 a2 b0 a3 b1 ...
    """

    def __init__(self, num_parts: int = 4, min_batch_size: int | None = None):
        self.num_parts = num_parts
        self.min_batch_size = num_parts if min_batch_size is None else min_batch_size

    def schedule(self, flow: Planner) -> None:
        if flow.context.batch_size < self.min_batch_size:
            return flow.sequential(f"batch smaller than {self.min_batch_size}")
        flow.split(self.num_parts)
        compute, comm, copy = flow.stream("compute"), flow.stream("comm", priority=-1), flow.stream("copy")
        lane = {"network": comm, "copy": copy}
        num_sent: Counter[Part] = Counter()
        while ready := flow.get_ready_ops():
            # Send as soon as possible. Otherwise stay with one part until it has sent: what waits for its own message must not
            # stand before the work that could run meanwhile. What all parts wait for (a mask over the whole batch) and what leads to it
            # comes early, so that it cuts no part's work in pieces. What nobody waits for goes last where it runs merged (a cache's
            # length), and where it would fill memory while other parts still compute (logits).
            is_last = {r: not r.height and (r.part.is_whole or r.grows) for r in ready}
            r = min(ready, key=lambda r: (r.kind != "network", is_last[r], not r.is_merged_later, num_sent[r.part], r.part, r.depth))
            num_sent[r.part] += r.kind == "network"
            flow.execute(r, stream=lane.get(r.kind, compute))
