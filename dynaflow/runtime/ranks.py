"""All ranks agree on the order of their collectives before the first of them is launched.

1. Each rank posts its order in the store of the default process group, once per group that the flow uses. (A rank that runs the graph
   as a whole says that.)
2. It reads what the other ranks of these groups posted, and those of their groups, until it knows everybody whom it could wait for,
   directly or not. So all of them see the same orders, and come to the same verdict.
3. Orders that differ are refused, on every rank. A rank that posts nothing is not waited for longer than TIME_LIMIT.

Nothing is sent over the groups themselves: a difference is found by a message, never by a collective that does not return.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from datetime import timedelta
from typing import Any, Iterable

import torch.distributed as dist
from torch import fx

from dynaflow.errors import RankMismatch, RankMissing
from dynaflow.ir import Flow, Plan
from dynaflow.verify.ranks import Collective, collectives, verify_orders

# how long ranks wait for each other; the slowest may still be compiling
TIME_LIMIT = timedelta(seconds=300)

# group -> how often its ranks have agreed
_rounds: Counter[str] = Counter()


def agree(flow: Flow, plan: Plan) -> None:
    """Raise RankMismatch, on every rank, unless all ranks would call the same collectives in the same order; RankMissing where a rank
    did not say."""
    names = dict.fromkeys(token.removeprefix("group:") for op in flow.ops for token in op.uses if token.startswith("group:"))
    if not names or not dist.is_available() or not dist.is_initialized():
        return
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    mine = _post(store, rank, names, collectives(plan, flow))
    posts = _everybody(store, rank, mine, flow.name)
    ranks = sorted(posts)
    whole = [r for r in ranks if posts[r]["order"] is None]
    if whole:
        raise RankMismatch(
            f"'{flow.name}' runs as a whole on rank {', '.join(map(str, whole))}, and under a plan on the others.",
            why="a plan may call collectives on parts of the batch, and each rank would wait for the other",
            fix="use one strategy on all ranks")  # fmt: skip
    verify_orders([posts[r]["order"] for r in ranks], ranks)


def announce(graph: fx.Graph) -> None:
    """This rank runs a graph with collectives as it is, without a plan. It waits for nobody; ranks with plans will read it."""
    names: dict[str, None] = {}
    for node in graph.nodes:
        if str(getattr(node.target, "_qualified_op_name", node.target)).startswith("_c10d_functional"):
            given = [a for a in (*node.args, *node.kwargs.values()) if isinstance(a, str)]
            names.update(dict.fromkeys(given[-1:]))  # the group is the last of their arguments
    if names and dist.is_available() and dist.is_initialized():
        _post(dist.distributed_c10d._get_default_store(), dist.get_rank(), names, None)


def _ranks_of(name: str) -> list[int]:
    return dist.get_process_group_ranks(None if name == "?" else dist.distributed_c10d._resolve_process_group(name))  # type: ignore[arg-type]


def _post(store: Any, rank: int, names: Iterable[str], order: list[Collective] | None) -> dict[str, Any]:
    """`order` is None for a graph that runs as a whole."""
    groups = {}
    for name in names:
        _rounds[name] += 1
        groups[name] = (_rounds[name], _ranks_of(name))
    post = {"order": order, "groups": groups}
    for name, (number, _) in groups.items():
        store.set(_key(name, number, rank), json.dumps(post))
    return post


def _everybody(store: Any, rank: int, mine: dict[str, Any], flow: str) -> dict[int, dict[str, Any]]:
    """Rank -> what it posted."""
    posts, left = {rank: mine}, list(mine["groups"].items())
    deadline = time.monotonic() + TIME_LIMIT.total_seconds()
    while left:
        name, (number, ranks) = left.pop()
        keys = {r: _key(name, number, r) for r in ranks if r not in posts}
        if not keys:
            continue
        try:
            store.wait(list(keys.values()), timedelta(seconds=max(0.01, deadline - time.monotonic())))
        except Exception as error:
            raise _missing(store, keys, flow) from error
        for r, key in keys.items():
            posts[r] = json.loads(store.get(key))
            left.extend(posts[r]["groups"].items())
    return posts


def _missing(store: Any, keys: dict[int, str], flow: str) -> RankMismatch:
    """Which ranks said nothing. Where the store does not answer either, its owner is gone."""
    try:
        silent = [r for r, key in keys.items() if not store.check([key])]
    except Exception:  # what it raises is the store's own business, and is shown as the cause
        return RankMissing("the store of the process group is gone.", why="the process that holds it has ended", fix="see its error")
    return RankMissing(
        f"{'ranks' if len(silent) > 1 else 'rank'} {', '.join(map(str, silent))} did not plan '{flow}' within {TIME_LIMIT.seconds} s.",
        why="ranks plan together, the first time that they see a context; these saw another one, or have ended",
        fix="call the model on every rank with the same sizes and tags")  # fmt: skip


def _key(group: str, number: int, rank: int) -> str:
    return f"dynaflow/{group}/{number}/{rank}"
