"""Functions in the place of ops: bodies, chunks that are sent while the next is computed, all-reduce + add + norm in one."""

import threading

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import dynaflow as df
from dynaflow.context import Context
from dynaflow.functions import add_rms_norm as kernel
from dynaflow.functions import chunked
from dynaflow.ir import WHOLE, Flow, Op, Part, Value
from dynaflow.planner import run_strategy
from dynaflow.replacement import body
from dynaflow.runtime.program import Expr, Program, Unit
from dynaflow.testing.flows import random_flow
from dynaflow.testing.network import all_reduce
from tests.cpu.strategies.models import NETWORK, send
from tests.ranks.harness import run


@pytest.fixture(autouse=True)
def no_gradients():
    torch._dynamo.reset()
    with torch.no_grad():
        yield


# -- bodies


class InTheirOwnPlace(df.Strategy):
    """Every op, and every pair of which the second waits for the first alone, is replaced by its own body."""

    def schedule(self, flow):
        flow.split(2)
        while ready := flow.get_ready_ops():
            group = [ready[0]]
            group += [u for u in ready[0].users if u.needs == group and u.part == group[0].part][:1]
            function = flow.body(group)
            flow.execute(group if function else group[0], replace=function)


class Net(nn.Module):
    """Takes a size, changes a cache, returns two values."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, cache):
        h = torch.relu(self.a(x))
        cache.add_(h)
        h = h.view(h.shape[0], 2, 4).transpose(1, 2).reshape(h.shape[0], 8)
        return self.b(h) + x, torch.sin(h)


@pytest.mark.parametrize("runtime", ["threads", "fake"])
def test_a_body_does_what_its_ops_do(runtime):
    net, x = Net().eval(), torch.randn(6, 8)
    partition = [df.SplitModule("a"), df.SplitModule("b"), df.SplitFunc(torch.sin)]
    plan = df.explain(net, (x, torch.zeros(6, 8)), strategy=InTheirOwnPlace(), partition=partition).plan
    assert all(launch.replace for launch in plan.launches)
    fast = df.compile(net, strategy=InTheirOwnPlace(), partition=partition, strict=True, runtime=runtime)
    ours, theirs = torch.zeros(6, 8), torch.zeros(6, 8)
    for rows in (6, 3):
        torch.testing.assert_close(fast(x[:rows], ours[:rows]), net(x[:rows], theirs[:rows]))
        torch.testing.assert_close(ours, theirs)


def test_there_is_no_body_of_ops_on_several_parts_and_without_a_program():
    case = random_flow(3)
    seen = {}

    class Looks(df.Strategy):
        def schedule(self, flow):
            flow.split(2)
            a, *_ = [r for r in flow.get_ready_ops() if not r.part.is_whole]
            seen["one"], seen["two"] = flow.body([a]), flow.body([a, flow.find(a.name, 1)])
            flow.sequential("seen")

    context = Context({"batch_size": case.batch_size})
    run_strategy(case.flow, Looks(), context, make_body=lambda calls: body(case.program, calls))
    assert seen["one"] is not None and seen["two"] is None
    run_strategy(case.flow, Looks(), context)
    assert seen["one"] is None


def by_hand(cut):
    """An op that takes a mask [rows, rows], x [rows, 4] and the number of rows. The input `cut` alone is cut."""
    def value(name, width, role="input"):
        return Value(name, ("s0", width), "float32", "16*s0", 0 if name in (cut, "y") else None, role, name)

    values = value("mask", "s0"), value("x", "4"), value("y", "4", "output")
    flow = Flow("hand", values, (Op("f", "compute", ("mask", "x"), ("y",)),), ("y",), ("s0",), ("s0",))
    unit = Unit(lambda mask, x, rows: (torch.zeros(rows, 4),), ("mask", "x", Expr("s0")), ("y",))
    return body(Program(flow, {"f": unit}, {}), [("f", Part(0, 1, 2))])


def test_the_number_of_rows_is_read_where_the_batch_is_cut():
    """The mask comes first and has the whole batch's size: a part has fewer rows."""
    function = by_hand("x")
    assert function.rows_at == (1, 0) and function(torch.zeros(6, 6), torch.zeros(3, 4))[0].shape == (3, 4)
    assert by_hand("mask").rows_at == (0, 0) and by_hand("nothing") is None


# -- chunks


def case(function):
    """A program of one op of rows of four."""
    x, y = (Value(name, ("s0", "4"), "float32", "16*s0", 0, role, name) for name, role in (("x", "input"), ("y", "output")))
    flow = Flow("rows", (x, y), (Op("f", "compute", ("x",), ("y",)),), ("y",), ("s0",), ("s0",))
    return Program(flow, {"f": Unit(function, ("x",), ("y",))}, {})


def test_a_chunk_is_sent_while_the_next_is_computed():
    """The first collective ends only when the second product has begun: in turn it never would."""
    has_begun = threading.Event()

    def products():
        yield (torch.tensor([0]),)
        has_begun.set()
        yield (torch.tensor([1]),)

    def collective(x):
        assert has_begun.wait(60), "nothing was computed meanwhile"
        return (x + 10,)

    assert [int(x) for (x,) in chunked.on_thread(products(), collective)] == [10, 11]


def test_an_error_in_a_collective_is_raised():
    def collective(x):
        raise ConnectionError("peer is gone")

    with pytest.raises(ConnectionError, match="peer is gone"):
        chunked.on_thread(iter([(torch.zeros(1),)]), collective)


def test_a_chunk_that_is_none_is_refused():
    """It would be spread over the rows of its place."""
    def doubled(x):
        return (x * 2.0,)

    product, first = body(case(doubled), [("f", WHOLE)]), body(case(lambda x: (x[:1],)), [("f", WHOLE)])
    x, out = torch.randn(6, 4), torch.zeros(6, 4)
    chunked.Chunked(product, product, 2)(x, outs=[out])
    assert torch.equal(out, x * 4.0)
    with pytest.raises(AssertionError, match=r"made \(1, 4\) of a chunk, not \(3, 4\)"):
        chunked.Chunked(product, first, 2)(x, outs=[out])


def test_gradients_are_off_on_the_thread_too():
    (seen,) = chunked.on_thread(iter([(torch.zeros(1),)]), lambda x: (torch.is_grad_enabled(),))
    assert seen == (False,)


class Product(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.w, self.how = nn.Parameter(torch.randn(8, 8)), how

    def forward(self, x):
        with df.mark("mm"):
            y = x @ self.w
        z = send(y)
        return torch.tanh(z) + (y if self.how == "read elsewhere" else 0), y if self.how == "returned" else x


@pytest.mark.parametrize("how", ["alone", "read elsewhere", "returned"])
def test_a_product_that_others_need_is_left_alone(how):
    net, x = Product(how), torch.randn(9, 8)
    partition = [NETWORK]
    plan = df.explain(net, (x,), strategy=df.FusedGemm(4, 1), partition=partition).plan
    assert any("chunked" in launch.replace for launch in plan.launches) == (how == "alone")
    assert bool(plan.reason) == (how != "alone")
    fast = df.compile(net, strategy=df.FusedGemm(4, 1), partition=partition)
    torch.testing.assert_close(fast(x), net(x))


def test_in_the_reference_nothing_is_sent_beside(monkeypatch):
    """Or a plan would be held against itself."""
    x = torch.randn(8, 8)
    fast = df.compile(Product("alone"), strategy=df.FusedGemm(4, 1), partition=[NETWORK], strict=True)
    y, _ = fast(x)
    monkeypatch.setattr(chunked, "on_thread", None)
    assert torch.equal(df.run_serialised(fast, x)[0], y)
    with pytest.raises(TypeError):
        fast(x)


def test_chunks_follow_the_context():
    net = Product("alone")
    names = {}
    for rows in (6, 9, 40):
        plan = df.explain(net, (torch.randn(rows, 8),), strategy=df.FusedGemm(4, 3), partition=[NETWORK]).plan
        names[rows] = next(launch.replace for launch in plan.launches if launch.replace)
    assert [name.rpartition("=")[2] for name in names.values()] == ["2)", "3)", "4)"]


def test_results_are_left_where_they_belong():
    """A function that takes `outs` writes into the rows of the merged value; any other one's results are copied there."""
    net, x = Product("alone"), torch.randn(8, 8)
    kept = df.explain(net, (x,), strategy=df.FusedGemm(2, 1), partition=[NETWORK])
    assert not [copy for copy in kept.graphs[0].copies if "chunked" in copy.launch]

    class Plain(df.FusedGemm):
        @staticmethod
        def _function(*args):
            function = df.FusedGemm._function(*args)
            return lambda *inputs: function(*inputs)

    copied = df.explain(net, (x,), strategy=Plain(2, 1), partition=[NETWORK])
    assert [copy.nbytes for copy in copied.graphs[0].copies if "Plain" in copy.launch] == [8 * 8 * 4]


# -- all-reduce, add and norm


class WrittenOut(nn.Module):
    """As Transformers write it."""

    def __init__(self, dim):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(dim)), 1e-3

    def forward(self, x):
        wide = x.to(torch.float32)
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * scaled.to(x.dtype)


class NotQuite(WrittenOut):
    """The mean over another dim."""

    def forward(self, x):
        wide = x.to(torch.float32)
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(1, keepdim=True) + self.eps)).to(x.dtype)


class Centred(WrittenOut):
    def forward(self, x):
        wide = x.to(torch.float32) - 1
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Exponential(WrittenOut):
    """2 ** x in the place of x ** 2."""

    def forward(self, x):
        wide = x.to(torch.float32)
        return self.weight * (wide * torch.rsqrt(torch.pow(2, wide).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Double(WrittenOut):
    def forward(self, x):
        wide = x.to(torch.float64)
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Unscaled(WrittenOut):
    def forward(self, x):
        return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)) * self.eps


class Block(nn.Module):
    def __init__(self, norm, add):
        super().__init__()
        self.up, self.norm, self.add = nn.Linear(8, 8), norm, add

    def forward(self, x):
        y = send(self.up(x))
        x = {"x + y": lambda: x + y, "y + x": lambda: y + x, "x - y": lambda: x - y}[self.add]()
        return self.norm(x) @ self.up.weight + x


def norm_of(norm, add="x + y"):
    """What TokenWeave reads in the ops behind the first all-reduce."""
    found = []

    class Reads(df.TokenWeave):
        def _function(self, *args):
            function = super()._function(*args)
            found.append(function.norm)
            return function

    partition = [NETWORK, df.SplitModule("up"), df.SplitModule("norm")]
    df.explain(Block(norm, add), (torch.randn(6, 8, 8),), strategy=Reads(1, 0), partition=partition)
    assert len(found) == 2 and found[0] == found[1], "one per part"
    return found[0]


@pytest.mark.parametrize(("norm", "eps"), [(WrittenOut(8), 1e-3), (nn.RMSNorm(8, eps=1e-4), 1e-4)], ids=["written out", "torch"])
@pytest.mark.parametrize("add", ["x + y", "y + x"])
def test_reads_an_add_and_an_rms_norm(norm, eps, add):
    found = norm_of(norm, add)
    assert found.eps == eps and {found.reduced, found.residual, found.weight} == {0, 1, 2} and set(found.outs) == {"sum", "norm"}


@pytest.mark.parametrize("norm", [
    nn.LayerNorm(8), NotQuite(8), Centred(8), Exponential(8), Double(8), Unscaled(8), nn.RMSNorm(8), nn.RMSNorm((8, 8), eps=1e-4),
    nn.Tanh(),
], ids=["layer norm", "other dim", "centred", "2 ** x", "float64", "no weight", "eps of the dtype", "two dims", "no norm"])  # fmt: skip
def test_reads_nothing_else(norm):
    assert norm_of(norm) is None


def test_reads_no_other_than_an_add():
    assert norm_of(WrittenOut(8), "x - y") is None


def reference(x, residual, weight, eps):
    total = x + residual
    return total, F.rms_norm(total.float(), total.shape[-1:], None, eps).to(x.dtype) * weight


@pytest.mark.parametrize("norm", [WrittenOut(8), nn.RMSNorm(8, eps=1e-4)], ids=["written out", "torch"])
@pytest.mark.parametrize("add", ["x + y", "y + x"])
def test_the_kernel_s_arguments_and_results_are_at_their_places(monkeypatch, norm, add):
    """With plain torch in the place of the Triton kernel, which needs a GPU."""
    calls = []

    def noted(x, residual, weight, eps, num_ctas, *places):
        calls.append(num_ctas)
        assert all(place is not None for place in places), "both leave the function"
        return tuple(place.copy_(result) for place, result in zip(places, reference(x, residual, weight, eps)))

    monkeypatch.setattr(kernel, "is_on_gpu", lambda x: type(x) is torch.Tensor)
    monkeypatch.setattr(kernel, "_kernels", {})
    monkeypatch.setattr(kernel, "add_rms_norm", noted)
    net, x = Block(norm, add), torch.randn(6, 8)
    partition = [NETWORK, df.SplitModule("up"), df.SplitModule("norm")]
    fast = df.compile(net, strategy=df.TokenWeave(1, 0), partition=partition, strict=True)
    torch.testing.assert_close(fast(x), net(x))
    assert calls == [8, 8]
    monkeypatch.setattr(kernel, "can_add_rms_norm", lambda *tensors: False)
    torch.testing.assert_close(fast(x), net(x))
    assert calls == [8, 8], "the ops themselves"


class Reused(Block):
    """Somebody else reads what was reduced."""

    def forward(self, x):
        y = send(self.up(x))
        return self.norm(x + y) @ self.up.weight + y


class Offset(Block):
    """What is sent is no input as it is."""

    def forward(self, x):
        y = send(self.up(x) * 2)
        return self.norm(x + y) @ self.up.weight


@pytest.mark.parametrize("kind, num_calls", [(Block, 2), (Reused, 0), (Offset, 2)])
@pytest.mark.parametrize("options, wanted", [({}, None), ({"num_ctas": 5}, 5)])
def test_a_collective_s_own_kernel_is_taken_where_it_serves(monkeypatch, kind, num_calls, options, wanted):
    calls = []

    def own(x, numbers, residual, weight, eps, total, normed, num_ctas):
        calls.append((numbers, num_ctas))
        for place, result in zip((total, normed), reference(x, residual, weight, eps)):
            place.copy_(result)

    def one_pass(x, residual, weight, eps, num_ctas, *places):
        return tuple(place.copy_(r) if place is not None else r for place, r in zip(places, reference(x, residual, weight, eps)))

    monkeypatch.setattr(kernel, "is_on_gpu", lambda x: type(x) is torch.Tensor)
    monkeypatch.setattr(kernel, "add_rms_norm", one_pass)
    monkeypatch.setitem(kernel._kernels, all_reduce, own)
    net, x = kind(WrittenOut(8), "x + y"), torch.randn(6, 8)
    partition = [NETWORK, df.SplitModule("up"), df.SplitModule("norm")]
    fast = df.compile(net, strategy=df.TokenWeave(1, 0, **options), partition=partition, strict=True)
    for _ in range(2):
        torch.testing.assert_close(fast(x), net(x))
    assert len(calls) == 2 * num_calls and all(ctas == wanted and numbers for numbers, ctas in calls)


@pytest.mark.parametrize(("shapes", "dtypes", "can"), [
    (((4, 8), (4, 8), (8,)), "fff", True), (((2, 4, 8), (2, 4, 8), (8,)), "bbb", True), (((4, 8), (1, 8), (8,)), "fff", False),
    (((4, 8), (4, 8), (1,)), "fff", False), (((4, 8), (4, 8), (4, 8)), "fff", False), (((4, 8), (4, 8), (8,)), "bbf", False),
    (((4, 8), (4, 8), (8,)), "bfb", False), (((4, 8), (4, 8), (8,)), "ddd", False), (((1, 20_000), (1, 20_000), (20_000,)), "fff", False),
])  # fmt: skip
def test_the_kernel_takes_rows_of_one_shape_and_dtype(shapes, dtypes, can):
    kinds = {"f": torch.float32, "b": torch.bfloat16, "d": torch.float64}
    assert kernel.can_add_rms_norm(*(torch.empty(shape, dtype=kinds[d]) for shape, d in zip(shapes, dtypes))) == can


def test_ctas_follow_the_context():
    net, partition = Block(WrittenOut(8), "x + y"), [NETWORK, df.SplitModule("up"), df.SplitModule("norm")]
    for rows, num_ctas in ((1024, 8), (1025, 16), (5000, 32), (20_000, 64)):
        plan = df.explain(net, (torch.randn(rows, 8),), strategy=df.TokenWeave(), partition=partition).plan
        assert [launch.replace.rpartition("=")[2].split(")")[0] for launch in plan.launches if launch.replace] == [str(num_ctas)] * 2
    plan = df.explain(net, (torch.randn(1024, 8),), strategy=df.TokenWeave(num_ctas=5), partition=partition).plan
    assert any("num_ctas=5" in launch.replace for launch in plan.launches)


# -- real collectives


class RowParallel(nn.Module):
    """A linear layer whose inputs are divided over the ranks."""

    def __init__(self, full):
        super().__init__()
        self.weight = nn.Parameter(full.weight.chunk(dist.get_world_size(), 1)[dist.get_rank()].clone())

    def forward(self, x):
        y = x.chunk(dist.get_world_size(), -1)[dist.get_rank()] @ self.weight.t()
        dist.all_reduce(y)
        return y


class Parallel(nn.Module):
    def __init__(self, full):
        super().__init__()
        self.proj, self.norm = RowParallel(full), WrittenOut(8)

    def forward(self, x):
        x = x + self.proj(x)
        return x + torch.tanh(self.norm(x))


def under_each_strategy():
    torch.manual_seed(0)
    full = [nn.Linear(8, 8, bias=False) for _ in range(2)]
    net = nn.Sequential(*map(Parallel, full))
    partition = [df.SplitFunc(dist.all_reduce, kind="network"), df.SplitModule("*.norm"), df.SplitModule("*.proj")]
    for strategy, name in ((df.FusedGemm(3, 1), "chunked"), (df.TokenWeave(1, 0), "reduce_add_norm"), (df.CommOverlap(2, 1), "")):
        fast = df.compile(net, strategy=strategy, partition=partition, strict=True)
        for rows in (7, 6):
            x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows))
            torch.testing.assert_close(fast(x), net(x))
        plan = df.explain(net, (x,), strategy=strategy, partition=partition).plan
        assert any(name in launch.replace for launch in plan.launches) and not df.stats(fast).fallbacks
    return df.stats(fast).num_part_launches


@pytest.mark.xdist_group("ranks")
def test_two_ranks():
    assert all(num_part_launches > 0 for num_part_launches in run(under_each_strategy, 2))
