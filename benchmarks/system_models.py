"""Models and pipelines of the systems that DynaFlow works inside of, with random weights: tiny for the tests, full for a GPU.

No hub: everything is made from configs. Text encoders are left out, pipelines get embeddings. Full ones have the width of the real models
and a few of their layers, so that they are compiled in seconds; their VAE is tiny (8 pixels are one latent), and is not run.
"""

from __future__ import annotations

from typing import Any

import torch

PAD = 0


def llama(is_tiny: bool = True, **config: Any) -> Any:
    """Tiny, or a Llama-3-8B with 8 layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tiny = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "vocab_size": 64, "max_position_embeddings": 128}  # fmt: skip
    full = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 8, "num_attention_heads": 32, "num_key_value_heads": 8,
            "vocab_size": 32000, "max_position_embeddings": 8192}  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**(tiny if is_tiny else full), "pad_token_id": PAD, "eos_token_id": None, **config})).eval()


def lora(is_tiny: bool = True, num_adapters: int = 2, rank: int = 4, model: Any = None, **options: Any) -> Any:
    """A Llama with unmerged adapters a0, a1, ..., the first one active. None of their weights is zero. Options are get_peft_model's."""
    from peft import LoraConfig, get_peft_model

    model = llama(is_tiny) if model is None else model
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"]
    torch.manual_seed(1)
    for i in range(num_adapters):
        config = LoraConfig(r=rank + i, target_modules=targets, init_lora_weights=False)
        if i == 0:
            model = get_peft_model(model, config, adapter_name="a0", **options)
        else:
            model.add_adapter(f"a{i}", config)
    return model.eval()


def _vae(latent_channels: int, is_tiny: bool) -> Any:
    from diffusers import AutoencoderKL

    channels = [4, 8] if is_tiny else [4, 8, 8, 8]
    blocks = {"down_block_types": ["DownEncoderBlock2D"] * len(channels), "up_block_types": ["UpDecoderBlock2D"] * len(channels),
              "block_out_channels": channels}  # fmt: skip
    return AutoencoderKL(
        in_channels=3, out_channels=3, latent_channels=latent_channels, norm_num_groups=4, shift_factor=0.06, scaling_factor=1.5, **blocks
    ).eval()  # fmt: skip


def _quiet(pipe: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    return pipe


def flux(is_tiny: bool = True) -> Any:
    """Tiny, or FLUX.1's width with a few of its blocks: text and image in streams of their own, then in one."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    tiny = {"in_channels": 16, "num_layers": 2, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2,
            "joint_attention_dim": 32, "pooled_projection_dim": 32, "axes_dims_rope": [4, 4, 8]}  # fmt: skip
    full = {"num_layers": 2, "num_single_layers": 4, "guidance_embeds": True}
    torch.manual_seed(0)
    transformer = FluxTransformer2DModel(patch_size=1, **(tiny if is_tiny else full)).eval()
    encoders = dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    return _quiet(FluxPipeline(
        transformer=transformer, vae=_vae(4 if is_tiny else 16, is_tiny), scheduler=FlowMatchEulerDiscreteScheduler(),
        **encoders))  # fmt: skip


def sd3(is_tiny: bool = True) -> Any:
    """Tiny, or Stable Diffusion 3's MMDiT with a quarter of its blocks. Both halves of the guidance are one batch."""
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline

    tiny = {"sample_size": 32, "patch_size": 1, "in_channels": 4, "num_layers": 2, "attention_head_dim": 8, "num_attention_heads": 4,
            "caption_projection_dim": 32, "joint_attention_dim": 32, "pooled_projection_dim": 64, "out_channels": 4}  # fmt: skip
    full = {"num_layers": 6, "num_attention_heads": 24, "attention_head_dim": 64, "caption_projection_dim": 1536}
    torch.manual_seed(0)
    transformer = SD3Transformer2DModel(**(tiny if is_tiny else full)).eval()
    encoders = dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "text_encoder_3", "tokenizer_3"))
    return _quiet(StableDiffusion3Pipeline(
        transformer=transformer, vae=_vae(4 if is_tiny else 16, is_tiny), scheduler=FlowMatchEulerDiscreteScheduler(),
        **encoders))  # fmt: skip


def sdxl(is_tiny: bool = True) -> Any:
    """Tiny, or SDXL's UNet with a few of its transformer blocks, and a ControlNet. Both halves of the guidance are one batch."""
    from diffusers import ControlNetModel, EulerDiscreteScheduler, StableDiffusionXLControlNetPipeline, UNet2DConditionModel

    both = {"in_channels": 4, "use_linear_projection": True, "addition_embed_type": "text_time"}
    tiny = {"block_out_channels": (8, 16), "layers_per_block": 1, "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "attention_head_dim": (2, 4), "addition_time_embed_dim": 8, "transformer_layers_per_block": (1, 2),
            "projection_class_embeddings_input_dim": 80, "cross_attention_dim": 32, "norm_num_groups": 4}  # fmt: skip
    full = {"block_out_channels": (320, 640, 1280), "layers_per_block": 1, "attention_head_dim": (5, 10, 20),
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"), "addition_time_embed_dim": 256,
            "transformer_layers_per_block": (1, 1, 2), "projection_class_embeddings_input_dim": 2816,
            "cross_attention_dim": 2048}  # fmt: skip
    shape = {**both, **(tiny if is_tiny else full)}
    up = ("CrossAttnUpBlock2D", "UpBlock2D") if is_tiny else ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D")
    torch.manual_seed(0)
    unet = UNet2DConditionModel(**shape, sample_size=16 if is_tiny else 128, out_channels=4, up_block_types=up).eval()
    # images have 1/2 (tiny) or 1/8 of the size as latents, and the ControlNet's own layers bring them there
    conditioning = (4, 8) if is_tiny else (16, 32, 96, 256)
    controlnet = ControlNetModel(**shape, conditioning_embedding_out_channels=conditioning).eval()
    # zeros at first: nothing would be seen of it
    for block in (*controlnet.controlnet_down_blocks, controlnet.controlnet_mid_block, controlnet.controlnet_cond_embedding.conv_out):
        torch.nn.init.normal_(block.weight, std=0.05)
    encoders = dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    return _quiet(StableDiffusionXLControlNetPipeline(
        unet=unet, controlnet=controlnet, vae=_vae(4, is_tiny), scheduler=EulerDiscreteScheduler(), add_watermarker=False,
        **encoders))  # fmt: skip


def wan(is_tiny: bool = True) -> Any:
    """Tiny, or Wan 2.1's 1.3B transformer with a third of its blocks. The halves of the guidance are two calls."""
    from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel

    tiny = {"num_attention_heads": 2, "attention_head_dim": 12, "text_dim": 32, "ffn_dim": 32, "num_layers": 2, "rope_max_seq_len": 32}
    full = {"num_attention_heads": 12, "attention_head_dim": 128, "text_dim": 4096, "ffn_dim": 8960, "num_layers": 10}
    torch.manual_seed(0)
    transformer = WanTransformer3DModel(**(tiny if is_tiny else full)).eval()
    vae = AutoencoderKLWan(base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]).eval()
    scheduler = FlowMatchEulerDiscreteScheduler(shift=7.0)
    return _quiet(WanPipeline(transformer=transformer, vae=vae, scheduler=scheduler, tokenizer=None, text_encoder=None))


PIPELINES = {"flux": flux, "sd3": sd3, "sdxl": sdxl, "wan": wan}
# what a prompt's embeddings and its pooled ones have as their last dim: tiny, full
WIDTHS = {"flux": ((32, 32), (4096, 768)), "sd3": ((32, 64), (4096, 2048)), "sdxl": ((32, 32), (2048, 1280)), "wan": ((32, 0), (4096, 0))}


# pixels of a side: tiny, full
SIZES = {"flux": (16, 512), "sd3": (16, 512), "sdxl": (32, 512), "wan": (16, 256)}


def request(
    name: str,
    num_images: int,
    num_steps: int,
    is_tiny: bool = True,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    size: int | None = None,
    seed: int | None = None,
    is_guided: bool = True,
) -> dict[str, Any]:
    """The arguments of a call of that pipeline: the same each time, for the same seed. `is_guided`: by a negative prompt, too."""
    generator = torch.Generator().manual_seed(num_images if seed is None else seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    width, pooled = WIDTHS[name][not is_tiny]
    num_tokens = {"flux": 512, "sd3": 333, "sdxl": 77, "wan": 128}[name] if not is_tiny else 6
    size = SIZES[name][not is_tiny] if size is None else size
    wanted: dict[str, Any] = {
        "prompt_embeds": normal(num_images, num_tokens, width), "height": size, "width": size, "num_inference_steps": num_steps,
        "guidance_scale": 5.0 if is_guided and name != "flux" else 1.0, "output_type": "pt" if is_tiny else "latent",
        "generator": torch.Generator().manual_seed(7 if seed is None else seed),
    }  # fmt: skip
    if pooled:
        wanted["pooled_prompt_embeds"] = normal(num_images, pooled)
    if is_guided and name != "flux":
        wanted["negative_prompt_embeds"] = normal(num_images, num_tokens, width)
        if pooled:
            wanted["negative_pooled_prompt_embeds"] = normal(num_images, pooled)
    if name == "sdxl":
        wanted["image"] = torch.rand(1, 3, size, size, generator=generator).to(device, dtype)
    if name == "wan":
        wanted["num_frames"] = 5 if is_tiny else 17
    return wanted


def pixels(output: Any) -> torch.Tensor:
    images = output.images if hasattr(output, "images") else output.frames
    return images if isinstance(images, torch.Tensor) else torch.stack(list(images))
