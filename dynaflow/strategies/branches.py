from bisect import insort
from collections import Counter

from dynaflow.costs import Cost
from dynaflow.errors import OptionError
from dynaflow.ir import CALLER
from dynaflow.planner import Planner, ReadyOp
from dynaflow.simulate import Device, Machine
from dynaflow.strategies.common import at_least
from dynaflow.strategies.confined import NOTHING, Confined
from dynaflow.strategy import Strategy

# Where no costs are known, every op takes as long as any other and fits beside all others, and events are free.
UNKNOWN = Cost(1.0, 0.0)
FREE = Device(0.0, 0.0)

# From the one load on, nothing is gained by starting an op that would bring it beyond the other: it slows more urgent ones down.
NEARLY_FULL, CROWDED = 0.8, 1.15

# Of the ready ops, so many are considered whenever one ends, the most urgent ones.
MAX_LOOKS = 64


class Branches(Strategy):
    """Independent ops of one batch on several streams, the critical path first; no split.

    caller | A  B  B  D  F ...      behind A, B has the longest way to go: it follows A without an event
    aux0   |    C  G       ...      C starts beside it
    aux1   |    E          ...      and so does E, if there is room for it on the device

    It plays the plan on the simulator's device while it makes it. Whenever an op ends, what is ready then takes a lane, the largest
    `height_us` first: the lane on which it starts earliest. It waits for a busy lane only where an event would cost more.

    An op is critical if the longest path through it is at most the share `slack` shorter than the longest of all. Others are held back
    while the device is full without them. `prioritised` keeps a lane of higher priority for critical ops. `confined` keeps some ops to
    the first lanes.
    """

    def __init__(
        self, num_streams: int = 6, prioritised: bool = False, slack: float = 0.1, device: Device | None = None,
        confined: Confined = NOTHING,
    ):  # fmt: skip
        at_least(1, num_streams=num_streams)
        if not isinstance(slack, (int, float)) or not 0 <= slack <= 1:
            raise OptionError(f"slack={slack!r} is no share.", why="it is of the longest path", fix="give 0 to 1")
        self.num_streams, self.prioritised, self.slack, self.device, self.confined = num_streams, prioritised, slack, device, confined

    def schedule(self, flow: Planner) -> None:
        ready = flow.get_ready_ops()
        items = [flow.find(op.name) for op in flow.ops]
        has_costs = any(r.cost for r in items)
        cost = {r: r.cost or UNKNOWN for r in items}
        users = {r: r.users for r in items}
        num_unmet = Counter(user for r in items for user in users[r])
        deps: dict[ReadyOp, list[ReadyOp]] = {r: [] for r in items}  # of an op: what it depends on and is over
        depth_us = dict.fromkeys(items, 0.0)  # the longest path to its start
        critical_us = (1 - self.slack) * max((r.height_us for r in items), default=0.0)

        device = (self.device or Device()) if has_costs else FREE
        machine: Machine[ReadyOp] = Machine()
        load, num_running = 0.0, 0
        urgent = flow.stream("critical", priority=-1) if self.prioritised and self.num_streams > 1 else ""
        lanes = [CALLER, *(flow.stream(f"aux{i}") for i in range(self.num_streams - 1 - bool(urgent)))]
        idle = {*lanes, urgent} - {""}
        in_order = [CALLER, *filter(None, (urgent, *lanes[1:]))]
        lane_of: dict[ReadyOp, str] = {}
        tail: dict[str, ReadyOp] = {}
        end_us: dict[ReadyOp, float] = {}  # of what runs: at the load that it found

        def urgency(r: ReadyOp) -> float:
            return -r.height_us

        def is_critical(r: ReadyOp) -> bool:
            return depth_us[r] + r.height_us >= critical_us

        def start_us(r: ReadyOp, lane: str) -> float:
            now_us = machine.now_us
            after = [end_us[d] + (device.edge_us if lane_of[d] == lane else device.cross_us) for d in deps[r]]
            if lane in tail:
                after.append(device.edge_us + (end_us[tail[lane]] if lane in idle else max(now_us, end_us[tail[lane]])))
            return max(now_us, *after) if after else now_us

        def rank(r: ReadyOp, lane: str) -> tuple[float, bool, bool]:
            last = tail.get(lane)
            # Behind what still runs there, its end needs no event where both have a user in common.
            saves = lane not in idle and last is not None and not set(users[last]).isdisjoint(users[r])
            return start_us(r, lane) - (device.cross_us - device.edge_us) * saves, last not in deps[r], lane not in idle

        def choose(r: ReadyOp) -> str:
            if CALLER in r.op.uses:
                return CALLER
            mine = self.confined.lanes(r.name, in_order)
            if urgent in idle and urgent in mine and is_critical(r):
                return urgent
            return min((lane for lane in mine if lane != urgent), key=lambda lane: rank(r, lane))

        ready.sort(key=urgency)
        while True:
            for r in ready[:MAX_LOOKS]:
                if not idle:
                    break
                if load >= NEARLY_FULL and load + cost[r].share > CROWDED and num_running and not is_critical(r):
                    continue
                lane = choose(r)
                if lane in idle:
                    at_us = start_us(r, lane)
                    machine.start(r, at_us, cost[r], -1 if lane == urgent else 0)
                    load, num_running = load + cost[r].share, num_running + 1
                    end_us[r], lane_of[r], tail[lane] = at_us + cost[r].us * max(1.0, load), lane, r
                    idle.remove(lane)
                    ready.remove(r)
                    flow.execute(r, stream=lane)
            if (done := machine.finish()) is None:
                break
            end_us[done] = machine.now_us
            load, num_running = load - cost[done].share, num_running - 1
            idle.add(lane_of[done])
            for user in users[done]:
                deps[user].append(done)
                depth_us[user] = max(depth_us[user], depth_us[done] + cost[done].us)
                num_unmet[user] -= 1
                if not num_unmet[user]:
                    insort(ready, user, key=urgency)
