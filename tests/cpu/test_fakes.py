"""Fakes that we make ourselves are those that torch would have made."""

from itertools import product

import pytest
import torch
from torch import nn
from torch._decomp import decomposition_table
from torch._subclasses import FakeTensorMode, fake_impls
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import dynaflow as df
from dynaflow import fakes

OP = torch.ops.aten._native_batch_norm_legit_no_training.default
LAYOUTS = {
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(2, 3),
    "every other row": lambda x: x.repeat_interleave(2, 2).contiguous(memory_format=torch.channels_last)[:, :, ::2],
    "batch innermost": lambda x: x.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
}


def looks(results):
    return [(tuple(map(str, t.shape)), tuple(map(str, t.stride())), t.dtype, t.device, type(t).__name__) for t in results]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)])
@pytest.mark.parametrize(("shape", "layout"), [
    *product([(4, 3, 5, 6), (4, 3, 1, 1), (4, 3, 1, 6), (4, 1, 5, 6)], LAYOUTS),
    ((4, 3, 5), "contiguous"), ((4, 3), "contiguous"), ((4, 3, 2, 5, 6), "contiguous"),
])  # fmt: skip
def test_a_batch_norm_is_torchs(shape, layout, dtypes, device):
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    dims = [DimDynamic.DYNAMIC, *[DimDynamic.STATIC] * (len(shape) - 1)]
    x = mode.from_tensor(LAYOUTS[layout](torch.randn(shape)).to(dtypes[0]), symbolic_context=StatelessSymbolicContext(dims))
    with mode:
        x = x if device == "cpu" else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
        weight, bias, mean, var = (torch.empty(shape[1], dtype=dtypes[1], device=device) for _ in range(4))
        want = decomposition_table[OP](x, weight, bias, mean, var, 0.1, 1e-5)
    assert looks(fakes.batch_norm(mode, x, weight, bias, mean, var, 0.1, 1e-5)) == looks(want)


def test_a_capture_asks_torch_for_no_batch_norm_of_channels_last(monkeypatch):
    torch._dynamo.reset()
    calls, plain = [], decomposition_table[OP]
    monkeypatch.setitem(decomposition_table, OP, lambda *args: calls.append(1) or plain(*args))
    model = nn.Sequential(nn.Conv2d(3, 7, 3), nn.BatchNorm2d(7), nn.ReLU()).eval().to(memory_format=torch.channels_last)
    x = torch.randn(6, 3, 9, 9).contiguous(memory_format=torch.channels_last)
    fast = df.compile(model, strategy=df.TwoBatch(), strict=True)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
    assert not calls and OP not in fake_impls.get_fast_op_impls(), "it is as it was"
