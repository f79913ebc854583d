"""What the author of a strategy gets wrong on a model of their own, beyond what the planner alone sees (`test_planner.py`)."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dynaflow as df
from dynaflow import errors
from dynaflow.explain import InspectedGraph, inspected


@pytest.fixture(autouse=True)
def no_gradients():
    torch._dynamo.reset()
    with torch.no_grad():
        yield


class Net(nn.Module):
    """x is read again behind the two ops that are replaced."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.out = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = torch.tanh(x)
        return self.out(x + F.gelu(self.up(self.norm(x))))


PARTITION = [df.SplitModule("norm"), df.SplitModule("up"), df.SplitModule("out")]
X = torch.randn(6, 8)


class Replace(df.Strategy):
    def __init__(self, function):
        self.function = function

    def schedule(self, flow):
        flow.split(2)
        while ready := flow.get_ready_ops():
            r = ready[0]
            if r.name == "norm":
                flow.execute([r, flow.find("up", r.part)], replace=self.function)
            else:
                flow.execute(r)


def fused(x, norm_weight, norm_bias, weight, bias):
    return F.linear(F.layer_norm(x, (8,), norm_weight, norm_bias), weight, bias)


def adds_in_place(x, *weights):
    x += 1
    return fused(x, *weights)


def changes_a_view(x, *weights):
    x[:, :2].zero_()
    return fused(x, *weights)


def changes_a_weight(x, norm_weight, *weights):
    norm_weight.mul_(2)
    return fused(x, norm_weight, *weights)


def changes_its_own(x, *weights):
    y = fused(x, *weights)
    y += 0
    return y


@pytest.mark.parametrize("function, value", [(adds_in_place, "x:0"), (changes_a_view, "x:0"), (changes_a_weight, "norm.weight")])
def test_rejects_a_replacement_that_changes_what_its_ops_only_read(function, value):
    """Others read it later; nothing in the plan would say that it is written."""
    with pytest.raises(errors.ReplacementMismatch, match="in place") as caught:
        df.explain(Net(), X, Replace(function), partition=PARTITION)
    assert f"changes '{value}' in place" in caught.value.what
    assert "test_own_strategies.py" in caught.value.where


def test_so_it_does_in_inference_mode():
    with torch.inference_mode():
        net, y = Net(), torch.randn(6, 8)
        weights = [net.norm.weight, net.norm.bias, net.up.weight, net.up.bias]
        own = Replace(lambda x, *given: fused(x, *weights))
        torch.testing.assert_close(df.compile(net, strategy=own, partition=PARTITION, strict=True)(y), net(y))
        torch._dynamo.reset()
        with pytest.raises(errors.ReplacementMismatch, match="in place"):
            df.compile(net, strategy=Replace(adds_in_place), partition=PARTITION, strict=True)(y)


def test_a_replacement_may_change_what_it_made_itself():
    net = Net()
    fast = df.compile(net, strategy=Replace(changes_its_own), partition=PARTITION, strict=True)
    torch.testing.assert_close(fast(X), net(X))


def test_a_replacement_may_change_what_its_ops_change():
    class Counts(nn.Module):
        def forward(self, x, cache):
            cache.add_(torch.tanh(x))
            return cache * 2

    class All(df.Strategy):
        def schedule(self, flow):
            flow.split(2)
            while ready := flow.get_ready_ops():
                flow.execute([ready[0]], replace=flow.body(ready[:1]))

    ours, theirs = torch.zeros(6, 8), torch.zeros(6, 8)
    fast = df.compile(Counts(), strategy=All(), partition="auto", strict=True)
    torch.testing.assert_close(fast(X, ours), Counts()(X, theirs))
    assert torch.equal(ours, theirs)
    assert df.check(Counts(), (X, torch.zeros(6, 8)), All()).num_replacements == 2


def test_a_wrong_replacement_is_told_what_it_is_given():
    with pytest.raises(errors.ReplacementMismatch) as caught:
        df.explain(Net(), X, Replace(lambda x: x), partition=PARTITION)
    assert "norm" in caught.value.what and "float32[3, 8] on cpu, " in caught.value.why and len(str(caught.value).splitlines()) <= 12
    with pytest.raises(errors.ReplacementMismatch, match="returns other outputs") as caught:
        df.explain(Net(), X, Replace(lambda x, *weights: x.double()), partition=PARTITION)
    assert "expected up:0 float32[3, 8] on cpu; got float64[3, 8] on cpu" in caught.value.why
    with pytest.raises(errors.ReplacementMismatch, match="replace=3 is no function"):
        df.explain(Net(), X, Replace(3), partition=PARTITION)


def test_a_launch_of_several_ops_on_a_part_counts_once():
    fast = df.compile(Net(), strategy=Replace(fused), partition=PARTITION, strict=True)
    fast(X)
    assert df.stats(fast).num_part_launches == df.stats(fast).num_launches > 0


def mixes_rows(x, *weights):
    return fused(x + x.mean(0), *weights)


def forgets_the_bias(x, norm_weight, norm_bias, weight, bias):
    return fused(x, norm_weight, norm_bias, weight, torch.zeros_like(bias))


@pytest.mark.parametrize("function", [mixes_rows, forgets_the_bias])
def test_check_rejects_a_replacement_that_computes_something_else(function):
    """Its outputs have the right shapes, so a plan can be made of it."""
    df.explain(Net(), X, Replace(function), partition=PARTITION)
    with pytest.raises(errors.ReplacementMismatch, match="gives other results than the ops") as caught:
        df.check(Net(), X, Replace(function), partition=PARTITION)
    assert caught.value.region == "up:0 0/2" and "test_own_strategies.py" in caught.value.where


def test_check_compares_replacements_with_their_ops():
    checked = df.check(Net(), X, Replace(fused), partition=PARTITION)
    assert checked.num_replacements == 2 and "2 replacements beside their ops" in str(checked)
    assert df.check(Net(), X, df.TwoBatch(), partition=PARTITION).num_replacements == 0


def test_a_share_of_the_sms_is_refused_at_its_own_line():
    class Share(df.Strategy):
        def schedule(self, flow):
            flow.stream("few", sms=16)
            while ready := flow.get_ready_ops():
                flow.execute(ready[0], "few")

    with pytest.raises(errors.OptionError, match="SMs are asked for") as caught:
        df.explain(Net(), X, Share(), partition=PARTITION)
    assert 'flow.stream("few", sms=16)' in str(caught.value)


def test_the_device_is_told_by_its_type():
    """Not by its number, which is another on every rank: plans would differ."""
    (graph,) = inspected(Net(), ((X,), {}), InspectedGraph, strategy=df.TwoBatch(), partition=PARTITION)
    args = [X] * (len(graph.boundary.names) + 1)
    assert graph.boundary.facts(args, 6, torch.device("cuda", 1), {})["device"] == "cuda"


class Generator(df.Strategy):
    def schedule(self, flow):
        yield flow.get_ready_ops()


class Async(df.Strategy):
    async def schedule(self, flow):
        flow.split(2)


class WithoutSelf(df.Strategy):
    def schedule(flow):
        pass


@pytest.mark.parametrize("strategy, said", [(Generator(), "is a generator"), (Async(), "or async"), (WithoutSelf(), "takes 1 positional")])
def test_rejects_a_schedule_that_cannot_be_called_as_one(strategy, said):
    with pytest.raises(errors.StrategyError, match=said) as caught:
        df.explain(Net(), X, strategy, partition=PARTITION)
    assert "test_own_strategies.py" in caught.value.where and "def schedule(" in str(caught.value)


@pytest.mark.parametrize("rule, said", [
    (df.SplitModule("*.norm2"), "SplitModule('*.norm2') matches nothing"),
    (df.SplitModule(nn.Conv2d, kind="network", splittable=False), "SplitModule(Conv2d, kind='network', splittable=False) matches nothing"),
    (df.SplitFunc(torch.sin, name="wave"), "SplitFunc(sin, name='wave') matches nothing"),
])  # fmt: skip
def test_a_rule_that_matches_nothing_is_shown_as_it_was_written(rule, said):
    with pytest.raises(errors.PartitionError) as caught:
        df.explain(Net(), X, df.TwoBatch(), partition=[rule])
    assert said in caught.value.what and caught.value.why == "modules there: norm, out, up"


def test_rejects_rules_that_say_nothing():
    with pytest.raises(errors.PartitionError, match=r"not a Linear that is made.*\n.*SplitModule\(Linear\)"):
        df.SplitModule(nn.Linear(2, 2))
    for make in (df.SplitModule, df.SplitFunc):
        with pytest.raises(errors.OptionError, match="splittable is 'yes'"):
            make(nn.Linear, splittable="yes")
        assert make(nn.Linear, splittable=True).splittable


def test_a_rule_means_its_outermost_module_and_several_rules_the_innermost():
    net = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Linear(8, 8))

    def names(*partition):
        return [op.name for op in df.explain(net, X, df.TwoBatch(), partition=partition).flow.ops]

    assert names(df.SplitModule("*")) == ["0", "1"]
    assert names(df.SplitModule("*"), df.SplitModule("0.*")) == ["0.0", "0.1", "1"]


def test_a_split_rule_takes_what_custom_op_made():
    @torch.library.custom_op("own_strategies::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)

    def mixing():
        flow = df.explain(lambda x: twice(torch.tanh(x)), X, df.TwoBatch(), partition=[df.SplitFunc(twice)]).flow
        return [op.name for op in flow.ops if op.unsplittable]

    assert mixing() == ["twice"]
    df.register_split_rule(twice, df.rowwise)
    assert mixing() == []
    with pytest.raises(errors.OptionError, match="is no op"):
        df.register_split_rule("own_strategies::twice", df.rowwise)
    with pytest.raises(errors.OptionError, match="as its rule"):
        df.register_split_rule(twice, True)


@pytest.mark.parametrize("factor", [float("nan"), 0.5, True, "2GiB"])
def test_rejects_a_memory_limit_that_is_no_factor(factor):
    with pytest.raises(errors.OptionError, match="is no factor"):
        df.compile(Net(), max_memory=factor)
    df.compile(Net(), max_memory=1.0)
