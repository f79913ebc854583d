from dynaflow.planner import Planner
from dynaflow.strategies.common import at_least, by_stage, can_split_network, rows_of
from dynaflow.strategy import Strategy


class DualBatch(Strategy):
    """Expert parallelism in two parts: one's dispatch or combine beside the other's attention or experts.

             warm-up | steady                                      | drain
    compute | A.attn | B.attn      A.experts   B.experts  A.attn ...| B.experts
    comm    |        | A.dispatch  B.dispatch  A.combine  B.combine | A.combine  B.combine

    A is `lead` stages ahead (a stage ends in a dispatch or combine). With 2, as for decoding, where attention is the longest (None: 1, or
    what is measured to be faster, with `never_slower=True`):

    compute | A.attn              A.experts  | B.attn     A.attn      B.experts   A.experts ...
    comm    |         A.dispatch             | A.combine  B.dispatch  A.dispatch  B.combine

    Fewer tokens than `min_tokens` (`min_decode_tokens` under the tag phase="decode") stay in one piece: twice the weights would be read.
    `comm_sms`: SMs that network kernels have for themselves.
    """

    def __init__(self, min_tokens: int = 512, min_decode_tokens: int = 32, lead: int | None = None, comm_sms: int | None = None):
        at_least(0, min_tokens=min_tokens, min_decode_tokens=min_decode_tokens)
        at_least(1, lead=lead, comm_sms=comm_sms)
        self.min_tokens, self.min_decode_tokens, self.lead, self.comm_sms = min_tokens, min_decode_tokens, lead, comm_sms

    def schedule(self, flow: Planner) -> None:
        if not can_split_network(flow):
            return flow.sequential("no network op can be split")
        least = self.min_decode_tokens if flow.context.tags.get("phase") == "decode" else self.min_tokens
        rows = rows_of(flow.flow, least)
        if flow.context.batch_size < max(2, rows):
            return flow.sequential(f"fewer than {least} tokens" if rows > 1 else "a single row cannot be split")
        flow.split(2)
        comm = flow.stream("comm", priority=-1, sms=self.comm_sms)
        order = by_stage(flow, self.lead or flow.any_of(1, 2))
        while ready := flow.get_ready_ops():
            r = min(ready, key=order)
            flow.execute(r, stream=comm if r.kind == "network" else "copy" if r.kind == "copy" else "compute")
