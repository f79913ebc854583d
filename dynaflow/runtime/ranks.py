"""All ranks agree on the order of their collectives before the first of them is launched.

Each rank posts its order in the process group's store and reads the others'. Nothing is sent over the group itself: a rank that
plans something else, or nothing, is found by a message or a time limit, never by a collective that does not return.
"""

from __future__ import annotations

import json
from collections import Counter
from datetime import timedelta

import torch.distributed as dist

from dynaflow.errors import RankMismatch
from dynaflow.ir import Flow, Plan
from dynaflow.verify.ranks import collectives, verify_orders

TIME_LIMIT = timedelta(seconds=60)

_round: Counter[str] = Counter()


def agree(flow: Flow, plan: Plan) -> None:
    """Raise RankMismatch, on every rank, unless all ranks would call the same collectives in the same order."""
    if not any(token.startswith("group:") for op in flow.ops for token in op.uses):
        return
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    store, rank, num_ranks = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    _round[flow.name] += 1
    keys = [f"dynaflow/{flow.name}/{_round[flow.name]}/{r}" for r in range(num_ranks)]
    store.set(keys[rank], json.dumps(collectives(plan, flow)))
    try:
        store.wait(keys, TIME_LIMIT)
    except Exception as error:
        missing = [r for r, key in enumerate(keys) if not store.check([key])]
        raise RankMismatch(
            f"ranks {missing} did not plan '{flow.name}' within {TIME_LIMIT.seconds} s.",
            why="ranks plan together, the first time that they see a context; these saw another one, or stopped",
            fix="call the model on every rank with the same sizes and tags") from error  # fmt: skip
    verify_orders([json.loads(store.get(key)) for key in keys])
