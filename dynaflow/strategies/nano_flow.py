from collections.abc import Mapping, Sequence
from math import ceil

from dynaflow.errors import OptionError
from dynaflow.ir import Op
from dynaflow.planner import Planner
from dynaflow.strategies.common import ATTENTION, at_least, by_stage, cache_readers, can_split_network, is_named, rows_of
from dynaflow.strategy import Strategy

LANES = ("compute", "memory", "network", "copy")


class NanoFlow(Strategy):
    """Parts of different sizes per class of op; compute, memory and network ops on streams of their own.

    compute | qkv 0  qkv 1    o 0      o 1    mlp 0  mlp 1 ...
    memory  |        attn 0a  attn 0b  attn 1a  attn 1b
    network |                          ar 0   ar 1   ...

    The first part is `lead` stages ahead (a stage ends in a memory or network op). With 2, one part's products run beside the other's
    attention, which pays where attention leaves them room (None: 1, or what is measured to be faster, with `never_slower=True`):

    compute | qkv 0           o 0  qkv 1  mlp 0            o 1  qkv 0  mlp 1 ...
    memory  |        attn 0a 0b           attn 1a  1b                  attn 0a  0b
    network |                      ar 0             ar 0        ar 1         ar 1

    Memory ops are those that `memory_ops` names (globs; None: what is called attention, and whatever reads a cache that the model
    changes in place), where the tag phase ("decode", "mixed") says that attention reads a cache, and leaves room for matrix products
    beside it. They are cut finer than the others, at the same places. The tag mostly ("prefill", "decode") says what the tokens of a
    mixed step are for the most part.
    `sms` gives streams SMs of their own: {"network": 16, "memory": 32}.
    Parts of fewer than `min_tokens` tokens do not pay: then memory ops are cut as the others are, then nothing is.
    """

    def __init__(self, compute: Sequence[float] = (0.5, 0.5), memory: Sequence[float] = (0.25, 0.25, 0.25, 0.25),
                 min_tokens: int = 384, memory_ops: str | tuple[str, ...] | None = None, sms: Mapping[str, int] | None = None,
                 lead: int | None = None):  # fmt: skip
        at_least(0, min_tokens=min_tokens)
        if sms is not None and not isinstance(sms, Mapping):
            raise OptionError(f"sms={sms!r} names no streams.", fix='give sms={"network": 16}, say')
        at_least(1, lead=lead, **(sms or {}))
        for name, shares in (("compute", compute), ("memory", memory)):
            are_numbers = all(isinstance(share, (int, float)) for share in shares)
            if not are_numbers or any(not 0 < share <= 1 for share in shares) or abs(sum(shares) - 1) > 1e-6:
                why = f"they add up to {sum(shares):g}" if are_numbers else "they are no numbers"
                raise OptionError(f"{name}={shares!r} does not tile the batch.", why=why, fix="give positive shares that add up to 1")
        if unknown := sorted({*(sms or {})} - {*LANES}):
            raise OptionError(f"sms={sms!r}: there is no stream {unknown[0]!r}.", fix=f"use {', '.join(LANES)}")
        self.compute, self.memory, self.min_tokens = tuple(map(float, compute)), tuple(map(float, memory)), min_tokens
        self.memory_ops, self.sms, self.lead = memory_ops, dict(sms or {}), lead

    def schedule(self, flow: Planner) -> None:
        # attention over a prompt is products: beside others it gains nothing
        phase = flow.context.tags.get("phase")
        phase = flow.context.tags.get("mostly", phase) if phase == "mixed" else phase
        memory_ops = self._memory_ops(flow) if phase in ("decode", "mixed") else set()

        def lane(op: Op) -> str:
            return op.kind if op.kind in ("network", "copy") else "memory" if op.name in memory_ops else "compute"

        if not can_split_network(flow) and not any(lane(op) == "memory" and not op.unsplittable for op in flow.ops):
            return flow.sequential("no network or memory op can be split")
        rows = rows_of(flow.flow, self.min_tokens)
        if flow.context.batch_size < ceil(rows / min(self.compute)):
            return flow.sequential(f"fewer than {self.min_tokens} tokens in a part")
        flow.split(self.compute)
        if flow.context.batch_size >= ceil(rows / min(self.memory)):
            flow.split(self.memory, ops=lambda op: lane(op) == "memory" and not op.unsplittable)
        for name in LANES:
            flow.stream(name, priority=-1 if name == "network" else 0, sms=self.sms.get(name))
        order = by_stage(flow, self.lead or (flow.any_of(1, 2) if memory_ops else 1), sends=lambda op: lane(op) != "compute")
        while ready := flow.get_ready_ops():
            r = min(ready, key=order)
            flow.execute(r, stream=lane(r.op))

    def _memory_ops(self, flow: Planner) -> set[str]:
        named = {op.name for op in flow.ops if is_named(op.name, ATTENTION if self.memory_ops is None else self.memory_ops)}
        return named | cache_readers(flow.flow) if self.memory_ops is None else named
