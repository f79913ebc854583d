"""All ranks agree on the order of their collectives before the first of them is launched.

1. Each rank posts its order in the store of the default process group, once per group that the flow uses. (A rank that runs the graph
   as a whole says that.) Posts are found by the collectives that the graph calls over the group, and numbered: ranks may capture other
   graphs, or the same one in other shards.
2. It reads what the other ranks of these groups posted, and those of their groups, until it knows everybody whom it could wait for,
   directly or not. So all of them see the same orders, and come to the same verdict. A group whose collectives all need the whole batch,
   in the order that the graph has them, is left out: there every rank does what the graph itself does, whatever the others plan.
3. Orders that differ are refused, on every rank. A rank that posts nothing is not waited for longer than TIME_LIMIT.

A flow with such groups alone waits for nobody. Nothing is sent over the groups themselves: a difference is found by a message, never by a
collective that does not return.

At the end of the process, `settle` waits for what a group's threads still do with messages that have arrived.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from datetime import timedelta
from typing import Any, Iterable, Mapping

import torch.distributed as dist
from torch import fx

from dynaflow.errors import RankMismatch, RankMissing
from dynaflow.ir import Flow, Op, Plan
from dynaflow.verify.ranks import Collective, collectives, verify_orders

# how long ranks wait for each other; the slowest may still be compiling
TIME_LIMIT = timedelta(seconds=300)

# (group, what a graph calls over it) -> how often its ranks have agreed
_rounds: Counter[tuple[str, str]] = Counter()


def agree(graph: fx.Graph, flow: Flow, plan: Plan, num_measured: int = 0, reason: str = "") -> None:
    """Raise RankMismatch, on every rank, unless all ranks would call the same collectives in the same order, and measure as many plans
    against each other behind it; RankMissing where a rank did not say. `reason`: why the plan is not the strategy's, for the others."""
    if not uses_groups(flow):
        return
    order = collectives(plan, flow)
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    waits = _planned_together(flow, order)
    mine = _post(store, rank, _signatures(flow.name, graph, _used(flow)), order, num_measured, waits, reason)
    if not waits:
        return
    posts = _everybody(store, rank, mine, flow.name)
    ranks = sorted(posts)
    whole = [r for r in ranks if posts[r]["order"] is None]
    if whole:
        raise RankMismatch(
            f"'{flow.name}' runs as a whole on rank {', '.join(map(str, whole))}, and under a plan on the others.",
            why="a plan may call collectives on parts of the batch, and each rank would wait for the other",
            fix="use one strategy on all ranks")  # fmt: skip
    verify_orders([posts[r]["order"] for r in ranks], ranks, [posts[r]["reason"] for r in ranks])
    odd = next((r for r in ranks if posts[r]["num_measured"] != posts[ranks[0]]["num_measured"]), None)
    if odd is not None:
        first, other = (posts[r]["num_measured"] or "none" for r in (ranks[0], odd))
        raise RankMismatch(
            f"plans of '{flow.name}' that would be measured: {first} on rank {ranks[0]}, {other} on rank {odd}.",
            why="ranks measure plans together, and each would wait for the other", fix="use one never_slower on all ranks")  # fmt: skip


def everybody_says(graph: fx.Graph, flow: Flow, mine: Any) -> list[Any]:
    """What each rank says that these collectives could wait for, this one included; the same list on all of them."""
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    signatures = _signatures(flow.name, graph, _used(flow))
    own = _post(store, rank, {name: f"{signature}/says" for name, signature in signatures.items()}, mine)
    posts = _everybody(store, rank, own, flow.name)
    return [posts[r]["order"] for r in sorted(posts)]


def uses_groups(flow: Flow) -> bool:
    """Whether other ranks could wait for what this flow does."""
    return any(map(_groups, flow.ops)) and dist.is_available() and dist.is_initialized()


def are_waited_for(flow: Flow) -> bool:
    """Whether all ranks that this flow could wait for plan it together. Where all collectives of a group need the whole batch, a rank of
    it may be at other sizes than the others."""
    return {*_used(flow)} == _split(flow)


def _split(flow: Flow) -> set[str]:
    """The groups that have a collective which can be split."""
    return {name for op in flow.ops if not op.unsplittable for name in _groups(op)}


def _planned_together(flow: Flow, order: list[Collective]) -> list[str]:
    """The groups whose ranks must call the same: those of `_split`; all of them, where the others' order is not the graph's."""
    split = _split(flow)
    others = [op.name for op in flow.ops if {*_groups(op)} - split]
    kept = [name for name, *_ in order if name in others] == others
    return [name for name in _used(flow) if name in split or not kept]


def _used(flow: Flow) -> list[str]:
    """Its groups, in order of first use."""
    return list(dict.fromkeys(name for op in flow.ops for name in _groups(op)))


def _groups(op: Op) -> list[str]:
    return [token.removeprefix("group:") for token in op.uses if token.startswith("group:")]


def announce(name: str, graph: fx.Graph) -> None:
    """This rank runs a graph with collectives as it is, without a plan. It waits for nobody; ranks with plans will read it."""
    called = _called(graph)
    if called and dist.is_available() and dist.is_initialized():
        signatures = _signatures(name, graph, dict.fromkeys(group for _, group in called))
        _post(dist.distributed_c10d._get_default_store(), dist.get_rank(), signatures, None)


def _called(graph: fx.Graph) -> list[tuple[str, str]]:
    """(collective, group) of every call in a graph, in order."""
    found = []
    for node in graph.nodes:
        name = str(getattr(node.target, "_qualified_op_name", node.target)).replace(".", "::")
        given = [a for a in (*node.args, *node.kwargs.values()) if isinstance(a, str)]
        if name.startswith("_c10d_functional") and given:
            found.append((name.split("::")[1], given[-1]))  # the group is the last of their arguments
    return found


def _signatures(name: str, graph: fx.Graph, groups: Iterable[str]) -> dict[str, str]:
    """Group -> what its ranks know this graph by: what it calls over this group, whatever it calls over others. (Over one that it gives
    to ops of other kinds: all that it calls.)"""
    called, signatures = _called(graph), {}
    for group in groups:
        over = [collective for collective, over in called if over == group] or [collective for collective, _ in called]
        signatures[group] = hashlib.sha256(json.dumps([name, over]).encode()).hexdigest()[:16]
    return signatures


def _ranks_of(name: str) -> list[int]:
    return dist.get_process_group_ranks(None if name == "?" else dist.distributed_c10d._resolve_process_group(name))  # type: ignore[arg-type]


def _post(
    store: Any, rank: int, signatures: Mapping[str, str], order: list[Collective] | Any, num_measured: int = 0,
    waits: Iterable[str] | None = None, reason: str = "",
) -> dict[str, Any]:  # fmt: skip
    """`order` is None for a graph that runs as a whole, or what a rank says of something else. `waits`: the groups whose ranks are waited
    for; by default all. `reason`: why it has no plan of its strategy's."""
    groups = {}
    for name, signature in signatures.items():
        _rounds[name, signature] += 1
        groups[name] = (f"{signature}/{_rounds[name, signature]}", _ranks_of(name))
    waited = {name: groups[name] for name in (groups if waits is None else waits)}
    post = {"order": order, "num_measured": num_measured, "groups": waited, "reason": reason}
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


def _key(group: str, number: str, rank: int) -> str:
    return f"dynaflow/{group}/{number}/{rank}"


# -- the end of the process

# what gloo's threads are called, which send messages and hold their tensors
_SENDS = "pt_gloo_runloop"
_TASKS = "/proc/self/task"


def settle(until: float) -> None:
    """Wait, at most until then, for gloo's threads to rest.

    Whoever waits for a message goes on when it has arrived. Only then does gloo let go of its tensors, which takes Python's lock; a
    thread that waits for the lock when Python goes away takes the process down. `destroy_process_group` ends these threads, but not
    where a graph with collectives was captured: the graph keeps the group. (pytorch#190489)
    """
    num_rests = 0
    while num_rests < 3 and (states := _states(_SENDS)) and time.monotonic() < until:
        # Reading a state lets go of the lock: one that waits for it is awake then.
        num_rests = num_rests + 1 if set(states) == {"S"} else 0
        time.sleep(0.001)


def _states(name: str) -> list[str]:
    """Of the threads of that name: "S" sleeps, "R" runs or would."""
    states = []
    for task in os.listdir(_TASKS) if os.path.isdir(_TASKS) else ():
        try:
            with open(f"{_TASKS}/{task}/stat") as file:
                stat = file.read()
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
        begin, end = stat.index("("), stat.rindex(")")
        if stat[begin + 1 : end] == name:
            states.append(stat[end + 2])
    return states
