"""Every strategy of the field on two ranks of small Transformers models: the single-process model's results, over real collectives."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dynaflow as df
from dynaflow.errors import OptionError
from tests.ranks.harness import run
from tests.ranks.models import mine

pytestmark = pytest.mark.xdist_group("ranks")
transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4,
    "vocab_size": 64, "max_position_embeddings": 64,
}  # fmt: skip

# per strategy: the streams of its plan, and the function that it puts in the place of ops
DENSE = {
    "NanoFlow": (df.NanoFlow(min_tokens=1), {"compute", "memory", "network"}, ""),
    "DualBatch": (df.DualBatch(0), {"compute", "comm"}, ""),
    "CommOverlap": (df.CommOverlap(2, 1), {"compute", "comm"}, ""),
    "TokenWeave": (df.TokenWeave(wave=1, min_tokens=0), {"compute", "comm"}, "reduce_add_norm"),
    "FusedGemm": (df.FusedGemm(2, 1), {"caller"}, "chunked"),
    "PrefillDecode": (df.PrefillDecode(3), {"compute", "prefill", "decode"}, ""),
    "Mixed": (df.Mixed(df.TwoBatch(), df.Branches(2)), {"compute", "compute.aux0", "comm"}, ""),
    "Offload": (df.Offload(1 << 20), {"caller", "copy"}, ""),
}
EXPERTS = {
    "DualBatch": (df.DualBatch(0), {"compute", "comm"}, ""),
    "SingleBatch": (df.SingleBatch(), {"compute", "comm", "aux"}, ""),
}


class Reduced(nn.Module):
    """A linear layer with this rank's columns; the ranks' results are added up."""

    def __init__(self, linear):
        super().__init__()
        self.weight = mine(linear.weight, 1)

    def forward(self, x):
        y = nn.functional.linear(x, self.weight)
        dist.all_reduce(y)
        return y


def llama():
    """(this rank's share, the whole model)"""
    torch.manual_seed(0)
    whole = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval().requires_grad_(False)
    net = transformers.LlamaForCausalLM(whole.config).eval().requires_grad_(False)
    net.load_state_dict(whole.state_dict())
    for layer in net.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
            linear.weight = mine(linear.weight, 0)
        attention.o_proj, mlp.down_proj = Reduced(attention.o_proj), Reduced(mlp.down_proj)
    return net, whole


def deepseek(folder):
    return (transformers.DeepseekV3ForCausalLM.from_pretrained(folder, tp_plan="auto").eval(),
            transformers.DeepseekV3ForCausalLM.from_pretrained(folder).eval())  # fmt: skip


def equals_one_process(net, whole, strategies):
    for name, (strategy, streams, function) in strategies.items():
        if name == "Offload":
            df.offload(net, "cpu", min_bytes=1)
        fast = df.compile(net, strategy=strategy, strict=True, runtime="threads")
        with df.context(phase="decode") if name == "NanoFlow" else nullcontext():
            for batch_size in (8, 5):
                x = torch.randint(0, 64, (batch_size, 8), generator=torch.Generator().manual_seed(batch_size))
                y = fast(x, use_cache=False).logits
                torch.testing.assert_close(y, whole(x, use_cache=False).logits, rtol=1e-4, atol=1e-5)
                assert torch.equal(y, df.run_serialised(fast, x, use_cache=False).logits), name
            with df.profile() as profiled:
                fast(x, use_cache=False)
        assert set(profiled.timeline.streams) == streams and not df.stats(fast).fallbacks, (name, df.stats(fast))
        assert any(function in span.label for span in profiled.timeline.spans), name
    return list(strategies)


def dense():
    return equals_one_process(*llama(), DENSE)


def experts(folder):
    return equals_one_process(*deepseek(folder), EXPERTS)


def offloads_dtensors(folder):
    net, _ = deepseek(folder)
    with pytest.raises(OptionError, match=r"weights wrap other tensors: .*\(DTensor\)"):
        df.offload(net, "cpu", min_bytes=1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    config = transformers.DeepseekV3Config(
        **SIZES, moe_intermediate_size=32, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, n_group=1, topk_group=1,
        first_k_dense_replace=0, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8)  # fmt: skip
    folder = str(tmp_path_factory.mktemp("deepseek"))
    torch.manual_seed(0)
    transformers.DeepseekV3ForCausalLM(config).eval().save_pretrained(folder)
    return folder


def test_dense_model():
    assert run(dense, 2) == [list(DENSE)] * 2


def test_model_with_experts(checkpoint):
    assert run(experts, 2, checkpoint) == [list(EXPERTS)] * 2


def test_rejects_offloaded_dtensors(checkpoint):
    run(offloads_dtensors, 2, checkpoint)
