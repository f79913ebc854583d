"""Which ops may run on a slice of the batch. Cases are data; the oracle runs every captured graph in uneven parts, as the
analysis says it may, and compares with the same graph run whole: a node that is wrongly called splittable fails there."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from dynaflow.batching import analyse, register_split_rule, rowwise
from tests.cpu.in_parts import B, Captured, H, S, capture

# ---------------------------------------------------------------------------- cases


def x2() -> torch.Tensor:
    return torch.randn(B, H)


def x3() -> torch.Tensor:
    return torch.randn(B, S, H)


def sbh() -> torch.Tensor:
    return torch.randn(S, B, 2, H)


def image() -> torch.Tensor:
    return torch.randn(B, 4, 6, 6)


def pages() -> torch.Tensor:
    return torch.zeros(9, H)


def ids(high: int = 7, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape or (B, S))


def packed(x: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor | None, **options: Any) -> torch.Tensor:
    """The batch are queries of one row; S heads."""
    keys = keys.expand(1, S, *keys.shape)
    return F.scaled_dot_product_attention(x.transpose(0, 1)[None], keys, keys, mask if mask is None else mask[None, None], **options)


W = torch.randn(H, H)
TABLE = torch.randn(7, H)

# name, function, arguments, why it must be refused ("": it must pass); a fifth entry says where the batch is
OK = ""
CASES: list[tuple[Any, ...]] = [
    # pointwise
    ("pointwise", lambda x, y: torch.sigmoid(x) * y + 1, (x2, x2), OK),
    ("pointwise: broadcast weight", lambda x: x * W[0] + W[1], (x3,), OK),
    ("pointwise: two alignments", lambda x, y: x[:, None] * y[None], (x2, x2), "combines different rows"),
    ("pointwise: batch is not dim 0", lambda x: x * W[0][:, None] + 1, (lambda: torch.randn(H, B),), OK, (1,)),
    ("number: divides by the batch", lambda x: x / x.shape[0], (x2,), "uses the batch size as a number"),
    ("number: divides by the width", lambda x: x / x.shape[1], (x2,), OK),
    ("number: square root of the batch", lambda x: x * math.sqrt(x.shape[0]), (x2,), "uses the batch size as a number"),
    ("number: filled with the batch", lambda x: x + x.new_full((H,), x.shape[0]), (x2,), "uses the batch size as a number"),
    ("number: as a tensor", lambda x: x + torch.tensor(x.shape[0]), (x2,), "no rule for aten.scalar_tensor"),
    ("number: checked", lambda x: (torch._check(x.shape[0] + x.shape[1] < 4096), x + 1)[1], (x2,), "checks the batch size"),
    # reductions, and ops along a dim
    ("reduce: features", lambda x: x.mean(-1) + x.sum(2) + x.amax(-1) + x.std(-1), (x3,), OK),
    ("reduce: batch", lambda x: x.mean(0), (x2,), "reduces over the batch (aten.mean.dim)"),
    ("reduce: everything", lambda x: x / x.abs().max(), (x2,), "reduces over the batch"),
    ("reduce: norm over features", lambda x: F.normalize(x, dim=1), (x2,), OK),
    ("reduce: norm over the batch", lambda x: F.normalize(x, dim=0), (x2,), "reduces over the batch"),
    ("reduce: argmax", lambda x: x.argmax(-1), (x2,), OK),
    ("reduce: argmax of the batch", lambda x: x.argmax(0), (x2,), "reduces over the batch"),
    ("reduce: any, all, logsumexp", lambda x: (x > 0).any(1) & (x < 1).all(1) & (x.logsumexp(-1) > 0), (x2,), OK),
    ("reduce: equal", lambda x: torch.where((x == x).all(), x, 0), (x2,), "reduces over the batch"),
    ("along: softmax", lambda x: x.softmax(-1).log_softmax(1).cumsum(1), (x3,), OK),
    ("along: softmax of the batch", lambda x: x.softmax(0), (x2,), "works along the batch"),
    ("along: sort and topk", lambda x: (x.sort(-1).values, x.topk(2).indices), (x2,), OK),
    ("along: sort of the batch", lambda x: x.sort(0).values, (x2,), "works along the batch"),
    ("along: cumsum of the batch", lambda x: x.cumsum(0), (x2,), "works along the batch"),
    ("along: flip and roll", lambda x: x.flip(1).roll(2, 1), (x2,), OK),
    ("along: flip the batch", lambda x: x.flip(0), (x2,), "picks rows"),
    ("along: roll everything", lambda x: x.roll(1), (x2,), "picks rows"),
    ("along: fft", lambda x: torch.fft.rfft(x, dim=1).abs(), (x3,), OK),
    ("along: fft of the batch", lambda x: torch.fft.fft(x, dim=0).abs(), (x2,), "works along the batch"),
    ("along: triangle inside a row", lambda x: x.tril() + x.triu(1), (x3,), OK),
    ("along: triangle over rows", lambda x: x.tril(), (x2,), "depends on the row number"),
    ("loss: by element", lambda x, y: F.mse_loss(x, y, reduction="none"), (x2, x2), OK),
    ("loss: mean", lambda x, y: F.mse_loss(x, y), (x2, x2), "reduces over the batch"),
    ("loss: cross entropy by row", lambda x, y: F.cross_entropy(x, y, reduction="none"), (x2, lambda: ids(H, B)), OK),
    ("loss: cross entropy", lambda x, y: F.cross_entropy(x, y), (x2, lambda: ids(H, B)), "reduces over the batch"),
    # views
    ("view: fold into rows and back", lambda x: (x.view(-1, H) @ W).view(x.shape[0], S, H), (x3,), OK),
    ("view: heads", lambda x: x.view(x.shape[0], S, 2, 4).transpose(1, 2).reshape(x.shape[0] * 2, S, 4), (x3,), OK),
    ("view: batch inside", lambda x: x.reshape(-1), (lambda: torch.randn(S, B),), "interleaves rows", (1,)),
    ("view: batch inside, transposed first", lambda x: x.t().reshape(-1), (lambda: torch.randn(S, B),), OK, (1,)),
    ("view: other grouping", lambda x: x.view(S, -1), (lambda: torch.randn(B, S),), "interleaves rows"),
    ("view: permute, movedim, unsqueeze", lambda x: x.permute(2, 0, 1).movedim(1, 0).unsqueeze(0), (x3,), OK),
    ("view: squeeze another dim", lambda x: x.unsqueeze(1).squeeze(1), (x2,), OK),
    ("view: squeeze everything", lambda x: x.unsqueeze(1).squeeze(), (x2,), "squeezes the batch"),
    ("view: complex", lambda x: torch.view_as_real(torch.view_as_complex(x.view(-1, H // 2, 2)) * 2j), (x2,), OK),
    ("view: expand a row", lambda x: x + W[:1].expand(x.shape[0], H), (x2,), OK),
    ("view: expand the batch against itself", lambda x: x.unsqueeze(0).expand(x.shape[0], -1, -1) + 1, (x2,), "mixes rows"),
    ("view: repeat a row", lambda x: x + W[:1].repeat(x.shape[0], 1), (x2,), OK),
    ("view: repeat the batch", lambda x: x.repeat(2, 1), (x2,), "combines different rows"),
    ("view: repeat inside a row", lambda x: x.repeat(1, 2), (x2,), OK),
    ("view: repeat_interleave", lambda x: x.repeat_interleave(3, dim=0) + 1, (x2,), OK),
    ("view: as_strided", lambda x: x.as_strided((x.shape[0],), (H,)), (x2,), "no rule for aten.as_strided"),
    ("view: unfold inside a row", lambda x: x.unfold(1, 3, 1).sum(-1), (x2,), OK),
    ("view: unfold the batch", lambda x: x.unfold(0, 3, 1).sum(-1), (x2,), "picks rows"),
    # slices and joins
    ("slice: features", lambda x: x[:, 2:4] + x[..., -2:], (x2,), OK),
    ("slice: all rows", lambda x: x[:] + x[: x.shape[0]], (x2,), OK),
    ("slice: without the first row", lambda x: x[1:] - x[:-1], (x2,), "picks rows"),
    ("slice: half of the rows", lambda x: x[: x.shape[0] // 2], (x2,), "picks rows"),
    ("slice: every other row", lambda x: x[::2], (x2,), "picks rows"),
    ("slice: rows of a table", lambda x: x + torch.ones(64, H).cumsum(0)[: x.shape[0]], (x2,), "depends on the row number"),
    ("slice: positions that follow the batch", lambda x: last_two(x, x.shape[0]), (x2,), "depends on the row number"),
    ("select: a position", lambda x: x[:, 0] + x[:, -1], (x3,), OK),
    ("select: a row", lambda x: x - x[0], (x2,), "picks rows"),
    ("split: features", lambda x: sum(x.split(2, dim=1)) + sum(x.chunk(4, dim=1)) + sum(x[:, :2].unbind(1))[:, None], (x2,), OK),
    ("split: rows", lambda x: x[: 2 * (x.shape[0] // 2)].chunk(2)[0], (x2,), "picks rows"),
    ("join: features", lambda x, y: torch.cat([x, y], 1) + torch.stack([x, y], 1).flatten(1), (x2, x2), OK),
    ("join: rows", lambda x, y: torch.cat([x, y]), (x2, x2), "joins rows"),
    ("join: stack in front", lambda x, y: torch.stack([x, y]).sum(0), (x2, x2), OK),
    ("join: with an empty cache", lambda x: torch.cat([torch.tensor([]), x], -2), (x3,), OK),
    ("pad: features", lambda x: F.pad(x, (1, 1)), (x2,), OK),
    ("pad: rows", lambda x: F.pad(x, (0, 0, 1, 0)), (x2,), "works along the batch"),
    # constants
    ("constant: zeros of the batch", lambda x: torch.zeros(x.shape[0], 3) + x[:, :3] + x.new_ones(x.shape[0], 1), (x2,), OK),
    ("constant: row numbers", lambda x: x + torch.arange(x.shape[0])[:, None], (x2,), "depends on the row number"),
    ("constant: positions", lambda x: x + torch.arange(H), (x2,), OK),
    ("constant: eye", lambda x: torch.eye(x.shape[0]) @ x, (x2,), "depends on the row number"),
    ("constant: zeros_like, empty, fill", lambda x: torch.empty_like(x).fill_(2) + torch.zeros_like(x), (x2,), OK),
    # products
    ("product: weight on the right", lambda x: x @ W + F.linear(x, W, W[0]), (x3,), OK),
    ("product: weight on the left", lambda x: W @ x, (lambda: torch.randn(H, B),), OK, (1,)),
    ("product: over the batch", lambda x: x.t() @ x, (x2,), "reduces over the batch (aten.mm.default)"),
    ("product: every row with every row", lambda x: (x @ x.t()).softmax(-1) @ x, (x2,), "combines different rows"),
    ("product: by row", lambda x, y: x @ y.transpose(1, 2), (x3, x3), OK),
    ("product: the batch is the second dim", lambda x: F.linear(x, W, W[0]) + x @ W + x @ x.mT @ x, (sbh,), OK, (1,)),
    ("product: the batch is flattened by hand", lambda x: x.reshape(-1, H) @ W, (sbh,), "interleaves rows", (1,)),
    ("product: baddbmm", lambda x, y: torch.baddbmm(y, x, W.expand(x.shape[0], H, H)), (x3, x3), OK),
    ("product: addmm with a row bias", lambda x, y: torch.addmm(y, x, W), (x2, x2), OK),
    ("product: einsum by row", lambda x, y: torch.einsum("bsh,bth->bst", x, y), (x3, x3), OK),
    ("product: einsum over the batch", lambda x, y: torch.einsum("bsh,bth->st", x, y), (x3, x3), "reduces over the batch"),
    ("conv: 2d", lambda x: F.conv2d(x, CONV, CONV_BIAS, padding=1), (image,), OK),
    ("conv: transposed", lambda x: F.conv_transpose2d(x, CONV), (image,), OK),
    ("conv: the batch is the channels", lambda x: F.conv1d(x[None], torch.ones(len(x), 1, 1), groups=len(x)), (x2,), "as a number"),
    ("cdist: by row, and to a table", lambda x: torch.cdist(x, x * 2) + torch.cdist(x[:, 0], W)[:, None, :1], (x3,), OK),
    ("cdist: every row with every row", lambda x: torch.cdist(x, x), (x2,), "combines different rows"),
    ("pool", lambda x: F.max_pool2d(x, 2) + F.avg_pool2d(x, 2) + F.adaptive_avg_pool2d(x, 1), (image,), OK),
    ("pool: channels last", lambda x: F.adaptive_avg_pool2d(x.to(memory_format=torch.channels_last) + 1, 1), (image,), OK),
    ("pool: the batch is a picture", lambda x: F.avg_pool1d(x, 3), (lambda: torch.randn(H, B),), "works along the batch", (1,)),
    ("interpolate", lambda x: F.interpolate(x, scale_factor=2) + F.interpolate(x, scale_factor=2, mode="bilinear"), (image,), OK),
    ("attention", lambda q, k, v: F.scaled_dot_product_attention(q, k, v), (image, image, image), OK),
    ("attention: causal", lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), (image,), OK),
    ("attention: mask by row", lambda q, m: F.scaled_dot_product_attention(q, q, q, m), (image, lambda: torch.rand(B, 1, 6, 6) > 0.2), OK),
    ("attention: mask for all", lambda q: F.scaled_dot_product_attention(q, q, q, MASK), (image,), OK),
    ("attention: the batch is the sequence", lambda q: F.scaled_dot_product_attention(q[None], q[None], q[None]), (x3,), OK),
    ("attention: queries packed into one row", lambda q, m: packed(q, TABLE[:6], m), (x3, lambda: torch.rand(B, 6) > 0.2), OK),
    ("attention: packed, one mask for all", lambda q: packed(q, TABLE[:6], MASK[:1].bool()), (x3,), OK),
    ("attention: packed keys", lambda q: packed(q, q[:, 0], None), (x3,), "combines different rows"),
    ("attention: packed and causal", lambda q: packed(q, TABLE[:6], None, is_causal=True), (x3,), "combines different rows"),
    ("attention: over the batch", lambda q: F.scaled_dot_product_attention(*[q.transpose(0, 1)] * 3), (x3,), "combines different rows"),
    ("attention: scale of the batch", lambda q: F.scaled_dot_product_attention(q, q, q, scale=1 / q.shape[0]), (image,), "as a number"),
    ("attention: dropout", lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=0.5), (image,), "random"),
    # norms
    ("norm: layer and rms", lambda x: F.layer_norm(x, (H,), W[0], W[1]) + F.rms_norm(x, (H,), W[0]), (x3,), OK),
    ("norm: layer norm over the batch", lambda x: F.layer_norm(x.t(), (x.shape[0],)), (x2,), "batch"),
    ("norm: group", lambda x: F.group_norm(x, 2), (image,), OK),
    ("norm: instance", lambda x: F.instance_norm(x, weight=W[0, :4], bias=W[1, :4]), (image,), OK),
    ("norm: batch norm in eval mode", lambda x: F.batch_norm(x, W[0, :4], W[1, :4] ** 2), (image,), OK),
    ("norm: batch norm in training", lambda x: F.batch_norm(x, None, None, training=True), (image,), "reduces over the batch"),
    # lookups
    ("embedding", lambda i: F.embedding(i, TABLE), (ids,), OK),
    ("embedding: the table is the batch", lambda t: F.embedding(torch.arange(2), t), (x2,), "combines different rows"),
    ("index: table", lambda i: TABLE[i] + TABLE[None, i, 0:1][0], (ids,), OK),
    ("index: positions", lambda x: x[:, [0, 2]] + x[:, POSITIONS], (x3,), OK),
    ("index: positions apart", lambda x: x[:, POSITIONS, :, POSITIONS], (image,), OK),
    ("index: row and position", lambda x, i: x[torch.arange(x.shape[0]), i], (x3, lambda: ids(S, B)), "picks rows"),
    ("index: rows", lambda x, i: x[i], (x2, lambda: ids(B, B)), "picks rows"),
    ("index: mask", lambda x: torch.where(x > 0, x, 0).masked_fill(x > 1, 5.0), (x2,), OK),
    ("gather: inside a row", lambda x, i: x.gather(1, i), (x2, lambda: ids(H, B, 3)), OK),
    ("gather: over rows", lambda x, i: x.gather(0, i), (x2, lambda: ids(B, B, H)), "picks rows"),
    ("gather: from a table by row", lambda i: TABLE[:, :S].gather(0, i), (ids,), OK),
    ("gather: row i from row i of a table", lambda i: torch.ones(64, 7).cumsum(0).gather(1, i), (ids,), "combines different rows"),
    ("index_select: positions", lambda x: x.index_select(1, POSITIONS), (x2,), OK),
    ("index_select: rows", lambda x: x.index_select(0, POSITIONS), (x2,), "picks rows"),
    ("index_select: a table", lambda i: TABLE.index_select(0, i), (lambda: ids(7, B),), OK),
    ("scatter: inside a row", lambda x, i: x.scatter(1, i, 0.5).scatter_add(1, i, x), (x2, lambda: torch.arange(H).repeat(B, 1)), OK),
    ("scatter: over rows", lambda x, i: x.scatter(0, i, 0.5), (x2, lambda: ids(B, B, 3)), "picks rows"),
    ("one_hot", lambda i: F.one_hot(i, 7), (ids,), OK),
    ("bucketize", lambda x: torch.bucketize(x, torch.tensor([0.0, 1.0])), (x2,), OK),
    # randomness
    ("random: dropout in training", lambda x: F.dropout(x, 0.5), (x2,), "random"),
    ("random: dropout in eval mode", lambda x: F.dropout(x, 0.5, training=False), (x2,), OK),
    ("random: noise of no batch", lambda x: x + torch.rand(H), (x2,), "random (aten.rand.default)"),
    # writes
    ("write: rows of a new tensor", lambda x: torch.zeros(x.shape[0], H).copy_(x).mul_(2).add_(x), (x2,), OK),
    ("write: cache", lambda x, c: c.index_copy_(1, POSITIONS, x[:, :2]) + 1, (x3, x3), OK),
    ("write: cache by index_put", lambda x, c: c.index_put_((ALL_ROWS, POSITIONS), x[:, :2]), (x3, x3), "picks rows"),
    ("write: cache by assignment", lambda x, c: set_positions(c, x), (x3, x3), OK),
    ("write: rows of the cache", lambda x, c: set_rows(c, x), (x3, x3), "picks rows"),
    ("write: batch into state", lambda x, w: w.copy_(x.sum(0)) + x, (x2, lambda: torch.zeros(H)), "reduces over", (0, None)),
    ("write: paged cache", lambda x, i, w: w.index_put_((i,), x), (x2, lambda: torch.randperm(B), pages), "changes state", (0, 0, None)),
    ("write: a shape", lambda x: x.clone().transpose_(1, 2) + 1, (x3,), "changes a shape in place"),
    ("write: in place without a tag", lambda x: x.clone().copysign_(W[0]).masked_fill_(W[1] > 0, 2.0), (x2,), OK),
    ("write: one row of the batch", lambda x: set_first_row(x.clone()), (x2,), "batch"),
]  # fmt: skip

CONV, CONV_BIAS = torch.randn(4, 4, 3, 3), torch.randn(4)
MASK = torch.rand(6, 6) > 0.2
POSITIONS = torch.tensor([0, 2])
ALL_ROWS = torch.arange(B)[:, None]


def last_two(x: torch.Tensor, end: int) -> torch.Tensor:
    return x[:, end - 3 : end - 1] + 1


def set_positions(cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    cache[:, 1:3] = x[:, :2]
    cache[:, POSITIONS] = x[:, 2:4]
    return cache + x


def set_rows(cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    cache[POSITIONS] = x[:2]
    return cache + x


def set_first_row(x: torch.Tensor) -> torch.Tensor:
    x[0].zero_()
    return x


@pytest.mark.parametrize("name, fn, make, reason, axes", [(*c, None)[:5] for c in CASES], ids=[c[0] for c in CASES])
def test_case(name, fn, make, reason, axes):
    torch.manual_seed(0)
    captured = capture(fn, *(m() for m in make), axes=axes)
    if reason:
        assert any(reason in r for r in captured.reasons.values()), captured.reasons
    else:
        assert not captured.reasons


TOO_MUCH = [("flip", lambda x: x.flip(0)), ("_softmax", lambda x: x.softmax(0)), ("sum", lambda x: x + x.sum(0, True))]


@pytest.mark.parametrize("op, fn", TOO_MUCH)
def test_the_oracle_catches_a_rule_that_accepts_too_much(op, fn):
    from dynaflow.batch_rules import table

    too_much = table.Entry(lambda call: call.axis(call.outs[0]))
    with mock.patch.dict(table._ours, {f"aten::{op}": too_much}), pytest.raises(AssertionError, match="not close|not equal"):
        capture(fn, x2())


# ---------------------------------------------------------------------------- memory


def test_storages_are_numbered_by_appearance_and_followed_through_views():
    def fn(x, w):
        y = x @ w  # makes 2
        z = y.view(-1, 2, 4).transpose(1, 2)  # views of 2
        y.mul_(2)  # changes 2, under the views
        return z + 1  # makes 3

    got = capture(fn, x2(), W, axes=(0, None))
    x, w = got.node("l_x_"), got.node("l_w_")
    assert [got.facts.storage(got.facts.fake[n]) for n in (x, w)] == [0, 1]
    product = got["matmul"]
    assert (product.reads, product.writes, product.makes, product.is_view) == ({0, 1}, set(), {2}, False)
    assert (product.macs, product.calls) == (B * H * H, ("aten.mm.default",))
    for name in ("view", "transpose"):
        assert (got[name].reads, got[name].makes, got[name].is_view) == ({2}, set(), True)
    assert (got["mul_"].reads, got["mul_"].writes, got["mul_"].is_view) == ({2}, {2}, False)
    assert (got["add"].reads, got["add"].makes) == ({2}, {3})
    assert got.facts.axis[got.node("transpose")] == 0


def test_memory_made_and_changed_inside_a_node_is_no_write():
    got = capture(lambda x: torch.zeros(x.shape[0], 3) + torch.full((3,), 2.0) + x[:, :3], x2())
    assert all(not facts.writes for facts in got.facts.nodes.values())


def test_an_input_that_changes_its_shape_in_place_is_left_as_it_was():
    gm = fx.symbolic_trace(lambda w: w.unsqueeze_(0) + 1)
    with torch._subclasses.FakeTensorMode():
        fake = torch.empty(H)
    facts = analyse(gm, [fake], {}, ())
    assert fake.shape == (H,)
    assert [list(facts.nodes.values())[1].writes, facts.storage(fake)] == [{0}, 0]


def test_a_counter_is_state_and_batch_statistics_are_not_only_that():
    got = capture(nn.BatchNorm1d(H), x2())
    assert got["add_"].writes_state
    assert got["add_"].unsplittable == "changes state without a batch axis (aten.add_.Tensor)"
    assert not got["batch_norm"].writes_state
    assert "reduces over the batch" in got["batch_norm"].unsplittable
    assert len(got["batch_norm"].writes) == 2


# ---------------------------------------------------------------------------- what the caller says


def test_several_symbols_may_mean_the_batch():
    got = capture(lambda x, y: x.sum(1)[:, None] @ torch.ones(1, 2) + 0 * F.embedding(y, TABLE)[:, 0, :2].sum(), x2(), ids())
    assert any("reduces over the batch" in r for r in got.reasons.values())


def test_rejects_a_batch_whose_size_became_a_constant():
    """Said to carry the batch, but its shape does not: it must not be taken for a weight."""
    torch._dynamo.reset()
    found = []

    def backend(gm, _):
        fakes = [n.meta["example_value"] for n in gm.graph.nodes if n.op == "placeholder"]
        found.append(Captured(gm, analyse(gm, fakes, {"l_x_": 0, "l_y_": 0}, fakes[1].shape[0].node.expr.free_symbols)))
        return gm.forward

    x, y = x2(), torch.randn(3, H)
    torch._dynamo.maybe_mark_dynamic(x, 0)
    torch.compile(lambda x, y: (x + 1, y + 1), backend=backend)(x, y)
    assert found[0]["add"].unsplittable == ""
    assert "cannot be cut by rows" in found[0]["add_1"].unsplittable


# ---------------------------------------------------------------------------- custom ops


@torch.library.custom_op("batchtest::scale", mutates_args=())
def scale(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    return x * by


@torch.library.custom_op("batchtest::store", mutates_args=("cache", "out"))
def store(x: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor, out: torch.Tensor) -> None:
    cache[slots] = x
    out.copy_(x)


scale.register_fake(lambda x, by: torch.empty_like(x))
store.register_fake(lambda x, slots, cache, out: None)


@pytest.fixture
def no_user_rules():
    from dynaflow.batch_rules import table

    with mock.patch.dict(table._users, clear=True):
        yield


def test_a_custom_op_needs_a_rule_only_where_it_meets_the_batch(no_user_rules):
    got = capture(lambda x: torch.ops.batchtest.scale(x, torch.ops.batchtest.scale(W[0], W[1])), x2())
    assert got.reasons == {"scale_1": "no rule for batchtest.scale"}
    register_split_rule(torch.ops.batchtest.scale, rowwise)
    assert not capture(lambda x: torch.ops.batchtest.scale(x, torch.ops.batchtest.scale(W[0], W[1])), x2()).reasons


def test_a_rule_is_checked_against_the_shapes(no_user_rules):
    register_split_rule(torch.ops.batchtest.scale, lambda call: 1)
    assert "mixes rows" in capture(lambda x: torch.ops.batchtest.scale(x, W[0]), x2()).reasons["scale"]


def test_a_custom_op_that_writes_a_cache_needs_more_than_rowwise(no_user_rules):
    def fn(x, slots, cache):
        out = torch.empty_like(x)
        torch.ops.batchtest.store(x, slots, cache, out)
        return out + 1

    def run():
        return capture(fn, x2(), torch.arange(B), torch.zeros(9, H), axes=(0, 0, None))["store"]

    assert run().unsplittable == "no rule for batchtest.store"
    register_split_rule(torch.ops.batchtest.store, rowwise)
    assert run().unsplittable == "changes state without a batch axis (batchtest.store.default)"
    register_split_rule(torch.ops.batchtest.store, lambda call: None)
    assert run().unsplittable == ""
    assert run().writes == {2, 3}


# ---------------------------------------------------------------------------- brackets and higher-order ops


def test_autocast_and_grad_mode_are_brackets_that_touch_nothing():
    def fn(x):
        with torch.autocast("cpu", torch.bfloat16), torch.enable_grad():
            y = x @ W
        return y.float() + torch.get_default_dtype().itemsize

    got = capture(fn, x2())
    assert not got.reasons
    assert got.facts.fake[got.node("matmul")].dtype == torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")


def test_inside_vmap_nothing_is_split():
    got = capture(lambda x: torch.vmap(lambda row: row.cumsum(0) * 2)(x + 1) - 1, x2())
    assert set(got.reasons.values()) == {"inside vmap"}
    assert got["cumsum"].unsplittable
    assert not got["sub"].unsplittable


def test_checkpoint_is_looked_through():
    from torch.utils.checkpoint import checkpoint

    got = capture(lambda x: checkpoint(lambda y: (y @ W).relu(), x, use_reentrant=False), x2())
    assert not got.reasons
    assert got["tag_activation_checkpoint"].macs == B * H * H
    got = capture(lambda x: checkpoint(lambda y: y - y.mean(0), x, use_reentrant=False), x2())
    assert "reduces over the batch" in got.reasons["tag_activation_checkpoint"]


def test_cond_is_opaque():
    got = capture(lambda x: torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,)), x2())
    assert got["cond"].unsplittable == "no rule for cond"
    assert not got["cond"].writes


def test_flex_attention_may_not_know_its_row():
    from torch.nn.attention.flex_attention import flex_attention

    query = torch.randn(B, 2, 16, 16)
    assert not capture(lambda q: flex_attention(q, q, q, lambda s, b, h, i, j: s + h - i), query)["flex_attention"].unsplittable
    got = capture(lambda q: flex_attention(q, q, q, lambda s, b, h, i, j: s + b), query)
    assert "depends on the row number" in got["flex_attention"].unsplittable


def test_sizes_that_depend_on_data():
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        got = capture(lambda x: x.nonzero().sum(), x2())
        assert "depends on the data" in got.reasons["nonzero"]
        assert capture(lambda x: x * x[:, :1].max().item(), x2())["max"].unsplittable
        # experts: rows are picked and put back, what is between belongs to no row
        got = capture(lambda x: torch.zeros_like(x).index_add_(0, (x[:, 0] > 0).nonzero()[:, 0], x[x[:, 0] > 0] @ W), x2())
        assert got["index_add_"].unsplittable
        assert (got["matmul"].unsplittable, got["matmul"].macs) == ("", H * H)


def test_a_node_that_cannot_be_run_costs_only_itself():
    with mock.patch("dynaflow.batching._Listener._note", side_effect=[KeyError("no"), None]):
        got = capture(lambda x: x.exp() + 1, x2(), is_analysed_twice=False)
    assert got.reasons == {"exp": "could not be analysed: KeyError"}
    assert got["exp"].writes == {0}
    assert got.facts.axis[got.node("exp")] == 0


# ---------------------------------------------------------------------------- collectives


@pytest.fixture
def fake_ranks():
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield dist
    dist.destroy_process_group()


def test_collectives(fake_ranks):
    import torch.distributed._functional_collectives as fc

    def reduce(x):
        y = x * 2
        fake_ranks.all_reduce(y)
        return y + 1

    got = capture(reduce, x2())
    assert not got.reasons
    call, wait = got["all_reduce"], got["wait_tensor"]
    assert call.uses == (f"group:{fake_ranks.group.WORLD.group_name}",)
    assert wait.writes == call.makes  # the bytes arrive in what the call made
    got = capture(lambda x: fc.all_gather_tensor(x, 0, fake_ranks.group.WORLD) + 1, x2())
    assert any("exchanges rows between ranks" in r for r in got.reasons.values())
    got = capture(lambda x: fc.all_gather_tensor(x, 0, fake_ranks.group.WORLD) + 1, torch.randn(4, B), axes=(1,))
    assert not got.reasons


# ---------------------------------------------------------------------------- models


def tiny(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    size = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    llama = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    if name == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**size, **llama, num_key_value_heads=2)).eval()
    if name == "bert":
        return transformers.BertModel(transformers.BertConfig(**size, **llama)).eval()
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, n_embd=32, n_layer=1, n_head=4, n_positions=32)).eval()


@pytest.mark.parametrize("name, is_masked", [("llama", False), ("llama", True), ("bert", True), ("gpt2", False)])
def test_model(name, is_masked):
    """Everything in the layers may be split. What may not is row numbers: masks are built by indexing with them."""
    mask = {"attention_mask": (torch.arange(S) >= torch.tensor([0, 1, 0, 2, 0, 3])[:, None]).long()} if is_masked else {}
    got = capture(tiny(name), ids(60), **mask)
    print(f"{name}: {len(got.reasons)} of {len(got.facts.nodes)} nodes are unsplittable: {got.reasons}")
    for node, facts in got.facts.nodes.items():
        if facts.macs and "modules_" in str(node.all_input_nodes) or "attention" in str(facts.calls):
            assert not facts.unsplittable, node
    assert sum("attention" in str(f.calls) for f in got.facts.nodes.values()) == 1
    assert all("row number" in r or "picks rows" in r for r in got.reasons.values())
    assert len(got.reasons) <= 1 + is_masked


def test_model_with_a_static_cache():
    from transformers import StaticCache

    model = tiny("llama")
    cache = StaticCache(config=model.config, max_cache_len=16)
    with torch.no_grad():
        model(ids(60), past_key_values=cache)
    for layer in cache.layers:
        torch._dynamo.maybe_mark_dynamic(layer.keys, 0)
        torch._dynamo.maybe_mark_dynamic(layer.values, 0)
    got = capture(lambda token: model(token, past_key_values=cache).logits, ids(60, B, 1))
    print(f"decode: {got.reasons}")
    stores = [facts for node, facts in got.facts.nodes.items() if node.target == "index_copy_"]
    assert len(stores) == 2
    assert not any(facts.unsplittable for facts in stores)
    assert all(len(facts.writes) == 1 for facts in stores)
    counters = [facts for facts in got.facts.nodes.values() if facts.writes_state]
    assert len(counters) == 1
    assert len(got.reasons) <= len(counters) + 1


def test_wrappers_ops_are_not_taken_apart():
    """A nested tensor answers for its own dims, and has a product of its own."""
    graphs = []
    x = torch.nested.nested_tensor([torch.randn(3, H), torch.randn(5, H)], layout=torch.jagged)
    weight = torch.randn(H, H)
    with torch.no_grad():
        torch.compile(lambda x: F.linear(x, weight).relu(), backend=lambda gm, inputs: graphs.append(gm) or gm.forward)(x)
    (gm,) = graphs
    facts = analyse(gm, [n.meta["example_value"] for n in gm.graph.nodes if n.op == "placeholder"], {}, [])
    reasons = [info.unsplittable for info in facts.nodes.values()]
    assert not [r for r in reasons if "could not be analysed" in r]
    calls = [call for info in facts.nodes.values() for call in info.calls]
    assert calls == ["aten.linear.default", "aten.relu.default"]
