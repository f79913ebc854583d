"""never_slower: the faster of plan and sequential runs, what was measured is said and remembered, and measuring shows nowhere."""

import gc
import weakref

import pytest
import torch
from torch import nn

import dynaflow as df
from dynaflow import capture, contest
from dynaflow.engine import CapturedGraph
from dynaflow.errors import OptionError
from dynaflow.runtime import graphs


class Net(nn.Module):
    """Counts its calls, keeps the last input, and drops some of it: all that repeating a call could spoil."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x, seen):
        self.count += 1
        seen.copy_(x)
        return nn.functional.dropout(self.b(torch.relu(self.a(x))), 0.5, training=True)


@pytest.fixture(autouse=True)
def own_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("DYNAFLOW_DIR", str(tmp_path))


@pytest.fixture
def times(monkeypatch):
    """What plan and sequential are made to take, and how often they were measured."""
    found = {"us": (50.0, 100.0), "num": 0}

    def fake_compare(ways, clock, num_calls=None):
        for way in ways:
            way()
            way()
        found["num"] += 1
        found["ways"] = len(ways)
        *plans, sequential = found["us"]
        return [[us] * 7 for us in ((plans * len(ways))[: len(ways) - 1] if len(plans) == 1 else plans)] + [[sequential] * 7]

    monkeypatch.setattr(contest, "compare", fake_compare)
    return found


def net():
    torch.manual_seed(0)
    return Net()


def compiled(model, **options):
    return df.compile(model, **{"strategy": df.TwoBatch(), "partition": ["auto", df.SplitModule("a")], "never_slower": True, **options})


RUNTIMES = [{"runtime": "threads"}, {"runtime": "graph"}, {"runtime": "threads", "compiler": "inductor"}]


@pytest.mark.parametrize("options", RUNTIMES, ids=str)
def test_a_faster_plan_runs(times, options):
    fast = compiled(net(), strict=True, **options)
    with torch.no_grad():
        for _ in range(3):
            fast(torch.randn(6, 8), torch.zeros(6, 8))
    stats = df.stats(fast)
    assert times["num"] == 1 and not stats.fallbacks and stats.planned_calls == 3 and stats.num_part_launches


@pytest.mark.parametrize("options", RUNTIMES, ids=str)
def test_a_slower_plan_does_not_run_and_is_counted(times, options, caplog):
    times["us"] = (99.0, 100.0)  # a hair faster is not worth it
    fast = compiled(net(), strict=True, **options)  # to choose the sequential one is no failure
    with torch.no_grad():
        for _ in range(3):
            fast(torch.randn(6, 8), torch.zeros(6, 8))
        fast(torch.randn(8, 8), torch.zeros(8, 8))
    reason = "no plan is faster than the sequential one"
    assert df.stats(fast).fallbacks == {reason: 4} and times["num"] == 2 and not df.stats(fast).num_part_launches
    assert [r.message for r in caplog.records if reason in r.message] == [f"Net falls back to the sequential graph: {reason}"]
    assert [str(measured) for measured in df.stats(fast).measured] == ["99 us; sequential 100 us"] * 2


@pytest.mark.parametrize("us", [(50.0, 100.0), (100.0, 50.0)])
@pytest.mark.parametrize("options", RUNTIMES[:2], ids=str)
def test_measuring_shows_nowhere(times, us, options):
    """Counts, what is kept, and random numbers are those of a model that is not measured."""
    times["us"] = us
    strategy = df.TwoBatch() if us[0] < us[1] else df.Sequential()
    x = [torch.randn(6, 8) for _ in range(4)]
    results = []
    for asked in ({}, {"strategy": strategy, "never_slower": False}):
        model = net()
        fast, seen, torch_state = compiled(model, **options, **asked), torch.zeros(6, 8), torch.get_rng_state()
        with torch.no_grad():
            outs = [fast(one, seen).clone() for one in x]
        results.append((outs, model.count.clone(), seen, torch.get_rng_state()))
        torch.set_rng_state(torch_state)
    (outs, count, seen, state), (wanted, wanted_count, wanted_seen, wanted_state) = results
    assert all(map(torch.equal, outs, wanted)) and times["num"] == 1
    assert torch.equal(count, wanted_count) and int(count) == 4 and torch.equal(seen, wanted_seen) and torch.equal(state, wanted_state)


def test_each_size_is_measured_and_remembered(times):
    def calls():
        fast = compiled(net(), runtime="threads")
        with torch.no_grad():
            for rows in (6, 8, 6):
                fast(torch.randn(rows, 8), torch.zeros(rows, 8))
        return df.stats(fast)

    assert not calls().fallbacks and times["num"] == 2
    times["us"] = (100.0, 50.0)
    assert not calls().fallbacks and times["num"] == 2  # as another process would find it


def test_another_plan_is_another_contest(times):
    with torch.no_grad():
        for strategy in (InParts(2), InParts(3), InParts(2)):
            compiled(net(), runtime="threads", strategy=strategy)(torch.randn(6, 8), torch.zeros(6, 8))
    assert times["num"] == 2


class Unsure(df.Strategy):
    """Two parts or three, one order or the other."""

    def schedule(self, flow):
        flow.split(flow.any_of(2, 3))
        sign = flow.any_of(1, -1)
        while ready := flow.get_ready_ops():
            flow.execute(min(ready, key=lambda r: (r.depth, sign * r.part.lo / r.part.of)))


class InParts(df.Strategy):
    def __init__(self, num_parts):
        self.num_parts = num_parts

    def schedule(self, flow):
        flow.split(self.num_parts)
        while ready := flow.get_ready_ops():
            flow.execute(min(ready, key=lambda r: (r.depth, r.part)))


FASTEST = [((50.0, 40.0, 60.0, 70.0, 100.0), 3), ((50.0, 60.0, 45.0, 70.0, 100.0), 2), ((99.0,) * 4 + (100.0,), 1)]


@pytest.mark.parametrize("us, num_parts", FASTEST)
def test_of_a_strategy_s_options_the_fastest_runs(times, us, num_parts):
    times["us"] = us
    fast, wanted = compiled(net(), runtime="threads", strategy=Unsure()), InParts(num_parts)
    plain = compiled(net(), runtime="threads", strategy=wanted, never_slower=False)
    with torch.no_grad():
        for call in (fast, plain):
            call(torch.randn(6, 8), torch.zeros(6, 8))
    assert times["num"] == 1 and df.stats(fast).num_part_launches == df.stats(plain).num_part_launches
    (measured,) = df.stats(fast).measured
    assert measured.options == ((), (1,), (0, 1), (1, 1)) and measured.chosen == {3: (1,), 2: (0, 1), 1: ()}[num_parts]
    assert (*measured.plans_us, measured.sequential_us) == us and measured.sizes == (6,) and measured.graph.startswith("Net.")
    assert not df.stats(plain).measured


class WrongIfSmall(df.Strategy):
    """Of its two options, the second is one from eight rows up."""

    def schedule(self, flow):
        num_parts = flow.any_of(2, 4)
        flow.split(num_parts)
        if num_parts == 2 or flow.context.batch_size >= 8:
            InParts(num_parts).schedule(flow)


def test_an_option_that_is_refused_at_one_size_is_measured_at_another(times):
    fast, num_ways = compiled(net(), runtime="threads", strategy=WrongIfSmall(), strict=True), []
    with torch.no_grad():
        for n in (6, 5, 9, 12):
            fast(torch.randn(n, 8), torch.zeros(n, 8))
            num_ways.append(times["ways"])
    assert num_ways == [2, 2, 3, 3] and df.stats(fast).plans == 3


def test_what_was_measured_is_kept_for_some_sizes(times, monkeypatch):
    monkeypatch.setattr("dynaflow.settings.MAX_MEASURED", 2)
    fast = compiled(net(), runtime="threads")
    with torch.no_grad():
        for n in (4, 6, 8):
            fast(torch.randn(n, 8), torch.zeros(n, 8))
    assert [measured.sizes for measured in df.stats(fast).measured] == [(6,), (8,)]


class Cache(nn.Module):
    """Writes where a counter stands: one step too many is out of bounds."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.register_buffer("at", torch.tensor([3]))
        self.register_buffer("cache", torch.zeros(4, 8))

    def forward(self, x):
        self.cache.index_copy_(0, self.at, x[:1].detach())
        self.at += 1
        return torch.relu(self.a(x))


@pytest.mark.parametrize("options", RUNTIMES[:2], ids=str)
def test_counters_do_not_run_on_while_plans_are_prepared(times, options):
    model = Cache()
    fast = compiled(model, strategy=Unsure(), strict=True, **options)
    with torch.no_grad():
        x = torch.randn(6, 8)
        torch.testing.assert_close(fast(x), torch.relu(model.a(x)))
    assert times["num"] == 1 and int(model.at) == 4 and torch.equal(model.cache[3], x[0]) and not df.stats(fast).fallbacks


def test_of_what_a_call_changes_no_more_is_copied(times, monkeypatch):
    """The last layer's cache, of one tensor with all of them: what lies before it may be most of the device."""
    copied, caches = [], torch.zeros(1000, 6, 8)
    before = contest.Before
    monkeypatch.setattr(contest, "Before", lambda tensors, **more: copied.extend(tensors) or before(tensors, **more))

    def write(x, cache):
        cache.copy_(x)
        return x + 1

    fast = compiled(write, strict=True, partition="auto")
    with torch.no_grad():
        x = torch.randn(6, 8)
        torch.testing.assert_close(fast(x, caches[-1]), x + 1)
    assert times["num"] == 1 and torch.equal(caches[-1], x)
    assert [t.untyped_storage().nbytes() for t in copied] == [x.nbytes]


class Options(df.Strategy):
    """Parts, and where there are three, an order."""

    def __init__(self, *parts):
        self.parts = parts

    def schedule(self, flow):
        num_parts = flow.any_of(*self.parts)
        flow.split(num_parts)
        sign = flow.any_of(1, -1) if num_parts == 3 else 1
        while ready := flow.get_ready_ops():
            flow.execute(min(ready, key=lambda r: (r.depth, sign * r.part.lo / r.part.of)))


@pytest.mark.parametrize("strategy, num_ways", [
    (Options(2, 3), 4), (Options(2, 4), 3), (Options(2, 7), 2), (df.Mixed(Options(2, 3), df.Branches(2)), 4), (df.TwoBatch(), 2),
])  # fmt: skip
def test_every_option_is_measured_that_can_be_had(times, strategy, num_ways):
    """Those behind other options, too, and those inside of Mixed; parts without a row are left out, and the others run."""
    fast = compiled(net(), runtime="threads", strategy=strategy, strict=True)
    with torch.no_grad():
        fast(torch.randn(6, 8), torch.zeros(6, 8))
    assert times["ways"] == num_ways and df.stats(fast).num_part_launches and not df.stats(fast).fallbacks


class Replaced(df.Strategy):
    def schedule(self, flow):
        scale = flow.any_of(1.0, 2.0)
        flow.split(2)
        while ready := flow.get_ready_ops():
            flow.execute(ready[0], replace=(lambda x: torch.tanh(x) * scale) if ready[0].name == "b" else None)


def test_functions_under_one_name_are_told_apart_and_not_remembered(times, tmp_path):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.ReLU(), nn.Tanh()

        def forward(self, x):
            return self.b(self.a(x))

    for num in (1, 2):
        fast = df.compile(Two(), strategy=Replaced(), partition=[df.SplitModule("a"), df.SplitModule("b")], never_slower=True,
                          runtime="threads", strict=True)  # fmt: skip
        with torch.no_grad():
            fast(torch.randn(6, 8))
        assert times["num"] == num and times["ways"] == 3
    assert not (tmp_path / "contests").exists()


def test_unmeasured_calls_ask_no_memory(times):
    times["us"] = (100.0, 50.0)
    with torch.no_grad():
        compiled(net(), runtime="threads")(torch.randn(6, 8), torch.zeros(6, 8))
        fast = compiled(net(), runtime="threads")
        with df.unmeasured():
            fast(torch.randn(6, 8), torch.zeros(6, 8))
        assert df.stats(fast).num_part_launches and not df.stats(fast).fallbacks
        fast(torch.randn(6, 8), torch.zeros(6, 8))
    assert times["num"] == 1 and sum(df.stats(fast).fallbacks.values()) == 1


def test_without_measuring_the_first_option_is_taken(times):
    fast = compiled(net(), runtime="threads", strategy=Unsure(), never_slower=False)
    with torch.no_grad():
        fast(torch.randn(6, 8), torch.zeros(6, 8))
    assert times["num"] == 0 and df.stats(fast).plans == 1


def test_an_option_that_gives_up_does_not_run(times):
    class Maybe(df.Strategy):
        def schedule(self, flow):
            if flow.any_of(True, False):
                return flow.sequential("not now")
            return df.TwoBatch().schedule(flow)

    fast = compiled(net(), runtime="threads", strategy=Maybe())
    with torch.no_grad():
        fast(torch.randn(6, 8), torch.zeros(6, 8))
    assert times["num"] == 1 and df.stats(fast).num_part_launches and not df.stats(fast).fallbacks


def test_no_options_are_refused():
    class Nothing(df.Strategy):
        def schedule(self, flow):
            flow.any_of()

    with pytest.raises(df.errors.StrategyError, match="has no options"):
        df.explain(net(), (torch.randn(6, 8), torch.zeros(6, 8)), strategy=Nothing())


@pytest.mark.parametrize("us, has_parts", [((50.0, 100.0), True), ((100.0, 50.0), False)])
@pytest.mark.parametrize("options", RUNTIMES[:2], ids=str)
def test_unmeasured_calls_leave_it_to_later_ones(times, us, has_parts, options):
    times["us"] = us
    model = net()
    fast = compiled(model, **options)
    with torch.no_grad():
        with df.unmeasured():
            for _ in range(3):
                fast(torch.randn(6, 8), torch.zeros(6, 8))
        assert times["num"] == 0 and df.stats(fast).num_part_launches and not df.stats(fast).fallbacks
        before = df.stats(fast).num_part_launches
        for _ in range(3):
            fast(torch.randn(6, 8), torch.zeros(6, 8))
    assert times["num"] == 1 and (df.stats(fast).num_part_launches > before) is has_parts
    assert sum(df.stats(fast).fallbacks.values()) == (0 if has_parts else 3) and int(model.count) == 6


def test_a_profiled_call_is_not_measured_and_the_next_one_is(times):
    fast = compiled(net(), runtime="threads")
    with torch.no_grad():
        with df.profile() as profile:
            fast(torch.randn(6, 8), torch.zeros(6, 8))
        num_spans = len(profile.timeline.spans)
        assert times["num"] == 0
        with df.profile() as again:
            fast(torch.randn(6, 8), torch.zeros(6, 8))
        assert len(again.timeline.spans) == num_spans, "no trial is in it"
        fast(torch.randn(6, 8), torch.zeros(6, 8))
    assert times["num"] == 1


@pytest.mark.parametrize("left", ["{", "[]", '{"winner": 7, "plans_us": [1.0], "sequential_us": 2.0}', '{"winner": 0}'])
def test_what_another_version_left_on_disk_is_measured_anew(times, tmp_path, left):
    with torch.no_grad():
        for num in (1, 2):
            fast = compiled(net(), runtime="threads")
            fast(torch.randn(6, 8), torch.zeros(6, 8))
            assert times["num"] == num and df.stats(fast).num_part_launches
            (kept,) = (tmp_path / "contests").iterdir()
            kept.write_text(left)


def test_what_a_trial_writes_to_lives_as_long_as_it(monkeypatch):
    class Recorder:
        def begin(self): ...
        def abort(self): ...
        def end(self):
            return lambda: None

    class Body:
        changed = promised = saved = copied = ()
        allocates = False

        def prepare(self): ...

        def make_outputs(self):
            made = [torch.zeros(4)]
            self.made = weakref.ref(made[0])
            return made

        def has_steps(self):
            return False

        def __call__(self, given, between, outputs):
            return outputs

    recordings, body = graphs.Recordings("toy", torch.device("cpu"), graphs.Pool()), Body()
    monkeypatch.setattr(recordings, "make_recorder", lambda body, feeds: Recorder())
    replay = recordings.trial([], body)
    gc.collect()
    assert body.made() is not None
    replay()
    del replay
    gc.collect()
    assert body.made() is None


def test_a_trial_takes_the_place_of_no_recording(monkeypatch):
    monkeypatch.setattr(graphs, "MAX_RECORDINGS", 2)
    x = torch.randn(4)

    class Key: ...

    class Body:
        changed = promised = saved = copied = ()
        allocates = False

        def prepare(self): ...

        def make_outputs(self):
            return [torch.zeros(4)]

        def has_steps(self):
            return False

        def __call__(self, given, between, outputs):
            outputs[0].copy_(given[0])
            return outputs

    recordings, keys = graphs.Recordings("toy", torch.device("cpu"), graphs.Pool(), borrow=True), [Key(), Key(), Key()]
    for key in keys[:2]:
        for _ in range(2):
            recordings.record(key, [x], dict, Body())
    recordings.trial([x], Body())()
    assert all(recordings.replay(key, [x]) is not None for key in keys[:2])
    for _ in range(2):  # one that is kept does
        recordings.record(keys[2], [x], dict, Body())
    assert [recordings.replay(key, [x]) is not None for key in keys] == [False, True, True]
    recordings.forget(keys[1])
    assert recordings.replay(keys[1], [x]) is None


@pytest.mark.parametrize("us", [(50.0, 100.0), (100.0, 50.0)])
def test_a_plan_that_was_bound_anew_to_be_measured_leaves_no_recording(times, us):
    times["us"] = us
    fast = compiled(net(), runtime="graph")
    seen = torch.zeros(6, 8)
    with torch.no_grad():
        with df.unmeasured():
            for _ in range(4):
                fast(torch.randn(6, 8), seen)
        (graph,) = {o for o in gc.get_objects() if type(o) is CapturedGraph and o.settings is capture.of(fast).settings}
        assert len(graph._recordings._kept) == 1
        for _ in range(4):
            fast(torch.randn(6, 8), seen)
    assert times["num"] == 1 and len(graph._recordings._kept) == 1


def test_padded_sizes_are_measured_as_they_run(times):
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x):
            return torch.relu(self.a(x))

    model = Plain()
    fast = df.compile(model, strategy=df.TwoBatch(), runtime="graph", buckets=[8], never_slower=True, partition=[df.SplitModule("a")])
    with torch.no_grad():
        for rows in (5, 6, 5, 6, 8):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(fast(x), model(x))
    assert not df.stats(fast).fallbacks and times["num"] == 1, "of 8 rows: the others run as these"


def test_without_room_for_copies_the_plan_is_kept(times, monkeypatch, caplog):
    def no_room(*_):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(contest, "_copies", no_room)
    fast = compiled(net(), runtime="threads")
    with torch.no_grad():
        fast(torch.randn(6, 8), torch.zeros(6, 8))
    assert df.stats(fast).num_part_launches and not df.stats(fast).fallbacks and "no room to measure" in caplog.text


@pytest.mark.parametrize("options, says", [
    ({"never_slower": 1}, "neither True nor False"), ({"runtime": "fake"}, "no way to be fast"),
    ({"part_context": lambda parts: []}, "cannot be repeated"),
])  # fmt: skip
def test_what_cannot_be_measured_is_refused(options, says):
    with pytest.raises(OptionError, match=says):
        compiled(net(), **options)
