from dynaflow.ir import CALLER
from dynaflow.planner import Planner
from dynaflow.strategy import Strategy


class Greedy(Strategy):
    """Ops in program order, each behind a dependency that is still its stream's last op, else on the longest idle stream. No costs.

    caller | A  B  D  F ...
    aux0   |    C  E    ...
    """

    def __init__(self, num_streams: int = 4):
        self.num_streams = num_streams

    def schedule(self, flow: Planner) -> None:
        lanes = [CALLER, *(flow.stream(f"aux{i}") for i in range(self.num_streams - 1))]
        order = {op.name: i for i, op in enumerate(flow.ops)}
        tail: dict[str, str] = {}  # stream -> the op that it ran last
        feeds: dict[str, set[str]] = {}  # op -> its direct dependencies
        while ready := flow.get_ready_ops():
            r = min(ready, key=lambda r: order[r.name])
            for user in r.users:
                feeds.setdefault(user.name, set()).add(r.name)
            follows = [lane for lane in lanes if tail.get(lane) in feeds.get(r.name, ())]
            lane = CALLER if CALLER in r.op.uses else follows[0] if follows else lanes[0]
            lanes.remove(lane)
            lanes.append(lane)
            tail[lane] = r.name
            flow.execute(r, stream=lane)
