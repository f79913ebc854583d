"""CUDA on the host: that it refuses what CUDA refuses, and computes what a GPU would."""

import os
import subprocess
import sys

import pytest
import torch

if "libcuda.so.1" not in os.environ.get("LD_PRELOAD", ""):
    pytest.skip("needs CUDA on the host: `make system-cuda`", allow_module_level=True)

from tests.systems.cuda_on_host import kernels

DEVICE = torch.device("cuda")


def captured(body):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = body()
    return graph, result


def beside(x, is_joined):
    """x + 1 on a stream of its own."""
    caller, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(caller)
    with torch.cuda.stream(side):
        y = x + 1
    if is_joined:
        caller.wait_stream(side)
    return y


@pytest.fixture
def x():
    return torch.randn(4, 5, device=DEVICE)


def test_a_graph_computes_what_its_inputs_are_at_each_replay(x):
    weight = torch.randn(5, 6, device=DEVICE)
    graph, y = captured(lambda: beside(x @ weight, is_joined=True).relu())
    for _ in range(3):
        x.normal_()
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y.cpu(), (x.cpu() @ weight.cpu() + 1).relu())


def test_a_stream_that_is_not_joined_fails_the_capture(x):
    with pytest.raises(RuntimeError, match="StreamCaptureUnjoined"):
        captured(lambda: beside(x, is_joined=False))


WAITING = {"item": lambda x: x.sum().item(), "all": lambda x: torch.cuda.synchronize(), "copy": lambda x: x.cpu()}


@pytest.mark.parametrize("how", WAITING)
def test_nobody_waits_for_the_device_while_it_captures(x, how):
    with pytest.raises(RuntimeError, match="StreamCapture"):
        captured(lambda: WAITING[how](x + 1))


def test_an_event_from_outside_is_not_waited_for_inside(x):
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        event = torch.cuda.Event()
        event.record()
    with pytest.raises(RuntimeError, match="StreamCaptureIsolation|StreamCaptureInvalidated"):
        captured(lambda: torch.cuda.current_stream().wait_event(event))


MEMORY = """
import torch
first = torch.cuda.mem_get_info()[0]
held = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
assert torch.cuda.memory_reserved() == 64 << 20 and torch.cuda.mem_get_info()[0] == first - (64 << 20)
del held
torch.cuda.empty_cache()
assert torch.cuda.memory_reserved() == 0 and torch.cuda.mem_get_info()[0] == first
try:
    torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    print("counted")
"""


def test_memory_is_counted_and_given_back():
    """In a process of its own: captures that failed hold theirs."""
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True)
    assert done.stdout == "counted\n", done.stderr


def test_a_kernel_that_nobody_computes_is_told(x):
    """Behind every test; what torch launches itself, with no op of ours around it, leaves its results as they were."""
    assert kernels.not_computed() == ""
    step = {"weight_decay": 0.0, "momentum": 0.0, "lr": 0.1, "dampening": 0.0, "nesterov": False, "maximize": False}
    torch._fused_sgd_([x], [x], [], **step, is_first_step=True)
    assert "sgd" in kernels.not_computed().lower() and kernels.not_computed() == ""


def test_what_a_kernel_raises_is_told(x):
    kernels.launch(lambda: 1 / 0)
    (raised,) = kernels.failures
    kernels.failures.clear()
    assert "ZeroDivisionError" in raised


def test_what_inductor_compiles_is_computed(x):
    def function(x):
        return torch.softmax(torch.nn.functional.gelu(x @ x.mT), -1)

    torch.testing.assert_close(torch.compile(function)(x).cpu(), function(x.cpu()))


def test_attention_and_its_gradients():
    q, k, v = (torch.randn(2, heads, 7, 16, device=DEVICE, requires_grad=True) for heads in (4, 2, 2))

    def gradients(*given):
        y = torch.nn.functional.scaled_dot_product_attention(*given, is_causal=True, enable_gqa=True)
        return [y, *torch.autograd.grad(y.sin().sum(), given)]

    torch.compiler.reset()
    got = torch.compile(gradients, backend="eager")(q, k, v)
    wanted = gradients(*(t.detach().cpu().requires_grad_() for t in (q, k, v)))
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a.cpu(), b)
