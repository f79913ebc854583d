from dynaflow.ir import CALLER
from dynaflow.planner import Planner
from dynaflow.strategies.common import at_least
from dynaflow.strategies.confined import NOTHING, Confined
from dynaflow.strategy import Strategy


class Greedy(Strategy):
    """Ops in program order, each behind a dependency that is still its stream's last op, else on the longest idle stream. No costs.

    caller | A  B  D  F ...
    aux0   |    C  E    ...
    """

    def __init__(self, num_streams: int = 4, confined: Confined = NOTHING):
        at_least(1, num_streams=num_streams)
        self.num_streams, self.confined = num_streams, confined

    def schedule(self, flow: Planner) -> None:
        in_order = [CALLER, *(flow.stream(f"aux{i}") for i in range(self.num_streams - 1))]
        lanes = in_order[:]  # the longest idle one first
        order = {op.name: i for i, op in enumerate(flow.ops)}
        tail: dict[str, str] = {}  # stream -> the op that it ran last
        feeds: dict[str, set[str]] = {}  # op -> its direct dependencies
        while ready := flow.get_ready_ops():
            r = min(ready, key=lambda r: order[r.name])
            for user in r.users:
                feeds.setdefault(user.name, set()).add(r.name)
            mine = [CALLER] if CALLER in r.op.uses else self.confined.lanes(r.name, in_order)
            may = [lane for lane in lanes if lane in mine]
            lane = next((lane for lane in may if tail.get(lane) in feeds.get(r.name, ())), may[0])
            lanes.remove(lane)
            lanes.append(lane)
            tail[lane] = r.name
            flow.execute(r, stream=lane)
