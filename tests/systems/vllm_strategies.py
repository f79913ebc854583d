"""Strategies that tests name as text, as a user of vLLM would: DYNAFLOW_STRATEGY=vllm_strategies:LastFirst"""

import dynaflow as df
from dynaflow.strategies.common import ATTENTION, is_named


class Uneven(df.Strategy):
    """Parts of different sizes; attention is cut finer than the rest, on a stream of its own."""

    def schedule(self, flow):
        flow.split((0.375, 0.625))
        flow.split((0.1875, 0.1875, 0.3125, 0.3125), ops=lambda op: is_named(op.name, ATTENTION))
        while ready := flow.get_ready_ops():
            r = min(ready, key=lambda r: (r.depth, r.part.lo / r.part.of))
            flow.execute(r, stream="memory" if is_named(r.name, ATTENTION) else "compute")


class LastFirst(df.Strategy):
    """The last part whenever it may run: only what the engine insists on keeps a request's tokens in order."""

    def schedule(self, flow):
        flow.split(3)
        while ready := flow.get_ready_ops():
            flow.execute(max(ready, key=lambda r: (r.part.lo, -r.depth)))


class Unsorted(df.PrefillDecode):
    wants_phases_sorted = False


class DecodeOnly(df.TwoBatch):
    def schedule(self, flow):
        if flow.context.tags["phase"] != "decode":
            return flow.sequential("a prompt is computed")
        super().schedule(flow)


class Mistaken(df.Strategy):
    def schedule(self, flow):
        flow.split(2)
        flow.execute(flow.find("model.norm"))
