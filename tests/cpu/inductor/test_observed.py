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


def test_memory_of_an_argument_does_not_come_back():
    """The wrapper drops its arguments as it goes. What is allocated next must not lie where one of them was: it would be taken for it."""
    text = TEXT.replace("    buf0 = make.op(arg0_1)\n", "    del arg0_1\n    buf0 = make.op(None)\n")
    args = [torch.zeros(4, 4)]
    argument = args[0].untyped_storage()._weak_ref()
    is_gone = []

    class make:
        @staticmethod
        def op(_):
            is_gone.append(torch.UntypedStorage._expired(argument))
            return tuple(torch.ones(4, 4) for _ in range(3))

    _, seen = Observed(text, {"make": make})(args)
    assert is_gone == [False] and set(seen) == {"buf1", "buf2", "buf3"}
    assert torch.UntypedStorage._expired(argument), "and no longer than that"
    torch.UntypedStorage._free_weak_ref(argument)
