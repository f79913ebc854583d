"""Units of fused ops run as one: the same results, the same changes in place, and no tensor kept longer than needed."""

import random
import weakref
from dataclasses import replace

import pytest
import torch

import dynaflow.testing.fuzz as fuzz
from dynaflow.ir import Plan
from dynaflow.memory import place
from dynaflow.runtime import fake, threads
from dynaflow.runtime.binder import bind
from dynaflow.runtime.compose import compose
from dynaflow.runtime.lanes import Run
from dynaflow.runtime.program import Expr, Layout, Program, Unit
from dynaflow.testing import random_flow
from dynaflow.testing.notation import flow_of

DOUBLE = Unit(lambda x: (x * 2,), ("x",), ("h",))
ADD = Unit(lambda h, w, n: (h + w, h * n), ("h", "w", Expr("s0")), ("r", "s"))
BUMP = Unit(lambda s, x: (s.add_(x), x.add_(1))[:0], ("s", "x"), ())
LAST = Unit(lambda r, s, x: (r + s + x,), ("r", "s", "x"), ("y",))


def test_takes_what_nobody_made_and_returns_what_is_needed():
    unit = compose([DOUBLE, ADD, BUMP, LAST], ("s", "y"))
    assert unit.args == ("x", "w", Expr("s0")) and unit.outs == ("s", "y")
    x, w = torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])
    s, y = unit.fn(x, w, 3)
    # h = 2 4, r = 12 24, s = 6 12 and then 7 14, x = 2 3
    assert s.tolist() == [7, 14] and x.tolist() == [2, 3] and y.tolist() == [21, 41]


def test_code_is_written_for_units_that_are_called():
    """A unit that somebody else compiles needs none; one that runs as it is has its function from the start, not the one that writes it."""
    unit = compose([DOUBLE, ADD], ("s",))
    assert unit.fn._needs_recompile()
    bound = bind(place(FLOW, Plan.parse(f"plan {FLOW.label}\nlaunch [a, b, c] @caller\n")), PROGRAM, SIZES)
    (call,) = bound.calls
    (function,) = [cell.cell_contents for cell in call.entry.call.__closure__]
    assert function.__func__.__name__ == "forward"


def test_local_tensors_die_behind_their_last_use():
    alive: dict[str, weakref.ref] = {}

    def make(name):
        def fn(x):
            assert [n for n, ref in alive.items() if ref() is not None] == list(alive)[-1:]
            result = x + 1
            alive[name] = weakref.ref(result)
            return (result,)

        return fn

    units = [Unit(make(f"v{i}"), (f"v{i - 1}" if i else "x",), (f"v{i}",)) for i in range(5)]
    (last,) = compose(units, ("v4",)).fn(torch.zeros(3))
    assert last.tolist() == [5, 5, 5] and [ref() is not None for ref in alive.values()] == [False] * 4 + [True]


FLOW = flow_of("""
    input x
    a: x -> h
    b: h -> r
    c: h r -> y
    output y
""")
LAYOUT = Layout(torch.float32, torch.device("cpu"), ("4", "1"))
UNITS = {
    "a": Unit(lambda x: (x * 3,), ("x",), ("h",)),
    "b": Unit(lambda h: (h + 1,), ("h",), ("r",)),
    "c": Unit(lambda h, r: (h * r,), ("h", "r"), ("y",)),
}
PROGRAM = Program(FLOW, UNITS, dict.fromkeys(("h", "r", "y"), LAYOUT))
SIZES = {"s0": 6}


def run(steps: str, loose: tuple[str, ...] = (), program: Program = PROGRAM) -> torch.Tensor:
    launches = "\n".join(f"launch {s} @caller" for s in steps.split("; "))
    plan = place(FLOW, Plan.parse(f"plan {FLOW.label}\n{launches}\n"), frozenset(loose))
    assert set(plan.loose) == set(loose)
    return fake.run(plan, program, {"x": torch.arange(24.0).view(6, 4)}, SIZES)["y"]


EXPECTED = (torch.arange(24.0).view(6, 4) * 3) * (torch.arange(24.0).view(6, 4) * 3 + 1)


@pytest.mark.parametrize(
    ("steps", "loose"),
    [
        ("[a, b, c]", ()), ("[a, b]; c", ()), ("[a, b]; c", ("h", "r")), ("a; [b, c]", ("h",)), ("a; b; c", ("h", "r")),
        ("[a, b] 0/2; [a, b] 1/2; c", ()), ("a; [b, c] 0/3; [b, c] 1:3/3", ("h",)), ("[a, b]; c 0/2; c 2/4; c 3/4", ("h", "r")),
        ("[a, b] 1/2; [a, b] 0/2; c 3/4; c 0/2; c 2/4", ("h", "r")),
    ],
)  # fmt: skip
def test_fused_and_loose_give_the_program_s_result(steps, loose):
    assert torch.equal(run(steps, loose), EXPECTED)


def test_a_loose_result_that_is_its_argument_is_copied():
    """`x.contiguous()` returns x: what it is made of may be gone, or changed, while it lives."""
    program = Program(FLOW, {**UNITS, "b": Unit(lambda h: (h,), ("h",), ("r",))}, PROGRAM.layouts)
    plan = place(FLOW, Plan.parse(f"plan {FLOW.label}\nlaunch a @caller\nlaunch b @caller\nlaunch c @caller\n"), frozenset({"r"}))
    bound = bind(plan, program, SIZES)
    tensors = bound.tensors({"x": torch.ones(6, 4)})
    for instruction in bound.instructions[:2]:
        instruction.what(tensors)
    h, r = (tensors[i] for i, view in enumerate(bound.views) if view.value in "hr")
    assert torch.equal(h, r) and h.untyped_storage().data_ptr() != r.untyped_storage().data_ptr()


def test_drops_name_the_views_of_dropped_tensors():
    text = f"plan {FLOW.label}\nlaunch a @caller\nlaunch b @caller\nlaunch c 0/2 @caller\nlaunch c 1/2 @caller\n"
    bound = bind(place(FLOW, Plan.parse(text), frozenset({"h"})), PROGRAM, SIZES)
    named = [[f"{bound.views[i].value} {bound.views[i].part}".rstrip() for i in point] for point in bound.drops]
    assert named == [[], [], [], [], ["h", "h 0/2", "h 1/2"]]


@pytest.mark.parametrize("seed", range(12))
def test_threads_run_fused_plans_with_loose_values(seed):
    case = random_flow(seed)
    expected = case.reference()
    for number, strategy in enumerate(fuzz.strategies(case)):
        plan, functions = fuzz.make_plan(case, strategy, random.Random(seed * 10 + number))
        bound, inputs = bind(plan, replace(case.program, functions=functions), case.sizes), case.inputs()
        tensors = bound.tensors(inputs, poison=True)
        threads.issue(bound, Run(bound, tensors))
        outputs = bound.results(tensors)
        assert all(torch.equal(outputs.get(name, inputs.get(name)), tensor) for name, tensor in expected.items())
