"""The rows: unmodified models of transformers and timm in the shapes of real ones, random weights, made locally.

A `Row` says how to build; `row.case(device, dtype)` builds a `Case` (benchmarks/cases.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import dynaflow as df
from benchmarks import cases
from benchmarks.cases import CONTEXT, MAX_CONTEXT, NUM_SETS, built, static_cache

LLAMA_3_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 8192, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}, "rms_norm_eps": 1e-5,
    "num_hidden_layers": 4,
}  # fmt: skip
QWEN3_MOE = {
    "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
    "num_hidden_layers": 2,
}  # fmt: skip
BERT_LARGE = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 24, "vocab_size": 30522}
VIT_L_16 = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 24, "image_size": 224,
    "patch_size": 16, "num_labels": 1000,
}  # fmt: skip
_TINY = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2, "initializer_range": 0.12,
}  # fmt: skip
_TINY_DECODER = _TINY | {"num_key_value_heads": 2, "vocab_size": 97, "max_position_embeddings": 64, "head_dim": 16}
_TINY_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@dataclass(frozen=True, slots=True)
class Row:
    """One model at one size."""

    name: str
    # (tiny) -> module
    make: Callable[[bool], nn.Module]
    batch: int
    # tokens per row of the batch; 0 for images
    seq: int = 0
    # input_ids, one token after CONTEXT of them, with a static KV cache
    is_decode: bool = False
    image_size: int = 0
    # fields of the result to compare; empty when the result is a tensor
    fields: tuple[str, ...] = ("logits",)
    has_mask: bool = False
    is_channels_last: bool = False
    # how plans that split it are partitioned
    partition: Any = "auto"
    note: str = ""

    def config(self, tiny: bool = False) -> dict[str, Any]:
        batch, seq, _ = self._sizes(tiny)
        shape = {"batch": batch, "tokens": batch * seq} if seq else {"batch": batch}
        return shape | ({"context": CONTEXT, "cache": MAX_CONTEXT} if self.is_decode and not tiny else {})

    def _sizes(self, tiny: bool) -> tuple[int, int, int]:
        """batch, tokens per row, image size"""
        if not tiny:
            return self.batch, self.seq, self.image_size
        return min(self.batch, 4), min(self.seq, 8), 32 if self.image_size else 0

    def case(self, device: str, dtype: torch.dtype, tiny: bool = False, seed: int = 0) -> Case:
        module = built(partial(self.make, tiny), device, dtype, seed)
        if self.is_channels_last:
            module = module.to(memory_format=torch.channels_last)
        generator = torch.Generator(device).manual_seed(seed)
        state: dict[str, Any] = {}
        if self.is_decode:
            state = {"past_key_values": static_cache(module, self._sizes(tiny)[0], dtype, tiny, generator), "use_cache": True}
        elif self.seq and not self.has_mask:
            state = {"use_cache": False}
        case = Case(row=self, module=module, state=state, generator=generator, dtype=dtype, tiny=tiny)
        case.sets = [case.fresh() for _ in range(NUM_SETS)]
        return case


@dataclass(kw_only=True)
class Case(cases.Case):
    """A row that was built."""

    row: Row

    def fresh(self) -> dict[str, Tensor]:
        """New random inputs: what a caller passes anew in every step."""
        batch, seq, size = self.row._sizes(self.tiny)
        g, device = self.generator, self.generator.device
        if size:
            x = torch.randn(batch, 3, size, size, generator=g, device=device).to(self.dtype)
            return {self._image_name(): x.contiguous(memory_format=torch.channels_last) if self.row.is_channels_last else x}
        vocab = int(self.module.config.vocab_size)  # type: ignore[union-attr, arg-type]
        inputs = {"input_ids": torch.randint(3, vocab, (batch, seq), generator=g, device=device)}
        if self.row.has_mask:
            lengths = torch.randint(seq // 2, seq + 1, (batch, 1), generator=g, device=device)
            inputs["attention_mask"] = (torch.arange(seq, device=device) < lengths).long()
        return inputs

    def _image_name(self) -> str:
        return "pixel_values" if hasattr(self.module, "config") else "x"

    def outputs(self, result: Any) -> list[Tensor]:
        return [getattr(result, name) for name in self.row.fields] if self.row.fields else [result]

    def wide(self) -> Case:
        """The same case in float32, on memory of its own."""
        module = copy.deepcopy(self.module).float()
        if hasattr(module, "set_experts_implementation"):
            module.set_experts_implementation("eager")
        case = Case(row=self.row, module=module, state=dict(self.state), generator=self.generator, dtype=torch.float32, tiny=self.tiny)
        if self.layers:
            case.state["past_key_values"] = cache = copy.deepcopy(self.state["past_key_values"])
            for layer in cache.layers:
                layer.keys, layer.values, layer.dtype = layer.keys.float(), layer.values.float(), torch.float32
        return case


# -- the models


def llama(tiny: bool, num_layers: int | None = None) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = dict(_TINY_DECODER if tiny else LLAMA_3_8B)
    if num_layers is not None:
        settings["num_hidden_layers"] = num_layers
    return LlamaForCausalLM(LlamaConfig(**settings))


def _qwen3_moe(tiny: bool) -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(**(_TINY_DECODER | _TINY_EXPERTS if tiny else QWEN3_MOE))
    model = Qwen3MoeForCausalLM(config)
    model.set_experts_implementation("grouped_mm")
    return model


def _bert(tiny: bool) -> nn.Module:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(**(_TINY | {"vocab_size": 97} if tiny else BERT_LARGE)))


def _vit(tiny: bool) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(**(_TINY | {"image_size": 32, "patch_size": 8, "num_labels": 10} if tiny else VIT_L_16)))


def _resnet(tiny: bool) -> nn.Module:
    import timm

    return timm.create_model("resnet18" if tiny else "resnet50", pretrained=False, num_classes=10 if tiny else 1000)


# What matters most first: a run that ends early loses the least.
ROWS: tuple[Row, ...] = (
    Row("llama decode b=16", llama, 16, 1, is_decode=True),
    Row("llama decode b=256", llama, 256, 1, is_decode=True),
    Row("llama prefill 4x1024", llama, 4, 1024, note="logits of 1 GiB"),
    Row("resnet50 b=32", _resnet, 32, image_size=224, fields=(), is_channels_last=True),
    Row("llama decode b=1", llama, 1, 1, is_decode=True),
    Row("bert-large 8x512", _bert, 8, 512, fields=("last_hidden_state", "pooler_output"), has_mask=True),
    Row("vit-l/16 b=16", _vit, 16, image_size=224),
    Row("qwen3-moe 8x512", _qwen3_moe, 8, 512,
        partition=["auto", df.SplitModule("*.mlp", splittable=True)], note="a routed expert layer is one op; its rows are independent"),
)


def select(pattern: str = "*") -> list[Row]:
    """The rows whose name matches one of the comma-separated globs."""
    return cases.select(ROWS, pattern)
