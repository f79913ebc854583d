"""Tests of DynaFlow inside real systems. `make systems` runs each in a virtual environment of its system; where one is missing, its tests
are skipped."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

import dynaflow as df


@pytest.fixture(autouse=True)
def fresh_captures():
    """Tests share classes, and Dynamo counts captures per class."""
    yield
    torch._dynamo.reset()


@pytest.fixture
def counted():
    """What the process counted since the test began: the backend's graphs have no callable to ask."""
    before = df.stats()
    calls, splits, captures, fallbacks = before.calls, before.split_calls, before.captures, before.fallbacks.copy()

    def since():
        now = df.stats()
        return df.settings.Stats(
            captures=now.captures - captures, calls=now.calls - calls, split_calls=now.split_calls - splits,
            fallbacks=now.fallbacks - fallbacks)  # fmt: skip

    return since
