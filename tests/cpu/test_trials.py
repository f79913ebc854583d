"""Which way to run kernels is chosen, what is said of it, and that measuring shows nowhere."""

import copy
import json
import logging

import pytest
import torch
from torch import nn

import dynaflow as df
from dynaflow import measure, region, room, trials
from dynaflow.costs import Cost
from tests.cpu.kernel_models import Branchy, Towers, call_thrice, compiled, fresh, image  # noqa: F401  (fresh is a fixture)

MIB = 2**20


@pytest.fixture
def tried(monkeypatch):
    """Whatever cores the machine has, and however little these kernels gain on its lanes."""
    monkeypatch.setattr(trials, "num_lanes", lambda: 16)
    monkeypatch.setattr(trials, "LANES", None)
    monkeypatch.setattr(measure, "_share", lambda half, least: 1.0)
    monkeypatch.setattr(trials, "bound_us", lambda flow, costs: 0.0)


@pytest.fixture
def times(monkeypatch, tried):
    """What the ways to run a call are made to take; the first is Inductor's own."""
    found = {"us": lambda n: [100.0] * n, "again": 50.0, "num": 0}

    def fake_compare(ways, clock):
        for way in ways:
            way()
        if found.pop("has winner", False):  # it runs once more against Inductor
            return [[found["again"]] * 7, [100.0] * 7]
        found["num"] += 1
        us = found["us"](len(ways))
        found["has winner"] = min(us) < 0.98 * us[0]
        return [[t] * 7 for t in us]

    monkeypatch.setattr(trials, "compare", fake_compare)
    monkeypatch.setattr(trials, "NUM_NEIGHBOURS", 0)
    return found


def test_neighbours_of_the_best_are_tried(times, monkeypatch):
    """Of three rounds, the second is of the winner's neighbours: one of them wins, and is kept if it wins again."""
    monkeypatch.setattr(trials, "NUM_NEIGHBOURS", 4)
    seen, before = [], set(region.living)

    def fake_compare(ways, clock):
        for way in ways:
            way()
        seen.append(len(ways))
        us = ([100.0, 90.0, *[50.0] * (len(ways) - 2)], [40.0] * len(ways), [40.0, 100.0])[len(seen) - 1]
        return [[t] * 7 for t in us]

    monkeypatch.setattr(trials, "compare", fake_compare)
    fast = compiled(Branchy().eval(), "auto", "auto")
    with torch.no_grad():
        for _ in range(3):
            fast(image())
    (choice,) = [c.choice for r in set(region.living) - before for c in r.cases.values()]
    least = min(us for name, us in choice.times_us.items() if name != "bound")
    assert len(seen) == 3 and seen[2] == 2 and least == 40.0 and choice.plan
    assert any("noise" in name for name in choice.times_us)


def test_near_sizes_are_measured_once(times):
    """As under a cache that grows: 9 to 17 is less than a doubling, 19 is more; and results are those of the sizes at hand."""
    times["us"] = lambda n: [100.0, 90.0, *[50.0] * (n - 2)]
    model, before = Towers(), set(region.living)
    fast = compiled(model, "auto", "auto")
    with torch.no_grad():
        for rows in (8, 9, 10, 17, 19, 9, 17):  # 8 is captured for itself
            for _ in range(3):
                x = torch.randn(rows, 8)
                torch.testing.assert_close(fast(x), model(x))
    cases = {case.numbers: case for made in set(region.living) - before for case in made.cases.values()}
    assert {numbers for numbers, case in cases.items() if case.is_measured} == {(), (9,), (19,)}
    assert set(cases) == {(), (9,), (10,), (17,), (19,)}
    assert "measured at sizes (9,)" in str(cases[17,].choice) and "measured at" not in str(cases[19,].choice)
    assert all(case.choice.plan for case in cases.values())


def test_a_plan_for_near_sizes_that_would_hold_too_much_is_not_taken(times, monkeypatch):
    times["us"] = lambda n: [100.0, 90.0, *[50.0] * (n - 2)]
    model, before = Towers(), set(region.living)
    fast, real = compiled(model, "auto", "auto"), room.Room.held
    with torch.no_grad():
        for rows in (8, 9, 10):
            if rows == 10:
                monkeypatch.setattr(room.Room, "held", lambda self, bound: real(self, bound) + 2**40 * bool(bound.streams))
            for _ in range(3):
                fast(torch.randn(rows, 8))
    cases = {case.numbers: case for made in set(region.living) - before for case in made.cases.values()}
    assert cases[9,].choice.plan and cases[9,].is_measured
    assert cases[10,].is_measured and " @aux" not in cases[10,].choice.plan, "it was measured, and holds no more than it may"


class Many(nn.Module):
    """Four branches, as long as each other."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(4))

    def forward(self, x):
        a, b, c, d = (branch(x) for branch in self.branches)
        return (a @ b.t()) @ (c @ d.t())


@pytest.fixture
def allocating(times, monkeypatch):
    """Plans with streams are faster. All kernels take the same; what the allocator holds for each is to be said, in MiB."""
    times["us"] = lambda n: [100.0, 90.0, *[50.0] * (n - 2)]
    real, found = trials.measure_costs, {"mib": lambda k: 0}

    def with_held(*args):
        return {name: Cost(10.0, 0.2, int(found["mib"](k) * MIB)) for k, name in enumerate(real(*args))}

    monkeypatch.setattr(trials, "measure_costs", with_held)
    return found


def choices(call, *rows, **options):
    """Per number of rows: its case, once it is chosen for."""
    before = set(region.living)
    fast = compiled(call, "auto", "auto", **options)
    with torch.no_grad():
        for n in (8, *rows):  # 8 is captured for itself
            for _ in range(3):
                fast(torch.randn(n, 8))
    return {case.numbers: case for made in set(region.living) - before for case in made.cases.values()}


@pytest.mark.parametrize("mib, most", [(0, 4), (1.9, 2)])
def test_streams_count_what_the_allocator_keeps_for_each(allocating, mib, most):
    """There is room for one segment beside the caller's."""
    allocating["mib"] = lambda k: mib
    times_us = choices(Many())[()].choice.times_us
    assert max(int(name.split()[0]) for name in times_us if " streams" in name) == most, times_us


def test_kernels_that_allocate_give_way_where_their_plans_hold_too_much(allocating, monkeypatch):
    """On several streams they are all refused: then they stay on the caller's, and the others do not."""
    allocating["mib"] = lambda k: 20 * (k % 2)

    def take(self, bound):
        return all(launch.stream == "caller" for launch in bound.plan.launches if launch.calls[0][0] in self._held_bytes)

    monkeypatch.setattr(room.Room, "take", take)
    assert df.Plan.parse(choices(Many(), max_memory=4.0)[()].choice.plan).streams


def test_what_the_allocator_keeps_grows_with_near_sizes(allocating):
    """At 9 rows there is room for a second stream's; at 17 that would be more than there is room for."""
    allocating["mib"] = lambda k: 1.9
    cases = choices(Many(), 9, 17)
    assert df.Plan.parse(cases[9,].choice.plan).streams and cases[17,].is_measured


def test_other_threads_bring_other_sizes_meanwhile(times, monkeypatch):
    times["us"] = lambda n: [100.0, 90.0, *[50.0] * (n - 2)]
    model, before, real = Towers(), set(region.living), region._distance
    fast = compiled(model, "auto", "auto")

    def distance(numbers, others):
        (made,) = [r for r in set(region.living) - before if numbers in r.cases]
        made.cases[99 + len(made.cases),] = region.Case(made, (99,))
        return real(numbers, others)

    with torch.no_grad():
        for rows in (8, 9, 10):
            if rows == 10:
                monkeypatch.setattr(region, "_distance", distance)
            for _ in range(3):
                torch.testing.assert_close(fast(x := torch.randn(rows, 8)), model(x))
    assert all(not r.refusal for r in set(region.living) - before)


def test_the_fastest_is_kept(times, caplog):
    times["us"] = lambda n: [100.0, 90.0, *[50.0] * (n - 2)]
    fast = compiled(Towers(), "auto", "auto")
    with caplog.at_level(logging.INFO, "dynaflow"):
        call_thrice(fast)
    assert times["num"] == 1 and df.stats(fast).planned_calls == 2
    (line,) = [r.message for r in caplog.records if "kernels run under" in r.message]
    assert "a plan of the kernels" in line and "Inductor 100 us" in line and "50 us" in line


@pytest.mark.parametrize("mib, is_room", [(0, True), (1 << 20, False)])
def test_workspaces_of_side_streams_count(times, monkeypatch, mib, is_room):
    """Every stream that multiplies matrices has one; where there is no room for it, products stay on the caller's."""
    times["us"] = lambda n: [100.0, 90.0, *[50.0] * (n - 2)]
    monkeypatch.setattr(room, "workspace_bytes", lambda device: mib * 2**20)
    before = set(region.living)
    call_thrice(compiled(Towers(), "auto", "auto"))
    (case,) = [c for r in set(region.living) - before for c in r.cases.values()]
    assert case.bound.program.products and bool(case.bound.product_streams) == is_room


def test_inductor_stays_where_it_is_faster(times, caplog):
    times["us"] = lambda n: [100.0, *[99.5] * (n - 1)]
    fast = compiled(Towers(), "auto", "auto")
    with caplog.at_level(logging.INFO, "dynaflow"):
        call_thrice(fast)
    assert df.stats(fast).planned_calls == 0 and df.stats(fast).plans == 0
    assert any("Inductor as it is" in r.message for r in caplog.records)


def test_what_wins_once_has_to_win_again(times):
    times["us"], times["again"] = lambda n: [100.0, *[50.0] * (n - 1)], 99.0
    fast = compiled(Towers(), "auto", "auto")
    call_thrice(fast)
    assert df.stats(fast).planned_calls == 0


def test_a_choice_is_remembered(times, monkeypatch, tmp_path):
    times["us"] = lambda n: [100.0, *[50.0] * (n - 1)]
    model = Towers()
    wanted = call_thrice(compiled(model, "auto", "auto"))
    (path,) = (tmp_path / "choices").glob("*.json")
    monkeypatch.setattr(trials, "measure_costs", lambda *_: pytest.fail("measured again"))
    torch._dynamo.reset()
    again = compiled(model, "auto", "auto")
    assert call_thrice(again).shape == wanted.shape and times["num"] == 1
    assert df.stats(again).planned_calls == 2 and json.loads(path.read_text())["plan"]


@pytest.mark.parametrize("text", ["", "{}", '{"plan": "nonsense", "times_us": {}, "costs": {}}'])
def test_a_choice_that_cannot_be_read_is_made_again(times, tmp_path, text):
    model = Towers()
    call_thrice(compiled(model, "auto", "auto"))
    (path,) = (tmp_path / "choices").glob("*.json")
    path.write_text(text)
    torch._dynamo.reset()
    call_thrice(compiled(model, "auto", "auto"))
    assert times["num"] == 2 and json.loads(path.read_text())["times_us"]


@pytest.mark.parametrize("num_lanes, reason", [(1, "no cores are left for lanes"), (2, "")])
def test_without_cores_for_lanes_nothing_is_tried(times, monkeypatch, caplog, num_lanes, reason):
    """Threads beyond the cores would slow all of the process down, for good: there must be none, not even to measure."""
    times["us"] = lambda n: [100.0, 90.0, *[50.0] * (n - 2)]
    monkeypatch.setattr(trials, "num_lanes", lambda: num_lanes)
    if reason:
        monkeypatch.setattr(trials, "measure_costs", lambda *_: pytest.fail("measured"))
    fast = compiled(Towers(), "auto", "auto")
    with caplog.at_level(logging.INFO, "dynaflow"):
        call_thrice(fast)
    assert times["num"] == df.stats(fast).plans == (not reason)
    (line,) = [r.message for r in caplog.records if "kernels run under" in r.message]
    assert (f"Inductor as it is ({reason}" in line) == bool(reason)


@pytest.mark.parametrize("limit_s, reason", [(1e-9, "a call takes too long to be repeated"), (30.0, "")])
def test_calls_that_take_long_are_not_repeated(times, monkeypatch, tmp_path, limit_s, reason):
    monkeypatch.setattr(trials, "TRIALS_S", limit_s)
    before = set(region.living)
    call_thrice(compiled(Towers(), "auto", "auto"))
    (case,) = [c for r in set(region.living) - before for c in r.cases.values()]
    assert case.choice.untried == reason and times["num"] == bool(case.choice.costs) == (not reason) and not case.choice.plan
    assert len(list(tmp_path.glob("choices/*.json"))) == (not reason), "what was not tried may be tried by the next process"


def test_without_memory_to_measure_in_inductor_stays(times, monkeypatch, caplog, tmp_path):
    """On a device that is full, copies of what a call changes may be too much. Another size may fit, and the next process may try."""
    times["us"] = lambda n: [100.0, 90.0, *[50.0] * (n - 2)]
    real, before, seen = trials.Trials.choose, set(region.living), []

    def choose(self):
        seen.append(self)
        if len(seen) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return real(self)

    monkeypatch.setattr(trials.Trials, "choose", choose)
    model = Towers()
    fast = compiled(model, "auto", "auto")
    with caplog.at_level(logging.INFO, "dynaflow"), torch.no_grad():
        for rows in (8, 9):
            for _ in range(3):
                x = torch.randn(rows, 8)
                torch.testing.assert_close(fast(x), model(x))
    full, fitting = sorted((c for r in set(region.living) - before for c in r.cases.values()), key=lambda case: case.numbers)
    assert "no memory is left to measure plans in" in full.choice.untried and not full.choice.plan and not full.is_measured
    assert fitting.choice.plan and fitting.is_measured, "what did not fit says nothing of other sizes"
    assert len(list(tmp_path.glob("choices/*.json"))) == 1 and not any(r.exc_info for r in caplog.records)


def test_as_many_plans_as_there_is_time_for(times, monkeypatch):
    tried = []
    times["us"] = lambda n: tried.append(n) or [100.0] * n
    monkeypatch.setattr(trials.Trials, "_num_fitting", lambda self: 1)
    call_thrice(compiled(Branchy().eval(), "auto", "auto"), image())
    assert tried == [3], "Inductor, one stream, and one plan"


def test_a_chain_is_not_tried(monkeypatch, caplog):
    monkeypatch.setattr(trials, "num_lanes", lambda: 16)
    monkeypatch.setattr(trials, "measure_costs", lambda *_: pytest.fail("measured"))
    with caplog.at_level(logging.INFO, "dynaflow"):
        call_thrice(compiled(Towers().left, "auto", "auto"))
    assert any("Inductor as it is (every kernel needs the one before it)" in r.message for r in caplog.records)


def test_what_would_be_no_faster_side_by_side_is_not_tried(tried, monkeypatch):
    monkeypatch.setattr(trials, "bound_us", lambda flow, costs: sum(cost.us for cost in costs.values()))
    monkeypatch.setattr(trials, "compare", lambda *_: pytest.fail("tried"))
    before = set(region.living)
    call_thrice(compiled(Towers(), "auto", "auto"))
    (case,) = [c for r in set(region.living) - before for c in r.cases.values()]
    assert str(case.choice).startswith("Inductor as it is (side by side they would be no faster: kernels in a row ")
    assert trials.Choice.parse(case.choice.dump()) == case.choice


def test_memory_is_limited(times):
    """Four chains of products: one after the other, two intermediates are alive at once."""
    weights, ends = torch.randn(4, 3, 32, 32), torch.randn(4, 32, 1)

    def chains(x):
        return [x @ w[0] @ w[1] @ w[2] @ end for w, end in zip(weights, ends)]

    tried = []
    times["us"] = lambda n: tried.append(n) or [100.0] * n
    for limit in (1.0, 100.0):
        torch._dynamo.reset()
        fast = compiled(chains, "auto", "auto", max_memory=limit)
        with torch.no_grad():
            for _ in range(3):
                fast(torch.ones(64, 32))
    assert tried[0] < tried[1], "plans that need more memory than the limit are not tried"


@pytest.mark.parametrize("rows, max_memory, free_mib, is_planned", [
    (2, None, 0, True), (512, None, 0, False), (512, None, 10, False), (512, None, 100, True), (512, 1.25, 100, False), (512, 2.0, 0, True),
])  # fmt: skip
def test_a_training_step_is_limited_as_a_whole(times, monkeypatch, caplog, rows, max_memory, free_mib, is_planned):
    """What a recorded forward saves stands beside the gradients: where either is as much as the weights, that is more than 1.25x. It is
    let be where nothing is said and it is not missed."""
    monkeypatch.setattr(room, "free_bytes", lambda device: free_mib * MIB)
    times["us"] = lambda n: [100.0, 90.0, *[50.0] * (n - 2)]
    wide = [nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512), nn.Sigmoid()) for _ in range(2)]
    model, eager = (nn.ModuleList(copy.deepcopy(wide)) for _ in range(2))

    def loss_of(towers, x):
        return (towers[0](x) * towers[1](x)).square().mean()

    fast = df.compile(lambda x: loss_of(model, x), partition="kernels", runtime="graph", max_memory=max_memory)
    before = set(region.living)
    with caplog.at_level(logging.INFO, "dynaflow"), torch._inductor.utils.fresh_cache():
        for _ in range(4):
            x = torch.randn(rows, 512)
            fast(x).backward()
            loss_of(eager, x).backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in eager.parameters()])
    cases = [c for r in set(region.living) - before if not r.is_backward for c in r.cases.values()]
    assert [bool(c.choice.plan) for c in cases] == [is_planned]
    assert ("any plan would hold" in cases[0].choice.untried) == (not is_planned)


def test_measuring_shows_nowhere(monkeypatch, tried):
    """Neither in buffers that the call changes, nor in random numbers, nor in results."""
    monkeypatch.setattr(measure, "NUM_ROUNDS", 2)
    model, twin = Branchy(), Branchy()
    twin.load_state_dict(model.state_dict())
    fast = compiled(model, "auto", "auto")
    for _ in range(3):
        x = image()
        state = torch.get_rng_state()
        got = fast(x)
        assert torch.equal(torch.get_rng_state(), state)
        torch.testing.assert_close(got, twin(x))
    torch.testing.assert_close(dict(model.named_buffers()), dict(twin.named_buffers()))


def test_measuring_does_not_run_out_of_a_cache(monkeypatch, tried):
    """A position that every call moves on: repeated calls would write behind the cache."""
    monkeypatch.setattr(measure, "NUM_ROUNDS", 2)

    class Decode(nn.Module):
        def __init__(self):
            super().__init__()
            self.key, self.value = nn.Linear(8, 8), nn.Linear(8, 8)
            self.register_buffer("cache", torch.zeros(2, 6, 8))
            self.register_buffer("at", torch.zeros(1, dtype=torch.int64))

        def forward(self, x):
            self.cache[0].index_copy_(0, self.at, self.key(x))
            self.cache[1].index_copy_(0, self.at, self.value(x))
            self.at.add_(1)
            return (self.cache[0] @ x.t()).softmax(0).t() @ self.cache[1]

    model, twin = Decode(), Decode()
    twin.load_state_dict(model.state_dict())
    fast = compiled(model, "auto", "auto")
    with torch.no_grad():
        for _ in range(6):
            x = torch.randn(1, 8)
            torch.testing.assert_close(fast(x), twin(x))
    torch.testing.assert_close(dict(model.named_buffers()), dict(twin.named_buffers()))


def test_of_what_is_changed_no_more_is_copied(times, monkeypatch):
    copied, all_of_them = [], torch.zeros(1000, 24, 6)
    before = trials.Before
    monkeypatch.setattr(trials, "Before", lambda tensors, **more: copied.extend(tensors) or before(tensors, **more))

    def change(x, y):
        z = x @ y
        x.add_(z)
        return z @ (y @ z.t()[:, :6]), x @ y

    fast = compiled(change, "auto", "auto")
    with torch.no_grad():
        for _ in range(3):
            fast(all_of_them[-1], torch.randn(6, 6))
    assert [t.untyped_storage().nbytes() for t in copied] == [all_of_them[-1].nbytes]


def test_measuring_keeps_the_strides_of_what_is_changed(times):
    """A copy without the gaps between its rows would be written beyond its end."""
    seen = []
    times["us"] = lambda n: [100.0, *[50.0] * (n - 1)]

    def change(x, y):
        z = x @ y
        x.add_(z)
        return z @ (y @ z), x @ y

    fast = compiled(change, "auto", "auto")
    with torch.no_grad():
        for _ in range(3):
            mine, y = torch.randn(24, 48), torch.randn(6, 6)
            other = mine.clone()
            seen.append((fast(mine[::4, ::8], y), change(other[::4, ::8], y), mine, other))
    for got, wanted, mine, other in seen:
        torch.testing.assert_close(got, wanted)
        torch.testing.assert_close(mine, other)


def test_what_talks_to_other_ranks_is_not_measured(monkeypatch, tmp_path):
    """Each rank would measure for as long as it likes, and the others wait for it."""
    from torch.distributed import _functional_collectives as collectives

    monkeypatch.setattr(trials, "compare", lambda *_: pytest.fail("measured"))
    torch.distributed.init_process_group("gloo", store=torch.distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        group = torch.distributed.group.WORLD

        def reduced(x):
            return collectives.all_reduce(x @ x, "sum", group) + (x * 2) @ x

        fast = df.compile(reduced, partition="kernels")
        with torch.no_grad():
            for _ in range(3):
                x = torch.randn(4, 4)
                torch.testing.assert_close(fast(x), x @ x + (x * 2) @ x)
        assert any("other ranks" in reason for reason in df.stats(fast).fallbacks)
    finally:
        torch.distributed.destroy_process_group()


# -- what is said


def test_explain_says_what_was_chosen_and_why(times):
    times["us"] = lambda n: [100.0, 90.0, *[50.0] * (n - 2)]
    model, x = Branchy(), image()
    before = {name: b.clone() for name, b in model.named_buffers()}
    with torch.no_grad():
        explanation = df.explain(model, x, partition="kernels")
    torch.testing.assert_close(dict(model.named_buffers()), before, rtol=0, atol=0)
    (graph,) = explanation.graphs
    text = str(explanation)
    assert "chosen     a plan of the kernels (Inductor 100 us, one stream 90 us" in text
    assert f"{len(graph.flow.ops)} kernels" in text and "critical path" in text and "in Inductor's order" in text
    one, many = graph.timelines()
    assert len(one.streams) == 1 < len(many.streams) and len(one.spans) == len(many.spans) == len(graph.flow.ops)


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_explain_says_why_nothing_was_chosen():
    with torch.no_grad():
        explanation = df.explain(lambda x: (x @ x)[x > 0], torch.randn(4, 4), partition="kernels")
    assert "runs as Inductor has it" in str(explanation)
    with pytest.raises(LookupError, match="no costs"):
        explanation.graphs[0].timelines()


def test_explain_writes_to_nothing_that_is_not_changed(times):
    """Expanded tensors, those of inference mode, and what is saved for a backward."""
    with torch.inference_mode():
        of_inference = torch.randn(6, 6)
    saved = torch.randn(6, 6, requires_grad=True)
    loss = saved.sin().sum()
    for x in (torch.randn(1, 6).expand(6, 6), of_inference, saved):
        torch._dynamo.reset()
        with torch.no_grad():
            assert "kernels" in str(df.explain(lambda x: (x @ x).relu() + x.sin() @ x, x, partition="kernels"))
    loss.backward()


def test_profile_is_of_the_kernels():
    fast = compiled(Towers(), "threads")
    call_thrice(fast)
    with torch.no_grad(), df.profile() as profile:
        fast(torch.randn(4, 8))
    assert any("addmm" in span.label for span in profile.timelines[0].spans) and not df.stats(fast).fallbacks
