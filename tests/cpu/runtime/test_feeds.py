"""Copies that are part of a recording: told before each replay where to read. The driver is made up."""

import pytest
import torch

from dynaflow.runtime import feeds, native, slots
from tests.cpu.runtime.machine import Machine


def made(args, rows=None):
    machine, held = Machine(), slots.Slots(args, dict.fromkeys(range(len(args)), rows), [])
    pieces = [slot for slot in held.each if slot.is_piece]
    rest = [slot for slot in held.each if not slot.is_piece]
    return machine, held, feeds.Feeds(pieces, rest, native.native(), machine)


def recorded(args, rows=None):
    machine, held, fed = made(args, rows)
    held.fill(args)
    fed.issue()
    fed.bind("a graph")
    assert fed.is_bound
    machine.replay()
    return machine, held, fed


def is_read(machine, held, fed, args):
    assert fed(args)
    machine.replay()
    return all(torch.equal(slot.tensor[: len(arg)] if slot.rows else slot.tensor, arg) for slot, arg in zip(held.each, args))


def some():
    return [torch.randn(3, 4), torch.randint(9, (5,), dtype=torch.int16), torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
            torch.randn(()), torch.randn(4, 6)[:, :3]]  # fmt: skip


def test_complex_tensors_are_read_as_they_are_conjugated():
    """A backward gets either."""
    x = torch.randn(4, dtype=torch.complex64)
    machine, held, fed = recorded([x, torch.randn(4)])
    for each in (x, x.conj(), torch.randn(4, dtype=torch.complex64), torch.randn(4, dtype=torch.complex64).conj()):
        assert is_read(machine, held, fed, [each, torch.randn(4)])


def test_replays_read_what_each_call_gives():
    args = some()
    machine, held, fed = recorded(args)
    assert [word[0] for word in machine.nodes.values()] == [16, 2, 16, 4], "bytes at once; the last is torch's to copy"
    for _ in range(3):
        assert is_read(machine, held, fed, some())
    assert machine.num_set == 3 * 4


@pytest.mark.parametrize("why", ["it lies otherwise", "there are fewer rows", "it is not aligned", "twin"])
def test_what_does_not_lie_as_its_slot_is_torchs_to_copy(why):
    first = [torch.randn(6, 4), torch.randn(6, 4)]
    machine, held, fed = recorded(first, rows=(0, 6))
    x = {"it lies otherwise": torch.randn(4, 6).t(), "there are fewer rows": torch.randn(5, 4),
         "it is not aligned": torch.randn(25)[1:].view(6, 4)}.get(why, torch.randn(6, 4))  # fmt: skip
    assert is_read(machine, held, fed, [x, torch.randn(6, 4)])
    sources = [machine.nodes[1][1] == held.each[0].address, machine.nodes[2][1] == held.each[1].address]
    assert sources == [why != "twin", False], "a slot that was filled is copied onto itself"
    assert is_read(machine, held, fed, [torch.randn(6, 4), x])
    assert is_read(machine, held, fed, [torch.randn(6, 4), torch.randn(6, 4)])


@pytest.mark.parametrize("given", [torch.arange(4, dtype=torch.int32), torch.randn(4, dtype=torch.float16), torch.randn(4).double()])
def test_what_is_of_another_kind_is_torchs_to_copy(given):
    machine, held, fed = recorded([torch.randn(4)])
    assert fed([given])
    machine.replay()
    assert torch.equal(held.each[0].tensor, given.float())


def test_how_far_apart_rows_are_does_not_matter_where_there_is_one():
    machine, held, fed = recorded([torch.randn(1, 5, 8)[:, -1]])
    assert is_read(machine, held, fed, [torch.randn(1, 7, 8)[:, -1]])
    assert machine.nodes[1][1] != held.each[0].address


def test_a_driver_that_refuses_is_said_to():
    machine, _, fed = recorded([torch.randn(4)])
    machine.refuses = True
    assert not fed([torch.randn(4)])


def test_copies_that_are_not_found_read_their_slots():
    args = [torch.randn(4)]
    machine, held, fed = made(args)
    fed.issue()
    fed.bind(None)
    assert not fed.is_bound
    machine.nodes = dict(enumerate(machine.captured))
    held.fill(args)
    machine.replay()
    assert torch.equal(held.each[0].tensor, args[0])


def test_nothing_is_fed_but_on_cuda():
    assert feeds.feeds_of(slots.Slots([torch.randn(4)], {0: None}, []), torch.device("cpu")) is None
    assert feeds.feeds_of(None, torch.device("cuda")) is None
