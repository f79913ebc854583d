"""Equal units compile once, and units that differ anywhere do not share."""

import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import fx
from torch._inductor import config as inductor_config
from torch._inductor.triton_bundler import TritonBundle
from torch.nn import functional as F

from dynaflow.inductor import CompiledUnit, Spec, kept, units
from dynaflow.inductor.redirect import Redirected
from dynaflow.runtime.program import Expr
from tests.cpu.inductor.units import CPU, W, X, captured, spec, unit

has_compiler = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("c++")), reason="Inductor needs a C++ compiler on the CPU")


# Not shut down: torch 2.11 built for CUDA, on a machine without one, crashes in a fake mode after a thread that used one has ended.
POOL = ThreadPoolExecutor(4)


def layer(number: int, symbol: str = "s0", alpha: float = 1.0) -> CompiledUnit:
    """The same layer under other names."""
    graph = fx.Graph()
    x, w = graph.placeholder(f"x_{number}"), graph.placeholder(f"layers_{number}_weight")
    y = graph.create_node("call_function", torch.matmul, (x, w), name=f"layers_{number}_mm")
    graph.output((graph.create_node("call_function", torch.addmm, (x, y, w), {"alpha": alpha}, name=f"layers_{number}_addmm"),))
    return CompiledUnit(fx.GraphModule({}, graph), [spec(symbol, 32), W], [symbol, f"unused{number}"])


@has_compiler
@pytest.mark.xdist_group("inductor")
def test_equal_layers_compile_once(monkeypatch):
    compiled = []
    real = units.compile_graph
    monkeypatch.setattr(units, "compile_graph", lambda *args, **kw: compiled.append(args) or real(*args, **kw))
    layers = [layer(i, symbol="s0" if i % 2 else "s77") for i in range(32)]
    variants = list(POOL.map(lambda u: u.variant({"s0": 4, "s77": 4}, static=False), layers))
    assert len(compiled) == 1 and len({v.call for v in variants}) == 1
    x, w, out = torch.randn(3, 32), torch.randn(32, 32), torch.empty(3, 32)
    for variant, symbol in zip(variants[:2], ("s77", "s0")):
        variant.bind({symbol: 3})([x, w], [out.zero_()])
        torch.testing.assert_close(out, x + x @ w @ w, rtol=1e-4, atol=1e-4)
    layers[0].variant({"s77": 5}, static=True)
    assert len(compiled) == 2


@has_compiler
@pytest.mark.xdist_group("inductor")
def test_what_is_patched_while_another_thread_compiles_is_no_setting(monkeypatch):
    """It took such a unit for one under other settings, and compiled it again (torch 2.11, where settings are of all threads)."""
    compiled, begins = [], threading.Event()
    real = units.compile_graph

    def slow(*args, **kwargs):
        compiled.append(args)
        with inductor_config.patch(cpp_wrapper=not inductor_config.cpp_wrapper):
            begins.set()
            time.sleep(0.3)  # the other thread reads settings, or waits for them
        return real(*args, **kwargs)

    monkeypatch.setattr(units, "compile_graph", slow)
    first, second = layer(0), layer(1)
    other = POOL.submit(lambda: first.variant({"s0": 4}, static=False))
    assert begins.wait(60)
    variant = second.variant({"s0": 4}, static=False)
    assert variant.call is other.result().call and len(compiled) == 1


def key(fn, *args, **kwargs):
    made = unit(fn, *args, **kwargs)
    return made.structure.key, made.autocast


BASE = (lambda x, w: (F.linear(x, w) * 1,), X, W)
SAME = {
    "names": (lambda hidden, weight: (F.linear(hidden, weight) * 1,), X, W),
    "symbol": (lambda x, w: (F.linear(x, w) * 1,), spec("s5", 32), W),
}
OTHER = {
    "scalar": (lambda x, w: (F.linear(x, w) * 2,), X, W),
    "type_of_scalar": (lambda x, w: (F.linear(x, w) * 1.0,), X, W),
    "bool": (lambda x, w: (F.linear(x, w) * True,), X, W),
    "kwarg": (lambda x, w: (F.linear(x, w, bias=None) * 1,), X, W),
    "function": (lambda x, w: (torch.matmul(x, w) * 1,), X, W),
    "method": (lambda x, w: (F.linear(x, w).mul(1),), X, W),
    "order": (lambda x, w: (F.linear(w, x) * 1,), X, W),
    "outputs": (lambda x, w: (F.linear(x, w) * 1, x), X, W),
    "shape": (*BASE[:1], spec("s0", 64), W),
    "expression": (*BASE[:1], spec("2*s0", 32), W),
    "two_symbols": (*BASE[:1], X, spec("s5", 32)),
    "stride": (*BASE[:1], X, Spec(("32", "32"), ("1", "32"), torch.float32, CPU)),
    "dtype": (*BASE[:1], spec("s0", 32, dtype=torch.float64), W),
    "device": (*BASE[:1], Spec(X.shape, X.stride, X.dtype, torch.device("cuda:0")), W),
    "number": (*BASE[:1], X, Expr("s0")),
}


@pytest.mark.parametrize("name", SAME)
def test_shares(name):
    assert key(*SAME[name], symbols=("s0", "s5")) == key(*BASE)


@pytest.mark.parametrize("name", OTHER)
def test_does_not_share(name):
    assert key(*OTHER[name], symbols=("s0", "s5")) != key(*BASE)


def test_does_not_share_across_autocast_states():
    with torch.autocast("cpu", torch.bfloat16):
        first = key(*BASE)
    with torch.autocast("cpu", torch.float16):
        assert key(*BASE) not in (first, key(*BASE)[0])
    with torch.autocast("cpu", torch.bfloat16):
        assert key(*BASE) == first
    assert key(*BASE) != first


def test_does_not_share_across_settings():
    made = unit(*BASE)
    before = made._share()
    torch.use_deterministic_algorithms(True)
    try:
        assert made._share() is not before
    finally:
        torch.use_deterministic_algorithms(False)
    assert made._share() is before is unit(*SAME["names"])._share()


@pytest.mark.parametrize("by, equal", [(1.0, True), (-0.0, False), (0.0, False), (float("nan"), False)])
def test_floats_by_their_bits(by, equal):
    assert (key(lambda x: (x * by,), X) == key(lambda x: (x * 1.0,), X)) is equal
    assert key(lambda x: (x * by,), X) == key(lambda x: (x * by,), X)


def test_sub_graphs_are_part_of_the_key():
    def branchy(by):
        return lambda x: torch.cond(x.sum() > 0, lambda x: x + by, lambda x: x - 1, (x,))

    x = torch.ones(4, 32)
    keys = [CompiledUnit(captured(branchy(by), x), [spec(4, 32)], []).structure.key for by in (1, 1, 2)]
    assert keys[0] == keys[1] != keys[2]


RUN = """
import time
import torch
from dynaflow.inductor import compile
from tests.cpu.inductor.test_structure import layer
traced = []
compile.compile_fx = lambda *args, real=compile.compile_fx, **kw: traced.append(1) or real(*args, **kw)
out, x, w = torch.empty(3, 32), torch.randn(3, 32), torch.randn(32, 32)
for unit in (layer(2, "s77"), layer(2, "s77", alpha=time.time())):
    variant = unit.variant({"s77": 4}, static=False)
    print(len(traced))
    if unit.structure.key == layer(1).structure.key:
        variant.bind({"s77": 3})([x, w], [out])
        torch.testing.assert_close(out, x + x @ w @ w, rtol=1e-4, atol=1e-4)
"""


@has_compiler
@pytest.mark.xdist_group("inductor")
def test_another_process_finds_it_on_disk(tmp_path):
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}

    def run() -> list[str]:
        return subprocess.run([sys.executable, "-c", RUN], env=env, check=True, capture_output=True, text=True, timeout=200).stdout.split()

    assert run() == ["1", "2"]
    assert run() == ["0", "1"]  # the layer is found, the new one is not
    for path in (tmp_path / "dynaflow").iterdir():
        path.write_bytes(path.read_bytes()[:40])  # a disk that was full
    assert run() == ["1", "2"]


@torch.library.custom_op("dynaflow_tests::somebodys", mutates_args=())
def somebodys(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@somebodys.register_fake
def _(x):
    return torch.empty_like(x)


def kept_at(fn, numbers=(4,), static=False, state=()):
    unit = CompiledUnit(captured(fn, torch.ones(4, 32)), [spec("s0", 32)], ["s0"])
    return kept.path_of(unit.structure, state, numbers, static)


def test_what_a_text_depends_on_tells_kept_units_apart():
    def double(x):
        return torch.nn.functional.silu(x[..., 2:]) * 2

    def triple(x):
        return torch.nn.functional.silu(x[..., 2:]) * 3

    mine = kept_at(double)
    assert mine is not None and mine == kept_at(double)
    others = [kept_at(triple), kept_at(double, (5,)), kept_at(double, static=True), kept_at(double, state=(torch.float16,))]
    assert len({mine, *others}) == 5
    with inductor_config.patch(fx_graph_cache=False):
        assert kept_at(double) is None


def test_a_unit_that_makes_its_tensors_itself_is_of_its_machine(monkeypatch):
    unit = CompiledUnit(captured(lambda: torch.sin(torch.arange(8.0))), [], [])
    mine = kept.path_of(unit.structure, (), (), True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another")
    assert mine is not None and kept.path_of(unit.structure, (), (), True) != mine


def test_what_other_code_of_ours_made_is_not_found(monkeypatch, tmp_path):
    unit = CompiledUnit(captured(torch.sin, torch.ones(4, 32)), [spec("s0", 32)], ["s0"])

    def at():
        kept._own_code.cache_clear()
        return kept.path_of(unit.structure, (), (4,), False)

    mine, own = at(), Path(kept.__file__).parent
    assert mine is not None and mine == at()
    for name in kept._OWN_CODE:
        (tmp_path / f"{name}.py").write_bytes((own / f"{name}.py").read_bytes())
    with monkeypatch.context() as there:
        there.setattr(kept.importlib.resources, "files", lambda package: tmp_path)
        assert mine == at(), "the same code elsewhere"
        with (tmp_path / "redirect.py").open("a") as file:
            file.write("# redirects otherwise")
        assert mine != at()
    assert mine == at()


def kept_text(text, guards=(), **more):
    return kept.Kept(Redirected(text, ("not in place",), (False,), **more), ("s0",), guards, (None,), ())


@pytest.mark.parametrize("text", [
    b"\xff\xfe", b"", pickle.dumps([]), pickle.dumps(kept_text("x = 1"))[:-9], pickle.dumps(kept_text("x = 1")),
    pickle.dumps(kept_text("raise ValueError")), pickle.dumps(kept_text("call = print", guards=("s0 < 2",))),
])  # fmt: skip
@has_compiler
@pytest.mark.xdist_group("inductor")
def test_a_damaged_file_is_made_anew(tmp_path, monkeypatch, text):
    path = tmp_path / "unit.unit"
    path.write_bytes(text)
    monkeypatch.setattr(kept, "path_of", lambda *_: path)
    layer(1).variant({"s0": 4}, static=False)
    assert path.read_bytes() != text


def test_kernels_are_kept_in_a_bundle(tmp_path, monkeypatch, caplog):
    inductor = SimpleNamespace(constants=None, _triton_bundle=TritonBundle(["kernel"], []))
    path, read = tmp_path / "unit.unit", []
    kept.save(path, inductor, kept_text("x = 1"))
    monkeypatch.setattr(kept.TritonBundler, "read_and_emit", read.append)
    assert kept.module(kept.load(path), path).x == 1 and read == [TritonBundle(["kernel"], [])]
    (tmp_path / "unit.kernels").write_bytes(b"cut short")
    with caplog.at_level("INFO", "dynaflow"):
        assert kept.module(kept.load(path), path).x == 1 and len(read) == 1
    assert "cannot be used" in caplog.text


def test_what_a_text_does_not_say_is_not_kept():
    assert kept_at(lambda x: torch.ops.aten.mul.Tensor(x, x)) is not None
    assert kept_at(lambda x: somebodys(x)) is None
    assert kept_at(lambda x: torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))) is None


def test_precisions_that_were_set_one_by_one_tell_units_apart():
    matmul = torch.backends.cuda.matmul
    before, units_before = matmul.fp32_precision, units.ambient()
    try:
        matmul.fp32_precision = "tf32"
        assert units.ambient() != units_before
    finally:
        matmul.fp32_precision = before
