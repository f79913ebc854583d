"""Inductor's kernels under plans of several streams, in one recording: the same bits, the caller's memory left alone."""

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn

if not torch.cuda.is_available():
    pytest.skip("needs CUDA", allow_module_level=True)

import dynaflow as df
from dynaflow import region
from dynaflow.measure import CudaClock
from dynaflow.runtime.workspaces import workspace_bytes

DEVICE = torch.device("cuda")
MIB = 2**20


@pytest.fixture(autouse=True)
def _fresh(tmp_path, monkeypatch):
    monkeypatch.setenv("DYNAFLOW_DIR", str(tmp_path))
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


class Branchy(nn.Module):
    """Four branches of convolutions, joined by a concatenation and by products."""

    def __init__(self, width=32):
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, width, k, padding=k // 2, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
                          nn.Conv2d(width, width, k, padding=k // 2), nn.BatchNorm2d(width)) for k in (1, 3, 5, 3))  # fmt: skip
        self.out = nn.Linear(4 * width, 16)

    def forward(self, x):
        y = torch.cat([F.relu(b(x)) for b in self.branches], 1)
        return self.out(y.mean((2, 3))), y


class Adapted(nn.Module):
    """Products with adapters beside them, and attention."""

    def __init__(self, width=256, rank=8):
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(4))
        self.down = nn.ModuleList(nn.Linear(width, rank, bias=False) for _ in range(4))
        self.up = nn.ModuleList(nn.Linear(rank, width, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (self.base[i](x) + self.up[i](self.down[i](x)) for i in range(3))
        heads = [t.unflatten(-1, (4, -1)).transpose(1, 2) for t in (q, k, v)]
        attended = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        return (x + self.base[3](attended) + self.up[3](self.down[3](attended)),)


def branchy(dtype=torch.bfloat16):
    return Branchy().to(DEVICE, dtype).to(memory_format=torch.channels_last)


def image(rows=2, dtype=torch.bfloat16, size=24):
    return torch.randn(rows, 8, size, size, device=DEVICE, dtype=dtype).to(memory_format=torch.channels_last)


def adapted():
    return Adapted().to(DEVICE, torch.bfloat16)


def tokens(rows=2):
    return torch.randn(rows, 16, 256, device=DEVICE, dtype=torch.bfloat16)


def compiled(model, strategy=None, **options):
    return df.compile(model, partition="kernels", strategy=strategy or df.Branches(4), strict=True, **options)


@pytest.fixture(params=["branchy", "adapted"])
def case(request):
    return (branchy().eval(), image) if request.param == "branchy" else (adapted().eval(), tokens)


@pytest.mark.parametrize("num_streams", [2, 4, 8])
def test_recorded_plans_are_bit_equal_to_inductors_order(case, num_streams):
    model, make = case
    fast = compiled(model, df.Branches(num_streams))
    held = []
    for number in range(40):
        x = make()
        got, wanted = fast(x), df.run_serialised(fast, x)
        assert all(torch.equal(a, b) for a, b in zip(got, wanted)), number
        held.append((got, [w.clone() for w in wanted]))
        held = held[-5:]
        assert all(torch.equal(a, b) for pair in held for a, b in zip(*pair)), "outputs that are held stay as they are"
    assert df.stats(fast).planned_calls >= 38 and not df.stats(fast).fallbacks


def test_kernels_run_side_by_side():
    """In the profiler's trace of a replay."""
    model = branchy().eval()
    fast = compiled(model)
    x = image(size=192)
    for _ in range(5):
        fast(x)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        fast(x)
        torch.cuda.synchronize()
    spans = sorted((e.time_range.start, e.time_range.end) for e in trace.events() if e.device_type.name == "CUDA" and e.time_range.end)
    assert sum(b_start < a_end for (_, a_end), (b_start, _) in zip(spans, spans[1:])) >= 2, spans


def test_two_sizes_and_new_inputs(case):
    model, make = case
    fast = compiled(model)
    for rows in (2, 3, 2, 3, 2, 3, 2, 3):
        x = make(rows)
        assert all(torch.equal(a, b) for a, b in zip(fast(x), df.run_serialised(fast, x)))


@torch.enable_grad()
def train(model, call, x):
    model.zero_grad()
    loss = sum(out.float().square().mean() for out in call(x))
    loss.backward()
    return [p.grad.clone() for p in model.parameters()] + [b.clone() for b in model.buffers()] + [loss.detach()]


@pytest.mark.parametrize("make_model, make", [(lambda: branchy(torch.float32), lambda: image(4, torch.float32)), (adapted, tokens)])
def test_training(make_model, make):
    model, twin = make_model(), make_model()
    twin.load_state_dict(model.state_dict())
    fast, plain = compiled(model), compiled(twin)
    is_repeatable = torch.equal(*[train(twin, lambda x: df.run_serialised(plain, x), x)[0] for x in [make()] for _ in range(2)])
    twin.load_state_dict(model.state_dict())
    for number in range(8):
        x = make()
        got, wanted = train(model, fast, x), train(twin, lambda x: df.run_serialised(plain, x), x)
        torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)
        if is_repeatable:
            assert all(torch.equal(a, b) for a, b in zip(got, wanted)), number
    assert df.stats(fast).plans == 2


def test_two_forwards_before_their_backwards():
    model = adapted()
    fast = compiled(model)
    inputs = [tokens() for _ in range(3)]
    wanted = [train(model, lambda x: df.run_serialised(fast, x), x) for x in inputs]
    for _ in range(6):
        with torch.enable_grad():
            losses = [sum(out.float().square().mean() for out in fast(x)) for x in inputs]
        for loss, expected in zip(losses, wanted):
            model.zero_grad()
            loss.backward()
            torch.testing.assert_close([p.grad for p in model.parameters()], expected[:-1], rtol=2e-2, atol=2e-2)


def test_inside_the_callers_own_capture(case):
    model, make = case
    fast = compiled(model)
    x = make()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(4):
            fast(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = fast(x)
    for _ in range(3):
        x.copy_(make())
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, df.run_serialised(fast, x)))


def test_dropout_and_buffers():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)
            self.register_buffer("seen", torch.zeros((), dtype=torch.float32))

        def forward(self, x):
            self.seen += 1
            return (F.dropout(self.a(x), 0.5) + self.b(x),)

    model = Noisy().to(DEVICE)
    fast = compiled(model)
    x = torch.randn(8, 64, device=DEVICE)
    for number in range(1, 7):
        torch.manual_seed(number)
        (got,) = fast(x)
        torch.manual_seed(number)
        (wanted,) = df.run_serialised(fast, x)
        assert torch.equal(got, wanted) and model.seen.item() == 2 * number


def test_auto_chooses_and_says_why(case):
    model, make = case
    before = set(region.living)
    fast = compiled(model, "auto")
    for _ in range(6):
        x = make()
        assert all(torch.equal(a, b) for a, b in zip(fast(x), df.run_serialised(fast, x)))
    (chosen,) = [c.choice for r in set(region.living) - before for c in r.cases.values() if c.choice is not None]
    assert {"Inductor", "one stream", "bound"} <= set(chosen.times_us) and all(c.us > 0 for c in chosen.costs.values())
    text = str(df.explain(model, make(), partition="kernels"))
    print(text)
    assert "chosen" in text and "critical path" in text


@pytest.mark.parametrize("has_workspace", [False, True])
def test_costs_tell_small_kernels_from_large_ones(has_workspace):
    small, large = (torch.randn(n, n, device=DEVICE, dtype=torch.bfloat16) for n in (128, 8192))
    clock = CudaClock(DEVICE)
    a, b = (clock.cost(lambda x=x: torch.mm(x, x) if has_workspace else x.sin(), has_workspace) for x in (small, large))
    print(a, b)
    assert a.us < 20 < b.us and a.share < 0.6 and b.share > 0.75


@pytest.mark.parametrize("count, held_mib", [(0, 0), (2**10, 2), (2**18, 2), (2**20, 20), (2**22, 16)])
def test_what_the_allocator_holds_for_a_kernel_is_told(count, held_mib):
    """Floats that it allocates to work in: a segment of the allocator's, and nothing stays."""
    x, clock = torch.randn(8, device=DEVICE), CudaClock(DEVICE)

    def launch():
        x.add_(1.0)
        if count:
            torch.empty(count, device=DEVICE).fill_(1.0)

    clock.cost(launch)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    assert clock.cost(launch).held_bytes == held_mib * 2**20
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == before


def test_what_is_held_is_asked_while_another_thread_captures():
    """A memory pool of torch's that goes then ends the process, also once a capture has failed."""
    x, clock = torch.randn(8, device=DEVICE), CudaClock(DEVICE)

    def held_bytes():
        return clock._held_bytes(lambda: torch.empty(2**20, device=DEVICE))

    with ThreadPoolExecutor(1) as beside, torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        x.add_(1.0)
        assert beside.submit(held_bytes).result() == 20 * MIB


@pytest.mark.parametrize("is_alone", [False, True])
def test_what_must_not_run_twice_at_once_is_measured_on_one_stream_at_a_time(is_alone):
    x, streams = torch.randn(128, 128, device=DEVICE), set()

    def launch():
        streams.add(torch.cuda.current_stream().cuda_stream)
        x.sin()

    assert CudaClock(DEVICE).cost(launch, is_alone=is_alone).us > 0
    # the current one, and that of recordings
    assert (len(streams) == 2) is is_alone


# -- what libraries keep


@pytest.fixture
def without_workspaces():
    """As if nothing had been multiplied yet."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()


def allocated():
    torch.cuda.synchronize()
    gc.collect()
    return torch.cuda.memory_allocated()


def test_measuring_a_product_makes_no_workspace_but_that_of_recordings(without_workspaces):
    x = torch.randn(256, 256, device=DEVICE, dtype=torch.bfloat16)
    torch.mm(x, x)
    before = allocated()
    CudaClock(DEVICE).cost(lambda: torch.mm(x, x), has_workspace=True)
    # cuBLAS's and cuBLASLt's, which is as large at most
    assert allocated() <= before + 2 * workspace_bytes(DEVICE) + MIB


def convolutions(width=16):
    """Branches without a product."""
    branches = nn.ModuleList(nn.Sequential(nn.Conv2d(8, width, k, padding=k // 2), nn.ReLU(), nn.Conv2d(width, width, k, padding=k // 2))
                             for k in (1, 3, 5, 3)).to(DEVICE).to(memory_format=torch.channels_last)  # fmt: skip

    def model(x):
        return sum(b(x) for b in branches)

    return model


@pytest.mark.parametrize("strategy", [df.Branches(4), "auto"])
def test_streams_without_products_have_no_workspace(without_workspaces, strategy):
    x, fast = image(dtype=torch.float32), compiled(convolutions(), strategy)
    before = allocated()
    for _ in range(6):
        fast(x)
    # slots, outputs of two recordings, what is folded into weights: each below a MiB
    assert allocated() <= before + 8 * MIB


def conv_cases(before):
    return [case for made in set(region.living) - before for case in made.cases.values() if case.kernels is not None]


def test_convolutions_write_where_they_are_told():
    before, x, fast = set(region.living), image(dtype=torch.float32), compiled(convolutions())
    for _ in range(4):
        assert torch.equal(fast(x), df.run_serialised(fast, x))
    (case,) = conv_cases(before)
    assert "extern_kernels.convolution" in case.kernels.targets
    assert not case.kernels.allocated and not case.bound.plan.loose and not case.bound.copies


@pytest.mark.parametrize("benchmark, deterministic, tf32", [(True, False, True), (False, True, False), (False, False, True)])
def test_convolutions_are_bit_equal_under_every_setting(benchmark, deterministic, tf32):
    with torch.backends.cudnn.flags(enabled=True, benchmark=benchmark, deterministic=deterministic, allow_tf32=tf32):
        x, fast = image(4, torch.float32, 48), compiled(convolutions(64))
        for _ in range(4):
            assert torch.equal(fast(x), df.run_serialised(fast, x))


def reserved():
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def test_the_budget_holds(without_workspaces):
    """What the process holds once a call is recorded, weights, inputs and all that the allocator rounds up included, against Inductor's
    own order in a CUDA Graph."""
    before, start = set(region.living), reserved()
    model, x = convolutions(64), image(8, torch.float32, 112)
    plain, given = torch.compile(model), x.clone()
    for _ in range(2):
        plain(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = plain(given)
    graph.replay()
    of_inductor = reserved() - start
    del graph, result, given, plain
    torch._dynamo.reset()
    fast = compiled(model, "auto", max_memory=1.25)
    for _ in range(6):
        fast(x)
    ours = reserved() - start
    (case,) = conv_cases(before)
    print(f"Inductor {of_inductor / MIB:.1f} MiB, ours {ours / MIB:.1f} with {len(case.bound.streams) if case.bound else 0} side streams")
    assert ours <= 1.25 * of_inductor + 2 * MIB


def test_streams_with_products_have_one_each(without_workspaces):
    """The twin: the caller's stream, that of recordings, and the plan's side streams."""
    x, fast = tokens(), compiled(adapted().eval(), df.Branches(3))
    before = allocated()
    for _ in range(6):
        fast(x)
    held = allocated() - before
    # cuBLAS's and cuBLASLt's, which is as large at most
    assert 3 * workspace_bytes(DEVICE) <= held <= 2 * 4 * workspace_bytes(DEVICE) + 8 * MIB


def test_memory_is_given_back():
    model = branchy().eval()
    fast = compiled(model)
    for _ in range(5):
        fast(image())
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(50):
        fast(image())
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + (1 << 20)
