from typing import Any

from dynaflow.ir import CALLER
from dynaflow.planner import Planner, ReadyOp
from dynaflow.strategies.common import at_least, rows_of
from dynaflow.strategy import Strategy


class FusedGemm(Strategy):
    """A matrix product and the collective behind it as one function, which sends each chunk of rows while it computes the next.

    caller | A  chunked[o_proj, ar]  B  chunked[down_proj, ar] ...
                product    | 0 1 2 3
                collective |   0 1 2 3

    All else runs in order, over the whole batch. A chunk has `min_chunk_tokens` tokens or more; fewer than two chunks gain nothing.
    """

    def __init__(self, num_chunks: int = 4, min_chunk_tokens: int = 256):
        at_least(2, num_chunks=num_chunks)
        at_least(1, min_chunk_tokens=min_chunk_tokens)
        self.num_chunks, self.min_chunk_tokens = num_chunks, min_chunk_tokens

    def schedule(self, flow: Planner) -> None:
        num_chunks, rows = self.num_chunks, rows_of(flow.flow, self.min_chunk_tokens)
        while num_chunks > 1 and flow.context.batch_size < num_chunks * rows:
            num_chunks -= 1
        if num_chunks == 1:
            return flow.sequential(f"fewer than two chunks of {self.min_chunk_tokens} tokens")
        program_order = {op.name: i for i, op in enumerate(flow.ops)}
        num_fused = 0
        while ready := flow.get_ready_ops():
            r = min(ready, key=lambda r: program_order[r.name])
            send = self._sent_alone(r)
            function = self._function(flow, r, send, num_chunks) if send is not None else None
            if send is not None and function is not None:
                flow.execute([r, send], stream=CALLER, replace=function)
                num_fused += 1
            else:
                flow.execute(r, stream=CALLER)
        if not num_fused:
            flow.sequential("no product's rows are known that one collective alone takes")

    @staticmethod
    def _sent_alone(r: ReadyOp) -> ReadyOp | None:
        """The collective that takes what the product makes, if nobody else does."""
        if r.kind != "compute" or r.op.unsplittable or len(r.users) != 1:
            return None
        (send,) = r.users
        return send if send.kind == "network" and not send.op.unsplittable and send.needs == [r] else None

    @staticmethod
    def _function(flow: Planner, r: ReadyOp, send: ReadyOp, num_chunks: int) -> Any:
        bodies = flow.body([r]), flow.body([send]), flow.body([r, send])
        if None in bodies:
            return None
        from dynaflow.functions.chunked import Chunked, can_chunk  # planning alone needs no torch

        return Chunked(bodies[0], bodies[1], num_chunks) if can_chunk(*bodies) else None
