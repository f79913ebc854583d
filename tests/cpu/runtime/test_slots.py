"""What a recording reads: slots that are filled anew, and memory that must be where it was."""

import ctypes

import pytest
import torch

from dynaflow.runtime import native, slots


@pytest.fixture(params=["native", "in Python"])
def way(request, monkeypatch):
    """How arguments are looked through."""
    if request.param == "in Python":
        monkeypatch.setattr(slots, "native", lambda: None)
    else:
        assert native.native() is not None, "there is a C compiler wherever the tests run"
        monkeypatch.setattr(slots.Slots, "_fit", lambda self, args: False)


def test_rows_that_a_call_does_not_have_stay_as_they_are():
    made = slots.Slots([torch.zeros(6, 4)], {0: (0, 6)}, [])
    made.fill([torch.ones(6, 4)])
    made.fill([torch.full((5, 4), 2.0)])
    assert made.each[0].tensor[:, 0].tolist() == [2, 2, 2, 2, 2, 1]


def test_only_what_torch_would_copy_byte_by_byte_is_a_piece():
    x = torch.randn(4, dtype=torch.complex64)
    images = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    args = [x, images, torch.randn(4, 3).t(), torch.randn(()), torch.randn(8)[2:5], x.conj(), x.conj().imag, torch.randn(4, 6)[:, :3],
            torch.randn(0)]  # fmt: skip
    made = slots.Slots(args, dict.fromkeys(range(len(args))), [])
    assert [slot.is_piece for slot in made.each] == [False, *[True] * 4, *[False] * 4]


@pytest.mark.parametrize("where", ["apart", "the same tensor", "a view in the middle", "other storage over the same memory"])
def test_what_is_copied_must_not_lie_in_what_is_changed(way, where):
    x, caches = torch.randn(4), [torch.zeros(64) for _ in range(3)]
    args = [x, *caches]
    made = slots.Slots(args, {0: None}, [1, 2, 3])
    assert made.fit(args)
    over = torch.frombuffer((ctypes.c_byte * 256).from_address(caches[2].data_ptr()), dtype=torch.float32)
    given = {"apart": torch.randn(4), "the same tensor": caches[0], "a view in the middle": caches[1][60:],
             "other storage over the same memory": over[:4]}  # fmt: skip
    assert made.fit([given[where], *caches]) == (where == "apart")


def test_what_is_bound_by_address_must_be_where_it_was(way):
    x, weight, cache = torch.randn(4), torch.nn.Parameter(torch.randn(4)), torch.zeros(4)
    made = slots.Slots([x, weight, cache], {0: None}, [2])
    assert made.fit([x + 1, weight, cache]) and not made.fit([x, weight, torch.zeros(4)])
    before = weight.data
    weight.data = torch.randn(4)
    assert not made.fit([x, weight, cache])
    weight.data = before
    assert made.fit([x, weight, cache])
    torch.utils.swap_tensors(weight, torch.nn.Parameter(torch.randn(4)))
    assert not made.fit([x, weight, cache])
    promised = slots.Slots([x, weight, cache], {0: None}, [2], promised=[1])
    weight.data = torch.randn(4)
    assert promised.fit([x, weight, cache]) and not promised.fit([x, weight, torch.zeros(4)])


def test_an_argument_of_another_class_is_looked_at_all_the_same():
    x, weight = torch.randn(4), torch.nn.Parameter(torch.randn(4))
    made = slots.Slots([x, weight], {0: None}, [])
    assert made.fit([torch.nn.Parameter(x), weight.detach()]) and not made.fit([x, weight.detach() + 1])
