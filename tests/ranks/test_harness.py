"""The harness reports what it must: a rank that raises, dies or hangs."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks.harness import run, start

pytestmark = pytest.mark.xdist_group("ranks")


def adds_up():
    x = torch.full((2,), dist.get_rank() + 1.0)
    dist.all_reduce(x)
    return x.tolist()


def one_raises():
    assert dist.get_rank() == 0, "not me"


def one_dies():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def one_hangs():
    if dist.get_rank() == 1:
        time.sleep(60)


def test_returns_what_each_rank_returned():
    assert run(adds_up, 2) == [[3.0, 3.0]] * 2
    assert run(adds_up, 4) == [[10.0, 10.0]] * 4


def test_rejects_rank_that_raises():
    with pytest.raises(AssertionError, match=r"(?s)1 of 2 ranks failed in one_raises.*rank 1.*not me"):
        run(one_raises, 2)


def test_rejects_rank_that_dies():
    outcomes = start(one_dies, 2)
    assert [outcome.exitcode for outcome in outcomes] == [0, -signal.SIGKILL] and outcomes[1].error == "said nothing"


def test_rejects_rank_that_hangs_and_says_where():
    with pytest.raises(AssertionError, match=r"(?s)rank 1 .*still there after 6 s.*in one_hangs"):
        run(one_hangs, 2, time_limit_s=6)
