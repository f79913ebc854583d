"""Models whose kernels are planned, for tests; and what every such test needs."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dynaflow as df


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    monkeypatch.setenv("DYNAFLOW_DIR", str(tmp_path))
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def compiled(model, runtime="fake:3", strategy=None, **options):
    return df.compile(model, strategy=strategy or df.Branches(3), partition="kernels", runtime=runtime, strict=True, **options)


class Branchy(nn.Module):
    """Convolutions side by side, slices of one buffer, attention, products; running statistics change when it trains."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 6, 3, padding=1)
        self.norm, self.other = nn.BatchNorm2d(4), nn.BatchNorm2d(6)
        self.q, self.k, self.out = nn.Linear(10, 10), nn.Linear(10, 10), nn.Linear(10, 3)

    def forward(self, x):
        y = torch.cat([F.relu(self.norm(self.a(x))), F.relu(self.other(self.b(x)))], 1)
        z = y.flatten(2).transpose(1, 2)
        attended = F.scaled_dot_product_attention(self.q(z)[:, None], self.k(z)[:, None], z[:, None])[:, 0]
        return self.out(attended.mean(1)), y


def image(rows=2):
    return torch.randn(rows, 4, 5, 5).to(memory_format=torch.channels_last)


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = (nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(2))

    def forward(self, x):
        return self.left(x) @ self.right(x).t()


def call_thrice(fast, x=None):
    x = torch.randn(4, 8) if x is None else x
    with torch.no_grad():
        for _ in range(3):
            result = fast(x)
    return result
