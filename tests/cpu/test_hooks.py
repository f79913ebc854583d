"""Hooks of modules: those that come later run, those that go are gone, and captures of their states are few."""

import weakref

import pytest
import torch
from torch import nn

import dynaflow as df
from tests.cpu.test_engine import no_grad  # noqa: F401 (no_grad is a fixture)


class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.hidden = [nn.Linear(4, 4)]

    def forward(self, x):
        y = self.a(x)
        torch._dynamo.graph_break()
        return self.hidden[0](self.b(y)) + 1


def double(module, args, output):
    return output * 2


@pytest.mark.parametrize("make", [lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU()), Broken], ids=["whole", "graph break"])
def test_hooks_that_are_registered_later_run(make):
    model = make()
    fast = df.compile(model, strategy=df.TwoBatch(), strict=True)
    x = torch.randn(6, 4)
    before = fast(x)
    inner = next(model.children())
    for module in (model, inner, *getattr(model, "hidden", ())):
        handle = module.register_forward_hook(double)
        torch.testing.assert_close(fast(x), model(x))
        assert not torch.equal(fast(x), before)
        handle.remove()
        torch.testing.assert_close(fast(x), before)
    handles = [
        inner.register_forward_pre_hook(lambda mod, args: (args[0] + 1,)),
        inner.register_forward_pre_hook(lambda mod, args, kwargs: ((args[0] * 3,), kwargs), with_kwargs=True),
        inner.register_forward_hook(lambda mod, args, kwargs, out: out - 1, with_kwargs=True, always_call=True),
        nn.modules.module.register_module_forward_hook(lambda mod, args, out: out * 2),
    ]
    while handles:
        torch.testing.assert_close(fast(x), model(x))
        assert not torch.allclose(fast(x), before)
        handles.pop().remove()
    torch.testing.assert_close(fast(x), before)


def test_a_hook_that_comes_and_goes_is_captured_once():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    fast = df.compile(model, strategy=df.TwoBatch(), strict=True)
    x = torch.randn(6, 4)
    plain = fast(x)
    for _ in range(20):  # more often than Dynamo's recompile limit
        handle = model[0].register_forward_hook(lambda mod, args, out: out * 2)
        torch.testing.assert_close(fast(x), model(x))
        handle.remove()
        assert torch.equal(fast(x), plain)
    stats = df.stats(fast)
    assert stats.captures == 2 and stats.plans == 2 and stats.planned_calls == stats.calls == 41


def test_captures_of_old_hook_states_are_dropped(monkeypatch):
    import gc

    from dynaflow import capture

    monkeypatch.setattr(capture, "MAX_HOOK_STATES", 2)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    made = []

    class Kept(capture.CapturedGraph):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(weakref.ref(self))

    fast = capture.Compiled(model, capture.read_settings(strategy=df.TwoBatch(), strict=True), Kept)
    x = torch.randn(6, 4)
    for module in model:
        handle = module.register_forward_hook(double)
        torch.testing.assert_close(fast(x), model(x))
        handle.remove()
    torch._dynamo.utils.clear_compilation_metrics()
    gc.collect()
    assert len(made) == 4 and [ref() is None for ref in made] == [True, True, False, False]


def test_hooks_elsewhere_cost_no_capture_and_no_guards():
    model, other = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4)
    fast = df.compile(model, strategy=df.TwoBatch(), strict=True)
    x = torch.randn(6, 4)
    fast(x)
    other.register_forward_hook(double)
    with torch.enable_grad():
        torch.ones(2, requires_grad=True).register_hook(lambda grad: grad)
    fast(x)
    assert df.stats(fast).captures == 1
    assert torch._dynamo.config.skip_nnmodule_hook_guards, "torch's default"


def test_hooks_of_modules_that_a_function_uses():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    x = torch.randn(6, 4)
    for function in (lambda x: model(x) + 1, model.forward):
        fast = df.compile(function, strategy=df.TwoBatch(), strict=True)
        before = fast(x)
        handle = model[0].register_forward_hook(double)
        torch.testing.assert_close(fast(x), function(x))
        handle.remove()
        torch.testing.assert_close(fast(x), before)
