"""Calls after the first go straight to Dynamo: where torch.compile's own wrapper is needed, and what must be as it was behind a call."""

import os
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn
from torch._C._dynamo.eval_frame import set_eval_frame

import dynaflow as df
from dynaflow.capture import backend, of


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        if x.shape[1] == 3:
            raise ValueError("three columns")
        return torch.sin(self.a(x))


def warm(model, **options):
    fast = df.compile(model, **options)
    for _ in range(2):
        fast(torch.randn(4, 4))
    return fast


def is_nothing_left() -> bool:
    """Whether this thread's frames run as Python has them."""
    prior = set_eval_frame(None)
    set_eval_frame(prior)
    return prior is None


@pytest.fixture(params=["sequential", "two parts"])
def fast(request):
    model = Net()
    fast = warm(model, strategy="sequential" if request.param == "sequential" else df.TwoBatch())
    fast.wrapped = []
    entry = of(fast)._call
    wrapper = entry.wrapper
    entry.wrapper = lambda *args, **kwargs: fast.wrapped.append(1) or wrapper(*args, **kwargs)
    yield fast, model
    assert is_nothing_left()


def test_an_ordinary_call_needs_no_wrapper(fast):
    fast, model = fast
    x = torch.randn(4, 4)
    torch.testing.assert_close(fast(x), model(x))
    assert not fast.wrapped


def test_stances_are_the_wrappers_business(fast):
    fast, model = fast
    captures, x = df.stats(fast).captures, torch.randn(4, 4).double()
    model.double()
    with torch.compiler.set_stance("force_eager"):
        torch.testing.assert_close(fast(x), model(x))
    assert fast.wrapped and df.stats(fast).captures == captures


def test_an_error_leaves_nothing_behind(fast):
    fast, model = fast
    with pytest.raises(ValueError, match="three columns"):
        fast(torch.randn(4, 3))
    assert is_nothing_left()
    x = torch.randn(4, 4)
    torch.testing.assert_close(fast(x), model(x))


def test_inside_of_other_compiled_code(fast):
    fast, model = fast

    def around(x):
        torch._dynamo.graph_break()
        return fast(x) + 1

    x = torch.randn(4, 4)
    compiled = torch.compile(around, backend="eager")
    for _ in range(3):
        torch.testing.assert_close(compiled(x), model(x) + 1)


def test_one_compiled_model_in_another():
    inner = Net()
    fast_inner = warm(inner, strategy=df.TwoBatch())

    def outer(x):
        return fast_inner(x) * 2

    fast = warm(outer, strategy=df.TwoBatch())
    x = torch.randn(4, 4)
    torch.testing.assert_close(fast(x), inner(x) * 2)
    assert is_nothing_left()


def test_other_threads_and_a_reset(fast):
    fast, model = fast
    x, found = torch.randn(4, 4), []

    def call() -> None:
        with torch.no_grad():
            found.append((fast(x), is_nothing_left()))

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3 and all(torch.allclose(y, model(x)) and nothing for y, nothing in found)
    torch._dynamo.reset()
    torch.testing.assert_close(fast(x), model(x))


@pytest.mark.parametrize("compile_it", [
    lambda model: df.compile(model, strategy="sequential"), lambda model: df.compile(model, strategy=df.TwoBatch()),
    lambda model: torch.compile(model, backend=backend),
], ids=["as a whole", "in parts", "torch.compile"])  # fmt: skip
def test_calls_are_not_recorded_by_dynamo(compile_it, monkeypatch):
    recorded = []
    monkeypatch.setattr(torch._dynamo.utils, "record_pregraph_bytecode_enter", lambda: recorded.append(1))
    monkeypatch.setattr(torch._dynamo.utils, "record_pregraph_bytecode_exit", lambda _: None)
    assert torch._dynamo.config.record_runtime_overhead
    fast = compile_it(Net())
    for rows in (4, 4, 7, 9):
        fast(torch.randn(rows, 4))
    assert not recorded and torch._dynamo.config.record_runtime_overhead
    plain = torch.compile(Net(), backend="eager")
    plain(torch.randn(4, 4))
    assert recorded


def test_where_dynamo_is_switched_off_the_model_runs():
    code = "import torch, dynaflow as df\nf = df.compile(torch.nn.Linear(2, 2))\n[f(torch.ones(1, 2)) for _ in range(3)]\nprint('ran')"
    ran = subprocess.run([sys.executable, "-c", code], env={**os.environ, "TORCHDYNAMO_DISABLE": "1"}, capture_output=True, text=True)
    assert ran.stdout.split() == ["ran"], ran.stderr[-500:]
