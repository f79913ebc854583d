"""The compiled check of a call's arguments: what it is told of torch's objects is tried out before it is used."""

import ctypes
import gc
import logging
import subprocess
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch
from torch._subclasses import FakeTensorMode

from dynaflow.runtime import native


@pytest.fixture
def fresh():
    """As in a process that has not compiled it yet."""
    native._made.cache_clear()
    yield
    native._made.cache_clear()


def test_is_compiled_once(fresh, monkeypatch):
    runs, real = [], subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: runs.append(args) or real(*args, **options))
    assert native.native() is native.native() is not None and len(runs) == 1


def test_all_threads_get_the_same(fresh, monkeypatch):
    """Of two that ask at once, one compiles: what one finds, the other must not miss."""
    real, compilers = native._compiled, threading.Barrier(2, timeout=1)

    def compiled():
        with suppress(threading.BrokenBarrierError):
            compilers.wait()
            raise OSError("two compile at once")
        return real()

    monkeypatch.setattr(native, "_compiled", compiled)
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda _: native.native(), range(2))
    assert one is other is not None


def test_a_compiler_that_does_not_work_is_not_the_last(fresh, monkeypatch, tmp_path):
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    assert native.native() is not None


@pytest.mark.parametrize("mode", [lambda: torch.device("meta"), FakeTensorMode, torch.inference_mode, torch.no_grad])
def test_the_first_use_may_be_under_a_mode(fresh, mode):
    with mode():
        assert native.native() is not None


def mistake(monkeypatch, one, other):
    """One of torch's functions for another."""
    real = native._facts

    def facts():
        found = real()
        setattr(found, one, getattr(found, other))
        return found

    monkeypatch.setattr(native, "_facts", facts)


def wrong_address(monkeypatch):
    mistake(monkeypatch, "address", "sizes")


def wrong_lie(monkeypatch):
    mistake(monkeypatch, "strides", "sizes")


def no_compiler(monkeypatch):
    monkeypatch.setattr(native.shutil, "which", lambda name: None)


def broken_source(monkeypatch, tmp_path):
    (tmp_path / "native.c").write_text("int fit(")
    monkeypatch.setattr(native, "SOURCE", tmp_path / "native.c")


def another_layout(monkeypatch):
    """No word of a tensor's object is what is looked for."""
    real = native._where
    monkeypatch.setattr(native, "_where", lambda objects, words, end: real(objects, [1 for _ in words], end))


def misplaced(monkeypatch, name, find):
    real = native._facts

    def facts():
        found = real()
        setattr(found, name, find())
        return found

    monkeypatch.setattr(native, "_facts", facts)


def wrong_offset(monkeypatch):
    """Where every tensor has a zero."""
    tensors = [torch.empty(9)[i:] for i in range(4)]
    misplaced(monkeypatch, "offset_at", lambda: native._where([t._cdata for t in tensors], [0] * 4, 176))


def wrong_data(monkeypatch):
    """Where every storage has the same."""
    storages = [torch.empty(9).untyped_storage() for _ in range(4)]
    misplaced(monkeypatch, "data_at", lambda: native._where([s._cdata for s in storages], [storages[0].nbytes()] * 4, 64))
    monkeypatch.setattr(native, "_place", lambda x, i, _: native.Place(i, id(type(x)), x.untyped_storage().nbytes(), x.storage_offset()))


def other_counts(monkeypatch):
    """Nothing is counted in what is looked at."""
    monkeypatch.setattr(native, "_samples", lambda: [torch.nn.Parameter(torch.empty(3)).data])
    monkeypatch.setattr(native, "_facts", lambda: None)
    monkeypatch.setattr(torch.Tensor, "view", lambda self, *shape: None)


def without_the_lock(monkeypatch):
    """A build of Python whose threads run at the same time."""
    monkeypatch.setattr(native.sysconfig, "get_config_var", lambda name: name == "Py_GIL_DISABLED")


FAULTS = [without_the_lock, wrong_address, wrong_lie, no_compiler, broken_source, another_layout, wrong_offset, wrong_data, other_counts]


@pytest.mark.parametrize("fault", FAULTS)
def test_is_not_used_where_something_is_wrong(fresh, monkeypatch, tmp_path, caplog, fault):
    caplog.set_level(logging.INFO, "dynaflow")
    fault(*[monkeypatch, tmp_path][: fault.__code__.co_argcount])
    assert native.native() is None and "looked through in Python" in caplog.text


def test_tensors_are_found_in_their_objects():
    made = native.native()
    assert made is not None
    for tensor in (torch.randn(3), torch.nn.Parameter(torch.randn(2))):
        check = native.FitCheck(made, [tensor], [], [], [0])
        assert check([tensor]) and check((tensor,)) and not check([torch.randn(3)]) and not check([None])
        assert not check([]) and not check({0: tensor}) and not check(tensor), "what is no list of arguments is left to Python"


def lies_in(tensor, storage, offset):
    """The same tensor, elsewhere."""
    tensor.data = torch.empty(0).set_(storage, offset, tensor.shape, tensor.stride())


def test_a_weight_that_fills_its_storage_moves_with_it_alone():
    weight = torch.nn.Parameter(torch.randn(4, 6).t())
    check, first = native.FitCheck(native.native(), [weight], [], [], [0]), weight.untyped_storage()
    twice = torch._C._construct_storage_from_data_pointer(weight.data_ptr(), weight.device, 2 * first.nbytes())
    lies_in(weight, twice, 24)
    assert not check([weight]), "begins where it began, and the weight behind it"
    lies_in(weight, twice, 0)
    assert check([weight]), "another storage over the same memory"
    lies_in(weight, torch.randn(24).untyped_storage(), 0)
    assert not check([weight])
    lies_in(weight, first, 0)
    assert check([weight])


@pytest.mark.parametrize("shape, stride", [((3, 4), (4, 0)), ((3,), (1,)), ((2, 2), (8, 1)), ((), ())])
def test_one_that_does_not_fill_its_storage_is_known_by_its_offset(shape, stride):
    weight = torch.empty(0).set_(torch.randn(40).untyped_storage(), 4, shape, stride)
    check = native.FitCheck(native.native(), [weight], [], [], [0])
    assert check([weight])
    lies_in(weight, weight.untyped_storage(), 5)
    assert not check([weight])


@pytest.mark.parametrize("written", [(), (0,)])
def test_memory_that_is_shared_until_it_is_written_to(written):
    """A lazy clone of a weight leaves it where it is; what is written to moves, if not before."""
    tensor = torch.randn(64)
    check = native.FitCheck(native.native(), [tensor], [], [], [0], written)
    clone = torch._lazy_clone(tensor)
    assert check([tensor]) is not bool(written)
    del clone


def test_words_hold_until_one_changes():
    numbers = (ctypes.c_int64 * 3)(1, 2, 3)
    words = native.Words(native.native(), [(ctypes.addressof(numbers) + 8 * i, numbers[i]) for i in range(3)])
    for i, number in enumerate(numbers):
        assert words.hold()
        numbers[i] = -number
        assert not words.hold()
        numbers[i] = number
    assert words.hold() and native.Words(native.native(), []).hold()


def test_a_class_that_is_gone_is_nobody_elses(fresh):
    """C knows classes by their addresses."""
    kind = type("Mine", (torch.Tensor,), {})
    arg = torch.randn(4).as_subclass(kind)
    check = native.FitCheck(native.native(), [arg], [], [], [0])
    gone = weakref.ref(kind)
    del kind, arg
    gc.collect()
    assert gone() is not None
    del check
    gc.collect()
    assert gone() is None
