"""What repeats is analysed once, and only what repeats. `capture` compares with an analysis that runs every node, and runs the graph in
parts."""

from __future__ import annotations

import operator
from typing import Any, Callable
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from dynaflow.batching import register_split_rule, rowwise
from dynaflow.repeats import Repeats
from tests.cpu.in_parts import B, Captured, H, S, capture

W = torch.randn(H, H)
NUM_LAYERS = 4


def run(layer: Callable[..., Any], *args: torch.Tensor, axes: tuple[int | None, ...] | None = None) -> tuple[Captured, set[fx.Node]]:
    """Equal layers one after the other; the nodes that were not run."""
    repeated: set[fx.Node] = set()
    find = Repeats.find

    def spy(self: Repeats, signature: Any, node: fx.Node) -> Any:
        found = find(self, signature, node)
        if found is not None:
            repeated.add(node)
        return found

    def model(x: torch.Tensor, *rest: torch.Tensor) -> Any:
        for _ in range(NUM_LAYERS):
            x = layer(x, *rest)
        return x

    with mock.patch.object(Repeats, "find", spy):
        return capture(model, *args, axes=axes), repeated


def computing(got: Captured) -> list[fx.Node]:
    return [n for n, facts in got.facts.nodes.items() if facts.calls]


def in_bf16(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ W
    return (y @ W.bfloat16()).float()


def cached(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    cache[:, 1:] = x[:, None]
    return x + cache.sum(1)


REPEATED = {
    "products": (lambda x: F.gelu(x @ W) @ W + x, (torch.randn(B, H),)),
    "views": (lambda x: x.view(-1, S, 2, H // 2).transpose(1, 2).reshape(-1, S, H) + 1, (torch.randn(B, S, H),)),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x, x), (torch.randn(B, 2, S, H),)),
    "in place": (lambda x: torch.sin(x).mul_(2).add_(x), (torch.randn(B, H),)),
    "autocast": (in_bf16, (torch.randn(B, H),)),
    "a cache": (cached, (torch.randn(B, H), torch.zeros(B, 3, H))),
    "mixes rows": (lambda x: x - x.mean(0), (torch.randn(B, H),)),
    "several results": (lambda x: torch.cat(x.chunk(2, 1)[::-1], 1), (torch.randn(B, H),)),
}


@pytest.mark.parametrize("name", REPEATED)
def test_equal_layers_are_run_once(name: str):
    layer, args = REPEATED[name]
    got, repeated = run(layer, *args)
    nodes = computing(got)
    assert len(nodes) % NUM_LAYERS == 0
    # what the first layer takes is an input, which Dynamo has under another sign: the second one may have to be run, too
    assert {*nodes[2 * len(nodes) // NUM_LAYERS :]} <= repeated
    assert not {*nodes[: len(nodes) // NUM_LAYERS]} <= repeated


def test_what_is_shared_tells_nodes_apart():
    """The same shapes, and another memory: x + x is not x + y, and a change of one of two views is seen by the other."""
    got, _ = run(lambda x, y: (x + y) + (x + x), torch.randn(B, H), torch.randn(B, H))
    sums = [n for n in computing(got) if n.target is operator.add]
    assert {len(got.facts.nodes[n].reads) for n in sums} == {1, 2}


def test_the_batch_tells_nodes_apart():
    """One has a row per row of the batch, the other as many rows, always."""
    weight = torch.randn(B, H)
    got = capture(lambda x, y: (x.sum(0), y.sum(0)), torch.randn(B, H), weight, axes=(0, None))
    first, second = [facts for facts in got.facts.nodes.values() if facts.calls]
    assert "reduces over the batch" in first.unsplittable
    assert not second.unsplittable


# -- what is run every time


def is_run_in_each_layer(layer: Callable[..., Any], name: str, *args: torch.Tensor) -> bool:
    got, repeated = run(layer, *args)
    named = [n for n, facts in got.facts.nodes.items() if any(name in call for call in facts.calls)]
    return len(named) >= NUM_LAYERS and not repeated & set(named)


def test_runs_what_is_random():
    with mock.patch("tests.cpu.in_parts.check_in_parts"):  # whose numbers differ from run to run
        assert is_run_in_each_layer(lambda x: F.dropout(x, 0.5), "dropout", torch.randn(B, H))


@torch.library.custom_op("repeatstest::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


twice.register_fake(torch.empty_like)


def test_runs_what_a_users_rule_judges():
    """The rule may know more than the op's arguments."""
    register_split_rule(torch.ops.repeatstest.twice, rowwise)
    assert is_run_in_each_layer(lambda x: torch.ops.repeatstest.twice(x), "repeatstest", torch.randn(B, H))


def test_begins_anew_where_a_shape_changes_in_place():
    """Dynamo's fakes have the last shape."""

    def layer(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        y.unsqueeze_(1)
        return y.squeeze(1) * 2

    with mock.patch("tests.cpu.in_parts.check_in_parts"):  # a part's own view would change
        got, repeated = run(layer, torch.randn(B, H))
    assert not repeated
    sums = [got.facts.fake[n] for n in computing(got) if n.target is operator.add]
    assert len(sums) == NUM_LAYERS
    assert all(len(fake.shape) == 3 for fake in sums)
