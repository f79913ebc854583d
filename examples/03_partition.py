"""Say where operators begin and end: by module, by function, or with a mark in the model's own code.

Each rule may name a kind (compute, memory, network, copy), which is what strategies look at.
"""

import torch
import torch.nn.functional as F
from torch import nn

import dynaflow as df


class Mlp(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


class Layer(nn.Module):
    def __init__(self, dim: int = 64, num_heads: int = 4):
        super().__init__()
        self.num_heads, self.qkv, self.out = num_heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.gate, self.mlp = nn.Linear(dim, 1), Mlp(dim)

    def forward(self, x):
        batch, length, dim = x.shape
        q, k, v = (t.view(batch, length, self.num_heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, dim))
        with df.mark("gate", kind="memory"):  # where one may touch the model's code
            gate = torch.sigmoid(self.gate(x))
        return x + gate * self.mlp(x)


torch.manual_seed(0)
torch.set_num_threads(1)
torch.set_grad_enabled(False)

model = nn.Sequential(Layer(), Layer()).eval()
x = torch.randn(8, 16, 64)
partition = [
    df.SplitModule("*.mlp"),  # a name glob; a class works too: df.SplitModule(Mlp)
    df.SplitFunc(F.scaled_dot_product_attention, kind="memory"),
]

explained = df.explain(model, (x,), strategy=df.NanoBatch(4), partition=partition)
for op in explained.flow.ops:
    print(f"{op.name:<40} {op.kind:<8} reads {len(op.reads)}, writes {len(op.writes)}  {op.unsplittable}")
names = [op.name for op in explained.flow.ops]
assert sum(name.endswith("mlp") for name in names) == 2, names
assert sum(name.endswith("scaled_dot_product_attention") for name in names) == 2, names
assert all(op.kind == "memory" for op in explained.flow.ops if "gate" in op.name or "attention" in op.name)

for rules in (partition, "auto"):
    fast = df.compile(model, strategy=df.NanoBatch(4), partition=rules)
    torch.testing.assert_close(fast(x), model(x))
print("equal to plain PyTorch")
