"""GPU tests run without gradients."""

import pytest
import torch


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield
