"""What a recording reads: slots that are filled anew, and memory that must be where it was."""

import ctypes

import pytest
import torch

from dynaflow.runtime import slots


@pytest.fixture
def copied(monkeypatch):
    """The driver's copy, on the CPU's memory: how many bytes were copied each time."""
    sizes = []

    def copy(to, at, nbytes, stream):
        if nbytes in refused:
            return 201
        ctypes.memmove(to, at, nbytes)
        sizes.append(nbytes)
        return 0

    refused = set()
    monkeypatch.setattr(slots, "raw_stream", lambda device: 7)

    def make(args, rows=None):
        made = slots.Slots(args, dict.fromkeys(range(len(args)), rows), [])
        made.each = [slot._replace(copy=copy) for slot in made.each]
        return made

    make.sizes, make.refuse = sizes, refused.add
    return make


def is_filled(made, args):
    return all(torch.equal(slot.tensor, arg) for slot, arg in zip(made.each, args))


@pytest.mark.parametrize("make", [lambda: torch.randn(3, 4), lambda: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
                                  lambda: torch.randn(4, 3).t(), lambda: torch.randn(()), lambda: torch.randn(8)[2:5]])  # fmt: skip
def test_what_lies_as_the_slot_does_is_copied_as_one_piece(copied, make):
    args = [make()]
    made = copied(args)
    for _ in range(2):
        args = [make()]
        made.fill(args)
        assert is_filled(made, args)
    assert copied.sizes == [args[0].numel() * 4] * 2


@pytest.mark.parametrize("why", ["it lies otherwise", "there are fewer rows", "the driver refuses", "twin"])
def test_what_cannot_be_copied_as_one_piece_is_torchs_to_copy(copied, why):
    made = copied([torch.randn(6, 4)], rows=(0, 6))
    if why == "the driver refuses":
        copied.refuse(6 * 4 * 4)
    x = torch.randn(4, 6).t() if why == "it lies otherwise" else torch.randn(5, 4) if why == "there are fewer rows" else torch.randn(6, 4)
    made.fill([x])
    assert torch.equal(made.each[0].tensor[: len(x)], x)
    assert bool(copied.sizes) == (why == "twin")


def test_only_what_torch_would_copy_byte_by_byte_is_a_piece(monkeypatch):
    """Here everything is as if on a device."""
    monkeypatch.setattr(slots, "device_copy", lambda: len)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    x = torch.randn(4, dtype=torch.complex64)
    args = [x, x.conj(), x.conj().imag, torch.randn(4, 6)[:, :3], torch.randn(0)]
    made = slots.Slots(args, dict.fromkeys(range(len(args))), [])
    assert [slot.copy is not None for slot in made.each] == [True, False, False, False, False]


@pytest.mark.parametrize("where", ["apart", "the same tensor", "a view in the middle", "other storage over the same memory"])
def test_what_is_copied_must_not_lie_in_what_is_changed(where):
    x, caches = torch.randn(4), [torch.zeros(64) for _ in range(3)]
    args = [x, *caches]
    made = slots.Slots(args, {0: None}, [1, 2, 3])
    assert made.fit(args)
    over = torch.frombuffer((ctypes.c_byte * 256).from_address(caches[2].data_ptr()), dtype=torch.float32)
    given = {"apart": torch.randn(4), "the same tensor": caches[0], "a view in the middle": caches[1][60:],
             "other storage over the same memory": over[:4]}  # fmt: skip
    assert made.fit([given[where], *caches]) == (where == "apart")


def test_what_is_bound_by_address_must_be_where_it_was():
    x, weight, cache = torch.randn(4), torch.nn.Parameter(torch.randn(4)), torch.zeros(4)
    made = slots.Slots([x, weight, cache], {0: None}, [2])
    assert made.fit([x + 1, weight, cache]) and not made.fit([x, weight, torch.zeros(4)])
    weight.data = torch.randn(4)
    assert not made.fit([x, weight, cache])
    promised = slots.Slots([x, weight, cache], {0: None}, [2], promised=[1])
    weight.data = torch.randn(4)
    assert promised.fit([x, weight, cache]) and not promised.fit([x, weight, torch.zeros(4)])
