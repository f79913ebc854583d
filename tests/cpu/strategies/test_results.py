"""Every strategy on small real models: the results of plain PyTorch, and bit-equal to the same launches on one stream."""

from contextlib import nullcontext

import pytest
import torch

pytest.importorskip("transformers")

import dynaflow as df
from tests.cpu.strategies.models import MODELS

NANO, DUAL = df.NanoFlow(min_tokens=1), df.DualBatch(0)
COMM, WEAVE, GEMM = df.CommOverlap(2, 1), df.TokenWeave(wave=1, min_tokens=0), df.FusedGemm(2, 1)
BRANCHES_INSIDE = df.Mixed(df.TwoBatch(), df.Branches(2))

# model, strategy, streams of its plan
CASES = [
    ("llama", NANO, {"compute", "memory", "network"}),
    ("llama", COMM, {"compute", "comm"}),
    ("llama", WEAVE, {"compute", "comm"}),
    ("llama", GEMM, {"caller"}),
    ("llama", df.PrefillDecode(3), {"compute", "prefill", "decode"}),
    ("llama", BRANCHES_INSIDE, {"compute", "compute.aux0", "comm"}),
    ("llama", df.Mixed(WEAVE, df.Branches(2)), {"compute", "compute.aux0", "comm"}),
    ("moe", NANO, {"compute", "memory", "network"}),
    ("moe", DUAL, {"compute", "comm"}),
    ("moe", df.DualBatch(0, lead=2), {"compute", "comm"}),
    ("moe", df.SingleBatch(), {"compute", "comm", "aux"}),
    ("moe", df.SingleBatch(max_aux_tokens=0), {"compute", "comm"}),
    ("moe", df.Mixed(DUAL, df.Branches(2)), {"compute", "comm"}),
    ("ulysses", COMM, {"compute", "comm"}),
    ("ulysses", df.CommOverlap(1), {"compute", "comm"}),
    ("fsdp", df.CommOverlap(1), {"compute", "prefetch"}),
    ("fsdp", df.Mixed(df.CommOverlap(1), df.Branches(2)), {"compute", "prefetch", "prefetch.aux0"}),
    ("branching", BRANCHES_INSIDE, {"compute", "compute.aux0", "comm"}),
    ("branching", GEMM, {"caller"}),
]


@pytest.fixture(autouse=True)
def no_gradients():
    torch._dynamo.reset()
    with torch.no_grad():
        yield


def tensor(result):
    return result if isinstance(result, torch.Tensor) else result[0]


@pytest.mark.parametrize(("name", "strategy", "streams"), CASES, ids=[f"{c[0]}-{type(c[1]).__name__}-{i}" for i, c in enumerate(CASES)])
def test_results(name, strategy, streams):
    model, partition, inputs = MODELS[name]()
    fast = df.compile(model, strategy=strategy, partition=partition, strict=True, runtime="threads")
    with df.context(phase="decode") if strategy is NANO else nullcontext():
        for rows in (8, 17):
            x = inputs(rows)
            result = tensor(fast(x))
            torch.testing.assert_close(result, tensor(model(x)), rtol=1e-4, atol=1e-5)
            assert torch.equal(result, tensor(df.run_serialised(fast, x)))
        with df.profile() as profiled:
            fast(x)
    assert set(profiled.timeline.streams) == streams
    assert not df.stats(fast).fallbacks


@pytest.mark.parametrize(("name", "strategy"), [("llama", df.TokenWeave()), ("moe", df.DualBatch()), ("ulysses", df.FusedGemm())], ids=str)
def test_small_batches_run_as_they_are(name, strategy):
    model, partition, inputs = MODELS[name]()
    fast = df.compile(model, strategy=strategy, partition=partition)
    x = inputs(4)
    torch.testing.assert_close(tensor(fast(x)), tensor(model(x)))
    assert df.stats(fast).num_part_launches == 0 and any("fewer than" in reason for reason in df.stats(fast).fallbacks)


def test_the_phase_boundary_comes_with_the_call():
    model, partition, inputs = MODELS["llama"]()
    fast = df.compile(model, strategy=df.PrefillDecode(), partition=partition)
    x = inputs(8)
    for first in ("prefill", "decode"):
        for num_prefill in (1, 5, 7):
            with df.context(num_prefill=num_prefill, first=first):
                result = tensor(fast(x))
                torch.testing.assert_close(result, tensor(model(x)), rtol=1e-4, atol=1e-5)
                assert torch.equal(result, tensor(df.run_serialised(fast, x)))
                with df.profile() as profiled:
                    fast(x)
            assert {s.label.rpartition(" ")[2] for s in profiled.timeline.spans if s.stream == first} == {"0/2"}
    assert df.stats(fast).plans == 2 and not df.stats(fast).fallbacks, "a plan for each order serves every boundary"


def test_a_fused_function_of_the_users_own():
    """TokenWeave puts it in the place of all-reduce, add and norm; a wrong one is refused."""
    from dynaflow.errors import ReplacementMismatch
    from dynaflow.testing.network import all_reduce

    model, partition, inputs = MODELS["llama"]()

    def fused(x, residual, weight):
        total = all_reduce(x, 1.0, 0.0) + residual
        return total, torch.nn.functional.rms_norm(total, (total.shape[-1],), weight, model.config.rms_norm_eps)

    x = inputs(8)
    only_layers = [*partition[:1], *(df.SplitModule(f"layers.{i}.{name}") for i in range(2) for name in ("mlp", "self_attn")),
                   df.SplitModule("*layernorm")]  # fmt: skip
    strategy = Weave(1, 0, fused=fused)
    fast = df.compile(model, strategy=strategy, partition=only_layers, strict=True)
    torch.testing.assert_close(tensor(fast(x)), tensor(model(x)), rtol=1e-4, atol=1e-5)
    with pytest.raises(ReplacementMismatch):
        df.compile(model, strategy=Weave(1, 0, fused=lambda *inputs: inputs[0]), partition=only_layers, strict=True)(x)


class Weave(df.TokenWeave):
    """The last all-reduce has another norm behind it, which is no op of its own here: it stays as it is."""

    @staticmethod
    def _with_norm(r):
        group = df.TokenWeave._with_norm(r)
        return group if group[-1].name.endswith("layernorm") else [r]
