"""The workloads: a model at a size on a link. `workload.case(device, tiny)` builds it (benchmarks/cases.py).

Expert parallelism goes over 400G InfiniBand, tensor and sequence parallelism over NVLink.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import dynaflow as df
from benchmarks import cases
from benchmarks.cases import CONTEXT, NUM_SETS, TINY_CONTEXT, Call, built, static_cache
from benchmarks.overlap import models
from dynaflow.testing.network import IB_400G, NVLINK_H100, OPS, Link, add_collectives, all_reduce, all_to_all

TP, EP, SP = "tensor parallel", "expert parallel", "sequence parallel"
PREFILL, DECODE, IMAGE = "prefill", "decode", "image"

# tokens of a prompt; sequences that decode together in a row of the batch, where experts need whole rows
PROMPT, GROUP = 512, 4
TINY_PROMPT = 8


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    kind: str
    phase: str
    # (ranks, link or None for a model without collectives, tiny) -> module
    make: Callable[[int, Link | None, bool], nn.Module]
    ranks: int
    link: Link
    # rows of the batch, and tokens per row
    batch: int
    seq: int

    def sizes(self, tiny: bool) -> tuple[int, int]:
        if not tiny:
            return self.batch, self.seq
        return min(self.batch, 4), self.seq if self.seq <= GROUP else TINY_PROMPT

    def config(self, tiny: bool = False) -> dict[str, Any]:
        batch, seq = self.sizes(tiny)
        link = {"link": f"{self.link.name} (emulated)", "gbps": self.link.gbps, "latency_us": self.link.latency_us, "sms": self.link.sms}
        shape: dict[str, Any] = {"batch": batch, "tokens": batch * seq}
        if self.phase == DECODE:
            # of one cache for all layers, Inductor copies the whole: rows that were measured so are told apart by this
            shape |= {"context": TINY_CONTEXT if tiny else CONTEXT, **({"caches": "one per layer"} if self.kind == EP else {})}
        layers = models.num_layers(self.kind != EP, tiny)
        return {"kind": self.kind, "phase": self.phase, "ranks": self.ranks, "layers": layers, **shape, **link}

    @property
    def partition(self) -> list[Any]:
        return ["auto", df.SplitFunc(all_reduce if self.kind == TP else all_to_all, kind="network")]

    def case(self, device: str, tiny: bool = False, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Case:
        batch, seq = self.sizes(tiny)
        module, bare = (built(partial(self.make, self.ranks, link, tiny), device, dtype, seed) for link in (self.link, None))
        for own, same in zip(bare.parameters(), module.parameters(), strict=True):
            own.data = same.data
        generator = torch.Generator(device).manual_seed(seed)
        state: dict[str, Any] = {}
        if self.phase == DECODE:
            if self.kind == TP:
                state = {"past_key_values": static_cache(module, batch, dtype, tiny, generator), "use_cache": True}
            else:
                width = module.layers[0].attn.kv_down.out_features  # type: ignore[union-attr, index]
                shape = (batch, seq, TINY_CONTEXT if tiny else CONTEXT, width)
                layers = range(models.num_layers(False, tiny))
                state = {"caches": [torch.randn(shape, generator=generator, device=device).to(dtype) for _ in layers]}
        case = Case(workload=self, module=module, bare=bare, state=state, generator=generator, dtype=dtype, tiny=tiny)
        case.sets = [case.fresh() for _ in range(NUM_SETS)]
        return case


@dataclass(kw_only=True)
class Case(cases.Case):
    workload: Workload
    # the same without collectives, over the same weights
    bare: nn.Module
    # group of ways -> the callable that has them
    callables: dict[str, Any] = field(default_factory=dict)
    # strategy -> what has planned its parts on one stream
    alone: dict[str, Any] = field(default_factory=dict)
    # parts -> compute and collectives in these parts, side by side
    beside: dict[Any, Call] = field(default_factory=dict)
    # group of ways -> the strategy that has them; and of a way, by which other one it is taken since options were measured
    ways: dict[str, Any] = field(default_factory=dict)
    taken: dict[str, str] = field(default_factory=dict)

    def fresh(self) -> dict[str, Tensor]:
        batch, seq = self.workload.sizes(self.tiny)
        g, device = self.generator, self.generator.device
        if self.workload.kind == TP:
            return {"input_ids": torch.randint(3, 1024, (batch, seq), generator=g, device=device)}
        hidden = self._hidden()
        inputs = {"x": torch.randn(batch, seq, hidden, generator=g, device=device).to(self.dtype)}
        if self.workload.kind == SP:
            inputs["vec"] = torch.randn(batch, hidden, generator=g, device=device).to(self.dtype)
        return inputs

    def _hidden(self) -> int:
        layer: Any = self.module.blocks[0] if self.workload.kind == SP else self.module.layers[0]  # type: ignore[index]
        return layer.qkv.in_features if self.workload.kind == SP else layer.router.in_features

    def outputs(self, result: Any) -> list[Tensor]:
        return [result if isinstance(result, Tensor) else result.last_hidden_state]

    def collectives(self) -> list[Sent]:
        """What the model sends in one step, in order."""
        with _Recorder() as recorder:
            self.run(self.sets[0])
        return recorder.sent


@dataclass(frozen=True, slots=True)
class Sent:
    """One collective of a model."""

    op: Any
    shape: tuple[int, ...]
    numbers: tuple[Any, ...]

    def again(self, x: Tensor) -> Tensor:
        return self.op(x, *self.numbers)


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Sent] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in OPS.values():
            self.sent.append(Sent(func, tuple(args[0].shape), tuple(args[1:])))
        return func(*args, **(kwargs or {}))


# -- the workloads


def _dense(family: str, sizes: dict[str, int], ranks: int, link: Link | None, tiny: bool) -> nn.Module:
    model = models.tensor_parallel(family, sizes, ranks, tiny)
    if link is not None:
        add_collectives(model, models.ROW_PARALLEL, link=link, ranks=ranks)
    return model


def _prefills(name: str, kind: str, make: Any, ranks: int, link: Link, *tokens: int) -> list[Workload]:
    return [Workload(f"{name} prefill {n // 1024}k", kind, PREFILL, make, ranks, link, n // PROMPT, PROMPT) for n in tokens]


def _decodes(name: str, kind: str, make: Any, ranks: int, link: Link, *sequences: int) -> list[Workload]:
    group = GROUP if kind == EP else 1
    return [Workload(f"{name} decode {n}", kind, DECODE, make, ranks, link, n // group, group) for n in sequences]


def _images(name: str, make: Any, ranks: int, link: Link, *sizes: tuple[int, int]) -> list[Workload]:
    """(pixels, images): a latent token per 16 x 16 pixels, and 512 of text."""
    tokens = [((pixels // 16) ** 2 + 512) // ranks for pixels, _ in sizes]
    return [Workload(f"{name} {pixels}px b={n}", SP, IMAGE, make, ranks, link, n, s) for (pixels, n), s in zip(sizes, tokens)]


_70b, _8b = partial(_dense, "Llama", models.LLAMA_3_70B), partial(_dense, "Llama", models.LLAMA_3_8B)
_72b = partial(_dense, "Qwen2", models.QWEN_2_5_72B)
_v2, _v3 = partial(models.expert_parallel, models.DEEPSEEK_V2_LITE), partial(models.expert_parallel, models.DEEPSEEK_V3)

WORKLOADS: tuple[Workload, ...] = (
    *_prefills("llama-3-70b tp8", TP, _70b, 8, NVLINK_H100, 2048, 4096, 8192, 16384),
    *_decodes("llama-3-70b tp8", TP, _70b, 8, NVLINK_H100, 64, 256, 1024, 2048),
    *_prefills("deepseek-v3 ep8", EP, _v3, 8, IB_400G, 2048, 4096, 8192),
    *_decodes("deepseek-v3 ep8", EP, _v3, 8, IB_400G, 64, 256, 1024),
    *_images("flux ulysses8", models.dit, 8, NVLINK_H100, (1024, 1), (1024, 2), (1024, 4), (2048, 1), (2048, 2)),
    *_prefills("llama-3-8b tp2", TP, _8b, 2, NVLINK_H100, 2048, 4096, 8192, 16384),
    *_decodes("llama-3-8b tp2", TP, _8b, 2, NVLINK_H100, 64, 256, 1024),
    *_prefills("deepseek-v2-lite ep8", EP, _v2, 8, IB_400G, 2048, 4096, 8192),
    *_decodes("deepseek-v2-lite ep8", EP, _v2, 8, IB_400G, 64, 256, 1024),
    *_prefills("qwen-2.5-72b tp8", TP, _72b, 8, NVLINK_H100, 2048, 8192, 16384),
    *_decodes("qwen-2.5-72b tp8", TP, _72b, 8, NVLINK_H100, 256),
)


def select(pattern: str = "*") -> list[Workload]:
    """The workloads whose name matches one of the comma-separated globs."""
    return cases.select(WORKLOADS, pattern)
