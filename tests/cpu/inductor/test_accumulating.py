"""Calls that add to what is there, taken apart: their text, what their kernels touch, and what they compute."""

import functools

import pytest
import torch
from torch import nn

import dynaflow as df
from dynaflow import region
from dynaflow.inductor.accumulating import Accumulates, apart
from dynaflow.inductor.kernels import kernels
from tests.cpu.inductor.kernel_samples import ADD, RELU, module, touched
from tests.cpu.kernel_models import compiled, fresh  # noqa: F401  (fresh is a fixture)


@torch.library.custom_op("dynaflow_test_accumulating::expand", mutates_args={"out"})
def expand(x: torch.Tensor, weights: list[torch.Tensor], out: torch.Tensor, scale: float = 1.0, adds: bool = False) -> None:
    """As vLLM's lora_expand: rows whose first element is negative are left alone."""
    wanted = (x[:, 0] >= 0).unsqueeze(1)
    new = x @ weights[0] * scale
    out.copy_(torch.where(wanted, new + out if adds else new, out))


OP = "torch.ops.dynaflow_test_accumulating.expand.default"
OPS = {OP: Accumulates("out", "adds")}

BODY = """
    buf0 = empty_strided_cuda((8, 4), (4, 1), torch.float32)
    extern_kernels.mm(arg0_1, arg1_1, out=buf0)
    {expand}
    buf1 = empty_strided_cuda((8, 4), (4, 1), torch.float32)
    stream0 = get_raw_stream(0)
    triton_poi_fused_relu_0.run(buf0, buf1, 32, stream=stream0)
    del buf0
    return (buf1, )
"""


def wrapper(expand: str) -> str:
    return module(RELU + ADD, BODY.format(expand=expand), "arg0_1, arg1_1, arg2_1")


def ops_of(text: str) -> list:
    given = torch.randn(8, 4), torch.randn(4, 4), torch.randn(4, 4)
    scope = {"torch": torch, "get_raw_stream": lambda index: 0}
    return touched(kernels(text, scope, given, {}, "sample"))


@pytest.mark.parametrize("rest", ["1.0, True", "adds=True", "scale=1.0, adds=True"])
def test_what_is_added_waits_for_nothing(rest):
    text = apart(wrapper(f"{OP}(arg0_1, [arg2_1], buf0, {rest})"), OPS)
    assert [(name.rpartition(".")[0], *sets) for name, *sets in ops_of(text)] == [
        ("mm", ("arg0_1", "arg1_1"), ("buf0",), ()),
        ("buf2.zero_", (), ("buf2",), ()),
        ("dynaflow_test_accumulating.expand.default", ("arg0_1", "arg2_1", "buf2"), (), ("buf2",)),
        ("add_.Tensor", ("buf0", "buf2"), (), ("buf0",)),
        ("triton_poi_fused_relu_0", ("buf0",), ("buf1",), ()),
    ]


@pytest.mark.parametrize("call", [
    f"{OP}(arg0_1, [arg2_1], buf0)",  # it writes, and adds nothing
    f"{OP}(arg0_1, [arg2_1], buf0, 1.0, False)",
    f"{OP}(arg0_1, [arg2_1], arg1_1, 1.0, True)",  # nothing is known of what it adds to
    f"{OP}(arg0_1, [arg2_1], reinterpret_tensor(buf0, (4, 4), (4, 1), 0), 1.0, True)",
    "torch.ops.aten.add_.Tensor(buf0, arg0_1)",  # nobody said that it adds
    f"buf9 = arg0_1; {OP}(arg0_1, [arg2_1], buf0, 1.0, True)",  # what stands before it would be done again
])  # fmt: skip
def test_other_calls_stay_as_they_are(call):
    assert apart(wrapper(call), OPS) == wrapper(call)


@pytest.mark.parametrize("ops", [
    {OP: Accumulates("output", "adds")}, {"torch.ops.dynaflow_test_accumulating.gone.default": Accumulates("out", "adds")},
])  # fmt: skip
def test_an_op_that_is_not_what_it_was_is_left_alone(ops):
    (target,) = ops
    text = wrapper(f"{target}(arg0_1, [arg2_1], buf0, 1.0, True)")
    assert apart(text, ops) == text


def test_a_single_number():
    text = apart(wrapper(f"{OP}(arg0_1, [arg2_1], buf0, 1.0, True)").replace("(8, 4), (4, 1)", "(), ()"), OPS)
    assert "buf2 = empty_strided_cuda((), (), torch.float32)" in text


def test_several_and_what_reuses_memory():
    again = f"buf3 = buf0; del buf0  # reuse\n    {OP}(arg0_1, [arg2_1], buf3, 2.0, True)"
    text = wrapper(f"{OP}(arg0_1, [arg2_1], buf0, 1.0, True)\n    {again}").replace("relu_0.run(buf0", "relu_0.run(buf3")
    text = apart(text.replace("    del buf0\n            return", "    del buf3\n            return"), OPS)
    names = [name.rpartition(".")[0] for name, *_ in ops_of(text)]
    assert names.count("add_.Tensor") == 2 and {"buf4.zero_", "buf5.zero_"} <= set(names)


def test_a_text_that_is_not_understood_is_left_alone():
    assert apart("def call(args):\n    while True: pass\n", OPS) == "def call(args):\n    while True: pass\n"


class Adapter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.down, self.up = nn.Linear(16, 24), nn.Linear(16, 4, bias=False), nn.Parameter(torch.randn(4, 24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        expand(self.down(x), [self.up], y, 0.5, True)
        return torch.relu(y)


@pytest.mark.parametrize("runtime", ["fake:1", "fake:2", "threads"])
def test_the_same_result_in_every_order(runtime, monkeypatch):
    made = []

    def in_parts(name, compiled_graph, *args, **kwargs):
        made.append(region.Region(name, compiled_graph, *args, **kwargs, text=apart(compiled_graph.source_code, OPS)))
        return made[-1]

    monkeypatch.setattr("dynaflow.engine.Region", functools.wraps(region.Region)(in_parts))
    model = Adapter().requires_grad_(False)
    fast = compiled(model, runtime, df.Branches(2))
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(6, 16)
            assert torch.equal(fast(x), model(x))
    (case,) = made[0].cases.values()
    ops = {op.name.rpartition(".")[0]: op for op in case.kernels.flow.ops}
    assert df.stats(fast).planned_calls
    # neither waits for the other: what the adapter changes is made by nobody but itself
    (changed,) = ops["dynaflow_test_accumulating.expand.default"].mutates
    assert [op.name for op in ops.values() if changed in op.writes] == [f"{changed}.zero_.2"]
    assert changed in ops["add_.Tensor"].reads
