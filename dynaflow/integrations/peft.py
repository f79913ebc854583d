"""PEFT: `df.optimize(peft_model, strategy=...)`. The base model's forward is compiled, adapters inside: branches beside their base layers.

PEFT calls the base model's `forward`, from its own `forward` and from `generate`. Adapters may be added, set, switched off and merged
afterwards. Another adapter per row (`adapter_names=[...]`) makes the batch size a constant: such calls are not split.
"""

from __future__ import annotations

from typing import Any

import torch


def models(target: Any) -> dict[str, torch.nn.Module]:
    return {"base_model": target.get_base_model()}
