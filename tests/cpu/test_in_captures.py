"""A region for those who capture their own CUDA Graphs: it chooses in the call before a capture, and leaves what is between alone."""

import dataclasses
import functools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import dynaflow as df
from dynaflow import region, trials
from dynaflow.ir import CALLER, Op
from dynaflow.runtime import graphs
from tests.cpu.kernel_models import Branchy, Towers, call_thrice, compiled, fresh, image  # noqa: F401  (fresh is a fixture)


@pytest.fixture
def in_captures(monkeypatch):
    """Regions for somebody else's captures: their cases so far."""
    before = set(region.living)
    monkeypatch.setattr("dynaflow.engine.Region", functools.partial(region.Region, in_captures=True))
    return lambda: {key: case for made in set(region.living) - before for key, case in made.cases.items()}


def test_the_first_call_chooses(in_captures):
    model, x = Towers(), torch.randn(4, 8)
    fast = compiled(model, "threads", df.Branches(2))
    with torch.no_grad():
        first = fast(x)
        (case,) = in_captures().values()
        assert case.choice.plan and not df.stats(fast).planned_calls
        assert torch.equal(first, fast(x)) and df.stats(fast).planned_calls == 1
        torch.testing.assert_close(first, model(x))


def test_what_the_first_call_changes_is_changed_once(in_captures):
    """It is the arguments as they are behind it that are chosen by."""
    cache, x = torch.zeros(4, 8), torch.randn(4, 8)
    left, right = nn.Linear(8, 8), nn.Linear(8, 8)

    def grow(x, cache):
        cache.add_(left(x) * right(x))
        return cache * 2

    fast, wanted = compiled(grow, "auto", "auto"), torch.zeros(4, 8)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(fast(x, cache), grow(x, wanted))
            torch.testing.assert_close(cache, wanted)


def test_nothing_is_chosen_while_a_stream_is_captured(in_captures, monkeypatch):
    fast, x = df.compile(Towers(), partition="kernels", strategy=df.Branches(2), runtime="threads"), torch.randn(4, 8)
    monkeypatch.setattr(region, "is_capturing", lambda args: True)
    with torch.no_grad():
        wanted = fast(x)
        (case,) = in_captures().values()
        assert case.choice is None and set(df.stats(fast).fallbacks) == {"it was captured before it was run"}
        monkeypatch.setattr(region, "is_capturing", lambda args: False)
        assert torch.equal(fast(x), wanted) and case.choice.plan


def test_as_many_sizes_as_are_captured(in_captures, monkeypatch):
    monkeypatch.setattr(region, "MAX_CASES", 2)
    model = Towers()
    fast = compiled(model, "fake", df.Branches(2))
    with torch.no_grad():
        for rows in (2, 3, 4, 5, 6, 7):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(fast(x), model(x))
    assert len(in_captures()) == 6 and all(case.choice.plan for case in in_captures().values())


@torch.library.custom_op("dynaflow_test_region::scale", mutates_args=())
def scale(x: torch.Tensor, is_off: torch.Tensor) -> torch.Tensor:
    return x.clone() if is_off.item() else x * 2


@scale.register_fake
def _(x, is_off):
    return torch.empty_like(x)


@pytest.mark.parametrize("is_theirs", [True, False])
def test_what_is_read_on_the_host_tells_cases_apart(is_theirs, request):
    """Where it is kept by a capture; otherwise the op reads it whenever it runs."""
    cases = request.getfixturevalue("in_captures") if is_theirs else None
    linear, is_off = nn.Linear(8, 8), torch.tensor([False])
    fast = compiled(lambda x: scale(x, is_off) + linear(x), "threads", df.Branches(2))
    x = torch.randn(4, 8)
    with torch.no_grad():
        for off in (False, True, False):
            is_off.fill_(off)
            for _ in range(3):
                torch.testing.assert_close(fast(x), x * (1 if off else 2) + linear(x))
    if cases is not None:
        assert {case.read for case in cases().values()} == {(0,), (1,)}


@pytest.mark.parametrize("is_theirs", [True, False])
def test_a_number_that_lies_elsewhere(is_theirs, request, monkeypatch):
    """As on CUDA, where what the host reads lies elsewhere than all else: a recording of ours would read it once and for all."""
    if is_theirs:
        request.getfixturevalue("in_captures")
    kernels = region.kernels

    def elsewhere(text, scope, args, *others):
        made = kernels(text, scope, args, *others)
        for name in (name for i, name in made.inputs if args[i].numel() == 1):
            made.program.layouts[name] = dataclasses.replace(made.program.layouts[name], device=torch.device("meta"))
        return made

    monkeypatch.setattr(region, "kernels", elsewhere)
    linear, is_off, x = nn.Linear(8, 8), torch.tensor([False]), torch.randn(4, 8)
    fast = df.compile(lambda x: scale(x, is_off) + linear(x), strategy=df.Branches(2), partition="kernels", runtime="threads")
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(fast(x), x * 2 + linear(x))
    stats = df.stats(fast)
    assert bool(stats.planned_calls) == is_theirs
    assert is_theirs or "touches memory of the host" in next(iter(stats.fallbacks))


def test_near_sizes_are_near_where_the_same_was_read():
    made = SimpleNamespace(in_captures=True, cases={})
    for key in ((8, 0), (8, 1), (9, 1)):
        made.cases[key] = region.Case(made, key[:1], key[1:])
        made.cases[key].kernels = object()
    made.cases[8, 0].is_measured, made.cases[8, 0].choice = True, trials.Choice("", {}, {})
    assert made.cases[9, 1]._of_near_sizes([]) is None
    made.name = "made"
    made.cases[8, 1].is_measured, made.cases[8, 1].choice = True, trials.Choice("", {"theirs": 1.0}, {})
    assert made.cases[9, 1]._of_near_sizes([]) == trials.Choice("", {"theirs": 1.0}, {}, measured_at="(8,)")


def test_who_may_read_on_the_host():
    """An op of others', in the caller's order, and nothing but the numbers that tell cases apart."""
    case = region.Case(SimpleNamespace(read_at=[1], in_captures=True), ())
    case.kernels = SimpleNamespace(inputs=((0, "x"), (1, "flag"), (2, "table")))
    theirs = Op("theirs", "compute", ("x", "flag", "table"), ("y",), (), (CALLER,), "")
    assert case._but_for_what_is_read(theirs).reads == ("x", "table")
    kernel = Op("kernel", "compute", ("x", "flag"), ("y",), (), (), "")
    assert case._but_for_what_is_read(kernel) is kernel


def test_a_chain_is_not_tried(in_captures, monkeypatch):
    monkeypatch.setattr(trials, "compare", lambda *_: pytest.fail("nothing can be gained"))
    chain = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    fast = compiled(chain, "threads", "auto")
    with torch.no_grad():
        torch.testing.assert_close(fast(torch.ones(4, 8)), chain(torch.ones(4, 8)))
    (case,) = in_captures().values()
    assert not case.choice.plan and set(case.choice.times_us) == {trials.IN_A_ROW, "bound"} and case.is_measured


def test_all_ways_are_tried_as_recordings(in_captures, monkeypatch):
    """Inductor's own too: in somebody else's CUDA Graph its launches cost nothing."""
    recorded, ran, warm = [], [], []

    class Recorder:
        def __init__(self, pool, device, keeps_memsets):
            assert keeps_memsets, "as in the graphs that others capture"

        def begin(self):
            recorded.append("begin")

        def end(self):
            number = len(recorded)
            return lambda: ran.append(number)

        def abort(self):
            recorded.append("abort")

    def compare(ways, clock):
        for _ in range(2):
            for way in ways:
                way()
        return [[100.0] * 7, *[[50.0 + i] * 7 for i in range(1, len(ways))]] if len(ways) > 2 else [[50.0] * 7, [100.0] * 7]

    start = trials.Trials.__init__

    def as_on_cuda(self, *args):
        start(self, *args)
        self._is_captured = True

    issue = trials.Way.warm_up

    def warm_up(self, args):
        warm.append(len(recorded))
        issue(self, args)

    monkeypatch.setattr(graphs, "CudaRecorder", Recorder)
    for name, value in {"compare": compare, "bound_us": lambda *_: 1.0, "NUM_NEIGHBOURS": 0}.items():
        monkeypatch.setattr(trials, name, value)
    monkeypatch.setattr(trials.Trials, "__init__", as_on_cuda)
    monkeypatch.setattr(trials.Way, "warm_up", warm_up)
    fast, x = compiled(Towers(), "threads", "auto"), torch.randn(4, 8)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), fast(x))
    (case,) = in_captures().values()
    num_ways = len(case.choice.times_us) - 1
    assert case.choice.plan and num_ways > 2
    assert warm == list(range(1, num_ways)), "none of ours is recorded before it ran"
    assert recorded == ["begin"] * num_ways and len(ran) == 2 * num_ways + 4, "each is recorded once"


def test_counters_do_not_run_on_while_ways_warm_up(in_captures, monkeypatch):
    """A position that grows leaves its cache."""
    seen, start, issue = [], trials.Trials.__init__, trials.Way.warm_up
    recorder = SimpleNamespace(begin=lambda: None, end=lambda: lambda: None, abort=lambda: None)

    def as_on_cuda(self, *args):
        start(self, *args)
        self._is_captured = True

    def warm_up(self, args):
        seen.extend(int(a) for a in args if a.dtype == torch.int64)
        issue(self, args)

    monkeypatch.setattr(graphs, "CudaRecorder", lambda pool, device, keeps_memsets: recorder)
    monkeypatch.setattr(trials, "bound_us", lambda *_: 1.0)
    monkeypatch.setattr(trials.Trials, "__init__", as_on_cuda)
    monkeypatch.setattr(trials.Way, "warm_up", warm_up)
    towers, at = Towers(), torch.tensor(0)

    def model(x, at):
        at.add_(1)
        return towers(x) * at

    with torch.no_grad():
        compiled(model, "threads", "auto")(torch.randn(4, 8), at)
    assert at == 1 and len(seen) > 1 and set(seen) == {1}
