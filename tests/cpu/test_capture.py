"""What is captured, how often, and what df.compile returns: a twin of the module, a function, a method, a backend."""

import copy
import pickle
import threading

import pytest
import torch
from torch import nn

import dynaflow as df
from dynaflow import errors
from tests.cpu.test_engine import Block, assert_same, no_grad  # noqa: F401 (no_grad is a fixture)


def test_one_capture_serves_batch_one_too_unless_the_model_asks():
    fast = df.compile(Block(), strategy=df.Branches())
    for batch_size in (1, 8, 2):
        fast(torch.randn(batch_size, 5, 8))
    assert df.stats(fast).captures == 1

    def asks(x):
        return x * 2 if x.shape[0] == 1 else x * 3

    fast = df.compile(asks, strategy=df.Branches())
    for batch_size in (8, 1, 2, 17, 1):
        x = torch.randn(batch_size, 3)
        assert torch.equal(fast(x), asks(x))
    assert df.stats(fast).captures == 2


def test_graph_breaks():
    def breaks(x):
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos() + x

    fast = df.compile(breaks, strategy=df.TwoBatch(), strict=True)
    for n in (4, 6):
        x = torch.randn(n, 3)
        assert torch.equal(fast(x), breaks(x))
    assert df.stats(fast).captures == 2 and df.stats(fast).num_part_launches > 0


seen = []


def remember(module, args, output):
    seen.append(type(module).__name__)


def test_the_module_is_still_itself():
    model = Block()
    seen.clear()
    model.register_forward_hook(remember)
    fast = df.compile(model, strategy=df.TwoBatch())
    assert isinstance(fast, Block) and isinstance(fast, nn.Module)
    assert fast.state_dict().keys() == model.state_dict().keys() and fast.a is model.a
    x = torch.randn(4, 5, 8)
    fast(x)
    assert seen == ["Block"], "forward hooks run"
    before = fast(x)["y"]
    model.load_state_dict({k: v * 2 if v.is_floating_point() else v for k, v in model.state_dict().items()})
    after = fast(x)["y"]
    assert_same(after, model(x)["y"])
    assert not torch.allclose(before, after)
    fast.double()
    assert fast(x.double())["y"].dtype == torch.float64
    fast.note = "kept"
    assert model.note == "kept"
    assert type(copy.deepcopy(fast)) is Block and type(pickle.loads(pickle.dumps(fast))) is Block
    assert fast.eval() is fast and not model.training


def test_a_parameter_may_be_replaced_after_compiling():
    model = Block()
    fast = df.compile(model, strategy=df.TwoBatch(), strict=True)
    x = torch.randn(4, 5, 8)
    fast(x)
    model.c = nn.Linear(16, 8)
    assert_same(fast(x)["y"], model(x)["y"])


def test_a_compiled_method_serves_the_whole_object():
    model = Block()
    model.forward = df.compile(model.forward, strategy=df.TwoBatch(), strict=True)
    x = torch.randn(4, 5, 8)
    assert_same(model(x)["y"], Block.forward(model, x)["y"])


def test_batch_dims():
    def function(x, y):
        return (x * 2).sum(0), y + 1

    fast = df.compile(function, strategy=df.TwoBatch(), batch={"x": 1, "y": 0}, strict=True)
    for n in (6, 9):
        x, y = torch.randn(3, n), torch.randn(n, 2)
        assert_same(fast(x, y), function(x, y))
    assert df.stats(fast).captures == 1 and df.stats(fast).num_part_launches > 0
    with pytest.raises(errors.AmbiguousBatch, match="disagree"):
        fast(torch.randn(3, 5), torch.randn(4, 2))
    with pytest.raises(errors.AmbiguousBatch, match="candidates: x"):
        df.compile(function, strategy=df.TwoBatch(), batch={"q": 0})(torch.randn(3, 5), torch.randn(4, 2))


def test_one_plan_for_all_sizes_that_look_the_same():
    runs = []

    class Counted(df.Strategy):
        def schedule(self, flow):
            runs.append(flow.context.tags.get("phase"))
            flow.split(2 if flow.context.batch_size < 8 else 4)
            while ready := flow.get_ready_ops():
                flow.execute(ready[0])

    fast = df.compile(Block(), strategy=Counted(), strict=True)
    for n in (4, 5, 6, 4, 5):
        fast(torch.randn(n, 5, 8))
    assert len(runs) == 1
    fast(torch.randn(9, 5, 8))
    assert len(runs) == 2
    with df.context(phase="decode"):
        fast(torch.randn(4, 5, 8))
        fast(torch.randn(5, 5, 8))
    assert runs[2:] == ["decode"]
    assert df.stats(fast).captures == 1


def test_torch_compile_finds_the_backend():
    assert "dynaflow" in torch._dynamo.list_backends()
    model = Block()
    x = torch.randn(4, 5, 8)
    assert_same(torch.compile(model, backend="dynaflow")(x)["y"], model(x)["y"])
    before = df.stats().num_part_launches
    fast = torch.compile(model, backend="dynaflow", dynamic=True, options={"strategy": df.TwoBatch(), "strict": True})
    assert_same(fast(x)["y"], model(x)["y"])
    assert df.stats().num_part_launches > before


def test_python_floats_may_become_symbols():
    norm = nn.LayerNorm(8, eps=1e-5)
    before = df.stats().num_part_launches
    fast = torch.compile(lambda x, f: norm(x) * f, backend="dynaflow", dynamic=True, options={"strategy": df.TwoBatch(), "strict": True})
    for n, f in ((4, 0.5), (6, 0.25), (6, 2.0)):
        x = torch.randn(n, 8)
        torch.testing.assert_close(fast(x, f), norm(x) * f)
    assert df.stats().num_part_launches > before


def test_options_are_honoured_or_refused():
    x = torch.randn(4, 3)
    with pytest.raises(Exception, match="mode='max-autotune' is a mode of Inductor"):
        torch.compile(torch.sin, backend="dynaflow", mode="max-autotune")(x)
    with pytest.raises(Exception, match="unknown option 'stratgy'"):
        torch.compile(torch.cos, backend="dynaflow", options={"stratgy": 1})(x)
    with pytest.raises(errors.OptionError, match="unknown strategy 'fastest'"):
        df.compile(torch.sin, strategy="fastest")
    with pytest.raises(errors.OptionError, match="unknown runtime"):
        df.compile(torch.sin, runtime="tpu")
    with pytest.raises(errors.OptionError, match="is no strategy"):
        df.compile(torch.sin, strategy=object())
    with pytest.raises(TypeError, match="partitions"):
        df.compile(torch.sin, partitions="auto")


def test_a_recapture_for_another_reason_still_knows_the_batch():
    def function(x, flag):
        return x * 2 if flag else x.relu() * 3

    fast = df.compile(function, strategy=df.TwoBatch(), strict=True)
    for dtype in (torch.float32, torch.float64):
        for flag in (True, False):
            for n in (4, 6):
                x = torch.randn(n, 3, dtype=dtype)
                assert torch.equal(fast(x, flag), function(x, flag))
    assert df.stats(fast).captures == 4
    torch._dynamo.reset()
    assert torch.equal(fast(x, True), function(x, True)), "also after Dynamo forgot everything"


def test_two_batch_symbols_in_one_size_are_one_batch():
    def function(x, mask):
        return x * mask.view(x.shape[0], -1).float()

    fast = df.compile(function, strategy=df.TwoBatch(), strict=True)
    for n in (4, 6):
        x, mask = torch.randn(n, 3), torch.ones(n, 3, dtype=torch.int64)
        assert torch.equal(fast(x, mask), function(x, mask))
    assert df.stats(fast).num_part_launches > 0


def test_a_compiled_model_inside_another_is_part_of_it():
    block = Block()
    inner = df.compile(block, strategy=df.NanoBatch(3), strict=True)
    outer = df.compile(lambda x: inner(x * 2)["y"] + 1, strategy=df.TwoBatch(), strict=True)
    x = torch.randn(6, 5, 8)
    assert_same(outer(x), Block.forward(block, x * 2)["y"] + 1)
    assert df.stats(outer).captures == 1 and df.stats(inner).captures == 0
    again = df.compile(inner, strategy=df.Branches(), strict=True)
    assert_same(again(x)["y"], Block.forward(block, x)["y"])
    assert df.stats(again).captures == 1 and df.stats(inner).captures == 0


def test_builtins_methods_and_copies():
    assert torch.equal(df.compile(torch.sin, strategy=df.TwoBatch(), strict=True)(torch.ones(4)), torch.ones(4).sin())

    class Scaled:
        def __init__(self, factor):
            self.factor = factor

        @df.compile
        def run(self, x):
            return x * self.factor

    assert torch.equal(Scaled(3).run(torch.ones(4)), torch.full((4,), 3.0))
    model = Block()
    model.forward = df.compile(model.forward, strategy=df.TwoBatch(), strict=True)
    x = torch.randn(4, 5, 8)
    model(x)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.c.weight.zero_()
    assert not torch.equal(twin(x)["y"], model(x)["y"])
    assert_same(model(x)["y"], Block.forward(model, x)["y"])


def test_counters_hold_under_threads():
    fast = df.compile(lambda x: x * 2 + 1, strategy=df.TwoBatch(), strict=True)
    x = torch.randn(4, 3)
    fast(x)

    def work():
        with torch.no_grad():
            for _ in range(50):
                fast(x)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for w in workers:
        w.start()
    for w in workers:
        w.join(60)
    assert df.stats(fast).calls == df.stats(fast).planned_calls == 201


def test_a_batch_of_one_that_is_broadcast():
    fast = df.compile(lambda x, t: x + t, strategy=df.Branches(), strict=True)
    t = torch.randn(8, 4)
    x = torch.randn(1, 4)
    assert torch.equal(fast(x, t), x + t)
    x = torch.randn(8, 4)
    assert torch.equal(fast(x, t), x + t)


def test_the_callers_tensors_keep_no_marks():
    x = torch.randn(4, 1, 3)
    df.compile(torch.sin, strategy=df.TwoBatch(), strict=True)(x)
    assert not any("dynamo" in name and "indices" in name for name in x.__dict__)


def test_rejects_what_names_no_batch():
    for batch in (-1, "x", 1.5, {"x": -1}, True):
        with pytest.raises(errors.OptionError, match="names no dim"):
            df.compile(torch.sin, batch=batch)
    with pytest.raises(errors.AmbiguousBatch, match="no argument has a dim 5"):
        df.compile(torch.sin, strategy=df.TwoBatch(), batch=5)(torch.randn(4, 3))


def test_many_threads_may_call_first():
    fast = df.compile(lambda x: torch.sin(x) * 2, strategy=df.TwoBatch(), strict=True)
    x = torch.randn(4, 3)
    results = []

    def first():
        with torch.no_grad():
            results.append(fast(x))

    workers = [threading.Thread(target=first) for _ in range(12)]
    for w in workers:
        w.start()
    for w in workers:
        w.join(60)
    assert len(results) == 12 and df.stats(fast).captures == 1


def test_hooks_that_are_registered_later_run():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    fast = df.compile(model, strategy=df.TwoBatch(), strict=True)
    x = torch.randn(6, 4)
    before = fast(x)
    for module in (model, model[0]):
        handle = module.register_forward_hook(lambda mod, args, out: out * 2)
        torch.testing.assert_close(fast(x), model(x))
        assert not torch.equal(fast(x), before)
        handle.remove()
    torch.testing.assert_close(fast(x), before)
