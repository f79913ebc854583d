"""The compiled backend on CUDA: equality, recordings, buckets, alignment, other people's captures."""

import gc
import logging
import threading

import pytest
import torch
from torch import nn

if not torch.cuda.is_available():
    pytest.skip("needs CUDA", allow_module_level=True)

import dynaflow as df
from dynaflow.capture import of
from dynaflow.runtime import feeds, graphs
from dynaflow.runtime.driver import ask, cuda_driver, graph_nodes

DEVICE = torch.device("cuda")


class Block(nn.Module):
    def __init__(self, width=256, vocab=1000):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, ids):
        h = self.embed(ids)
        q = h.view(*h.shape[:-1], 4, -1).transpose(1, 2)
        h = h + nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)
        return h + self.down(torch.nn.functional.gelu(self.up(self.norm(h))))


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1), nn.Conv2d(32, 32, 1)
        self.norm = nn.BatchNorm2d(32).eval()

    def forward(self, x):
        x = torch.relu(self.norm(self.a(x)))
        return (torch.relu(self.b(x)) + self.c(x)).mean((2, 3))


def block():
    torch.manual_seed(0)
    return Block().to(DEVICE, torch.bfloat16).requires_grad_(False)


def ids(n, seq=48):
    return torch.randint(0, 1000, (n, seq), device=DEVICE)


def test_sequential_is_torch_compile_bit_for_bit():
    model, x = block(), ids(8)
    assert torch.equal(df.compile(model)(x), torch.compile(lambda x: model(x))(x))


@pytest.mark.parametrize("runtime", ["auto", "graph"])
@pytest.mark.parametrize("strategy", [df.TwoBatch(), df.NanoBatch(3), df.Branches(3)], ids=str)
def test_compiled_plans_are_bit_equal_to_serialised(strategy, runtime):
    for model, make in ((block(), ids), (Conv().to(DEVICE).to(memory_format=torch.channels_last), image)):
        fast = df.compile(model, strategy=strategy, strict=True, runtime=runtime)
        for n in (8, 8, 8, 17, 17, 17):
            x = make(n)
            got = fast(x)
            assert torch.equal(got, df.run_serialised(fast, x))
            torch.testing.assert_close(got, model(x), atol=5e-2, rtol=5e-2)


def image(n):
    return torch.randn(n, 3, 32, 32, device=DEVICE).to(memory_format=torch.channels_last)


def test_outputs_that_are_held_are_never_overwritten():
    model = block()
    fast = df.compile(model, runtime="graph")
    kept = []
    for step in range(12):
        out = fast(ids(4))
        if step % 3:
            kept.append((out, out.clone()))
    assert all(torch.equal(a, b) for a, b in kept)


@pytest.mark.parametrize("first_kept", range(6))
def test_no_recording_writes_over_another_s_outputs(first_kept):
    """Recordings share a pool: an output that lay in it would be scratch of the next one's replays. Whichever is kept first stays."""
    fast = df.compile(block(), runtime="graph")
    kept, out = [], None
    for step in range(40):
        out = fast(ids(4))  # the last one is held meanwhile: recordings take turns
        if step in (3 + first_kept, 20):
            kept.append((out, out.clone()))
    assert all(torch.equal(a, b) for a, b in kept)


def test_borrowed_outputs_are_one_memory():
    fast = df.compile(block(), runtime="graph", borrow=True)
    addresses = {fast(ids(4)).data_ptr() for _ in range(6)}
    assert len(addresses) <= 2  # the first call runs launch by launch


def test_buckets_pad_where_it_cannot_show(monkeypatch):
    made = []
    plain = graphs.Recording.__init__
    monkeypatch.setattr(graphs.Recording, "__init__", lambda self, *a: (made.append(self), plain(self, *a))[1])
    model = block()
    fast = df.compile(model, runtime="graph", buckets=[4, 16], strict=True)
    for n in (3, 4, 2, 9, 16, 11, 1, 3, 16, 5):
        x = ids(n)
        torch.testing.assert_close(fast(x), model(x), atol=3e-2, rtol=3e-2)
    assert len(made) == 2


@pytest.mark.parametrize("runtime", ["auto", "graph"])
@pytest.mark.parametrize("skip", [0, 1], ids=["rows are not aligned", "nor is the input"])
def test_what_is_copied_to_be_aligned_keeps_its_gaps(runtime, skip):
    """Compiled code takes for granted how its inputs lie; rows of six numbers begin at multiples of eight bytes."""

    def function(x):
        return torch.tanh(x) * 2 + x.sum(1, keepdim=True)

    fast = df.compile(function, strategy=df.NanoBatch(3), runtime=runtime, strict=True)
    for n in (8, 8, 8, 11):
        x = torch.randn(n + 1, 6, device=DEVICE)[skip : skip + n, ::2]
        got = fast(x)
        assert torch.equal(got, df.run_serialised(fast, x))
        torch.testing.assert_close(got, function(x))
    assert df.stats(fast).num_part_launches


def test_inside_the_callers_own_capture():
    model, x = block(), ids(6)
    for runtime in ("auto", "graph"):
        fast = df.compile(model, strategy=df.TwoBatch(), runtime=runtime, strict=True)
        for _ in range(3):
            wanted = fast(x).clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = fast(x)
        out.zero_()
        graph.replay()
        assert torch.equal(out, wanted)


def test_inputs_that_are_not_aligned():
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).to(DEVICE, torch.bfloat16).requires_grad_(False)
    memory = torch.randn(8 * 64 + 1, device=DEVICE, dtype=torch.bfloat16)
    x = memory[1:].view(8, 64)
    assert x.data_ptr() % 16
    for runtime in ("auto", "graph"):
        fast = df.compile(model, strategy=df.TwoBatch(), strict=True, runtime=runtime)
        for _ in range(4):
            torch.testing.assert_close(fast(x), model(x), atol=2e-2, rtol=2e-2)


def test_rows_that_are_not_aligned():
    """Parts that start at odd multiples of 2 bytes: read through a copy, written through one, and listed."""
    model = nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.Linear(5, 3)).to(DEVICE, torch.bfloat16).requires_grad_(False)
    fast = df.compile(model, strategy=df.NanoBatch(3), strict=True)
    x = torch.randn(7, 3, device=DEVICE, dtype=torch.bfloat16)
    torch.testing.assert_close(fast(x), model(x), atol=2e-2, rtol=2e-2)
    assert torch.equal(fast(x), df.run_serialised(fast, x))


def test_training_under_the_engine_is_torch_compiles(caplog):
    model = block().requires_grad_(True)
    with torch.enable_grad(), caplog.at_level(logging.WARNING, "dynaflow"):
        loss = df.compile(model)(ids(4)).float().square().mean()
        loss.backward()
    assert all(p.grad is not None for p in model.parameters()) and not caplog.records
    assert of(df.compile(model)).settings.stats.fallbacks == {}


def test_a_pool_outlives_its_recordings():
    """torch refuses to record into a pool that no recording is left of while something in it is still in use."""
    pool, x, kept = graphs.Pool(), torch.randn(64, 64, device="cuda"), []
    for _ in range(3):
        recorder = graphs.CudaRecorder(pool, x.device)
        with graphs.one_at_a_time:
            recorder.begin()
            kept.append(x + x)
            replay = recorder.end()
        replay()
        assert torch.equal(kept[-1], x + x)
        del recorder, replay


def test_garbage_is_not_collected_while_recording():
    """It may hold other recordings: to destroy one would make this one void."""
    assert gc.isenabled()
    recorder = graphs.CudaRecorder(graphs.Pool(), torch.device("cuda"))
    with graphs.one_at_a_time:
        recorder.begin()
        assert not gc.isenabled()
        recorder.end()
        assert gc.isenabled()
        recorder.begin()
        recorder.abort()
    assert gc.isenabled()


def test_a_capture_that_fails_leaves_earlier_recordings_their_generator():
    """They draw from the device's own generator: torch refuses where that still takes itself to be captured."""
    pool, x = graphs.Pool(), torch.zeros(64, device="cuda")
    earlier, failing, drawn = graphs.CudaRecorder(pool, x.device), graphs.CudaRecorder(pool, x.device), torch.zeros_like(x)
    with graphs.one_at_a_time:
        earlier.begin()
        drawn.copy_(torch.rand_like(x))
        draw = earlier.end()
        failing.begin()
        with pytest.raises(RuntimeError):
            x.sum().item()
        failing.abort()
    seen = []
    for _ in range(2):
        torch.manual_seed(3)
        for _ in range(2):
            draw()
            seen.append(drawn.clone())
    assert torch.equal(seen[0], seen[2]) and torch.equal(seen[1], seen[3]) and not torch.equal(seen[0], seen[1])


def test_outputs_are_overwritten_behind_the_stream_that_got_them():
    """It may go on reading while others call on another stream, and let go of them then."""
    fast, x = df.compile(block(), strategy=df.TwoBatch(), runtime="graph"), ids(4)
    wanted = [fast(x) for _ in range(6)][-1].clone()
    mine, other = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(mine):
        got = fast(x)
    with torch.cuda.stream(other):
        held = fast(ids(4))
    with torch.cuda.stream(mine):
        torch.cuda._sleep(100_000_000)
        read = got.clone()
    at = got.data_ptr()
    del got
    with torch.cuda.stream(other):
        again = fast(ids(4))
    torch.cuda.synchronize()
    assert again.data_ptr() == at != held.data_ptr() and torch.equal(read, wanted)


class Thin(nn.Module):
    """Products that are long and thin: cuBLAS splits them, and adds up the pieces in its workspace."""

    def __init__(self):
        super().__init__()
        # with a bias it is cuBLASLt's, whose workspace is another one
        sizes = [(16384, 64, False), (64, 16384, True), (16384, 64, True), (64, 16384, False)] * 2
        self.layers = nn.Sequential(*(nn.Linear(*size) for size in sizes))

    def forward(self, x):
        return self.layers(x)


def test_models_on_two_streams_share_no_workspace_at_once():
    torch.manual_seed(0)
    models = [Thin().to(DEVICE, torch.bfloat16) for _ in range(2)]
    inputs = [torch.randn(32, 16384, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)]
    fast = [df.compile(m, strategy="sequential", runtime="graph") for m in models]
    streams = [torch.cuda.Stream() for _ in range(2)]
    with torch.no_grad():
        for f, x in zip(fast, inputs):
            for _ in range(3):
                f(x)
        wanted = [f(x).clone() for f, x in zip(fast, inputs)]
        torch.cuda.synchronize()
        got = [[], []]
        for _ in range(50):
            for f, x, stream, found in zip(fast, inputs, streams, got):
                with torch.cuda.stream(stream):
                    found.append(f(x).clone())
        torch.cuda.synchronize()
    assert all(torch.equal(y, w) for found, w in zip(got, wanted) for y in found)


def test_workspaces_that_torch_gives_back_stay_the_recordings():
    """What torch's own CUDA Graphs do between two of our calls."""
    model = Thin().to(DEVICE, torch.bfloat16)
    fast = df.compile(model, strategy="sequential", runtime="graph")
    others, wanted = [], {}
    with torch.no_grad():
        for rows in (32, 48, 64):  # each recorded with what is there after the last time
            x = torch.randn(rows, 16384, device=DEVICE, dtype=torch.bfloat16)
            for _ in range(3):
                wanted[x] = fast(x).clone()
            torch.cuda.synchronize()
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
            # whoever gets memory now, up to what is free in blocks of a workspace's size
            others += [torch.full((n * 2**18,), 3.0, device=DEVICE) for n in (1, 32) for _ in range(8)]
            for x, y in wanted.items():
                assert torch.equal(fast(x), y)
    torch.cuda.synchronize()
    assert all(bool((o == 3.0).all()) for o in others)


def test_inputs_are_copied_by_the_recording_itself(monkeypatch):
    """Each replay reads what its own call gave, though many are launched before the first has run; what lies otherwise is copied too."""
    made, bind = [], feeds.Feeds.bind
    monkeypatch.setattr(feeds.Feeds, "bind", lambda self, graph: bind(self, graph) or made.append(self))

    def function(x, y, z):
        return x * 2 + y, z + 1

    fast = df.compile(function, strategy="sequential", runtime="graph")
    kept = []
    with torch.no_grad():
        for number in range(40):
            x, y = (torch.randn(33, 8, device=DEVICE) for _ in range(2))
            z = torch.randint(100, (7,), device=DEVICE, dtype=torch.int16)
            if number % 4 == 1:
                x = torch.randn(33 * 8 + 1, device=DEVICE)[1:].view(33, 8)
            elif number % 4 == 2:
                x = torch.randn(8, 33, device=DEVICE).t()
            wanted = function(x, y, z)
            kept.append((wanted, [r.clone() for r in fast(x, y, z)]))
            del x, y, z  # their memory is the next call's
    torch.cuda.synchronize()
    assert made and all(one.is_bound for one in made)
    assert all(torch.equal(a, b) for wanted, got in kept for a, b in zip(wanted, got))


def test_a_call_like_the_last_takes_one_look(monkeypatch):
    """Streams and captures included; another stream is looked at once more, then it is the last one."""
    seen, run = [], graphs.Recordings._run
    monkeypatch.setattr(graphs.Recordings, "_run", lambda self, *rest: seen.append(1) or run(self, *rest))
    model, side = nn.Linear(64, 64, device=DEVICE).eval(), torch.cuda.Stream()
    fast = df.compile(model, strategy="sequential", runtime="graph", compiler="eager")

    def num_looks(count):
        seen.clear()
        for _ in range(count):
            x = torch.randn(8, 64, device=DEVICE)
            torch.testing.assert_close(fast(x), model(x))
        return len(seen)

    with torch.no_grad():
        assert num_looks(4) == 1, "the second call is recorded"
        assert num_looks(5) == 0
        with torch.cuda.stream(side):
            assert num_looks(5) == 1
        assert num_looks(5) == 1


def test_a_thread_that_has_not_used_the_device_replays_too():
    model = nn.Linear(64, 64, device=DEVICE).eval()
    fast, results = df.compile(model, strategy="sequential", runtime="graph", compiler="eager"), []
    inputs = [torch.randn(8, 64, device=DEVICE) for _ in range(4)]
    with torch.no_grad():
        for x in inputs:
            fast(x)

        def run():
            with torch.no_grad():
                results.extend(fast(x).clone() for x in inputs)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        torch.cuda.synchronize()
        assert all(torch.allclose(a, model(x), atol=1e-4) for a, x in zip(results, inputs)) and len(results) == 4


@torch.library.custom_op("test_backend::times_one", mutates_args=())
def times_one(x: torch.Tensor) -> torch.Tensor:
    out, stream = torch.empty_like(x), torch.cuda.current_stream().cuda_stream
    ask(cuda_driver().cuMemsetD8Async, out.data_ptr(), 0, out.nbytes, stream)
    return out.add_(1).mul_(x)


@times_one.register_fake
def _(x):
    return torch.empty_like(x)


class Zeroing(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(2048, 2048, bias=False), nn.Linear(2048, 2048, bias=False)

    def forward(self, x):
        return self.b(times_one(self.a(x)))


def num_memsets(graph):
    nodes = graph_nodes(driver := cuda_driver(), driver.CUgraph(graph.raw_cuda_graph()))
    return sum(ask(driver.cuGraphNodeGetType, n) == driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET for n in nodes)


@pytest.mark.parametrize("strategy", [df.Sequential(), df.TwoBatch()], ids=str)
def test_memsets_become_kernels(strategy, monkeypatch):
    counts, replace = [], graphs.without_memsets

    def watched(graph, stream):
        before = num_memsets(graph)
        replace(graph, stream)
        counts.append((before, num_memsets(graph)))

    monkeypatch.setattr(graphs, "without_memsets", watched)
    torch.manual_seed(0)
    model = Zeroing().to(DEVICE, torch.bfloat16).requires_grad_(False)
    compiled, launched = df.compile(model, strategy=strategy, runtime="graph"), df.compile(model, strategy=strategy)
    for _ in range(4):
        x = torch.randn(4096, 2048, device=DEVICE, dtype=torch.bfloat16)
        assert torch.equal(compiled(x), launched(x))
    assert counts and all(before > 0 and after == 0 for before, after in counts)
