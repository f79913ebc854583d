"""An unmodified model under plans: what a user passes in, what comes back, and what stays as it was."""

import contextlib
import copy
import functools
import logging
import pickle
import threading

import pytest
import torch
from torch import nn

import dynaflow as df
from dynaflow import errors

RUNTIMES = ["threads", "fake:lazy", "fake:greedy", "fake:11"]


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


class Block(nn.Module):
    """Two branches, an in-place update, a view across an op border, a counter without batch axis and a cache with one."""

    def __init__(self, width=8):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x, *, scale=2.0, cache=None):
        self.calls += 1
        h = self.a(x).relu_() + self.b(x)
        left, right = h.chunk(2, -1)
        if cache is not None:
            cache.add_(left)
            right = right + cache
        return {"y": self.c(h) * scale, "z": (torch.softmax(left, -1) * right).transpose(0, 1)}


def assert_same(got, wanted, exact=False):
    flat_got, flat_wanted = torch.utils._pytree.tree_leaves(got), torch.utils._pytree.tree_leaves(wanted)
    assert len(flat_got) == len(flat_wanted)
    for g, w in zip(flat_got, flat_wanted):
        assert g.stride() == w.stride()
        if exact:
            assert torch.equal(g, w)
        else:
            torch.testing.assert_close(g, w)


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("strategy", [df.TwoBatch(), df.NanoBatch(3), df.Branches(3)], ids=str)
def test_results_state_and_captures(strategy, runtime):
    model = Block()
    twin = copy.deepcopy(model)
    fast = df.compile(model, strategy=strategy, runtime=runtime, strict=True)
    for step, batch_size in enumerate((8, 3, 17, 4, 5)):
        x, cache = torch.randn(batch_size, 5, 8), torch.randn(batch_size, 5, 8)
        mine, theirs = cache.clone(), cache.clone()
        got = fast(x, scale=3.0, cache=mine)
        assert_same(got, twin(x, scale=3.0, cache=theirs))
        torch.testing.assert_close(mine, theirs)
        assert int(model.calls) == int(twin.calls) == step + 1, "the counter changes once per call, not once per part"
    stats = df.stats(fast)
    assert stats.captures == 1 and stats.plans == 1 and stats.binds == 5 and not stats.fallbacks
    model.calls.zero_()
    x = torch.randn(6, 5, 8)
    assert_same(fast(x), df.run_serialised(fast, x), exact=True)


def test_functions_pytrees_and_non_tensor_arguments():
    def function(pair, table, flag, factor):
        a, (b,) = pair
        total = a * factor + table["t"]
        return [total, {"b": b - 1 if flag else b}], "label", factor

    def call(f, n):
        g = torch.Generator().manual_seed(n)
        a, b, t = (torch.randn(n, 4, generator=g) for _ in range(3))
        return f((a, [b]), {"t": t}, True, 2)

    fast = df.compile(function, strategy=df.TwoBatch(), strict=True)
    for n in (4, 7):
        got, wanted = call(fast, n), call(function, n)
        assert got[1:] == ("label", 2)
        assert_same(got[0], wanted[0], exact=True)
    assert fast.__name__ == "function"


def test_outputs_belong_to_the_caller():
    fast = df.compile(Block(), strategy=df.TwoBatch(), strict=True)
    x = [torch.randn(4, 5, 8) for _ in range(6)]
    results = [fast(i)["y"] for i in x]
    kept = [r.clone() for r in results]
    for _ in range(3):
        fast(torch.randn(4, 5, 8))
    assert all(torch.equal(r, k) for r, k in zip(results, kept))


def test_threads_and_several_models_do_not_meet():
    models = [Block(), Block()]
    fasts = [df.compile(m, strategy=df.NanoBatch(3), strict=True) for m in models]
    for fast in fasts:
        fast(torch.randn(6, 5, 8))
    failures = []

    def work(seed):
        g = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for _ in range(15):
                x = torch.randn(int(torch.randint(3, 9, (), generator=g)), 5, 8, generator=g)
                k = seed % 2
                try:
                    torch.testing.assert_close(fasts[k](x)["z"], Block.forward(models[k], x)["z"])
                except AssertionError as error:
                    failures.append(error)

    workers = [threading.Thread(target=work, args=(s,)) for s in range(4)]
    for w in workers:
        w.start()
    for w in workers:
        w.join(60)
    assert not any(w.is_alive() for w in workers) and not failures


def test_autocast_and_inference_mode_hold_on_every_lane():
    model = Block()
    fast = df.compile(model, strategy=df.TwoBatch(), strict=True, runtime="threads")
    x = torch.randn(4, 5, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, wanted = fast(x), model(x)
    assert got["y"].dtype == torch.bfloat16
    assert_same(got, wanted)
    with torch.inference_mode():
        got = fast(x)
    assert got["y"].is_inference()
    assert_same(got, model(x))


def test_autocast_inside_the_model():
    lin = nn.Linear(8, 8)

    def function(x):
        h = lin(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = lin(h) @ lin.weight
        return h.float() + lin(x)

    fast = df.compile(function, strategy=df.TwoBatch(), strict=True)
    x = torch.randn(6, 8)
    assert_same(fast(x), function(x))


def test_gradients_run_the_sequential_graph_and_say_so(caplog):
    model = Block()
    fast = df.compile(model, strategy=df.TwoBatch())
    x = torch.randn(4, 5, 8)
    with torch.enable_grad(), caplog.at_level(logging.WARNING, "dynaflow"):
        for _ in range(2):
            loss = fast(x)["y"].sum()
        assert loss.grad_fn is not None
        loss.backward()
    wanted = copy.deepcopy(model)
    wanted.zero_grad()
    with torch.enable_grad():
        wanted(x)["y"].sum().backward()
    torch.testing.assert_close(model.c.weight.grad, wanted.c.weight.grad)
    assert sum("gradients are needed" in r.message for r in caplog.records) == 1, "said once"
    (count,) = df.stats(fast).fallbacks.values()
    assert count == 2
    with torch.enable_grad(), pytest.raises(errors.FellBack, match="gradients"):
        df.compile(model, strategy=df.TwoBatch(), strict=True)(x)


class Raises(df.Strategy):
    def schedule(self, flow):
        raise ZeroDivisionError("oops")


class Racy(df.Strategy):
    def schedule(self, flow):
        flow.execute(flow.ops and flow.find(flow.ops[-1].name))


class GivesUp(df.Strategy):
    def schedule(self, flow):
        flow.sequential("not today")


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [(Raises(), "ZeroDivisionError: oops"), (Racy(), "is not ready"), (GivesUp(), "not today"), (df.TwoBatch(min_batch_size=1), "no row")],
    ids=["raises", "is refused", "gives up", "batch smaller than the parts"],
)  # fmt: skip
def test_falls_back_loudly_once_and_counted(strategy, reason, caplog):
    model = Block()
    fast = df.compile(model, strategy=strategy)
    x = torch.randn(1, 5, 8)
    with caplog.at_level(logging.WARNING, "dynaflow"):
        for _ in range(3):
            assert_same(fast(x), Block.forward(model, x))
    warnings = [r.getMessage() for r in caplog.records if "falls back" in r.getMessage()]
    assert len(warnings) == 1 and reason in warnings[0]
    assert sum(df.stats(fast).fallbacks.values()) == 3
    with pytest.raises(errors.StrategyError, match=reason):
        df.compile(model, strategy=strategy, strict=True)(x)


def test_sequential_and_auto_are_no_fallback():
    for strategy in ("auto", "sequential", df.Sequential):
        fast = df.compile(Block(), strategy=strategy, strict=True)
        fast(torch.randn(4, 5, 8))
        assert not df.stats(fast).fallbacks


def test_an_error_in_a_launch_leaves_the_engine_right():
    @torch.library.custom_op("dynaflow_test::explode", mutates_args=())
    def explode(x: torch.Tensor) -> torch.Tensor:
        if float(x.max()) > 100:
            raise RuntimeError("boom")
        return x.clone()

    explode.register_fake(lambda x: torch.empty_like(x))
    df.register_split_rule(torch.ops.dynaflow_test.explode, df.rowwise)

    def function(x, cache):
        cache.add_(x)
        return torch.ops.dynaflow_test.explode(cache * 1.0) + 1

    for runtime in ("threads", "serial"):
        cut = ["auto", df.SplitFunc(torch.ops.dynaflow_test.explode)]
        fast = df.compile(function, strategy=df.TwoBatch(), partition=cut, strict=True, runtime=runtime)
        x = torch.ones(4, 3)
        wanted = function(x, torch.zeros(4, 3))
        assert_same(fast(x, torch.zeros(4, 3)), wanted)
        bad = torch.zeros(4, 3)
        bad[3, 0] = 1000
        with pytest.raises(RuntimeError, match="boom") as error:
            fast(x, bad)
        note = "\n".join(error.value.__notes__)
        assert "raised by" in note and "explode" in note and "1/2" in note and "cache (by" in note
        assert_same(fast(x, torch.zeros(4, 3)), wanted)


class ToMultiplesOfFive:
    """Cuts at the next lower multiple of 5."""

    def __call__(self, rows):
        return [row // 5 * 5 for row in rows]


@pytest.mark.parametrize("runtime", ["auto", "serial", "fake:lazy"])
@pytest.mark.parametrize("strategy", [df.NanoBatch(3), df.NanoFlow((0.5, 0.5), (0.25, 0.25, 0.5), 1)])
@df.context(phase="decode")
def test_parts_are_cut_where_the_caller_says(strategy, runtime):
    def function(q, w):
        x = torch.relu(q @ w) + 1
        return torch.nn.functional.scaled_dot_product_attention(x, x, x) @ w

    seen = []

    def keep(parts):
        seen.append(sorted({row for p in parts for row in (p.start, p.stop)}))
        return [contextlib.nullcontext() for _ in parts]

    w = torch.randn(4, 4)
    partition = ["auto", df.SplitFunc(torch.nn.functional.scaled_dot_product_attention)]
    options = {"strategy": strategy, "partition": partition, "batch": {"q": 0}}
    fast = df.compile(function, strict=True, align=ToMultiplesOfFive(), runtime=runtime, **options)
    for n in (23, 31, 23):
        x = torch.randn(n, 3, 4)
        assert_same(fast(x, w), function(x, w))
        assert torch.equal(fast(x, w), df.run_serialised(fast, x, w))
    assert df.stats(fast).captures == 1 and df.stats(fast).num_part_launches > 0
    stated = df.compile(function, strict=True, align=ToMultiplesOfFive(), part_context=keep, **options)
    x = torch.randn(31, 3, 4)
    assert_same(stated(x, w), function(x, w))
    assert seen == [[0, 10, 20, 31]] if isinstance(strategy, df.NanoBatch) else seen == [[0, 5, 15, 31]]


def test_cuts_that_leave_a_part_without_rows_fall_back():
    fast = df.compile(torch.tanh, strategy=df.NanoBatch(3), align=ToMultiplesOfFive())
    x = torch.randn(8, 2)
    assert_same(fast(x), torch.tanh(x))
    assert "has no row" in next(iter(df.stats(fast).fallbacks))
    with pytest.raises(errors.BatchTooSmall):
        df.compile(torch.tanh, strategy=df.NanoBatch(3), align=ToMultiplesOfFive(), strict=True)(x)


@pytest.mark.parametrize("moved", [[3], [4, 2], [2, 9]])
def test_rejects_cuts_that_are_none(moved):
    fast = df.compile(torch.tanh, strategy=df.NanoBatch(3), align=lambda rows: moved)
    with pytest.raises(errors.OptionError, match="align moved the cuts at rows"):
        fast(torch.randn(8, 2))


def test_state_that_a_split_rule_names_is_used_in_the_order_of_rows():
    written = []

    @torch.library.custom_op("dynaflow_test::remember", mutates_args=())
    def remember(x: torch.Tensor, where: str) -> torch.Tensor:
        written.append((where, int(x[0, 0])))
        return x.clone()

    remember.register_fake(lambda x, where: torch.empty_like(x))

    class LastFirst(df.Strategy):
        def schedule(self, flow):
            flow.split(3)
            while ready := flow.get_ready_ops():
                flow.execute(max(ready, key=lambda r: r.part), stream=f"s{ready[-1].part.lo}")

    def function(x):
        y = torch.ops.dynaflow_test.remember(x * 1, "a")
        return torch.ops.dynaflow_test.remember(y + 0, "b")

    op = torch.ops.dynaflow_test.remember
    x = torch.arange(9.0).unsqueeze(1).repeat(1, 2)
    rows = {}
    for uses in (None, lambda call: [f"cache:{call['where']}"]):
        df.register_split_rule(op, df.rowwise, uses=uses)
        fast = df.compile(function, strategy=LastFirst(), partition=[df.SplitFunc(op)], strict=True, runtime="serial")
        written.clear()
        assert_same(fast(x), x)
        rows[uses is not None] = {where: [row for w, row in written if w == where] for where in "ab"}
    assert rows[False] == {"a": [6, 3, 0], "b": [6, 3, 0]}
    assert rows[True] == {"a": [0, 3, 6], "b": [0, 3, 6]}


def test_explain_and_check_change_nothing():
    model = Block()
    x = torch.randn(6, 5, 8)
    cache = torch.randn(6, 5, 8)
    before = cache.clone()
    text = str(df.explain(model, {"x": x, "cache": cache}, df.TwoBatch()))
    for expected in ("mutates cache", "does not depend on the batch", "verified", "arena", "launches", "0/2"):
        assert expected in text
    checked = df.check(model, {"x": x, "cache": cache}, df.TwoBatch())
    assert checked.num_split_ops > 3 and checked.worst_difference < 1e-5
    assert int(model.calls) == 0 and torch.equal(cache, before)
    with pytest.raises(errors.StrategyRaised, match="oops"):
        df.explain(model, x, Raises())


def test_explain_names_what_may_not_repeat_bit_equal():
    def adds(x, index):
        return torch.zeros_like(x).scatter_add(1, index, x) + 1

    x, index = torch.randn(4, 3), torch.zeros(4, 3, dtype=torch.int64)
    assert "aten.scatter_add.default adds in no fixed order" in str(df.explain(adds, (x, index), df.TwoBatch()))
    assert "no fixed order" not in str(df.explain(lambda x: x + 1, x, df.TwoBatch()))


def test_check_names_the_op_that_mixes_rows():
    class Centre(nn.Module):
        def forward(self, x):
            return x - x.mean(0)

    model = nn.Sequential(nn.Linear(4, 4), Centre(), nn.Linear(4, 4))
    x = torch.randn(6, 4)
    honest = df.check(model, x, df.TwoBatch())
    assert (honest.num_ops, honest.num_split_ops) == (4, 3), "the mean runs merged, its subtraction does not"
    with pytest.raises(errors.SplitMismatch, match="'1' gives other results on part 0/2"):
        df.check(model, x, df.TwoBatch(), partition=[df.SplitModule("1", splittable=True), "auto"])


def test_plans_can_be_pickled_and_compared():
    model = Block()
    plan = df.explain(model, torch.randn(6, 5, 8), df.TwoBatch()).plan
    assert pickle.loads(pickle.dumps(plan)) == plan and df.Plan.parse(str(plan)) == plan


def test_profile_shows_the_launches():
    fast = df.compile(Block(), strategy=df.TwoBatch(), strict=True)
    with df.profile() as profiled:
        fast(torch.randn(6, 5, 8))
    labels = {span.label for span in profiled.timeline.spans}
    assert "a 0/2" in labels and "a 1/2" in labels
    assert profiled.timeline.total_us > 0


def test_rejects_a_share_of_the_sms_that_it_cannot_give():
    class Share(df.Strategy):
        def schedule(self, flow):
            flow.stream("few", sms=16)
            while ready := flow.get_ready_ops():
                flow.execute(ready[0], stream="few")

    with pytest.raises(errors.OptionError, match="SMs are asked for .'few' 16., but the model runs on the cpu"):
        df.compile(Block(), strategy=Share(), strict=True)(torch.randn(4, 5, 8))


def test_tags_must_tell_contexts_apart():
    for value in ([1], {"a": 1}, torch.ones(2)):
        with pytest.raises(errors.OptionError, match="the tag phase"), df.context(phase=value):
            pass


def test_only_tags_that_a_plan_read_make_new_bindings():
    fast = df.compile(Block(), strategy=df.TwoBatch(), strict=True)
    for step in range(5):
        with df.context(step=step):
            fast(torch.randn(4, 5, 8))
    assert df.stats(fast).binds == 1


class Fused(df.Strategy):
    """relu and sin of a part by one bound method."""

    def __init__(self, scale):
        self._scale = scale

    def both(self, x):
        return torch.sin(torch.relu(x)) * self._scale

    def schedule(self, flow):
        flow.split(2)
        while ready := flow.get_ready_ops():
            group = [ready[0], *ready[0].users][:2]
            if [r.name for r in group] == ["relu", "sin"]:
                flow.execute(group, replace=self.both)
            else:
                flow.execute(ready[0])


def test_a_replacement_may_be_a_method_and_hold_parameters():
    rules = [df.SplitFunc(torch.relu), df.SplitFunc(torch.sin)]
    scale = torch.randn(3)
    fast = df.compile(lambda x: torch.sin(torch.relu(x)) + 1, strategy=Fused(scale), partition=rules, strict=True)
    x = torch.randn(6, 3)
    assert_same(fast(x), torch.sin(torch.relu(x)) * scale + 1)


def test_explain_leaves_the_random_state_alone():
    before = torch.get_rng_state()
    df.explain(lambda x: torch.rand_like(x) + x, torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), df.TwoBatch())
    assert torch.equal(torch.get_rng_state(), before)


class Scaled(df.Strategy):
    """Every part of relu by a partial of its own."""

    def schedule(self, flow):
        flow.split(2)
        while ready := flow.get_ready_ops():
            for r in ready:
                by = functools.partial(scaled_relu, by=float(r.part.lo + 1))
                flow.execute([r], replace=by if r.name == "relu" else None)


def scaled_relu(x, by):
    return torch.relu(x) * by


class Unnamed(df.Strategy):
    """Every part of relu by a function of its own, all of one name."""

    def schedule(self, flow):
        flow.split(2)
        while ready := flow.get_ready_ops():
            for r in ready:
                factor = float(r.part.lo + 1)
                flow.execute([r], replace=(lambda x, by=factor: torch.relu(x) * by) if r.name == "relu" else None)


@pytest.mark.parametrize(
    ("strategy", "names"),
    [(Scaled(), ["test_engine.scaled_relu(by=1.0)[relu 0/2]", "test_engine.scaled_relu(by=2.0)[relu 1/2]"]),
     (Unnamed(), ["Unnamed.schedule.lambda[relu 0/2]", "Unnamed.schedule.lambda.1[relu 1/2]"])],
    ids=["partials", "one name"],
)  # fmt: skip
def test_replacements_have_names_of_their_own(strategy, names):
    rules = [df.SplitFunc(torch.relu)]
    x = torch.randn(6, 3)
    fast = df.compile(lambda x: torch.relu(x) + 1, strategy=strategy, partition=rules, strict=True)
    assert_same(fast(x), torch.relu(x) * torch.tensor([1.0, 2.0]).repeat_interleave(3)[:, None] + 1)
    plans = [df.explain(lambda x: torch.relu(x) + 1, x, strategy, partition=rules).plan for _ in range(2)]
    assert str(plans[0]) == str(plans[1]) and df.Plan.parse(str(plans[0])) == plans[0]
    assert all(name in str(plans[0]) for name in names)


@pytest.mark.parametrize("kind", ["mkldnn", "quantised"])
def test_tensors_that_cannot_be_placed_fall_back(kind, caplog):
    x = torch.randn(6, 4)
    x = x.to_mkldnn() if kind == "mkldnn" else x

    def function(x):
        if kind == "mkldnn":
            return torch.relu(x).to_dense() + 1
        return torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize() + 1

    fast = df.compile(function, strategy=df.TwoBatch())
    with caplog.at_level(logging.WARNING, "dynaflow"):
        for _ in range(3):
            assert torch.equal(fast(x), function(x))
    # torch 2.11 does not capture quantised tensors at all
    reasons = [reason for reason, count in df.stats(fast).fallbacks.items() if count == 3]
    assert any(f"is {'an mkldnn tensor' if kind == 'mkldnn' else 'quantised'}" in r or "without capturing" in r for r in reasons)
    said = [r.getMessage() for r in caplog.records if r.name == "dynaflow"]
    assert len(said) == len(df.stats(fast).fallbacks), "each reason once"
    with pytest.raises(errors.DynaFlowError):
        df.compile(function, strategy=df.TwoBatch(), strict=True)(x)
    if kind == "mkldnn":
        assert torch.equal(df.compile(function, strategy="sequential", strict=True)(x), function(x)), "the sequential graph was asked for"


@pytest.mark.parametrize("mixes", [False, True], ids=["rows", "mixed"])
def test_long_chains_of_views(mixes):
    def function(x):
        y = x * 2
        if mixes:
            y = y.flip(0)
        for _ in range(600):
            y = y[:, :]
        return y + 1

    fast = df.compile(function, strategy=df.TwoBatch(), strict=True)
    x = torch.randn(6, 4)
    assert torch.equal(fast(x), function(x)) and df.stats(fast).num_part_launches > 0
