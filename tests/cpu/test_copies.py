"""Whether a copy that torch makes only if it must is one, at given sizes: told without memory, and compared with tensors that have it."""

import pytest
import torch

import dynaflow as df
from dynaflow import engine
from dynaflow.capture import Compiled
from dynaflow.settings import read_settings

COPIES = {
    "contiguous": lambda x: x.transpose(0, 1).contiguous(),
    "reshape": lambda x: x.transpose(0, 1).reshape(x.shape[0] * 3, 4),
    "grouped heads": lambda x: x[:, :, None].expand(-1, -1, 2, -1).reshape(x.shape[0], 6, 4),
    "flatten": lambda x: x.permute(1, 0, 2).flatten(0, 1),
    "other dtype": lambda x: x.transpose(0, 1).to("cpu", torch.float64),
}


def found(copied, num_rows):
    """The loose copies of a graph that copies an input and then changes it."""

    def function(x):
        y = copied(x)
        x.add_(1)
        return y * 2

    graphs = []

    class Kept(engine.CapturedGraph):
        def __init__(self, *args):
            super().__init__(*args)
            graphs.append(self)

    with torch.no_grad():
        Compiled(function, read_settings(strategy=df.Branches(2), name="copies"), Kept)(torch.randn(num_rows, 3, 4))
    (graph,) = graphs
    return graph.flow.symbols, graph.built.loose_copies


@pytest.mark.parametrize("name", COPIES)
def test_is_view_as_torch_has_it(name):
    copied = COPIES[name]
    symbols, loose = found(copied, 4)
    assert len(loose) == 1 and len(symbols) == 1
    for num_rows in (1, 2, 5):
        x = torch.randn(num_rows, 3, 4)
        is_view = copied(x).untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        assert loose[0].is_view({symbols[0]: num_rows}) == is_view


def test_equal_copies_are_asked_for_once():
    twice = COPIES["grouped heads"]
    _, loose = found(lambda x: twice(x) + twice(x), 4)
    assert len(loose) == 1
