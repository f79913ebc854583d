"""The runtimes issue a plan and decide nothing: order on lanes, real overlap on threads, every legal interleaving on the fake."""

import threading
import time

import pytest
import torch

from dynaflow.errors import BatchTooSmall, ContextMismatch, OptionError
from dynaflow.ir import Flow, Op, Plan, Value
from dynaflow.memory import place
from dynaflow.runtime import fake, threads
from dynaflow.runtime.binder import bind
from dynaflow.runtime.lanes import Run, profile
from dynaflow.runtime.program import Expr, Layout, Program, Unit
from dynaflow.sync import synchronise

CPU = torch.device("cpu")


def make(fns):
    """x -> a -> b (output), with the given functions."""
    values = [
        Value("x", ("s0", "4"), "float32", "16*s0", 0, "input", "x"),
        Value("a:0", ("s0", "4"), "float32", "16*s0", 0, "temp", "a:0"),
        Value("b:0", ("s0", "4"), "float32", "16*s0", 0, "output", "b:0"),
    ]
    ops = (Op("a", "compute", ("x",), ("a:0",)), Op("b", "network", ("a:0",), ("b:0",)))
    flow = Flow("two", tuple(values), ops, ("b:0",), ("s0",), ("s0",))
    layout = Layout(torch.float32, CPU, ("4", "1"))
    units = {"a": Unit(fns[0], ("x", Expr("s0")), ("a:0",)), "b": Unit(fns[1], ("a:0",), ("b:0",))}
    return flow, Program(flow, units, {"a:0": layout, "b:0": layout})


def plan_for(flow, text):
    plan = Plan.parse(f"plan {flow.label}\n{text}")
    return place(flow, synchronise(flow, plan))


TWO = "stream compute\nstream comm\nlaunch a 0/2 @compute\nlaunch b 0/2 @comm\nlaunch a 1/2 @compute\nlaunch b 1/2 @comm\n"


def numbers(x, n):
    assert x.shape[0] == n, "a part gets its own size"
    return (x * 2 + 1,)


def triple(x):
    return (x * 3,)


@pytest.mark.parametrize("order", ["issue", "greedy", "lazy", *range(8)])
def test_every_interleaving_gives_the_same(order):
    flow, program = make((numbers, triple))
    x = torch.randn(5, 4)
    out = fake.run(plan_for(flow, TWO), program, {"x": x}, {"s0": 5}, order)
    assert torch.equal(out["b:0"], (x * 2 + 1) * 3)


def test_a_missing_wait_shows_as_poison():
    flow, program = make((numbers, triple))
    plan = plan_for(flow, TWO)
    racy = Plan.parse("\n".join(line for line in str(plan).splitlines() if not (line.startswith("wait e0") and "comm" in line)))
    x = torch.randn(4, 4)
    out = fake.run(racy, program, {"x": x}, {"s0": 4}, "lazy")
    assert out["b:0"].isnan().any(), "the reader saw memory that nobody had written"


def test_unknown_orders_are_refused():
    flow, program = make((numbers, triple))
    with pytest.raises(OptionError, match="unknown order 'eager'"):
        fake.run(plan_for(flow, TWO), program, {"x": torch.randn(4, 4)}, {"s0": 4}, "eager")


def test_side_by_side():
    """Here and on a lane, which outlives what fails there."""
    seen = []
    both = threading.Barrier(2, timeout=30)  # each waits for the other

    def meet():
        seen.append(threading.current_thread().name)
        both.wait()

    threads.side_by_side(meet)
    assert sorted(seen) == sorted([threading.current_thread().name, "dynaflow-lane-1"])

    def fail_there():
        if threading.current_thread().name.startswith("dynaflow-lane"):
            raise KeyError("there")

    with pytest.raises(KeyError, match="there"):
        threads.side_by_side(fail_there)
    threads.side_by_side(meet)
    assert len(seen) == 4


def test_side_by_side_inside_of_a_launch():
    """The lanes may be waiting for that launch: it happens where it is."""
    seen = []

    def launch(x, *_):
        threads.side_by_side(lambda: seen.append(threading.current_thread().name))
        return [x + 1]

    flow, program = make([launch, launch])
    bound = bind(plan_for(flow, TWO), program, {"s0": 4})
    threads.issue(bound, Run(bound, bound.tensors({"x": torch.zeros(4, 4)})))
    assert len(seen) == 8 and all(name.startswith("dynaflow-lane") for name in seen)


def test_threads_overlap_for_real():
    def compute(x, n):
        time.sleep(0.05)
        return (x + 1,)

    def network(x):
        time.sleep(0.05)
        return (x * 2,)

    flow, program = make((compute, network))
    bound = bind(plan_for(flow, TWO), program, {"s0": 4})
    x = torch.randn(4, 4)
    tensors = bound.tensors({"x": x})
    with profile() as profiled:
        threads.issue(bound, Run(bound, tensors))
    assert torch.equal(bound.results(tensors)["b:0"], (x + 1) * 2)
    # a 1/2 sleeps while b 0/2 does; how long is the machine's business, that they are side by side is the plan's
    spans = {s.label: s for s in profiled.timeline.spans}
    assert spans["a 1/2"].start_us < spans["b 0/2"].end_us and spans["b 0/2"].start_us < spans["a 1/2"].end_us
    assert profiled.timeline.streams == ("compute", "comm") and spans["b 0/2"].kind == "network"


def test_rejects_a_batch_smaller_than_its_parts():
    flow, program = make((numbers, triple))
    with pytest.raises(BatchTooSmall, match="part 0/2 has no row"):
        bind(plan_for(flow, TWO), program, {"s0": 1})
    assert bind(plan_for(flow, TWO), program, {"s0": 2}).num_part_launches == 4


def test_rejects_a_plan_whose_function_is_not_given():
    flow, program = make((numbers, triple))
    plan = plan_for(flow, "stream compute\nlaunch my.fused[a, b] @compute\n")
    with pytest.raises(ContextMismatch, match="my.fused"):
        bind(plan, program, {"s0": 4})
    given = Program(flow, program.units, program.layouts, {"my.fused": lambda x: (x * 2 + 1) * 3})
    x = torch.randn(4, 4)
    assert torch.equal(fake.run(plan, given, {"x": x}, {"s0": 4})["b:0"], (x * 2 + 1) * 3)
