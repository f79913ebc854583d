from typing import Any

from dynaflow.planner import Planner, ReadyOp
from dynaflow.strategies.common import at_least, by_stage, can_split_network, rows_of
from dynaflow.strategy import Strategy

# (up to so many tokens, CTAs): a collective of few tokens is over before many CTAs pay, and each is taken from the other part's compute
CTAS = ((1024, 8), (4096, 16), (16384, 32))
# where nothing is split, nothing runs beside it: a CTA per row, within reason; of a collective's own kernel, which holds its SMs, fewer
ALONE, ALONE_IN_KERNEL = 1024, 64


class TokenWeave(Strategy):
    """Two parts, cut where a wave of tokens ends; all-reduce, residual add and norm as one function.

    compute | attn 0   attn 1            mlp 0             mlp 1  ...
    comm    |          ar+add+norm 0     ar+add+norm 1

    The one function: the collective's own kernel for all three, where it has one (`register_reduce_add_norm`); else the collective itself,
    then add and norm in one pass over the rows (a Triton kernel on CUDA, on `num_ctas` CTAs, by default more of them for more tokens; the
    ops themselves elsewhere). `fused` puts another function there, which gets the group's
    external inputs: mostly what is reduced, the residual and the norm's weight.
    `wave`: the tokens that fill the device once; the first part is a whole number of waves. Fewer tokens than `min_tokens` stay in one
    piece; where there is a kernel for it, the function serves them too.
    """

    def __init__(self, wave: int = 256, min_tokens: int = 1024, num_ctas: int | None = None, fused: Any = None):
        at_least(1, wave=wave, num_ctas=num_ctas)
        at_least(0, min_tokens=min_tokens)
        self.wave, self.min_tokens, self.num_ctas, self.fused = wave, min_tokens, num_ctas, fused

    def schedule(self, flow: Planner) -> None:
        rows, size = rows_of(flow.flow, self.wave), flow.context.batch_size
        can_split = can_split_network(flow) and size >= max(2 * rows, rows_of(flow.flow, self.min_tokens))
        has_kernel = self.fused is not None or flow.context.device == "cuda"
        # the one function alone may be all that pays
        is_split = can_split and flow.any_of(*(True, False)[: 1 + has_kernel])
        if is_split:
            flow.split([rows * (int(size) // (2 * rows)), -1])
        elif not has_kernel:
            small = f"fewer than {self.min_tokens} tokens or two waves" if can_split_network(flow) else "no network op can be split"
            return flow.sequential(f"{small}, and no fused kernel on this device")
        shared = next((n for tokens, n in CTAS if size <= rows_of(flow.flow, tokens)), 64)
        # of the one pass, and of a collective's own kernel, which knows best what it needs beside compute
        num_ctas = (self.num_ctas,) * 2 if self.num_ctas else (shared, None) if is_split else (ALONE, ALONE_IN_KERNEL)
        comm, order, num_fused = flow.stream("comm", priority=-1), by_stage(flow), 0
        while ready := flow.get_ready_ops():
            r = min(ready, key=order)
            group = self._with_norm(r) if r.kind == "network" else [r]
            function = self._function(flow, group, num_ctas, is_split) if len(group) > 1 else None
            if function is not None:
                flow.execute(group, stream=comm, replace=function)
                num_fused += 1
            else:
                flow.execute(r, stream=comm if r.kind == "network" else "compute")
        if not is_split and not num_fused:
            flow.sequential("too few tokens to split, and no collective has an add and a norm behind it")

    @staticmethod
    def _with_norm(r: ReadyOp) -> list[ReadyOp]:
        """The collective and the ops behind it that only touch memory and wait for nothing else."""
        group = [r]
        for item in group:  # it grows
            group += [u for u in item.users if u.kind == "memory" and u.part == r.part and u not in group and {*u.needs} <= {*group}]
        return group

    def _function(self, flow: Planner, group: list[ReadyOp], num_ctas: tuple[Any, ...], is_split: bool) -> Any:
        if self.fused is not None:
            return self.fused
        bodies = flow.body(group), flow.body(group[:1]), flow.body(group[1:])
        if None in bodies:
            return None
        from dynaflow.functions.add_rms_norm import ReduceAddNorm  # planning alone needs no torch

        function = ReduceAddNorm(*bodies, *num_ctas)
        return function if is_split or function.norm is not None else None
