"""Plans on CUDA streams: around a call, races, errors, two threads, priorities, emulated collectives."""

import threading

import pytest
import torch
from torch import nn

if not torch.cuda.is_available():
    pytest.skip("needs CUDA", allow_module_level=True)

import dynaflow as df
from dynaflow import errors
from dynaflow.testing import network

DEVICE = torch.device("cuda")


class Net(nn.Module):
    """Branches, an in-place update and a cache; wide enough that kernels outlast their launches."""

    def __init__(self, width=512):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(width, width) for _ in range(3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x, cache):
        self.calls += 1
        h = torch.relu_(self.a(x)) + torch.sin(self.b(x))
        cache.add_(h)
        return self.c(h) * 2, cache.sum(-1)


class Scatter(df.Strategy):
    """Three uneven parts, each op on the next of four streams: as many waits as a plan can have."""

    def schedule(self, flow):
        flow.split([0.5, 0.3, 0.2])
        number = 0
        while ready := flow.get_ready_ops():
            flow.execute(ready[number % len(ready)], stream=f"s{number % 4}")
            number += 1


STRATEGIES = [df.TwoBatch(), df.NanoBatch(4), df.Branches(3), Scatter()]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_bit_equal_to_serialised_over_many_calls(strategy):
    model = Net().to(DEVICE)
    fast = df.compile(model, strategy=strategy, strict=True)
    for step in range(40):
        n = (64, 512, 37, 4096)[step % 4]
        x, cache = torch.randn(n, 512, device=DEVICE), torch.randn(n, 512, device=DEVICE)
        mine, theirs = cache.clone(), cache.clone()
        got = fast(x, mine)
        wanted = df.run_serialised(fast, x, theirs)
        assert all(torch.equal(g, w) for g, w in zip(got, wanted)) and torch.equal(mine, theirs)
    eager = model(x, cache.clone())
    for g, e in zip(got, eager):
        torch.testing.assert_close(g, e, rtol=1e-3, atol=1e-3)
    assert int(model.calls) == 81 and df.stats(fast).captures == 1


def test_streams_start_after_the_callers_and_it_continues_after_them():
    model = Net().to(DEVICE)
    fast = df.compile(model, strategy=Scatter(), strict=True)
    side = torch.cuda.Stream()
    x = torch.randn(256, 512, device=DEVICE)
    fast(x, torch.zeros(256, 512, device=DEVICE))
    for _ in range(10):
        with torch.cuda.stream(side):
            late = torch.zeros(256, 512, device=DEVICE)
            torch.cuda._sleep(2_000_000)
            late.copy_(x)  # the inputs become right only after a while on the caller's stream
            out, total = fast(late, torch.zeros(256, 512, device=DEVICE))
            kept = out.clone()
        side.synchronize()
        assert torch.cuda.current_stream() != side
        torch.testing.assert_close(kept, model(x, torch.zeros(256, 512, device=DEVICE))[0], rtol=1e-3, atol=1e-3)


def test_outputs_are_never_overwritten_while_referenced():
    fast = df.compile(Net().to(DEVICE), strategy=df.TwoBatch(), strict=True)
    results = [fast(torch.randn(128, 512, device=DEVICE), torch.zeros(128, 512, device=DEVICE))[0] for _ in range(20)]
    kept = [r.clone() for r in results]
    for _ in range(20):
        fast(torch.randn(128, 512, device=DEVICE), torch.zeros(128, 512, device=DEVICE))
    torch.cuda.synchronize()
    assert all(torch.equal(r, k) for r, k in zip(results, kept))


def test_two_threads_with_streams_of_their_own():
    model = Net().to(DEVICE)
    fast = df.compile(model, strategy=Scatter(), strict=True)
    x = torch.randn(64, 512, device=DEVICE)
    fast(x, torch.zeros_like(x))
    failures = []

    def work(seed):
        stream = torch.cuda.Stream()
        with torch.no_grad(), torch.cuda.stream(stream):
            for n in (64, 100, 333) * 5:
                x = torch.randn(n, 512, device=DEVICE)
                got = fast(x, torch.zeros_like(x))[0]
                wanted = df.run_serialised(fast, x, torch.zeros_like(x))[0]
                if not torch.equal(got, wanted):
                    failures.append((seed, n))
            stream.synchronize()

    workers = [threading.Thread(target=work, args=(s,)) for s in range(3)]
    for w in workers:
        w.start()
    for w in workers:
        w.join(120)
    assert not failures and not any(w.is_alive() for w in workers)


def test_peak_memory_is_the_arena_and_the_outputs():
    """Nothing is kept beyond a call, and a call's arena is what was planned."""
    fast = df.compile(Net().to(DEVICE), strategy=df.TwoBatch(), strict=True)
    x, cache = torch.randn(4096, 512, device=DEVICE), torch.zeros(4096, 512, device=DEVICE)
    for _ in range(3):
        fast(x, cache)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        fast(x, cache)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


def test_an_error_in_a_launch_leaves_the_engine_right():
    @torch.library.custom_op("dynaflow_gpu::explode", mutates_args=())
    def explode(x: torch.Tensor, limit: int) -> torch.Tensor:
        if x.shape[0] == limit:
            raise RuntimeError("boom")
        return x + 1

    explode.register_fake(lambda x, limit: torch.empty_like(x))
    df.register_split_rule(torch.ops.dynaflow_gpu.explode, df.rowwise)

    def function(x):
        return torch.ops.dynaflow_gpu.explode(x * 2, 5) * 3

    fast = df.compile(function, strategy=df.TwoBatch(), strict=True)
    good = torch.randn(8, 4, device=DEVICE)
    assert torch.equal(fast(good), function(good))
    caller = torch.cuda.current_stream()
    with pytest.raises(RuntimeError, match="boom") as error:
        fast(torch.randn(10, 4, device=DEVICE))
    assert "raised by" in error.value.__notes__[0] and torch.cuda.current_stream() == caller
    assert torch.equal(fast(good), function(good))


NEAR_FAR = [df.SplitModule("near"), df.SplitModule("far")]


class NearFar(nn.Module):
    def __init__(self):
        super().__init__()
        self.near, self.far = nn.Linear(512, 512), nn.Linear(512, 512)

    def forward(self, x):
        return self.near(x) + self.far(x)


class Shares(df.Strategy):
    """`near` on a few SMs of its own, everything else on the rest."""

    def __init__(self, sms):
        self.sms = sms

    def schedule(self, flow):
        flow.stream("few", sms=self.sms)
        while ready := flow.get_ready_ops():
            flow.execute(ready[0], stream="few" if ready[0].name == "near" else "rest")


WHICH_SM = """
extern "C" __global__ void which_sm(int* out, int cycles) {
    unsigned id;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(id));
    long long start = clock64();
    while (clock64() - start < cycles) {}
    if (threadIdx.x == 0) out[blockIdx.x] = id;
}
"""


@pytest.mark.parametrize("runtime", ["auto", "graph"])
def test_streams_with_a_share_run_on_disjoint_sms(runtime):
    kernel = torch.cuda._compile_kernel(WHICH_SM, "which_sm")

    @torch.library.custom_op(f"dynaflow_gpu::which_sm_{runtime}", mutates_args=())
    def which_sm(x: torch.Tensor) -> torch.Tensor:
        out = torch.full((x.shape[0],), -1, dtype=torch.int32, device=x.device)
        kernel(grid=(x.shape[0], 1, 1), block=(1024, 1, 1), args=(out, 100_000))
        return out

    which_sm.register_fake(lambda x: x.new_empty((x.shape[0],), dtype=torch.int32))

    class Probe(nn.Module):
        def forward(self, x):
            return which_sm(x)

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.near, self.far = Probe(), Probe()

        def forward(self, x):
            return self.near(x), self.far(x)

    total = torch.cuda.get_device_properties(0).multi_processor_count
    fast = df.compile(Two(), strategy=Shares(16), partition=NEAR_FAR, strict=True, runtime=runtime)
    for _ in range(4):  # with runtime="graph", the last ones are replays
        near, far = (set(t.tolist()) for t in fast(torch.zeros(4096, 1, device=DEVICE)))
    print(f"few: {len(near)} SMs, rest: {len(far)} SMs, of {total}")
    assert len(near) == 16 and not near & far and len(far) > total // 2 and -1 not in near | far


def test_rejects_shares_that_do_not_fit():
    x = torch.randn(8, 512, device=DEVICE)
    with pytest.raises(errors.OptionError, match="do not fit into"):
        df.compile(NearFar().to(DEVICE), strategy=Shares(10_000), partition=NEAR_FAR, strict=True)(x)


def test_an_emulated_collective_is_hidden_behind_compute():
    """A timeline of CUDA events: the (emulated) network lane is busy while the compute lane is."""
    net = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(4))).to(DEVICE)
    network.add_collectives(net, ["*"], latency_us=300, gbps=1000)
    fast = df.compile(net, strategy=df.TwoBatch(), partition=["auto", df.SplitFunc(network.all_reduce, kind="network")], strict=True)
    x = torch.randn(8192, 4096, device=DEVICE)
    for _ in range(3):
        fast(x)
    with df.profile() as profiled:
        fast(x)
    timeline = profiled.timeline
    print(f"comm busy {timeline.busy_us('comm'):.0f} us, hidden {timeline.hidden_share('comm'):.2f}, total {timeline.total_us:.0f} us")
    assert timeline.overlap_us() > 0 and timeline.hidden_share("comm") > 0.3


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_recorded_plans_are_bit_equal_over_many_replays(strategy):
    model = Net().to(DEVICE)
    fast = df.compile(model, strategy=strategy, strict=True, runtime="graph")
    caches = {n: torch.zeros(n, 512, device=DEVICE) for n in (64, 333)}
    kept = []
    for step in range(200):
        n = (64, 333)[step % 2]
        x, mine, theirs = torch.randn(n, 512, device=DEVICE), caches[n], caches[n].clone()
        got = fast(x, mine)
        wanted = df.run_serialised(fast, x, theirs)
        assert all(torch.equal(g, w) for g, w in zip(got, wanted)) and torch.equal(mine, theirs)
        kept.append((got[0], got[0].clone()))
    assert all(torch.equal(a, b) for a, b in kept), "outputs of earlier replays are intact"


def test_recorded_plans_from_two_threads():
    fast = df.compile(Net().to(DEVICE), strategy=Scatter(), strict=True, runtime="graph")
    cache = torch.zeros(64, 512, device=DEVICE)
    for _ in range(3):
        fast(torch.randn(64, 512, device=DEVICE), cache)
    failures = []

    def work(seed):
        stream = torch.cuda.Stream()
        with torch.no_grad(), torch.cuda.stream(stream):
            for _ in range(20):
                x = torch.randn(64, 512, device=DEVICE)
                got = fast(x, cache)[0]
                wanted = df.run_serialised(fast, x, torch.zeros_like(x))[0]
                if not torch.equal(got, wanted):
                    failures.append(seed)
            stream.synchronize()

    workers = [threading.Thread(target=work, args=(s,)) for s in range(2)]
    for w in workers:
        w.start()
    for w in workers:
        w.join(120)
    assert not failures


def test_what_waits_for_the_device_cannot_be_recorded(caplog):
    @torch.library.custom_op("dynaflow_gpu::waits", mutates_args=())
    def waits(x: torch.Tensor) -> torch.Tensor:
        return x + float(x.sum().item() * 0 + 1)

    waits.register_fake(lambda x: torch.empty_like(x))
    df.register_split_rule(torch.ops.dynaflow_gpu.waits, df.rowwise)
    fast = df.compile(lambda x: torch.ops.dynaflow_gpu.waits(torch.sin(x)) * 2, strategy=df.TwoBatch(), strict=True, runtime="graph")
    with caplog.at_level("WARNING", "dynaflow"):
        for _ in range(5):
            x = torch.randn(8, 4, device=DEVICE)
            torch.testing.assert_close(fast(x), (torch.sin(x) + 1) * 2)
    assert sum("launched between recordings" in r.getMessage() for r in caplog.records) == 1
    assert torch.randn(3, device=DEVICE).isfinite().all(), "a capture that failed leaves the generator able to draw"


def test_shares_hold_inside_a_recording():
    x = torch.randn(64, 512, device=DEVICE)
    fast = df.compile(NearFar().to(DEVICE), strategy=Shares(16), partition=NEAR_FAR, strict=True, runtime="graph")
    for _ in range(4):
        assert torch.equal(fast(x), df.run_serialised(fast, x))
