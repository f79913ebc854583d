"""PEFT: `df.optimize(peft_model, strategy=...)`. The base model's forward is compiled, adapters inside: branches beside their base layers.

PEFT calls the base model's `forward`, from its own `forward` and from `generate`. Adapters may be added, set, switched off and merged
afterwards. Another adapter per row (`adapter_names=[...]`) makes the batch size a constant: such calls are not split.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTuner


def models(target: Any) -> dict[str, torch.nn.Module]:
    """PEFT calls the base model past the tuner that is around it. A layer of PEFT's is what it is."""
    if isinstance(target, BaseTuner):
        return {"base_model": target.model}
    is_whole = isinstance(target, torch.nn.Module) and hasattr(target, "get_base_model")
    return {"base_model": target.get_base_model()} if is_whole else {"": target}
