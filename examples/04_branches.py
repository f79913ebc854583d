"""Independent branches of one batch on several streams: no split, the ops as they are.

An Inception-like block has three branches between its input and its concatenation. `Branches(3)` gives each a stream:
the caller's own and two more.
"""

import torch
from torch import nn

import dynaflow as df


class Inception(nn.Module):
    def __init__(self, channels: int = 16):
        super().__init__()
        self.one = nn.Conv2d(channels, channels, 1)
        self.three = nn.Sequential(nn.Conv2d(channels, channels, 1), nn.Conv2d(channels, channels, 3, padding=1))
        self.pool = nn.Sequential(nn.AvgPool2d(3, 1, 1), nn.Conv2d(channels, channels, 1))
        self.join = nn.Conv2d(3 * channels, channels, 1)

    def forward(self, x):
        return torch.relu(self.join(torch.cat([self.one(x), self.three(x), self.pool(x)], dim=1)))


torch.manual_seed(0)
torch.set_num_threads(1)
torch.set_grad_enabled(False)

model = nn.Sequential(Inception(), Inception()).eval()
x = torch.randn(4, 16, 32, 32)
partition = [df.SplitModule(glob) for glob in ("*.one", "*.three", "*.pool")]

plan = df.explain(model, (x,), strategy=df.Branches(3), partition=partition).plan
print(plan.grid())
assert len({launch.stream for launch in plan.launches}) == 3 and not plan.parts, "three streams, and the batch in one piece"

fast = df.compile(model, strategy=df.Branches(3), partition=partition, runtime="threads")
fast(x)
with df.profile() as profiled:
    result = fast(x)
print(profiled.timeline)
torch.testing.assert_close(result, model(x))
print("equal to plain PyTorch")
