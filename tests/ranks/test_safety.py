"""Ranks that differ are refused on all of them; a rank that ends does not leave the others waiting; lanes keep the order of messages."""

import contextlib
import os
import signal
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import dynaflow as df
from dynaflow import batching, bindings, planning
from dynaflow.errors import RankMismatch, RankMissing
from dynaflow.runtime import ranks
from tests.ranks import models
from tests.ranks.harness import run, start
from tests.ranks.test_exchange import gathers_the_batch

pytestmark = pytest.mark.xdist_group("ranks")


class Backwards(df.Strategy):
    """The last part first: legal on its own, fatal beside TwoBatch."""

    def schedule(self, flow):
        flow.split(2)
        while ready := flow.get_ready_ops():
            flow.execute(max(ready, key=lambda r: (r.part, -r.depth)))


class ByTag(df.Strategy):
    def __init__(self, default=None):
        self.default = default

    def schedule(self, flow):
        if flow.context.tags.get("phase", self.default) == "decode":
            return flow.sequential("decoding")
        return df.TwoBatch().schedule(flow)


def nets(kind=models.Functional, num_layers=2):
    """(the model over ranks, the whole one)"""
    torch.manual_seed(0)
    full = [models.Mlp() for _ in range(num_layers)]
    return nn.Sequential(*map(kind, full)).eval(), nn.Sequential(*full).eval()


def batch(batch_size=6):
    return torch.randn(batch_size, models.WIDTH, generator=torch.Generator().manual_seed(batch_size))


# -- ranks that differ


def same_orders():
    net, whole = nets()
    fast = df.compile(net, strategy=df.TwoBatch())
    torch.testing.assert_close(fast(batch()), whole(batch()))
    return dict(df.stats(fast).fallbacks)


def different_orders(odd):
    net, whole = nets()
    strategy = Backwards() if dist.get_rank() == odd else df.TwoBatch()
    with pytest.raises(RankMismatch, match=f"on rank {odd}"):
        df.compile(net, strategy=strategy, strict=True)(batch())
    fast = df.compile(net, strategy=strategy)
    for batch_size in (6, 8, 6):  # for good: other sizes are not planned again
        torch.testing.assert_close(fast(batch(batch_size)), whole(batch(batch_size)))
    assert df.stats(fast).plans == 1
    return list(df.stats(fast).fallbacks)


def one_runs_the_whole_graph():
    net, whole = nets()
    fast = df.compile(net, strategy=df.Sequential() if dist.get_rank() else df.TwoBatch())
    for batch_size in (6, 8):
        torch.testing.assert_close(fast(batch(batch_size)), whole(batch(batch_size)))
    return list(df.stats(fast).fallbacks)


class Uneven(df.Strategy):
    """A plan for every size."""

    def schedule(self, flow):
        flow.split([int(flow.context.batch_size) // 2, -1])
        while ready := flow.get_ready_ops():
            flow.execute(ready[0])


def plans_that_are_dropped():
    bindings.MAX_PLANS = 2
    net, whole = nets()
    fast = df.compile(net, strategy=Uneven(), strict=True)
    for batch_size in (4, 6, 8, 10, 4, 10):
        torch.testing.assert_close(fast(batch(batch_size)), whole(batch(batch_size)))
    return df.stats(fast).plans


class WithMemory(nn.Module):
    """`memory` has a size that no strategy looks at, and that ranks may have different."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x, memory):
        return self.inner(x + memory.sum(0))


class NotIfSmall(Uneven):
    def schedule(self, flow):
        if int(flow.context.batch_size) < 4:
            return flow.sequential("too small")
        return super().schedule(flow)


class WrongIfSmall(Uneven):
    def schedule(self, flow):
        if int(flow.context.batch_size) < 4:
            return flow.split(2)  # and executes nothing
        return super().schedule(flow)


def what_gave_up_is_dropped(kept, strategy):
    bindings.MAX_PLANS, ranks.TIME_LIMIT = kept, timedelta(seconds=10)
    net, whole = nets(num_layers=1)
    fast = df.compile(WithMemory(net).eval(), strategy=strategy())
    lengths = {2: [3, 3 + dist.get_rank()]}  # the second time, one rank knows these very sizes, and the other one does not
    for batch_size in (2, 4, 6, 8, 2):
        memory = torch.zeros(lengths.get(batch_size, [3]).pop(0), models.WIDTH)
        torch._dynamo.mark_dynamic(memory, 0)
        torch.testing.assert_close(fast(batch(batch_size), memory), whole(batch(batch_size)))
    return df.stats(fast).plans


def one_has_a_bug(odd):
    ranks.TIME_LIMIT = timedelta(seconds=10)
    if dist.get_rank() == odd:
        planning.finish_plan = lambda *_: {}["of ours"]
    net, whole = nets()
    fast = df.compile(net, strategy=df.TwoBatch())
    for batch_size in (4, 6):
        torch.testing.assert_close(fast(batch(batch_size)), whole(batch(batch_size)))
    return list(df.stats(fast).fallbacks)


def another_context():
    net, whole = nets()
    fast = df.compile(net, strategy=ByTag())
    with df.context(phase="decode" if dist.get_rank() else "prefill"):
        torch.testing.assert_close(fast(batch()), whole(batch()))
    return list(df.stats(fast).fallbacks)


def one_does_not_plan():
    ranks.TIME_LIMIT = timedelta(seconds=1)
    net, _ = nets()
    message = ""
    if dist.get_rank() == 0:
        with pytest.raises(RankMissing) as error:
            df.compile(net, strategy=df.TwoBatch())(batch())
        message = str(error.value)
    dist.barrier()
    return message


def one_does_not_plan_and_none_has_to():
    """All of the batch is exchanged: the plan does what the graph does."""
    ranks.TIME_LIMIT = timedelta(seconds=1)
    x = batch() + dist.get_rank()
    function = gathers_the_batch
    fast = df.compile(function, strategy=df.TwoBatch(), strict=True) if dist.get_rank() == 0 else function
    wanted = function(x)
    torch.testing.assert_close(fast(x), wanted)
    return dist.get_rank() or df.stats(fast).planned_calls


class NoStore:
    """The store of a process that has ended."""

    def set(self, key, value):
        pass

    def wait(self, keys, limit):
        raise RuntimeError("Connection reset by peer")

    def check(self, keys):
        self.wait(keys, None)


def test_accepts_ranks_that_agree():
    assert run(same_orders, 2) == [{}, {}]


def test_a_rank_that_cannot_plan_for_a_mistake_of_ours_says_so():
    """The others run sequentially, too, and do not wait for it."""
    first, second = run(one_has_a_bug, 2, 1)
    assert len(first) == 1 and "each rank would wait for the other" in first[0]
    assert "KeyError: 'of ours'" in second[0] and second[1:] == first


def test_ranks_drop_the_same_plans():
    assert run(plans_that_are_dropped, 2) == [5, 5]


@pytest.mark.parametrize("kept, strategy, num_plans", [
    (2, NotIfSmall, 5), (256, NotIfSmall, 4), (2, WrongIfSmall, 3), (256, WrongIfSmall, 3),
])  # fmt: skip
def test_ranks_drop_what_gave_up_or_was_refused_too(kept, strategy, num_plans):
    """Or one plans it anew, and waits for the other, which still knows. (What is refused is no plan.)"""
    assert run(what_gave_up_is_dropped, 2, kept, strategy) == [num_plans] * 2


def test_rejects_another_order_on_every_rank():
    for (reason,) in run(different_orders, 2, 1):
        assert "on rank 0 and" in reason and "on rank 1" in reason and "each rank would wait for the other" in reason


def test_rejects_a_rank_without_a_plan():
    (reason,), silent = run(one_runs_the_whole_graph, 2)
    assert "runs as a whole on rank 1" in reason and silent == []


def test_rejects_another_context_on_every_rank():
    for (reason,) in run(another_context, 2):
        assert "on rank 0 and" in reason


def test_rejects_a_rank_that_does_not_plan_without_waiting_forever():
    message, _ = run(one_does_not_plan, 2)
    assert "rank 1 did not plan 'Sequential' within 1 s" in message


def test_accepts_a_rank_that_does_not_plan_where_the_plan_keeps_the_graphs_order():
    assert run(one_does_not_plan_and_none_has_to, 2) == [1, 1], "rank 0 ran its plan"


def test_rejects_a_store_that_is_gone():
    mine = {"order": [], "groups": {"0": ("x/1", [0, 1])}}
    with pytest.raises(RankMissing, match="the store of the process group is gone"):
        ranks._everybody(NoStore(), 0, mine, "net")


# -- several groups


class Grid(nn.Module):
    """Ranks in a square: `up` divided over those in a row, the rest of the work over those in a column."""

    def __init__(self, full):
        super().__init__()
        side, rank = 2, dist.get_rank()
        groups = {tuple(members): dist.new_group(members) for members in ([0, 1], [2, 3], [0, 2], [1, 3])}
        self.row = next(g for members, g in groups.items() if rank in members and members[1] == members[0] + 1)
        self.column = next(g for members, g in groups.items() if rank in members and members[1] == members[0] + side)
        cut = full.down.weight.chunk(side, 1)[rank % side].chunk(side, 1)[rank // side]
        self.norm, self.down = full.norm, nn.Parameter(cut.clone())
        self.up = nn.Parameter(full.up.weight.chunk(side, 0)[rank % side].chunk(side, 0)[rank // side].clone())

    def forward(self, x):
        y = F.linear(F.gelu(F.linear(self.norm(x), self.up)), self.down)
        dist.all_reduce(y, group=self.row)
        dist.all_reduce(y, group=self.column)
        return x + y


class LaneEach(df.Strategy):
    """A lane per process group, and work on another."""

    def schedule(self, flow):
        flow.split(2)
        while ready := flow.get_ready_ops():
            r = min(ready, key=lambda r: (r.depth, r.part))
            flow.execute(r, stream=r.op.uses[0].replace(":", "_") if r.kind == "network" else "compute")


def two_groups():
    net, whole = nets(Grid, num_layers=1)
    fast = df.compile(net, strategy=LaneEach(), strict=True)
    for _ in range(5):
        torch.testing.assert_close(fast(batch()), whole(batch()))
        assert torch.equal(fast(batch()), df.run_serialised(fast, batch()))
    with df.profile() as profiled:
        fast(batch())
    return [s for s in profiled.timeline.streams if s.startswith("group_")]


def one_of_four_differs():
    net, whole = nets(Grid, num_layers=1)
    fast = df.compile(net, strategy=Backwards() if dist.get_rank() == 3 else df.TwoBatch())
    torch.testing.assert_close(fast(batch()), whole(batch()))
    return list(df.stats(fast).fallbacks)


def test_groups_have_their_own_lanes():
    assert all(len(lanes) == 2 for lanes in run(two_groups, 4))


def test_rejects_another_order_on_ranks_that_share_no_group():
    for (reason,) in run(one_of_four_differs, 4):  # rank 0 sends nothing to rank 3
        assert "on rank 3" in reason


class Replicas(nn.Module):
    """Two replicas of two ranks, each with its own rows; what is added up over the rows is added up over the replicas, too."""

    def __init__(self, full):
        super().__init__()
        rank = dist.get_rank()
        groups = {members: dist.new_group(members) for members in ((0, 1), (2, 3), (0, 2), (1, 3))}
        self.model, self.data = (group for members, group in groups.items() if rank in members)
        self.norm, self.up = full.norm, nn.Parameter(full.up.weight.chunk(2, 0)[rank % 2].clone())
        self.down = nn.Parameter(full.down.weight.chunk(2, 1)[rank % 2].clone())

    def forward(self, x):
        y = F.linear(F.gelu(F.linear(self.norm(x), self.up)), self.down)
        dist.all_reduce(y, group=self.model)
        total = (x + y).sum(0)
        dist.all_reduce(total, group=self.data)
        return x + y, total


def replicas_at_other_sizes():
    ranks.TIME_LIMIT = timedelta(seconds=5)
    torch.manual_seed(0)
    whole = models.Mlp()
    fast = df.compile(Replicas(whole), strategy=df.TwoBatch())
    for sizes in ((6, 6), (6, 8), (9, 1), (1, 9)):  # a single row is planned anew
        y, total = fast(batch(sizes[dist.get_rank() // 2]))
        torch.testing.assert_close(y, whole(batch(sizes[dist.get_rank() // 2])))
        torch.testing.assert_close(total, sum(whole(batch(size)).sum(0) for size in sizes))
    return df.stats(fast).num_part_launches, dict(df.stats(fast).fallbacks)


def test_accepts_replicas_at_other_sizes():
    """The other replica is met over the whole batch alone: what it plans, and when, is its own affair."""
    for num_part_launches, fallbacks in run(replicas_at_other_sizes, 4):
        assert num_part_launches > 0 and fallbacks == {"batch smaller than 2": 1}


# -- lanes


_passed = threading.Event()


@torch.library.custom_op("dftest_ranks::late", mutates_args=())
def late(x: torch.Tensor, limit_s: float) -> torch.Tensor:
    """On rank 0 the first rows, on the others the last wait for the message of the other rows, if that can come first."""
    if bool(x[0, 0] < 0) == (dist.get_rank() == 0):
        _passed.wait(limit_s)
    return x.clone()


@torch.library.custom_op("dftest_ranks::passed", mutates_args=())
def passed(x: torch.Tensor) -> torch.Tensor:
    _passed.set()
    return x.clone()


late.register_fake(lambda x, limit_s: torch.empty_like(x))
passed.register_fake(torch.empty_like)
for op in (torch.ops.dftest_ranks.late.default, torch.ops.dftest_ranks.passed.default):
    df.register_split_rule(op, df.rowwise)


class TwoComms(df.Strategy):
    """Each part has its own pair of lanes: nothing but the engine's waits orders their messages."""

    def schedule(self, flow):
        flow.split(2)
        while ready := flow.get_ready_ops():
            r = min(ready, key=lambda r: (r.depth, r.part))
            flow.execute(r, stream=f"{'comm' if r.kind == 'network' else 'compute'}{r.part.lo}")


def messages_on_two_lanes(knows_groups, limit_s):
    if not knows_groups:
        batching.groups = lambda arguments: ()  # the engine then sees an op like any other

    def model(x):
        y = late(x * 2, limit_s)
        dist.all_reduce(y)
        return passed(y)

    x = torch.ones(4, 2)
    x[:2] = -1
    partition = ["auto", df.SplitFunc(dist.all_reduce, kind="network"), *map(df.SplitFunc, (late, passed))]
    fast = df.compile(model, strategy=TwoComms(), partition=partition, strict=True)
    y = fast(x)
    assert df.stats(fast).num_part_launches > 0
    return torch.equal(y, 2 * x * dist.get_world_size())


def test_messages_on_several_lanes_keep_their_order():
    assert run(messages_on_two_lanes, 2, True, 0.3) == [True, True]


def test_without_the_engines_order_messages_are_mixed_up():
    assert run(messages_on_two_lanes, 2, False, 30.0) == [False, False]


def early_and_late(x):
    """Sent early, waited for late (and once more), with work in between."""
    sent = torch.ops._c10d_functional.all_reduce(x * 2, "sum", "0")
    z = torch.tanh(x) @ torch.ones(2, 2)
    got = torch.ops._c10d_functional.wait_tensor(sent)
    return torch.ops._c10d_functional.wait_tensor(got) + z


def never(x):
    return torch.ops._c10d_functional.all_reduce(x * 2, "sum", "0")


def waits_elsewhere():
    x = torch.randn(4, 2, generator=torch.Generator().manual_seed(0))
    fast = df.compile(early_and_late, strategy=df.TwoBatch(), strict=True)
    for _ in range(5):
        torch.testing.assert_close(fast(x), 2 * x * dist.get_world_size() + torch.tanh(x) @ torch.ones(2, 2))
    flow = df.explain(early_and_late, (x,), strategy=df.TwoBatch()).flow
    return [op.name for op in flow.ops]


def waits_nowhere():
    x = torch.randn(4, 2, generator=torch.Generator().manual_seed(0))
    fast = df.compile(never, strategy=df.TwoBatch())
    torch.testing.assert_close(torch.ops._c10d_functional.wait_tensor(fast(x)), 2 * x * dist.get_world_size())
    return list(df.stats(fast).fallbacks)


def test_a_wait_belongs_to_its_collective():
    for names in run(waits_elsewhere, 2):
        assert not any("wait" in name for name in names) and sum("all_reduce" in name for name in names) == 1


def test_rejects_a_collective_that_is_not_waited_for():
    for (reason,) in run(waits_nowhere, 2):
        assert "is sent in this graph and not waited for" in reason


# -- a rank that ends


@torch.library.custom_op("dftest_ranks::fate", mutates_args=())
def fate(x: torch.Tensor, how: str, part: int) -> torch.Tensor:
    """Ends rank 1, on the given part of the batch."""
    if dist.get_rank() == 1 and x[0, 0] == part:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ArithmeticError("fate")
    return x.clone()


fate.register_fake(lambda x, how, part: torch.empty_like(x))
df.register_split_rule(torch.ops.dftest_ranks.fate.default, df.rowwise)


def ends(how, part):
    def model(x):
        y = fate(x, how, part)
        dist.all_reduce(y)
        return torch.tanh(y) @ torch.ones(2, 2)

    x = torch.tensor([[0.0, 0.0]] * 3 + [[1.0, 1.0]] * 3)
    fast = df.compile(model, strategy=df.TwoBatch(), strict=True)
    try:
        fast(x)
    except (RuntimeError, ArithmeticError) as error:
        told = [*str(error).splitlines()[:1], *error.__notes__]
    else:
        told = ["no error"]
    # the lanes serve the next call
    local = df.compile(lambda x: torch.tanh(x) @ torch.ones(2, 2), strategy=df.NanoBatch(3), strict=True)
    torch.testing.assert_close(local(x), torch.tanh(x) @ torch.ones(2, 2))
    if dist.get_rank() == 1:
        os._exit(3)  # as a program does that ends with an error; a farewell to the others would wait for them
    return told


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("how", ["killed", "raised"])
def test_a_rank_that_ends_gives_an_error_on_the_others(how, part):
    first, second = start(ends, 2, how, part, time_limit_s=60)
    assert second.exitcode == (3 if how == "raised" else -signal.SIGKILL)
    assert first.exitcode == 0 and "dynaflow: raised by 'all_reduce" in "\n".join(first.value or ()), first


# -- never slower


def measured_on(ranks_that_win):
    """Which of plan and sequential runs where the plan wins on some ranks only."""
    from dynaflow import contest

    contest.is_faster = lambda mine, other: dist.get_rank() in ranks_that_win
    net, whole = nets()
    fast = df.compile(net, strategy=df.TwoBatch(), never_slower=True, strict=True)
    for size in (6, 8, 6):
        torch.testing.assert_close(fast(batch(size)), whole(batch(size)))
    stats = df.stats(fast)
    return stats.num_part_launches > 0, sum(stats.fallbacks.values())


@pytest.mark.parametrize("ranks_that_win, wanted", [((0, 1), (True, 0)), ((0,), (False, 3)), ((), (False, 3))])
def test_a_plan_runs_where_it_wins_on_all_ranks(ranks_that_win, wanted):
    assert run(measured_on, 2, ranks_that_win) == [wanted, wanted]


def not_in_step(how):
    """One rank has a profile, or leaves measuring for later, or has no room: no rank measures, and all keep the plan."""
    from dynaflow import contest

    net, whole = nets()
    fast = df.compile(net, strategy=df.TwoBatch(), never_slower=True, strict=True)
    contest.is_faster = lambda mine, other: False  # where it is measured, it loses
    is_odd = dist.get_rank() == 0
    if how == "room" and is_odd:
        contest._copies = lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("no room"))
    manager = {"profile": df.profile, "unmeasured": df.unmeasured}.get(how, contextlib.nullcontext) if is_odd else contextlib.nullcontext
    with manager():
        torch.testing.assert_close(fast(batch(6)), whole(batch(6)))
    for size in (6, 8) if how != "room" else (6,):
        torch.testing.assert_close(fast(batch(size)), whole(batch(size)))
    return sum(df.stats(fast).fallbacks.values())


@pytest.mark.parametrize("how, num_fallbacks", [("profile", 1), ("unmeasured", 1), ("room", 0)])
def test_ranks_that_would_not_measure_together_do_not_measure(how, num_fallbacks):
    """The size that was out of step keeps its plan; the next one is measured, and loses."""
    assert run(not_in_step, 2, how) == [num_fallbacks] * 2


def runs_out_of_memory(how):
    """Rank 0 does, in the midst of what all ranks measure. What it ran next, the other would take for a trial's."""
    from dynaflow import contest
    from dynaflow.engine import CapturedGraph

    net, whole = nets()
    fast = df.compile(net, strategy=df.TwoBatch(), never_slower=True)
    contest.is_faster = lambda mine, other: True
    if how == "no memory" and dist.get_rank() == 0:
        CapturedGraph.repeatable = lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory."))
    try:
        torch.testing.assert_close(fast(batch(6)), whole(batch(6)))
    except (RankMissing, RuntimeError) as error:
        told = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    else:
        told = "right"
    if how == "no memory" and dist.get_rank() == 0:
        os._exit(3 if "RankMissing: this rank has no memory left to measure plans" in told else 4)
    return told


def test_a_rank_without_memory_to_measure_in_says_so_and_no_rank_gets_wrong_numbers():
    first, second = start(runs_out_of_memory, 2, "no memory", time_limit_s=60)
    assert first.exitcode == 3 and second.exitcode == 0, (first, second)
    assert second.value.startswith("RuntimeError"), second
    assert run(runs_out_of_memory, 2, "enough") == ["right"] * 2


def one_would_measure(strategy, strict):
    """Per rank: why it runs sequentially."""
    net, whole = nets()
    fast = df.compile(net, strategy=strategy, never_slower=dist.get_rank() == 0, strict=strict)
    if strict:
        with pytest.raises(RankMismatch, match="use one never_slower on all ranks"):
            fast(batch())
        return []
    for size in (6, 8):
        torch.testing.assert_close(fast(batch(size)), whole(batch(size)))
    return list(df.stats(fast).fallbacks)


@pytest.mark.parametrize("strategy, would", [(df.TwoBatch(), 1), (df.CommOverlap(2, 1), 2)], ids=["plan", "rivals"])
def test_rejects_a_rank_that_does_not_measure(strategy, would):
    for (reason,) in run(one_would_measure, 2, strategy, False):
        assert f"that would be measured: {would} on rank 0, none on rank 1" in reason
    run(one_would_measure, 2, strategy, True)


def test_accepts_a_rank_that_does_not_measure_where_there_is_nothing_to_measure():
    assert run(one_would_measure, 2, ByTag("decode"), False) == [["decoding"]] * 2
