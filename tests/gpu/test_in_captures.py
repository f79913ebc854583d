"""A region for those who capture their own CUDA Graphs: what is issued into them, and what is left alone between them."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

if not torch.cuda.is_available():
    pytest.skip("needs CUDA", allow_module_level=True)

import dynaflow as df
from dynaflow import region

WIDTH, RANK = 1024, 16


@pytest.fixture(autouse=True)
def cases(tmp_path, monkeypatch):
    monkeypatch.setenv("DYNAFLOW_DIR", str(tmp_path))
    monkeypatch.setattr("dynaflow.engine.Region", functools.partial(region.Region, in_captures=True))
    torch._dynamo.reset()
    torch.manual_seed(0)
    before = set(region.living)
    yield lambda: [case for made in set(region.living) - before for case in made.cases.values()]
    torch._dynamo.reset()


@torch.library.custom_op("dynaflow_test_gpu::shrink", mutates_args=("out",))
def shrink(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, is_off: torch.Tensor) -> None:
    if not is_off.item():
        torch.mm(x, weight, out=out)


@torch.library.custom_op("dynaflow_test_gpu::expand", mutates_args=("out",))
def expand(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, is_off: torch.Tensor) -> None:
    if not is_off.item():
        out.addmm_(x, weight)


class Adapted(nn.Module):
    """As vLLM's LoRA has it: a flag that lies on the host, read as the ops are launched."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH, device="cuda", dtype=torch.bfloat16) / 32 for _ in range(4))
        self.a = nn.ParameterList(torch.randn(WIDTH, RANK, device="cuda", dtype=torch.bfloat16) / 32 for _ in range(4))
        self.b = nn.ParameterList(torch.randn(RANK, WIDTH, device="cuda", dtype=torch.bfloat16) / 4 for _ in range(4))
        self.is_off = torch.tensor([False])

    def forward(self, x):
        for weight, a, b in zip(self.weights, self.a, self.b):
            y, small = F.linear(x, weight), torch.empty(x.shape[0], RANK, device="cuda", dtype=x.dtype)
            shrink(x, a, small, self.is_off)
            expand(small, b, y, self.is_off)
            x = F.rms_norm(x + torch.tanh(y), (WIDTH,))
        return x


@pytest.mark.parametrize("strategy", [df.Branches(2), "auto"])
def test_a_plan_in_somebody_elses_graph(cases, strategy):
    model = Adapted().requires_grad_(False)
    fast = df.compile(model, strategy=strategy, partition="kernels", runtime="cuda")
    graphs, planned = {}, 0
    with torch.no_grad():
        for rows in (64, 48, 16):
            for is_off in (False, True):
                model.is_off.fill_(is_off)
                x = torch.randn(rows, WIDTH, device="cuda", dtype=torch.bfloat16)
                plain = fast(x)  # as vLLM runs a size before it captures it
                assert torch.equal(plain, fast(x)) and df.stats(fast).planned_calls == planned, "between captures, Inductor's own runs"
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    captured = fast(x)
                planned = df.stats(fast).planned_calls
                graphs[rows, is_off] = graph, x, captured
        for (_, is_off), (graph, x, captured) in graphs.items():
            model.is_off.fill_(is_off)
            x.copy_(torch.randn_like(x))
            graph.replay()
            torch.testing.assert_close(captured, fast(x), rtol=0, atol=0)
    assert not df.stats(fast).fallbacks and {case.read for case in cases()} == {(0,), (1,)}
    assert all(case.choice is not None for case in cases())
    if strategy != "auto":
        assert planned == len(graphs)
    for case in cases():
        print(case.numbers, case.read, case.choice)
