"""Make a torchvision whose C++ operators cannot load importable.

torchvision built for another torch (a CUDA wheel beside a CPU torch, say) fails on import with
"operator torchvision::nms does not exist": its fake kernels are registered by name, whether or not
the operators are there. timm and parts of transformers import torchvision although no model of ours
runs such an operator.

Importing this module declares the missing names, without an implementation. It does nothing when
torchvision is absent, already imported, or able to load its own operators.
"""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

import torch

# The operators that torchvision registers by name without asking whether they exist.
_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)

# Declarations live as long as their Library object.
_libraries: list[torch.library.Library] = []


def install() -> bool:
    """Declare what torchvision needs and cannot bring; True when something was declared."""
    spec = importlib.util.find_spec("torchvision") if "torchvision" not in sys.modules else None
    if spec is None or spec.origin is None or _libraries or _loads_operators(Path(spec.origin).parent):
        return False
    library = torch.library.Library("torchvision", "DEF")
    for schema in _SCHEMAS:
        library.define(schema)
    _libraries.append(library)
    return True


def _loads_operators(package: Path) -> bool:
    """Load the C++ extension as torchvision itself would (a second load is a no-op)."""
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = package / f"_C{suffix}"
        if path.exists():
            try:
                torch.ops.load_library(str(path))
            except (OSError, RuntimeError):
                return False
            return True
    return False


install()
