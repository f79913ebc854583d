"""What several strategies ask of a flow before they schedule it."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from math import ceil
from typing import Any

from dynaflow.errors import OptionError
from dynaflow.ir import Flow, Op, evaluate
from dynaflow.planner import Planner, ReadyOp

# names that attention goes by, as a module or a function
ATTENTION = ("*attn", "*attention", "*sdpa")


def weight_ops(flow: Flow) -> set[str]:
    """Ops that depend on parameters alone: an all-gather of a weight, a cast of it."""
    made: set[str] = set()
    found: set[str] = set()
    for op in flow.ops:
        if op.reads and not op.mutates and all(v in made or flow.value[v].role == "param" for v in op.reads) and "rng" not in op.uses:
            found.add(op.name)
            made.update(op.writes)
    return found


def cache_readers(flow: Flow) -> set[str]:
    """Ops that read, and do not change, what carries the batch from call to call: an input that the flow changes in place."""
    changed = {flow.value[v].storage for op in flow.ops for v in op.mutates}
    caches = {v.name for v in flow.values if v.role in ("input", "param") and v.axis is not None and v.storage in changed}
    return {op.name for op in flow.ops if not caches.isdisjoint(op.reads) and caches.isdisjoint(op.mutates)}


def is_network(op: Op) -> bool:
    return op.kind == "network"


def stages(flow: Flow, sends: Callable[[Op], bool] = is_network) -> dict[str, int]:
    """Per op: the most ops on a path to it that `sends` says run elsewhere meanwhile (network ops). Weights' all-gathers do not count."""
    weights = weight_ops(flow)
    counts = [sends(op) and op.name not in weights for op in flow.ops]
    stage = [0] * len(flow.ops)
    for before, after, _ in sorted(flow.edges, key=lambda e: e.after):
        stage[after] = max(stage[after], stage[before] + counts[before])
    return {op.name: n for op, n in zip(flow.ops, stage)}


def by_stage(flow: Planner, lead: int = 1, sends: Callable[[Op], bool] = is_network) -> Callable[[ReadyOp], Any]:
    """An order that keeps the network busy, the least first: send; then the earliest stage, in it the first rows, in them the least depth.

    The first part is `lead` stages ahead: with 1, parts take turns stage by stage. What all parts wait for comes early. What nobody
    waits for comes last where it runs merged, or would fill memory while other parts still compute.
    """
    stage = stages(flow.flow, sends)

    def order(r: ReadyOp) -> Any:
        is_last = not r.height and (r.part.is_whole or r.grows)
        turn = stage[r.name] + (lead - 1 if r.part.lo else 0)
        return not sends(r.op), is_last, not r.is_merged_later, turn, r.part.lo / r.part.of, r.depth

    return order


def beside_network(flow: Flow) -> set[str]:
    """Ops that may run beside a network op with the batch in one piece: neither leads to the other. Weights' ops do not count."""
    weights = weight_ops(flow)
    behind = [0] * len(flow.ops)  # bit i: op i leads here
    for before, after, _ in sorted(flow.edges, key=lambda e: e.after):
        behind[after] |= behind[before] | 1 << before
    network = [i for i, op in enumerate(flow.ops) if op.kind == "network" and op.name not in weights]
    return {
        op.name for i, op in enumerate(flow.ops) if op.kind != "network" and op.name not in weights
        and any(not behind[i] >> n & 1 and not behind[n] >> i & 1 for n in network)
    }  # fmt: skip


def can_split_network(flow: Planner) -> bool:
    return any(op.kind == "network" and not op.unsplittable for op in flow.ops)


def tokens_per_row(flow: Flow) -> int:
    """Tokens in one row of the batch: the sizes of what a network op reads, without the last (the features) and the batch.

    A sequence length that changes from call to call counts as its nominal size: strategies decide once for all sizes.
    """
    one_row = {**flow.nominal_sizes, **dict.fromkeys(flow.batch, 1)}
    for op in sorted(flow.ops, key=lambda op: op.kind != "network"):
        for value in (flow.value[v] for v in op.reads):
            if value.axis is not None and len(value.shape) > 1:
                tokens = 1
                for size in value.shape[:-1]:
                    tokens *= max(int(evaluate(size, one_row)), 1)
                return tokens
    return 1


def rows_of(flow: Flow, tokens: int) -> int:
    """The fewest rows that hold so many tokens."""
    return max(1, ceil(tokens / tokens_per_row(flow)))


def is_named(name: str, globs: str | tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, glob) for glob in ((globs,) if isinstance(globs, str) else globs))


def at_least(least: int, **numbers: int | None) -> None:
    """Refuses a parameter that is no whole number from `least` up. None: it was not given."""
    for name, number in numbers.items():
        if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < least):
            why = f"it counts, from {least} up"
            raise OptionError(f"{name}={number!r} makes no schedule.", why=why, fix=f"give {name}={max(least, 2)}, say")
