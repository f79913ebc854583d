"""Our Triton kernels without a GPU: Triton's interpreter says what they compute, its compiler whether there is machine code for them."""

import itertools
import json
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton reads TRITON_INTERPRET=1 when it is imported: `make system-triton` sets it", allow_module_level=True)

from dynaflow.functions import add_rms_norm, triton_add_rms_norm
from dynaflow.testing import hold, network

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # the interpreter's own

# not bfloat16: the interpreter cuts it off instead of rounding
DTYPES = [torch.float32, torch.float16]
TICK_NS = 1000


@pytest.fixture(autouse=True)
def ticks(monkeypatch):
    """The device's clock, which the interpreter lacks: a tick for every look."""
    clock = itertools.count(0, TICK_NS)
    monkeypatch.setattr(hold, "globaltimer", lambda: next(clock))
    monkeypatch.setattr(hold, "smid", lambda: 7)
    return clock


def poisoned(x: torch.Tensor) -> torch.Tensor:
    return torch.full_like(x, float("nan"))


def composed(x, residual, weight, eps):
    """The ops, rounding where they round: after the add, and before the product with the weight."""
    total = x + residual
    wide = total if total.dtype == torch.float64 else total.float()
    normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    return total, normed * weight


def close(ours: torch.Tensor, ops: torch.Tensor, reference: torch.Tensor) -> bool:
    """Nearly as near to a reference in float64 as the ops are: sums are added up in another order."""
    eps = 4 * torch.finfo(ours.dtype).eps * reference.abs().max()
    return bool((ours - reference).abs().max() <= 2 * (ops - reference).abs().max() + eps)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 64), (7, 300), (16, 1024), (0, 64)])
@pytest.mark.parametrize("num_ctas", [1, 3, 32])
def test_add_and_norm_are_those_of_the_ops(dtype, num_rows, size, num_ctas):
    x, residual = (torch.randn(num_rows, size).to(dtype) for _ in range(2))
    weight = torch.randn(size).to(dtype)
    total, normed = poisoned(x), poisoned(x)
    triton_add_rms_norm.launch(x, residual, weight, total, normed, 1e-5, num_ctas)
    wanted, ops = composed(x, residual, weight, 1e-5)
    assert torch.equal(total, wanted)
    if num_rows:
        assert close(normed, ops, composed(wanted.double(), torch.zeros(()), weight.double(), 1e-5)[1])


def test_add_and_norm_go_where_they_are_told_and_leave_the_rest():
    x, residual, weight = torch.randn(4, 8, 32), torch.randn(4, 8, 32), torch.randn(32)
    home = poisoned(torch.empty(8, 8, 32))
    total, normed = add_rms_norm.add_rms_norm(x, residual, weight, 1e-6, 2, total=home[2:6])
    assert total.data_ptr() == home[2].data_ptr() and torch.equal(home[2:6], x + residual)
    assert home[:2].isnan().all() and home[6:].isnan().all()
    assert close(normed, composed(x, residual, weight, 1e-6)[1], composed(total.double(), torch.zeros(()), weight.double(), 1e-6)[1])


@pytest.mark.parametrize(("name", "dim"), [*((name, 0) for name in network.OPS), ("all_gather", 1), ("reduce_scatter", 1)])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16, torch.float64], ids=str)
def test_collectives_move_what_they_move_on_the_cpu(name, dim, dtype):
    """The emulated network's kernel, in the place of what the CPU does for it."""
    x, numbers = torch.randn(8, 640).to(dtype), (1.0, 0.0, 8, 4, *([dim] if name in ("all_gather", "reduce_scatter") else []))
    wanted = network.OPS[name](x, *numbers)
    num_read, num_written = {"reduce_scatter": (8, 1), "all_gather": (1, 8)}.get(name, (1, 1))
    made = hold.hold(x, tuple(wanted.shape), dim, 1.0, 4, num_read, num_written)
    if name == "reduce_scatter" and dtype == torch.bfloat16:
        torch.testing.assert_close(made, wanted)
    else:
        assert torch.equal(made, wanted)


@pytest.mark.parametrize("sms", [1, 4])
def test_each_cta_holds_until_its_time_is_over(ticks, sms):
    where = torch.full((sms,), -1, dtype=torch.int32)
    x = torch.randn(256)
    assert torch.equal(hold.hold(x, x.shape, 0, 5.0, sms, where=where), x)
    # one look for the deadline, and one for every tick until it has passed
    assert next(ticks) == sms * 6 * TICK_NS
    assert where.tolist() == [7] * sms


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_reduction_with_add_and_norm_on_the_way(ticks, dtype):
    x, residual, weight = torch.randn(5, 96).to(dtype), torch.randn(5, 96).to(dtype), torch.randn(96).to(dtype)
    total, normed = poisoned(x), poisoned(x)
    hold.hold_norm(x, residual, weight, 1e-5, total, normed, 3.0, 2)
    wanted, ops = composed(x, residual, weight, 1e-5)
    assert torch.equal(total, wanted)
    assert close(normed, ops, composed(wanted.double(), torch.zeros(()), weight.double(), 1e-5)[1])
    assert next(ticks) == 2 * 4 * TICK_NS


COMPILE = """
import importlib, json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

module, name, types, constants = json.loads(sys.argv[1])
kernel = getattr(importlib.import_module(module), name)
fill = {"fp32": triton.language.float32}
constants = {key: fill.get(value, value) for key, value in constants.items()}
signature = {**types, **dict.fromkeys(constants, "constexpr")}
source = ASTSource(fn=kernel, signature=signature, constexprs={(kernel.arg_names.index(key),): v for key, v in constants.items()})
made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 16})
print(made.asm["ptx"])
"""

POINTERS = {"x": "*bf16", "residual": "*bf16", "weight": "*bf16", "total": "*bf16", "normed": "*bf16"}
KERNELS = {
    "add_rms_norm": (
        "dynaflow.functions.triton_add_rms_norm", "_kernel",
        {**POINTERS, "num_rows": "i32", "size": "i32", "eps": "fp32"}, {"BLOCK": 4096}),
    "hold": (
        "dynaflow.testing.hold", "_hold",
        {"x_ptr": "*bf16", "out_ptr": "*bf16", "where_ptr": "*i32", "num": "i32", "inner": "i32", "hold_ns": "i32"},
        {"NUM_READ": 8, "NUM_WRITTEN": 1, "SUM": "fp32", "HAS_WHERE": True, "BLOCK": 32768}),
    "hold_norm": (
        "dynaflow.testing.hold", "_hold_norm",
        {**{f"{name}_ptr": kind for name, kind in POINTERS.items()}, "num_rows": "i32", "size": "i32", "eps": "fp32", "hold_ns": "i32"},
        {"ROWS": 2, "BLOCK": 8192}),
}  # fmt: skip


@pytest.mark.parametrize("kernel", KERNELS)
def test_compiles_for_hopper(kernel, tmp_path):
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", COMPILE, json.dumps(KERNELS[kernel])], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert ".target sm_90" in run.stdout
    assert ("globaltimer" in run.stdout) == ("hold" in kernel)
