"""vLLM's own compilation, on the CPU, of a model with adapters beside its layers: its pieces under plans give the same bits.

vLLM on the CPU never comes here by itself, and has no CUDA Graphs: its backend is called as it is on CUDA, and what is issued while it
captures is issued here.
"""

import logging
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("vllm")

from vllm.compilation.backends import VllmBackend
from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass
from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode, VllmConfig, set_current_vllm_config
from vllm.v1.worker.worker_base import WorkerBase

import dynaflow as df
from dynaflow.integrations import vllm as integration
from dynaflow.integrations import vllm_branches
from dynaflow.integrations.pieces import Pieces
from dynaflow.integrations.serving import Engine
from dynaflow.integrations.vllm_branches import PIECES
from tests.systems import vllm_load
from tests.systems.test_vllm import serve

WIDTH, RANK, LAYERS, ADAPTERS = 32, 4, 4, 2


# What vLLM's ops of the same names take: tensors in lists, one that is changed, and two of one element that are read on the host.
@torch.library.custom_op("dynaflow_test::lora_shrink", mutates_args=("out",))
def lora_shrink(x: torch.Tensor, weights: list[torch.Tensor], out: torch.Tensor, which: torch.Tensor, is_off: torch.Tensor,
                num_active: torch.Tensor) -> None:  # fmt: skip
    if not is_off.item():
        for y, weight in zip(out, weights):
            y.copy_(torch.einsum("th,trh->tr", x, weight[which.long()]))


@torch.library.custom_op("dynaflow_test::lora_expand", mutates_args=("output_tensor",))
def lora_expand(x: torch.Tensor, weights: list[torch.Tensor], output_tensor: torch.Tensor, which: torch.Tensor, is_off: torch.Tensor,
                num_active: torch.Tensor, offset_start: int = 0, add_inputs: bool = False) -> None:  # fmt: skip
    if not is_off.item():
        for i, (y, weight) in enumerate(zip(x, weights)):
            there, new = output_tensor[:, i * WIDTH : (i + 1) * WIDTH], torch.einsum("tr,tor->to", y, weight[which.long()])
            there.copy_(there + new if add_inputs else new)


@torch.library.custom_op("dynaflow_test::attention", mutates_args=())
def attention(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x)


@attention.register_fake
def _(x):
    return torch.empty_like(x)


class Layered(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.ins, self.outs = ([torch.randn(n * WIDTH, WIDTH) * WIDTH**-0.5 for _ in range(LAYERS)] for n in (3, 1))
        self.a, self.b = ([[[torch.randn(ADAPTERS, *shape) * 0.3 for _ in range(n)] for n in (3, 1)] for _ in range(LAYERS)]
                          for shape in ((RANK, WIDTH), (WIDTH, RANK)))  # fmt: skip
        self.which = torch.arange(64, dtype=torch.int32) % ADAPTERS
        self.is_off, self.num_active = torch.tensor([False]), torch.tensor([ADAPTERS], dtype=torch.int32)

    def linear(self, x, weight, a, b):
        out, small = F.linear(x, weight), torch.empty(len(a), x.shape[0], RANK)
        which = self.which[: x.shape[0]]
        lora_shrink(x, a, small, which, self.is_off, self.num_active)
        lora_expand(small, b, out, which, self.is_off, self.num_active, 0, add_inputs=True)
        return out

    def forward(self, x):
        for i in range(LAYERS):
            q, k, v = self.linear(x, self.ins[i], self.a[i][0], self.b[i][0]).chunk(3, -1)
            x = F.rms_norm(x + self.linear(attention(q * k + v), self.outs[i], self.a[i][1], self.b[i][1]), (WIDTH,))
        return x


@pytest.fixture
def pieces(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "vllm"))
    monkeypatch.setenv("DYNAFLOW_DIR", str(tmp_path / "dynaflow"))
    # on the CPU vLLM has not all of the ops that this pass asks for by name
    monkeypatch.setattr(FixFunctionalizationPass, "__call__", lambda self, graph: None)
    monkeypatch.setitem(vllm_branches.ACCUMULATING, "torch.ops.dynaflow_test.lora_expand.default",
                        vllm_branches.ACCUMULATING["torch.ops.vllm.lora_expand.default"])  # fmt: skip
    monkeypatch.setattr(vllm_branches, "accumulating", lambda config: vllm_branches.ACCUMULATING)
    vllm_branches.take_pieces()
    fresh = Pieces(Engine("vLLM", logging.getLogger("vllm")), PIECES.name, PIECES.why_none)
    for name, value in vars(fresh).items():
        monkeypatch.setattr(PIECES, name, value)
    torch.manual_seed(0)
    return PIECES


def compiled(model, dynaflow="branches"):
    """As vLLM compiles it on CUDA."""
    extra = {} if dynaflow is None else {"dynaflow": dynaflow}
    config = VllmConfig(compilation_config=CompilationConfig(cudagraph_mode=0), additional_config=extra)
    ours = config.compilation_config  # the CPU's platform has had its say
    ours.mode, ours.backend, ours.compile_sizes, ours.splitting_ops = 3, "inductor", [], ["dynaflow_test::attention"]
    torch._dynamo.reset()
    x = torch.randn(6, WIDTH)
    torch._dynamo.mark_dynamic(x, 0)
    with set_current_vllm_config(config), torch.inference_mode():
        fast = torch.compile(model, backend=VllmBackend(config), fullgraph=True)
        fast(x)
    return fast


def open_for(pieces, fast, x):
    """As `capture_model` does: what is about to be captured is run once."""
    pieces.is_open = True
    with torch.inference_mode():
        results = [fast(x) for _ in range(3)]
    pieces.is_open = False
    return results


@pytest.mark.parametrize("standalone, starts", [("1", ("cold", "warm")), ("0", ("cold",))])
def test_the_same_bits_compiled_and_from_the_cache(pieces, monkeypatch, caplog, standalone, starts):
    """vLLM's other way to compile (off as it comes) reads its cache in a way that shows nothing of it."""
    monkeypatch.setenv("VLLM_USE_STANDALONE_COMPILE", standalone)
    monkeypatch.setenv("VLLM_USE_MEGA_AOT_ARTIFACT", "0")
    pieces.settings.strategy = df.Branches(3)
    model = Layered()
    for start in starts:
        pieces.regions.clear()
        fast = compiled(model)
        assert 3 <= len(pieces.regions) <= LAYERS + 1 and not any(region.cases for region in pieces.regions), "closed: nothing is looked at"
        for rows in (6, 9):
            x = torch.randn(rows, WIDTH)
            with torch.inference_mode():
                wanted = fast(x)
            torch.testing.assert_close(wanted, model(x), rtol=1e-3, atol=1e-3)
            assert all(torch.equal(got, wanted) for got in open_for(pieces, fast, x)), start
        total = pieces.engine.stats
        with caplog.at_level(logging.INFO, "vllm.dynaflow"):
            pieces.sum_up()
        assert total.regions == total.planned_regions == len(pieces.regions) and not total.fallbacks and not total.refusal
    assert f"{total.regions} of {total.regions} pieces run under plans" in caplog.text
    texts = [case.choice.plan for region in pieces.regions for case in region.cases.values()]
    assert all("launch dynaflow_test.lora_shrink.default.0 @caller" in text and "mm.1 @aux1" in text for text in texts)
    # what lora_expand adds waits for no product, and is added behind it
    assert all(text.count("launch add_.Tensor") == text.count("launch dynaflow_test.lora_expand") > 0 for text in texts)


def test_adapters_of_another_type_wait_for_their_layers(monkeypatch):
    def found(lora_dtype):
        lora = lora_dtype and SimpleNamespace(lora_dtype=lora_dtype)
        return vllm_branches.accumulating(SimpleNamespace(lora_config=lora, model_config=SimpleNamespace(dtype=torch.bfloat16)))

    assert found("auto") == found(torch.bfloat16) == vllm_branches.ACCUMULATING
    assert not found(torch.float16) and not found(None)
    monkeypatch.setenv("VLLM_TUNED_CONFIG_FOLDER", "/somewhere")
    assert not found("auto")


def test_what_is_read_on_the_host_tells_cases_apart(pieces):
    """vLLM captures a size with adapters and without: the one's plan is not the other's."""
    pieces.settings.strategy = df.Branches(2)
    model = Layered()
    fast, x = compiled(model), torch.randn(6, WIDTH)
    with_them = open_for(pieces, fast, x)
    model.is_off.fill_(True)
    without = open_for(pieces, fast, x)
    assert torch.equal(*without[:2]) and not torch.allclose(with_them[0], without[0])
    assert {case.read for region in pieces.regions for case in region.cases.values()} == {(0, ADAPTERS), (1, ADAPTERS)}


def test_it_is_measured_unless_asked_otherwise(pieces):
    """Kernels take all of this CPU, for all that is known: nothing can be gained side by side."""
    fast, x = compiled(Layered()), torch.randn(6, WIDTH)
    results = open_for(pieces, fast, x)
    assert torch.equal(*results[:2])
    pieces.sum_up()
    total = pieces.engine.stats
    assert total.regions and not total.planned_regions and not total.fallbacks
    assert all(case.is_measured and case.choice.times_us for region in pieces.regions for case in region.cases.values())


@pytest.mark.parametrize("dynaflow", [None, "two_batch"])
def test_nothing_is_touched_unless_asked_for(pieces, dynaflow):
    compiled(Layered(), dynaflow)
    assert not pieces.regions


class Worker(WorkerBase):
    """As much of vLLM's as a plugin sees of it: `initialize_from_config`, then `capture_model` of the runner that it has by then."""

    def __init__(self, dynaflow, capture, monkeypatch):
        compilation = SimpleNamespace(mode=CompilationMode.VLLM_COMPILE, cudagraph_mode=CUDAGraphMode.PIECEWISE,
                                      use_inductor_graph_partition=False)  # fmt: skip
        config = SimpleNamespace(additional_config=dynaflow and {"dynaflow": dynaflow}, compilation_config=compilation,
                                 parallel_config=SimpleNamespace(world_size=1, data_parallel_size=1, use_ubatching=False))  # fmt: skip
        monkeypatch.setattr(WorkerBase, "__init__", lambda self, vllm_config: setattr(self, "vllm_config", vllm_config))
        integration.register()
        self.model_runner = type("Runner", (), {"capture_model": lambda runner: capture(), "vllm_config": config})()
        super().__init__(vllm_config=config)

    def initialize_from_config(self, kv_cache_config):
        self.initialized = kv_cache_config


@pytest.mark.parametrize("dynaflow", [None, "branches"])
def test_pieces_are_open_while_vllm_captures(pieces, dynaflow, monkeypatch):
    seen = []
    pieces.regions.append(SimpleNamespace(cases={}))
    worker = Worker(dynaflow, lambda: seen.append(pieces.is_open), monkeypatch)
    worker.initialize_from_config("a cache")
    worker.model_runner.capture_model()
    assert seen == [dynaflow is not None] and not pieces.is_open and pieces.engine.stats.regions == (dynaflow is not None)
    assert worker.initialized == "a cache" and hasattr(worker, "dynaflow_stats") == (dynaflow is not None)


def test_pieces_are_closed_after_a_capture_that_fails(pieces, monkeypatch):
    def capture():
        raise RuntimeError("out of memory")

    worker = Worker("branches", capture, monkeypatch)
    worker.initialize_from_config("a cache")
    with pytest.raises(RuntimeError, match="out of memory"):
        worker.model_runner.capture_model()
    assert not pieces.is_open


def test_no_pieces_is_said(pieces):
    pieces.sum_up()
    assert "compiled none of its pieces" in pieces.engine.stats.refusal


@pytest.mark.parametrize(
    "compilation, parallel, reason",
    [
        ({}, {}, ""),
        ({"mode": CompilationMode.NONE}, {}, "does not compile"),
        ({"cudagraph_mode": CUDAGraphMode.NONE}, {}, "captures no CUDA Graphs"),
        ({"use_inductor_graph_partition": True}, {}, "partitions the graph"),
        ({}, {"world_size": 2}, "several ranks"),
        ({}, {"data_parallel_size": 2}, "several ranks"),
        ({}, {"use_ubatching": True}, "DBO"),
    ],
)
def test_refusals(compilation, parallel, reason):
    known = {"mode": CompilationMode.VLLM_COMPILE, "cudagraph_mode": CUDAGraphMode.PIECEWISE, "use_inductor_graph_partition": False}
    alone = {"world_size": 1, "data_parallel_size": 1, "use_ubatching": False}
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(**known | compilation), parallel_config=SimpleNamespace(**alone | parallel))  # fmt: skip
    found = vllm_branches.refusal(config)
    assert reason in found and bool(found) == bool(reason)


@pytest.mark.parametrize("strategy, reason", [("two_batch", "LoRA, whose adapters"), ("branches", "vLLM does not compile the model")])
def test_an_engine_with_adapters_is_left_to_vllm_on_the_cpu(tmp_path, strategy, reason):
    """Steps with adapters cannot be cut; and the CPU has no CUDA Graphs that a plan could be put into."""
    vllm_load.make_model(tmp_path / "qwen3", "qwen3")
    arrivals = [[0, [5, 7, 11] * 8, 3]]
    engine = {"enable_lora": True, "max_lora_rank": 8}
    results, log = serve(tmp_path, tmp_path / "qwen3", arrivals, {"strategy": strategy, "min_tokens": 16}, **engine)
    (stats,) = results["stats"]
    assert reason in stats["refusal"] and f"dynaflow leaves this model to vLLM: {stats['refusal']}" in log
    assert not stats["steps"] and not stats["regions"] and not stats["captures"]
