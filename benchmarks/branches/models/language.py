"""transformers' own classes from local configurations, random weights, a few layers of the named shape."""

from __future__ import annotations

from typing import Any

from torch import nn

from benchmarks.backend.models import LLAMA_3_8B
from benchmarks.branches.models.lora import with_adapters

# inputs are embeddings: no vocabulary to speak of
_NO_WORDS = {"vocab_size": 32, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
TINY_WIDTH = 64
_TINY = {"hidden_size": TINY_WIDTH, "intermediate_size": 96, "num_attention_heads": 4, "initializer_range": 0.12}
_TINY_DECODER = _TINY | {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64}

FALCON_H1_1B = {
    "hidden_size": 2048, "intermediate_size": 4096, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128,
    "mamba_d_ssm": 3072, "mamba_n_heads": 48, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_chunk_size": 128,
}  # fmt: skip
CLIP_BASE_TEXT = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "num_hidden_layers": 12}
CLIP_BASE_VISION = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "num_hidden_layers": 12, "patch_size": 32}
QWEN_MOE_A3B = {
    "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
}  # fmt: skip


def width(settings: dict[str, Any], tiny: bool) -> int:
    """Of the embeddings that a decoder takes."""
    return TINY_WIDTH if tiny else int(settings["hidden_size"])


def lora_llama(tiny: bool) -> nn.Module:
    """Two layers of Llama-3-8B with unmerged adapters on all linears."""
    from transformers import LlamaConfig, LlamaModel

    settings = (_TINY_DECODER if tiny else LLAMA_3_8B) | _NO_WORDS | {"num_hidden_layers": 2}
    return with_adapters(LlamaModel(LlamaConfig(**settings)), rank=4 if tiny else 16)


def falcon_h1(tiny: bool) -> nn.Module:
    """Two layers, attention and SSM heads side by side; transformers' own path in plain torch."""
    from transformers import FalconH1Config, FalconH1Model

    small = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 12, "mamba_chunk_size": 4}
    settings = (_TINY_DECODER | small if tiny else FALCON_H1_1B) | _NO_WORDS | {"num_hidden_layers": 2, "use_cache": False}
    return FalconH1Model(FalconH1Config(**settings))


def qwen2_moe(tiny: bool) -> nn.Module:
    """Two layers of routed experts with a shared one beside them; grouped products, which a CUDA Graph can hold."""
    from transformers import Qwen2MoeConfig, Qwen2MoeModel

    small = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}
    tiny_settings = {k: v for k, v in _TINY_DECODER.items() if k != "head_dim"} | small
    settings = (tiny_settings if tiny else QWEN_MOE_A3B) | _NO_WORDS | {"num_hidden_layers": 2, "use_cache": False}
    model = Qwen2MoeModel(Qwen2MoeConfig(**settings))
    model.set_experts_implementation("grouped_mm")
    return model


CLIP_WORDS, T5_WORDS, WHISPER_WORDS, TINY_WORDS = 49408, 32128, 51865, 97


def clip(tiny: bool) -> nn.Module:
    """CLIP ViT-B/32: both towers in one forward."""
    from transformers import CLIPConfig, CLIPModel

    layers = _TINY | {"num_hidden_layers": 2}
    words = {"vocab_size": TINY_WORDS if tiny else CLIP_WORDS, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    text = (layers if tiny else CLIP_BASE_TEXT) | words | {"max_position_embeddings": 77}
    vision = layers | {"image_size": 32, "patch_size": 8} if tiny else CLIP_BASE_VISION | {"image_size": 224}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=24 if tiny else 512))


def t5(tiny: bool) -> nn.Module:
    """T5-small: 6 encoder and 6 decoder layers."""
    from transformers import T5Config, T5ForConditionalGeneration

    shape = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4} if tiny else {"d_model": 512, "d_kv": 64, "d_ff": 2048}
    config = T5Config(vocab_size=TINY_WORDS if tiny else T5_WORDS, **shape, decoder_start_token_id=0, use_cache=False)
    return T5ForConditionalGeneration(config)


WHISPER_MELS, WHISPER_FRAMES, TINY_MELS, TINY_FRAMES = 80, 3000, 16, 60


def whisper(tiny: bool) -> nn.Module:
    """Whisper-base: 6 encoder and 6 decoder layers."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    width, heads, ffn, layers = (64, 4, 96, 2) if tiny else (512, 8, 2048, 6)
    return WhisperForConditionalGeneration(WhisperConfig(
        vocab_size=TINY_WORDS if tiny else WHISPER_WORDS, bos_token_id=1, eos_token_id=2, pad_token_id=0, decoder_start_token_id=1,
        d_model=width, encoder_layers=layers, decoder_layers=layers, encoder_attention_heads=heads, decoder_attention_heads=heads,
        encoder_ffn_dim=ffn, decoder_ffn_dim=ffn, num_mel_bins=TINY_MELS if tiny else WHISPER_MELS,
        max_source_positions=(TINY_FRAMES if tiny else WHISPER_FRAMES) // 2, max_target_positions=448, use_cache=False))  # fmt: skip
