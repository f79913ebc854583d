"""Real models, unmodified, small enough for seconds on a CPU: random weights, made locally, nothing downloaded.

One row of `ZOO` per model. A row builds its module in eval mode, makes fresh inputs for any batch size, and says
which tensors of its result to compare. `reference` is the same model in float64 throughout.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import dynaflow.testing.torchvision_shim  # noqa: F401  (before timm imports torchvision)

Inputs = dict[str, Tensor]

# No sequence length equals a batch size in use (1, 2, 3, 8, 17): which dim is the batch must not be guessed from its size.
SEQ, DECODER_SEQ, VOCAB = 11, 7, 97


@dataclass(frozen=True, slots=True)
class Entry:
    """One model of the zoo."""

    name: str
    # () -> module, freshly constructed by its library's own class
    make: Callable[[], nn.Module]
    # (batch, generator) -> keyword arguments of the module
    sample: Callable[[int, torch.Generator], Inputs]
    # fields of the result to compare; empty when the result is a tensor
    fields: tuple[str, ...] = ()
    # chooses experts by a top-k: compared in fp32 only, where a rounding does not flip the choice
    is_routed: bool = False
    # what a reader of a failing row should know
    note: str = ""

    def build(self, seed: int = 0) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = self.make().eval()
            _roughen(module)
        return module.requires_grad_(False)

    def inputs(self, batch: int, seed: int = 0) -> Inputs:
        return self.sample(batch, torch.Generator().manual_seed(1000 * seed + batch))

    def outputs(self, result: Any) -> list[Tensor]:
        return [getattr(result, field) for field in self.fields] if self.fields else [result]

    def reference(self, module: nn.Module, inputs: Inputs) -> list[Tensor]:
        """What the module would give in float64, its internal casts to float32 included."""
        wide = copy.deepcopy(module).double()
        if self.is_routed:
            wide.set_experts_implementation("eager")  # the grouped matrix product knows no float64
        with torch.no_grad(), _Float64():
            return self.outputs(wide(**{k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}))


class _Float64(TorchFunctionMode):
    """float32, asked for inside a model (norms, rotary angles, router logits), becomes float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        widen = {torch.float32: torch.float64}.get
        if func is Tensor.float:
            func = Tensor.double
        args = tuple(widen(a, a) if isinstance(a, torch.dtype) else a for a in args)
        kwargs = {k: widen(v, v) if isinstance(v, torch.dtype) else v for k, v in (kwargs or {}).items()}
        return func(*args, **kwargs)


def _roughen(module: nn.Module) -> None:
    """Give what libraries start at 0 or 1 (norms, biases, layer scales, running statistics) a value that matters."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim < 2:
                parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in module.named_buffers():
            if name.endswith("running_mean"):
                buffer.add_(0.1 * torch.randn_like(buffer))
            elif name.endswith("running_var"):
                buffer.mul_(0.5 + torch.rand_like(buffer))


# Inputs


def _ids(batch: int, g: torch.Generator, seq: int = SEQ) -> Tensor:
    return torch.randint(3, VOCAB, (batch, seq), generator=g)


def _text(batch: int, g: torch.Generator, seq: int = SEQ) -> Inputs:
    """Token ids, and a mask under which every row but the last is padded on the right (a lone row is padded too)."""
    lengths = torch.randint(seq // 2, seq, (batch, 1), generator=g)
    if batch > 1:
        lengths[-1] = seq
    return {"input_ids": _ids(batch, g, seq), "attention_mask": (torch.arange(seq) < lengths).long()}


def _bert_text(batch: int, g: torch.Generator) -> Inputs:
    return _text(batch, g) | {"token_type_ids": torch.randint(0, 2, (batch, SEQ), generator=g)}


def _translation(batch: int, g: torch.Generator) -> Inputs:
    return _text(batch, g) | {"decoder_input_ids": _ids(batch, g, DECODER_SEQ)}


def _image(name: str, size: int) -> Callable[[int, torch.Generator], Inputs]:
    return lambda batch, g: {name: torch.randn(batch, 3, size, size, generator=g)}


def _image_and_text(batch: int, g: torch.Generator) -> Inputs:
    return _image("pixel_values", 32)(batch, g) | _text(batch, g)


def _speech(batch: int, g: torch.Generator) -> Inputs:
    return {
        "input_features": torch.randn(batch, 16, 60, generator=g),
        "decoder_input_ids": _ids(batch, g, DECODER_SEQ),
    }


# Models

_TOKENS = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_LAYERS = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.12}
_ENCODER = _LAYERS | {"max_position_embeddings": 64}
_DECODER = _ENCODER | _TOKENS | {"num_key_value_heads": 2, "use_cache": False}
_EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "norm_topk_prob": True}


def _hf(model: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**settings))

    return make


def _clip() -> nn.Module:
    import transformers

    vision = _ENCODER | {"image_size": 32, "patch_size": 8}
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=_ENCODER | _TOKENS, vision_config=vision, projection_dim=24))


def _timm(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import timm

        return timm.create_model(name, pretrained=False, num_classes=10)

    return make


def _convnext() -> nn.Module:
    from timm.models.convnext import ConvNeXt

    return ConvNeXt(num_classes=10, depths=(1, 1, 2, 1), dims=(16, 32, 48, 64))


_qwen3 = _hf("Qwen3ForCausalLM", "Qwen3Config", **_DECODER, head_dim=16)
_qwen3_moe = _hf("Qwen3MoeForCausalLM", "Qwen3MoeConfig", **_DECODER, **_EXPERTS, head_dim=16, num_experts=6)
_deepseek_v3 = _hf(
    "DeepseekV3ForCausalLM", "DeepseekV3Config", **(_DECODER | {"num_key_value_heads": 4}), **_EXPERTS, n_routed_experts=6, n_group=2,
    topk_group=1, n_shared_experts=1, first_k_dense_replace=1, q_lora_rank=24, kv_lora_rank=20, qk_rope_head_dim=8, qk_nope_head_dim=16,
    v_head_dim=16,
)  # fmt: skip
_gpt2 = _hf(
    "GPT2LMHeadModel", "GPT2Config", **_TOKENS, n_embd=64, n_layer=2, n_head=4, n_positions=64, initializer_range=0.12, use_cache=False,
)  # fmt: skip
_t5 = _hf(
    "T5ForConditionalGeneration", "T5Config", vocab_size=VOCAB, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4,
    decoder_start_token_id=0, use_cache=False,
)  # fmt: skip
_vit = _hf("ViTForImageClassification", "ViTConfig", **_LAYERS, image_size=32, patch_size=8, num_labels=10)
_whisper = _hf(
    "WhisperForConditionalGeneration", "WhisperConfig", **_TOKENS, d_model=64, encoder_layers=2, decoder_layers=2,
    encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96, num_mel_bins=16, max_source_positions=30,
    max_target_positions=32, init_std=0.12, decoder_start_token_id=1, use_cache=False,
)  # fmt: skip
_mamba2 = _hf(
    "Mamba2ForCausalLM", "Mamba2Config", **_TOKENS, hidden_size=32, expand=2, num_heads=4, head_dim=16, state_size=12, n_groups=2,
    num_hidden_layers=2, chunk_size=4, use_cache=False,
)  # fmt: skip
_falcon_h1 = _hf(
    "FalconH1ForCausalLM", "FalconH1Config", **_DECODER, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=2,
    mamba_d_state=12, mamba_chunk_size=4,
)  # fmt: skip

_CLIP_FIELDS = ("logits_per_image", "logits_per_text", "text_embeds", "image_embeds")

ZOO: tuple[Entry, ...] = (
    Entry("llama", _hf("LlamaForCausalLM", "LlamaConfig", **_DECODER), _text, ("logits",)),
    Entry("qwen3", _qwen3, _text, ("logits",)),
    Entry("qwen3_moe", _qwen3_moe, _text, ("logits",), is_routed=True),
    Entry("deepseek_v3", _deepseek_v3, _text, ("logits",), is_routed=True),
    Entry("gpt2", _gpt2, _text, ("logits",)),
    Entry("bert", _hf("BertForMaskedLM", "BertConfig", **_ENCODER, vocab_size=VOCAB), _bert_text, ("logits",)),
    Entry("t5", _t5, _translation, ("logits", "encoder_last_hidden_state")),
    Entry("clip", _clip, _image_and_text, _CLIP_FIELDS, note="logits compare every image with every text: they mix the batch by design"),
    Entry("vit", _vit, _image("pixel_values", 32), ("logits",)),
    Entry("whisper", _whisper, _speech, ("logits", "encoder_last_hidden_state")),
    Entry("mamba2", _mamba2, _text, ("logits",)),
    Entry("falcon_h1", _falcon_h1, _text, ("logits",)),
    Entry("convnext", _convnext, _image("x", 32)),
    Entry("hrnet_w18_small", _timm("hrnet_w18_small"), _image("x", 32)),
    Entry("resnet18", _timm("resnet18"), _image("x", 32)),
    Entry("resnet50", _timm("resnet50"), _image("x", 32)),
)


def select(pattern: str = "*") -> list[Entry]:
    """The entries whose name matches one of the comma-separated globs."""
    return [e for e in ZOO if any(fnmatch(e.name, p) for p in pattern.split(","))]


def prompts(batch: int, device: str = "cpu") -> Inputs:
    """Prompts of different lengths for `generate`, padded on the left as it wants them."""
    g = torch.Generator().manual_seed(batch)
    lengths = torch.randint(SEQ // 2, SEQ, (batch, 1), generator=g)
    lengths[0] = SEQ
    mask = (torch.arange(SEQ) >= SEQ - lengths).long()
    return {"input_ids": (_ids(batch, g) * mask).to(device), "attention_mask": mask.to(device)}
