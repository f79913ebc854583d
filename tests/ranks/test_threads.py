"""Threads that call models over groups of their own do not wait for each other, whichever of them each rank begins with."""

import threading

import pytest
import torch
import torch.distributed as dist

import dynaflow as df
from tests.ranks.harness import run

pytestmark = pytest.mark.xdist_group("ranks")

_begun = [threading.Event(), threading.Event()]


@torch.library.custom_op("dftest_threads::begun", mutates_args=())
def begun(x: torch.Tensor, which: int) -> torch.Tensor:
    _begun[which].set()
    return x.clone()


begun.register_fake(lambda x, which: torch.empty_like(x))
df.register_split_rule(torch.ops.dftest_threads.begun.default, df.rowwise)


def two_threads():
    """Each rank begins with another thread's call; the other thread's comes behind it."""

    def model(which, group):
        def forward(x):
            y = begun(x * 2, which)
            dist.all_reduce(y, group=group)
            return torch.tanh(y)

        return forward

    rank, x = dist.get_rank(), torch.randn(4, 2, generator=torch.Generator().manual_seed(0))
    fast = [df.compile(model(i, dist.new_group([0, 1])), strategy=df.TwoBatch(), strict=True) for i in range(2)]
    wanted = torch.tanh(4 * x)
    for call in fast:
        torch.testing.assert_close(call(x), wanted)
    for event in _begun:
        event.clear()
    results = {}

    def work(which):
        if which != rank:
            _begun[rank].wait()
        with torch.no_grad():
            results[which] = fast[which](x)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [torch.equal(results[i], wanted) for i in range(2)], [df.stats(call).split_calls for call in fast]


def test_calls_over_groups_of_their_own_do_not_wait_for_each_other():
    for equal, split_calls in run(two_threads, 2, time_limit_s=60):
        assert equal == [True, True] and split_calls == [2, 2]


def lanes_of_a_thread():
    """Calls one after the other, of models that wait for other ranks and of one that does not: the lanes that there are at the end."""

    def reduces(x):
        y = x * 2
        dist.all_reduce(y)
        return y

    x = torch.ones(4, 2)
    fast = [df.compile(each, strategy=df.TwoBatch(), partition=["auto"], strict=True) for each in (reduces, lambda x: reduces(x) + 1)]
    for _ in range(3):
        for call in fast:
            call(x)
    return sum(thread.name.startswith("dynaflow-lane") for thread in threading.enumerate())


def test_calls_one_after_the_other_share_their_lanes():
    assert run(lanes_of_a_thread, 2) == [2, 2]
