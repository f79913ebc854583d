"""What the caches' keys are made of on this machine: what was compiled elsewhere is found only where all of it is equal.

A reference program is compiled over empty caches: its own keys say at once whether all is equal, the components say what is not.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import re
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# shapes (batch, heads, queries, keys, head dim) for which torch says which attention it takes
ATTENTION = {
    "decode": (16, 32, 1, 640, 128), "prefill": (1, 32, 512, 512, 128), "text": (1, 8, 77, 77, 64), "image": (1, 24, 1536, 1536, 64),
}  # fmt: skip
# of the environment, what may change what is compiled
PREFIXES = tuple("TORCH TRITON CUDA CUBLAS ATEN OMP MKL PYTORCH CUDNN NVIDIA_TF32 DISABLE_ MLIR LLVM CXX CC".split())
PACKAGES = ("torch", "triton", "numpy", "transformers", "timm", "peft", "accelerate", "diffusers", "torchvision", "sympy",
            "nvidia-cudnn-cu13", "nvidia-cublas", "nvidia-cuda-runtime", "cuda-bindings")  # fmt: skip


def differences(here: Any, there: Any, at: str = "") -> Iterator[str]:
    """Lines that say where two of these differ."""
    if isinstance(here, dict) and isinstance(there, dict):
        for name in sorted({*here, *there}):
            yield from differences(here.get(name), there.get(name), f"{at}.{name}" if at else name)
    elif isinstance(here, list) and isinstance(there, list) and len(here) == len(there):
        for i, both in enumerate(zip(here, there)):
            yield from differences(*both, f"{at}[{i}]")
    elif here != there:
        yield f"{at}: {here!r} is not {there!r}"


# what has to be equal for anything to be found; of the settings, all but those that keys leave out
DECISIVE = (
    "torch.key", "triton.key", "triton.environment", "triton.target", "system.hash", "device.inductor", "attention",
    "settings.inductor",
)  # fmt: skip
# the C++ compiler, which `benchmarks.lent` calls by its name alone
NAMED = "settings.inductor.cpp.cxx"


class OtherKeys(ValueError):
    """What is compiled here would not be found there."""


def decisive(here: dict[str, Any], there: dict[str, Any]) -> list[str]:
    return [line for line in differences(here, there) if line.startswith(DECISIVE) and not line.startswith(NAMED)]


def refuse(here: dict[str, Any], there: dict[str, Any]) -> None:
    if found := decisive(here, there):
        raise OtherKeys("what is compiled here would not be found there:\n  " + "\n  ".join(line[:300] for line in found[:10]))


def slug(row: str) -> str:
    """A row's name as part of a folder's."""
    return re.sub(r"[^a-z0-9_]+", "-", row.lower()).strip("-")


def keys() -> dict[str, Any]:
    """By name; what cannot be found out says why."""
    parts: dict[str, Callable[[], Any]] = {
        "python": _python, "packages": _packages, "environment": _environment, "torch": _torch, "triton": _triton, "device": _device,
        "system": _system, "attention": _attention, "speeds": _speeds, "settings": _settings, "dynaflow": _dynaflow,
        "reference": _reference,
    }  # fmt: skip
    return {name: _told(part) for name, part in parts.items()}


def _told(part: Callable[[], Any]) -> Any:
    try:
        return part()
    except Exception as error:  # noqa: BLE001 (a key that cannot be made here: the others can)
        return f"{type(error).__name__}: {error}"


def _python() -> dict[str, Any]:
    return {"version": platform.python_version(), "suffix": sysconfig.get_config_var("EXT_SUFFIX")}


def _packages() -> dict[str, str]:
    from benchmarks.provenance import versions

    return versions(*PACKAGES)


def _environment() -> dict[str, str]:
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)}


def _torch() -> dict[str, Any]:
    import torch
    from torch._inductor.codecache import torch_key

    root, left_out = Path(torch.__file__).parent, ("lib", "bin", "include", "share", "test", "__pycache__")
    return {"version": torch.__version__, "git": torch.version.git_version, "cuda": torch.version.cuda, "key": torch_key().hex(),
            "ptxas": hashlib.sha256((root / "bin" / "ptxas").read_bytes()).hexdigest()[:16],
            "parts": {part.name: _digest_of(part) for part in sorted(root.iterdir()) if part.name not in left_out}}  # fmt: skip


def _digest_of(path: Path) -> str:
    """Of Python's files, and of modules that are shared libraries: torch's key hashes both."""
    files = [path] if path.is_file() else sorted(f for f in path.rglob("*") if f.suffix in (".py", ".so") and "__pycache__" not in f.parts)
    whole = hashlib.sha256()
    for file in files if not path.is_file() or path.suffix in (".py", ".so") else ():
        whole.update(f"{file.relative_to(path)}\n".encode() + file.read_bytes())
    return whole.hexdigest()[:16]


def _triton() -> dict[str, Any]:
    import triton
    from torch.utils._triton import triton_backend
    from triton import knobs
    from triton.backends.nvidia.compiler import CUDAOptions
    from triton.runtime.cache import triton_key

    root, read = Path(triton.__file__).parent, ("compiler", "backends", "language", "runtime")
    backend = triton_backend()
    library = root / "_C" / f"libtriton.{sysconfig.get_config_var('EXT_SUFFIX').split('.')[-1]}"
    return {"version": triton.__version__, "key": _short(triton_key()), "backend": backend.hash(), "target": str(backend.target),
            "library": hashlib.sha256(library.read_bytes()).hexdigest()[:16], "options": CUDAOptions(arch="sm90").hash()[:16],
            "environment": _invalidating(), "ptxas": str(knobs.nvidia.ptxas.version),
            "parts": {part.name: _digest_of(part) for part in sorted(root.iterdir()) if part.name in read}}  # fmt: skip


def _invalidating() -> dict[str, str]:
    from triton._C.libtriton import get_cache_invalidating_env_vars

    return dict(get_cache_invalidating_env_vars())


def _device() -> dict[str, Any]:
    import torch
    from torch._inductor.runtime.hints import DeviceProperties
    from triton.runtime import driver

    properties = torch.cuda.get_device_properties(0)
    names = [n for n in dir(properties) if not n.startswith("_") and n not in ("uuid", "pci_bus_id", "pci_device_id", "pci_domain_id")]
    return {"torch": {n: str(getattr(properties, n)) for n in names},
            "inductor": {k: str(v) for k, v in DeviceProperties.create(torch.device("cuda", 0))._asdict().items()},
            "triton": driver.active.utils.get_device_properties(0), "count": torch.cuda.device_count()}  # fmt: skip


def _system() -> dict[str, Any]:
    from torch._inductor.codecache import CacheBase

    return {**CacheBase.get_system(), "version": {k: _short(v) for k, v in CacheBase.get_system()["version"].items()}}


def _short(text: Any) -> str:
    return str(text) if len(str(text)) < 100 else hashlib.sha256(str(text).encode()).hexdigest()


def _attention() -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {"cudnn": torch.backends.cudnn.version(), "is_available": torch.backends.cudnn.is_available()}
    for name in ("flash", "mem_efficient", "math", "cudnn"):
        found[f"{name}_sdp"] = getattr(torch.backends.cuda, f"{name}_sdp_enabled")()
    for name, (batch, heads, queries, keys_, dim) in ATTENTION.items():
        q, k = (torch.empty(batch, heads, n, dim, device="cuda", dtype=torch.bfloat16) for n in (queries, keys_))
        for is_on in (True, False):
            before = torch.backends.cuda.cudnn_sdp_enabled()
            torch.backends.cuda.enable_cudnn_sdp(is_on)
            try:
                with torch.no_grad():
                    found[f"{name}, cuDNN's {'on' if is_on else 'off'}"] = torch._fused_sdp_choice(q, k, k)
                    if queries == 1:
                        mask = torch.empty(batch, 1, 1, keys_, device="cuda", dtype=torch.bool)
                        found[f"{name}, masked, cuDNN's {'on' if is_on else 'off'}"] = torch._fused_sdp_choice(q, k, k, mask)
            finally:
                torch.backends.cuda.enable_cudnn_sdp(before)
    return found


def _speeds() -> dict[str, Any]:
    """What Inductor decides by whether padding a product could pay."""
    import torch
    from torch._inductor import utils
    from torch._inductor.fx_passes.pad_mm import is_mm_compute_bound

    return {"tflops": _told(lambda: utils.get_device_tflops(torch.bfloat16)), "gbps": _told(utils.get_gpu_dram_gbps),
            "compute bound": {str(m): is_mm_compute_bound(m, 1024, 1001, torch.bfloat16) for m in (16, 64, 128, 256, 512, 4096)},
            "shared": utils.get_gpu_shared_memory(), "is_big_gpu": utils.is_big_gpu()}  # fmt: skip


def _settings() -> dict[str, Any]:
    import torch._dynamo.config
    import torch._functorch.config
    import torch._inductor.config

    inductor = torch._inductor.config.save_config_portable(ignore_private_configs=False)
    return {"inductor": {k: repr(v) for k, v in sorted(inductor.items())},
            "autograd": {k: repr(v) for k, v in sorted(torch._functorch.config.save_config_portable().items())},
            "dynamo": torch._dynamo.config.get_hash().hex()}  # fmt: skip


def _dynaflow() -> list[Any]:
    from dynaflow.inductor.kept import _machine

    return [str(part) for part in _machine()]


def _reference() -> dict[str, Any]:
    """The keys of a small program, each component's digest among them, and of its kernels."""
    import torch

    from dynaflow.inductor.compile import _INDUCTOR  # (dynaflow's own settings of Inductor)

    module = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.LayerNorm(512)).to("cuda", torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder, _caches(Path(folder)), _heard() as said, torch.no_grad():
        torch._dynamo.reset()
        torch.compile(module)(torch.ones(64, 256, device="cuda", dtype=torch.bfloat16))
        kernels = sorted(path.parent.name for path in (Path(folder) / "triton").rglob("*.cubin"))
    return {"graphs": said, "kernels": kernels, "dynaflow": sorted(map(str, _INDUCTOR.items()))}


@contextmanager
def _caches(folder: Path) -> Iterator[None]:
    """Empty ones."""
    names = {"TORCHINDUCTOR_CACHE_DIR": folder / "inductor", "TRITON_CACHE_DIR": folder / "triton"}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update({name: str(path) for name, path in names.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value


@contextmanager
def _heard() -> Iterator[dict[str, list[str]]]:
    """Key -> its components, as torch logs them."""
    found: dict[str, list[str]] = {}

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = record.getMessage()
            if "cache hash details for key" in text:
                head, *lines = text.splitlines()
                found[head.rpartition("for key ")[2].rstrip(":")] = [line[:300] for line in lines if line.startswith("[")]

    logs = [logging.getLogger(name) for name in ("torch._inductor.codecache", "torch._functorch._aot_autograd.autograd_cache")]
    ear, before = Ear(logging.DEBUG), [(log.level, log.propagate) for log in logs]
    for log in logs:
        log.addHandler(ear)
        log.setLevel(logging.DEBUG)
        log.propagate = False
    try:
        yield found
    finally:
        for log, (level, is_told) in zip(logs, before):
            log.removeHandler(ear)
            log.setLevel(level)
            log.propagate = is_told


def text(found: dict[str, Any]) -> str:
    return json.dumps(found, indent=1, sort_keys=True, default=str)
