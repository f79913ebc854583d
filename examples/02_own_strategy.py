"""Write a strategy of your own: three uneven parts, network ops on a stream of higher priority, another plan while decoding.

A strategy is run once per context, not once per call: what it reads from `flow.context` becomes the key of its plan.
"""

import torch
from torch import nn

import dynaflow as df
from dynaflow.testing.network import add_collectives, all_reduce


class Staircase(df.Strategy):
    """The first part is the largest, so that the network has work early and little is left at the end.

    compute | A0    A1  A2 B0    B1  B2 ...
    comm    |       a0  a1 a2    b0  b1 ...
    """

    def __init__(self, shares=(0.5, 0.3, 0.2)):
        self.shares = shares

    def schedule(self, flow):
        if flow.context.tags.get("phase") == "decode":
            return flow.sequential("decoding: too little work to split")
        flow.split(list(self.shares))
        comm = flow.stream("comm", priority=-1)
        while ready := flow.get_ready_ops():
            # send what can be sent; otherwise the part that is furthest behind
            r = min(ready, key=lambda r: (r.kind != "network", r.depth, r.part))
            flow.execute(r, stream=comm if r.kind == "network" else "compute")


torch.manual_seed(0)
torch.set_num_threads(1)
torch.set_grad_enabled(False)

model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)).eval()
add_collectives(model, ["0", "2"], latency_us=500)
partition = [df.SplitFunc(all_reduce, kind="network")]
x = torch.randn(20, 64)

plan = df.explain(model, (x,), strategy=Staircase(), partition=partition).plan
print(plan.grid())
assert [str(part) for part in plan.parts] == ["0:5/10", "5:8/10", "8:10/10"], plan.parts
assert df.Plan.parse(str(plan)) == plan

fast = df.compile(model, strategy=Staircase(), partition=partition, runtime="threads")
for batch_size in (20, 33, 11):  # one capture, one plan
    x = torch.randn(batch_size, 64)
    torch.testing.assert_close(fast(x), model(x))
with df.context(phase="decode"):  # another plan
    torch.testing.assert_close(fast(x), model(x))
stats = df.stats(fast)
print(f"{stats.captures} capture, {stats.plans} plans, {stats.calls} calls, fallbacks: {dict(stats.fallbacks)}")
print("equal to plain PyTorch at every size")
