from dynaflow.planner import Planner
from dynaflow.strategies.common import at_least, beside_network, is_named, rows_of, stages
from dynaflow.strategy import Strategy


class SingleBatch(Strategy):
    """Shared experts beside dispatch, routed experts and combine, in one piece.

    compute | attn            experts            attn ...
    comm    |       dispatch           combine
    aux     |       shared experts ........

    Beside are the ops that neither lead to a network op nor wait for it, or those that `shared` names (globs over ops and modules).
    More tokens than `max_aux_tokens` fill the device: then they run on `compute` behind the dispatch, beside the network alone.
    """

    def __init__(self, shared: str | tuple[str, ...] | None = None, max_aux_tokens: int = 256):
        at_least(0, max_aux_tokens=max_aux_tokens)
        self.shared, self.max_aux_tokens = shared, max_aux_tokens

    def schedule(self, flow: Planner) -> None:
        beside = beside_network(flow.flow)
        if self.shared is not None:
            beside &= {op.name for op in flow.ops if is_named(op.name, self.shared) or is_named(op.module, self.shared)}
        if not beside:
            return flow.sequential("no op can run beside a network op" + f" and is named {self.shared}" * (self.shared is not None))
        comm = flow.stream("comm", priority=-1)
        aux = "aux" if flow.context.batch_size <= rows_of(flow.flow, self.max_aux_tokens) else "compute"
        stage = stages(flow.flow)
        while ready := flow.get_ready_ops():
            # What leads to the network goes first, what waits for it last.
            r = min(ready, key=lambda r: (r.kind != "network", stage[r.name], r.name in beside, r.depth))
            flow.execute(r, stream=comm if r.kind == "network" else aux if r.name in beside else "compute")
