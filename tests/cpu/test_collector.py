"""Python's garbage collector is held while a graph is captured and planned, and no longer."""

import gc
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch
from torch import nn
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import dynaflow as df
from dynaflow import collector, engine, planning
from dynaflow.capture import backend
from dynaflow.inductor import compile as units_compile
from dynaflow.inductor import entries


@pytest.fixture(autouse=True)
def _as_it_was():
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    gc.enable()


def spy(monkeypatch, module, name, seen):
    """Notes whether the collector is on where that function is called."""
    plain = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args, **kwargs: seen.append((name, gc.isenabled())) or plain(*args, **kwargs))


def model():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU())


@pytest.mark.parametrize("is_on", [True, False])
def test_a_capture_and_a_plan_are_left_alone(monkeypatch, is_on):
    seen = []
    spy(monkeypatch, engine, "analyse", seen)
    spy(monkeypatch, planning, "run_strategy", seen)
    fast, x = df.compile(model(), strategy=df.TwoBatch(), strict=True), torch.randn(4, 4)
    (gc.enable if is_on else gc.disable)()
    fast(x)
    assert seen == [("analyse", False), ("run_strategy", False)] and gc.isenabled() is is_on


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("c++")), reason="Inductor needs a C++ compiler on the CPU")
@pytest.mark.xdist_group("inductor")
@pytest.mark.parametrize("strategy", ["two_batch", "sequential"])
def test_inductor_compiles_with_the_collector_on(monkeypatch, tmp_path, strategy):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    seen = []
    for module in (units_compile, entries):
        spy(monkeypatch, module, "compile_fx_inner", seen)
    df.compile(model(), strategy=strategy, compiler="inductor")(torch.randn(4, 4))
    assert seen == [("compile_fx_inner", True)] and gc.isenabled()


def test_the_backend_of_torch_compile_holds_it_too(monkeypatch):
    seen = []
    spy(monkeypatch, engine, "analyse", seen)
    fast = torch.compile(model(), backend="dynaflow", dynamic=True, options={"strategy": df.TwoBatch()})
    fast(torch.randn(4, 4))
    assert seen == [("analyse", False)] and gc.isenabled()


def test_a_backend_whose_end_nobody_tells_lets_go_of_it(monkeypatch):
    """As under torch's `aot_compile`: there is a tracing context, and no callback of Dynamo's."""
    given, seen = [], []
    spy(monkeypatch, engine, "analyse", seen)
    torch.compile(model(), backend=lambda gm, inputs: given.append((gm, inputs)) or gm, dynamic=True)(torch.randn(4, 4))
    ((gm, inputs),) = given
    with tracing(TracingContext(FakeTensorMode(shape_env=ShapeEnv()))):
        backend(gm, inputs, options={"strategy": df.TwoBatch()})
    assert seen == [("analyse", False)] and gc.isenabled()


def test_an_error_lets_go_of_it():
    def broken(x):
        return x @ x  # no such product

    with pytest.raises(Exception, match="x @ x|shapes|size"):
        df.compile(broken, strategy=df.TwoBatch())(torch.randn(4, 3))
    assert gc.isenabled()


def test_who_lets_go_does_so_only_where_it_is_held():
    gc.disable()
    with collector.held(), collector.let_go():
        assert not gc.isenabled(), "somebody else's wish"
    gc.enable()
    with collector.held():
        with collector.let_go():
            assert gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


class Other:
    """A thread of its own, which enters and leaves when it is told to."""

    def __init__(self):
        self._thread, self._entered = ThreadPoolExecutor(1), ExitStack()

    def enter(self, context):
        self._thread.submit(self._entered.enter_context, context).result(30)

    def leave(self):
        self._thread.submit(self._entered.close).result(30)


def test_threads_hold_it_side_by_side():
    first, second = Other(), Other()
    first.enter(collector.held())
    second.enter(collector.held())
    first.leave()
    assert not gc.isenabled(), "the second one is in the midst of it"
    second.leave()
    assert gc.isenabled()


def test_who_compiles_beside_another_threads_plan_leaves_it_on():
    planning, compiling = Other(), Other()
    planning.enter(collector.held())
    compiling.enter(collector.held())
    compiling.enter(collector.let_go())
    assert not gc.isenabled(), "the other one is in the midst of it"
    planning.leave()
    assert gc.isenabled(), "nobody else holds it"
    compiling.leave()
    assert gc.isenabled(), "it stayed off, for good"


def test_what_one_thread_began_another_may_end():
    release = collector.hold()
    ending = Other()
    with collector.held():
        ending.enter(collector.let_go())
        ending._thread.submit(release).result(30)
        assert not gc.isenabled()
    assert gc.isenabled()
    ending.leave()
    assert gc.isenabled()


def test_what_another_thread_holds_is_not_let_go():
    recording = Other()
    recording.enter(collector.held())
    with collector.held():
        with collector.let_go(), collector.held():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert not gc.isenabled(), "a collection may end what it records"
    recording.leave()
    assert gc.isenabled()
