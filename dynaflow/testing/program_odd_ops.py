"""What a random program may do besides, where it is odd: what models do now and then."""

from __future__ import annotations

import functools
from typing import Any

from dynaflow.testing.program_ops import ODD, D, S, Scope, Var, _simple, op

# as in `program_ops`: weight, operand, result's shape, flags, texts
_TABLE: list[tuple[float, str, str, str, list[str]]] = [
    # comparisons and masks, of exact numbers
    (1, "exact", "same", "exact", [
        "torch.where(v > 0, v, 0.0)", "torch.where(v > 0, 1.0, -1.0).to(v.dtype)", "(v > 0).to(v.dtype) * v",
        "v.masked_fill(~(v > 0), 0.5)", "torch.where(v > 0, v, torch.tensor(0.25, dtype=v.dtype, device=v.device))",
        "((v > 0) & (v < 1)).to(v.dtype)", "torch.sign(v)", "((v > 0) ^ (v > 1)).to(v.dtype) + 1", "v.frac()", "v.round()",
        "v.isnan().to(v.dtype)"]),
    (0.6, "exact", "drop last", "exact float32", [
        "(v > 0).any(-1).float()", "(v > 0).all(-1).float()", "(v > 0).sum(-1).float()", "v.amin(-1).float()",
        "v.median(-1).values.float()", "v.kthvalue(1, -1).values.float()", "v.min(-1).indices.float() * 0.5"]),
    (0.6, "exact", "same", "exact", [
        "v.sort(dim=-1, stable=True).values", "v.topk(v.shape[-1], -1).values", "v.gather(-1, v.argsort(dim=-1, stable=True))",
        "v.sort(-1, descending=True).values", "v.take_along_dim(v.argmax(-1, keepdim=True), -1).expand_as(v).clone()",
        "torch.zeros_like(v).scatter(-1, (v > 0).long() % v.shape[-1], v)", "v.cummax(-1).values",
        "torch.zeros_like(v).scatter(-1, v.argmax(-1, keepdim=True), 1.0)",
        "torch.bucketize(v, torch.tensor([-0.5, 0.5], dtype=v.dtype, device=v.device)).to(v.dtype)"]),
    (0.6, "exact", "same", "exact int64", [
        "(v > 0).long()", "(v > 0).cumsum(-1)", "v.argsort(dim=-1, stable=True)", "v.clamp(-2, 2).round().long()"]),
    (0.6, "int", "same", "exact", [
        "v // 2", "v.clamp(min=1)", "v ^ 1", "v.abs() % 2", "v.int().long()", "torch.where(v > 1, v, 0)", "v << 1", "v.sort(-1).values"]),
    (0.6, "int", "same", "exact float32", [
        "v / 2", "v * 0.5", "v.bool().float()", "v.to(torch.uint8).float()", "v.float().mul_(0.5)"]),
    # other numbers
    (0.7, "float", "same", "exact", [
        "v.to(torch.bfloat16).to(v.dtype)", "v.half().to(v.dtype) * 0.5", "v.bfloat16().add(1).to(v.dtype)", "v.type_as(v).clone()",
        "(v.bfloat16() + v.half()).to(v.dtype)", "torch.view_as_real(torch.complex(v, -v))[..., 1]", "v.nan_to_num()",
        "torch.complex(v, v).conj().imag + 0", "torch.addcmul(v, v, v, value=0.0)"]),
    (0.5, "float", "same", "", [
        "torch.polar(torch.sigmoid(v), v).real + 0", "F.softplus(v)", "F.elu(v)", "F.hardswish(v)", "F.leaky_relu(v, 0.1)", "F.mish(v)",
        "F.logsigmoid(v)", "v.erf()", "torch.addcmul(v, v, v, value=0.1)", "torch.hypot(v, v)", "v.sigmoid().logit() * 0.2"]),
    # along the batch
    (0.7, "rows", "same", "", [
        "v.cumprod(a).clamp(-2, 2)", "torch.logcumsumexp(v, a) * 0.1", "v - v.median(a, keepdim=True).values", "v.sub(v.mean())",
        "v / (v.abs().sum(a, keepdim=True) + 1)", "v * v.shape[a] * 0.1", "v + v.numel() * 0.01", "F.normalize(v, dim=a)",
        "v.var(a, keepdim=True, unbiased=False) + v", "v - v.mean(a)[(slice(None),) * a + (None,)]", "v.sum_to_size(v.shape) * 1.0"]),
    (0.7, "rows", "same", "exact", [
        "v.cummax(a).values", "v.roll(v.shape[a] // 2, a)", "v.sort(dim=a, stable=True).values", "torch.stack(v.unbind(-1), -1)",
        "torch.cat([v.narrow(a, 0, 1), v.narrow(a, 0, v.shape[a] - 1)], a)", "v.movedim(a, 0).clone().movedim(0, a)",
        "v.index_select(a, torch.randperm(v.shape[a]).sort().values.to(v.device))", "torch.cat(list(v.split(2, a)), a)",
        "torch.cat(list(v.tensor_split(2, a))[::-1], a)", "v.repeat_interleave(2, a).narrow(a, 0, v.shape[a]).clone()",
        "v.swapaxes(a, -1).clone().swapaxes(a, -1)", "torch.cat([v, v], a).narrow(a, v.shape[a], v.shape[a])"]),
    (0.4, "rows", "drop a", "", [
        "v.std(a, unbiased=False)", "v.prod(a).clamp(-1, 1)", "v.logsumexp(a) * 0.1", "v.norm(dim=a)", "v.median(a).values"]),
    # windows, pads, views
    (0.6, "wide", "same", "exact", [
        "F.pad(v, (1, 0))[..., :-1]", "F.pad(v, (0, 1), value=0.5)[..., 1:]", "v.flip(-1)", "v.roll(1)", "v.view(v.shape).clone()",
        "torch.diff(v, dim=-1, prepend=v[..., :1])", "v.diff(dim=-1, append=v[..., -1:])", "torch.einsum('...i->...i', v) * 1.0",
        "v.mT.mT.clone()", "v[..., torch.arange(v.shape[-1], device=v.device).flip(0)]", "torch.tril(v) if v.ndim > 2 else v * 1.0"]),
    (0.5, "wide", "same", "view", [
        "v[..., None, :].squeeze(-2)", "v.unfold(-1, 1, 1).squeeze(-1)", "v.detach()", "v[...]", "v.view_as(v)", "v.mT.mT", "v.data",
        "v.view(torch.int32 if v.dtype == torch.float32 else torch.int64).view(v.dtype)", "v.movedim(-1, 0).movedim(0, -1)",
        "v.chunk(1, -1)[0]", "v.view(v.shape)", "torch.atleast_2d(v)", "v.narrow(-1, 0, v.shape[-1])", "v.real"]),
    (0.5, "wide", "same", "", [
        "v @ v.mT @ v * 0.1", "torch.tensordot(v, torch.eye(v.shape[-1], dtype=v.dtype, device=v.device), 1)", "torch.vmap(torch.sin)(v)",
        "torch.cross(F.pad(v, (0, 3))[..., :3], F.pad(v, (3, 0))[..., :3] + 1, dim=-1).sum(-1, keepdim=True) + v",
        "F.avg_pool1d(v, 3, 1, 1) if v.ndim in (2, 3) else v * 2.0", "F.max_pool1d(v, 3, 1, 1) if v.ndim in (2, 3) else v * 0.5",
        "F.glu(torch.cat([v, v], -1))", "F.cosine_similarity(v, v + 1, dim=-1).unsqueeze(-1) * v",
        "torch.softmax(v.masked_fill(torch.arange(v.shape[-1], device=v.device) > 1, float('-inf')), -1)"]),
    (0.5, "matrix", "same", "", [
        "torch.addmm(v, v, torch.ones(v.shape[1], v.shape[1], dtype=v.dtype, device=v.device), alpha=0.1)", "torch.outer(v[:, 0], v[0])",
        "v.t().contiguous().t() * 0.7", "torch.einsum('bi,ci->bc', v, v).tril().sum(1, keepdim=True) * 0.01 + v",
        "torch.triu(v @ v.t()).sum(0).unsqueeze(1) * 0.01 + v",
        "(torch.arange(v.shape[0])[:, None] <= torch.arange(v.shape[0])).to(v) @ v * 0.1"]),
]  # fmt: skip
ODD.extend((weight, functools.partial(_simple, operand, shape, flags, texts)) for weight, operand, shape, flags, texts in _TABLE)


@op(1.0, ODD)
def without_dims(s: Scope) -> Any:
    """What is computed of all, and used by all."""
    v = s.pick(lambda v: v.is_float and 0 not in v.shape)
    w = s.pick(lambda w: w.is_float and not w.shape)
    if v and w and v.dtype == w.dtype and s.rng.random() < 0.6:
        text = s.rng.choice(["{} * {}", "{} + {}", "{0} - {1}", "torch.add({}, {}, alpha=0.5)"])
        return s.new(text.format(v.name, w.name), v.shape, v, w)
    text = s.rng.choice(["{}.mean()", "{}.sum() * 0.1", "{}.flatten()[0]", "{}.amax()", "{}.norm()", "torch.tensor(0.5).to({})"])
    return v and s.new(text.format(v.name), (), v)


@op(1.2, ODD)
def masked_attention(s: Scope) -> Any:
    v = s.pick(lambda v: v.is_float and len(v.shape) == 3 and v.axis == 0 and v.width > 0 and 0 not in v.shape)
    if v is None:
        return None
    n, t, roll = v.name, int(v.shape[1]), s.rng.random()
    if roll < 0.2:
        return s.new(f"torch.bmm(torch.baddbmm({n} @ {n}.mT, {n}, {n}.mT, beta=0.5, alpha=0.1).softmax(-1), {n})", v.shape, v)
    if roll < 0.4 and v.dtype == "float32":
        layer = s.member(f"self.NAME = seeded(lambda: nn.MultiheadAttention({v.width}, 1, batch_first=True))")
        return s.new(f"{layer}({n} * 0.5, {n} * 0.5, {n}, need_weights=False)[0]", v.shape, v)
    mask = s.rng.choice([
        "is_causal=True", "scale=0.3", f"attn_mask=torch.ones({t}, {t}, dtype=torch.bool, device={n}.device).tril()",
        f"attn_mask=({n}.unsqueeze(1).sum(-1, keepdim=True) * 0).expand(-1, -1, -1, {t})", f"attn_mask=torch.zeros({t}, {t}).to({n})",
        f"attn_mask=torch.zeros({n}.shape[0], 1, {t}, {t}).masked_fill(torch.arange({t}) > 1, float('-inf')).to({n})",
    ])  # fmt: skip
    heads = f"{n}.unsqueeze(1)"
    return s.new(f"F.scaled_dot_product_attention({heads}, {heads}, {heads}, {mask}).squeeze(1)", v.shape, v)


@op(1.0, ODD)
def filled(s: Scope) -> Any:
    """Memory that is made by the batch's size, and filled bit by bit."""
    v = s.pick(lambda v: v.is_float and v.axis >= 0 and v.width > 1)
    if v is None:
        return None
    text = s.rng.choice(["torch.zeros_like({})", "{0}.new_zeros({0}.shape)", "torch.ones({0}.shape, dtype={0}.dtype, device={0}.device)"])
    made = s.new(text.format(v.name), v.shape, v, exact=True)
    m, n = made.name, v.name
    s.line(s.rng.choice([
        f"{m}[..., 1:] = {n}[..., 1:]", f"{m}[..., 0].add_({n}[..., 1])", f"{m}[..., ::2] += {n}[..., ::2]", f"{m}[..., :1] = 0.5",
        f"{m}.narrow(-1, 0, 1).copy_({n}.narrow(-1, 1, 1))", f"for i in range({v.width}): {m}[..., i] = {n}[..., {v.width} - 1 - i]",
    ]))  # fmt: skip
    return made


@op(1.5, ODD)
def scattered(s: Scope) -> Any:
    v = s.pick(lambda v: v.is_float and v.is_dense and v.shape[:-1] == ("1B",) and v.width > 1)
    w = s.same_as(v, other_root=True, exact=True)
    if v is None or w is None:
        return None
    n, m, rows = v.name, w.name, _rows(v)
    return s.change(v, s.rng.choice([
        f"{n}.index_put_(({rows} // 2,), {m}, accumulate=True)", f"{n}.index_put_(({rows},), {m}.flip(0))", f"{n}.exp_()",
        f"{n}.index_put_(({rows}, ({m}[:, 0] > 0).long()), {m}[:, 1], accumulate=True)", f"{n}.masked_scatter_({m} > 10, {m})",
        f"{n}.scatter_add_(1, ({m} > 0).long() % {v.width}, {m})", f"{n}.scatter_reduce_(1, ({m} > 0).long(), {m}, 'amax')",
        f"{n}.index_fill_(1, {s.buffer('torch.tensor([0])')}, 0.5)", f"{n}[:, 1] += {m}[:, 0]", f"{n}[1:] = {m}[1:]",
        f"{n}[-1] = {m}[0]", f"{n}[::2] *= 0.5", f"{n}[:, {s.buffer('torch.tensor([1, 0])')}] = {m}[:, :2]", f"{n}[{m}[:, 0] > 0] = 0.5",
        f"torch.mul({n}, 0.5, out={n})", f"{n}.t().copy_({m}.t())", f"{n}.clamp_(-0.5, 0.5)", f"{n}.zero_()", f"{n}.lerp_({m}, 0.5)",
        f"{n}.index_add_(0, {rows} // 2, {m}, alpha=0.5)", f"{n}.detach().mul_(0.5)", f"{n}.addcmul_({m}, {m})", f"{n}.fill_(0.25)",
    ]), w)  # fmt: skip


@op(1.0, ODD)
def picked_rows(s: Scope) -> Any:
    """Rows by their numbers; one row for all."""
    v = s.pick(lambda v: v.shape and v.shape[0] == "1B")
    if v is None:
        return None
    n, rows, others = v.name, _rows(v), ", ".join(["-1"] + ["1"] * (len(v.shape) - 1))
    return s.new(s.rng.choice([
        f"{n}[{rows} // 2]", f"{n}[({rows} * 2) % {n}.shape[0]]", f"{n}.index_select(0, {rows}.flip(0))", f"torch.cat([{n}[1:], {n}[:1]])",
        f"{n}[[0] * 2][:1].expand({n}.shape).clone()", f"torch.stack([{n}[0], {n}[-1]])[{rows} % 2]", f"{n}[{rows}, ...]",
        f"torch.cat([{n}[::2], {n}[1::2]])", f"{n}.take_along_dim({rows}.flip(0).view({others}).expand({n}.shape), 0)",
        f"{n}[{n}.shape[0] // 2 :].clone()[:1] + {n} * 1",
    ]), v.shape, v, exact=True)  # fmt: skip


@op(0.7, ODD)
def by_size(s: Scope) -> Any:
    """Python that looks at a size."""
    v = s.pick(lambda v: v.is_float and v.axis >= 0)
    text = s.rng.choice([
        "({0} * 0.5 if {1} > 4 else {0} * 2.0)", "({0} + 1.0 if {1} % 2 else {0} - 1.0)", "{0} * (1.0 / {1})", "{0} + float({1}) * 0.1",
        "{0} * min({1}, 4) * 0.5"])  # fmt: skip
    return v and s.new(text.format(v.name, f"{v.name}.shape[{v.axis}]"), v.shape, v, exact=True)


@op(0.8, ODD)
def layers(s: Scope) -> Any:
    """Modules of torch's own."""
    v = s.pick(lambda v: v.dtype == "float32" and len(v.shape) == 3 and v.axis == 0 and v.shape[1] not in (0, 1) and v.width > 1)
    if v is None or isinstance(v.shape[1], str):
        return None
    c, d = v.shape[1], v.width
    kind = s.rng.choice([
        f"nn.LayerNorm([{c}, {d}])", f"nn.GroupNorm(1, {c})", f"nn.InstanceNorm1d({c}, affine=True)", f"nn.PReLU({c})", "nn.Identity()",
        f"nn.RMSNorm({d})", "nn.Softmax(dim=-1)", f"nn.Conv1d({c}, {c}, 1)", f"nn.ConvTranspose1d({c}, {c}, 1)",
        f"nn.TransformerEncoderLayer({d}, 1, {d}, batch_first=True)", f"nn.GRU({d}, {d}, batch_first=True)",
        f"nn.LSTM({d}, {d}, batch_first=True)", f"nn.BatchNorm1d({c})",
    ])  # fmt: skip
    layer = s.member(f"self.NAME = seeded(lambda: {kind})")
    return s.new(f"{layer}({v.name} * 0.5)" + "[0]" * kind.startswith(("nn.GRU", "nn.LSTM")), v.shape, v)


@op(0.5, ODD)
def embedded(s: Scope) -> Any:
    v = s.pick(lambda v: v.dtype == "int64" and v.shape)
    if v is None:
        return None
    layer = s.member(f"self.NAME = seeded(lambda: nn.Embedding(8, 4{s.rng.choice(['', ', padding_idx=0'])}))")
    return s.new(f"{layer}({v.name} % 8)", (*v.shape, 4), v, dtype="float32", exact=True)


@op(0.6, ODD)
def recurrent(s: Scope) -> Any:
    """A loop over the sequence."""
    v = s.pick(lambda v: v.shape == ("1B", S, D) and v.dtype == "float32")
    if v is None:
        return None
    layer = s.member(f"self.NAME = linear({D}, {D})")
    s.line(f"h, out = torch.zeros({v.name}.shape[0], {D}, device={v.name}.device), []")
    s.line(f"for i in range({S}):")
    s.line(f"    h = torch.tanh({layer}(h) * 0.3 + {v.name}[:, i]); out.append(h)")
    return s.new("torch.stack(out, 1)", v.shape, v)


@op(0.8, ODD)
def drawn(s: Scope) -> Any:
    """Random numbers. (Those of training are `dropped`.)"""
    v = s.pick(lambda v: v.is_float and v.shape)
    if v is None or s.program.is_trained:
        return None
    n, ones = v.name, ", ".join([f"{v.name}.shape[0]"] + ["1"] * (len(v.shape) - 1))
    s.program.is_random = True
    return s.new(s.rng.choice([
        f"F.dropout({n}, 0.5)", f"{n} + torch.rand_like({n})", f"{n} * torch.bernoulli(torch.full_like({n}, 0.5))",
        f"F.alpha_dropout({n}, 0.5, True)", f"{n} + torch.randn({ones}).to({n})",
    ]), v.shape, v)  # fmt: skip


@op(0.4, ODD)
def own_state(s: Scope) -> Any:
    """A parameter or a buffer, itself or a view of it, as a value: it may be returned."""
    like = s.pick(lambda v: v.dtype == "float32")
    if like is None:
        return None
    name = s.parameter(D) if s.rng.random() < 0.5 else s.buffer("torch.ones(4)")
    text, shape = s.rng.choice([("{}", (D,)), ("{}.view(2, 2)", (2, 2)), ("{}[:2]", (2,)), ("{}.detach()", (D,)), ("{}[None]", (1, D))])
    made = s.new(text.format(name), shape, like, dtype="float32", exact=True)
    made.is_dense = False  # nobody changes weights
    return made


def _rows(v: Var) -> str:
    return f"torch.arange({v.name}.shape[0], device={v.name}.device)"
