"""`torch.compile(model, backend="dynaflow")` without a GPU: Inductor's code, under plans of its kernels where those are faster; and what
is said where there is none."""

import logging
import stat

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor_config
from torch._inductor.exc import CppCompileError

import dynaflow as df
from dynaflow import region, trials
from tests.cpu.kernel_models import Branchy, Towers, fresh, image  # noqa: F401  (fresh is a fixture)


@pytest.fixture
def regions():
    """Those that the test has made, in order, once each of them was called."""
    others = set(region.living)
    return lambda: sorted(set(region.living) - others, key=lambda r: r.name)


@pytest.fixture(params=["", "no-such-compiler"], ids=["compiler", "no compiler"])
def cxx(request):
    with inductor_config.patch({"cpp.cxx": (None, request.param)} if request.param else {}):
        yield request.param


def twins(make=Branchy):
    """(one line, torch.compile, eager), with the same weights."""
    torch._dynamo.reset()
    models = [make() for _ in range(3)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    return (models[0], torch.compile(models[0], backend="dynaflow")), (models[1], torch.compile(models[1])), (models[2], models[2])


def step(model, call, x):
    model.zero_grad()
    out, y = call(x)
    (out.sum() + y.square().mean()).backward()
    return [p.grad.clone() for p in model.parameters()] + [b.clone() for b in model.buffers()] + [out.detach(), y.detach()]


def said(caplog, text):
    return [r for r in caplog.records if r.name == "dynaflow" and text in r.getMessage()]


# -- Inductor's code


def test_inference_runs_inductors_code(regions, caplog):
    (mine, fast), (_, plain), (_, eager) = twins()
    with torch.no_grad(), caplog.at_level(logging.INFO, "dynaflow"):
        for _ in range(4):
            x = image()
            got, wanted = fast(x), plain(x)
            assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True)), "torch.compile's, bit for bit"
            torch.testing.assert_close(got, eager(x), rtol=1e-4, atol=1e-5)
    (made,) = regions()
    assert "cpp_fused" in made.text and not made.refusal and next(iter(made.cases.values())).choice is not None
    (line,) = said(caplog, "kernels run under")
    assert any(way in line.getMessage() for way in ("under Inductor as it is (", "under a plan of the kernels ("))
    assert said(caplog, "compiled a graph") and not said(caplog, "as it was captured")


def test_training_runs_inductors_code(regions):
    (mine, fast), (theirs, plain), (own, eager) = twins()
    for _ in range(4):
        x = image(3)
        got = step(mine, fast, x)
        assert all(torch.equal(a, b) for a, b in zip(got, step(theirs, plain, x), strict=True)), "torch.compile's, bit for bit"
        torch.testing.assert_close(got, step(own, eager, x), rtol=1e-3, atol=1e-4)
    backward, forward = regions()
    assert backward.is_backward and not forward.is_backward
    assert all(case.choice is not None for r in (forward, backward) for case in r.cases.values())


@pytest.mark.parametrize("wins", [False, True], ids=["Inductor", "a plan"])
def test_what_is_faster_runs(regions, monkeypatch, caplog, wins):
    """Forward and backward each; by times that are made up."""
    monkeypatch.setattr(trials, "num_lanes", lambda: 4)
    monkeypatch.setattr(trials, "bound_us", lambda flow, costs: 0.0)
    monkeypatch.setattr(trials, "LANES", None)
    monkeypatch.setattr(trials, "NUM_NEIGHBOURS", 0)

    def compare(ways, clock):
        for way in ways:
            way()
        least = 50.0 if wins else 200.0
        return [[least] * 7, [100.0] * 7] if len(ways) == 2 else [[100.0] * 7, [110.0] * 7, *[[least] * 7] * (len(ways) - 2)]

    monkeypatch.setattr(trials, "compare", compare)
    (mine, fast), (theirs, plain), _ = twins()
    before = df.stats().planned_calls
    with caplog.at_level(logging.INFO, "dynaflow"):
        for _ in range(3):
            x = image(3)
            assert all(torch.equal(a, b) for a, b in zip(step(mine, fast, x), step(theirs, plain, x), strict=True))
    assert len(said(caplog, "under a plan of the kernels (" if wins else "under Inductor as it is (")) == 2
    assert df.stats().planned_calls - before == (4 if wins else 0), "from the second call on, forward and backward"
    lanes = [len(case.bound.streams) for r in regions() for case in r.cases.values() if case.bound is not None]
    assert len(lanes) == (2 if wins else 0) and all(lanes)


def test_sizes_and_graphs(regions):
    """Symbolic sizes, around a graph break."""
    model = Towers()

    def broken(x):
        y = model(x).relu()
        torch._dynamo.graph_break()
        return y @ y

    captures = df.stats().captures
    fast = torch.compile(broken, backend="dynaflow", dynamic=True)
    with torch.no_grad():
        for rows in (4, 4, 4, 6, 6, 6, 40, 40, 40):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(fast(x), broken(x), rtol=1e-4, atol=1e-4)
    assert df.stats().captures - captures == len(regions()) == 2
    assert all(sorted(numbers[0] for numbers in r.cases) == [4, 6, 40] for r in regions())


def test_a_second_start_is_warm(regions):
    """As in another process: forward and backward come from torch's own cache, and are chosen for."""
    counters, found, made = torch._dynamo.utils.counters["aot_autograd"], [], []
    with torch._inductor.utils.fresh_cache():
        for _ in range(2):
            counters.clear()
            torch.manual_seed(1)
            (mine, fast), _, _ = twins(Towered)
            results = [step(mine, fast, torch.ones(4, 8)) for _ in range(3)]
            found.append((results[-1], dict(counters)))
            made.append([r for r in regions() if r not in sum(made, [])])
    (cold, at_first), (warm, then) = found
    assert at_first["autograd_cache_miss"] == then["autograd_cache_hit"] == 1 and "autograd_cache_miss" not in then
    assert all(torch.equal(a, b) for a, b in zip(cold, warm, strict=True))
    assert [[case.choice is not None for r in each for case in r.cases.values()] for each in made] == [[True] * 2] * 2


class Towered(Towers):
    def forward(self, x):
        return super().forward(x), x * 2


@pytest.mark.parametrize("how", ["df.compile", "df.optimize"])
def test_df_compile_and_df_optimize_do_the_same(regions, how):
    model, twin = Towers(), Towers()
    twin.load_state_dict(model.state_dict())
    fast = df.compile(model) if how == "df.compile" else df.optimize(model)
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(4, 8)
            torch.testing.assert_close(fast(x), twin(x))
    assert len(regions()) == 1 and df.stats(fast).captures == 1 and not df.stats(fast).fallbacks


# -- where there is none


def test_without_a_compiler_it_runs_as_it_was_captured(cxx, regions, caplog):
    (mine, fast), _, (own, eager) = twins()
    with caplog.at_level(logging.INFO, "dynaflow"):
        for _ in range(2):
            x = image(3)
            torch.testing.assert_close(step(mine, fast, x), step(own, eager, x), rtol=1e-3, atol=1e-4)
    lines = said(caplog, "runs as it was captured: there is no C++ compiler: No working C++ compiler found")
    assert len(lines) == bool(cxx) and bool(regions()) == (not cxx)
    assert all(line.levelno == logging.INFO and "no-such-compiler" in line.getMessage() for line in lines)


def test_it_is_explained(cxx):
    with torch.no_grad():
        text = str(df.explain(Towers(), torch.randn(4, 8)))
    if cxx:
        assert "compiler   eager: ops run as they are: there is no C++ compiler" in text
    else:
        assert "kernels (" in text and any(f"chosen     {way} (" in text for way in ("Inductor as it is", "a plan of the kernels"))


def test_strict_is_about_what_was_asked_for(cxx):
    """Nobody asked for a compiler, which may be missing, or for plans."""
    model, x = Towers(), torch.randn(4, 8)
    fast = torch.compile(model, backend="dynaflow", options={"strict": True})
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(fast(x), model(x))


@pytest.mark.parametrize("is_strict", [False, True])
def test_a_compiler_that_fails(tmp_path, caplog, is_strict):
    """It is there, and says no: it lacks Python's headers, say."""
    broken = tmp_path / "c++"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && exec g++ --version\necho "Python.h: No such file" >&2\nexit 1\n')
    broken.chmod(broken.stat().st_mode | stat.S_IXUSR)
    model, x = nn.Sequential(nn.Linear(3, 5), nn.GELU()), torch.randn(7, 3)
    with torch.no_grad(), torch._inductor.utils.fresh_cache(), inductor_config.patch({"cpp.cxx": (None, str(broken))}):
        fast = torch.compile(model, backend="dynaflow", options={"strict": is_strict})
        if is_strict:
            with pytest.raises(Exception, match="Python.h: No such file"):
                fast(x)
            return
        for _ in range(3):
            assert torch.equal(fast(x), model(x))
        text = str(df.explain(model, x))
    (line,) = [r for r in said(caplog, "runs as it was captured: Inductor cannot compile it") if r.levelno == logging.WARNING][:1]
    assert CppCompileError.__name__ in line.getMessage()
    assert "runs as it was captured: Inductor cannot compile it" in text


def test_what_dynamo_captures_anew_is_compiled(regions, caplog):
    """A float that may change is captured as a tensor at first; where that is of no use, Inductor asks for another capture."""
    (mine, fast), (_, plain), _ = twins(lambda: nn.BatchNorm1d(3))
    fast, plain = torch.compile(mine, backend="dynaflow", dynamic=True), torch.compile(plain._orig_mod, dynamic=True)
    x = torch.randn(5, 3, 4)
    with caplog.at_level(logging.INFO, "dynaflow"):
        for _ in range(3):
            assert torch.equal(fast(x), plain(x))
    assert not said(caplog, "runs as it was captured") and regions()


def test_what_the_model_fills_needed_no_gradient_before(regions, caplog):
    """Dynamo's fakes are changed as the graph changes them: by the end of a capture, a cache that is filled requires gradients."""
    torch._dynamo.reset()
    weight = torch.randn(4, 4, requires_grad=True)

    def fill(cache):
        made = (cache @ cache.t()).softmax(-1) @ cache
        cache.copy_(made)
        out = torch.softmax(made @ weight, 0)
        cache.mul_(out.clamp(-1, 1))
        return out

    fast, plain, found = torch.compile(fill, backend="dynaflow"), torch.compile(fill), []
    with caplog.at_level(logging.INFO, "dynaflow"):
        for call in (fast, plain, fill):
            torch.manual_seed(3)
            cache = torch.randn(5, 4)
            gradient = torch.autograd.grad(call(cache).square().sum(), weight)[0]
            found.append((gradient, cache.detach(), cache.requires_grad))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    torch.testing.assert_close(found[0], found[2])
    assert not said(caplog, "runs as it was captured") and regions()


def test_other_devices_are_left_alone(regions, caplog):
    fast = torch.compile(lambda x: x.sin() @ x, backend="dynaflow")
    with caplog.at_level(logging.INFO, "dynaflow"):
        assert fast(torch.empty(4, 4, device="meta")).device.type == "meta"
    assert said(caplog, "runs as it was captured: nothing is compiled for meta") and not regions()


# -- tensors without an address


def test_mkldnn_tensors_run_as_they_were_captured(caplog):
    """Where torch.compile's own code raises as it runs."""
    torch._dynamo.reset()
    fast, x = torch.compile(lambda x: torch.relu(x).to_dense() + 1, backend="dynaflow"), torch.randn(6, 4)
    with caplog.at_level(logging.WARNING, "dynaflow"):
        for _ in range(3):
            assert torch.equal(fast(x.to_mkldnn()), torch.relu(x) + 1)
    assert said(caplog, "mkldnn tensor, which has no address")
    assert torch.equal(df.compile(torch.relu, strict=True)(x), torch.relu(x)), "a plain one is compiled"
    with pytest.raises(Exception, match="which has no address"):
        df.compile(torch.relu, strict=True)(x.to_mkldnn())
