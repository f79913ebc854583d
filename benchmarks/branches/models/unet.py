"""An SDXL-like UNet with a ControlNet beside it: the way down and the middle stand twice, and the second one's residuals are added.

    unet    | down -> middle -> + -> up        (up takes down's results and the ControlNet's)
    control | hint -> down -> middle -> zero convolutions
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, interpolate, scaled_dot_product_attention, silu

HEAD_DIM = 64


class ResBlock(nn.Module):
    def __init__(self, inward: int, outward: int, time_width: int):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, inward), nn.Conv2d(inward, outward, 3, padding=1)
        self.time = nn.Linear(time_width, outward)
        self.norm2, self.conv2 = nn.GroupNorm(8, outward), nn.Conv2d(outward, outward, 3, padding=1)
        self.skip = nn.Conv2d(inward, outward, 1) if inward != outward else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.conv1(silu(self.norm1(x))) + self.time(silu(time))[:, :, None, None]
        return self.skip(x) + self.conv2(silu(self.norm2(h)))


class Attention(nn.Module):
    def __init__(self, width: int, context_width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.k, self.v = (nn.Linear(context_width, width, bias=False) for _ in range(2))

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        normed = self.norm(x)
        seen = normed if context is None else context
        q, k, v = (t.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for t in (self.q(normed), self.k(seen), self.v(seen)))
        return x + self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    """Blocks of self attention, attention to the text, and a gated mlp, over the pixels."""

    def __init__(self, width: int, context_width: int, depth: int):
        super().__init__()
        self.norm, self.inward, self.outward = nn.GroupNorm(8, width), nn.Linear(width, width), nn.Linear(width, width)
        self.selves = nn.ModuleList(Attention(width, width) for _ in range(depth))
        self.crosses = nn.ModuleList(Attention(width, context_width) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.ups = nn.ModuleList(nn.Linear(width, 8 * width) for _ in range(depth))
        self.downs = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(depth))

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        h = self.inward(self.norm(x).flatten(2).transpose(1, 2))
        for own, cross, norm, up, down in zip(self.selves, self.crosses, self.norms, self.ups, self.downs):
            h = cross(own(h), text)
            value, gate = up(norm(h)).chunk(2, dim=-1)
            h = h + down(value * gelu(gate))
        return x + self.outward(h).transpose(1, 2).unflatten(2, x.shape[2:])


class Stage(nn.Module):
    """A ResBlock, and a transformer where the level has one."""

    def __init__(self, inward: int, outward: int, time_width: int, context_width: int, depth: int):
        super().__init__()
        self.res = ResBlock(inward, outward, time_width)
        self.attend = Transformer(outward, context_width, depth) if depth else None

    def forward(self, x: Tensor, time: Tensor, text: Tensor) -> Tensor:
        x = self.res(x, time)
        return x if self.attend is None else self.attend(x, text)


class Down(nn.Module):
    """From the latents to the middle; returns the middle and what the way up takes."""

    def __init__(self, widths: Sequence[int], depths: Sequence[int], context_width: int, channels: int):
        super().__init__()
        time_width, before = 4 * widths[0], widths[0]
        self.inward = nn.Conv2d(channels, before, 3, padding=1)
        self.stages, self.shrinks = nn.ModuleList(), nn.ModuleList()
        self.kept = [before]
        for level, (width, depth) in enumerate(zip(widths, depths)):
            self.stages.append(nn.ModuleList(Stage(w, width, time_width, context_width, depth) for w in (before, width)))
            is_last = level == len(widths) - 1
            self.shrinks.append(nn.Identity() if is_last else nn.Conv2d(width, width, 3, stride=2, padding=1))
            self.kept += [width, width] + ([] if is_last else [width])
            before = width
        self.middle = Stage(before, before, time_width, context_width, depths[-1])
        self.last = ResBlock(before, before, time_width)

    def forward(self, x: Tensor, time: Tensor, text: Tensor, hint: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
        x = self.inward(x)
        if hint is not None:
            x = x + hint
        kept = [x]
        for level, (stages, shrink) in enumerate(zip(self.stages, self.shrinks)):
            for stage in stages:
                x = stage(x, time, text)
                kept.append(x)
            if level < len(self.stages) - 1:
                x = shrink(x)
                kept.append(x)
        return self.last(self.middle(x, time, text), time), kept


class ControlledUNet(nn.Module):
    def __init__(self, widths: Sequence[int], depths: Sequence[int], context_width: int, channels: int = 4):
        super().__init__()
        time_width = 4 * widths[0]
        self.time = nn.ModuleList(nn.Sequential(nn.Linear(widths[0], time_width), nn.SiLU(), nn.Linear(time_width, time_width))
                                  for _ in range(2))  # fmt: skip
        self.down, self.control = (Down(widths, depths, context_width, channels) for _ in range(2))
        self.hint = nn.Sequential(nn.Conv2d(channels, 64, 3, padding=1), nn.SiLU(), nn.Conv2d(64, widths[0], 3, padding=1))
        # "zero convolutions", trained: not zero
        self.zeros = nn.ModuleList(nn.Conv2d(width, width, 1) for width in (*self.control.kept, widths[-1]))
        kept, before = list(self.down.kept), widths[-1]
        self.ups = nn.ModuleList()
        for width, depth in zip(reversed(widths), reversed(depths)):
            level = nn.ModuleList()
            for _ in range(3):
                level.append(Stage(before + kept.pop(), width, time_width, context_width, depth))
                before = width
            self.ups.append(level)
        self.grows = nn.ModuleList(nn.Conv2d(w, w, 3, padding=1) for w in reversed(widths[1:]))
        self.norm, self.outward = nn.GroupNorm(8, before), nn.Conv2d(before, channels, 3, padding=1)

    def forward(self, latents: Tensor, time: Tensor, text: Tensor, hint: Tensor) -> Tensor:
        x, kept = self.down(latents, self.time[0](time), text)
        middle, residuals = self.control(latents, self.time[1](time), text, self.hint(hint))
        added = [zero(r) for zero, r in zip(self.zeros, (*residuals, middle))]
        kept = [a + b for a, b in zip(kept, added)]
        x = x + added[-1]
        own = self.time[0](time)
        for i, stages in enumerate(self.ups):
            for stage in stages:
                x = stage(torch.cat((x, kept.pop()), dim=1), own, text)
            if i < len(self.grows):
                x = self.grows[i](interpolate(x, scale_factor=2.0, mode="nearest"))
        return self.outward(silu(self.norm(x)))
