"""What df.explain says about compiled units, memory and recordings."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import dynaflow as df

needs_compiler = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("c++")), reason="Inductor needs a C++ compiler on the CPU")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.conv = nn.Linear(8, 8), nn.Linear(8, 8), nn.Conv1d(2, 2, 3)

    def forward(self, x):
        h = self.a(x)
        return self.b(h.relu()), self.conv(h.view(-1, 2, 4)), h.t().contiguous()


X = torch.randn(6, 8)
OUTPUT_BYTES = 4 * (6 * 8 + 6 * 4 + 6 * 8)


def explained(strategy, **options):
    torch._dynamo.reset()
    with torch.no_grad():
        explanation = df.explain(Net(), X, strategy, **options)
    return explanation.graphs[0], str(explanation)


def test_eager_ops_are_named_with_what_they_copy():
    graph, text = explained(df.TwoBatch())
    assert "compiler   eager: ops run as they are" in text and "record  " not in text
    # outputs are merged from two parts; what stays inside is read where it was made
    assert sum(c.nbytes for c in graph.copies) == OUTPUT_BYTES
    assert {c.reason for c in graph.copies} == {"eager ops allocate their results"}
    assert "stay where their ops made them: a:0 192 B" in text and dict(graph.loose)["a:0"] == 6 * 8 * 4
    assert graph.peak_bytes > OUTPUT_BYTES + 6 * 8 * 4 and "without workspaces of libraries" in text
    assert Path(graph.path).read_text().startswith("# Net.")


@pytest.mark.parametrize("first, rows", [("prefill", (1, 5)), ("decode", (5, 1))])
def test_parts_have_the_rows_that_the_call_says(first, rows):
    """What is copied for a part is counted by its own rows, not by half of them."""
    with df.context(num_prefill=1, first=first):
        graph, text = explained(df.PrefillDecode(attention="b"), partition=[df.SplitModule("*")])
    copied = {c.launch: c.nbytes for c in graph.copies if c.value == "b:0"}
    assert copied == {"b 0/2": rows[0] * 8 * 4, "b 1/2": rows[1] * 8 * 4}
    said = ["num_prefill", "the rest"] if first == "prefill" else ["the rest", "num_prefill"]
    assert f"rows       0/2 has {said[0]}\nrows       1/2 has {said[1]}\n" in text


@needs_compiler
@pytest.mark.xdist_group("inductor")
def test_compiled_units_and_recordings():
    graph, text = explained(df.TwoBatch(), compiler="inductor", runtime="graph", buckets="powers")
    assert len(graph.plan.launches) == 2 and graph.plan.launches[0].is_group
    assert "compiler   inductor: 2 launches" in text
    # the products lie in place; the convolution allocates, the transposed copy has its rows inside
    reasons = {c.reason: c.value for c in graph.copies}
    assert len(reasons) == 2 and not any("b:0" in value for value in reasons.values())
    assert "the batch is not the outermost dim of what it makes" in reasons
    assert "convolution" in str(list(reasons))
    assert "record     sizes are recorded as they are: the batch is not the outermost dim of its output" in text
    assert graph.peak_bytes >= OUTPUT_BYTES and Path(graph.path).exists()


def test_padding():
    torch._dynamo.reset()

    with torch.no_grad():
        text = str(df.explain(lambda x: x.relu() + 1, X, df.TwoBatch(), runtime="graph", buckets=[8, 16]))
    assert "record     the batch is padded to 8, 16" in text and "not recorded" not in text
    with torch.no_grad():
        text = str(df.explain(lambda x: x.relu() + 1, X, df.TwoBatch(), runtime="graph"))
    assert "recorded as they are: no buckets= are given" in text


def test_a_graph_that_runs_as_a_whole_has_no_units():
    graph, text = explained(df.Sequential(), compiler="inductor")
    assert "the graph as a whole, as torch.compile would" in text and graph.peak_bytes is None and not graph.path


def test_the_peak_counts_what_lives_at_once():
    """Nothing is split or compiled: the arena is the sequential one, every result is copied behind its op, one at a time."""
    graph, _ = explained(df.Branches())
    largest = 6 * 8 * 4
    kept = sum(n for _, n in graph.loose)
    assert graph.arena_bytes + OUTPUT_BYTES <= graph.peak_bytes <= graph.arena_bytes + OUTPUT_BYTES + kept + 2 * largest
