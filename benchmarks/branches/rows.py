"""The rows: a model at one size, what a caller passes, what is compared. What matters most stands first: a run that ends early loses
the least.

`row.case(device)` builds it, in bf16. The gain is asked of branchy rows; controls have next to no branches and must lose nothing; a
training row is one forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import cases
from benchmarks.backend.models import LLAMA_3_8B
from benchmarks.branches.models import language, lora, vision
from benchmarks.branches.models.mmdit import HEAD_DIM, MMDiT
from benchmarks.branches.models.unet import ControlledUNet
from benchmarks.cases import CONTEXT, NUM_SETS, built, static_cache

BRANCHY, CONTROL, TRAINING = "branchy", "control", "training"
GROUPS = (BRANCHY, CONTROL, TRAINING)
DTYPE = torch.bfloat16
Inputs = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Draw:
    """Fresh random inputs."""

    generator: torch.Generator

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.generator.device).to(DTYPE)

    def image(self, *shape: int) -> Tensor:
        return self.normal(*shape).contiguous(memory_format=torch.channels_last)

    def ids(self, words: int, *shape: int) -> Tensor:
        return torch.randint(3, words, shape, generator=self.generator, device=self.generator.device)


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    # (tiny) -> module
    make: Callable[[bool], nn.Module]
    # (draw, tiny) -> keyword arguments of the module
    sample: Callable[[Draw, bool], Inputs]
    config: dict[str, Any]
    group: str = BRANCHY
    # fields of the result to compare; empty when the result is a tensor
    fields: tuple[str, ...] = ()
    # arguments that are the same in every step
    state: dict[str, Any] = field(default_factory=dict)
    # one token each, after CONTEXT others in a static cache, of so many sequences
    decode_batch: int = 0
    is_channels_last: bool = False
    # (tiny) -> size of the images that BatchNorm's statistics are calibrated on; None where there is none
    calibrated_on: Callable[[bool], int] | None = None
    # whether cuDNN's attention, where torch would choose it, gives the same twice; else it is switched off: nothing could be bit-equal
    repeats: bool = True
    # which parameters are trained; all where it is None
    trained: Callable[[nn.Module], list[nn.Parameter]] | None = None

    @property
    def is_training(self) -> bool:
        return self.group == TRAINING

    def case(self, device: str, tiny: bool = False, seed: int = 0) -> Case:
        generator = torch.Generator(device).manual_seed(seed)
        module = built(partial(self.make, tiny), device, DTYPE, seed)
        if self.is_channels_last:
            module = module.to(memory_format=torch.channels_last)
        if self.calibrated_on is not None:
            model = module.model if isinstance(module, vision.Squared) else module
            vision.calibrate(model, self.calibrated_on(tiny), generator, DTYPE)
        state = dict(self.state)
        if self.decode_batch:
            batch = min(self.decode_batch, 4) if tiny else self.decode_batch
            state |= {"past_key_values": static_cache(module, batch, DTYPE, tiny, generator), "use_cache": True}
        if self.is_training:
            module.train()
            for parameter in self.trained(module) if self.trained else module.parameters():
                parameter.requires_grad_(True)
        case = Case(row=self, module=module, state=state, generator=generator, dtype=DTYPE, tiny=tiny)
        case.sets = [case.fresh() for _ in range(NUM_SETS)]
        return case


@dataclass(kw_only=True)
class Case(cases.Case):
    row: Row

    def fresh(self) -> Inputs:
        return self.row.sample(Draw(self.generator), self.tiny)

    def reset(self) -> None:
        cases.Case.reset(self)
        if self.row.is_training:
            for parameter in self.module.parameters():
                parameter.grad = None

    def finish(self, result: Any) -> Any:
        if self.row.is_training:
            result.backward()
            return result.detach()
        return result

    def outputs(self, result: Any) -> list[Tensor]:
        """Of a training step: the loss and all gradients."""
        if self.row.is_training:
            return [result, *(p.grad for p in self.module.parameters() if p.grad is not None)]
        return [getattr(result, name) for name in self.row.fields] if self.row.fields else [result]


# -- images


def _images(name: str, batch: int, draw: Draw, tiny: bool) -> Inputs:
    size = vision.image_size(name, tiny)
    return {"x": draw.image(min(batch, 2) if tiny else batch, 3, size, size)}


def _timm(name: str, batch: int, group: str = BRANCHY) -> Row:
    size = partial(vision.image_size, name)
    return Row(f"{name} b={batch}", partial(vision.make, name), partial(_images, name, batch), {"batch": batch, "image": size(False)},
               group, is_channels_last=True, calibrated_on=size)  # fmt: skip


def _train_timm(name: str, batch: int, title: str) -> Row:
    def make(tiny: bool) -> nn.Module:
        return vision.Squared(vision.make(name, tiny))

    size = partial(vision.image_size, name)
    return Row(f"train {title} b={batch}", make, partial(_images, name, batch), {"batch": batch, "image": size(False)}, TRAINING,
               is_channels_last=True, calibrated_on=size, repeats=False)  # fmt: skip


# -- text, and what goes with it


def _embeddings(settings: dict[str, Any], batch: int, tokens: int, draw: Draw, tiny: bool) -> Inputs:
    batch, tokens = (min(batch, 4), min(tokens, 8)) if tiny else (batch, tokens)
    return {"inputs_embeds": draw.normal(batch, tokens, language.width(settings, tiny))}


def _lora(tokens: int) -> Row:
    """Decoding one token for each of so many sequences; 512 of them are one sequence's prefill."""
    is_decode = tokens < 512
    batch, seq = (tokens, 1) if is_decode else (1, tokens)
    return Row(f"lora-llama {tokens} token{'s' if tokens > 1 else ''}", language.lora_llama, partial(_embeddings, LLAMA_3_8B, batch, seq),
               {"tokens": tokens, "layers": 2, "rank": lora.RANK, "lora": lora.which()} | ({"context": CONTEXT} if is_decode else {}),
               fields=("last_hidden_state",), decode_batch=tokens if is_decode else 0, repeats=not 1 < tokens < 512,
               state={} if is_decode else {"use_cache": False})  # fmt: skip


def _train_lora(tokens: int) -> Row:
    def make(tiny: bool) -> nn.Module:
        return vision.Squared(language.lora_llama(tiny), "last_hidden_state")

    return Row(f"train lora-llama {tokens} tokens", make, partial(_embeddings, LLAMA_3_8B, 1, tokens),
               {"tokens": tokens, "layers": 2, "rank": lora.RANK, "lora": lora.which()}, TRAINING, repeats=False,
               state={"use_cache": False}, trained=lambda module: [parameter for _, parameter in lora.adapters(module)])  # fmt: skip


def _decoder(name: str, make: Callable[[bool], nn.Module], settings: dict[str, Any], tokens: int) -> Row:
    return Row(f"{name} {tokens} tokens", make, partial(_embeddings, settings, 1, tokens), {"tokens": tokens, "layers": 2},
               fields=("last_hidden_state",), state={"use_cache": False})  # fmt: skip


def _both_towers(draw: Draw, tiny: bool) -> Inputs:
    words, seq, size = (language.TINY_WORDS, 11, 32) if tiny else (language.CLIP_WORDS, 77, 224)
    return {"input_ids": draw.ids(words, 1, seq), "pixel_values": draw.normal(1, 3, size, size)}


def _translation(draw: Draw, tiny: bool) -> Inputs:
    words, seq, decoded = (language.TINY_WORDS, 11, 7) if tiny else (language.T5_WORDS, 128, 64)
    return {"input_ids": draw.ids(words, 1, seq), "decoder_input_ids": draw.ids(words, 1, decoded)}


def _speech(draw: Draw, tiny: bool) -> Inputs:
    if tiny:
        return {"input_features": draw.normal(1, language.TINY_MELS, language.TINY_FRAMES),
                "decoder_input_ids": draw.ids(language.TINY_WORDS, 1, 7)}  # fmt: skip
    return {"input_features": draw.normal(1, language.WHISPER_MELS, language.WHISPER_FRAMES),
            "decoder_input_ids": draw.ids(language.WHISPER_WORDS, 1, 64)}  # fmt: skip


# -- diffusion


def _mmdit(width: int, pixels: int, words: int, num_blocks: int = 6) -> Row:
    def make(tiny: bool) -> nn.Module:
        return MMDiT(2 * HEAD_DIM, 2) if tiny else MMDiT(width, num_blocks)

    def sample(draw: Draw, tiny: bool) -> Inputs:
        own, seq, text = (2 * HEAD_DIM, 16, 5) if tiny else (width, pixels, words)
        return {"image": draw.normal(1, seq, 64), "text": draw.normal(1, text, own), "condition": draw.normal(1, own)}

    return Row(f"mmdit-{width} {pixels}+{words}", make, sample, {"tokens": [pixels, words], "width": width, "blocks": num_blocks})


def _unet(size: int) -> Row:
    def make(tiny: bool) -> nn.Module:
        return ControlledUNet((64, 64), (0, 1), 16) if tiny else ControlledUNet((320, 640, 1280), (0, 1, 2), 2048)

    def sample(draw: Draw, tiny: bool) -> Inputs:
        pixels, time, words, width = (8, 64, 5, 16) if tiny else (size, 320, 77, 2048)
        latents = {name: draw.image(1, 4, pixels, pixels) for name in ("latents", "hint")}
        return latents | {"time": draw.normal(1, time), "text": draw.normal(1, words, width)}

    return Row(f"unet+controlnet {size}x{size}", make, sample, {"latents": size, "channels": [320, 640, 1280], "transformers": [0, 1, 2]},
               is_channels_last=True)  # fmt: skip


ROWS: tuple[Row, ...] = (
    _timm("hrnet_w18", 1),
    _timm("inception_v3", 1),
    _lora(1),
    _lora(64),
    _mmdit(1536, 1024, 512),
    _timm("nasnetalarge", 1),
    _timm("resnet50", 1, CONTROL),
    _train_timm("hrnet_w18", 8, "hrnet_w18"),
    _unet(64),
    _lora(16),
    _lora(512),
    _mmdit(1536, 256, 128),
    Row("clip-base b=1", language.clip, _both_towers, {"batch": 1}, fields=("logits_per_image", "text_embeds", "image_embeds")),
    _decoder("falcon-h1", language.falcon_h1, language.FALCON_H1_1B, 256),
    _decoder("qwen2-moe", language.qwen2_moe, language.QWEN_MOE_A3B, 64),
    _timm("hrnet_w18", 8),
    _timm("densenet121", 1, CONTROL),
    _timm("convnext_tiny", 1, CONTROL),
    Row("whisper-base b=1", language.whisper, _speech, {"batch": 1, "decoded": 64}, fields=("logits", "encoder_last_hidden_state")),
    Row("t5-small b=1", language.t5, _translation, {"batch": 1, "tokens": [128, 64]}, fields=("logits", "encoder_last_hidden_state")),
    _timm("inception_v3", 8),
    _mmdit(3072, 4096, 512),
    _train_lora(512),
    _train_timm("vit_large_patch16_224", 8, "vit-l"),
    _timm("hrnet_w48", 1),
    _unet(32),
    _timm("resnet50", 8, CONTROL),
    _timm("densenet121", 8, CONTROL),
    _timm("convnext_tiny", 8, CONTROL),
    _timm("hrnet_w48", 8),
    _timm("nasnetalarge", 8),
)
NAMES = [row.name for row in ROWS]
HRNET, LORA = "hrnet_w18 b=1", "lora-llama 1 token"


def select(pattern: str = "*") -> list[Row]:
    """The rows whose name matches one of the comma-separated globs."""
    return cases.select(ROWS, pattern)
