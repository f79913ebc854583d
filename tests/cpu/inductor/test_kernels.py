"""A wrapper's kernels: what each touches, which memory is whose, and what is not understood."""

import pytest
import torch

from dynaflow.inductor.source import NotUnderstood
from dynaflow.runtime.program import Geometry
from tests.cpu.inductor.kernel_samples import ADD, POINTWISE, RELU, read, touched, triton

X = torch.empty(4, 8)


def edges(made) -> set[tuple[str, str]]:
    return {(made.flow.ops[e.before].name, made.flow.ops[e.after].name) for e in made.flow.edges}


def test_reads_and_writes():
    made = read("""
        buf0 = empty_strided_cuda((4, 8), (8, 1), torch.float32)
        stream0 = get_raw_stream(0)
        triton_poi_fused_relu_0.run(arg0_1, buf0, 32, stream=stream0)
        del arg0_1
        buf1 = empty_strided_cuda((4, 16), (16, 1), torch.float32)
        extern_kernels.mm(buf0, reinterpret_tensor(arg1_1, (8, 16), (1, 8), 0), out=buf1)
        del arg1_1
        del buf0
        return (buf1, )
    """, X, torch.empty(16, 8))  # fmt: skip
    assert touched(made) == [
        ("triton_poi_fused_relu_0.0", ("arg0_1",), ("buf0",), ()), ("mm.1", ("buf0", "arg1_1"), ("buf1",), ())]
    assert made.returns == (("buf1", None),) and made.flow.outputs == ("buf1",)
    assert {v.name: v.role for v in made.flow.values} == {"arg0_1": "input", "arg1_1": "input", "buf0": "temp", "buf1": "output"}
    assert made.flow.value["buf1"].nbytes == str(4 * 16 * 4)


REUSED = """
    buf0 = empty_strided_cuda((4, 8), (8, 1), torch.float32)
    triton_poi_fused_relu_0.run(arg0_1, buf0, 32, stream=stream0)
    buf1 = empty_strided_cuda((4, 8), (8, 1), torch.float32)
    triton_poi_fused_relu_0.run(buf0, buf1, 32, stream=stream0)
    buf2 = buf0; del buf0  # reuse
    triton_poi_fused_relu_0.run({source}, buf2, 32, stream=stream0)
    return (buf1, buf2, )
"""


def test_memory_that_is_reused_chains_nothing():
    made = read(REUSED.format(source="arg0_1"), X)
    assert touched(made)[2] == ("triton_poi_fused_relu_0.2", ("arg0_1",), ("buf2",), ())
    assert edges(made) == {("triton_poi_fused_relu_0.0", "triton_poi_fused_relu_0.1")}


def test_memory_that_is_changed_in_place_is_one_value():
    body = REUSED.replace("triton_poi_fused_relu_0.run({source}, buf2", "triton_poi_fused_add_1.run(buf2")
    made = read(body, X)
    assert touched(made)[2] == ("triton_poi_fused_add_1.2", ("buf0",), (), ("buf0",))
    assert made.returns == (("buf1", None), ("buf0", None))
    assert ("triton_poi_fused_relu_0.1", "triton_poi_fused_add_1.2") in edges(made), "it is read before it is changed"


def test_memory_that_something_else_still_names_is_not_reused():
    made = read("""
        buf0 = empty_strided_cuda((4, 8), (8, 1), torch.float32)
        triton_poi_fused_relu_0.run(arg0_1, buf0, 32, stream=stream0)
        buf1 = reinterpret_tensor(buf0, (2, 8), (8, 1), 0)  # alias
        buf2 = buf0; del buf0  # reuse
        triton_poi_fused_relu_0.run(arg0_1, buf2, 32, stream=stream0)
        return (buf1, )
    """, X)  # fmt: skip
    assert touched(made)[1][3] == ("buf0",)


def test_what_nothing_has_written_yet_is_made_by_a_change_in_place():
    made = read("""
        buf0 = empty_strided_cuda((4, 8), (8, 1), torch.float32)
        buf1 = buf0; del buf0  # reuse
        triton_poi_fused_add_1.run(buf1, 32, stream=stream0)
        return (buf1, )
    """, X)  # fmt: skip
    assert touched(made) == [("triton_poi_fused_add_1.0", (), ("buf0",), ())]


def test_an_argument_that_is_given_up_becomes_a_value_of_its_own():
    body = """
        buf0 = arg0_1; del arg0_1  # reuse
        {kernel}
        return (buf0, )
    """
    fresh = read(body.format(kernel="triton_poi_fused_relu_0.run(arg1_1, buf0, 32, stream=stream0)"), X, X)
    assert touched(fresh) == [("triton_poi_fused_relu_0.0", ("arg1_1",), ("buf0",), ())] and fresh.changed == ()
    changed = read(body.format(kernel="triton_poi_fused_add_1.run(buf0, 32, stream=stream0)"), X, X)
    assert touched(changed) == [("triton_poi_fused_add_1.0", ("arg0_1",), (), ("arg0_1",))]
    assert changed.changed == (0,) and changed.returns == (("arg0_1", None),)


CAT = """
    buf2 = empty_strided_cuda((4, 16), (16, 1), torch.float32)
    buf0 = reinterpret_tensor(buf2, (4, 8), (16, 1), 0)  # alias
    triton_poi_fused_relu_0.run(arg0_1, buf0, 32, stream=stream0)
    buf1 = reinterpret_tensor(buf2, (4, 8), (16, 1), {offset})  # alias
    triton_poi_fused_relu_0.run(arg0_1, buf1, 32, stream=stream0)
    buf3 = empty_strided_cuda((4, 16), (16, 1), torch.float32)
    triton_poi_fused_relu_0.run(buf2, buf3, 64, stream=stream0)
    triton_poi_fused_relu_0.run(buf1, buf3, 64, stream=stream0)
    return (buf3, )
"""


def test_slices_that_are_apart_are_pieces():
    made = read(CAT.format(offset=8), X)
    assert [op.writes for op in made.flow.ops[:2]] == [("buf2.0",), ("buf2.1",)]
    assert {v.name: v.home for v in made.flow.values if v.home} == {"buf2.0": "buf2", "buf2.1": "buf2"}
    assert [op.reads for op in made.flow.ops[2:]] == [("buf2",), ("buf2.1",)]
    names = [op.name for op in made.flow.ops]
    assert (names[0], names[1]) not in edges(made) and {(names[0], names[2]), (names[1], names[2])} <= edges(made)


def test_slices_that_overlap_are_no_pieces():
    made = read(CAT.format(offset=7), X)
    assert not any(v.home for v in made.flow.values)
    assert (made.flow.ops[0].name, made.flow.ops[1].name) in edges(made)


def test_a_users_kernel_may_write_to_whatever_it_gets():
    kernel = triton("my_kernel_0", {"x": "*fp32", "y": "*fp32", "n": "i32"}, heuristic="user_autotune")
    made = read("""
        buf0 = empty_strided_cuda((4, 8), (8, 1), torch.float32)
        triton_poi_fused_relu_0.run(arg0_1, buf0, 32, stream=stream0)
        my_kernel_0.run(arg0_1, buf0, 32, stream=stream0)
        return (buf0, )
    """, X, definitions=RELU + kernel)  # fmt: skip
    assert touched(made)[1][3] == ("arg0_1", "buf0") and made.changed == (0,)


def test_a_parameter_that_is_listed_as_changed_is_read_too():
    scatter = triton("triton_poi_fused_scatter_2", {"in_ptr0": "*fp32", "out_ptr0": "*fp32", "xnumel": "i32"}, ("out_ptr0",))
    body = """
        buf0 = empty_strided_cuda((4, 8), (8, 1), torch.float32)
        triton_poi_fused_relu_0.run(arg0_1, buf0, 32, stream=stream0)
        triton_poi_fused_scatter_2.run(arg0_1, buf0, 32, stream=stream0)
        return (buf0, )
    """
    made = read(body, X, definitions=RELU + scatter)
    assert touched(made)[1] == ("triton_poi_fused_scatter_2.1", ("arg0_1", "buf0"), (), ("buf0",))


def test_sizes_and_views_are_numbers():
    made = read("""
        s0 = arg0_1
        buf0 = empty_strided_cuda((s0, 8), (8, 1), torch.float32)
        triton_poi_fused_relu_0_xnumel = 8*s0
        triton_poi_fused_relu_0.run(arg1_1, buf0, triton_poi_fused_relu_0_xnumel, stream=stream0)
        return (reinterpret_tensor(buf0, (8, s0), (1, 8), 0), s0, )
    """, 4, X)  # fmt: skip
    assert made.flow.value["buf0"].shape == ("4", "8")
    assert made.returns[1] == (4,) and made.returns[0][1].shape == (8, 4)
    out = torch.arange(32.0).view(4, 8)
    result, number = made.hand_out([4, X], {"buf0": out})
    assert number == 4 and torch.equal(result, out.t())


def test_sizes_that_are_no_arguments_are_those_of_tensors():
    made = read("""
        arg0_1_size = arg0_1.size()
        s0 = arg0_1_size[0]
        arg0_1_stride = arg0_1.stride()
        s1 = arg0_1_stride[0]
        buf0 = empty_strided_cuda((2*s0, s1), (s1, 1), torch.float32)
        triton_poi_fused_relu_0.run(arg0_1, buf0, s0, stream=stream0)
        return (buf0, )
    """, X)  # fmt: skip
    assert made.flow.value["buf0"].shape == ("8", "8")


ATTENTION = """
    buf0 = torch.ops.aten._scaled_dot_product_efficient_attention.default(arg0_1, arg0_1, arg0_1, None, False{dropout})
    buf1 = buf0[0]
    assert_size_stride(buf1, (1, 2, 4, 8), (64, 32, 8, 1), 'attention')
    del buf0
    triton_poi_fused_add_1.run(buf1, 64, stream=stream0)
    return (buf1, )
"""
Q = torch.empty(1, 2, 4, 8)
SEEN = {"buf1": Geometry((1, 2, 4, 8), (64, 32, 8, 1), torch.float32, torch.device("cuda"))}


def test_what_an_extern_kernel_allocates():
    made = read(ATTENTION.format(dropout=""), Q, seen=SEEN)
    assert made.allocated == {"buf1"} and touched(made)[1][3] == ("buf1",)
    assert made.flow.ops[0].uses == ()
    assert not made.program.products


def test_dropout_keeps_the_order_of_random_numbers():
    made = read(ATTENTION.format(dropout=", 0.5"), Q, seen=SEEN)
    assert made.flow.ops[0].uses == ("rng", "caller")
    assert made.program.products == {made.flow.ops[0].name}, "who knows what it does"


def test_a_result_that_was_not_seen_is_not_guessed_at():
    with pytest.raises(NotUnderstood, match="buf1"):
        read(ATTENTION.format(dropout=""), Q)


STATE = Geometry((), (), torch.int64, torch.device("cpu"))
FORWARD = """
    buf0 = torch.ops.aten._scaled_dot_product_efficient_attention.default(arg0_1, arg0_1, arg0_1, None, False{dropout})
    buf1 = buf0[0]
    buf2 = buf0[2]
    buf3 = buf0[3]
    del buf0
    {use}
    return (buf1, buf2, buf3, )
"""
BACKWARD = """
    buf0 = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default(arg0_1, arg0_1, arg0_1, arg0_1, None, arg0_1, arg0_1,
        arg1_1, arg2_1, {dropout}, [True, False, False, False])
    buf1 = buf0[0]
    del buf0
    {use}
    return (buf1, )
"""


def test_the_random_state_of_no_dropout_is_a_constant():
    """It lies on the host, where no recording may read it; and nobody does."""
    made = read(FORWARD.format(dropout="", use=""), Q, seen=SEEN | {"buf2": STATE, "buf3": STATE})
    assert made.flow.outputs == ("buf1",) and made.allocated == {"buf1"} and [v.name for v in made.flow.values] == ["arg0_1", "buf1"]
    out, seed, offset = made.hand_out([Q], {"buf1": Q})
    assert out is Q and seed.dtype == torch.int64 and seed.shape == offset.shape == () and seed is not offset
    state = torch.tensor(7)
    back = read(BACKWARD.format(dropout="0.0", use=""), Q, state, state, seen=SEEN)
    assert touched(back) == [(back.flow.ops[0].name, ("arg0_1",), ("buf1",), ())] and back.inputs == ((0, "arg0_1"),)
    assert back.program.units[back.flow.ops[0].name].args == ("arg0_1",)


def test_the_random_state_lies_on_the_host_wherever_new_tensors_lie():
    with torch.device("meta"):
        made = read(FORWARD.format(dropout="", use=""), Q, seen=SEEN | {"buf2": STATE, "buf3": STATE})
    assert [state.device.type for (state,) in made.returns[1:]] == ["cpu", "cpu"]


def test_attentions_whose_random_states_differ_cost_the_same():
    """Each layer has a state of its own, and is not measured for that."""
    again = BACKWARD.format(dropout="0.0", use="").split("return")[0].replace("arg1_1", "arg3_1").replace("arg2_1", "arg4_1")
    text = BACKWARD.format(dropout="0.0", use=again.replace("buf1", "buf3").replace("buf0", "buf2"))
    made = read(text, Q, *[torch.tensor(7)] * 4, seen=SEEN | {"buf3": SEEN["buf1"]})
    first, second = made.flow.ops
    assert made.keys[first.name] == made.keys[second.name]


def test_the_random_state_of_dropout_is_a_value():
    made = read(FORWARD.format(dropout=", 0.5", use=""), Q, seen=SEEN | {"buf2": STATE, "buf3": STATE})
    assert made.flow.outputs == ("buf1", "buf2", "buf3")
    back = read(BACKWARD.format(dropout="0.5", use=""), Q, torch.tensor(7), torch.tensor(8), seen=SEEN)
    assert back.inputs == ((0, "arg0_1"), (1, "arg1_1"), (2, "arg2_1")) and back.flow.ops[0].reads == ("arg0_1", "arg1_1", "arg2_1")


def test_a_random_state_that_somebody_looks_at():
    with pytest.raises(NotUnderstood, match="means nothing"):
        read(FORWARD.format(dropout="", use="buf4 = torch.ops.aten.neg.default(buf2)"), Q, seen=SEEN | {"buf2": STATE, "buf3": STATE})
    back = read(BACKWARD.format(dropout="0.0", use="buf2 = torch.ops.aten.neg.default(arg1_1)"), Q, torch.tensor(7), torch.tensor(8),
                seen=SEEN | {"buf2": STATE})  # fmt: skip
    assert back.inputs == ((0, "arg0_1"), (1, "arg1_1")) and [op.reads for op in back.flow.ops] == [("arg0_1",), ("arg1_1",)]


@pytest.mark.parametrize("body, why", [
    ("u0 = arg0_1.item()\nreturn (arg0_1, )", "item"),
    ("buf0 = torch.ops.aten.view.default(arg0_1, [32])\nreturn (buf0, )", "not its own"),
    ("while True: pass\nreturn (arg0_1, )", "while"),
    ("buf0 = empty_strided_cuda((4, 8), (8, 1), torch.float32)\n"
     "torch.ops.aten.add.out(arg0_1, arg0_1 + 1, out=buf0)\nreturn (buf0, )", "inside of"),
])  # fmt: skip
def test_forms_that_are_not_known(body, why):
    with pytest.raises(NotUnderstood, match=why):
        read(body, X)


def test_kernels_that_cost_the_same_have_one_key():
    body = """
        buf0 = empty_strided_cuda((4, 8), (8, 1), torch.float32)
        triton_poi_fused_relu_0.run(arg0_1, buf0, 32, stream=stream0)
        buf1 = empty_strided_cuda((4, 8), (8, 1), torch.float32)
        triton_poi_fused_relu_0.run(buf0, buf1, {n}, stream=stream0)
        return (buf1, )
    """
    keys = [list(read(body.format(n=n), X).keys.values()) for n in (32, 16)]
    assert keys[0][0] == keys[0][1] and keys[1][0] != keys[1][1]


def test_a_kernel_without_a_definition_may_do_anything():
    made = read("""
        buf0 = empty_strided_cuda((4, 8), (8, 1), torch.float32)
        triton_poi_fused_relu_0.run(arg0_1, buf0, 32, stream=stream0)
        return (buf0, )
    """, X, definitions=ADD)  # fmt: skip
    assert touched(made) == [("triton_poi_fused_relu_0.0", ("arg0_1",), ("buf0",), ("arg0_1",))]
    assert POINTWISE["in_ptr0"]  # the twin: test_reads_and_writes


def test_a_kernel_that_reads_what_it_writes_itself():
    """C++ kernels of several loops get a buffer twice: as their result, and as what the next loop reads."""
    twice = triton("triton_red_fused_sum_2", {"in_ptr0": "*fp32", "in_ptr1": "*fp32", "out_ptr0": "*fp32", "out_ptr1": "*fp32"})
    body = """
        buf0 = empty_strided_cuda((4, 8), (8, 1), torch.float32)
        buf1 = empty_strided_cuda((4, 8), (8, 1), torch.float32)
        triton_red_fused_sum_2.run(arg0_1, {source}, buf0, buf1, stream=stream0)
        return (buf1, )
    """
    made = read(body.format(source="buf0"), X, definitions=twice)
    assert touched(made) == [("triton_red_fused_sum_2.0", ("arg0_1",), ("buf0", "buf1"), ())]
    never = "buf2 = empty_strided_cuda((4, 8), (8, 1), torch.float32)\n" + body.format(source="buf2").replace("        ", "").lstrip()
    with pytest.raises(NotUnderstood, match="reads buf2, which nothing has written"):
        read(never, X, definitions=twice)


def test_what_is_read_of_a_value_of_which_only_pieces_are_made():
    body = CAT.replace("    triton_poi_fused_relu_0.run(arg0_1, buf1, 32, stream=stream0)\n", "", 1)
    late = body.replace("    return (buf3, )", "    triton_poi_fused_relu_0.run(arg0_1, buf1, 32, stream=stream0)\n    return (buf3, )")
    made = read(late.format(offset=8).replace("run(buf1, buf3", "run(buf0, buf3"), X)
    assert [op.reads for op in made.flow.ops] == [("arg0_1",), ("buf2.0",), ("buf2.0",), ("arg0_1",)]


def test_memory_that_the_first_kernel_reads_by_another_argument_is_one_value():
    made = read(REUSED.format(source="buf2"), X)
    assert touched(made)[2] == ("triton_poi_fused_relu_0.2", ("buf0",), (), ("buf0",))


@pytest.mark.parametrize("use", [
    "return (buf0, )",
    "buf1 = buf0\n        return (buf1, )",
    "triton_poi_fused_add_1.run(buf0, 32, stream=stream0)\n        return (arg0_1, )",
])  # fmt: skip
def test_rejects_results_that_were_not_seen(use):
    with pytest.raises(NotUnderstood, match="buf0"):
        read(f"""
        buf0 = torch.ops.aten.cumsum.default(arg0_1, 0)
        {use}
        """, X)  # fmt: skip


def test_rejects_memory_that_nobody_writes():
    """Of no bytes, or of `torch.empty`. (It may be returned.)"""
    body = """
        buf0 = empty_strided_cuda((0, 8), (8, 1), torch.float32)
        {use}
        return (arg0_1, buf0, )
    """
    with pytest.raises(NotUnderstood, match="reads buf0, which nothing has written"):
        read(body.format(use="triton_poi_fused_relu_0.run(buf0, arg0_1, 0, stream=stream0)"), X)
    assert read(body.format(use=""), X).returns == (("arg0_1", None), ("buf0", None))


HALVES = """
    buf2 = empty_strided_cuda((4, 16), (16, 1), torch.float32)
    buf0 = reinterpret_tensor(buf2, (4, 8), (16, 1), 0)
    triton_poi_fused_relu_0.run(arg0_1, buf0, 32, stream=stream0)
    buf1 = reinterpret_tensor(buf2, (4, 8), (16, 1), 8)
    {kernel}
    return (buf3, buf2, )
"""


def test_a_kernel_that_writes_the_last_slice_and_reads_all():
    """As C++ kernels do, loop after loop."""
    both = triton("both", {"in_ptr0": "*fp32", "in_ptr1": "*fp32", "out_ptr0": "*fp32", "out_ptr1": "*fp32", "xnumel": "i32"})
    body = HALVES.format(kernel="""buf3 = empty_strided_cuda((4, 16), (16, 1), torch.float32)
    both.run(arg0_1, buf2, buf1, buf3, 32, stream=stream0)""")
    made = read(body, X, definitions=RELU + both)
    assert touched(made)[1] == ("both.1", ("arg0_1", "buf2.0"), ("buf2.1", "buf3"), ())
    assert edges(made) == {("triton_poi_fused_relu_0.0", "both.1")}


def test_a_kernel_that_writes_the_last_slice_and_changes_all():
    both = triton("both", {"in_ptr0": "*fp32", "out_ptr0": "*fp32", "in_out_ptr0": "*fp32", "xnumel": "i32"}, ("in_out_ptr0",))
    body = HALVES.format(kernel="buf3 = buf2\n    both.run(arg0_1, buf1, buf3, 32, stream=stream0)")
    made = read(body, X, definitions=RELU + both)
    assert touched(made)[1] == ("both.1", ("arg0_1", "buf2"), (), ("buf2",)) and not made.flow.pieces


def test_what_a_collective_reads_lives_until_it_is_awaited():
    made = read("""
        buf0 = empty_strided_cuda((4, 8), (8, 1), torch.float32)
        triton_poi_fused_relu_0.run(arg0_1, buf0, 32, stream=stream0)
        buf1 = torch.ops._c10d_functional.all_gather_into_tensor.default(buf0, 2, '0')
        buf2 = empty_strided_cuda((4, 8), (8, 1), torch.float32)
        triton_poi_fused_relu_0.run(arg0_1, buf2, 32, stream=stream0)
        torch.ops._c10d_functional.wait_tensor.default(buf1)
        del buf0
        return (buf1, buf2, )
    """, X, seen={"buf1": Geometry((8, 8), (8, 1), torch.float32, torch.device("cuda"))})  # fmt: skip
    assert "buf0" in touched(made)[3][1], "its memory is not free before"


@pytest.mark.parametrize("name, changed", [("arg_A", ()), ("arg_LSE", ("arg0_1",))])
def test_templates_list_nothing_of_what_they_change(name, changed):
    kernel = triton("triton_tem_fused_mm_0", {name: "*fp32", "out_ptr0": "*fp32"}, heuristic="template")
    kernel = kernel.replace(", 'mutated_arg_names': []", "")
    made = read("""
        buf0 = empty_strided_cuda((4, 8), (8, 1), torch.float32)
        triton_tem_fused_mm_0.run(arg0_1, buf0, stream=stream0)
        return (buf0, )
    """, X, definitions=kernel)  # fmt: skip
    assert touched(made) == [("triton_tem_fused_mm_0.0", ("arg0_1",), ("buf0",), changed)]
