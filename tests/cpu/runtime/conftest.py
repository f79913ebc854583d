"""What tests of recordings share."""

import pytest
import torch

from dynaflow.runtime import graphs
from tests.cpu.runtime.recorder import FakeRecorder


@pytest.fixture
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(params=["recorded", "issued again"])
def counted(request, monkeypatch):
    """What was recorded."""
    made = []
    plain = graphs.Recording.__init__

    def init(self, *args):
        plain(self, *args)
        made.append(self)

    monkeypatch.setattr(graphs.Recording, "__init__", init)
    if request.param == "recorded":
        monkeypatch.setattr(graphs.Recordings, "make_recorder", lambda self, body, feeds: FakeRecorder())
    return made


@pytest.fixture
def recorder(monkeypatch):
    """Everything is recorded with a FakeRecorder; their common log."""
    log = []
    monkeypatch.setattr(graphs.Recordings, "make_recorder", lambda self, body, feeds: FakeRecorder(log))
    return log
