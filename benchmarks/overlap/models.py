"""One rank of models that run on many GPUs, eight layers each (two where they have experts), with emulated collectives in their places.

Llama and Qwen are Transformers' own, with a rank's heads and a rank's part of the MLP. The others are plain modules with a rank's shapes;
they leave out what costs nothing to speak of (rotary embeddings), and route as a perfectly balanced router would: tokens go to experts in
turn, by their place in the sequence, so that shapes are fixed and rows are independent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dynaflow.testing.network import Collective, Link

# The first part's first op and the last part's last have nothing to hide behind: a few layers must not look like the whole model.
# Those with experts hold gigabytes each.
NUM_LAYERS, NUM_EXPERT_LAYERS, NUM_TINY_LAYERS = 8, 2, 2


def num_layers(is_dense: bool, tiny: bool) -> int:
    return NUM_TINY_LAYERS if tiny else NUM_LAYERS if is_dense else NUM_EXPERT_LAYERS


# ---------------------------------------------------------------------------- tensor parallel, from Transformers

LLAMA_3_70B = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}
LLAMA_3_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
QWEN_2_5_72B = {"hidden_size": 8192, "intermediate_size": 29568, "num_attention_heads": 64, "num_key_value_heads": 8}
_TINY_DECODER = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 8}
# where the all-reduces are
ROW_PARALLEL = ("*.o_proj", "*.down_proj")


def tensor_parallel(family: str, sizes: dict[str, int], ranks: int, tiny: bool) -> nn.Module:
    """A rank's share, without the language model's head, which is no part of a layer."""
    import transformers

    sizes = _TINY_DECODER if tiny else sizes
    shared = {name: sizes[name] // ranks for name in ("intermediate_size", "num_attention_heads", "num_key_value_heads")}
    head_dim = 8 if tiny else 128
    config = getattr(transformers, f"{family}Config")(
        hidden_size=sizes["hidden_size"], head_dim=head_dim, num_hidden_layers=num_layers(True, tiny), vocab_size=1024, rms_norm_eps=1e-5,
        max_position_embeddings=4096, use_cache=False, **shared)  # fmt: skip
    return getattr(transformers, f"{family}Model")(config)


# ---------------------------------------------------------------------------- expert parallel


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture-of-experts model with multi-head latent attention, as its paper gives it."""

    hidden: int
    heads: int
    # low ranks of queries (0: none) and of keys and values
    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    num_experts: int
    per_token: int
    expert_dim: int
    shared_dim: int
    # ranks that a token is sent to. What several experts of one rank need is sent once.
    sent_to: int


# 8 groups of experts, of which a token chooses 4: with 8 ranks a group is a rank
DEEPSEEK_V3 = Experts(7168, 128, 1536, 512, 128, 64, 256, 8, 2048, 2048, sent_to=4)
# no groups: 6 experts lie on 4.4 of 8 ranks on average. 3 divides 6, and sends less than a real one.
DEEPSEEK_V2_LITE = Experts(2048, 16, 0, 512, 128, 64, 64, 6, 1408, 2816, sent_to=3)
TINY_EXPERTS = Experts(32, 4, 16, 16, 8, 4, 32, 4, 16, 16, sent_to=2)


class LatentAttention(nn.Module):
    """Prefill expands keys and values to all heads; decode writes the cache's last place and attends to the latent cache itself."""

    def __init__(self, c: Experts):
        super().__init__()
        self.c = c
        self.q_down = nn.Sequential(nn.Linear(c.hidden, c.q_rank, bias=False), nn.RMSNorm(c.q_rank)) if c.q_rank else nn.Identity()
        self.q_up = nn.Linear(c.q_rank or c.hidden, c.heads * (c.nope_dim + c.rope_dim), bias=False)
        self.kv_down, self.kv_norm = nn.Linear(c.hidden, c.kv_rank + c.rope_dim, bias=False), nn.RMSNorm(c.kv_rank)
        self.k_up, self.v_up = (nn.Parameter(torch.randn(c.heads, c.nope_dim, c.kv_rank) * c.kv_rank**-0.5) for _ in range(2))
        self.o_proj = nn.Linear(c.heads * c.nope_dim, c.hidden, bias=False)

    def forward(self, x: Tensor, cache: Tensor | None) -> Tensor:
        c = self.c
        q = self.q_up(self.q_down(x)).unflatten(-1, (c.heads, -1))
        latent, k_rope = self.kv_down(x).split((c.kv_rank, c.rope_dim), -1)
        latent = self.kv_norm(latent)
        if cache is None:
            k, v = (F.linear(latent, up.flatten(0, 1)).unflatten(-1, (c.heads, -1)) for up in (self.k_up, self.v_up))
            k = torch.cat((k, k_rope.unsqueeze(2).expand(-1, -1, c.heads, -1)), -1)
            v = F.pad(v, (0, c.rope_dim))
            y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
            y = y.transpose(1, 2)[..., : c.nope_dim]
        else:
            cache[:, :, -1] = torch.cat((latent, k_rope), -1)
            q_nope, q_rope = q.split((c.nope_dim, c.rope_dim), -1)
            q = torch.cat((torch.einsum("bghd,hdc->bghc", q_nope, self.k_up), q_rope), -1)
            weights = torch.softmax(q @ cache.transpose(-1, -2) * q.shape[-1] ** -0.5, -1)
            y = torch.einsum("bghc,hdc->bghd", weights @ cache[..., : c.kv_rank], self.v_up)
        return self.o_proj(y.flatten(2))


class GatedMlp(nn.Module):
    def __init__(self, hidden: int, inner: int):
        super().__init__()
        self.up, self.down = nn.Linear(hidden, 2 * inner, bias=False), nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class RoutedExperts(nn.Module):
    """The experts of this rank: [batch, tokens, choices, hidden] in and out."""

    def __init__(self, c: Experts, ranks: int):
        super().__init__()
        self.num = c.num_experts // ranks
        self.up = nn.Parameter(torch.randn(self.num, c.hidden, 2 * c.expert_dim) * c.hidden**-0.5)
        self.down = nn.Parameter(torch.randn(self.num, c.expert_dim, c.hidden) * c.expert_dim**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, choices, hidden = x.shape
        rows = x.reshape(batch, tokens * choices // self.num, self.num, hidden).permute(2, 0, 1, 3).flatten(1, 2)
        gate, up = torch.bmm(rows, self.up).chunk(2, -1)
        y = torch.bmm(F.silu(gate) * up, self.down)
        return y.unflatten(1, (batch, -1)).permute(1, 2, 0, 3).reshape(batch, tokens, choices, hidden)


class ExpertLayer(nn.Module):
    def __init__(self, c: Experts, ranks: int, link: Link | None):
        super().__init__()
        self.c = c
        self.norm1, self.norm2 = nn.RMSNorm(c.hidden), nn.RMSNorm(c.hidden)
        self.attn, self.router = LatentAttention(c), nn.Linear(c.hidden, c.num_experts, bias=False)
        self.experts, self.shared_experts = RoutedExperts(c, ranks), GatedMlp(c.hidden, c.shared_dim)
        self.dispatch, self.combine = (Collective("all_to_all", link, ranks) if link else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor, cache: Tensor | None) -> Tensor:
        c = self.c
        x = x + self.attn(self.norm1(x), cache)
        y = self.norm2(x)
        weights = torch.sigmoid(self.router(y)).topk(c.per_token, -1).values
        weights = weights / weights.sum(-1, keepdim=True)
        sent = self.dispatch(y.unsqueeze(2).expand(-1, -1, c.sent_to, -1).contiguous())
        pairs = sent.repeat_interleave(c.per_token // c.sent_to, 2)
        routed = (self.experts(pairs) * weights.unsqueeze(-1)).unflatten(2, (c.sent_to, -1)).sum(3)
        return x + self.shared_experts(y) + self.combine(routed).sum(2)


class ExpertModel(nn.Module):
    """x is [batch, tokens, hidden]. With caches, [batch, tokens, context, ...] per layer, every token is a sequence that decodes."""

    def __init__(self, c: Experts, ranks: int, link: Link | None):
        super().__init__()
        self.layers = nn.ModuleList(ExpertLayer(c, ranks, link) for _ in range(NUM_EXPERT_LAYERS))

    def forward(self, x: Tensor, caches: Sequence[Tensor | None] = (None,) * NUM_EXPERT_LAYERS) -> Tensor:
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cache)
        return x


# ---------------------------------------------------------------------------- sequence parallel


class DitBlock(nn.Module):
    """A block of a diffusion transformer, attention and MLP side by side (FLUX's single blocks), its sequence over `ranks` ranks: an
    all-to-all before attention gives every rank all tokens of its heads, one behind it gives its tokens back (Ulysses)."""

    def __init__(self, hidden: int, heads: int, ranks: int, link: Link | None):
        super().__init__()
        self.heads, self.ranks = heads, ranks
        self.norm, self.modulation = nn.LayerNorm(hidden, elementwise_affine=False), nn.Linear(hidden, 3 * hidden)
        self.qkv, self.mlp = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, 4 * hidden)
        self.out = nn.Linear(5 * hidden, hidden)
        self.scatter, self.gather = (Collective("all_to_all", link, ranks) if link else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor, vec: Tensor) -> Tensor:
        shift, scale, gate = self.modulation(F.silu(vec)).unsqueeze(1).chunk(3, -1)
        y = self.norm(x) * (1 + scale) + shift
        # [batch, tokens, 3, ranks, a rank's heads] -> [batch, ranks, tokens, 3, ...]: what goes to a rank, together
        qkv = self.qkv(y).unflatten(-1, (3, self.ranks, -1)).permute(0, 3, 1, 2, 4).contiguous()
        q, k, v = self.scatter(qkv).flatten(1, 2).unflatten(-1, (self.heads // self.ranks, -1)).permute(2, 0, 3, 1, 4).unbind()
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        back = self.gather(attended.unflatten(1, (self.ranks, -1)).contiguous()).transpose(1, 2).flatten(2)
        return x + gate * self.out(torch.cat((back, F.gelu(self.mlp(y), approximate="tanh")), -1))


class Dit(nn.Module):
    def __init__(self, hidden: int, heads: int, ranks: int, link: Link | None, num_blocks: int):
        super().__init__()
        self.blocks = nn.ModuleList(DitBlock(hidden, heads, ranks, link) for _ in range(num_blocks))

    def forward(self, x: Tensor, vec: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, vec)
        return x


def dit(ranks: int, link: Link | None, tiny: bool) -> nn.Module:
    """FLUX.1's width and heads."""
    return Dit(*((64, 8) if tiny else (3072, 24)), ranks, link, num_layers(True, tiny))


def expert_parallel(c: Experts, ranks: int, link: Link | None, tiny: bool) -> Any:
    return ExpertModel(TINY_EXPERTS if tiny else c, ranks, link)
