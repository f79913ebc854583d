"""Kernel flows that look like those that Inductor makes of real models, with costs as small batches have them. No torch, no GPU.

Costs are made up, in the range of what one H200 takes: small kernels 2 to 15 us at shares of 0.03 to 0.6, large GEMMs at share 1.
Program order is Inductor's: the model's, module by module.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from dynaflow.costs import Cost
from dynaflow.ir import Flow, Op, Value


class Net:
    """A flow under construction: `net.op(name, us, share, *inputs)` returns the name of what it makes."""

    def __init__(self, name: str, seed: int = 0):
        self.name, self.ops, self.costs = name, [], {}  # type: str, list[Op], dict[str, Cost]
        self._random = random.Random(seed)

    def op(self, name: str, us: float, share: float, *inputs: str) -> str:
        name = f"{len(self.ops)}.{name}"
        self.ops.append(Op(name, "compute", inputs or ("x",), (f"{name}:0",), unsplittable="a kernel has its sizes"))
        self.costs[name] = Cost(round(us * self._random.uniform(0.9, 1.1), 2), share)
        return f"{name}:0"

    def conv(self, name: str, us: float, share: float, *inputs: str) -> str:
        """A convolution by cuDNN and the Triton kernel behind it (norm, activation)."""
        return self.op(f"{name}.pointwise", 2.2, min(share, 0.2), self.op(f"{name}.conv", us, share, *inputs))

    def flow(self, *outputs: str) -> tuple[Flow, dict[str, Cost]]:
        def value(name: str, role: str) -> Value:
            return Value(name, ("64",), "float32", "256", None, role, name)

        values = (value("x", "input"), *(value(op.writes[0], "output" if op.writes[0] in outputs else "temp") for op in self.ops))
        return Flow(self.name, values, tuple(self.ops), outputs), self.costs


def hrnet() -> tuple[Flow, dict[str, Cost]]:
    """Like hrnet_w18, batch 1: up to 4 resolutions side by side, exchanged after every module."""
    net = Net("hrnet")
    us, share = (7.0, 7.5, 8.5, 10.0), (0.50, 0.32, 0.22, 0.16)

    def module(xs: list[str], name: str) -> list[str]:
        outs = []
        for i, x in enumerate(xs):
            for k in range(4):
                h = net.conv(f"{name}.b{i}.{k}.0", us[i], share[i], x)
                h = net.op(f"{name}.b{i}.{k}.1.conv", us[i], share[i], h)
                x = net.op(f"{name}.b{i}.{k}.add", 2.5, share[i] / 2, h, x)
            outs.append(x)
        fused = []
        for i in range(len(xs)):
            parts = [outs[i]]
            for j, x in enumerate(outs):
                for k in range(i - j):  # down, a strided convolution per step
                    x = net.conv(f"{name}.f{i}{j}.{k}", us[j + k], share[j + k] / 2, x)
                if j > i:  # up, resized by the kernel that adds
                    x = net.op(f"{name}.f{i}{j}.conv", 5.0, share[j] / 2, x)
                if j != i:
                    parts.append(x)
            fused.append(net.op(f"{name}.f{i}.add", 3.0, share[i] / 2, *parts))
        return fused

    x = net.conv("stem.1", 9.0, 0.5, net.conv("stem.0", 8.0, 0.6))
    for k in range(4):
        h = net.conv(f"layer1.{k}.1", 8.0, 0.4, net.conv(f"layer1.{k}.0", 5.0, 0.3, x))
        x = net.op(f"layer1.{k}.add", 3.0, 0.4, net.op(f"layer1.{k}.2.conv", 6.0, 0.5, h), x)
    xs = [net.conv("t1.0", us[0], share[0], x), net.conv("t1.1", us[1], share[1], x)]
    xs = module(xs, "s2")
    xs.append(net.conv("t2", us[2], share[2], xs[-1]))
    for m in range(4):
        xs = module(xs, f"s3.{m}")
    xs.append(net.conv("t3", us[3], share[3], xs[-1]))
    for m in range(3):
        xs = module(xs, f"s4.{m}")
    heads = [net.conv(f"head.{i}", 9.0, 0.3, x) for i, x in enumerate(xs)]
    x = heads[0]
    for i in (1, 2, 3):
        x = net.op(f"down.{i}.add", 2.5, 0.1, net.conv(f"down.{i}", 9.0, 0.2, x), heads[i])
    return net.flow(net.op("classifier", 5.0, 0.3, net.op("pool", 4.0, 0.1, x)))


def inception() -> tuple[Flow, dict[str, Cost]]:
    """Like inception_v3, batch 1: blocks of four branches of unequal length, joined by a concatenation."""
    net = Net("inception", 1)
    blocks = [
        *[((1,), (1, 3), (1, 3, 3), (0, 1))] * 3, ((3,), (1, 3, 3), (0,)),
        *[((1,), (1, 7, 7), (1, 7, 7, 7, 7), (0, 1))] * 4, ((1, 3), (1, 7, 7, 3), (0,)), *[((1,), (1, 3, 3), (1, 3, 3, 3), (0, 1))] * 2,
    ]  # fmt: skip
    kernel = {0: (3.0, 0.1), 1: (5.0, 0.15), 3: (9.0, 0.3), 7: (8.0, 0.2)}
    x = ""
    for k, (us, share) in enumerate(((8.0, 0.5), (9.0, 0.6), (10.0, 0.6), (3.0, 0.3), (5.0, 0.4), (12.0, 0.6), (3.0, 0.2))):
        x = net.conv(f"stem.{k}", us, share, *(x,) if x else ())
    for b, block in enumerate(blocks):
        ends = []
        for i, branch in enumerate(block):
            h = x
            for k, size in enumerate(branch):
                name = f"mixed{b}.{i}.{k}"
                h = net.conv(name, *kernel[size], h) if size else net.op(f"{name}.pool", *kernel[0], h)
            ends.append(h)
        x = net.op(f"mixed{b}.cat", 2.5, 0.2, *ends)
    return net.flow(net.op("classifier", 5.0, 0.3, net.op("pool", 3.0, 0.1, x)))


def lora(num_layers: int = 2) -> tuple[Flow, dict[str, Cost]]:
    """Llama layers with LoRA on every projection, one token: a base GEMM that reads its weights beside two thin GEMMs."""
    net = Net("lora", 2)

    def project(name: str, us: float, share: float, x: str) -> str:
        base = net.op(f"{name}.base", us, share, x)
        thin = net.op(f"{name}.B", 3.5, 0.08, net.op(f"{name}.A", 4.5, 0.05, x))
        return net.op(f"{name}.add", 2.0, 0.03, base, thin)

    x = net.op("embed", 2.5, 0.03)
    for i in range(num_layers):
        h = net.op(f"{i}.norm1", 3.0, 0.02, x)
        q, k, v = (project(f"{i}.{n}", us, share, h) for n, us, share in (("q", 9.0, 0.8), ("k", 5.0, 0.4), ("v", 5.0, 0.4)))
        rope = net.op(f"{i}.rope", 2.5, 0.05, q, k)
        attention = net.op(f"{i}.attention", 8.0, 0.25, rope, v)
        x = net.op(f"{i}.residual1", 2.2, 0.03, project(f"{i}.o", 9.0, 0.8, attention), x)
        h = net.op(f"{i}.norm2", 3.0, 0.02, x)
        gate, up = project(f"{i}.gate", 26.0, 1.0, h), project(f"{i}.up", 26.0, 1.0, h)
        down = project(f"{i}.down", 27.0, 1.0, net.op(f"{i}.silu", 2.2, 0.05, gate, up))
        x = net.op(f"{i}.residual2", 2.2, 0.03, down, x)
    return net.flow(x)


def mmdit(num_layers: int = 4) -> tuple[Flow, dict[str, Cost]]:
    """Two streams of tokens (256 of an image, 128 of a text) that meet in attention only."""
    net = Net("mmdit", 3)
    xs = {"image": net.op("patch", 6.0, 0.4), "text": net.op("text", 5.0, 0.2)}
    size = {"image": (1.0, 1.0), "text": (0.7, 0.75)}  # factors of time and share
    condition = net.op("condition", 6.0, 0.1)
    for i in range(num_layers):
        qkv, gates = {}, {}
        for s in xs:
            t, w = size[s]
            gates[s] = net.op(f"{i}.{s}.modulation", 6.0, 0.25, condition)
            h = net.op(f"{i}.{s}.norm1", 3.0 * t, 0.4 * w, xs[s], gates[s])
            qkv[s] = net.op(f"{i}.{s}.qk_norm", 3.0 * t, 0.5 * w, net.op(f"{i}.{s}.qkv", 14.0 * t, w, h))
        attention = net.op(f"{i}.attention", 15.0, 0.7, *qkv.values())
        for s in xs:
            t, w = size[s]
            h = net.op(f"{i}.{s}.proj", 8.0 * t, 0.8 * w, attention)
            h = net.op(f"{i}.{s}.norm2", 3.5 * t, 0.4 * w, h, xs[s], gates[s])
            h2 = net.op(f"{i}.{s}.mlp2", 15.0 * t, w, net.op(f"{i}.{s}.mlp1", 15.0 * t, w, h))
            xs[s] = net.op(f"{i}.{s}.residual", 3.0 * t, 0.4 * w, h2, h)
    return net.flow(net.op("final", 6.0, 0.4, xs["image"]))


def nasnet(num_cells: int = 12) -> tuple[Flow, dict[str, Cost]]:
    """Cells of five pairs of separable convolutions on the two cells before: many short branches of one length."""
    net = Net("nasnet", 4)
    before, x = net.conv("stem.0", 8.0, 0.5), ""
    x = net.conv("stem.1", 8.0, 0.4, before)
    pairs = (("sep5", "sep3"), ("sep5", "sep3"), ("pool", "none"), ("pool", "pool"), ("sep3", "none"))

    def side(name: str, what: str, h: str) -> str:
        if what == "none":
            return h
        if what == "pool":
            return net.op(f"{name}.pool", 3.0, 0.12, h)
        us = 5.5 if what == "sep5" else 4.0
        for k in range(2):
            h = net.conv(f"{name}.{k}.point", 5.0, 0.15, net.op(f"{name}.{k}.depth", us, 0.12, h))
        return h

    for c in range(num_cells):
        a, b = net.conv(f"{c}.left", 5.0, 0.2, x), net.conv(f"{c}.right", 5.0, 0.2, before)
        adds = [
            net.op(f"{c}.{i}.add", 2.2, 0.1, side(f"{c}.{i}.l", left, a), side(f"{c}.{i}.r", right, b))
            for i, (left, right) in enumerate(pairs)
        ]
        before, x = x, net.op(f"{c}.cat", 2.5, 0.2, *adds)
    return net.flow(net.op("classifier", 5.0, 0.3, x))


def chain(num_ops: int = 120) -> tuple[Flow, dict[str, Cost]]:
    """The control: nothing can run beside anything."""
    net = Net("chain", 5)
    x = net.op("first", 5.0, 0.3)
    for i in range(num_ops - 1):
        x = net.op(f"op{i}", 6.0, (0.1, 0.5, 1.0)[i % 3], x)
    return net.flow(x)


NETS: tuple[Callable[[], tuple[Flow, dict[str, Cost]]], ...] = (hrnet, inception, nasnet, lora, mmdit, chain)
