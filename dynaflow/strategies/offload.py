from math import inf

from dynaflow.errors import OptionError
from dynaflow.ir import evaluate
from dynaflow.planner import Planner, ReadyOp
from dynaflow.strategy import Strategy


class Offload(Strategy):
    """Weights of `df.offload` are copied ahead of their use, as far as `budget` bytes allow; no split.

    copy   | w0 w1 w2    w3    w4 ...      w3 takes the place of w0: it starts when A is over
    caller |    A  B  C     D     E ...

    What is copied ahead and not yet used up never holds more than the budget.
    """

    def __init__(self, budget: int | float):
        if isinstance(budget, bool) or not isinstance(budget, (int, float)) or not 0 < budget < inf:
            raise OptionError(f"budget={budget!r} is no number of bytes.", fix="give what fetched weights may hold at once, in bytes")
        self.budget = budget

    def schedule(self, flow: Planner) -> None:
        at = {op.name: i for i, op in enumerate(flow.ops)}
        fetches = [flow.find(op.name) for op in flow.ops if op.kind == "copy"]
        fetches = [r for r in fetches if r.is_ready and r.users]
        if not fetches:
            return flow.sequential("no weight is fetched: df.offload(model, device) first")
        size = {r: sum(evaluate(flow.flow.value[v].nbytes, flow.flow.nominal_sizes) for v in r.op.writes) for r in fetches}
        # of an op: the weights that are used up behind it
        used_up: dict[ReadyOp, list[ReadyOp]] = {}
        for r in fetches:
            used_up.setdefault(max(r.users, key=lambda user: at[user.name]), []).append(r)
        queue = sorted(fetches, key=lambda r: min(at[user.name] for user in r.users))
        copy = flow.stream("copy")
        held, room_behind = 0, list[ReadyOp]()

        def copy_ahead() -> None:
            nonlocal held
            while queue and held + size[queue[0]] <= self.budget:
                held += size[queue[0]]
                flow.execute(queue.pop(0), stream=copy, after=room_behind)

        copy_ahead()
        waiting = set(fetches)
        while ready := [r for r in flow.get_ready_ops() if r not in waiting]:
            r = min(ready, key=lambda r: at[r.name])
            flow.execute(r, stream="caller")
            if r in used_up:
                held -= sum(size[w] for w in used_up[r])
                room_behind = [r]
            copy_ahead()
        if queue:
            need = max(sum(size[w] for w in fetches if r in w.users) for r in {user for w in fetches for user in w.users})
            return flow.sequential(f"one op needs {need:,} bytes of weights, more than the budget of {self.budget:,}")
