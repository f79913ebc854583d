"""Models as people write them over torch.distributed, each with the single-process model that it must equal.

A model gets the full weights and keeps its own shard of them. `whole()` is the model without ranks; `shard(x)` is what this rank is
given of the whole input, and `gather(y)` makes the whole output of what the ranks return.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import nn

WIDTH, HIDDEN, HEADS, SEQ = 16, 32, 4, 8


def rank() -> int:
    return dist.get_rank()


def world() -> int:
    return dist.get_world_size()


def mine(weight: torch.Tensor, dim: int) -> nn.Parameter:
    return nn.Parameter(weight.detach().chunk(world(), dim)[rank()].contiguous(), requires_grad=False)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class _Shard(nn.Module):
    """The columns of `up` and the rows of `down` that are this rank's."""

    def __init__(self, full: Mlp) -> None:
        super().__init__()
        self.norm, self.up, self.down = full.norm, mine(full.up.weight, 0), mine(full.down.weight, 1)

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.gelu(F.linear(x, self.up)), self.down)


class Functional(_Shard):
    """Tensor parallel, functional all-reduce."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + funcol.all_reduce(self.partial(self.norm(x)), "sum", dist.group.WORLD)


class InPlace(_Shard):
    """Tensor parallel, c10d's in-place all-reduce."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.partial(self.norm(x))
        dist.all_reduce(y)
        return x + y


# Dynamo of 2.11 does not look into what torch joins the blocks with ("marked as skipped: _maybe_view_chunk_cat")
gathers_in_graphs = torch.__version__ >= "2.12"


class SequenceParallel(_Shard):
    """Each rank has a part of every sequence (dim 1): all-gather before the matrix products, reduce-scatter behind them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        full = funcol.all_gather_tensor(self.norm(x), 1, dist.group.WORLD)
        return x + funcol.reduce_scatter_tensor(self.partial(full), "sum", 1, dist.group.WORLD)


class TokenParallel(_Shard):
    """Each rank has its own rows of the batch: all-gather before the matrix products, reduce-scatter behind them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        full = funcol.all_gather_tensor(self.norm(x), 0, dist.group.WORLD)
        return x + funcol.reduce_scatter_tensor(self.partial(full), "sum", 0, dist.group.WORLD)


class Moe(nn.Module):
    """Every token goes to its two best experts of four."""

    NUM_EXPERTS = 4

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, self.NUM_EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(self.NUM_EXPERTS, WIDTH, HIDDEN) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(self.NUM_EXPERTS, HIDDEN, WIDTH) / HIDDEN**0.5)

    def gates(self, x: torch.Tensor) -> torch.Tensor:
        top, chosen = self.router(x).softmax(-1).topk(2, -1)
        return torch.zeros(x.shape[0], self.NUM_EXPERTS).scatter(1, chosen, top)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gates = self.gates(x)
        y = F.gelu(x @ self.up) @ self.down  # experts, tokens, width
        return x + (gates.t()[..., None] * y).sum(0)


class ExpertParallel(Moe):
    """Each rank has its own tokens and its own experts: all-to-all before the experts, and back behind them."""

    def __init__(self, full: Moe) -> None:
        super().__init__()
        self.router, self.up, self.down = full.router, mine(full.up, 0), mine(full.down, 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gates = self.gates(x)
        chosen = (gates > 0).to(x.dtype).t()[..., None] * x  # experts, tokens, width
        sent = chosen.contiguous().view(world(), -1, *x.shape)  # ranks, their experts, tokens, width
        with_experts = funcol.all_to_all_single(sent, None, None, dist.group.WORLD)
        y = F.gelu(with_experts @ self.up) @ self.down
        back = funcol.all_to_all_single(y.contiguous(), None, None, dist.group.WORLD).view(-1, *x.shape)
        return x + (gates.t()[..., None] * back).sum(0)


class SparseExpertParallel(ExpertParallel):
    """The same, sending only what is needed: how many tokens go where depends on the data."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        num_own = self.NUM_EXPERTS // world()
        gates = self.gates(x)
        tokens, experts = (gates > 0).nonzero(as_tuple=True)
        order = experts.argsort(stable=True)
        tokens, experts = tokens[order], experts[order]
        counts = torch.bincount(experts, minlength=self.NUM_EXPERTS)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        num_sent, num_got = (c.view(world(), num_own).sum(1).tolist() for c in (counts, theirs))
        got = x.new_empty(sum(num_got), WIDTH)
        dist.all_to_all_single(got, x[tokens], num_got, num_sent)
        expert = torch.arange(num_own).repeat(world()).repeat_interleave(theirs)
        hidden = F.gelu(got[:, None] @ self.up[expert]) @ self.down[expert]
        back = x.new_empty(sum(num_sent), WIDTH)
        dist.all_to_all_single(back, hidden[:, 0], num_sent, num_got)
        return x + torch.zeros_like(x).index_add(0, tokens, back * gates[tokens, experts][:, None])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Ulysses(nn.Module):
    """Each rank has a part of every sequence; for attention, all of it and some of the heads."""

    def __init__(self, full: Attention) -> None:
        super().__init__()
        self.qkv, self.out = full.qkv, full.out

    def to_heads(self, t: torch.Tensor) -> torch.Tensor:
        """batch, own tokens, all heads, d -> batch, own heads, all tokens, d"""
        by_rank = t.unflatten(2, (world(), -1)).permute(2, 0, 1, 3, 4).contiguous()
        got = funcol.all_to_all_single(by_rank, None, None, dist.group.WORLD)  # ranks, batch, tokens, heads, d
        return got.permute(1, 3, 0, 2, 4).flatten(2, 3)

    def to_tokens(self, t: torch.Tensor) -> torch.Tensor:
        """batch, own heads, all tokens, d -> batch, own tokens, all heads x d"""
        by_rank = t.unflatten(2, (world(), -1)).permute(2, 0, 3, 1, 4).contiguous()
        got = funcol.all_to_all_single(by_rank, None, None, dist.group.WORLD)  # ranks, batch, tokens, heads, d
        return got.permute(1, 2, 0, 3, 4).flatten(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (self.to_heads(t.unflatten(-1, (HEADS, -1))) for t in self.qkv(x).chunk(3, -1))
        return x + self.out(self.to_tokens(F.scaled_dot_product_attention(q, k, v)))


class UlyssesByChunks(Ulysses):
    """The same exchange as others write it: chunks of one dim joined in dim 0, and back."""

    @staticmethod
    def exchange(t: torch.Tensor, scatter: int, gather: int) -> torch.Tensor:
        sent = torch.cat(t.chunk(world(), scatter), 0)
        got = funcol.all_to_all_single(sent, None, None, dist.group.WORLD)
        return torch.cat(got.chunk(world(), 0), gather)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (self.exchange(t.unflatten(-1, (HEADS, -1)), 2, 1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return x + self.out(self.exchange(F.scaled_dot_product_attention(q, k, v).transpose(1, 2), 1, 2).flatten(2))
