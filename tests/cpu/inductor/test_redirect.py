"""Which outputs can be redirected, and what the others are told; the peak of what is left, checked by hand."""

import re

import pytest

from dynaflow.inductor.redirect import peak_bytes, redirect
from dynaflow.inductor.source import read
from tests.cpu.inductor.samples import CUDA, call

ALLOC = "buf0 = empty_strided_cpu((s0, 8), (8, 1), torch.float32)"
SYMBOL = ("arg0_1, arg1_1 = args", "args.clear()", "s0 = arg0_1")


def test_cuda_text():
    new = redirect(CUDA, 2)
    assert new.own == ("", "extern kernel aten._scaled_dot_product_flash_attention.default allocates its own result")
    changed = [(a, b) for a, b in zip(CUDA.splitlines(), new.text.splitlines(), strict=True) if a != b]
    assert [b.strip() for _, b in changed] == [
        "arg0_1, arg1_1, arg2_1, _df_out0 = args",
        "buf2 = (reinterpret_tensor(_df_out0, (4 * s0, 64, ), (64, 1, ), 0) if _df_out0 is not None "
        "else empty_strided_cuda((4*s0, 64), (64, 1), torch.bfloat16))"]  # fmt: skip
    assert new.allocates


# body, per output: "" or the reason
CASES = {
    "plain": ((*SYMBOL, ALLOC, "return (buf0, )"), [""]),
    "reuse": ((*SYMBOL, ALLOC, "buf1 = buf0; del buf0  # reuse", "return (buf1, )"), [""]),
    "transposed": ((*SYMBOL, ALLOC, "return (reinterpret_tensor(buf0, (8, s0), (1, 8), 0), )"), [""]),
    "max_of_one": ((*SYMBOL, ALLOC, "return (reinterpret_tensor(buf0, (s0, 2, 4), (4*max(1, 2), 4, 1), 0), )"), [""]),
    "through_a_symbol": ((*SYMBOL, "ps0 = 2*s0", "buf0 = empty_strided_cpu((ps0, 4), (4, 1), torch.float32)",
                          "return (reinterpret_tensor(buf0, (s0, 8), (8, 1), 0), )"), [""]),
    "two": ((*SYMBOL, ALLOC, "buf1 = empty_strided_cpu((s0,), (1,), torch.int64)", "return (buf0, buf1, )"), ["", ""]),
    "no_arguments": ((ALLOC.replace("s0", "4"), "return (buf0, )"), [""]),
    "one_argument": (("arg0_1, = args", ALLOC.replace("s0", "4"), "return (buf0, )"), [""]),
    "twice": ((*SYMBOL, ALLOC, "buf1 = buf0  # alias", "return (buf0, buf1, )"), ["the same buffer is returned twice"] * 2),
    "offset": ((*SYMBOL, ALLOC, "return (reinterpret_tensor(buf0, (s0, 4), (8, 1), 4), )"), ["a view into buf0"]),
    "half": ((*SYMBOL, ALLOC, "return (reinterpret_tensor(buf0, (s0, 4), (8, 1), 0), )"), ["a view that is not all of buf0"]),
    "gaps": ((*SYMBOL, "buf0 = empty_strided_cpu((s0, 5), (8, 1), torch.float32)", "return (buf0, )"), ["a view that is not all of buf0"]),
    "expanded": ((*SYMBOL, ALLOC, "return (reinterpret_tensor(buf0, (2, s0, 8), (0, 8, 1), 0), )"), ["a view that is not all of buf0"]),
    "other_symbol": ((*SYMBOL, "s1 = arg1_1", ALLOC, "return (reinterpret_tensor(buf0, (s1, 8), (8, 1), 0), )"),
                     ["a view that is not all of buf0"]),
    "input": ((*SYMBOL, "return (arg1_1, )"), ["returns input arg1_1"]),
    "input_reused": ((*SYMBOL, "buf0 = arg1_1; del arg1_1  # reuse", "return (buf0, )"), ["returns input arg1_1"]),
    "view_of_input": ((*SYMBOL, "return (reinterpret_tensor(arg1_1, (8, s0), (1, 8), 0), )"), ["a view of input arg1_1"]),
    "number": ((*SYMBOL, "return (s0, )"), ["returns s0, which is no buffer of its own"]),
    "constant": ((*SYMBOL, "return (_tensor_constant0, )"), ["returns _tensor_constant0, which is no buffer of its own"]),
    "unknown": ((*SYMBOL, ALLOC, "mystery(buf0)", "return (buf0, )"), ["Inductor's code has an unknown form: mystery(buf0)"]),
    "too_few": ((*SYMBOL, "return ()"), ["Inductor's code has an unknown form: 0 results are returned, 1 were expected"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_outputs(name):
    lines, own = CASES[name]
    text = call(*lines)
    new = redirect(text, len(own))
    assert list(new.own) == own
    if any(own):
        assert new.text == text or "" in own
    if new.wrapper is not None:
        taken = re.search(r"(.*) = args$", new.text, re.M)
        mine = re.findall(r"_df_out\d+", taken[1]) if taken else []
        assert mine == [f"_df_out{k}" for k, reason in enumerate(own) if not reason]
        assert all(f"if {name} is not None else empty_strided_cpu(" in new.text for name in mine)


SHARED = {"plain": False, "half": False, "two": False, "twice": True, "input": True, "input_reused": True, "view_of_input": True,
          "constant": True, "unknown": True, "too_few": True}  # fmt: skip


@pytest.mark.parametrize("name", SHARED)
def test_memory_that_may_be_others(name):
    lines, own = CASES[name]
    assert redirect(call(*lines), len(own)).shared == (SHARED[name],) * len(own)


def test_peak_by_hand():
    # s0 = 2, n = 2*8*4 = 64 bytes: buf0 | buf0 buf1 | buf1 (in buf0's place: reuse) ...
    text = call(
        *SYMBOL,
        ALLOC,  # 64
        "buf1 = empty_strided_cpu((s0, 16), (16, 1), torch.float16)",  # 64 -> 128
        "cpp_fused_0(arg1_1, buf0, buf1, s0)",
        "buf2 = buf0; del buf0  # reuse",  # 128
        "del buf1",  # 64
        "buf3 = torch.ops.aten.topk.default(buf2, 4)",
        "buf4 = buf3[0]",
        "assert_size_stride(buf4, (s0, 4), (4, 1), 'topk')",  # 8 elements of 4 bytes -> 96
        "del buf3",  # buf4 stays
        "buf5 = empty_strided_cpu((s0, 20), (20, 1), torch.int8)",  # 40 -> 136
        "cpp_fused_1(buf2, buf4, buf5, s0)",
        "del buf4",
        "return (buf2, buf5, )",
    )  # fmt: skip
    wrapper = read(text)
    assert peak_bytes(wrapper, {"arg0_1": 2}, itemsize=4) == 136
    assert peak_bytes(wrapper, {"arg0_1": 4}, itemsize=4) == 272
    new = redirect(text, 2)
    assert new.replaced == {"buf0", "buf5"}
    assert peak_bytes(wrapper, {"arg0_1": 2}, new.replaced, itemsize=4) == 64
    assert peak_bytes(wrapper, {"arg0_1": 0}, itemsize=4) == 0


def test_peak_of_the_cuda_text():
    rows = 2 * 4 * 64 * 2
    # buf1 and the workspace; then buf1, buf2 and the result of sdpa
    assert peak_bytes(read(CUDA), {"arg0_1": 2}, itemsize=2) == max(rows + 1024, 3 * rows)
    assert peak_bytes(read(CUDA), {"arg0_1": 2}, frozenset({"buf2"}), itemsize=2) == 2 * rows


def test_what_is_written_with_out_must_be_given():
    """An aten op has no allocation to fall back to."""
    new = redirect(call(*SYMBOL, "buf0 = torch.ops.aten.cumsum.default(arg1_1, 0)", "return (buf0, )"), 1)
    assert new.own == ("",) and not new.allocates and "torch.ops.aten.cumsum.out(arg1_1, 0, out=_df_out0)" in new.text
    assert redirect(call(*SYMBOL, ALLOC, "return (buf0, )"), 1).allocates
