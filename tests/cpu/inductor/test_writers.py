"""Extern kernels that are told where to write: what they touch, where it lies, and that nothing is copied."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import dynaflow as df
from dynaflow import errors, region
from dynaflow.inductor import writers
from dynaflow.inductor.writers import cudnn_convolution
from dynaflow.memory import place
from dynaflow.planner import sequential_plan
from dynaflow.runtime.program import Geometry
from dynaflow.trials import in_order
from tests.cpu.inductor.kernel_samples import read, touched
from tests.cpu.kernel_models import Branchy, compiled, fresh, image  # noqa: F401  (fresh is a fixture)

ORDERS = ("fake:issue", "fake:lazy", "fake:greedy", "fake:3", "threads", "graph")
X = torch.randn(4, 8)
SEEN = {"buf0": Geometry((4, 8), (8, 1), torch.float32, torch.device("cpu"))}
TEXT = """
    buf0 = torch.ops.aten.{op}.default({args})
    buf1 = empty_strided_cpu((4, 4), (4, 1), torch.float32)
    extern_kernels.mm(buf0, reinterpret_tensor(arg0_1, (8, 4), (1, 8), 0), out=buf1)
    del buf0
    return (buf1, )
"""


def cases(before):
    return [case for made in set(region.living) - before for case in made.cases.values()]


# -- what the flow says


def test_an_op_with_a_kernel_for_out_writes_like_any_other():
    made = read(TEXT.format(op="cumsum", args="arg0_1, 1"), X, seen=SEEN)
    assert touched(made)[0] == ("cumsum.default.0", ("arg0_1",), ("buf0",), ()) and not made.allocated
    assert dict(in_order(made).slots) == {"buf0": 0} and made.program.units["cumsum.default.0"].outs == ()


def test_its_unit_writes_there_what_the_call_returns():
    unit = read(TEXT.format(op="cumsum", args="arg0_1, 1"), X, seen=SEEN).program.units["cumsum.default.0"]
    given = {"arg0_1": X, "buf0": torch.full((4, 8), -1.0)}
    assert tuple(unit.fn([given[name] for name in unit.args])) == ()
    assert torch.equal(given["buf0"], X.cumsum(1)) and unit.args == ("arg0_1", "buf0")


@pytest.mark.parametrize("op, args", [("roll", "arg0_1, [1], [0]"), ("bernoulli", "arg0_1")])
def test_others_allocate(op, args):
    """The one's `out=` would allocate, and copy; the other draws random numbers."""
    made = read(TEXT.format(op=op, args=args), X, seen=SEEN)
    assert made.allocated == {"buf0"} and made.program.units[f"{op}.default.0"].outs == ("buf0",)


def test_rejects_a_plan_that_lists_as_loose_what_is_written_where_it_is_told():
    made = read(TEXT.format(op="cumsum", args="arg0_1, 1"), X, seen=SEEN)
    made.bind(in_order(made))
    with pytest.raises(errors.MalformedPlan, match="'buf0' cannot be loose"):
        made.bind(place(made.flow, sequential_plan(made.flow, ""), frozenset({"buf0"})))
    own = read(TEXT.format(op="bernoulli", args="arg0_1"), X, seen=SEEN)
    own.bind(place(own.flow, sequential_plan(own.flow, ""), frozenset({"buf0"})))


# -- what runs


def sums(x):
    """Branches of ops that Inductor leaves to aten on the CPU."""
    a, b = x.cumsum(0).sin(), (x + 1).cumsum(1).cos()
    return a @ b.t(), (a.cumsum(1) * 2).cumsum(0)


@pytest.mark.parametrize("runtime", ORDERS)
def test_the_same_bits_in_every_order(runtime):
    before, fast = set(region.living), compiled(sums, runtime)
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(6, 8)
            assert all(torch.equal(a, b) for a, b in zip(fast(x), df.run_serialised(fast, x), strict=True))
    (case,) = cases(before)
    assert sum("cumsum" in target for target in case.kernels.targets) == 4 and not df.stats(fast).fallbacks
    assert not case.kernels.allocated and not case.bound.plan.loose and not case.bound.copies


@pytest.fixture
def told(monkeypatch):
    """Convolutions as if they could be told, and what was asked of each."""
    asked = []

    def answer(result, *args, **kwargs):
        asked.append((result, args, kwargs))
        return lambda out, *args, **kwargs: out.copy_(torch.convolution(*args, **kwargs))

    monkeypatch.setitem(writers.WRITERS, "extern_kernels.convolution", answer)
    return asked


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(nn.Sequential(nn.Conv2d(4, 8, k, padding=k // 2, bias=False), nn.ReLU(),
                                                    nn.Conv2d(8, 8, k, padding=k // 2, bias=False)) for k in (1, 3, 5))  # fmt: skip

    def forward(self, x):
        return sum(b(x).tanh() for b in self.branches)


@pytest.mark.parametrize("runtime", ORDERS)
@pytest.mark.parametrize("make", [Branchy, Convolutions])
def test_convolutions_that_are_told(told, make, runtime):
    before, model = set(region.living), make().eval()
    fast = compiled(model, runtime)
    with torch.no_grad():
        for rows in (2, 2, 2, 2, 3, 3, 3):
            x = image(rows)
            got, wanted = fast(x), df.run_serialised(fast, x)
            assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    assert told and not df.stats(fast).fallbacks
    for case in cases(before):
        made = [op for op, target in zip(case.kernels.flow.ops, case.kernels.targets) if target == "extern_kernels.convolution"]
        values = {v for op in made for v in op.writes}
        assert made and values.isdisjoint(case.kernels.allocated) and values.isdisjoint(case.bound.plan.loose)
        temps = {v for v in values if case.kernels.flow.value[v].role == "temp"}
        assert temps <= set(case.bound.memory.offsets), "what they write lies in the arena"
        assert not [copy for copy in case.bound.copies if copy.value in values]


def test_what_is_asked_is_what_the_call_takes(told):
    model = Convolutions().eval()
    fast = compiled(model, "serial")
    with torch.no_grad():
        for _ in range(2):
            fast(image())
    for result, (x, weight), rest in told:
        assert isinstance(x, Geometry) and isinstance(weight, Geometry) and weight.shape[0] == result.shape[1] == 8
        assert x.shape[1] == weight.shape[1] and x.shape[2:] == result.shape[2:] == (5, 5)
        assert rest["padding"] == (weight.shape[2] // 2,) * 2
        assert rest["bias"] is None and rest["transposed"] is False and rest["groups"] == 1


def test_in_inductors_order_as_much_is_held_as_is_alive_at_once(told):
    before, fast = set(region.living), compiled(Convolutions().eval(), "serial")
    with torch.no_grad():
        for _ in range(2):
            fast(image())
    (case,) = cases(before)
    flow, serial = case.kernels.flow, case.kernels.bind(in_order(case.kernels))
    touched = [{*op.reads, *op.writes, *op.mutates} for op in flow.ops]
    temps = {v.name: -(-int(v.nbytes) // 512) * 512 for v in flow.values if v.role == "temp"}
    life = {v: [n for n, values in enumerate(touched) if v in values] for v in temps}
    most = max(sum(nbytes for v, nbytes in temps.items() if min(life[v]) <= n <= max(life[v])) for n in range(len(touched)))
    assert serial.memory.arena_bytes == most < sum(temps.values())


# -- which convolutions are cuDNN's

ARGS = {"bias": None, "stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "transposed": False, "output_padding": (0, 0), "groups": 1}
LAST = torch.channels_last


def geometry(*shape, like=torch.contiguous_format, device="cuda"):
    stride = torch.empty(shape, device="meta").to(memory_format=like).stride()
    return Geometry(shape, stride, torch.float32, torch.device(device))


def ask(x_like=torch.contiguous_format, w_like=torch.contiguous_format, y_like=torch.contiguous_format, device="cuda", **changed):
    x, w, y = (geometry(*shape, like=like, device=device)
               for shape, like in (((2, 4, 6, 6), x_like), ((8, 4, 3, 3), w_like), ((2, 8, 6, 6), y_like)))  # fmt: skip
    return cudnn_convolution(y, x, w, **{**ARGS, **changed})


@pytest.fixture
def backend(monkeypatch):
    """What torch would choose; on a machine without cuDNN it is never that."""
    names = {"name": "Cudnn", "like": torch.contiguous_format}
    monkeypatch.setattr(torch._C, "_select_conv_backend", lambda *_: type("Backend", (), names))
    monkeypatch.setattr(torch._C, "_conv_determine_backend_memory_format", lambda *_: names["like"])
    return names


def test_a_convolution_of_cudnns_is_told(backend):
    assert ask() is not None
    backend["like"] = LAST
    assert ask(LAST, LAST, LAST) is not None


@pytest.mark.parametrize("name, value", [
    ("device", "cpu"), ("bias", geometry(8)), ("transposed", True), ("x_like", LAST), ("w_like", LAST), ("y_like", LAST)
])  # fmt: skip
def test_rejects_others(backend, name, value):
    """Elsewhere, with a bias, transposed, or with something that aten would bring into another format first."""
    assert ask(**{name: value}) is None


def test_rejects_what_torch_would_compute_otherwise(backend):
    backend["name"] = "SlowDilated2d"
    assert ask() is None


def test_torchs_own_choice_is_asked():
    """Without a GPU nothing is cuDNN's but what a CUDA build says of tensors that are not there."""
    assert ask(device="cpu") is None
    if torch.backends.cudnn.is_available():
        assert ask() is not None and ask(LAST, LAST, LAST) is not None and ask(x_like=LAST) is None
        with torch.backends.cudnn.flags(enabled=False):
            assert ask() is None


class Spy(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.cudnn_convolution.out:
            self.calls.append((args, kwargs))
            return kwargs["out"]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("flag", ["benchmark", "deterministic", "allow_tf32"])
def test_it_runs_as_the_user_has_set_it_by_then(backend, flag):
    write, at = ask(), ("benchmark", "deterministic", "allow_tf32").index(flag)
    x, w, y = torch.zeros(2, 4, 6, 6), torch.zeros(8, 4, 3, 3), torch.zeros(2, 8, 6, 6)
    for value in (True, False):
        settings = {"benchmark": False, "deterministic": False, "allow_tf32": True, flag: value}
        with torch.backends.cudnn.flags(enabled=True, **settings), Spy() as spy:
            write(y, x, w, **ARGS)
        (((a, b, *rest), kwargs),) = spy.calls
        assert a is x and b is w and kwargs["out"] is y and rest[:4] == [[1, 1], [1, 1], [1, 1], 1] and rest[4 + at] is value


def test_deterministic_algorithms_are_cudnns_too(backend):
    torch.use_deterministic_algorithms(True)
    try:
        with Spy() as spy:
            ask()(torch.zeros(2, 8, 6, 6), torch.zeros(2, 4, 6, 6), torch.zeros(8, 4, 3, 3), **ARGS)
    finally:
        torch.use_deterministic_algorithms(False)
    assert spy.calls[0][0][7] is True


def test_without_cudnn_it_is_computed_as_torch_does(backend):
    write, x, w, y = ask(), torch.randn(2, 4, 6, 6), torch.randn(8, 4, 3, 3), torch.empty(2, 8, 6, 6)
    with torch.backends.cudnn.flags(enabled=False):
        write(y, x, w, **ARGS)
    assert torch.equal(y, torch.convolution(x, w, **ARGS))
