"""Strategies of the field on CUDA: the kernels that they bring, and their results on a small tensor-parallel model."""

import pytest
import torch
from torch import nn

if not torch.cuda.is_available():
    pytest.skip("needs CUDA", allow_module_level=True)

import dynaflow as df
from dynaflow.functions.add_rms_norm import add_rms_norm
from dynaflow.testing.hold import hold_norm
from dynaflow.testing.network import all_reduce

PARTITION = [df.SplitFunc(all_reduce, kind="network"), *(df.SplitModule(f"*.{name}") for name in ("o", "norm", "up"))]


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.o, self.norm, self.up = nn.Linear(dim, dim), nn.RMSNorm(dim, eps=1e-5), nn.Linear(dim, dim)

    def forward(self, x):
        x = x + all_reduce(self.o(x), 5.0, 0.0)
        return x + torch.tanh(self.up(self.norm(x)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (7, 4096), (300, 5120), (64, 8192), (3, 1000)])
@pytest.mark.parametrize("num_ctas", [1, 8, 64])
def test_add_and_norm_in_one_pass(dtype, rows, size, num_ctas):
    x, residual = torch.randn(2, rows, size, device="cuda", dtype=dtype)
    weight = torch.rand(size, device="cuda", dtype=dtype)
    total, normed = add_rms_norm(x, residual, weight, 1e-5, num_ctas)
    assert torch.equal(total, x + residual)
    wide = total.float()
    expected = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(dtype)
    # two roundings, each of a last bit
    torch.testing.assert_close(normed, expected, rtol=3 * torch.finfo(dtype).eps, atol=1e-5)


def test_add_and_norm_leave_results_where_they_are_told():
    x, residual, *places = torch.randn(4, 8, 64, device="cuda")
    total, normed = add_rms_norm(x, residual, torch.ones(64, device="cuda"), 1e-5, 4, *places)
    assert total is places[0] and normed is places[1] and torch.equal(total, x + residual)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (7, 4096), (300, 5120), (65, 8192), (3, 1000), (9, 16384)])
@pytest.mark.parametrize("sms", [1, 16])
def test_add_and_norm_while_sms_are_held(dtype, rows, size, sms):
    x, residual = torch.randn(2, rows, size, device="cuda", dtype=dtype)
    weight = torch.rand(size, device="cuda", dtype=dtype)
    total, normed = torch.full((2, rows, size), float("nan"), device="cuda", dtype=dtype)
    hold_norm(x, residual, weight, 1e-5, total, normed, 20.0, sms)
    assert torch.equal(total, x + residual)
    wide = total.float()
    expected = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(dtype)
    torch.testing.assert_close(normed, expected, rtol=3 * torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("runtime", ["cuda", "graph"])
@pytest.mark.parametrize("strategy", [
    df.TokenWeave(32, 0), df.TokenWeave(32, 10**6), df.FusedGemm(4, 1), df.CommOverlap(3, 1), df.Mixed(df.TwoBatch(), df.Branches(2)),
], ids=lambda s: repr(s)[:40])  # fmt: skip
def test_results(strategy, runtime):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(256) for _ in range(3))).cuda().eval()
    fast = df.compile(model, strategy=strategy, partition=PARTITION, strict=True, runtime=runtime)
    for rows in (96, 200):
        x = torch.randn(rows, 256, device="cuda")
        expected = model(x)
        for _ in range(3):
            torch.testing.assert_close(fast(x), expected, rtol=1e-3, atol=1e-3)
        assert torch.equal(fast(x), df.run_serialised(fast, x))
    assert not df.stats(fast).fallbacks
