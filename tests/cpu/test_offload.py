"""Weights on the host, fetched ahead of their use: the same results, within the budget, whatever the order of streams."""

import pytest
import torch
from torch import nn

import dynaflow as df
from dynaflow.errors import OptionError, StrategyError
from dynaflow.offload import _Fetched
from dynaflow.planner import plan
from dynaflow.sync import clocks, synchronise
from dynaflow.testing.notation import flow_of

WIDTH = 32
WEIGHT_BYTES = WIDTH * WIDTH * 4


class Chain(nn.Module):
    """Products with a residual; one weight is used twice, far apart, and fetched twice."""

    def __init__(self, num_layers=6):
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))

    def forward(self, ids):
        h = self.embed(ids)
        for layer in self.layers:
            h = h + torch.tanh(layer(h))
        return self.layers[0](h)


def offloaded(num_layers=6):
    torch.manual_seed(0)
    return df.offload(Chain(num_layers).requires_grad_(False), "cpu", min_bytes=WEIGHT_BYTES)


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def ids(rows=4):
    return torch.randint(0, 50, (rows, 3))


@pytest.mark.parametrize("runtime", ["auto", "serial", "fake:greedy", "fake:lazy", "fake:7", "graph"])
def test_results_are_the_model_s(runtime):
    model = offloaded()
    fast = df.compile(model, strategy=df.Offload(3 * WEIGHT_BYTES), runtime=runtime, strict=True)
    for rows in (4, 4, 4, 2, 2, 5):
        x = ids(rows)
        assert torch.equal(fast(x), model(x))
    assert df.stats(fast).planned_calls == 6


def test_weights_that_change_are_fetched_as_they_are():
    model = offloaded()
    fast = df.compile(model, strategy=df.Offload(3 * WEIGHT_BYTES), strict=True)
    x = ids()
    before = fast(x)
    model.layers[3].parametrizations.weight.original.mul_(2)
    assert torch.equal(fast(x), model(x)) and not torch.equal(fast(x), before)


def explained(budget, model=None):
    (graph,) = df.explain(model or offloaded(), ids(), df.Offload(budget)).graphs
    return graph


def held_at_most(graph):
    """The most bytes of fetched weights that may be there at once, in any order that streams and waits allow."""
    flow, made = graph.flow, graph.plan
    table = clocks(made)[1]
    launches = made.launches
    at = {launch.calls[0][0]: n for n, launch in enumerate(launches)}
    users = {op.name: [n for n, launch in enumerate(launches) for name, _ in launch.calls if set(flow.op(name).reads) & set(op.writes)]
             for op in flow.ops if ".fetch" in op.name}
    most = 0
    for fetch in users:
        stream_of, position_of, before = table[at[fetch]]
        over = {f for f in users if f != fetch and all(before[table[n][0]] > table[n][1] for n in users[f])}
        begun = {f for f in users if table[at[f]][1] <= position_of}
        most = max(most, WEIGHT_BYTES * len(begun - over))
    return most


@pytest.mark.parametrize("num_weights", [1, 2, 3, 4])
def test_never_more_than_the_budget(num_weights):
    graph = explained(num_weights * WEIGHT_BYTES)
    fetches = [launch for launch in graph.plan.launches if launch.stream == "copy"]
    assert len(fetches) == 7 and all(".weight.fetch" in launch.calls[0][0] for launch in fetches)
    assert held_at_most(graph) == num_weights * WEIGHT_BYTES


def test_more_than_the_budget_would_be_seen(monkeypatch):
    """Twin: without what `after` asks for, weights are copied whenever the copy lane gets to it."""
    execute = df.planner.Planner.execute
    monkeypatch.setattr(df.planner.Planner, "execute", lambda self, *args, after=(), **options: execute(self, *args, **options))
    assert held_at_most(explained(3 * WEIGHT_BYTES)) > 3 * WEIGHT_BYTES


def test_memory_is_shared_between_weights():
    graph = explained(3 * WEIGHT_BYTES)
    slots = dict(graph.plan.slots)
    of_weights = {slots[v] for op in graph.flow.ops if ".fetch" in op.name for v in op.writes}
    assert len(of_weights) == 3


@pytest.mark.parametrize("is_offloaded, why", [(True, "more than the budget"), (False, "no weight is fetched")])
def test_gives_up_with_a_reason(is_offloaded, why):
    model = offloaded() if is_offloaded else Chain().requires_grad_(False)
    fast = df.compile(model, strategy=df.Offload(WEIGHT_BYTES - 1))
    x = ids()
    assert torch.equal(fast(x), model(x))
    (reason,) = df.stats(fast).fallbacks
    assert why in reason


def test_enough_for_all_is_one_copy_each_and_nothing_waits_for_room():
    graph = explained(7 * WEIGHT_BYTES)
    waits = [step for step in graph.plan.waits if step.stream == "copy"]
    assert len(waits) == 1, "for the caller's stream, at the start"


# -- offload and onload


def test_the_way_back():
    torch.manual_seed(0)
    model = Chain().requires_grad_(False)
    before = {name: p.clone() for name, p in model.named_parameters()}
    x = ids()
    want = model(x)
    df.offload(model, "cpu", min_bytes=WEIGHT_BYTES)
    assert sum(isinstance(m, _Fetched) for m in model.modules()) == 6 and torch.equal(model(x), want)
    df.onload(model, "cpu")
    assert not any(isinstance(m, _Fetched) for m in model.modules())
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters()) and torch.equal(model(x), want)


def test_shared_weights_stay_shared():
    model = Chain(2).requires_grad_(False)
    model.layers[1].weight = model.layers[0].weight
    df.offload(model, "cpu", min_bytes=WEIGHT_BYTES)
    first, second = (layer.parametrizations.weight.original for layer in model.layers)
    assert first is second
    fast = df.compile(model, strategy=df.Offload(3 * WEIGHT_BYTES), strict=True)
    x = ids()
    assert torch.equal(fast(x), model(x))


def test_mistakes_are_refused():
    with pytest.raises(OptionError, match="no weight of Chain has 1,000,000 bytes"):
        df.offload(Chain(), "cpu", min_bytes=1_000_000)
    with pytest.raises(OptionError, match="need gradients"):
        df.offload(Chain(), "cpu", min_bytes=WEIGHT_BYTES)
    with pytest.raises(OptionError, match="offloaded already"):
        df.offload(offloaded(), "cpu", min_bytes=WEIGHT_BYTES)
    with pytest.raises(OptionError, match="no number of bytes"):
        df.Offload(0)


# -- after


class After(df.Strategy):
    def __init__(self, is_executed=True):
        self.is_executed = is_executed

    def schedule(self, flow):
        a, b, c = (flow.find(name) for name in "abc")
        flow.execute(a, stream="one")
        if not self.is_executed:
            flow.execute(b, stream="two", after=[c])
        flow.execute(b, stream="two", after=[a])
        flow.execute(c, stream="one")


def test_after_is_a_wait():
    """b reads nothing of a's, and still starts behind it."""
    flow = flow_of("input x\na: x -> p\nb: x -> q\nc: p q -> y\noutput y")
    made = synchronise(flow, plan(flow, After()))
    (_, _, _), (_, _, before), _ = clocks(made)[1]
    streams = [s.name for s in made.streams]
    assert before[1 + streams.index("one")] == 1
    free = synchronise(flow, plan(flow, df.Branches(2)))
    assert len(free.waits) < len(made.waits)


def test_after_something_that_is_not_executed():
    flow = flow_of("input x\na: x -> p\nb: x -> q\nc: p q -> y\noutput y")
    with pytest.raises(StrategyError, match="'c' is not executed"):
        plan(flow, After(is_executed=False))


# -- the benchmark


def test_benchmark_measures_and_reports(tmp_path, monkeypatch):
    """Everything small: all variants, equality against the serialised plan, a file of the common form, table and page."""
    import benchmarks.offload as suite

    path = tmp_path / "offload.json"
    words = ["offload", "--tiny", "--device", "cpu", "--rows", "llama 1 token", "--rounds", "2", "--json", str(path)]
    monkeypatch.setattr("sys.argv", words)
    with torch.no_grad():
        suite.main()
    (row,) = suite.load(path)
    assert row["equal"] == "bit" and row["score"] > 0 and row["budget_mib"] < row["weights_mib"]
    assert {suite.RESIDENT, suite.COPIES} <= set(row["baselines"]) and row["ours"]["variant"] in (suite.OURS, suite.GRAPH)
    assert "llama 1 token" in suite.table([row]) and "llama 1 token" in suite.markdown([row])
    assert "--json" not in row["made_by"]
