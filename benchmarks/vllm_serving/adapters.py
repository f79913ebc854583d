"""LoRA adapters with random weights, as PEFT would save them: a folder with adapter_config.json and adapter_model.safetensors each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def shapes(model: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Linear layer -> what goes in, what comes out."""
    hidden, inner, head = model["hidden_size"], model["intermediate_size"], model["head_dim"]
    queries, keys = head * model["num_attention_heads"], head * model["num_key_value_heads"]
    return {"self_attn.q_proj": (hidden, queries), "self_attn.k_proj": (hidden, keys), "self_attn.v_proj": (hidden, keys),
            "self_attn.o_proj": (queries, hidden), "mlp.gate_proj": (hidden, inner), "mlp.up_proj": (hidden, inner),
            "mlp.down_proj": (inner, hidden)}  # fmt: skip


def make(folder: Path, model: dict[str, Any], number: int, rank: int) -> list[str]:
    """`number` of them on all linear layers; where they lie."""
    import torch
    from safetensors.torch import save_file

    dtype = getattr(torch, model["torch_dtype"])
    targets = [name.rsplit(".")[-1] for name in shapes(model)]
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "target_modules": targets, "bias": "none"}
    paths = []
    for adapter in range(number):
        generator = torch.Generator().manual_seed(adapter + 1)
        path = folder / f"adapter{adapter}"
        path.mkdir()
        tensors = {}
        for layer in range(model["num_hidden_layers"]):
            for name, (width, out) in shapes(model).items():
                for which, shape in (("A", (rank, width)), ("B", (out, rank))):
                    weight = torch.randn(shape, generator=generator) * shape[1] ** -0.5
                    tensors[f"base_model.model.model.layers.{layer}.{name}.lora_{which}.weight"] = weight.to(dtype)
        save_file(tensors, path / "adapter_model.safetensors")
        (path / "adapter_config.json").write_text(json.dumps(config))
        paths.append(str(path))
    return paths
