"""Pieces and results that are changed in place, through the binder and the runtimes: nothing is lost, and nothing is copied."""

from dataclasses import replace

import pytest
import torch

from dynaflow.context import Context
from dynaflow.errors import MalformedPlan
from dynaflow.ir import Flow, Plan
from dynaflow.memory import place
from dynaflow.planner import plan as plan_by
from dynaflow.runtime import fake, generated, threads
from dynaflow.runtime.binder import bind
from dynaflow.runtime.lanes import Run
from dynaflow.runtime.program import KEPT, Entry, Layout, Program, Unit
from dynaflow.strategies import Branches
from dynaflow.sync import synchronise
from dynaflow.testing.notation import flow_of
from dynaflow.verify import verify

ORDERS = ["issue", "greedy", "lazy", *range(6)]
SIZES = {"s0": 6}
STREAMS = "stream a\nstream b\n"


def layouts_of(flow: Flow) -> dict[str, Layout]:
    """Pieces have none."""
    return {
        v.name: Layout(torch.float32, torch.device("cpu"), ("4", "1") if v.axis == 0 else ("1",)) for v in flow.values if not v.home
    }  # fmt: skip


def plan_of(flow: Flow, launches: str, loose: tuple[str, ...] = ()) -> Plan:
    plan = place(flow, synchronise(flow, Plan.parse(f"plan {flow.label}\n{STREAMS}{launches}")), frozenset(loose))
    verify(plan, flow)
    return plan


def results(plan: Plan, program: Program, x: torch.Tensor, order: str | int) -> dict[str, torch.Tensor]:
    """Under an interleaving of the fake runtime, on threads, or as generated code."""
    if order == "generated":
        bound = bind(plan, program, SIZES)
        outputs = generated.run(bound, {"x": x}, generated.NoStreams(len(bound.streams) + 1))
        return dict(zip((name for name, _ in bound.outputs), outputs))
    if order == "threads":
        bound = bind(plan, program, SIZES)
        tensors = bound.tensors({"x": x}, poison=True)
        threads.issue(bound, Run(bound, tensors))
        return bound.results(tensors)
    return fake.run(plan, program, {"x": x}, SIZES, order)


# -- two ops that write halves of one buffer

CAT = flow_of("input x\n home h p q\n one: x -> p\n two: x -> q\n sum: h -> y\n output y", "cat")
CAT_OUT = flow_of("input x\n home h p q\n one: x -> p\n two: x -> q\n sum: h -> y\n output y h", "cat_out")
LAUNCHES = "launch one @a\nlaunch two @b\nlaunch sum @b\n"
IN_PARTS = "launch one 0/2 @a\nlaunch two 0/2 @b\nlaunch two 1/2 @a\nlaunch sum 0/2 @b\nlaunch one 1/2 @b\nlaunch sum 1/2 @a\n"


def left(x, h):
    h[:, :2].copy_(x[:, :2] * 2)
    return ()


def right(x, h):
    h[:, 2:].copy_(x[:, 2:] + 1)
    return ()


def wanted_of(x):
    h = torch.cat([x[:, :2] * 2, x[:, 2:] + 1], 1)
    return {"h": h, "y": h.cumsum(1)}


def taking(flow: Flow) -> Program:
    """Units that take the home as an argument, and write into it."""
    units = {"one": Unit(left, ("x", "h"), ()), "two": Unit(right, ("x", "h"), ()), "sum": Unit(lambda h: (h.cumsum(1),), ("h",), ("y",))}
    return Program(flow, units, layouts_of(flow))


def told(flow: Flow) -> Program:
    """Units that return the home, and are told where it lies: as compiled code is."""
    units = {name: Unit(unit.fn, unit.args[:1], ("h",) if not unit.outs else unit.outs) for name, unit in taking(flow).units.items()}

    class Compiler:
        def entry(self, unit, sizes):
            def call(args):
                unit.fn(*args) if unit.outs == ("h",) else args[1].copy_(*unit.fn(args[0]))
                return args[1:]

            return Entry(call, ("",), source="test")

    return Program(flow, units, layouts_of(flow), compiler=Compiler())


@pytest.mark.parametrize("launches", [LAUNCHES, IN_PARTS], ids=["whole", "in parts"])
@pytest.mark.parametrize("make", [taking, told])
@pytest.mark.parametrize("flow", [CAT, CAT_OUT], ids=["temporary", "output"])
def test_halves_of_a_buffer(flow, make, launches):
    plan, program = plan_of(flow, launches), make(flow)
    for order in (*ORDERS, "threads", "generated"):
        x = torch.randn(6, 4)
        got, wanted = results(plan, program, x, order), wanted_of(x)
        assert list(got) == list(flow.outputs)
        for name, tensor in got.items():
            assert torch.equal(tensor, wanted[name]), f"{name} under {order!r}"
    bound = bind(plan, program, SIZES)
    assert not [copy for copy in bound.copies if copy.value == "h"] and {view.value for view in bound.views} == {"x", "h", "y"}
    assert bound.peak_bytes >= 2 * 96 and bound.memory.arena_bytes == (512 if flow is CAT else 0)


def test_the_writers_wait_for_nothing_but_the_start():
    plan = plan_of(CAT, LAUNCHES)
    assert [(w.event, w.stream) for w in plan.waits] == [("start", "a"), ("start", "b"), ("e0", "b"), ("e1", "caller")]
    assert not [edge for edge in CAT.edges if (edge.before, edge.after) == (0, 1)]
    assert {(edge.before, edge.after) for edge in CAT.edges} == {(0, 2), (1, 2)}


def test_a_missing_wait_shows_as_poison():
    plan = plan_of(CAT, LAUNCHES)
    racy = replace(plan, steps=tuple(step for step in plan.steps if step != plan.waits[2]))
    x = torch.randn(6, 4)
    assert any(not torch.equal(results(racy, taking(CAT), x, order)["y"], wanted_of(x)["y"]) for order in ORDERS)


def test_a_strategy_and_a_grid():
    made = synchronise(CAT, plan_by(CAT, Branches(2), Context({"batch_size": 6})))
    verify(place(CAT, made), CAT)
    one, two, _ = made.launches
    assert one.stream != two.stream
    rows = place(CAT, made).grid().splitlines()
    assert next(row for row in rows if "one" in row) == next(row for row in rows if "two" in row), "they may run at the same time"


def test_fused_units_that_take_the_home():
    plan = plan_of(CAT, "launch one @a\nlaunch [two, sum] @b\n")
    assert plan.slots == (("h", 0),)
    for order in (*ORDERS, "threads", "generated"):
        x = torch.randn(6, 4)
        assert torch.equal(results(plan, taking(CAT), x, order)["y"], wanted_of(x)["y"])
    x = torch.randn(6, 4)
    assert torch.equal(results(plan_of(CAT, "launch [one, two, sum] @b\n"), taking(CAT), x, "lazy")["y"], wanted_of(x)["y"])


def test_rejects_fused_units_that_return_the_home():
    bind(plan_of(CAT, LAUNCHES), told(CAT), SIZES)
    with pytest.raises(MalformedPlan, match="'two' writes a piece, and cannot write it where it lies"):
        bind(plan_of(CAT, "launch one @a\nlaunch [two, sum] @b\n"), told(CAT), SIZES)


def test_rejects_a_unit_whose_result_would_be_copied_over_the_home():
    with pytest.raises(MalformedPlan, match="'one' writes a piece(.|\n)*eager ops allocate their results"):
        bind(plan_of(CAT, LAUNCHES), replace(told(CAT), compiler=None), SIZES)


def test_a_home_is_not_cloned_for_a_unit_that_writes_a_piece_of_it():
    """Rows that are not aligned: what is written into a copy would be lost. The unit runs eagerly instead."""

    class Aligned:
        def entry(self, unit, sizes):
            return Entry(lambda args: unit.fn(*args), ("its own",) * len(unit.outs), alignment=512)

    program = replace(taking(CAT), compiler=Aligned(), layouts={**layouts_of(CAT)})
    program.layouts["x"] = program.layouts["h"]
    x = torch.randn(6, 4)
    assert torch.equal(results(plan_of(CAT, IN_PARTS), program, x, "issue")["y"], wanted_of(x)["y"])


def test_a_home_is_allocated_although_one_op_returns_all_of_it():
    """It is written in pieces before, into memory that must be there."""
    flow = flow_of("input x\n home h p q\n one: x -> p\n all: p -> h\n output h", "all")
    units = {"one": Unit(left, ("x", "h"), ()), "all": Unit(lambda h: (h[:, :2].repeat(1, 2),), ("h",), ("h",), frozenset(("h",)))}
    program = Program(flow, units, layouts_of(flow))
    for order in (*ORDERS, "threads", "generated"):
        x = torch.randn(6, 4)
        got = results(plan_of(flow, "launch one @a\nlaunch all @b\n"), program, x, order)["h"]
        assert torch.equal(got, (x[:, :2] * 2).repeat(1, 2))


# -- results that are changed in place

CHANGED = flow_of("input x\n a whole: x -> n^\n b whole: n! ->\n pad: x -> s\n c: n x s -> y\n output y", "changed")
CHANGED_OUT = flow_of("input x\n a: x -> y\n b: y! ->\n output y", "changed_out")


def test_a_loose_value_that_another_stream_changes():
    units = {
        "a": Unit(lambda x: (x.sum(0),), ("x",), ("n",), frozenset(("n",))), "b": Unit(lambda n: (n.mul_(2), ())[1], ("n",), ()),
        "pad": Unit(lambda x: (x * 3,), ("x",), ("s",)), "c": Unit(lambda n, x, s: (x + n + s,), ("n", "x", "s"), ("y",)),
    }  # fmt: skip
    program = Program(CHANGED, units, layouts_of(CHANGED))
    plan = plan_of(CHANGED, "launch a @a\nlaunch b @b\nlaunch pad @a\nlaunch c @b\n", loose=("n",))
    assert plan.loose == ("n",)
    bound = bind(plan, program, SIZES)
    assert not [copy for copy in bound.copies if copy.value == "n"]
    for order in (*ORDERS, "threads", "generated"):
        x = torch.randn(6, 4)
        torch.testing.assert_close(results(plan, program, x, order)["y"], x + x.sum(0) * 2 + x * 3)


@pytest.mark.parametrize("launches", ["launch a @a\nlaunch b @b\n", "launch a @a\nlaunch b 0/2 @b\nlaunch b 1/2 @a\n"])
def test_an_output_that_is_kept_and_changed_on_another_stream(launches):
    made = []

    def allocates(x):
        made.append(x * 3)
        return (made[-1],)

    units = {"a": Unit(allocates, ("x",), ("y",), frozenset(("y",))), "b": Unit(lambda y: (y.add_(1), ())[1], ("y",), ())}
    program = Program(CHANGED_OUT, units, layouts_of(CHANGED_OUT))
    plan = plan_of(CHANGED_OUT, launches)
    bound = bind(plan, program, SIZES)
    assert [out.how for call in bound.calls for out in call.outs] == [KEPT] and not bound.copies and not bound.allocated
    for order in (*ORDERS, "threads", "generated"):
        x = torch.randn(6, 4)
        y = results(plan, program, x, order)["y"]
        assert torch.equal(y, x * 3 + 1) and y.data_ptr() == made[-1].data_ptr(), "the very tensor that the op returned"
