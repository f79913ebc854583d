from collections.abc import Sequence
from math import ceil

from dynaflow.errors import OptionError
from dynaflow.ir import KINDS
from dynaflow.planner import Planner
from dynaflow.strategies.common import at_least, by_stage, can_split_network, rows_of
from dynaflow.strategy import Strategy


class NanoFlow(Strategy):
    """Parts of different sizes per kind of op; compute, memory and network ops on their own streams.

    compute | qkv 0       qkv 1              o 0         o 1          mlp 0 ...
    memory  |        attn 0a  attn 0b  attn 1a  attn 1b
    network |                                       ar 0         ar 1

    The first part is the smaller one: the network starts early. Memory ops (attention over a cache, say: kind="memory" in its rule) are
    cut finer, at the same places. `sms` gives kinds SMs of their own: {"network": 16, "memory": 32}.
    A part with less than `min_tokens` tokens does not pay: then memory ops are cut as the others, then nothing is.
    """

    def __init__(self, compute: Sequence[float] = (0.375, 0.625), memory: Sequence[float] = (0.1875, 0.1875, 0.3125, 0.3125),
                 min_tokens: int = 384, sms: dict[str, int] | None = None):  # fmt: skip
        at_least(0, min_tokens=min_tokens)
        for name, shares in (("compute", compute), ("memory", memory)):
            if any(not 0 < share <= 1 for share in shares) or abs(sum(shares) - 1) > 1e-6:
                raise OptionError(f"{name}={shares!r} does not tile the batch.", why=f"it adds up to {sum(shares):g}",
                                  fix="give positive shares that add up to 1")  # fmt: skip
        if unknown := sorted({*(sms or {})} - {*KINDS}):
            raise OptionError(f"sms={sms!r} names no kind of op.", why=f"there is no {unknown[0]!r}", fix=f"use {', '.join(KINDS)}")
        self.compute, self.memory, self.min_tokens, self.sms = tuple(compute), tuple(memory), min_tokens, dict(sms or {})

    def schedule(self, flow: Planner) -> None:
        kinds = {op.kind for op in flow.ops if not op.unsplittable}
        if not can_split_network(flow) and not kinds >= {"compute", "memory"}:
            return flow.sequential("all ops that can be split are of one kind")
        rows = rows_of(flow.flow, self.min_tokens)
        if flow.context.batch_size < ceil(rows / min(self.compute)):
            return flow.sequential(f"fewer than {self.min_tokens} tokens in a part")
        flow.split([float(share) for share in self.compute])
        if flow.context.batch_size >= ceil(rows / min(self.memory)):
            flow.split([float(share) for share in self.memory], ops=lambda op: op.kind == "memory" and not op.unsplittable)
        for kind in KINDS:
            flow.stream(kind, priority=-1 if kind == "network" else 0, sms=self.sms.get(kind))
        order = by_stage(flow)
        while ready := flow.get_ready_ops():
            r = min(ready, key=order)
            flow.execute(r, stream=r.kind)
