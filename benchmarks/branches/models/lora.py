"""Unmerged LoRA adapters on every linear of a model: PEFT's where it is installed, else the same sums of our own.

BRANCHES_LORA=peft or own chooses; by default PEFT's where it can be imported.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence

import torch
from torch import Tensor, nn

RANK, ALPHA = 16, 32
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def which() -> str:
    """Whose adapters: "peft" or "own"."""
    wish = os.environ.get("BRANCHES_LORA", "auto")
    if wish not in ("auto", "peft", "own"):
        raise SystemExit(f"BRANCHES_LORA={wish}: it is auto, peft or own")
    return wish if wish != "auto" else "peft" if importlib.util.find_spec("peft") else "own"


class LoRALinear(nn.Module):
    """base(x) + B(A(x)) * scaling, as peft.tuners.lora.Linear computes it."""

    def __init__(self, base: nn.Linear, rank: int, scaling: float):
        super().__init__()
        self.base_layer, self.scaling = base, scaling
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x)) * self.scaling


def with_adapters(model: nn.Module, rank: int = RANK, linears: Sequence[str] = LINEARS) -> nn.Module:
    """The model with adapters on these linears, in place; neither half of an adapter is zero."""
    if which() == "peft":
        from peft import LoraConfig, inject_adapter_in_model

        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(linears), lora_dropout=0.0, init_lora_weights=False)
        model = inject_adapter_in_model(config, model)
    else:
        for parent in list(model.modules()):
            for name, linear in list(parent.named_children()):
                if name in linears and isinstance(linear, nn.Linear):
                    setattr(parent, name, LoRALinear(linear, rank, ALPHA / RANK))
    with torch.no_grad():
        for name, parameter in adapters(model):
            parameter.normal_(std=parameter.shape[1] ** -0.5 if "lora_A" in name else 0.02)
    return model


def adapters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if "lora_" in name]
