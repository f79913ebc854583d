"""Put one function in the place of two ops: an all-reduce and the norm behind it, fused.

The function gets the pair's external inputs in order of first use and returns its external outputs in order. Shapes, dtypes and
devices are checked before anything runs; the plan names the function.
"""

import torch
import torch.nn.functional as F
from torch import nn

import dynaflow as df
from dynaflow.testing.network import add_collectives, all_reduce


def reduce_and_norm(x, weight, bias):
    """Stands for a fused kernel; here it is the two ops in one call."""
    return F.layer_norm(all_reduce(x, 500.0, 0.0), (x.shape[-1],), weight, bias)


class FuseReduceNorm(df.Strategy):
    """compute | proj 0  proj 1          act 0  act 1
    comm    |         ar+norm 0  ar+norm 1
    """

    def schedule(self, flow):
        flow.split(2)
        while ready := flow.get_ready_ops():
            r = min(ready, key=lambda r: (r.depth, r.part))
            norm = next((u for u in r.users if u.name.endswith("norm") and u.part == r.part), None)
            if r.kind == "network" and norm is not None:
                flow.execute([r, norm], stream="comm", replace=reduce_and_norm)
            else:
                flow.execute(r, stream="compute")


class Block(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.proj, self.norm = nn.Linear(dim, dim), nn.LayerNorm(dim)

    def forward(self, x):
        return torch.tanh(self.norm(self.proj(x)))


torch.manual_seed(0)
torch.set_num_threads(1)
torch.set_grad_enabled(False)

model = nn.Sequential(Block(128), Block(128)).eval()
add_collectives(model, "*.proj", latency_us=500)
partition = [df.SplitFunc(all_reduce, kind="network"), df.SplitModule("*.norm")]
x = torch.randn(32, 128)

plan = df.explain(model, (x,), strategy=FuseReduceNorm(), partition=partition).plan
print(plan.grid())
assert sum(launch.replace.endswith("reduce_and_norm") for launch in plan.launches) == 4, "two blocks, two parts"

fast = df.compile(model, strategy=FuseReduceNorm(), partition=partition, runtime="threads", strict=True)
torch.testing.assert_close(fast(x), model(x))
print("equal to plain PyTorch")
