"""df.optimize and df.restore on plain modules. What they do inside real systems is in tests/systems."""

import copy
import pickle

import pytest
import torch
from torch import nn

import dynaflow as df
from dynaflow import errors


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def test_compiles_in_place_and_can_be_undone():
    net, x = Net(), torch.randn(6, 8)
    expected = net(x)
    assert df.optimize(net, strategy=df.TwoBatch(), strict=True) is net
    torch.testing.assert_close(net(x), expected)
    torch.testing.assert_close(net.forward(x), expected)
    assert df.stats(net).split_calls == df.stats(net).calls == 2
    assert df.restore(net) is net and not {"forward", "_dynaflow_optimized"} & vars(net).keys()
    assert torch.equal(net(x), expected)


def test_hooks_weights_and_a_model_around_it_stay_what_they_are():
    net, x, seen = Net(), torch.randn(6, 8), []
    model = nn.Sequential(df.optimize(net, strategy=df.TwoBatch()), nn.Linear(8, 2))
    net.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    model(x)
    net.load_state_dict({name: torch.zeros_like(p) for name, p in net.state_dict().items()})
    assert torch.equal(net(x), x) and seen == [(6, 8)] * 2
    assert list(net.state_dict()) == list(Net().state_dict())


def test_a_forward_that_was_replaced_before():
    net, x = Net(), torch.randn(6, 8)
    theirs = net.forward
    net.forward = replaced = lambda x: theirs(x) * 2
    df.optimize(net, strategy=df.TwoBatch())
    torch.testing.assert_close(net(x), Net.forward(net, x) * 2)
    assert df.stats(net).split_calls == 1
    assert df.restore(net).forward is replaced


def test_copies_and_saved_models():
    net, x = df.optimize(Net(), strategy=df.TwoBatch()), torch.randn(6, 8)
    twin, loaded = copy.deepcopy(net), pickle.loads(pickle.dumps(net))
    twin.down.bias.add_(1)
    torch.testing.assert_close(twin(x), net(x) + 1)
    torch.testing.assert_close(loaded(x), net(x))
    assert df.stats(twin).split_calls == 1 and df.stats(loaded).calls == 0
    df.restore(twin)
    assert "forward" not in vars(twin) and "forward" in vars(net)
    df.optimize(loaded, strategy=df.TwoBatch())  # as before: not optimized
    torch.testing.assert_close(loaded(x), net(x))
    assert df.stats(loaded).split_calls == 1


def test_explain_looks_through():
    net, x = Net(), torch.randn(6, 8)
    expected = [op.name for op in df.explain(net, x, strategy=df.TwoBatch()).flow.ops]
    assert [op.name for op in df.explain(df.optimize(net), x, strategy=df.TwoBatch()).flow.ops] == expected


def test_rejects_a_second_time():
    net = df.optimize(Net())
    with pytest.raises(errors.OptionError, match="optimized already"):
        df.optimize(net)
    with pytest.raises(errors.OptionError, match="compiled by DynaFlow already"):
        df.optimize(df.compile(Net()))


def test_rejects_what_it_does_not_know():
    with pytest.raises(errors.OptionError, match="list is nothing that df.optimize knows"):
        df.optimize([Net()])
    with pytest.raises(errors.OptionError, match="was not given to df.optimize"):
        df.restore(Net())
    with pytest.raises(errors.OptionError, match="was not made by df.compile, nor given to df.optimize"):
        df.stats(Net())


def test_rejects_to_undo_what_was_replaced_since():
    net = df.optimize(Net())
    ours, net.forward = net.forward, lambda x: x
    with pytest.raises(errors.OptionError, match="was replaced since"):
        df.restore(net)
    net.forward = ours
    df.restore(net)
    assert "forward" not in vars(net)


def test_a_wrong_option_changes_nothing():
    net = Net()
    with pytest.raises(errors.OptionError, match="unknown strategy"):
        df.optimize(net, strategy="fastest")
    assert not {"forward", "_dynaflow_optimized"} & vars(net).keys()
