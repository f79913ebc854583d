"""A wrong strategy is refused before anything runs: read the error, and see a plain call fall back.

`explain`, `check` and `strict=True` raise a strategy's mistakes at the strategy's own line. A plain call runs the sequential plan
instead, warns once with the same text, and counts it.
"""

import torch
from torch import nn

import dynaflow as df


class Impatient(df.Strategy):
    """Executes what depends on an op before the op itself."""

    def schedule(self, flow):
        flow.split(2)
        while ready := flow.get_ready_ops():
            r = ready[0]
            for user in r.users:
                flow.execute(user)
            flow.execute(r)


class Forgetful(df.Strategy):
    """Never comes to the second half of the batch."""

    def schedule(self, flow):
        flow.split(2)
        while ready := [r for r in flow.get_ready_ops() if r.part.lo == 0]:
            flow.execute(ready[0])


torch.manual_seed(0)
torch.set_num_threads(1)
torch.set_grad_enabled(False)

model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)).eval()
x = torch.randn(8, 32)
partition = [df.SplitModule("0"), df.SplitModule("2")]

# 1. explain says what is wrong, where, why, and what to do
for strategy, expected in ((Impatient(), df.errors.OpNotReady), (Forgetful(), df.errors.OpNeverExecuted)):
    try:
        df.explain(model, (x,), strategy=strategy, partition=partition)
        raise SystemExit(f"{strategy} was not refused")
    except expected as error:
        print(f"{type(error).__name__}: {error}\n")

# 2. strict=True raises at the call
strict = df.compile(model, strategy=Impatient(), partition=partition, strict=True)
try:
    strict(x)
    raise SystemExit("strict=True did not raise")
except df.errors.OpNotReady:
    print("strict=True raises\n")

# 3. a plain call gives the right answer all the same
plain = df.compile(model, strategy=Impatient(), partition=partition)
torch.testing.assert_close(plain(x), model(x))
assert sum(df.stats(plain).fallbacks.values()) == 1
print("equal to plain PyTorch")
