"""torch.compile's modes under dynaflow: Inductor is configured for what is compiled here, backwards included, and for nothing else."""

import pytest
import torch
from torch import nn
from torch._inductor import config
from torch._inductor.utils import fresh_cache

import dynaflow as df
from dynaflow.inductor import compile as units
from dynaflow.inductor import entries


@pytest.fixture
def seen(monkeypatch, tmp_path):
    """(is a backward, max_autotune, CUDA Graphs) of every graph that Inductor is given. Nothing comes from caches."""
    found = []
    monkeypatch.setenv("DYNAFLOW_DIR", str(tmp_path))
    torch._dynamo.reset()

    def watched(real):
        def compile_fx_inner(*args, **kwargs):
            found.append((bool(kwargs.get("is_backward")), config.max_autotune, config.triton.cudagraphs))
            return real(*args, **kwargs)

        return compile_fx_inner

    for module in (entries, units):
        monkeypatch.setattr(module, "compile_fx_inner", watched(module.compile_fx_inner))
    with fresh_cache():
        yield found


def model(width: int = 10) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width), nn.GELU(), nn.Linear(width, 4))


@pytest.mark.parametrize("mode, tunes", [("max-autotune", True), ("max-autotune-no-cudagraphs", True), ("reduce-overhead", False)])
def test_the_whole_graph_and_its_backward(seen, mode, tunes):
    plain, x = model(), torch.randn(5, 6)
    fast = torch.compile(plain, backend="dynaflow", options={"mode": mode, "compiler": "inductor"})
    fast(x).square().sum().backward()
    assert seen == [(False, tunes, False), (True, tunes, False)]
    got = [p.grad for p in plain.parameters()]
    other = model()
    other(x).square().sum().backward()
    torch.testing.assert_close(got, [p.grad for p in other.parameters()])
    assert not config.max_autotune


def test_units_of_plans(seen):
    """Equal units under another mode are compiled anew."""
    plain, x = model().requires_grad_(False), torch.randn(4, 6)
    for mode, tunes in (("default", False), ("max-autotune", True)):
        seen.clear()
        fast = df.compile(plain, strategy="two_batch", compiler="inductor", mode=mode)
        torch.testing.assert_close(fast(x), plain(x))
        assert df.stats(fast).split_calls == 1 and seen and all(each == (False, tunes, False) for each in seen)


def test_a_mode_asks_for_a_compiler(seen):
    """On the CPU nothing is compiled by default."""
    x = torch.randn(4, 6)
    plain = model(width=11).requires_grad_(False)
    df.compile(plain, strategy="two_batch")(x)
    assert not seen
    df.compile(plain, strategy="two_batch", mode="max-autotune")(x)
    assert seen


def test_as_torch_compile_s_own_word(seen):
    x = torch.randn(5, 6)
    plain = model(width=12).requires_grad_(False)
    torch.testing.assert_close(torch.compile(plain, backend="dynaflow", mode="max-autotune")(x), plain(x))
    assert seen == [(False, True, False)]


def test_what_is_explained_is_what_runs(seen):
    explained = df.explain(model(width=13).requires_grad_(False), torch.randn(4, 6), "two_batch", mode="max-autotune")
    assert explained.graphs[0].compiler == "inductor" and seen and all(tunes for _, tunes, _ in seen)
