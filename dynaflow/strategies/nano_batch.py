from dynaflow.planner import Planner
from dynaflow.strategies.common import at_least, by_stage
from dynaflow.strategy import Strategy


class NanoBatch(Strategy):
    """n parts, one behind the other; network ops on their own stream, copies on theirs.

    compute | A0 A1 A2 B0 A3 B1 B2 ...
    comm    |    a0 a1 a2 b0 a3 b1 ...
    """

    def __init__(self, num_parts: int = 4, min_batch_size: int | None = None):
        at_least(1, num_parts=num_parts)
        at_least(0, min_batch_size=min_batch_size)
        self.num_parts = num_parts
        self.min_batch_size = num_parts if min_batch_size is None else min_batch_size

    def schedule(self, flow: Planner) -> None:
        if flow.context.batch_size < self.min_batch_size:
            return flow.sequential(f"batch smaller than {self.min_batch_size}")
        flow.split(self.num_parts)
        compute, comm, copy = flow.stream("compute"), flow.stream("comm", priority=-1), flow.stream("copy")
        lane, order = {"network": comm, "copy": copy}, by_stage(flow)
        while ready := flow.get_ready_ops():
            r = min(ready, key=order)
            flow.execute(r, stream=lane.get(r.kind, compute))
