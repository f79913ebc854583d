"""Compiled units on disk: another process finds what Inductor made of a unit without tracing it again.

What is kept is Inductor's text, redirected, and what it said about sizes and strides, so that nothing is left to do but load it; and its
Triton kernels in a bundle, as Inductor's own cache keeps them, which is faster than to find them one by one. The key is all that the text
depends on: the unit's structure, the sizes it was compiled for, settings, versions, our own code that reads and redirects, the device.
Units that call what is neither torch's nor Python's own (a user's function, a custom op whose shapes the next version may change) are not
kept.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.resources
import importlib.util
import logging
import pickle
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Iterator

import torch
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.codecache import PyCodeCache
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.triton_bundler import TritonBundler

from dynaflow import disk
from dynaflow.inductor.redirect import Redirected
from dynaflow.inductor.structure import Same, Spec, Structure
from dynaflow.runtime.program import Expr

log = logging.getLogger("dynaflow")

# what is done before and after Inductor, and what is written down of it
_OWN_CODE = ("compile", "kept", "redirect", "source", "structure")
_OWN_MODULES = ("torch", "operator", "_operator", "math", "builtins")
_OWN_OPS = ("aten", "prims", "prim", "dynaflow", "_c10d_functional")
_PASSES = ("post_grad_custom_pre_pass", "post_grad_custom_post_pass", "joint_custom_pre_pass", "joint_custom_post_pass",
           "pre_grad_custom_pass", "_pre_fusion_custom_pass", "_post_fusion_custom_pass")  # fmt: skip


class _NotKept(Exception):
    """The unit depends on something that a text does not say."""


@dataclass(frozen=True)
class Kept:
    """What Inductor made of a unit."""

    redirected: Redirected
    symbols: tuple[str, ...]
    guards: tuple[str, ...]
    # per output, None where nothing is known
    strides: tuple[tuple[str, ...] | None, ...]
    aligned: tuple[int, ...]


def module(found: Kept, path: Path) -> Any:
    """The text, loaded: its `call` puts results where it is told."""
    try:
        bundle = _bundle_of(path).read_bytes()
        TritonBundler.read_and_emit(pickle.loads(bundle))
    except FileNotFoundError:
        pass  # there are no such kernels
    except Exception as error:  # noqa: BLE001 (whatever another version left there; kernels are then found one by one)
        log.info("kernels that were kept on disk cannot be used: %s: %s", type(error).__name__, error)
    return PyCodeCache.load(found.redirected.text)


def path_of(shape: Structure, state: tuple[Any, ...], numbers: tuple[int, ...], static: bool) -> Path | None:
    """Where it would be; None where it is not kept. `state`: settings that tell units apart."""
    is_off = inductor_config.force_disable_caches or not inductor_config.fx_graph_cache
    if is_off or any(getattr(inductor_config, name, None) is not None for name in _PASSES):
        return None
    try:
        text = "\n".join(_text((shape.key, state, numbers, static, functorch_config.get_hash(), *_machine())))  # type: ignore[attr-defined]
    except _NotKept as reason:
        log.debug("a unit is not kept on disk: %s", reason)
        return None
    return Path(cache_dir()) / "dynaflow" / f"{hashlib.sha256(text.encode()).hexdigest()[:40]}.unit"


def load(path: Path | None) -> Kept | None:
    if path is None:
        return None
    try:
        found = pickle.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except Exception as error:  # noqa: BLE001 (cut short, or another version's)
        log.info("%s is of no use: %s: %s", path, type(error).__name__, error)
        return None
    return found if isinstance(found, Kept) else None


def save(path: Path | None, inductor: CompiledFxGraph, found: Kept) -> None:
    if path is None or inductor.constants or getattr(inductor, "torchbind_constants", None):
        return
    bundle = getattr(inductor, "_triton_bundle", None)
    if bundle is not None and bundle.kernel_artifacts:
        try:
            disk.save(_bundle_of(path), pickle.dumps(bundle))
        except Exception as error:  # noqa: BLE001 (kernels that cannot be pickled are found one by one)
            log.info("kernels are not kept in a bundle: %s: %s", type(error).__name__, error)
    disk.save(path, pickle.dumps(found))


def _bundle_of(path: Path) -> Path:
    return path.with_suffix(".kernels")


def _machine() -> Iterator[Any]:
    """All devices, whatever the unit's arguments say: a unit may make its tensors itself, on the current device."""
    import dynaflow

    yield from (_own_code(), dynaflow.__version__, torch.__version__, torch.version.git_version)
    yield from (torch.backends.cpu.get_cpu_capability(), torch.get_num_threads())
    if importlib.util.find_spec("triton") is not None:
        yield importlib.metadata.version("triton")
    if torch.cuda.is_available():
        device = torch.cuda.current_device()
        yield from (device, torch.cuda.get_device_name(device), str(torch.cuda.get_device_capability(device)), torch.version.cuda)


@cache
def _own_code() -> str:
    """A unit that was redirected by other code than this is not to be found."""
    package = importlib.resources.files(__package__)
    return hashlib.sha256(b"".join((package / f"{name}.py").read_bytes() for name in _OWN_CODE)).hexdigest()


def _text(thing: Any) -> Iterator[str]:
    """Lines that are equal where the thing is."""
    if isinstance(thing, Same):
        yield _name(thing.what)
    elif isinstance(thing, (tuple, list)):
        yield f"{type(thing).__name__} {len(thing)}"
        for item in thing:
            yield from _text(item)
    elif isinstance(thing, (Spec, Expr)) and is_dataclass(thing):
        yield type(thing).__name__
        for field in fields(thing):
            yield from _text(getattr(thing, field.name))
    elif thing is None or isinstance(thing, (bool, int, str, bytes, float, torch.dtype, torch.device, torch.layout, torch.memory_format)):
        yield repr(thing)
    elif isinstance(thing, type):
        yield f"{thing.__module__}.{thing.__qualname__}"
    else:
        raise _NotKept(f"{thing!r} has no name")


def _name(target: Any) -> str:
    """Of a function that is the same in every process."""
    if target is ...:
        return "..."
    if isinstance(target, torch._ops.OpOverload):
        if target.namespace not in _OWN_OPS:
            raise _NotKept(f"{target} is somebody's own op")
        return str(target)
    if isinstance(target, (torch._ops.OpOverloadPacket, torch._ops.HigherOrderOperator)) or not callable(target):
        raise _NotKept(f"{target!r} says not all of itself")
    try:
        name = torch.fx.node._get_qualified_name(target)
    except Exception as error:  # noqa: BLE001 (whatever it does not know)
        raise _NotKept(f"{target!r}: {error}") from error
    if name.partition(".")[0] not in _OWN_MODULES:
        raise _NotKept(f"{name} is neither torch's nor Python's own")
    return name
