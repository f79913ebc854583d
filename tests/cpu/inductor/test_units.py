"""Compiled units against eager mode, their results written into the middle of a larger, poisoned buffer."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import fx
from torch._dynamo.convert_frame import compile_lock
from torch.nn import functional as F

from dynaflow.inductor import CompiledUnit, NotCompiled, Spec, Variant, units
from dynaflow.inductor.redirect import out_overload
from dynaflow.runtime.program import Expr
from tests.cpu.inductor.units import CASES, CPU, Case, W, X, product_without_autocast, spec, tensors, unit

pytestmark = [
    pytest.mark.skipif(not (shutil.which("g++") or shutil.which("c++")), reason="Inductor needs a C++ compiler on the CPU"),
    pytest.mark.xdist_group("inductor"),
]
POISON = 7777.0


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def compiled():
    """name -> the unit; made once."""
    return {name: unit(case.fn, *case.args, dynamo=case.dynamo) for name, case in CASES.items()}


def check(case: Case, variant: Variant, rows: int) -> None:
    """Runs the variant and eager mode on equal arguments."""
    given = tensors(case.args, s0=rows)
    twin = [x.clone(memory_format=torch.preserve_format) if isinstance(x, torch.Tensor) else x for x in given]
    expected = case.fn(*twin)
    buffers, destinations = [], []
    for out, reason in zip(expected, variant.own):
        if not reason:
            per_row = out.shape[case.batch] // rows
            shape = [d + 3 * per_row if i == case.batch else d for i, d in enumerate(out.shape)]
            buffers.append(torch.empty_strided(shape, out.stride(), dtype=out.dtype).fill_(POISON))
            destinations.append(buffers[-1].narrow(case.batch, per_row, out.shape[case.batch]))
    results = variant.bind({"s0": rows})(given, destinations)
    assert len(results) == len(expected)
    for result, out, stride in zip(results, expected, variant.strides({"s0": rows})):
        torch.testing.assert_close(result, out, **({"rtol": 2e-4, "atol": 2e-4} if out.dtype == torch.float32 else {}))
        assert result.stride() == out.stride() or rows == 1
        assert stride is None or stride == result.stride()
    for a, b in zip(given, twin):
        torch.testing.assert_close(a, b)  # changes in place are the same, and nothing else changed
    written = [r for r, reason in zip(results, variant.own) if not reason]
    for result, buffer, destination in zip(written, buffers, destinations):
        assert result.data_ptr() == destination.data_ptr()
        per_row = destination.shape[case.batch] // rows
        before, _, after = buffer.split_with_sizes([per_row, per_row * rows, 2 * per_row], case.batch)
        assert (before == before.new_tensor(POISON)).all() and (after == after.new_tensor(POISON)).all()


@pytest.mark.parametrize("name", CASES)
def test_every_size_against_eager(name, compiled):
    case, made = CASES[name], compiled[name]
    for rows in (6, 3, 1, 2, 8, 17):
        variant = made.variant({"s0": rows}, static=False)
        for word, reason in zip(case.own, variant.own, strict=True):
            assert (word in reason) if word else not reason
        check(case, variant, rows)
    assert len(compiled[name]._share().dynamic) <= 2  # one row may need a variant of its own


@pytest.mark.parametrize("name", ["mm_3d", "sdpa_last", "sizes"])
def test_static(name, compiled):
    variant = compiled[name].variant({"s0": 3}, static=True)
    assert variant.is_static and not any(isinstance(x, str) for x in variant.inputs)
    assert variant.holds({"s0": 3}) and not variant.holds({"s0": 4})
    assert compiled[name].variant({"s0": 3}, static=True).call is variant.call
    check(CASES[name], variant, 3)


def test_no_rows_are_a_static_variant(compiled):
    variant = compiled["mm_3d"].variant({"s0": 0}, static=False)
    assert variant.is_static
    destinations = [torch.empty(0, 4, 32) for reason in variant.own if not reason]
    (result,) = variant.bind({"s0": 0})(tensors(CASES["mm_3d"].args, s0=0), destinations)
    assert result.shape == (0, 4, 32)


def test_static_variants_are_bounded(monkeypatch):
    monkeypatch.setattr(units, "MAX_STATIC", 2)
    made = unit(lambda x, w: ((x @ w) @ w,), X, W)
    first = made.variant({"s0": 2}, static=True)
    for rows in (3, 4):
        made.variant({"s0": rows}, static=True)
    assert list(made._share().static) == [(3,), (4,)]
    check(Case(lambda x, w: ((x @ w) @ w,), (X, W)), first, 2)  # whoever holds it may still call it


def test_text_and_peak(compiled):
    variant = compiled["mlp"].variant({"s0": 6}, static=False)
    assert "_df_out0" in variant.source and Path(variant.path).read_text().strip() == variant.source.strip()
    peak = variant.peak_bytes({"s0": 6})
    assert 6 * 64 * 4 <= peak <= 4 * 6 * 64 * 4
    assert variant.peak_bytes({"s0": 12}) == 2 * peak
    assert compiled["mm_3d"].variant({"s0": 6}, static=False).peak_bytes({"s0": 6}) == 0
    # what an extern kernel allocates is counted by what is asserted of it
    assert compiled["sdpa_last"].variant({"s0": 6}, static=False).peak_bytes({"s0": 6}) == 6 * 2 * 8 * 32 * 4


def test_guards():
    made = unit(lambda x: (x.view(-1, 2, 32) @ x.new_ones(32, 32),), X)
    variant = made.variant({"s0": 6}, static=False)
    assert variant.holds({"s0": 8}) and not variant.holds({"s0": 3})
    with pytest.raises(NotCompiled):
        made.variant({"s0": 3}, static=False)
    assert made.variant({"s0": 8}, static=False).call is variant.call


def test_two_symbols_that_turn_out_equal():
    fn, args = (lambda x, y: (x + y @ y.new_ones(32, 32),)), (X, spec("s1", 32))
    made = unit(fn, *args, symbols=("s0", "s1"))
    variant = made.variant({"s0": 6, "s1": 6}, static=False)
    assert not variant.holds({"s0": 6, "s1": 5})
    given = tensors(args, s0=4, s1=4)
    assert variant.holds({"s0": 4, "s1": 4})
    out = torch.empty(4, 32)
    variant.bind({"s0": 4, "s1": 4})(given, [out])
    torch.testing.assert_close(out, fn(*given)[0])


def test_constants_belong_to_the_unit():
    class Scaled(torch.nn.Module):
        def __init__(self, by):
            super().__init__()
            self.register_buffer("by", by)

        def forward(self, x):
            return (x @ self.by,)

    first, second = torch.randn(32, 32), torch.randn(32, 32)
    x, out = torch.randn(3, 32), torch.empty(3, 32)
    made = [CompiledUnit(fx.symbolic_trace(Scaled(by)), [X], ["s0"]) for by in (first, second)]
    for variant, by in zip([u.variant({"s0": 3}, static=False) for u in made], (first, second)):
        assert variant.call is made[0].variant({"s0": 5}, static=False).call
        variant.bind({"s0": 3})([x], [out])
        torch.testing.assert_close(out, x @ by)


def test_random_numbers_are_eager_modes():
    fn = lambda x: (F.dropout(x, 0.5), torch.rand_like(x) + x)  # noqa: E731
    variant = unit(fn, X).variant({"s0": 6}, static=False)
    for rows in (6, 3):
        x = torch.randn(rows, 32)
        torch.manual_seed(3)
        expected = fn(x)
        torch.manual_seed(3)
        results = variant.bind({"s0": rows})([x], [torch.empty(rows, 32) for reason in variant.own if not reason])
        torch.testing.assert_close(list(results), list(expected), rtol=0, atol=0)


def test_autocast_around_is_not_applied_twice():
    fn, args = product_without_autocast, (X, W)
    with torch.autocast("cpu", torch.bfloat16):
        made = unit(fn, *args, dynamo=True)
    variant = made.variant({"s0": 3}, static=False)  # outside: the unit knows the state that it was made in
    assert [bool(reason) for reason in variant.own] == [True, False]
    given = tensors(args, s0=3)
    with torch.autocast("cpu", torch.bfloat16):
        expected = fn(*given)
        results = variant.bind({"s0": 3})(given, [torch.empty(3, 32, dtype=torch.bfloat16)])
    assert [r.dtype for r in results] == [torch.float32, torch.bfloat16]
    torch.testing.assert_close(list(results), list(expected))


def test_grad_mode_inside_does_not_reach_the_caller():
    def fn(x, w):
        with torch.no_grad():
            y = x @ w
        return (y @ w,)

    with torch.enable_grad():
        made = unit(fn, X, W, dynamo=True)
    variant = made.variant({"s0": 3}, static=False)
    assert torch._C._set_grad_enabled in {n.target for n in made.fn.graph.nodes} and variant.own == ("",)
    check(Case(fn, (X, W)), variant, 3)
    assert not torch.is_grad_enabled()


def test_a_result_whose_size_depends_on_data():
    variant = unit(lambda x: (torch.nonzero(x),), X).variant({"s0": 6}, static=False)
    assert variant.own == ("extern kernel aten.nonzero.default allocates its own result",) and variant.strides({"s0": 3}) == (None,)
    x = torch.randn(3, 32).relu()
    assert torch.equal(variant.bind({"s0": 3})([x], [])[0], torch.nonzero(x))


def test_code_that_is_not_understood_runs_through_aot():
    def fn(x):
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))

    variant = unit(fn, spec(4, 32), dynamo=True).variant({}, static=False)
    assert len(variant.own) == 1 and "unknown form" in variant.own[0]
    assert variant.shared == (True,), "for all that is known"
    for x in (torch.ones(4, 32), -torch.ones(4, 32)):
        torch.testing.assert_close(variant.bind({})([x], [])[0], fn(x))


def test_an_output_may_be_an_argument_behind_aots_own_function_too():
    variant = unit(lambda x: (torch.zeros_like(x) + x, x * 2, x[:, 1:]), spec("s0", 4)).variant({"s0": 3}, static=False)
    x = torch.randn(3, 4)
    results = variant.bind({"s0": 3})([x], [])
    assert variant.own[0].startswith("AOT") and variant.shared == (True, False, True)
    assert [result.untyped_storage().data_ptr() == x.data_ptr() for result in results] == [True, False, True]


@pytest.mark.parametrize("sizes", [{"s0": 2.5}, {"s0": True}])
def test_rejects_a_number_that_is_no_integer(sizes):
    with pytest.raises(NotCompiled, match="s0 is a"):
        unit(lambda x: (x @ x.new_ones(32, 32),), X).variant(sizes, static=False)


def test_rejects_an_unknown_symbol():
    with pytest.raises(NotCompiled, match="s9"):
        unit(lambda x: (x,), spec("s9", 4))


def test_no_graph_is_captured_while_a_unit_is_compiled(monkeypatch):
    """Compiling patches settings of torch's, for all threads: captures beside it took them over, or failed."""
    others, plain = [], units.compile_graph

    def other_thread_may_capture():
        with ThreadPoolExecutor(1) as other:
            return other.submit(lambda: compile_lock.acquire(blocking=False) and not compile_lock.release()).result(30)

    monkeypatch.setattr(units, "compile_graph", lambda *args, **more: others.append(other_thread_may_capture()) or plain(*args, **more))
    made = unit(lambda x: (torch.sin(x) * 3.25,), X)
    made.variant({"s0": 4}, static=True)
    assert others == [False] and other_thread_may_capture(), "it may once that is done"


def test_rejects_what_inductor_cannot_compile():
    made = unit(lambda x, n: (x.view(7, n),), spec(4, 32), Expr("s0"))
    for _ in range(2):  # the second time from memory
        with pytest.raises(NotCompiled, match="Inductor: "):
            made.variant({"s0": 5}, static=False)


def test_rejects_a_constant_that_is_a_subclass():
    class Sub(torch.Tensor):
        pass

    gm = fx.symbolic_trace(lambda x: (x,))
    gm.register_buffer("c", torch.ones(2).as_subclass(Sub))
    with gm.graph.inserting_before(next(n for n in gm.graph.nodes if n.op == "output")):
        gm.graph.get_attr("c")
    with pytest.raises(NotCompiled, match="Sub"):
        CompiledUnit(gm, [Spec(("2",), ("1",), torch.float32, CPU)], [])


def test_an_aten_op_with_a_kernel_for_out_writes_in_place():
    """cumsum is an extern kernel that allocates; `cumsum.out` writes where it is told. A convolution's `out` would copy."""

    def fn(x):
        return (torch.cumsum(x, 1), x.sum(1))

    unit = CompiledUnit(fx.symbolic_trace(fn), [Spec(("s0", "8"), ("8", "1"), torch.float32, CPU)], ["s0"])
    variant = unit.variant({"s0": 4}, static=False)
    assert variant.own == ("", "")
    x, around, sums = torch.randn(4, 8), torch.full((12, 8), 7.0), torch.empty(4)
    variant.bind({"s0": 4})([x], [around[4:8], sums])
    assert torch.equal(around[4:8], torch.cumsum(x, 1)) and (around[:4] == 7).all() and (around[8:] == 7).all()
    assert out_overload("torch.ops.aten.cumsum.default", "CPU") == "torch.ops.aten.cumsum.out"
    assert out_overload("torch.ops.aten.convolution.default", "CPU") is None
    assert out_overload("torch.ops.aten.topk.default", "CPU") is None and out_overload("torch.ops.aten.nonzero.default", "CPU") is None
