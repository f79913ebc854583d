"""The zoo on CUDA streams: the same checks as on the CPU, and two streams seen to overlap."""

import json
from itertools import pairwise

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("timm")
if not torch.cuda.is_available():
    pytest.skip("needs CUDA", allow_module_level=True)

import dynaflow as df
from benchmarks.models import check_generate, check_model
from benchmarks.zoo import ZOO, select

BATCH_SIZES = (8, 17, 1)


@pytest.mark.parametrize("entry", ZOO, ids=lambda e: e.name)
@pytest.mark.parametrize("strategy", ["2-way", "3-way", "branches"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_model(entry, strategy, dtype):
    if entry.is_routed and dtype != torch.float32:
        pytest.skip("routing may flip below fp32")
    (row,) = check_model(entry, [strategy], BATCH_SIZES, device="cuda", dtype=dtype)
    assert row.verdict == "ok"
    assert row.captures <= 2
    assert {c.batch: c.fallback for c in row.cases if c.fallback and c.batch > 1} == {}


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_generate_gives_the_same_tokens(name, cache):
    (entry,) = select(name)
    result = check_generate(entry, cache, device="cuda")
    assert result.verdict == "same tokens"
    assert result.fallbacks == {}


def test_two_streams_overlap(tmp_path):
    """HRNet's resolutions are independent branches; a batch large enough that kernels outlast their launches."""
    (entry,) = select("hrnet_w18_small")
    module = entry.build().cuda()
    fast = df.compile(module, strategy=df.Branches(), strict=True)
    x = torch.randn(128, 3, 256, 256, device="cuda")
    fast(x)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        fast(x)
        torch.cuda.synchronize()
    trace = tmp_path / "trace.json"
    profile.export_chrome_trace(str(trace))

    kernels = [e for e in json.loads(trace.read_text())["traceEvents"] if e.get("cat") == "kernel"]
    streams = {e["args"]["stream"] for e in kernels}
    overlap_us = _overlap_us(kernels)
    busy_us = sum(e["dur"] for e in kernels)
    print(f"{len(kernels)} kernels on {len(streams)} streams, {busy_us:.0f} us in all, {overlap_us:.0f} us with two streams busy")
    assert len(streams) >= 2
    assert overlap_us > 0


def _overlap_us(kernels) -> float:
    """Time during which kernels of at least two streams run."""
    edges = sorted((t, d, k["args"]["stream"]) for k in kernels for t, d in ((k["ts"], 1), (k["ts"] + k["dur"], -1)))
    running: dict[int, int] = {}
    total = 0.0
    for (at, change, stream), (until, _, _) in pairwise(edges):
        running[stream] = running.get(stream, 0) + change
        if sum(n > 0 for n in running.values()) >= 2:
            total += until - at
    return total
