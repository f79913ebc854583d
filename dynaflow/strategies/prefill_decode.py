from dynaflow.errors import OptionError
from dynaflow.planner import Planner
from dynaflow.strategies.common import ATTENTION, at_least, is_named
from dynaflow.strategy import Strategy


class PrefillDecode(Strategy):
    """A mixed batch: the attention of rows that prefill beside that of rows that decode; all else over the whole batch.

    compute | qkv                  o  mlp  qkv ...
    prefill |      attn [0, p)
    decode  |      attn [p, B)

    p, the number of rows that prefill, is the tag `tag`: `with df.context(num_prefill=3): fast(x)`; or a parameter. They come first, or
    last where the tag `first` is "decode" (a serving engine says so); where it is "neither", one cut does not part the phases.
    `attention`: globs over the names of ops. `prefill_sms`, `decode_sms`: SMs that each has for itself.
    """

    wants_phases_sorted = True

    def __init__(self, num_prefill: int | None = None, attention: str | tuple[str, ...] = ATTENTION,
                 tag: str = "num_prefill", prefill_sms: int | None = None, decode_sms: int | None = None):  # fmt: skip
        at_least(0, num_prefill=num_prefill)
        at_least(1, prefill_sms=prefill_sms, decode_sms=decode_sms)
        self.num_prefill, self.attention, self.tag = num_prefill, attention, tag
        self.prefill_sms, self.decode_sms = prefill_sms, decode_sms

    def schedule(self, flow: Planner) -> None:
        num_prefill = self.num_prefill if self.num_prefill is not None else flow.context.count(self.tag)
        if num_prefill is None:
            return flow.sequential(f"the context has no tag {self.tag}: where prefill ends is not known")
        if (first := flow.context.tags.get("first", "prefill")) not in ("prefill", "decode", "neither"):
            raise OptionError(f"the tag first is {first!r}.", fix='give "prefill", "decode" or "neither"')
        if first == "neither":
            return flow.sequential("rows that prefill and rows that decode lie among each other: no one cut parts them")
        if num_prefill == 0 or flow.context.batch_size == num_prefill:
            return flow.sequential("all rows are in one phase")
        if flow.context.batch_size < num_prefill:
            raise OptionError(f"num_prefill={num_prefill} rows prefill, of a batch of {flow.context.batch_size}.",
                              fix="count rows of this batch")  # fmt: skip
        attention = {op.name for op in flow.ops if is_named(op.name, self.attention) and not op.unsplittable and op.kind != "network"}
        if not attention:
            return flow.sequential(f"no op that can be split is named {self.attention}")
        rows = [self.tag if self.num_prefill is None else self.num_prefill, -1]
        flow.split(rows if first == "prefill" else rows[::-1], ops=lambda op: op.name in attention)
        lanes = [flow.stream("prefill", sms=self.prefill_sms), flow.stream("decode", priority=-1, sms=self.decode_sms)]
        while ready := flow.get_ready_ops():
            r = min(ready, key=lambda r: (r.depth, r.part))
            flow.execute(r, stream=lanes[(r.part.lo > 0) == (first == "prefill")] if r.name in attention else "compute")
