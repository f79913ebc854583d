"""Small real models for the tests of strategies, with emulated collectives where the parallel ones have theirs."""

from functools import cache

import torch
import torch.nn.functional as F
from torch import nn

import dynaflow as df
from dynaflow.testing.network import add_collectives, all_reduce

NETWORK = df.SplitFunc(all_reduce, kind="network")


@cache
def llama():
    """Tensor parallel: an all-reduce behind attention and MLP of both layers. (model, partition, inputs for a batch size)"""
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, max_position_embeddings=64, use_cache=False)  # fmt: skip
    model = LlamaModel(config).eval()
    add_collectives(model, ["*.o_proj", "*.down_proj"], latency_us=1)
    partition = [NETWORK, df.SplitModule("*norm"), df.SplitModule("*.mlp"), df.SplitModule("*.o_proj"), df.SplitModule("*.self_attn")]
    return model, partition, lambda rows: torch.randint(0, 64, (rows, 6), generator=torch.Generator().manual_seed(rows))


def send(x):
    return all_reduce(x, 1.0, 0.0)


class MoeLayer(nn.Module):
    """attn, gate, dispatch, experts, combine; shared experts beside them."""

    def __init__(self, dim, num_experts=4):
        super().__init__()
        self.attn, self.gate = nn.Linear(dim, dim), nn.Linear(dim, num_experts)
        self.experts = nn.ModuleList(nn.Linear(dim, dim) for _ in range(num_experts))
        self.shared = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        with df.mark("attn"):
            h = x + torch.tanh(self.attn(x))
        with df.mark("gate"):
            weights = torch.softmax(self.gate(h), -1)
        with df.mark("dispatch", kind="network"):
            sent, by = send(torch.cat([h, weights], -1)).split([h.shape[-1], weights.shape[-1]], -1)
        with df.mark("experts"):
            y = sum(by[..., k : k + 1] * expert(sent) for k, expert in enumerate(self.experts))
        with df.mark("combine", kind="network"):
            routed = send(y)
        with df.mark("shared"):
            shared = self.shared(h)
        return h + routed + shared


@cache
def moe():
    torch.manual_seed(0)
    return nn.Sequential(MoeLayer(8), MoeLayer(8)).eval(), "auto", lambda rows: torch.randn(rows, 8)


class Ulysses(nn.Module):
    """All-to-all of q, k and v, attention, all-to-all back."""

    def __init__(self, dim):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x):
        q, k, v = send(self.q(x)), send(self.k(x)), send(self.v(x))
        return x + self.o(send(F.scaled_dot_product_attention(q, k, v)))


@cache
def ulysses():
    torch.manual_seed(0)
    partition = [NETWORK, *(df.SplitModule(f"*.{name}") for name in "qkvo"), df.SplitFunc(F.scaled_dot_product_attention)]
    return nn.Sequential(Ulysses(8), Ulysses(8)).eval(), partition, lambda rows: torch.randn(rows, 5, 8)


class Gathered(nn.Module):
    """A layer whose weight is gathered before its use, as under FSDP."""

    def __init__(self, dim):
        super().__init__()
        self.shard = nn.Parameter(torch.randn(dim, dim) / dim**0.5)

    def forward(self, x):
        with df.mark("gather", kind="network"):
            weight = send(self.shard)
        with df.mark("product"):
            return torch.tanh(x @ weight)


@cache
def fsdp():
    torch.manual_seed(0)
    return nn.Sequential(*(Gathered(8) for _ in range(6))).eval(), "auto", lambda rows: torch.randn(rows, 8)


class Branching(nn.Module):
    """a; b and c beside each other; d; then an all-reduce."""

    def __init__(self, dim):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x):
        y = torch.relu(self.a(x))
        return send(self.d(self.b(y) * self.c(y)))


@cache
def branching():
    torch.manual_seed(0)
    partition = [NETWORK, *(df.SplitModule(f"*.{name}") for name in "abcd")]
    return nn.Sequential(Branching(8), Branching(8)).eval(), partition, lambda rows: torch.randn(rows, 8)


MODELS = {"llama": llama, "moe": moe, "ulysses": ulysses, "fsdp": fsdp, "branching": branching}
