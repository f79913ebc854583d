"""Wrapper texts are read statement by statement, and what is not known is refused."""

import pytest

from dynaflow.inductor.source import KINDS, NotUnderstood, read
from tests.cpu.inductor.samples import CUDA, CUDA_KINDS, call


def test_a_cuda_wrapper_statement_by_statement():
    wrapper = read(CUDA)
    assert [s.kind for s in wrapper.statements] == CUDA_KINDS
    assert set(CUDA_KINDS) == set(KINDS)
    assert wrapper.args == ("arg0_1", "arg1_1", "arg2_1")
    made = {s.makes: s for s in wrapper.statements if s.makes}
    assert (made["buf2"].shape, made["buf2"].stride, made["buf2"].dtype, made["buf2"].device) == (
        ("4 * s0", "64"), ("64", "1"), "torch.bfloat16", "cuda")  # fmt: skip
    assert made["buf3"].uses == ("buf2",)
    assert made["buf4"].target == "torch.ops.aten._scaled_dot_product_flash_attention.default"
    kernels = [s for s in wrapper.statements if s.kind == "kernel"]
    assert [k.target for k in kernels] == ["triton_red_fused_norm_0", "triton_poi_fused_relu_1"]
    assert "buf1" in kernels[0].uses
    assert [o.uses for o in wrapper.outputs] == [("buf3",), ("buf5",)]


def test_spans_are_the_text_of_the_value():
    wrapper = read(CUDA)
    (buf2,) = [s for s in wrapper.statements if s.makes == "buf2"]
    start, end = buf2.span
    assert CUDA.encode()[start:end] == b"empty_strided_cuda((4*s0, 64), (64, 1), torch.bfloat16)"


KNOWN = [
    "arg0_1, = args",
    "buf0 = empty_strided_cpu((), (), torch.float32)",
    "cpp_fused_relu_0(buf0, s0)",
    "aten.randint.low_out(0, 9, [1], out=buf0)",
    "if not (s0 == 3): raise RuntimeError('no')",
    "assert s0 == 3",
]
UNKNOWN = {
    "branch": "if s0: cpp_fused_relu_0(buf0)",
    "loop": "for i in range(3): cpp_fused_relu_0(buf0)",
    "stream": "with torch.cuda.stream(side): cpp_fused_relu_0(buf0)",
    "padded_allocation": "buf0 = empty_strided_cuda((9, 64), (64, 1), torch.float32).as_strided((8, 64), (64, 1))",
    "pinned": "buf0 = empty_strided_cpu_pinned((8,), (1,), torch.float32)",
    "rebound": "buf0 = empty_strided_cpu((), (), torch.float32); buf0 = empty_strided_cpu((), (), torch.float32)",
    "unknown_function": "mystery(buf0)",
    "subgraph": "buf0 = true_graph_0(args)",
    "attribute": "buf0.shape = 3",
    "shape_by_name": "buf0 = empty_strided_cpu(shape, (1,), torch.float32)",
    "second_return": "return (buf1, )",
    "returns_a_name": "return buf0",
}


@pytest.mark.parametrize("line", KNOWN)
def test_accepts(line):
    wrapper = read(call(line, "return (buf0, )"))
    assert len(wrapper.outputs) == 1 and wrapper.statements[-1].kind == "return" and len(wrapper.statements) > 1


@pytest.mark.parametrize("form", UNKNOWN)
def test_rejects(form):
    with pytest.raises(NotUnderstood):
        read(call(UNKNOWN[form], "return (buf0, )"))


NO_CALL = ["", "def run(args):\n    return ()", "def call(x):\n    return ()", "def call(args", call("args.clear()")]


@pytest.mark.parametrize("text", NO_CALL)
def test_rejects_what_has_no_call(text):
    with pytest.raises(NotUnderstood):
        read(text)
