"""Messages are at most 12 lines, whatever they quote; and calls that are given the wrong kinds of things say so."""

import pytest
import torch

import dynaflow as df
from dynaflow import errors
from dynaflow.ir import Plan
from dynaflow.planner import sequential_plan
from tests.cpu.flows import chain

FLOW = chain()
PLAN = sequential_plan(FLOW, "")


def test_what_is_quoted_is_cut_short():
    long = "\n".join(f"line {i}" for i in range(40))
    error = errors.PlanRace(long, where=__file__ + ":1", region=long, why=long, fix=long, picture=long)
    assert error.what == error.why == long, "fields are as they were given"
    lines = str(error).splitlines()
    assert len(lines) == 12 and lines[0] == "line 0" and lines[1] == "line 1 ..." and "  fix      line 0 ..." in lines
    assert len(str(errors.OptionError("x" * 5000))) < 700


def test_what_is_short_stands_as_it_is():
    error = errors.OptionError("first\nsecond", why="why", fix="fix")
    assert str(error) == "first\nsecond\n  why      why\n  fix      fix"
    assert str(errors.OptionError("")) == ""


def test_a_tensor_in_the_place_of_a_strategy_does_not_fill_the_screen():
    with pytest.raises(errors.OptionError, match="is no strategy") as caught:
        df.explain(torch.nn.Tanh(), df.TwoBatch(), torch.randn(1, 2))
    assert "fix" in str(caught.value)
    with pytest.raises(errors.OptionError) as caught:
        df.explain(torch.nn.Tanh(), df.TwoBatch(), torch.randn(200, 20, 20))
    assert len(str(caught.value).splitlines()) <= 12 and "it has no schedule(flow)" in str(caught.value)


def test_a_long_message_of_the_strategys_own_is_cut_short():
    class Raises(df.Strategy):
        def schedule(self, flow):
            raise RuntimeError("\n".join(["oops"] * 50))

    with pytest.raises(errors.StrategyRaised, match="oops") as caught:
        df.explain(torch.nn.Tanh(), torch.randn(4, 4), Raises())
    assert len(str(caught.value).splitlines()) == 12 and "test_errors.py" in caught.value.where


@pytest.mark.parametrize("call", [df.explain, df.check])
def test_rejects_what_cannot_be_called(call):
    with pytest.raises(errors.OptionError, match="3 cannot be called"):
        call(3, torch.randn(4, 4))


@pytest.mark.parametrize("call, said", [
    (lambda: df.verify(FLOW, PLAN), r"df.verify\(plan, flow\): the flow is a Plan, and the plan is a Flow"),
    (lambda: df.verify(str(PLAN), FLOW), "the plan is a str"),
    (lambda: df.synchronise(PLAN, FLOW), r"df.synchronise\(flow, plan\)"),
    (lambda: df.place(PLAN, FLOW), r"df.place\(flow, plan\)"),
    (lambda: Plan.parse(PLAN), "Plan.parse reads text, not a Plan"),
    (lambda: PLAN.diff(str(PLAN)), "Plan.diff got a str"),
])  # fmt: skip
def test_rejects_a_flow_in_the_place_of_a_plan(call, said):
    with pytest.raises(errors.OptionError, match=said):
        call()


def test_takes_them_in_their_places():
    assert df.verify(df.place(FLOW, df.synchronise(FLOW, PLAN)), FLOW).num_launches == len(FLOW.ops)
    assert PLAN.diff(Plan.parse(str(PLAN))) == "the plans are equal\n"


def test_a_profile_without_a_plan_says_what_to_do():
    with df.profile() as profiled:
        pass
    with pytest.raises(LookupError, match="df.stats"):
        profiled.timeline


def test_every_error_that_users_see_is_in_one_place():
    """`dynaflow.errors` has them all, and each of them says what to do."""
    import dynaflow.capture  # noqa: F401

    def below(cls):
        return {cls, *(leaf for child in cls.__subclasses__() for leaf in below(child))}

    assert [cls for cls in below(errors.DynaFlowError) if cls.__module__ not in ("dynaflow.errors", __name__)] == []


def test_what_cannot_be_planned_says_what_to_do():
    def reads_back(x):
        y = torch.tanh(x)
        torch._assert_async(y.sum() < 1e9)
        return y

    with torch.no_grad():
        with pytest.raises(errors.Unplannable, match="reads a number back") as caught:
            df.compile(reads_back, strategy=df.TwoBatch(), strict=True)(torch.randn(4, 4))
        assert caught.value.why and caught.value.fix
        x, fast = torch.randn(4, 4), df.compile(reads_back, strategy=df.TwoBatch())
        assert torch.equal(fast(x), torch.tanh(x)) and df.stats(fast).fallbacks.total() == 1
