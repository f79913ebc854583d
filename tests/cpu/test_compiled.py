"""Models under plans whose units Inductor compiled, on the CPU: what eager mode does, bit for bit what the serialised plan does, and
as few compilations as there are distinct units. Found by `python -m dynaflow.testing.programs --compiler inductor` and by hand."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import dynaflow as df
from dynaflow.inductor import units
from dynaflow.runtime.lanes import without_autocast_cache

pytestmark = [
    pytest.mark.skipif(not (shutil.which("g++") or shutil.which("c++")), reason="Inductor needs a C++ compiler on the CPU"),
    pytest.mark.xdist_group("inductor"),
]
D = 8


@pytest.fixture(autouse=True)
def _no_grad():
    torch._dynamo.reset()
    with torch.no_grad():
        yield


@pytest.fixture
def num_compiled(monkeypatch):
    """Counts what Inductor was asked to compile."""
    counts = []
    original = units.compile_graph
    monkeypatch.setattr(units, "compile_graph", lambda *args, **kwargs: counts.append(1) or original(*args, **kwargs))
    return counts


def tensors(*trees):
    return [t for t in pytree.tree_leaves(trees) if isinstance(t, torch.Tensor)]


def check(model, fast, make, batch_sizes, num_calls=1):
    """Results and changed inputs against eager mode and the serialised plan; then once more after the results were changed."""
    for n in (n for n in batch_sizes for _ in range(num_calls)):
        worlds = []
        for function in (model, fast, lambda *args: df.run_serialised(fast, *args)):
            torch.manual_seed(n)
            args = make(n)
            worlds.append((function(*args), args))
        wanted, got, serial = (tensors(*world) for world in worlds)
        for a, b, c in zip(got, wanted, serial, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, check_stride=n > 1)
            assert torch.equal(a, c), "not bit-equal to the serialised plan"
        for world in worlds[:2]:
            for result in tensors(world[0]):
                result.mul_(0.5)
        for a, b in zip(got, wanted):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, msg=f"shares other memory, at batch {n}")


def compiled(model, strategy, **options):
    return df.compile(model, strategy=strategy, compiler="inductor", strict=True, **options)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, D // 2)).permute(2, 0, 3, 1, 4)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    def __init__(self, num_layers):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def tokens(n):
    return (torch.randn(n, 5, D),)


# -- models


def test_equal_layers_of_a_transformer_are_compiled_once(num_compiled):
    model = Transformer(3)
    fast = compiled(model, df.TwoBatch(), partition=[df.SplitModule("layers.*")])
    check(model, fast, tokens, (8, 5, 17, 4))
    # a launch per part that holds all layers: uneven parts and new sizes need no other one (a part of one row would)
    assert len(num_compiled) == 1
    assert df.stats(fast).captures == 1 and df.stats(fast).num_part_launches > 0

    class PerLayer(df.Strategy):
        """Records between layers keep them apart: each is a unit of its own."""

        def schedule(self, flow):
            flow.split(2)
            while ready := flow.get_ready_ops():
                for r in ready:
                    flow.execute(r, stream=f"s{r.part.lo}{r.depth % 2}")

    num_compiled.clear()
    fast = compiled(model, PerLayer(), partition=[df.SplitModule("layers.*")])
    check(model, fast, tokens, (8, 5))
    assert len(num_compiled) == 1, "three equal layers, two parts, two sizes"


@pytest.mark.parametrize("runtime", ["auto", "graph"])
def test_convolutions_and_branches(runtime):
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.wide, self.norm = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

        def forward(self, x):
            x = self.stem(x).relu()
            wide, narrow = self.norm(self.wide(x)).relu(), F.max_pool2d(x, 3, 1, 1)
            return torch.cat([wide, narrow], 1).mean((2, 3)), wide

    model = Branching().eval()
    fast = compiled(model, df.Branches(), runtime=runtime)
    check(model, fast, lambda n: (torch.randn(n, 3, 6, 7),), (2, 5), 3 if runtime == "graph" else 1)


@pytest.mark.parametrize("runtime", ["serial", "graph"])
def test_caches_are_changed_in_place(runtime):
    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.key = nn.Linear(D, D)

        def forward(self, x, cache, position):
            cache[:, position] = self.key(x).unsqueeze(1)
            return torch.einsum("bd,btd->bt", x, cache).softmax(-1), cache

    model = Cached()
    fast = compiled(model, df.NanoBatch(3), runtime=runtime)

    def make(n):
        return torch.randn(n, D), torch.randn(n, 6, D), torch.tensor([2])

    check(model, fast, make, (8, 3), 3 if runtime == "graph" else 1)


# -- memory


def test_arguments_that_share_memory():
    """Inductor takes arguments for memory of their own: `y.mul_` could move before the reads of x."""
    layer = nn.Linear(D, D)

    def model(x, y):
        h = layer(x)
        y.mul_(2)
        return h.relu() + x

    def overlapping(n):
        base = torch.randn(n, 2 * D)
        return base[:, :D], base[:, 4 : 4 + D]

    fast = df.compile(model, strategy=df.TwoBatch(), compiler="inductor")
    check(model, fast, overlapping, (8, 3, 1))


def test_copies_that_are_changed_in_place_and_results_that_are_views():
    layer = nn.Linear(D, D)

    def model(x):
        h = layer(x)
        turned = h.t().contiguous()
        turned.mul_(2)
        return turned.t() + h, h, h[:, ::2], h.view(-1, 2, D // 2), x.contiguous()

    fast = compiled(model, df.TwoBatch())
    check(model, fast, lambda n: (torch.randn(n, D),), (8, 3, 2))


@pytest.mark.parametrize("is_changed", [False, True])
def test_the_batch_is_not_the_outermost_dim(is_changed):
    """Rows of such a value have strides that no tensor of that many rows has: compiled code must get a copy."""
    layer = nn.Linear(D, D)

    def model(x):
        h = x.transpose(0, 1).clone(memory_format=torch.contiguous_format).transpose(0, 1)
        if is_changed:
            h.select(0, 0).add_(0.5)  # over the whole batch
        return layer(h).relu(), h * 2

    fast = compiled(model, df.TwoBatch(), batch=1)
    check(model, fast, lambda n: (torch.randn(3, n, D),), (8, 5))
    assert df.stats(fast).num_part_launches > 0


# -- what is not compiled


def test_a_strategy_that_gives_up_runs_as_one_compiled_launch(num_compiled):
    model = Transformer(2)
    fast = df.compile(model, strategy=df.TwoBatch(min_batch_size=4), compiler="inductor")
    check(model, fast, tokens, (2, 3))
    stats = df.stats(fast)
    assert set(stats.fallbacks) == {"batch smaller than 4"} and len(num_compiled) == 1
    assert stats.num_launches == stats.planned_calls == stats.calls


def test_what_cannot_be_compiled_runs_eagerly_and_says_so_once(caplog):
    layer = nn.Linear(D, D)

    def model(x, scale):
        return layer(x) * scale

    fast = df.compile(model, strategy=df.TwoBatch(), compiler="inductor")
    x = torch.randn(6, D)
    for scale in (1.5, 2.5, 3.5):  # Dynamo makes a symbol of the second one
        torch.testing.assert_close(fast(x, scale), model(x, scale))
    torch.testing.assert_close(fast(x[:4], 4.5), model(x[:4], 4.5))
    said = [r.message for r in caplog.records if "runs eagerly" in r.message]
    assert len(said) == 1 and "is a float" in said[0]
    assert df.stats(fast).planned_calls == df.stats(fast).calls == 4


def test_a_float_argument_of_the_graph_as_a_whole(caplog):
    """Dynamo passes it as a tensor; its fake says nothing about the number."""
    fast = df.compile(lambda x, scale: x * scale / (scale + x.shape[0]), compiler="inductor")
    x = torch.randn(6, D)
    for scale in (1.5, 2.5, 3.5):
        torch.testing.assert_close(fast(x, scale), x * scale / (scale + 6))
    assert not [r for r in caplog.records if "eagerly" in r.message]


# -- between processes

_PROCESS = """
import torch, dynaflow as df
from dynaflow.inductor import compile, kept
from torch._dynamo.utils import counters

class LastTogether(df.Strategy):
    '''sin 0  sdpa 0  sin 1  sdpa 1  mean  sub 0  sub 1      (three units; what sdpa returns stays where it was made)'''
    def schedule(self, flow):
        flow.split(2)
        while ready := flow.get_ready_ops():
            flow.execute(min(ready, key=lambda r: (r.name in ("mean", "sub"), r.name == "sub", r.part)))

def forward(x):
    y = torch.nn.functional.scaled_dot_product_attention(x, x.sin(), x.cos())
    return (y - x.mean(0)).relu() * 2

opened, made = [], []
load, redirect = kept.module, compile.redirect
kept.module = lambda found, path: opened.append(path) or load(found, path)
compile.redirect = lambda *args: made.append(1) or redirect(*args)
fast = df.compile(forward, strategy=LastTogether(), compiler="inductor", strict=True)
with torch.no_grad():
    x = torch.randn(6, 2, 5, 8)
    torch.testing.assert_close(fast(x), forward(x))
print(counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"], len(opened), len(set(opened)), len(made))
"""


def test_a_second_process_finds_what_the_first_one_compiled(tmp_path):
    """Two of their own: settings that tests and benchmarks change in this one tell units apart."""
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache_dir(), "PYTHONPATH": str(Path(df.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    for _ in range(2):
        done = subprocess.run([sys.executable, "-W", "ignore", "-c", _PROCESS], env=env, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    hits, misses, num_opened, num_kept, num_redirected = map(int, done.stdout.split())
    assert not hits and not misses and not num_redirected, "it is among our own kept units, as it is to be called"
    assert num_opened == num_kept == 3, "each is opened once, however often it is asked for"


def test_the_graph_as_a_whole_is_known_to_be_dynamos(monkeypatch):
    """AOT is told which inputs are parameters, as by torch.compile: Inductor then does not look at their addresses in every call."""
    from torch._functorch import aot_autograd

    plain, seen = aot_autograd._try_get_metadata_from_dynamo, []
    monkeypatch.setattr(aot_autograd, "_try_get_metadata_from_dynamo", lambda *a, **k: (seen.append(plain(*a, **k)), seen[-1])[1])
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).requires_grad_(False)
    df.compile(model, compiler="inductor")(torch.randn(4, 8))
    torch.compile(lambda x: model(x))(torch.randn(4, 8))
    (ours, theirs) = [static for _, static in seen]
    assert len(ours) == len(theirs) == 4


KINDS = [{"strategy": "two_batch"}, {"strategy": "two_batch", "runtime": "graph"}, {"strategy": "sequential", "runtime": "graph"}]


@pytest.mark.parametrize("options", KINDS, ids=lambda o: "-".join(o.values()))
def test_an_input_that_is_a_changed_buffer_is_noticed(options):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("buf", torch.zeros(4, 8))

        def forward(self, x):
            self.buf.add_(1)
            return x * 2

    model = Counting()
    fast = df.compile(model, **options)
    with torch.no_grad():
        for _ in range(3):
            fast(torch.randn(4, 8))
        assert not df.stats(fast).fallbacks
        wanted = (model.buf + 1) * 2
        assert torch.equal(fast(model.buf[:]), wanted) and sum(df.stats(fast).fallbacks.values()) == 1


@pytest.mark.parametrize("options", KINDS, ids=lambda o: "-".join(o.values()))
def test_what_autograd_saved_is_seen_to_be_changed(options):
    fast = df.compile(lambda c, x: (c.add_(x), c * 2)[1], compiler="inductor", **options)
    cache, x, weight = torch.ones(4, 8), torch.ones(4, 8), torch.ones(4, 8, requires_grad=True)
    for is_changed in (False, True):
        for _ in range(3):
            with torch.no_grad():
                fast(cache, x)
        with torch.enable_grad():
            loss = (weight * cache).sum()
            if is_changed:
                with torch.no_grad():
                    fast(cache, x)
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    loss.backward()
            else:
                loss.backward()


def test_strict_sequential_recordings_do_not_fall_back_in_silence():
    fast = df.compile(lambda c, x: (c.add_(1), c * 2 + x)[1], strategy="sequential", runtime="graph", strict=True)
    with torch.no_grad():
        for _ in range(3):
            fast(torch.zeros(4, 8), torch.ones(4, 8))
        cache = torch.zeros(4, 8)
        with pytest.raises(df.errors.FellBack, match="share memory"):
            fast(cache, cache[:])



def test_autocast_keeps_no_casts_inside_a_plan():
    """A weight that one stream cast is not ordered before another's use of it: the cache of casts is off inside, and on again after."""
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.is_autocast_cache_enabled()
        with without_autocast_cache():
            assert not torch.is_autocast_cache_enabled()
        assert torch.is_autocast_cache_enabled()
    with without_autocast_cache():
        assert torch.is_autocast_cache_enabled()  # without autocast there is nothing to keep
    inside = []

    def look(x):
        inside.append(torch.is_autocast_cache_enabled())
        return (x + 1).to(torch.bfloat16)

    model = nn.Linear(8, 8).requires_grad_(False)
    fast = df.compile(model, strategy=Replacing(look), runtime="serial", strict=True)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        fast(torch.randn(4, 8))
    assert inside[-1] is False  # before that, the engine tried what the replacement returns


class Replacing(df.Strategy):
    """Everything is one function."""

    def __init__(self, function):
        self.function = function

    def schedule(self, flow):
        while ready := flow.get_ready_ops():
            flow.execute(ready[:1], replace=lambda x, *rest: self.function(x))


def test_what_inductor_cannot_trace_breaks_the_graph_as_it_does_without_us(caplog):
    """A backward that reads a number back: torch.compile compiles what is before and behind it, and so do we."""

    @torch.library.custom_op("dynaflow_test::reads_back", mutates_args=())
    def reads_back(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    reads_back.register_fake(torch.empty_like)
    reads_back.register_autograd(lambda ctx, grad: grad * (2 if grad.sum().item() < 1e9 else 3))

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            return self.linear(x).sin()

    first, last = Block(), Block()

    def model(x):
        return last(reads_back(first(x)))

    def gradients(call):
        for layer in (first, last):
            layer.zero_grad()
        with torch.enable_grad():
            call(torch.ones(3, 8)).sum().backward()
        return [p.grad.clone() for layer in (first, last) for p in layer.parameters()]

    fast = df.compile(model, compiler="inductor")
    torch.testing.assert_close(gradients(fast), gradients(model))
    torch.testing.assert_close(gradients(fast), gradients(model))
    assert df.stats(fast).captures >= 2 and "runs eagerly" not in caplog.text


def test_ops_that_use_state_beside_their_arguments_run_as_they_are(num_compiled):
    """So that layers which differ in nothing but their state's name are compiled once."""

    @torch.library.custom_op("dynaflow_test::with_cache", mutates_args=())
    def with_cache(x: torch.Tensor, layer: str) -> torch.Tensor:
        return x * 2

    with_cache.register_fake(lambda x, layer: torch.empty_like(x))
    df.register_split_rule(torch.ops.dynaflow_test.with_cache, df.rowwise, uses=lambda call: [f"cache:{call['layer']}"])

    def function(x):
        for layer in "abcd":
            x = torch.ops.dynaflow_test.with_cache(torch.sin(x) + 1, layer)
        return x

    fast = df.compile(function, strategy=df.TwoBatch(), compiler="inductor", strict=True)
    x = torch.randn(8, D)
    torch.testing.assert_close(fast(x), function(x))
    assert len(num_compiled) == 1


def makes_copies(y):
    """Inductor sees that the first of these is what it was given, and that two of them are one."""
    return torch.zeros_like(y) + y, y * 2, y * 2


def makes_copies_beside_a_choice(y):
    """Inductor's code for these is not read: what its results are is not known."""
    return *makes_copies(y), torch.cond(y.sum() > 0, lambda y: y + 1, lambda y: y - 1, (y,))


@pytest.mark.parametrize("function", [makes_copies, makes_copies_beside_a_choice])
@pytest.mark.parametrize("runtime", ["serial", "graph"])
@pytest.mark.parametrize("strategy", [df.NanoBatch(3), df.TwoBatch()], ids=["whole", "in parts"])
def test_what_the_graph_makes_is_memory_of_its_own(strategy, runtime, function):
    fast = df.compile(function, strategy=strategy, compiler="inductor", runtime=runtime)
    with torch.no_grad():
        for n in (2, 2, 2, 6):
            y = torch.randn(n, 3)
            given, results = y.clone(), fast(y)
            for wanted, result in zip(function(given), results):
                assert torch.equal(result, wanted)
                result.fill_(7.0)
            assert torch.equal(y, given)
