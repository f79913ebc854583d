"""Memory that is handed out again: somebody has it as long as anything refers to it."""

import gc
import itertools
import weakref

import pytest
import torch

from dynaflow.runtime import lent


@pytest.fixture
def lend():
    """Makes what is lent, as a recording does; and leaves it."""
    made = []

    def make(outputs, saved=(), copied=()):
        made.append(lent.Lent(outputs, saved, copied))
        return made[-1]

    yield make
    for one in made:
        one.leave()


class Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, saved):
        ctx.save_for_backward(saved)
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0], None


def _view(tensor):
    return tensor.view(2, 2)


def _saved(tensor):
    return Saves.apply(torch.ones(4, requires_grad=True), tensor)


HOLDERS = [lambda t: t, lambda t: [t], _view, torch.Tensor.detach, torch.Tensor.untyped_storage, _saved]


@pytest.mark.parametrize("hold", HOLDERS)
@pytest.mark.parametrize("number", [0, 1, 2])
def test_whoever_refers_to_it_has_it(lend, hold, number):
    """0 and 1 are saved, 2 is the caller's."""
    outputs = [torch.randn(4) for _ in range(3)]
    made = lend(outputs, saved=[0, 1])
    assert made.is_gone()
    for _ in range(2):
        tensors = made.lend()
        assert not made.is_gone() and all(map(torch.equal, tensors, outputs))
        held = hold(tensors[number])
        del tensors
        assert not made.is_gone()
        del held
        assert made.is_gone() and made.counts.hold(), "found without a look at each"


def test_what_is_saved_is_the_same_each_time_and_the_callers_is_new(lend):
    made = lend([torch.randn(4) for _ in range(3)], saved=[1])
    one, other = made.lend(), made.lend()
    assert [a is b for a, b in zip(one, other)] == [False, True, False]
    assert [a.data_ptr() == b.data_ptr() for a, b in zip(one, other)] == [True] * 3


def test_what_shares_memory_with_the_callers_does_not_stand(lend):
    memory = torch.randn(4)
    made = lend([memory, memory.view(2, 2)], saved=[1])
    assert not made.saved and all(a.untyped_storage().data_ptr() == memory.data_ptr() for a in made.lend())


def test_a_backward_lets_go_of_what_was_saved_for_it(lend):
    memory = torch.randn(4)
    made = lend([memory], saved=[0])
    x = torch.randn(4, requires_grad=True)
    y = Saves.apply(x, made.lend()[0])
    y.sum().backward(retain_graph=True)
    assert not made.is_gone()
    y.sum().backward()
    assert made.is_gone() and torch.equal(x.grad, 2 * memory)


@pytest.mark.parametrize("saved", [(), (0,)])
def test_memory_stays_while_somebody_has_it(saved):
    memory = torch.randn(4)
    wanted, there, version = memory.clone(), weakref.ref(memory), lent.version()
    made = lent.Lent([memory], saved)
    assert lent.is_lent(memory) and lent.version() > version
    (held,) = made.lend()
    del memory
    version = lent.version()
    made.leave()
    del made
    gc.collect()
    assert not lent.is_lent(held) and lent.version() > version
    lent.let_go()
    assert there() is not None and torch.equal(held, wanted)
    del held
    lent.let_go()
    gc.collect()
    assert there() is None


@pytest.mark.parametrize("hold", HOLDERS[:-1])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_outputs_that_share_memory_are_held_as_others_are(lend, hold, order):
    """Two halves of one memory, and one alone; the same with outputs that have no memory at all."""
    both, alone = torch.randn(8), torch.randn(4)
    for outputs in ([both[:4], both[4:], alone], [torch.randn(0), torch.randn(0, 3), alone]):
        made = lend([outputs[n] for n in order])
        for number in range(3):
            if not outputs[order[number]].numel():
                continue
            held = hold(made.lend()[number])
            assert not made.is_gone()
            del held
            assert made.is_gone()


def test_an_output_that_is_moved_to_shared_memory_is_the_callers_alone(lend):
    """As by a queue between processes."""
    memory = torch.randn(4)
    made = lend([memory, torch.randn(4)])
    sent, wanted = made.lend()[0], memory.clone()
    sent.share_memory_()
    assert made.is_gone(), "nobody has what a recording writes to"
    memory.fill_(7)
    assert torch.equal(sent, wanted) and torch.equal(made.lend()[0], memory)
    kept = made.lend()
    assert not made.is_gone()
    del kept
    assert made.is_gone()


@pytest.mark.parametrize("saved", [(), (1,)])
def test_what_is_held_beside_it_is_still_held(lend, saved):
    """Another output of the caller's, or what a backward has."""
    made = lend([torch.randn(4), torch.randn(4)], saved)
    sent, held = made.lend()
    for _ in range(2):
        sent.share_memory_()
        assert not made.is_gone()
        sent = made.lend()[0]
    del sent
    assert not made.is_gone()
    del held
    assert made.is_gone()


@pytest.mark.parametrize("shared", [False, True])
def test_nobody_has_what_is_copied(lend, shared):
    """0 is saved, 1 is copied, unless 2, which is lent, has its memory too."""
    outputs = [torch.randn(4), torch.randn(8)[::2], torch.randn(4)]
    outputs[2] = outputs[1][:2] if shared else outputs[2]
    made = lend(outputs, saved=[0], copied=[1])
    saved, copy, other = made.lend()
    assert torch.equal(copy, outputs[1]) and copy.stride() == outputs[1].stride()
    del saved, other
    assert made.is_gone() is not shared
    outputs[1].zero_()
    assert bool(copy.any()) is not shared


def test_what_is_copied_alone_is_copied(lend):
    made = lend([torch.randn(4)], copied=[0])
    held = made.lend()
    assert made.is_gone() and held[0].data_ptr() != made.lend()[0].data_ptr()
