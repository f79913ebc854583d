"""timm's convolutional nets and its ViT-L. A tiny net has the same kind of blocks, fewer and narrower."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

# of the images that the pretrained nets want
IMAGE_SIZES = {"inception_v3": 299, "nasnetalarge": 331}
TINY_SIZES = {"inception_v3": 75, "nasnetalarge": 64}
CALIBRATION_STEPS, CALIBRATION_BATCH = 3, 8


def image_size(name: str, tiny: bool) -> int:
    return TINY_SIZES.get(name, 32) if tiny else IMAGE_SIZES.get(name, 224)


def make(name: str, tiny: bool) -> nn.Module:
    import timm

    if tiny:
        return _TINY[name]()
    return timm.create_model(name, pretrained=False)


def _from(module: str, name: str, **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import importlib

        return getattr(importlib.import_module(f"timm.models.{module}"), name)(num_classes=10, **settings)

    return build


_hrnet = _from("hrnet", "hrnet_w18_small")
_vit = _from("vision_transformer", "VisionTransformer", img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4)
_TINY: dict[str, Callable[[], nn.Module]] = {
    "hrnet_w18": _hrnet,
    "hrnet_w48": _hrnet,
    "inception_v3": _from("inception_v3", "inception_v3"),
    "nasnetalarge": _from("nasnet", "NASNetALarge", stem_size=8, num_features=24 * 8),
    "resnet50": _from("resnet", "resnet18"),
    "densenet121": _from("densenet", "DenseNet", growth_rate=8, block_config=(2, 2, 3, 2)),
    "convnext_tiny": _from("convnext", "ConvNeXt", depths=(1, 1, 2, 1), dims=(16, 32, 48, 64)),
    "vit_large_patch16_224": _vit,
}


def calibrate(module: nn.Module, size: int, generator: torch.Generator, dtype: torch.dtype, batch: int = CALIBRATION_BATCH) -> nn.Module:
    """Let every BatchNorm see what the net really makes of such images: an untrained net overflows, or dies out, otherwise."""
    norms = [m for m in module.modules() if isinstance(m, _BatchNorm)]
    if not norms:
        return module
    momenta = [m.momentum for m in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the plain mean over all batches
    module.train()
    with torch.no_grad():
        for _ in range(CALIBRATION_STEPS):
            module(torch.randn(batch, 3, size, size, generator=generator, device=generator.device).to(dtype))
    for norm, momentum in zip(norms, momenta):
        norm.momentum = momentum
    return module.eval()


class Squared(nn.Module):
    """A loss: the mean square of what the model returns."""

    def __init__(self, model: nn.Module, field: str = ""):
        super().__init__()
        self.model, self.field = model, field

    def forward(self, **inputs: Any) -> torch.Tensor:
        result = self.model(**inputs)
        return (getattr(result, self.field) if self.field else result).float().square().mean()
