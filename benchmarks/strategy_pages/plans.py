"""The plans that the pages show, and their pictures.

Plans are real: a strategy plans a small flow, or, where a function stands in for ops, a small model that is captured here; waits are added,
and the whole is verified. The pictures play them on the simulator's device (`dynaflow.simulate`), with costs that are made up: they
show an order, and no numbers.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

import dynaflow as df
from benchmarks.store import DOCS
from dynaflow.context import Context
from dynaflow.costs import Cost
from dynaflow.ir import Flow, Plan
from dynaflow.planner import plan
from dynaflow.simulate import simulate
from dynaflow.testing.network import all_reduce
from dynaflow.testing.notation import flow_of
from dynaflow.timeline import Span, Timeline
from dynaflow.verify import verify
from dynaflow.view.picture import picture

IMAGES = DOCS / "img" / "strategies"
NUM_LAYERS = 2
TIME = "time: simulated from the plan, at costs that are made up"


def _layers(text: str, num_layers: int = NUM_LAYERS) -> str:
    """A layer as often as wanted, each one's x the y of the one before it; every other name with the layer's number."""
    lines = ["input x0"]
    for i in range(num_layers):
        for line in text.strip().splitlines():
            head, _, body = line.strip().partition(": ")
            names = {"x": f"x{i}", "y": f"x{i + 1}"}
            words = [word if word == "->" else names.get(word) or f"{word}_{i}" for word in body.split()]
            lines.append(f"L{i}.{head}: {' '.join(words)}")
    return "\n".join([*lines, f"output x{num_layers}"])


DENSE_LAYER = """
    qkv: x -> q
    attn: q -> a
    o: a -> o
    ar network group:tp: o -> r
    mlp: r -> m
    ar2 network group:tp: m -> y"""
DENSE = _layers(DENSE_LAYER)
MOE = _layers("""
    attn: x -> h
    dispatch network group:ep: h -> d
    experts: d -> e
    combine network group:ep: e -> c
    shared: h -> s
    add memory: c s -> y""")
BRANCHING = _layers("""
    a: x -> u
    b: u -> v
    c: u -> w
    d: v w -> z
    ar network group:tp: z -> y""")
INCEPTION = _layers("""
    stem: x -> u
    conv1: u -> p
    conv3: u -> q1
    conv3b: q1 -> q
    conv5: u -> r1
    conv5b: r1 -> r2
    conv5c: r2 -> r
    pool memory: u -> s
    concat memory: p q r s -> y""", 1)  # fmt: skip
GATHERED = "input x0\n" + "\n".join(
    f"param w{i} state\nL{i}.gather network group:dp whole: w{i} -> W{i}^\nL{i}.mm: x{i} W{i} -> x{i + 1}" for i in range(4)
) + "\noutput x4"  # fmt: skip
FETCHED = GATHERED.replace("gather network group:dp whole", "fetch copy whole")


class Block(nn.Module):
    """A tensor-parallel layer, with emulated all-reduces."""

    def __init__(self, dim: int):
        super().__init__()
        self.attn, self.norm, self.mlp, self.norm2 = nn.Linear(dim, dim), nn.RMSNorm(dim, 1e-5), nn.Linear(dim, dim), nn.RMSNorm(dim, 1e-5)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        residual = residual + all_reduce(self.attn(x), 1.0, 0.0)
        residual_2 = residual + all_reduce(self.mlp(self.norm(residual)), 1.0, 0.0)
        return self.norm2(residual_2), residual_2


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(8) for _ in range(NUM_LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        residual = x
        for layer in self.layers:
            x, residual = layer(x, residual)
        return x


# (microseconds, share of the device) by the last word of an op's name, or by its kind: made up, in proportions that show the order
COSTS = {
    "qkv": (40, 0.6), "attn": (76, 0.3), "o": (28, 0.6), "ar": (44, 0.1), "ar2": (44, 0.1), "mlp": (100, 0.6),
    "dispatch": (96, 0.1), "combine": (96, 0.1), "experts": (120, 0.6), "shared": (72, 0.3), "add": (8, 0.3),
    "mm": (60, 0.6), "gather": (55, 0.1), "fetch": (75, 0.1), "a": (30, 0.4), "b": (60, 0.4), "c": (60, 0.4), "d": (30, 0.4),
    "stem": (30, 0.5), "conv1": (25, 0.25), "conv3": (30, 0.25), "conv3b": (40, 0.25), "conv5": (25, 0.25), "conv5b": (35, 0.25),
    "conv5c": (40, 0.25), "pool": (30, 0.2), "concat": (15, 0.4), "norm": (14, 0.3), "norm2": (14, 0.3),
    "network": (40, 0.1), "compute": (14, 0.3), "memory": (14, 0.3),
}  # fmt: skip
# of a function in the place of ops: the share of their time that it takes, where it does them in one pass
FUSED_SHARE = {"reduce_add_norm": 0.7}


@dataclass(frozen=True)
class Shown:
    """A plan on a page."""

    # of the picture, and of the page's places for it
    name: str
    strategy: df.Strategy
    # a flow's text; empty for the small model
    text: str = ""
    batch_size: int = 64
    tags: tuple[tuple[str, object], ...] = ()
    # of the picture; the strategy's name where it is empty
    title: str = ""

    @property
    def path(self) -> Path:
        return IMAGES / f"{self.name}.png"


SHOWN = {
    shown.name: shown
    for shown in (
        Shown("two-batch", df.TwoBatch(), DENSE),
        Shown("nano-batch", df.NanoBatch(4), _layers(DENSE_LAYER, 1), title="NanoBatch(4)"),
        Shown("nano-flow", df.NanoFlow(min_tokens=1), DENSE, tags=(("phase", "decode"),)),
        Shown("dual-batch", df.DualBatch(0, lead=1), MOE),
        Shown("dual-batch-lead-2", df.DualBatch(0, lead=2), MOE, title="DualBatch(lead=2)"),
        Shown("single-batch", df.SingleBatch(), MOE),
        Shown("comm-overlap", df.CommOverlap(2, 1), DENSE),
        Shown("comm-overlap-weights", df.CommOverlap(), GATHERED, title="CommOverlap, weights gathered ahead"),
        Shown("token-weave", df.TokenWeave(wave=16, min_tokens=0)),
        Shown("fused-gemm", df.FusedGemm(4, 1)),
        Shown("offload", df.Offload(2 * 16), FETCHED),
        Shown("prefill-decode", df.PrefillDecode(), DENSE, tags=(("num_prefill", 32),)),
        Shown("mixed", df.Mixed(df.TwoBatch(), df.Branches(2)), BRANCHING, title="Mixed(TwoBatch(), Branches(2))"),
        Shown("branches", df.Branches(4), INCEPTION),
    )
}


@cache
def planned(name: str) -> tuple[Flow, Plan, Plan]:
    """The flow, the sequential plan and the strategy's; all verified."""
    shown = SHOWN[name]
    if shown.text:
        flow = flow_of(shown.text)
        context = Context({"batch_size": shown.batch_size, "device": "cpu", **{f"tag.{k}": v for k, v in shown.tags}})
        both = [df.place(flow, df.synchronise(flow, plan(flow, s, context))) for s in (df.Sequential(), shown.strategy)]
    else:
        torch._dynamo.reset()
        names = ("*.attn", "*.mlp", "*.norm", "*.norm2")
        partition = [df.SplitFunc(all_reduce, kind="network"), *(df.SplitModule(glob) for glob in names)]
        with torch.no_grad():
            told = [df.explain(Blocks(), (torch.zeros(shown.batch_size, 8),), strategy=s, partition=partition, compiler="eager")
                    for s in (df.Sequential(), shown.strategy)]  # fmt: skip
        flow, both = told[0].flow, [t.plan for t in told]
    for made in both:
        verify(made, flow)
    return flow, both[0], both[1]


def grid(name: str) -> str:
    return "\n".join(line.rstrip() for line in planned(name)[2].grid().strip().splitlines())


# -- pictures


def timelines(name: str) -> list[Timeline]:
    """The sequential plan's and the strategy's, played."""
    shown, (flow, sequential, made) = SHOWN[name], planned(name)
    played = [_played(flow, each) for each in (sequential, made)]
    if name == "fused-gemm":
        played[1] = _with_chunks(played[1], num_chunks=4)
    return [Timeline(t.spans, title, t.lanes) for t, title in zip(played, ("sequential", shown.title or type(shown.strategy).__name__))]


def _played(flow: Flow, made: Plan) -> Timeline:
    costs = {op.name: _cost(op.name, op.kind) for op in flow.ops}
    shares = {call[0]: share for launch in made.launches for call in launch.calls
              for function, share in FUSED_SHARE.items() if function in launch.replace}  # fmt: skip
    costs |= {op: Cost(costs[op].us * share, costs[op].share) for op, share in shares.items()}
    return simulate(flow, made, costs)


def _cost(op: str, kind: str) -> Cost:
    word = op.rsplit(".", 1)[-1]
    return Cost(*COSTS[word if word in COSTS else kind])


def _with_chunks(timeline: Timeline, num_chunks: int) -> Timeline:
    """What goes on inside of a chunked product, on two lanes of its own: a chunk is sent while the next is computed."""
    product_us, send_us = (_cost(op, "network").us / num_chunks for op in ("mlp", "ar"))
    spans, saved_us = [], 0.0
    for span in timeline.spans:
        start_us = span.start_us - saved_us
        if "chunked" not in span.label:
            spans.append(replace(span, start_us=start_us, end_us=span.end_us - saved_us))
            continue
        own = product_us if "mlp" in span.label else _cost("attn", "compute").us / num_chunks
        computed = [start_us + i * own for i in range(num_chunks + 1)]
        end_us = start_us
        for i, (begin, end) in enumerate(pairwise(computed)):
            spans.append(Span("its products", f"{i}", begin, end, "compute"))
            begin_us = max(end, end_us)
            end_us = begin_us + send_us
            spans.append(Span("its collectives", f"{i}", begin_us, end_us, "network"))
        saved_us += span.end_us - span.start_us - (end_us - start_us)
        spans.append(replace(span, start_us=start_us, end_us=end_us, kind="compute"))
    return Timeline(tuple(spans), timeline.title, ("caller", "its products", "its collectives"))


def source(name: str) -> str:
    """What a picture was drawn from, in short: it changes with whatever is drawn."""
    spans = [[(s.stream, s.label, f"{s.start_us:.2f}", f"{s.end_us:.2f}", s.kind) for s in t.spans] for t in timelines(name)]
    drawn = [(t.title, t.lanes, each) for t, each in zip(timelines(name), spans)]
    return hashlib.sha256(repr(drawn).encode()).hexdigest()[:16]


def draw(name: str, folder: Path = IMAGES) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    picture(timelines(name), folder / SHOWN[name].path.name, time_label=TIME, source=source(name))


def source_of(path: Path) -> str:
    """The description that a PNG has; empty without one."""
    data, at = path.read_bytes(), 8
    while at < len(data):
        size, kind = struct.unpack(">I4s", data[at : at + 8])
        word, _, text = data[at + 8 : at + 8 + size].partition(b"\0")
        if kind == b"tEXt" and word == b"Description":
            return text.decode("latin-1")
        at += size + 12
    return ""
