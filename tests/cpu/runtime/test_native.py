"""The compiled check of a call's arguments: what it is told of torch's objects is tried out before it is used."""

import logging
import subprocess

import pytest
import torch

from dynaflow.runtime import native


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """As in a process that has not compiled it yet, on a disk that has not seen it."""
    monkeypatch.setenv("DYNAFLOW_DIR", str(tmp_path))
    native.native.cache_clear()
    yield
    native.native.cache_clear()


def test_is_compiled_once(fresh, monkeypatch):
    runs, real = [], subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: runs.append(args) or real(*args, **options))
    assert native.native() is not None
    native.native.cache_clear()
    assert native.native() is not None and len(runs) == 1



def wrong_function(monkeypatch):
    real = native._facts

    def facts():
        found = real()
        found.address = found.sizes
        return found

    monkeypatch.setattr(native, "_facts", facts)


def no_compiler(monkeypatch):
    monkeypatch.setattr(native.shutil, "which", lambda name: None)


def broken_source(monkeypatch, tmp_path):
    (tmp_path / "native.c").write_text("int fit(")
    monkeypatch.setattr(native, "SOURCE", tmp_path / "native.c")


def no_such_object(monkeypatch):
    monkeypatch.setattr(native, "_samples", lambda: [object(), object()])
    monkeypatch.setattr(native, "_offset", lambda value_of: (_ for _ in ()).throw(OSError("laid out otherwise")))


@pytest.mark.parametrize("fault", [wrong_function, no_compiler, broken_source, no_such_object])
def test_is_not_used_where_something_is_wrong(fresh, monkeypatch, tmp_path, caplog, fault):
    caplog.set_level(logging.INFO, "dynaflow")
    fault(*[monkeypatch, tmp_path][: fault.__code__.co_argcount])
    assert native.native() is None and "looked through in Python" in caplog.text


def test_tensors_are_found_in_their_objects():
    made = native.native()
    assert made is not None
    for tensor in (torch.randn(3), torch.nn.Parameter(torch.randn(2))):
        check = native.FitCheck(made, [tensor], [], [], [0])
        assert check([tensor]) and not check([torch.randn(3)]) and not check([None])
