"""What a call shows about the results of extern kernels."""

import torch

from dynaflow.inductor.observed import Observed

TEXT = """
def call(args):
    arg0_1, = args
    args.clear()
    buf0 = make.op(arg0_1)
    buf1 = buf0[0]
    buf2 = buf0[1]
    buf3 = buf0[2]
    del buf0
    return (buf1, buf2, )
"""


def observed(results):
    class make:
        @staticmethod
        def op(x):
            return results(x)

    return Observed(TEXT, {"make": make})([torch.zeros(4, 4)])


def test_results_of_their_own():
    base = torch.arange(32.0)
    returned, seen = observed(lambda x: (base[:16].view(4, 4), base[16:].view(4, 4).t(), torch.ones(2, dtype=torch.int64)))
    assert torch.equal(returned[1], base[16:].view(4, 4).t())
    assert {name: (g.shape, g.stride, g.dtype) for name, g in seen.items()} == {
        "buf1": ((4, 4), (4, 1), torch.float32), "buf2": ((4, 4), (1, 4), torch.float32), "buf3": ((2,), (1,), torch.int64)}  # fmt: skip


def test_results_in_memory_of_others_are_not_reported():
    base = torch.arange(32.0)
    assert set(observed(lambda x: (x.view(16), base[:16], base[8:24]))[1]) == {"buf2"}


def test_what_is_no_tensor_is_not_reported():
    assert set(observed(lambda x: (None, 3, torch.nn.Parameter(torch.ones(2))))[1]) == set()


def test_memory_that_is_let_go_during_the_call_counts_for_nobody():
    """`call` drops its arguments as it goes: what comes later may lie where they did. Nothing of no bytes has an address."""
    text = """
def call(args):
    arg0_1, arg1_1 = args
    args.clear()
    del arg0_1
    buf0 = make.op(arg1_1)
    buf1 = buf0
    return (buf1, )
"""

    class make:
        @staticmethod
        def op(x):
            return torch.ones(1024) if x.numel() else torch.ones(0, 3)

    for other in (torch.zeros(4), torch.zeros(0, 3)):
        _, seen = Observed(text, {"make": make})([torch.zeros(1024), other])
        assert set(seen) == {"buf0"}
