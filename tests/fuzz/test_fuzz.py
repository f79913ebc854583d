"""A small run of `make fuzz`, and that it would notice."""

import os
import pickle
import random
import subprocess
import sys
from collections import Counter

import pytest

import dynaflow
import dynaflow.testing.fuzz as fuzz
from dynaflow.errors import DynaFlowError
from dynaflow.ir import Launch, Wait
from dynaflow.memory import drop_points
from dynaflow.runtime import loose
from dynaflow.testing import MUTATIONS, RandomStrategy, harmless_edit, mutate, random_flow, show_wrong
from dynaflow.verify import order, structure, verify

VERIFY = sys.modules["dynaflow.verify"]  # the name `dynaflow.verify` is the function


def test_random_flows_give_the_program_s_result_under_every_interleaving():
    tally = fuzz.fuzz(60, 5, 0, quiet=True)
    assert not tally.violations, "\n".join(tally.violations[:3])
    assert tally.counts["plans"] == 420 and tally.counts["replacements"] > 20 and tally.counts["streams"] > 300
    assert tally.counts["fused plans"] == 420
    assert min(tally.counts["fused"], tally.counts["internal"], tally.counts["loose"]) > 300
    assert tally.counts["flows with pieces"] > 15 and tally.counts["changed loose"] > 15


def test_wrong_mutants_are_refused():
    tally = fuzz.fuzz(0, 5, 900, quiet=True)
    assert not tally.violations, "\n".join(tally.violations[:3])
    total = sum(tally.mutants.values(), Counter())
    assert len(tally.mutants) >= 50 and total["made"] >= 900 and total["wrong"] > 500
    # Valid mutants exist, and are accepted.
    assert total["accepted"] > 50


# -- it would notice: a verifier with a hole is caught


@pytest.mark.parametrize("hole", [
    "nothing is checked", "reads are not checked", "slots are not checked", "the end is not checked", "loose values are not checked",
    "the order inside a launch is not checked", "pieces have no slot", "a home is not its pieces",
])  # fmt: skip
def test_notices_a_hole_in_the_verifier(monkeypatch, hole):
    real_order, real_touches = order.check_order, order.touches_of
    if hole == "nothing is checked":
        monkeypatch.setattr(VERIFY, "check_order", lambda plan, flow, indexed: 0)
    elif hole == "reads are not checked":
        monkeypatch.setattr(order, "touches_of", lambda flow: [([], writes, groups) for _, writes, groups in real_touches(flow)])
    elif hole == "slots are not checked":
        blind = lambda plan, flow, indexed: real_order(plan, flow, indexed._replace(slot_of=[-1] * len(indexed.slot_of)))  # noqa: E731
        monkeypatch.setattr(VERIFY, "check_order", blind)
    elif hole == "loose values are not checked":
        blind = lambda plan, flow, *_: {flow.storage_index[flow.value[n].storage] for n in plan.loose if n in flow.value}  # noqa: E731
        monkeypatch.setattr(structure, "check_loose", blind)
    elif hole == "pieces have no slot":
        monkeypatch.setattr(VERIFY, "check_order", lambda p, f, i: real_order(p, f, i._replace(slot_of=_of_homes(f, i.slot_of))))
    elif hole == "a home is not its pieces":
        monkeypatch.setattr(order, "touches_of", lambda flow: _blind_to_pieces(flow, real_touches(flow)))
    elif hole == "the order inside a launch is not checked":
        monkeypatch.setattr(VERIFY, "check_order", lambda p, f, i: real_order(*_sorted(p, f, i)))
    else:
        monkeypatch.setattr(VERIFY, "check_order", lambda p, f, i: real_order(p, f, i._replace(steps=_joined(i))))
    missed = (v for seed in range(80) for v in fuzz.check_mutants(seed, 4, 15).violations if "accepted, and wrong" in v)
    assert next(missed, None), f"{hole}, and no mutant shows it"


def _sorted(plan, flow, indexed):
    """The plan with the calls of every fused launch in the order of the program."""
    steps = [
        fuzz.replace(s, calls=tuple(sorted(s.calls, key=lambda call: flow.index[call[0]]))) if type(s) is Launch and not s.replace else s
        for s in plan.steps
    ]  # fmt: skip
    plan = fuzz.replace(plan, steps=tuple(steps))
    return plan, flow, structure.index(plan, flow)


def _of_homes(flow, slot_of):
    return [slot if flow.home_storage[storage] == storage else -1 for storage, slot in enumerate(slot_of)]


def _blind_to_pieces(flow, touches):
    """Who reads a home does not see its pieces."""
    table = []
    for op, (reads, writes, groups) in zip(flow.ops, touches):
        hidden = {flow.storage_index[p] for v in op.reads for p in flow.pieces.get(v, ())}
        table.append(([read for read in reads if read[0] not in hidden], writes, groups))
    return table


def _joined(indexed):
    """The steps, with a join of every stream at the end."""
    events = sum(kind == -1 for _, kind, _ in indexed.steps)
    joins = []
    for k, s in enumerate(range(1, len(indexed.streams))):
        joins += [(s, -1, events + k), (0, -2, events + k)]
    return indexed.steps + joins


@pytest.mark.parametrize("hole", ["dropped when issued", "dropped when read on one stream", "changes in place do not count"])
def test_notices_memory_that_is_given_back_too_early(monkeypatch, hole):
    """The fake runtime overwrites what was dropped: wrong drop points change results."""

    def too_early(flow, plan):
        if hole == "changes in place do not count":
            ops = [fuzz.replace(op, mutates=(), reads=tuple(v for v in op.reads if v not in op.mutates)) for op in flow.ops]
            return drop_points(fuzz.replace(flow, ops=tuple(ops)), plan)
        points = [list(point) for point in drop_points(flow, plan)]
        for tensor in [tensor for point in points for tensor in point]:
            users = [
                n for n, launch in enumerate(plan.launches) for op, _ in launch.calls
                if tensor[0] in flow.op(op).writes or (hole != "dropped when issued" and tensor[0] in flow.op(op).reads)
            ]  # fmt: skip
            next(point for point in points if tensor in point).remove(tensor)
            points[(users[0] if hole == "dropped when issued" else users[-1]) + 1].append(tensor)
        return points

    monkeypatch.setattr(loose, "drop_points", too_early)
    wrong = (v for seed in range(60) for v in fuzz.check_flow(seed, 6).violations if "differs under order" in v)
    assert next(wrong, None)


@pytest.mark.parametrize("seed", range(20))
def test_notices_a_wait_that_is_not_needed(seed):
    case = random_flow(seed)
    plan, _ = fuzz.make_plan(case, fuzz.strategies(case)[4])
    assert not list(fuzz.plan_problems(plan, case, seed))
    if type(plan.steps[-1]) is Wait:
        extended = fuzz.replace(plan, steps=plan.steps + plan.steps[-1:])
        assert any("can be left out" in problem for problem in fuzz.plan_problems(extended, case, seed))


def test_replacements_across_parts_give_the_program_s_result():
    """A function in the place of `[a 0/2, a 1/2, b]`: what is made inside is no input of it."""
    problems, num_across = [], 0
    for seed in range(60):
        case = random_flow(seed)
        plan, functions = fuzz.make_plan(case, RandomStrategy(seed, case))
        num_across += sum(len({part for _, part in launch.calls}) > 1 for launch in plan.launches)
        verify(plan, case.flow)
        wrong = show_wrong(plan, case, case.reference(), functions=functions, num_interleavings=2)
        problems += [f"flow {seed}: {wrong}"] * bool(wrong)
    assert num_across > 20
    assert not problems, "\n".join(problems)


# -- the kit itself


def test_flows_have_everything_in_them():
    cases = [random_flow(seed) for seed in range(80)]
    ops = [op for case in cases for op in case.flow.ops]
    values = [v for case in cases for v in case.flow.values]
    assert {op.kind for op in ops} == {"compute", "memory", "network", "copy"}
    assert {token for op in ops for token in op.uses} == {"rng", "group:tp", "group:ep"}
    assert any(len(op.writes) > 1 for op in ops) and any(len(op.reads) > 2 for op in ops) and any(op.unsplittable for op in ops)
    mutated = {case.flow.value[name].role for case in cases for op in case.flow.ops for name in op.mutates}
    assert mutated >= {"input", "temp", "output"}
    assert {v.axis for v in values} == {0, 1, None} and {v.dtype for v in values} == {"int64", "int32"}
    assert any(v.storage != v.name for v in values)
    assert any(len(case.flow.outputs) > len(set(case.flow.outputs)) for case in cases)
    pieces = [(case.flow, op, v) for case in cases for op in case.flow.ops for v in op.writes if case.flow.value[v].home]
    assert {flow.value[flow.home(v)].role for flow, _, v in pieces} == {"temp", "output"} and any(len(op.writes) > 1 for _, op, _ in pieces)
    assert {flow.value[v].axis for flow, _, v in pieces} == {0, 1, None}
    for how in ("reads", "mutates", "writes"):
        touched = [(case.flow, v) for case in cases for op in case.flow.ops for v in getattr(op, how)]
        assert any(v in flow.pieces for flow, v in touched) and any(flow.value[v].home for flow, v in touched)
    read = [set().union(*(op.reads for op in case.flow.ops)) for case in cases]
    assert any(v.role == "output" and v.name in names for case, names in zip(cases, read) for v in case.flow.values)


def test_the_same_seed_gives_the_same_flow_and_mutant():
    one, two = random_flow(3), random_flow(3)
    assert one.flow == two.flow
    plan, _ = fuzz.make_plan(one, fuzz.strategies(one)[4])
    assert mutate(plan, one.flow, 5) == mutate(plan, two.flow, 5)


def test_there_are_enough_classes_of_mutants():
    assert len(MUTATIONS) >= 15


def test_mutants_differ_from_their_plan():
    case = random_flow(11)
    plan, _ = fuzz.make_plan(case, fuzz.strategies(case)[1])
    for seed in range(50):
        name, mutant = mutate(plan, case.flow, seed)
        assert name in MUTATIONS and mutant != plan


def test_the_oracle_accepts_what_is_right():
    for seed in range(10):
        case = random_flow(seed)
        for strategy in fuzz.strategies(case):
            plan, functions = fuzz.make_plan(case, strategy)
            assert show_wrong(plan, case, case.reference(), functions=functions) == ""


def test_harmless_edits_are_accepted():
    for seed in range(40):
        case = random_flow(seed)
        plan, _ = fuzz.make_plan(case, fuzz.strategies(case)[4])
        verify(harmless_edit(plan, random.Random(seed)), case.flow)


def test_the_command_prints_a_table_and_writes_figures(tmp_path, capsys):
    path = tmp_path / "fuzz.json"
    assert fuzz.main(["--flows", "2", "--interleavings", "2", "--mutants", "24", "--json", str(path)]) == 0
    assert "0 violations" in capsys.readouterr().out and '"suite": "fuzz"' in path.read_text()


def test_the_command_fails_on_a_violation(monkeypatch, capsys):
    def refuse(plan, flow):
        raise DynaFlowError("no")

    monkeypatch.setattr(fuzz, "verify", refuse)
    assert fuzz.main(["--flows", "1", "--interleavings", "1", "--mutants", "0"]) == 1
    assert "VIOLATION flow 0" in capsys.readouterr().out


# -- the same plan in every process

# Planning needs no torch: here it has none, which also makes it start in no time.
_PLANS = """
import hashlib, pickle, sys, types
sys.modules["torch"] = None
for name, path in (("dynaflow", "dynaflow"), ("dynaflow.testing", "dynaflow/testing")):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [f"{sys.argv[1]}/{path}"]
from dynaflow.context import Context
from dynaflow.fuse import fuse
from dynaflow.memory import place
from dynaflow.planner import plan
from dynaflow.strategies import Branches, CommOverlap, DualBatch, FusedGemm, Mixed, NanoBatch, NanoFlow, Sequential, TokenWeave, TwoBatch
from dynaflow.sync import synchronise
from dynaflow.testing.strategies import RandomStrategy
from dynaflow.verify import verify
for flow in pickle.load(sys.stdin.buffer):
    field = (NanoFlow(min_tokens=1), DualBatch(0), CommOverlap(2, 1), TokenWeave(1, 0), FusedGemm(2, 1), Mixed(TwoBatch(), Branches(2)))
    for strategy in (Sequential(), TwoBatch(), NanoBatch(3), Branches(3), RandomStrategy(1), *field):
        waiting = synchronise(flow, plan(flow, strategy, Context({"batch_size": 8, "device": "cpu"})))
        fused = fuse(flow, waiting, lambda op: op.kind == "compute")
        for made in (place(flow, waiting), place(flow, fused, frozenset(v.name for v in flow.values))):
            verify(made, flow)
            print(made)
"""


def test_the_plan_is_the_same_text_for_every_hash_seed():
    flows = pickle.dumps([random_flow(seed).flow for seed in range(10)])
    root = os.path.dirname(os.path.dirname(dynaflow.__file__))
    texts = set()
    for seed in range(10):
        command = [sys.executable, "-c", _PLANS, root]
        done = subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": str(seed)}, input=flows, capture_output=True)
        assert done.returncode == 0, done.stderr.decode()
        texts.add(done.stdout)
    assert len(texts) == 1 and texts.pop().count(b"plan random.") == 220
