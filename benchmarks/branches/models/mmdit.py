"""MMDiT: a stack of dual-stream blocks as in SD3 and FLUX. Text and image have their own modulation, qkv and mlp, and attend jointly.

    image | modulate -> qkv -\\            /-> out -> modulate -> mlp
                              > attention <
    text  | modulate -> qkv -/            \\-> out -> modulate -> mlp
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, rms_norm, scaled_dot_product_attention, silu

HEAD_DIM = 64


class Side(nn.Module):
    """One stream's own weights of a block."""

    def __init__(self, width: int):
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(width, elementwise_affine=False, eps=1e-6) for _ in range(2))
        self.modulation = nn.Linear(width, 6 * width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.q_scale, self.k_scale = (nn.Parameter(torch.ones(HEAD_DIM)) for _ in range(2))

    def before(self, x: Tensor, condition: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, ...]]:
        shift, scale, *rest = self.modulation(silu(condition))[:, None].chunk(6, dim=-1)
        qkv = self.qkv(self.norm1(x) * (1 + scale) + shift)
        q, k, v = (t.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for t in qkv.chunk(3, dim=-1))
        return (rms_norm(q, (HEAD_DIM,), self.q_scale, 1e-6), rms_norm(k, (HEAD_DIM,), self.k_scale, 1e-6), v), tuple(rest)

    def after(self, x: Tensor, attended: Tensor, rest: tuple[Tensor, ...]) -> Tensor:
        gate, shift, scale, gate2 = rest
        x = x + gate * self.out(attended)
        return x + gate2 * self.down(gelu(self.up(self.norm2(x) * (1 + scale) + shift), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.image, self.text = Side(width), Side(width)

    def forward(self, image: Tensor, text: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        of_image, image_rest = self.image.before(image, condition)
        of_text, text_rest = self.text.before(text, condition)
        q, k, v = (torch.cat(pair, dim=2) for pair in zip(of_text, of_image))
        attended = scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        num_text = text.shape[1]
        return self.image.after(image, attended[:, num_text:], image_rest), self.text.after(text, attended[:, :num_text], text_rest)


class MMDiT(nn.Module):
    def __init__(self, width: int, num_blocks: int, channels: int = 64):
        super().__init__()
        self.inward, self.outward = nn.Linear(channels, width), nn.Linear(width, channels)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)

    def forward(self, image: Tensor, text: Tensor, condition: Tensor) -> Tensor:
        image = self.inward(image)
        for block in self.blocks:
            image, text = block(image, text, condition)
        return self.outward(self.norm(image))
