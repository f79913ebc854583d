from dynaflow.planner import Planner
from dynaflow.strategy import Strategy


class Branches(Strategy):
    """Independent ops of one batch on several streams; no split.

    compute | A  B  D  F ...
    aux0    |    C  E    ...
    """

    def __init__(self, num_streams: int = 2):
        self.num_streams = num_streams

    def schedule(self, flow: Planner) -> None:
        lanes = [flow.stream(name) for name in ("compute", *(f"aux{i}" for i in range(self.num_streams - 1)))]
        tail: dict[str, str] = {}  # stream -> the op that it ran last
        feeds: dict[str, set[str]] = {}  # op -> its direct dependencies
        while ready := flow.get_ready_ops():
            r = min(ready, key=lambda r: r.depth)
            for user in r.users:
                feeds.setdefault(user.name, set()).add(r.name)
            # Follow a dependency that is still its stream's last op (no event needed), else the longest idle stream.
            follows = [lane for lane in lanes if tail.get(lane) in feeds.get(r.name, ())]
            lane = follows[0] if follows else lanes[0]
            lanes.remove(lane)
            lanes.append(lane)
            tail[lane] = r.name
            flow.execute(r, stream=lane)
