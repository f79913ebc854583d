from collections import Counter

from dynaflow.costs import Cost
from dynaflow.ir import CALLER
from dynaflow.planner import Planner, ReadyOp
from dynaflow.simulate import Device, Machine
from dynaflow.strategy import Strategy

# Where no costs are known, every op takes as long as any other and fits beside all others, and events are free.
UNKNOWN = Cost(1.0, 0.0)
FREE = Device(0.0, 0.0)

# An op is critical if the longest path through it is no shorter than this share of the longest of all.
CRITICAL = 0.97


class Branches(Strategy):
    """Independent ops of one batch on several streams, the critical path first; no split.

    caller | A  B  B  D  F ...      B, C and E are ready behind A: B has the longest way to go and follows A without an event,
    aux0   |    C     G    ...      C starts beside it, E behind C, and F after D and G
    aux1   |    E  E       ...

    It plays the plan on the simulator's device while it makes it. Whenever an op ends, what is ready then takes a lane, the largest
    `height_us` first: the lane on which it starts earliest. It waits for a lane that is busy only where an event costs more.
    `prioritised` keeps a lane of higher priority for ops of the critical path. `max_load` holds ops back that would, beside what runs,
    fill more of the device than this.
    """

    def __init__(self, num_streams: int = 4, prioritised: bool = False, max_load: float | None = None, device: Device | None = None):
        self.num_streams, self.prioritised, self.max_load, self.device = num_streams, prioritised, max_load, device

    def schedule(self, flow: Planner) -> None:
        ready = flow.get_ready_ops()
        has_costs = bool(ready) and ready[0].cost is not None
        cost = {r: r.cost or UNKNOWN for r in (flow.find(op.name) for op in flow.ops)}
        users = {r: r.users for r in cost}
        num_unmet = Counter(user for r in cost for user in users[r])
        deps: dict[ReadyOp, list[ReadyOp]] = {r: [] for r in cost}  # those that are over
        path_us = max((r.height_us for r in ready), default=0.0)
        depth_us = dict.fromkeys(cost, 0.0)  # the longest path to its start

        device = (self.device or Device()) if has_costs else FREE
        saved_us = device.cross_us - device.edge_us
        machine: Machine[ReadyOp] = Machine()
        load = 0.0
        critical = [flow.stream("critical", priority=-1)] if self.prioritised and self.num_streams > 1 else []
        lanes = [*critical, CALLER, *(flow.stream(f"aux{i}") for i in range(self.num_streams - 1 - len(critical)))]
        idle = set(lanes)
        lane_of: dict[ReadyOp, str] = {}
        tail: dict[str, ReadyOp] = {}
        end_us: dict[ReadyOp, float] = {}  # of what runs: were it alone

        def start_us(r: ReadyOp, lane: str) -> float:
            after = [end_us[d] + (device.edge_us if lane_of[d] == lane else device.cross_us) for d in deps[r]]
            return max([machine.now_us, *after, *([end_us[tail[lane]] + device.edge_us] if lane in tail else ())])

        def choose(r: ReadyOp) -> str:
            """Where it starts earliest. Behind what still runs there, its end needs no event where both have a user in common."""
            if CALLER in r.op.uses:
                return CALLER
            if critical and depth_us[r] + r.height_us < CRITICAL * path_us:
                allowed = lanes[1:]
            else:
                allowed = [lane for lane in critical if lane in idle] or lanes

            def rank(lane: str) -> tuple[float, bool, int]:
                last = tail.get(lane)
                joins = lane not in idle and not set(users[last]).isdisjoint(users[r])
                return start_us(r, lane) - saved_us * joins, last not in deps[r], lanes.index(lane)

            return min(allowed, key=rank)

        while True:
            for r in sorted(ready, key=lambda r: -r.height_us):
                if not idle:
                    break
                if self.max_load is not None and load and load + cost[r].share > self.max_load:
                    continue
                lane = choose(r)
                if lane in idle:
                    at_us = start_us(r, lane)
                    machine.start(r, at_us, cost[r], -1 if lane in critical else 0)
                    end_us[r], lane_of[r], tail[lane] = at_us + cost[r].us, lane, r
                    load += cost[r].share
                    idle.remove(lane)
                    ready.remove(r)
                    flow.execute(r, stream=lane)
            if (done := machine.finish()) is None:
                break
            end_us[done] = machine.now_us
            load -= cost[done].share
            idle.add(lane_of[done])
            for user in users[done]:
                deps[user].append(done)
                depth_us[user] = max(depth_us[user], depth_us[done] + cost[done].us)
                num_unmet[user] -= 1
                if not num_unmet[user]:
                    ready.append(user)
