"""Where operators begin and end: by module, by function, by mark, and without being told."""

import operator
import os
from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dynaflow as df
from dynaflow import errors


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp, self.gate = nn.LayerNorm(8), Mlp(), nn.Linear(8, 8)

    def forward(self, x):
        with df.mark("router", kind="memory"):
            g = torch.sigmoid(self.gate(x))
        return x + rotate(self.mlp(self.norm(x))) * g


class Model(nn.Module):
    def __init__(self, num_layers=2):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def rotate(x):
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def ops(model, partition, x=None):
    flow = df.explain(model, torch.randn(6, 8) if x is None else x, df.Sequential(), partition=partition).flow
    return {op.name: op for op in flow.ops}


def assert_holds(model, partition):
    """Results do not depend on the partition."""
    fast = df.compile(model, strategy=df.TwoBatch(), partition=partition, strict=True, runtime="fake:5")
    x = torch.randn(6, 8)
    torch.testing.assert_close(fast(x), model(x))


def test_split_module_by_name_and_by_class():
    model = Model()
    by_name = ops(model, df.SplitModule("*.mlp", kind="memory"))
    by_class = ops(model, [df.SplitModule(Mlp)])
    for found in (by_name, by_class):
        assert {"layers.0.mlp", "layers.1.mlp"} <= set(found) and not any(".up" in name for name in found)
    assert by_name["layers.0.mlp"].kind == "memory" and by_class["layers.0.mlp"].kind == "compute"
    assert_holds(model, df.SplitModule("*.mlp"))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = nn.Linear(8, 16), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(16, 8)

    def forward(self, x):
        mixed = torch.nn.functional.scaled_dot_product_attention(self.q(x)[..., :8], self.k(x), self.v(x))
        return rotate(self.o(torch.cat((mixed, mixed), -1)))


def test_what_rules_leave_is_named_after_its_products():
    """After the module whose products are all there: not after what comes first, a norm, nor after a part of a module's name."""
    block = nn.Sequential(OrderedDict(norm=nn.LayerNorm(8), attn=Attention(), norm2=nn.LayerNorm(8), mlp=Mlp()))
    x = torch.randn(6, 3, 8)
    found = ops(block, df.SplitFunc(rotate), x)
    assert [name for name in found if "rotate" not in name] == ["attn", "mlp"]
    sdpa = df.SplitFunc(torch.nn.functional.scaled_dot_product_attention)
    cut = [name for name in ops(block, [df.SplitFunc(rotate), sdpa], x) if "rotate" not in name]
    assert cut == ["attn.q", "attn.scaled_dot_product_attention", "attn.o", "mlp"], "of attention two thirds are no attention"
    assert [*ops(nn.Sequential(nn.Tanh(), nn.ReLU()), df.SplitModule("1"))] == ["0", "1"], "without products, after what comes first"


def test_the_innermost_module_wins():
    found = ops(Model(), [df.SplitModule("layers.*"), df.SplitModule("*.up")])
    assert "layers.0.mlp.up" in found and "layers.0" in found


def test_split_func_by_torch_function_python_function_and_op():
    model = Model()
    assert sum("cat" in name for name in ops(model, df.SplitFunc(torch.cat, kind="copy"))) == 2
    assert sum("rotate" in name for name in ops(model, df.SplitFunc(rotate))) == 2
    assert sum("sigmoid" in name for name in ops(model, df.SplitFunc(torch.ops.aten.sigmoid))) == 0, "marked lines keep their mark"
    assert sum("relu" in name for name in ops(model, df.SplitFunc(torch.ops.aten.relu))) == 2
    assert sum("add" in name for name in ops(model, df.SplitFunc(operator.add))) == 2
    assert_holds(model, [df.SplitFunc(rotate), df.SplitFunc(torch.relu), "auto"])


def test_marks_name_their_lines():
    found = ops(Model(), "auto")
    assert found["layers.0.router"].kind == "memory" and found["layers.1.router"].kind == "memory"
    x = torch.randn(3, 8)
    with df.mark("outside"):
        assert torch.equal(x + 1, x + 1), "outside of a capture a mark does nothing"


def test_auto_cuts_at_matrix_products_and_modules():
    found = ops(Model(), "auto")
    assert {"layers.0.mlp.up", "layers.0.mlp.down", "layers.0.norm"} <= set(found)
    assert found["layers.0.mlp.up"].kind == "compute" and found["layers.0.norm"].kind == "memory"
    assert_holds(Model(), "auto")


def test_auto_puts_attention_on_its_own():
    attention = nn.MultiheadAttention(8, 2, batch_first=True)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = attention

        def forward(self, x):
            q = x.view(x.shape[0], -1, 2, 4).transpose(1, 2)
            return nn.functional.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(x.shape) + x

    found = ops(Net(), "auto", torch.randn(4, 3, 8))
    assert found["sdpa"].kind == "compute" and not found["sdpa"].unsplittable


def test_results_do_not_depend_on_rules():
    for rules in ("auto", [], df.SplitModule("layers.0"), [df.SplitModule("*.gate"), df.SplitModule("*.norm")]):
        assert_holds(Model(), rules)


def test_rejects_a_rule_that_matches_nothing():
    with pytest.raises(errors.PartitionError, match="matches nothing") as error:
        ops(Model(), df.SplitModule("*.attention"))
    assert "layers.0" in error.value.why
    with pytest.raises(errors.PartitionError, match="matches nothing"):
        ops(Model(), df.SplitFunc(torch.fft.fft))


def test_rejects_what_is_no_rule():
    with pytest.raises(errors.OptionError, match="unknown kind 'gpu'"):
        df.SplitModule("*.mlp", kind="gpu")
    with pytest.raises(errors.PartitionError, match="takes a class or a name pattern"):
        df.SplitModule(3)
    with pytest.raises(errors.PartitionError, match="takes a function or an op"):
        df.SplitFunc("all_reduce")
    with pytest.raises(errors.OptionError, match="partition got 'fine'"):
        ops(Model(), "fine")
    with pytest.raises(errors.OptionError, match="unknown kind"):
        df.mark("x", kind="fast")
    for rule in (lambda said: df.SplitModule("*.mlp", recordable=said), lambda said: df.SplitFunc(rotate, recordable=said),
                 lambda said: df.mark("x", recordable=said)):  # fmt: skip
        for wrong in (None, "no", 0):
            with pytest.raises(errors.OptionError, match=f"recordable is {wrong!r}"):
                rule(wrong)
        rule(False), rule(True)


def test_splittable_overrides_what_the_engine_sees():
    class Sorted(nn.Module):
        """Sorts rows and puts them back: row by row the same, but the engine cannot know."""

        def forward(self, x):
            order = x.sum(-1).argsort()
            y = x[order] * 2
            return y[order.argsort()]

    model = nn.Sequential(nn.Linear(8, 8), Sorted())
    x = torch.randn(6, 8)
    assert ops(model, df.SplitModule("1"), x)["1"].unsplittable
    rules = df.SplitModule("1", splittable=True)
    assert not ops(model, rules, x)["1"].unsplittable
    assert df.check(model, x, df.TwoBatch(), partition=rules).num_split_ops == 2
    assert ops(model, df.SplitModule("0", splittable=False), x)["0"].unsplittable == "splittable=False in the partition"
    with pytest.raises(errors.PartitionError, match="has no batch axis"):
        ops(lambda x: torch.sum(x * 2, 0) + 1, [df.SplitFunc(torch.sum, splittable=True)], x)


@pytest.fixture
def one_rank(tmp_path):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_all_reduce_is_one_op(one_rank):
    linear = nn.Linear(8, 8)

    def block(x):
        h = linear(x)
        dist.all_reduce(h)
        return torch.relu(h) + x

    found = ops(block, [df.SplitFunc(dist.all_reduce, kind="network")])
    (name,) = [n for n in found if "all_reduce" in n]
    op = found[name]
    assert op.kind == "network" and op.mutates and any(token.startswith("group:") for token in op.uses) and not op.unsplittable
    fast = df.compile(block, strategy=df.TwoBatch(), partition=[df.SplitFunc(dist.all_reduce)], strict=True)
    x = torch.randn(6, 8)
    torch.testing.assert_close(fast(x), torch.relu(linear(x)) + x)
    auto = ops(block, "auto")
    assert [op.kind for op in auto.values()].count("network") == 1


def test_an_op_that_uses_a_process_group_is_a_network_op_of_its_own():
    """A serving engine has all-reduces of its own making."""

    @torch.library.custom_op("dynaflow_test::engines_all_reduce", mutates_args=())
    def engines_all_reduce(x: torch.Tensor, where: str, group_name: str = "") -> torch.Tensor:
        return x.clone()

    engines_all_reduce.register_fake(lambda x, where, group_name="": torch.empty_like(x))
    op = torch.ops.dynaflow_test.engines_all_reduce

    def function(x, w):
        return torch.relu(op(torch.relu(x @ w) + 1, "tp", "the engine's name of it") * 2)

    x, w = torch.randn(8, 4), torch.randn(4, 4)
    df.register_split_rule(op, df.rowwise, uses=lambda call: [f"group:{call['where']}"])
    flow = df.explain(function, (x, w), strategy=df.TwoBatch(), batch={"x": 0}).flow
    (network,) = [o for o in flow.ops if o.kind == "network"]
    assert network.uses == ("group:tp",) and network.name == "engines_all_reduce"
    assert not any(o.unsplittable for o in flow.ops)
    df.register_split_rule(op, df.rowwise, uses=lambda call: [])
    flow = df.explain(function, (x, w), strategy=df.TwoBatch(), batch={"x": 0}).flow
    assert not any(o.uses or o.kind == "network" for o in flow.ops)


def test_async_all_reduce_breaks_the_graph_and_still_works(one_rank):
    def block(x):
        h = x * 2
        work = dist.all_reduce(h, async_op=True)
        work.wait()
        return h + 1

    fast = df.compile(block, strategy=df.TwoBatch())
    x = torch.randn(6, 8)
    assert torch.equal(fast(x), x * 2 + 1)


def test_nothing_overtakes_a_change_of_the_memory_that_it_reads():
    """What does not depend on the batch moves out of its op, unless the op changes what it reads first."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.arange(8.0))

        def forward(self, x):
            y = x * 2
            self.table.mul_(2)
            scale = self.table.sum()
            self.table.add_(1)
            return y * scale, scale + self.table

    for rules in ("auto", [], df.SplitModule("0", splittable=None)):
        model, twin = nn.Sequential(Net()), nn.Sequential(Net())
        fast = df.compile(model, strategy=df.TwoBatch(), partition=rules, strict=True, runtime="fake:lazy")
        for _ in range(3):
            x = torch.randn(6, 8)
            for got, wanted in zip(fast(x), twin(x)):
                assert torch.equal(got, wanted)
            assert torch.equal(model[0].table, twin[0].table)


TABLE = torch.arange(60.0).view(20, 3)


def guidance(x):
    """Both halves of a doubled batch, as classifier-free guidance has it."""
    h = torch.relu(torch.cat([x, 2 * x], 0))
    a, b = h.chunk(2, 0)
    return a + 3 * b


def in_place_on_a_row(x):
    h = torch.relu(x)
    h[0].add_(100)
    return h * 2


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.relu(x) + x[0],
        guidance,
        in_place_on_a_row,
        lambda x: x + TABLE[: x.shape[0]],
        lambda x: torch.sin(torch.relu(x * 2).t().reshape(-1)),
        lambda x: torch.relu(x)[1:] * 2,
        lambda x: torch.relu(x * 1).flip(0) + x,
    ],
    ids=["first row", "guidance", "in place on a row", "rows of a table", "batch inside", "from row 1", "reversed"],
)
def test_a_view_that_mixes_rows_keeps_its_users_whole(function):
    for strategy in (df.TwoBatch(), df.NanoBatch(3)):
        fast = df.compile(function, strategy=strategy, strict=True, runtime="fake:3")
        for n in (6, 9):
            x = torch.randn(n, 3)
            assert torch.equal(fast(x), function(x))


def test_a_functorch_transform_falls_back():
    def rows(x):
        return torch.relu(torch.vmap(lambda r: r.softmax(0))(x * 2)) + x

    fast = df.compile(rows, strategy=df.TwoBatch())
    x = torch.randn(6, 3)
    assert torch.equal(fast(x), rows(x))
    assert any("functorch" in reason for reason in df.stats(fast).fallbacks)


def test_names_of_modules_that_a_function_closes_over():
    net = Model(1)
    assert "layers.0.mlp" in ops(lambda x: net(x) * 2, df.SplitModule("*.mlp"))


def test_names_of_modules_whose_method_was_compiled():
    net = Model(1)
    assert ops(net.forward, df.SplitModule("*.mlp")) == ops(net, df.SplitModule("*.mlp"))


def test_names_of_modules_of_a_class_with_a_getattr():
    class Lenient(Model):
        def __getattr__(self, name):
            return super().__getattr__(name)

    assert ops(Lenient(1), df.SplitModule("*.mlp")) == ops(Model(1), df.SplitModule("*.mlp"))


def test_a_row_changed_twice_in_place_keeps_its_users_whole():
    def function(x):
        h = x * 2
        w = h.select(0, 0).mul_(2).add_(1)
        return torch.relu(h) + w

    fast = df.compile(function, strategy=df.TwoBatch(), strict=True, runtime="fake:3")
    x = torch.randn(6, 3)
    assert torch.equal(fast(x), function(x))


def test_a_method_is_told_from_others_of_its_name():
    found = ops(Model(1), df.SplitFunc(Mlp.forward))
    (name,) = [n for n in found if n.endswith("forward")]
    assert len(found) > 1 and found[name].module.startswith("layers.0.mlp")


def test_many_views_of_two_tensors():
    def weave(a):
        b = a * 2
        c = a * 3
        for _ in range(40):
            b, c = b.view_as(c), c.view_as(b)
        return b + c

    x = torch.randn(4, 3)
    fast = df.compile(weave, strategy=df.TwoBatch(), strict=True)
    assert torch.equal(fast(x), weave(x))
