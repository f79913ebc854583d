"""Weights on the host: copies beside kernels, within the budget, in a CUDA Graph too."""

import pytest
import torch
from torch import nn

if not torch.cuda.is_available():
    pytest.skip("needs CUDA", allow_module_level=True)

import dynaflow as df

WIDTH, NUM_LAYERS = 2048, 12
WEIGHT_BYTES = WIDTH * WIDTH * 2


def offloaded():
    torch.manual_seed(0)
    layers = [layer for _ in range(NUM_LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))]
    return df.offload(nn.Sequential(*layers).to(torch.bfloat16).requires_grad_(False), "cuda")


@pytest.mark.parametrize("runtime", ["auto", "graph"])
def test_results_and_memory(runtime):
    torch._dynamo.reset()
    model = offloaded()
    assert all(p.is_pinned() for p in model.parameters() if p.numel() * 2 >= WEIGHT_BYTES)
    fast = df.compile(model, strategy=df.Offload(3 * WEIGHT_BYTES), runtime=runtime, strict=True)
    with torch.no_grad():
        for number in range(6):
            x = torch.randn(64, WIDTH, device="cuda", dtype=torch.bfloat16)
            got = fast(x)
            assert torch.equal(got, df.run_serialised(fast, x)), number
            plain = model(x).float()
            assert (got.float() - plain).norm() < 0.02 * plain.norm()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        fast(x)
        torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 6 * WEIGHT_BYTES, "not all twelve at once"
    assert df.stats(fast).planned_calls >= 6


def test_copies_run_beside_kernels():
    torch._dynamo.reset()
    model = offloaded()
    fast = df.compile(model, strategy=df.Offload(4 * WEIGHT_BYTES), runtime="graph", strict=True)
    x = torch.randn(4096, WIDTH, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        for _ in range(4):
            fast(x)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
            fast(x)
            torch.cuda.synchronize()
    spans = [(e.name, e.time_range.start, e.time_range.end) for e in trace.events() if e.device_type.name == "CUDA"]
    copies = [s for s in spans if "HtoD" in s[0]]
    kernels = [s for s in spans if "Memcpy" not in s[0] and "Memset" not in s[0]]
    beside = sum(any(a < d and c < b for _, c, d in kernels) for _, a, b in copies)
    assert len(copies) >= NUM_LAYERS and beside >= NUM_LAYERS // 2, spans
