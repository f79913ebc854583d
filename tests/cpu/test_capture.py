"""What is captured, how often, and what df.compile returns: a twin of the module, a function, a method, a backend."""

import copy
import inspect
import pickle
import threading

import pytest
import torch
from torch import nn
from torch._dynamo.exc import TorchRuntimeError
from torch._opaque_base import OpaqueBase

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


def test_batch_as_a_function_of_the_arguments():
    """Rows of sentences, or all sentences packed into rows: what the batch is, the call says."""

    def function(x, starts=None):
        return torch.relu(x) * 2 if starts is None else torch.relu(x) + starts.sum()

    def batch(arguments):
        return None if arguments.get("starts") is None else {"x": 1}

    fast = df.compile(function, strategy=df.TwoBatch(), batch=batch, strict=True)
    for n in (6, 9):
        x, packed, starts = torch.randn(n, 3), torch.randn(2, n), torch.arange(4.0)
        assert_same(fast(x), function(x))
        assert_same(fast(packed, starts=starts), function(packed, starts=starts))
    assert df.stats(fast).captures == 2 and df.stats(fast).split_calls == df.stats(fast).calls == 4
    with pytest.raises(errors.OptionError, match="names no dim"):
        df.compile(function, strategy=df.TwoBatch(), batch=lambda arguments: -1)(torch.randn(4, 3))
    with pytest.raises(Exception, match="needs df.compile"):
        torch.compile(function, backend="dynaflow", options={"strategy": "two_batch", "batch": batch})(torch.randn(4, 3))


@pytest.mark.parametrize("strategy", ["auto", "sequential"])
def test_batch_may_be_named_where_nothing_is_split(strategy):
    model = Block()
    fast = df.compile(model, strategy=strategy, batch={"x": 0})
    for shape in ((4, 5, 8), (4, 7, 8), (3, 7, 8)):  # captured again once it is warm
        x = torch.randn(shape)
        assert_same(fast(x)["y"], model(x)["y"])


def test_a_dim_of_size_0_is_a_size_of_its_own():
    """Nothing cached yet: the model's code asks for it, and the capture must not take it for any other size."""

    def function(x, cached):
        return x * 2 if cached.numel() == 0 else x + cached.sum()

    fast = df.compile(function, strategy=df.TwoBatch(), strict=True)
    for n, num_cached in ((6, 0), (6, 4), (9, 0), (9, 5), (9, 7)):
        x, cached = torch.randn(n, 3), torch.randn(1, num_cached)
        assert_same(fast(x, cached), function(x, cached))
    assert df.stats(fast).split_calls == 5


def test_auto_takes_any_graph_from_torch_compile():
    """With a strategy that splits, a fixed dim 0 beside a dim that changes is a question; "auto" splits nothing and asks nothing."""
    for options in ({}, {"strategy": "sequential"}):
        fast = torch.compile(lambda x: torch.relu(x) * 2, backend="dynaflow", options=options)
        for n in (3, 4, 5):  # from the second on, dim 1 is dynamic and dim 0 is not
            x = torch.randn(4, n)
            assert_same(fast(x), torch.relu(x) * 2)
    fast = torch.compile(lambda x: torch.relu(x) * 3, backend="dynaflow", options={"strategy": "two_batch"})
    fast(torch.randn(4, 3))
    with pytest.raises(Exception, match="is fixed at 4; the batch could be"):
        fast(torch.randn(4, 5))


def test_a_batch_that_is_a_constant_is_a_fallback():
    x = torch.randn(4, 3)
    before = df.stats().fallbacks.copy()
    fast = torch.compile(lambda x: torch.relu(x) * 4, backend="dynaflow", options={"strategy": "two_batch"})
    assert_same(fast(x), torch.relu(x) * 4)
    (reason,) = df.stats().fallbacks - before
    assert "no batch to split" in reason


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
    with pytest.raises(errors.OptionError, match="unknown mode 'fastest'"):
        df.compile(torch.sin, mode="fastest")
    with pytest.raises(errors.OptionError, match="mode='max-autotune' needs a compiler"):
        df.compile(torch.sin, mode="max-autotune", compiler="eager")
    with pytest.raises(errors.OptionError, match="'reduce-overhead' is about CUDA Graphs"):
        df.compile(torch.sin, strategy="two_batch", mode="reduce-overhead")
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


def test_one_row_of_the_batch_that_is_broadcast():
    """Without guards on sizes Dynamo cannot tell that `x[n // 2 :][:1]` is one row, and refused the model."""
    def last(x):
        return x[x.shape[0] // 2 :][:1] + torch.sin(x)

    fast = df.compile(last, strategy=df.TwoBatch())
    for n in (8, 3, 2, 5, 17, 1):
        x = torch.randn(n, 4)
        assert torch.equal(fast(x), last(x))
    assert df.stats(fast).captures == 2 and df.stats(fast).split_calls == 5


def test_a_model_that_is_wrong_says_so_once():
    fast = df.compile(lambda x: x @ x[:, :2], strategy=df.TwoBatch())
    with pytest.raises(TorchRuntimeError, match="must have same reduction dim") as caught:
        fast(torch.randn(8, 4))
    assert not isinstance(caught.value.__context__, TorchRuntimeError)


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


def test_forward_may_be_replaced_on_an_instance():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    fast = df.compile(model, strategy=df.TwoBatch(), strict=True)
    x = torch.randn(6, 4)
    before = fast(x)
    model[0].forward = lambda x: x * 7
    torch.testing.assert_close(fast(x), model(x))
    assert not torch.allclose(fast(x), before)
    del model[0].forward
    assert torch.equal(fast(x), before)


class Slotted(nn.Linear):
    __slots__ = ("note", "__secret")

    def __init__(self):
        super().__init__(4, 4)
        self.note, self.__secret = "first", 1

    def secret(self):
        return self.__secret


def test_slots_are_the_models_own():
    model = Slotted()
    fast = df.compile(model, strategy=df.TwoBatch(), strict=True)
    assert fast.note == "first" and fast.secret() == 1
    fast.note = "second"
    assert model.note == "second"
    del model.note
    assert not hasattr(fast, "note")
    x = torch.randn(6, 4)
    torch.testing.assert_close(fast(x), model(x))


class Doubling(nn.Linear):
    def forward(self, x, *, bias=0.0):
        return super().forward(x) * 2 + bias

    def generate(self, x):
        return self.forward(self(x), bias=1.0)


def test_forward_of_the_twin_is_compiled():
    model = Doubling(4, 4)
    fast = df.compile(model, strategy=df.TwoBatch(), strict=True)
    x = torch.randn(6, 4)
    torch.testing.assert_close(fast.forward(x, bias=2.0), model.forward(x, bias=2.0))
    assert df.stats(fast).planned_calls == 1 and df.stats(fast).num_part_launches > 0
    torch.testing.assert_close(fast.generate(x), model.generate(x))
    assert df.stats(fast).planned_calls == 3
    assert inspect.signature(fast.forward) == inspect.signature(model.forward)
    model.register_forward_hook(lambda module, args, output: output * 2)
    torch.testing.assert_close(fast.forward(x), model.forward(x))  # without hooks
    torch.testing.assert_close(fast(x), model(x))
    torch.testing.assert_close(Doubling.forward(fast, x), model.forward(x))
    outer = df.compile(lambda x: fast.forward(x) + 1, strategy=df.TwoBatch(), strict=True)
    torch.testing.assert_close(outer(x), model.forward(x) + 1)


def test_what_only_returns_its_input_has_nothing_to_plan():
    def maybe(x, flag):
        return x + 1 if flag else x

    fast = df.compile(maybe, strategy=df.TwoBatch(), strict=True)
    x = torch.randn(1, 4)
    for _ in range(2):
        assert torch.equal(fast(x, False), x)
    x = torch.randn(6, 4)
    assert torch.equal(fast(x, True), x + 1) and df.stats(fast).planned_calls == 1, "Dynamo has not given up on it"
    assert torch.equal(df.compile(nn.Identity(), strategy=df.TwoBatch(), strict=True)(x), x)
    with torch.enable_grad():
        x.requires_grad_()
        assert fast(x, False) is x


def test_rejects_a_call_that_dynamo_leaves_alone(caplog):
    x = torch.randn(6, 4).to_sparse()
    fast = df.compile(lambda x: x.to_dense() + 1, strategy=df.TwoBatch())
    for _ in range(2):
        assert torch.equal(fast(x), x.to_dense() + 1)
    assert list(df.stats(fast).fallbacks.values()) == [2]
    with pytest.raises(errors.FellBack, match="without capturing a graph"):
        df.compile(lambda x: x.to_dense() + 1, strategy=df.TwoBatch(), strict=True)(x)


def test_tensors_are_left_to_other_compilers_as_they_were():
    x = torch.randn(6, 4)
    fast = df.compile(torch.sin, strategy=df.TwoBatch(), strict=True)
    for _ in range(2):
        fast(x)
    assert df.stats(fast).captures == 1 and not x.__dict__
    assert torch.equal(torch.compile(torch.cos, backend="eager")(x), x.cos())


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        return self.layer(x).relu()


@pytest.mark.parametrize(("options", "with_grad", "captures"), [
    # as torch.compile: one for the first size, one for all others
    ({}, False, 2), ({"runtime": "graph"}, False, 2), ({"strategy": df.TwoBatch()}, True, 2), ({}, True, 2),
    # the batch may be cut, or padded: one for all sizes
    ({"strategy": df.TwoBatch()}, False, 1), ({"runtime": "graph", "buckets": "powers"}, False, 1),
])  # fmt: skip
def test_the_batch_is_marked_where_it_may_be_cut(options, with_grad, captures):
    torch._dynamo.reset()  # it remembers which sizes have changed, per class
    model = Halves()
    fast = df.compile(model, **options)
    with torch.set_grad_enabled(with_grad):
        for rows in (4, 6, 9):
            x = torch.randn(rows, 3)
            torch.testing.assert_close(fast(x), model(x))
            # (where Inductor compiles for training, AOT marks what a forward saves, as it does under torch.compile)
            assert not x.__dict__ or (with_grad and not options), "the marks are gone"
    assert df.stats(fast).captures == captures
    if with_grad:
        with torch.enable_grad():
            x, weight = torch.randn(4, 3), model.layer.weight
            torch.testing.assert_close(*(torch.autograd.grad(f(x).sum(), weight) for f in (fast, model)))


def test_explain_cuts_the_batch_of_a_model_with_gradients():
    with torch.enable_grad():
        plan = df.explain(Halves(), (torch.randn(6, 3),), df.TwoBatch()).plan
    assert any(not part.is_whole for launch in plan.launches for _, part in launch.calls)


def test_sizes_of_another_model_are_not_this_one_s():
    """Dynamo makes a dim dynamic that has changed, and knows it by the name of the code: each model has its own."""

    class Other(Halves):
        pass

    torch._dynamo.reset()
    functions = [
        lambda x: x * 2,
        lambda x: x.sin(),
        Halves(),
        Other(),
        Other().forward,
    ]
    for function in functions:
        fast = df.compile(function)
        fast(torch.randn(4, 3))
        fast(torch.randn(6, 3))
        assert df.stats(fast).captures == 2
    again = df.compile(Other())  # as with torch.compile: another instance of a class that has seen both
    again(torch.randn(5, 3))
    again(torch.randn(7, 3))
    assert df.stats(again).captures == 1


class LayerName(OpaqueBase):
    """Known by its value, as a serving engine's names of layers are."""

    def __init__(self, value: str):
        self.value = value

    def __eq__(self, other):
        return isinstance(other, LayerName) and self.value == other.value

    def __hash__(self):
        return hash(self.value)

    def __fx_repr__(self):
        return f"LayerName({self.value!r})", {"LayerName": LayerName}


def test_objects_that_are_known_by_their_value_are_constants():
    from torch._library.opaque_object import register_opaque_type

    if "hoist" not in inspect.signature(register_opaque_type).parameters:
        pytest.skip("this torch hands no such object to a graph")
    register_opaque_type(LayerName, typ="value", hoist=True)
    called = []

    @torch.library.custom_op("dynaflow_test::of_layer", mutates_args=("out",))
    def of_layer(x: torch.Tensor, out: torch.Tensor, name: LayerName) -> None:
        called.append((name.value, x.shape[0]))
        out.copy_(x * len(name.value))

    of_layer.register_fake(lambda x, out, name: None)
    df.register_split_rule(torch.ops.dynaflow_test.of_layer, df.rowwise)

    class Named(nn.Module):
        def __init__(self, name):
            super().__init__()
            self.name = name

        def forward(self, x):
            out = torch.empty_like(x)
            torch.ops.dynaflow_test.of_layer(x + 1, out, LayerName(self.name))
            return out

    model = nn.Sequential(Named("a"), Named("bcd"))
    fast = df.compile(model, strategy=df.TwoBatch(), strict=True)
    x = torch.randn(6, 2)
    assert_same(fast(x), model(x))
    called.clear()
    assert_same(fast(x), (x + 1 + 1) * 3)
    assert sorted(called) == [("a", 3), ("a", 3), ("bcd", 3), ("bcd", 3)]
