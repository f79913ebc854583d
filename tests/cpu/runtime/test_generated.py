"""The plan as generated code: straight line, the same results as every other runtime, the plan's own order of streams."""

import ast
import gc
import random
import weakref
from dataclasses import replace

import pytest
import torch

import dynaflow.testing.fuzz as fuzz
from dynaflow.ir import Plan
from dynaflow.memory import place
from dynaflow.runtime import fake, generated
from dynaflow.runtime.binder import Binder, bind
from dynaflow.runtime.lanes import Run
from dynaflow.runtime.program import COPIED, KEPT, PLACED, Call, Layout, Program, Unit, copy_as_it_lies
from dynaflow.sync import synchronise
from dynaflow.testing import random_flow
from dynaflow.testing.notation import flow_of
from tests.cpu.happens_before import happens_before
from tests.cpu.runtime.placing import placing, with_fresh_results
from tests.cpu.runtime.streams import LoggedStreams, order_of, watch


def run(bound, inputs):
    return dict(zip((n for n, _ in bound.outputs), generated.run(bound, inputs, generated.NoStreams(len(bound.streams) + 1))))


def plans(seed):
    """(case, plan, functions), each plan as it is and with some launches fused and some values loose"""
    case = random_flow(seed)
    for number, strategy in enumerate(fuzz.strategies(case)):
        for rng in (None, random.Random(seed * 10 + number)):
            yield case, *fuzz.make_plan(case, strategy, rng)


def difference(case, outputs, inputs):
    """The first value that is not as the program has it; empty when all are."""
    for name, tensor in case.reference().items():
        if not torch.equal(outputs.get(name, inputs.get(name)), tensor):
            return name
    return ""


# -- results


VARIANTS = {
    "eager": lambda program, seed: program,
    "fresh": lambda program, seed: with_fresh_results(program),
    "placed": placing,
    "aligned": lambda program, seed: placing(program, seed, 16),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_program_s_result(variant):
    seen = dict.fromkeys((PLACED, COPIED, KEPT, "scratch", "cloned", "relaid", "inside"), 0)
    for seed in range(10):
        for case, plan, functions in plans(seed):
            program = replace(VARIANTS[variant](case.program, seed), functions=functions)
            bound, inputs = bind(plan, program, case.sizes), case.inputs()
            outputs = run(bound, inputs)
            assert not (name := difference(case, outputs, inputs)), f"flow {seed}, {name}\n{plan}\n{generated.code_of(bound).source}"
            inputs = case.inputs()
            tensors = bound.tensors(inputs, poison=True)
            fake.issue(bound, Run(bound, tensors))
            assert not difference(case, bound.results(tensors), inputs)
            for call in bound.calls:
                for out in call.outs:
                    seen[out.how] += 1
                    seen["scratch"] += out.scratch is not None
                    seen["inside"] += bool(out.inside)
                seen["cloned"] += any(a.is_cloned for a in call.args)
                seen["relaid"] += any(a.stride is not None for a in call.args)
    wanted = {"eager": (COPIED, KEPT, "relaid", "inside"), "fresh": (COPIED, KEPT), "placed": (PLACED, COPIED, KEPT, "scratch", "inside"),
              "aligned": (PLACED, "scratch", "cloned")}[variant]  # fmt: skip
    assert all(seen[what] > (1 if what == "inside" else 10) for what in wanted), seen


def test_results_that_lie_in_memory_of_side_streams_are_told():
    """And no others: they are the caller's own."""
    num_told = 0
    for seed in range(10):
        for case, plan, functions in plans(seed):
            bound = bind(plan, replace(with_fresh_results(case.program), functions=functions), case.sizes)
            streams = LoggedStreams(len(bound.streams) + 1)
            results = generated.run(bound, case.inputs(), streams)
            calls = [what for _, s, what in bound.instructions if s and isinstance(what, Call)]
            sides = {out.view for call in calls for out in call.outs if out.how == KEPT}
            wanted = {r.data_ptr() for (_, i), r in zip(bound.outputs, results) if i in sides and r.numel()}
            assert {r.data_ptr() for r in streams.kept if r.numel()} == wanted
            num_told += len(wanted)
    assert num_told > 10



def test_a_wrong_line_would_be_seen():
    """The comparison has teeth: code with two arguments exchanged, or a copy left out, differs."""
    caught = set()
    for seed in range(6):
        for case, plan, functions in plans(seed):
            bound, inputs = bind(plan, replace(case.program, functions=functions), case.sizes), case.inputs()
            code = generated.code_of(bound)
            for what, wrong in (("swap", _swapped(code.source)), ("copy", _without_a_copy(code.source))):
                if wrong is None:
                    continue
                scope = {"torch": torch, "relaid": generated.relaid, "scratch": generated.scratch, "view": torch.as_strided,
                         "empty_strided": lambda *a, **k: torch.empty_strided(*a, **k).fill_(-1)}  # fmt: skip
                exec(wrong, scope)
                make = scope["make"](bound.calls, bound.placed, bound.given, bound.allocated, bound.memory.arena_bytes)
                try:
                    got = make(inputs, generated.NoStreams(len(bound.streams) + 1))
                except (RuntimeError, IndexError, TypeError, AttributeError):
                    caught.add(what)
                    continue
                if difference(case, dict(zip((n for n, _ in bound.outputs), got)), inputs):
                    caught.add(what)
    assert caught == {"swap", "copy"}


def _swapped(source):
    lines = source.splitlines()
    for i, line in enumerate(lines):
        if "unit" in line and "([" in line and line.count(", ") == 1 and "relaid" not in line:
            head, _, args = line.partition("([")
            one, other = args.removesuffix("])").split(", ")
            if one != other:
                lines[i] = f"{head}([{other}, {one}])"
                return "\n".join(lines)
    return None


def _without_a_copy(source):
    lines = source.splitlines()
    at = [i for i, line in enumerate(lines) if ".copy_(" in line]
    return "\n".join(lines[: at[-1]] + lines[at[-1] + 1 :]) if at else None


def test_sizes_share_one_source():
    num_shared = 0
    for seed in range(6):
        for case, plan, functions in plans(seed):
            if functions:
                continue
            # eager units take any batch size; the width is the case's
            binder = Binder(plan, case.program)
            cases = [case.resized(s0=case.sizes["s0"] + more) for more in (0, 3, 9)]
            bounds = [binder.bind(c.sizes) for c in cases]
            assert len({generated.code_of(b).source for b in bounds}) == 1
            assert len({generated.code_of(b).run.__code__ for b in bounds}) == 1
            for one, bound in [*zip(cases, bounds), (cases[0], bounds[0])]:
                inputs = one.inputs()
                assert not difference(one, run(bound, inputs), inputs)
                num_shared += 1
    assert num_shared > 100


def test_the_form_of_launches_is_all_that_the_source_depends_on():
    """Bindings that share a source by their form would have written the same; units that place, copy or keep differ with the sizes."""
    num_forms = num_reused = 0
    for seed in range(8):
        for case, plan, functions in plans(seed):
            binder = Binder(plan, replace(placing(case.program, seed, 16), functions=functions))
            for more in (0, 1, 2, 3, 8, 9) if not functions else (0,):
                bound = binder.bind(case.resized(s0=case.sizes["s0"] + more).sizes)
                for has_contexts in (False, True):
                    num_known = len(binder.forms)
                    code = generated.code_of(bound, has_contexts=has_contexts)
                    num_reused += len(binder.forms) == num_known
                    assert code.source == generated._written(bound, frozenset(), has_contexts).source
            num_forms += len(binder.forms)
    assert num_forms > 100 and num_reused > 100


def test_forms_are_bounded(monkeypatch):
    monkeypatch.setattr(generated, "MAX_FORMS", 3)
    for case, plan, functions in plans(0):
        binder = Binder(plan, replace(placing(case.program, 0, 16), functions=functions))
        bound = binder.bind(case.sizes)
        for number in range(5):
            source = generated.generate(bound, frozenset({number % len(bound.calls)})).source
            assert source == generated._written(bound, frozenset({number % len(bound.calls)}), False).source
        assert len(binder.forms) <= 3


def test_straight_line():
    for seed in range(2):
        for case, plan, functions in plans(seed):
            bound = bind(plan, replace(placing(case.program, seed, 16), functions=functions), case.sizes)
            for eager in (frozenset(), frozenset({0, len(bound.calls) - 1})):
                source = generated.code_of(bound, eager).source
                (make,) = ast.parse(source).body
                (body,) = [node.body for node in make.body if isinstance(node, ast.FunctionDef)]
                assert {type(s) for s in body} <= {ast.Assign, ast.Expr, ast.Delete, ast.Return}


def test_kept_results_are_dropped_where_the_plan_says():
    num_dropped = 0
    for seed in range(8):
        for case, plan, functions in plans(seed):
            if not plan.loose:
                continue
            bound = bind(plan, replace(with_fresh_results(case.program), functions=functions), case.sizes)
            alive = {}

            def watched(number, call, outs, bound=bound, alive=alive):
                def launch(args):
                    dead = {i for k in range(number + 1) for i in bound.drops[k]}
                    args_alive = {i for i, ref in alive.items() if ref() is not None}
                    assert not args_alive & dead
                    results = call(args)
                    for out, result in zip(outs, results):
                        # what is laid out anew is another tensor
                        if out.how == KEPT and result.stride() == out.stride:
                            alive[out.view] = weakref.ref(result)
                    return results

                return launch

            for number, call in enumerate(bound.calls):
                call.entry = replace(call.entry, call=watched(number, call.entry.call, call.outs))
            gc.disable()
            try:
                run(bound, case.inputs())
            finally:
                gc.enable()
            num_dropped += len(alive)
    assert num_dropped > 60


# -- names


def test_names_that_collide():
    """Values, streams and events that are called like what the generated code uses itself, keywords, and like each other."""
    words = ["caller", "results", "lambda", "inputs", "unit0", "at_1", "e0", "fork", "a.b", "a_b", "None", "rows_0", "shape_9", "n0_0",
             "stride0_0", "arena", "arena_float32", "streams", "torch", "view", "0", "calls", "given", "start"]  # fmt: skip
    ops = "\n".join(f"op{i}: {a} -> {b}" for i, (a, b) in enumerate(zip(words, words[1:])))
    flow = flow_of(f"input {words[0]}\n{ops}\noutput {words[-1]}")
    layout = Layout(torch.float32, torch.device("cpu"), ("4", "1"))
    units = {op.name: Unit(lambda x, i=i: (x * 2 + i,), op.reads, op.writes) for i, op in enumerate(flow.ops)}
    program = Program(flow, units, dict.fromkeys(words[1:], layout))
    for streams in (["results", "unit1"], ["e0", "join"], ["between", "make"]):
        steps = "\n".join(f"launch {op.name} {k}/2 @{streams[k]}" for op in flow.ops for k in range(2))
        plan = Plan.parse(f"plan {flow.label}\n" + "\n".join(f"stream {s}" for s in streams) + f"\n{steps}\n")
        for loose in (frozenset(), frozenset(words)):
            placed = place(flow, synchronise(flow, plan), loose)
            x = torch.randn(6, 4)
            wanted = x
            for i in range(len(flow.ops)):
                wanted = wanted * 2 + i
            assert torch.equal(run(bind(placed, program, {"s0": 6}), {"caller": x})[words[-1]], wanted)


# -- errors


class Fault(Exception):
    pass


def test_an_error_names_its_launch():
    num_checked = 0
    for seed in range(3):
        for case, plan, functions in plans(seed):
            bound = bind(plan, replace(placing(case.program, seed, 16), functions=functions), case.sizes)
            calls, plain = bound.calls, [call.entry for call in bound.calls]
            fail_at = [-1]

            def failing(number, call, fail_at=fail_at):
                def launch(args):
                    if number == fail_at[0]:
                        raise Fault
                    return call(args)

                return launch

            for number, call in enumerate(calls):
                call.entry = replace(plain[number], call=failing(number, plain[number].call))
            for number, call in enumerate(calls):
                fail_at[0] = number
                streams = LoggedStreams(len(bound.streams) + 1)
                with pytest.raises(Fault) as error:
                    generated.run(bound, case.inputs(), streams)
                (note,) = error.value.__notes__
                assert f"raised by '{call.label}' on " in note and f"(launch {number + 1} of {len(calls)}" in note
                assert streams.has_joined
                changed = {name for c in calls[: number + 1] for name in c.mutates}
                assert all(f"{name} (by " in note for name in changed) and ("already: none" in note) == (not changed)
                num_checked += 1
    assert num_checked > 300


def test_an_error_while_a_result_is_put_in_place_names_its_launch():
    flow = flow_of("input x\na: x -> h\nb: h -> y\noutput y")
    layout = Layout(torch.float32, torch.device("cpu"), ("4", "1"))
    for wrong, label in (("a", "a"), ("b", "b")):
        units = {n: Unit(lambda v, n=n: (v[:, :3] if n == wrong else v + 1,), op.reads, op.writes) for n, op in zip("ab", flow.ops)}
        bound = bind(place(flow, Plan.parse(f"plan {flow.label}\nlaunch a @caller\nlaunch b @caller\n")),
                     Program(flow, units, {"h": layout, "y": layout}), {"s0": 2})  # fmt: skip
        with pytest.raises(RuntimeError) as error:
            run(bound, {"x": torch.zeros(2, 4)})
        assert f"raised by '{label}'" in error.value.__notes__[0]


# -- outputs


@pytest.mark.parametrize(
    "streams, is_late",
    [("ccc", True), ("sss", True), ("sst", True), ("css", False), ("scs", False), ("scc", True)],
)
def test_outputs_are_allocated_when_they_are_needed(streams, is_late):
    """The caller's memory: late where nothing runs on the caller's stream before, or all that touches the output runs there."""
    flow = flow_of("input x\na: x -> h\nb: h -> g\nc: g -> y\noutput y")
    layout = Layout(torch.float32, torch.device("cpu"), ("4", "1"))
    units = {op.name: Unit(lambda v: (v + 1,), op.reads, op.writes) for op in flow.ops}
    at = [{"c": "caller"}.get(s, s) for s in streams]
    named = "".join(f"stream {name}\n" for name in sorted(set(at) - {"caller"}))
    text = f"plan {flow.label}\n{named}" + "".join(f"launch {op.name} @{stream}\n" for op, stream in zip(flow.ops, at))
    plan = place(flow, synchronise(flow, Plan.parse(text)))
    bound = bind(plan, Program(flow, units, dict.fromkeys("hgy", layout)), {"s0": 2})
    log, outputs = ordered(bound, {"x": torch.zeros(2, 4)})
    assert torch.equal(outputs["y"], torch.full((2, 4), 3.0))
    lines = generated.code_of(bound).source.splitlines()
    (allocated,) = [i for i, line in enumerate(lines) if line.strip().startswith("y = empty_strided(")]
    before = [name for name in "ab" if any(line.strip().startswith(f"# {name}") for line in lines[:allocated])]
    assert before == (["a", "b"] if is_late else [])
    number = streams[2]
    if is_late and number != "c":
        waits = [line for line in lines[allocated:] if f"fork.record(caller); {number}.wait_event(fork)" in line]
        assert waits, "who touches the caller's memory waits for what the caller's stream did with it"


# -- files


def test_saved_for_the_curious(tmp_path, monkeypatch):
    monkeypatch.setenv("DYNAFLOW_DIR", str(tmp_path))
    monkeypatch.setattr(generated, "_sources", {})
    case, plan, functions = next(plans(3))
    bound = bind(plan, replace(case.program, functions=functions), case.sizes)
    run(bound, case.inputs())
    code = generated.code_of(bound)
    saved = sorted(path.name for path in (tmp_path / "plans").iterdir())
    assert [name.rpartition(".")[2] for name in saved] == ["plan", "py"] and all(name.startswith("random") for name in saved)
    assert (tmp_path / "plans" / saved[1]).read_text() == code.source and code.path == str(tmp_path / "plans" / saved[1])
    assert Plan.load(tmp_path / "plans" / saved[0]) == plan


def test_a_disk_that_refuses_costs_nothing(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("DYNAFLOW_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(generated, "_sources", {})
    case, plan, functions = next(plans(3))
    bound, inputs = bind(plan, replace(case.program, functions=functions), case.sizes), case.inputs()
    assert not difference(case, run(bound, inputs), inputs)


# -- the order of streams


def ordered(bound, inputs, eager=frozenset()):
    streams = LoggedStreams(len(bound.streams) + 1)
    watch(bound, streams)
    outputs = generated.run(bound, inputs, streams, streams.between, eager)
    assert streams.current == 0 and not streams.has_joined
    return streams.log, dict(zip((n for n, _ in bound.outputs), outputs))


def test_launches_are_ordered_as_in_the_plan():
    num_pairs = 0
    for seed in range(10):
        for case, plan, functions in plans(seed):
            bound, inputs = bind(plan, replace(case.program, functions=functions), case.sizes), case.inputs()
            log, outputs = ordered(bound, inputs)
            index = {"caller": 0, **{s.name: i for i, s in enumerate(plan.streams, 1)}}
            assert [(n, s) for kind, n, s in log if kind == "launch"] == [(n, index[la.stream]) for n, la in enumerate(plan.launches)]
            assert order_of(log) == happens_before(plan) and not difference(case, outputs, inputs)
            num_pairs += len(order_of(log))
    assert num_pairs > 1000


def test_a_wait_that_is_left_out_would_be_seen():
    case = random_flow(1)
    plan, _ = fuzz.make_plan(case, fuzz.TwoBatch())
    log, _ = ordered(bind(plan, case.program, case.sizes), case.inputs())
    waits = [i for i, (kind, _, stream) in enumerate(log) if kind == "wait" and stream]
    assert waits and any(order_of(log[:i] + log[i + 1 :]) != order_of(log) for i in waits)


def is_joined(log):
    """Whether streams start with a wait, and the caller's has everything behind it, waits too, at each step and at the end: CUDA makes
    no recording otherwise."""
    known: dict[int, set[int]] = {}
    events: dict[int, set[int]] = {}
    forked = {0}
    for at, (kind, what, stream) in enumerate([*log, ("step", None, 0)]):
        mine = known.setdefault(stream, set())
        forked = {0} if kind == "step" else forked | {stream} if kind == "wait" else forked
        if stream not in forked:
            return False
        if kind == "step" and mine < set().union(*known.values()):
            return False
        if kind == "record":
            events[what] = set(mine)
        elif kind == "wait":
            mine |= events[what]
        if kind == "launch" or (kind == "wait" and stream):
            mine.add(at)
    return True


def check_steps(log, plan, eager):
    """Around a step all streams are joined; no event from before it is waited for behind it."""
    order, launches = order_of(log), range(len(plan.launches))
    if not happens_before(plan) <= order:
        return "the plan's order is lost"
    for step in eager:
        if not {(n, step) for n in launches if n < step} | {(step, n) for n in launches if n > step} <= order:
            return "a stream goes past a step"
    recorded: set[int] = set()
    for kind, what, _ in log:
        if kind == "step":
            recorded.clear()
        elif kind == "record":
            recorded.add(what)
        elif kind == "wait" and what not in recorded:
            return "a wait for an event of an earlier recording"
    return "" if is_joined(log) else "a stream is not forked behind a step, or not joined before it or at the end"


def test_around_eager_steps_all_streams_join():
    num_steps = 0
    for seed in range(4):
        rng = random.Random(seed)
        for case, plan, functions in plans(seed):
            numbers = range(len(plan.launches))
            for eager in (frozenset(rng.sample(numbers, min(2, len(numbers)))), frozenset(numbers), frozenset({numbers[-1]})):
                bound, inputs = bind(plan, replace(placing(case.program, seed, 16), functions=functions), case.sizes), case.inputs()
                log, outputs = ordered(bound, inputs, eager)
                assert {n for kind, n, _ in log if kind == "step"} == eager
                assert not check_steps(log, plan, eager), f"flow {seed}, {check_steps(log, plan, eager)}\n{plan}"
                assert not difference(case, outputs, inputs)
                num_steps += len(eager)
    assert num_steps > 300


def test_a_missing_join_or_fork_would_be_seen():
    """Twin: a wait around a step that is left out is noticed. (A join may be one too many, where another stream has joined it.)"""
    case = random_flow(1)
    plan, _ = fuzz.make_plan(case, fuzz.TwoBatch())
    eager = frozenset({len(plan.launches) // 2})
    log, _ = ordered(bind(plan, case.program, case.sizes), case.inputs(), eager)
    assert not check_steps(log, plan, eager)
    (step,) = [i for i, entry in enumerate(log) if entry[0] == "step"]
    joins = [i for i in range(step) if log[i][0] == "wait" and not log[i][2]]
    streams = {stream for _, _, stream in log[step + 1 :] if stream}
    forks = [next(i for i in range(step + 1, len(log)) if log[i][0] == "wait" and log[i][2] == s) for s in streams]
    found = {i: check_steps(log[:i] + log[i + 1 :], plan, eager) for i in (*joins, *forks)}
    assert joins and any(found[i] for i in joins) and forks and all(found[i] for i in forks)


LAYOUTS = {
    "dense": lambda x: x, "gaps": lambda x: x[:, ::2], "transposed": lambda x: x.t(), "expanded": lambda x: x[:1].expand(5, -1),
    "windows": lambda x: x.flatten().unfold(0, 4, 2), "nothing": lambda x: x[:0], "a number": lambda x: x[0, 0],
    "the last rows": lambda x: x[3:],
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_copy_that_is_aligned_lies_as_the_tensor_does(layout):
    x = LAYOUTS[layout](torch.randn(31)[1:].view(5, 6))
    copy = copy_as_it_lies(x)
    assert torch.equal(copy, x) and copy.stride() == x.stride() and copy.data_ptr() % 16 == 0
    assert not x.numel() or copy.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    extent = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride())) if x.numel() else 0
    assert copy.untyped_storage().nbytes() == 4 * extent, "nothing of what lies before or behind it"
