"""Compile a model under TwoBatch, read the plan, run it, and see the overlap.

The batch is cut in two. While one half computes, the other half's all-reduce (emulated: it waits, and changes nothing) is on its way.
"""

import torch
from torch import nn

import dynaflow as df
from dynaflow.testing.network import add_collectives, all_reduce


class Block(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, dim: int, num_layers: int):
        super().__init__()
        self.layers = nn.ModuleList(Block(dim) for _ in range(num_layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


torch.manual_seed(0)
torch.set_num_threads(1)
torch.set_grad_enabled(False)

# 1. an ordinary model, with an emulated all-reduce where a tensor-parallel one has its real ones
model = Net(dim=256, num_layers=3).eval()
add_collectives(model, "*.down", latency_us=2_000)
x = torch.randn(64, 16, 256)

# 2. what will happen: nothing runs yet
partition = [df.SplitFunc(all_reduce, kind="network")]
explained = df.explain(model, (x,), strategy=df.TwoBatch(), partition=partition)
print(explained.plan.grid())

# 3. run it; the first call captures and plans, the second one is the steady state
fast = df.compile(model, strategy=df.TwoBatch(), partition=partition, runtime="threads")
fast(x)
with df.profile() as profiled:
    result = fast(x)
print(profiled.timeline)

# 4. the same bits as the same launches on one stream, and the same numbers as plain PyTorch
assert torch.equal(result, df.run_serialised(fast, x))
torch.testing.assert_close(result, model(x))
assert profiled.timeline.overlap_us() > 0, "the two streams were never busy at the same time"
print("equal to plain PyTorch")
