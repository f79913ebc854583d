"""Streams with a share of the SMs: disjoint sets, through CUDA's green contexts.

A plan that gives `comm` 16 SMs divides the device: 16 (or the next count that the hardware can split off) belong to `comm` alone, and
the plan's other streams share the rest. The caller's own stream is not limited. torch's own GreenContext does not promise that two
contexts are disjoint, so the split is made through the driver (package `cuda-bindings`).
"""

from __future__ import annotations

import threading
from types import MappingProxyType
from typing import Any, Mapping

import torch

from dynaflow.errors import OptionError
from dynaflow.ir import Stream
from dynaflow.runtime.driver import DriverError, ask, cuda_driver

_made: dict[tuple[int, tuple[Stream, ...]], dict[str, torch.cuda.Stream]] = {}
_keep: list[Any] = []  # green contexts live as long as their streams: for ever
_lock = threading.Lock()


def check_shares(streams: tuple[Stream, ...], device: torch.device, declared_at: Mapping[str, str] = MappingProxyType({})) -> None:
    """Raise OptionError, before anything is launched, where the shares cannot be given. `declared_at`: lines of the strategy, by stream."""
    wanted = [s for s in streams if s.sms is not None]
    if not wanted:
        return
    names = ", ".join(f"'{s.name}' {s.sms}" for s in wanted)
    where = declared_at.get(wanted[0].name, "")
    if device.type != "cuda":
        raise OptionError(
            f"SMs are asked for ({names}), but the model runs on the {device.type}.", where=where,
            fix="leave sms out of flow.stream, or ask where flow.context.device is 'cuda'")  # fmt: skip
    total = torch.cuda.get_device_properties(device).multi_processor_count
    asked = sum(s.sms or 0 for s in wanted)
    has_others = len(wanted) < len(streams)
    if any((s.sms or 0) < 1 for s in wanted) or asked > total or (has_others and asked >= total):
        raise OptionError(
            f"the shares ({names}) do not fit into {total} SMs.", where=where,
            why="other streams of the plan need SMs too" if has_others else "", fix="ask for fewer")  # fmt: skip
    split_streams(streams, device)


def split_streams(streams: tuple[Stream, ...], device: torch.device) -> dict[str, torch.cuda.Stream]:
    """A CUDA stream per name: on its own SMs where it has a share, else on those that are left."""
    index = device.index if device.index is not None else torch.cuda.current_device()
    with _lock:
        if (index, streams) not in _made:
            _made[index, streams] = _split(streams, index)
        return _made[index, streams]


def _split(streams: tuple[Stream, ...], index: int) -> dict[str, torch.cuda.Stream]:
    try:
        return _split_by(cuda_driver(), streams, index)
    except DriverError as error:
        raise OptionError(f"the driver cannot divide the SMs: {error}.", fix="leave sms out of flow.stream") from error


def _split_by(driver: Any, streams: tuple[Stream, ...], index: int) -> dict[str, torch.cuda.Stream]:
    torch.cuda.init()
    cu_device = ask(driver.cuDeviceGet, index)
    left = ask(driver.cuDeviceGetDevResource, cu_device, driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM)
    shares: dict[str, Any] = {}
    for stream in streams:
        if stream.sms is not None:
            groups, _, left = ask(driver.cuDevSmResourceSplitByCount, 1, left, 0, stream.sms)
            shares[stream.name] = groups[0]
    contexts: dict[str, Any] = {}
    made: dict[str, torch.cuda.Stream] = {}
    for stream in streams:
        key = stream.name if stream.name in shares else ""
        if key not in contexts:
            description = ask(driver.cuDevResourceGenerateDesc, [shares.get(key, left)], 1)
            contexts[key] = ask(driver.cuGreenCtxCreate, description, cu_device, driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM)
        handle = ask(driver.cuGreenCtxStreamCreate, contexts[key], driver.CUstream_flags.CU_STREAM_NON_BLOCKING, stream.priority)
        made[stream.name] = torch.cuda.ExternalStream(int(handle), device=index)
    _keep.extend(contexts.values())
    return made
