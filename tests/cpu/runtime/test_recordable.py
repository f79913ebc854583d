"""recordable=False: an op that the user keeps out of recordings is called anew on every call, its twin on no replay."""

import shutil

import pytest
import torch
from torch import nn

import dynaflow as df
from dynaflow import recorded
from dynaflow.runtime import graphs
from dynaflow.runtime.program import Layout
from dynaflow.testing.notation import flow_of
from tests.cpu.runtime.recorder import REFUSAL, FakeRecorder

# what the host knows per call, as a serving engine's metadata
HOST = {"amount": 0.0, "calls": 0}


@torch._dynamo.allow_in_graph
def attend(x):
    HOST["calls"] += 1
    return x + HOST["amount"]


class Attention(nn.Module):
    def forward(self, x):
        return attend(x) * 2


class Net(nn.Module):
    """Changes a cache before and after the op in question."""

    def __init__(self, mark=None):
        super().__init__()
        self.attn, self.mark = Attention(), mark

    def forward(self, x, cache):
        cache.add_(x)
        h = torch.sin(x)
        if self.mark is None:
            h = self.attn(h)
        else:
            with df.mark("attention", recordable=self.mark):
                h = self.attn(h)
        cache.mul_(h)
        return h.cos() + cache


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield
    HOST.update(amount=0.0, calls=0)


@pytest.fixture
def recorder(monkeypatch):
    log = []
    monkeypatch.setattr(graphs.Recordings, "make_recorder", lambda self, body, feeds: FakeRecorder(log))
    return log


# how the user says it: recordable -> (model, rules)
WAYS = {
    "module": lambda said: (Net(), ["auto", df.SplitModule("attn", recordable=said)]),
    "function": lambda said: (Net(), ["auto", df.SplitFunc(attend, recordable=said)]),
    "mark": lambda said: (Net(said), "auto"),
    "mark around a rule": lambda said: (Net(said), ["auto", df.SplitFunc(attend)]),
    "module around a rule": lambda said: (Net(), [df.SplitModule("attn", recordable=said), df.SplitFunc(attend)]),
    "rule inside a mark": lambda said: (Net(True), ["auto", df.SplitModule("attn", recordable=said)]),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("strategy", [df.Sequential(), df.TwoBatch()], ids=lambda s: type(s).__name__)
def test_what_is_not_recordable_is_called_on_every_call(recorder, way, strategy):
    model, rules = WAYS[way](False)
    fast = df.compile(model, strategy=strategy, strict=True, runtime="graph", partition=rules)
    num_parts = 2 if isinstance(strategy, df.TwoBatch) else 1
    cache = torch.randn(6, 4)
    for turn in range(6):
        x, theirs = torch.randn(6, 4), cache.clone()
        HOST.update(amount=float(turn), calls=0)
        got, calls = fast(x, cache), HOST["calls"]
        torch.testing.assert_close(got, model(x, theirs))
        torch.testing.assert_close(cache, theirs)
        assert turn == 0 or calls == num_parts, "the first call captures"
    # nothing had to be learned: a recording before the op and one behind
    assert recorder.count("begin") == recorder.count("end") >= 2 and "abort" not in recorder
    assert recorder.count("replay") >= 8


@pytest.mark.parametrize("way", WAYS)
def test_what_is_recordable_is_called_on_no_replay(recorder, way):
    """The twin: right as long as the host's number is the same."""
    HOST["amount"] = 3.0
    model, rules = WAYS[way](True)
    fast = df.compile(model, strict=True, runtime="graph", partition=rules)
    cache, calls = torch.randn(6, 4), []
    for _ in range(6):
        x, theirs = torch.randn(6, 4), cache.clone()
        HOST["calls"] = 0
        got = fast(x, cache)
        calls.append(HOST["calls"])
        torch.testing.assert_close(got, model(x, theirs))
        torch.testing.assert_close(cache, theirs)
        del got
    assert calls[1:] == [1, 0, 0, 0, 0] and recorder.count("begin") == recorder.count("end") == 1


def test_state_that_moves_out_of_the_op_is_not_recorded_either():
    def count(x, counter):
        with df.mark("counted", recordable=False):
            counter.add_(1)
            y = x * 2
        return y.cos()

    explained = df.explain(count, (torch.randn(6, 4), torch.zeros(())), df.TwoBatch(), runtime="graph")
    unrecorded = {name.split()[0] for name, _ in explained.graphs[0].unrecorded}
    assert unrecorded == {"counted", "counted.state"}


def test_explain_says_what_is_not_recorded():
    inputs = (torch.randn(6, 4), torch.zeros(6, 4))
    for said in (False, True):
        model, rules = WAYS["module"](said)
        text = str(df.explain(model, inputs, runtime="graph", partition=rules))
        assert ("not recorded: attn: recordable=False in the partition" in text) == (not said)
        assert text.count("not recorded") == (not said)


def test_what_is_known_does_not_count_as_learned(recorder, monkeypatch):
    monkeypatch.setattr("dynaflow.recorded.MAX_LEARNED", 1)

    @torch._dynamo.allow_in_graph
    def refuse(x):
        if FakeRecorder.is_recording:
            raise RuntimeError(REFUSAL)
        return x + 1

    def model(x):
        return refuse(attend(attend(x).sin()).sin()).cos()

    fast = df.compile(model, strict=True, runtime="graph", partition=[df.SplitFunc(attend, recordable=False), df.SplitFunc(refuse)])
    for _ in range(4):
        x = torch.randn(6, 4)
        torch.testing.assert_close(fast(x), model(x))
    assert recorder.count("abort") == 1 and recorder.count("replay") >= 3


# -- fusing


def chain(x):
    return first(third(second(first(x))))


def first(x):
    return torch.sin(x) * 2


def second(x):
    return torch.cos(x) + 1


def third(x):
    return torch.tanh(x) - x


RULES = [df.SplitFunc(f) for f in (first, second, third)]


def launches(rules, **options):
    torch._dynamo.reset()
    graph = df.explain(chain, torch.randn(6, 4), df.TwoBatch(), partition=rules, compiler="inductor", **options).graphs[0]
    return [[op for op, _ in launch.calls] for launch in graph.plan.launches if launch.calls[0][1].lo == 0], graph


needs_compiler = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("c++")), reason="Inductor needs a C++ compiler on the CPU")


@needs_compiler
@pytest.mark.xdist_group("inductor")
def test_what_is_not_recordable_is_fused_with_nothing_where_plans_are_recorded():
    rules = [RULES[0], df.SplitFunc(second, recordable=False), RULES[2]]
    found, graph = launches(rules, runtime="graph")
    assert found == [["first"], ["second"], ["third", "first.1"]] and len(graph.unrecorded) == 2
    whole = [["first", "second", "third", "first.1"]]
    assert launches(RULES, runtime="graph")[0] == whole
    assert launches(rules)[0] == whole, "nothing is recorded"


@torch.library.custom_op("dynaflow_test::attend", mutates_args=())
def attend_op(x: torch.Tensor) -> torch.Tensor:
    HOST["calls"] += 1
    return x + HOST["amount"]


attend_op.register_fake(lambda x: torch.empty_like(x))


@needs_compiler
@pytest.mark.xdist_group("inductor")
def test_a_custom_op_between_compiled_units():
    """Issued again: the FakeRecorder does not see what compiled code does."""

    def model(x):
        return attend_op(torch.sin(x) * 2).cos() + 1

    rules = ["auto", df.SplitFunc(attend_op, recordable=False)]
    fast = df.compile(model, strict=True, runtime="graph", compiler="inductor", partition=rules)
    for turn in range(5):
        x = torch.randn(6, 4)
        HOST.update(amount=float(turn), calls=0)
        got, calls = fast(x), HOST["calls"]
        torch.testing.assert_close(got, model(x))
        assert calls == 1


@needs_compiler
@pytest.mark.xdist_group("inductor")
def test_what_touches_the_host_is_fused_with_nothing_where_plans_are_recorded(monkeypatch):
    monkeypatch.setattr(recorded, "touches_host", lambda flow, op, layouts, device: op.name == "third")
    found, graph = launches(RULES, runtime="graph")
    assert found == [["first", "second"], ["third"], ["first.1"]]
    assert {why for _, why in graph.unrecorded} == {"it touches memory of the host, or of another device"} and len(graph.unrecorded) == 2
    assert len(launches(RULES)[0]) == 1, "nothing is recorded"


def test_what_touches_the_host():
    flow = flow_of("input x\ninput scale state\na: x -> h\nb: h scale -> y\nc: y -> z\noutput z")
    host, device, other = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)
    layouts = {v.name: Layout(torch.float32, host if v.name == "scale" else device, ("1",)) for v in flow.values}
    assert [recorded.touches_host(flow, op, layouts, torch.device("cuda")) for op in flow.ops] == [False, True, False]
    assert [recorded.touches_host(flow, op, layouts, other) for op in flow.ops] == [True, True, True]
