from dynaflow.planner import Planner, ReadyOp
from dynaflow.strategies.common import at_least, beside_network, by_stage, can_split_network, rows_of, weight_ops
from dynaflow.strategy import Strategy

# What one more launch takes, where costs are known: parts cost launches.
LAUNCH_US = 2.0
# Parts where nothing tells how many pay, and the most that are measured.
USUAL, MOST = 2, 4


class CommOverlap(Strategy):
    """Collectives beside compute, in as many parts as pay; weights are gathered ahead of their use.

    compute  | A0   A1   B0   B1   C0   C1 ...       tensor parallel: all-reduce, or reduce-scatter and all-gather
    comm     |      a0   a1   b0   b1   c0 ...       Ulysses: all-to-all of q beside the projection of k, or of another part
    prefetch | W(A) W(B)      W(C)      W(D)         FSDP: a weight's all-gather waits for nothing but room

    Parts: `max_parts` at most (None: two, of which four may come where costs are known or plans are measured), each of `min_part_tokens`
    tokens or more. Where costs are known, so many that the estimate is least; with `never_slower=True`, so many as are measured to be
    fastest. At most `ahead` gathered weights wait for their users at a time, one that is in use included.
    """

    def __init__(self, max_parts: int | None = None, min_part_tokens: int = 1024, ahead: int = 2):
        at_least(1, max_parts=max_parts, min_part_tokens=min_part_tokens, ahead=ahead)
        self.max_parts, self.min_part_tokens, self.ahead = max_parts, min_part_tokens, ahead

    def schedule(self, flow: Planner) -> None:
        weights = weight_ops(flow.flow)
        gathers = {op.name for op in flow.ops if op.kind == "network" and op.name in weights}
        num_parts = self._num_parts(flow) if can_split_network(flow) else 1
        if num_parts == 1 and not gathers and not beside_network(flow.flow):
            return flow.sequential("no network op can be hidden: no split pays, and nothing runs beside it")
        flow.split(num_parts)
        comm, prefetch, order = flow.stream("comm", priority=-1), flow.stream("prefetch"), by_stage(flow)
        program_order = {op.name: i for i, op in enumerate(flow.ops)}
        to_go: dict[str, list[ReadyOp]] = {}  # gathered weight -> its users, while one of them has not run
        rooms: list[list[ReadyOp]] = [[] for _ in range(self.ahead)]  # per weight that may be gathered now: users of the one before it
        while ready := flow.get_ready_ops():
            # Weights in program order: otherwise one for the last layer could take the room of the next one.
            next_weights = sorted((r for r in ready if r.name in weights), key=lambda r: program_order[r.name])
            others = [r for r in ready if r.name not in weights]
            r = next_weights[0] if next_weights and (rooms or not others) else min(others, key=order)
            if r.name in gathers and r.users:
                flow.execute(r, stream=prefetch, after=rooms.pop(0) if rooms else [])
                to_go[r.name] = r.users
                continue
            flow.execute(r, stream=comm if r.kind == "network" else "compute")
            for name in [name for name, users in to_go.items() if r in users and all(u.is_executed for u in users)]:
                rooms.append(to_go.pop(name))

    def _num_parts(self, flow: Planner) -> int:
        costs = [(op, flow.cost_of(op)) for op in flow.ops if not op.unsplittable]
        network_us = sum(cost.us for op, cost in costs if cost and op.kind == "network")
        compute_us = sum(cost.us for op, cost in costs if cost and op.kind != "network")
        best, most = self.max_parts or USUAL, self.max_parts or MOST
        if all(cost for _, cost in costs):
            # The longer one in full, of the shorter one the first part, which nothing hides, and the launches.
            longer, shorter = max(network_us, compute_us), min(network_us, compute_us)
            best = min(range(1, most + 1), key=lambda n: longer + shorter / n + n * len(costs) * LAUNCH_US)
        num_parts = flow.any_of(best, *(n for n in range(most, 0, -1) if n != best))
        rows = 1 if network_us else rows_of(flow.flow, self.min_part_tokens)
        # the batch is only compared with what is taken: a comparison that comes out otherwise is another plan
        return next(n for n in range(num_parts, 0, -1) if n == 1 or flow.context.batch_size >= n * rows)
