"""Models whose parameters are DTensors: Transformers' own tensor parallel loading, and torch's."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dynaflow as df
from tests.ranks import models
from tests.ranks.harness import run

pytestmark = pytest.mark.xdist_group("ranks")
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A Llama with random weights, as from_pretrained wants it."""
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4, vocab_size=64,
        max_position_embeddings=64)  # fmt: skip
    folder = str(tmp_path_factory.mktemp("llama"))
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).eval().save_pretrained(folder)
    return folder


def llama(folder, num_parts):
    """What df.stats says, and the launches of collectives in one call."""
    from transformers import LlamaForCausalLM

    whole = LlamaForCausalLM.from_pretrained(folder).eval()
    net = LlamaForCausalLM.from_pretrained(folder, tp_plan="auto").eval()
    fast = df.compile(net, strategy=df.NanoBatch(num_parts), strict=True)
    for batch_size in (6, 9):
        x = torch.randint(0, 64, (batch_size, 8), generator=torch.Generator().manual_seed(batch_size))
        y = fast(x, use_cache=False).logits
        torch.testing.assert_close(y, whole(x, use_cache=False).logits)
        assert torch.equal(y, df.run_serialised(fast, x, use_cache=False).logits)
    with df.profile() as profiled:
        fast(x, use_cache=False)
    return df.stats(fast), [span.label for span in profiled.timeline.spans if span.kind == "network"]


@pytest.mark.parametrize("num_ranks, num_parts", [(2, 2), (4, 3)])
def test_llama_with_tp_plan(checkpoint, num_ranks, num_parts):
    # all-reduce behind attention and MLP, all-gather of the logits along their last dim
    ops = ["model.layers.0.self_attn.o_proj.all_reduce", "model.layers.0.mlp.down_proj.all_reduce", "lm_head.all_gather_into_tensor"]
    for stats, labels in run(llama, num_ranks, checkpoint, num_parts):
        assert sorted(labels) == sorted(f"{op} {k}/{num_parts}" for op in ops for k in range(num_parts))
        assert stats.captures == 1 and not stats.fallbacks, stats


def parallelized(keeps_output):
    torch.manual_seed(0)
    full = models.Mlp()
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    x = torch.randn(6, 3, models.WIDTH, generator=torch.Generator().manual_seed(0))
    wanted = full(x)
    down = RowwiseParallel(use_local_output=not keeps_output)
    net = parallelize_module(full.down if keeps_output else full, mesh, down if keeps_output else {"up": ColwiseParallel(), "down": down})
    if keeps_output:
        x = torch.randn(6, models.HIDDEN // dist.get_world_size(), generator=torch.Generator().manual_seed(0))
        wanted = net(x).full_tensor()
    fast = df.compile(net, strategy=df.TwoBatch())
    y = fast(x)
    torch.testing.assert_close(y.full_tensor() if keeps_output else y, wanted)
    assert keeps_output or torch.equal(y, df.run_serialised(fast, x))
    return df.stats(fast)


def test_torchs_own_parallel_styles():
    for stats in run(parallelized, 2, False):
        if torch.__version__ < "2.12":  # it cannot be traced there: "could not look up op for aten::size"
            assert any("DTensor" in reason for reason in stats.fallbacks), stats
            continue
        assert stats.num_part_launches > 0 and not stats.fallbacks and not stats.num_unsplittable, stats


def test_rejects_a_graph_that_returns_dtensors():
    for stats in run(parallelized, 2, True):
        (reason,) = stats.fallbacks
        assert "DTensor" in reason or "DeviceMesh" in reason, reason
