"""Which bytes do copies move? Read from a profiler trace (Kineto).

Copies are: device-to-device memcpys (their bytes stand in the trace); kernels of ATen whose name says copy or cat; and Triton kernels
that do nothing but copy, cat or clone, by their fused name. A kernel's bytes are those it writes, from the shapes of the op that
launched it: all inputs of a cat, the largest tensor otherwise. Inside a CUDA Graph no op stands behind a kernel: it has no size.

What split and merge cause is what the split plan copies beyond the unsplit one, class by class. A recorded plan has the kernels of the
same plan launch by launch: copies without a size are no news as long as there are not more of them than there.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.cases import Call, Case

MEMCPY, CAT, COPY, TRITON = "memcpy", "cat", "copy", "triton copy"
# parts of a fused Triton kernel's name that move data and compute nothing
_MOVES = {"cat", "copy", "clone", "stack", "slice", "select", "view", "expand", "as", "strided", "scatter", "permute", "transpose", "t"}
_BYTES = {
    "float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2, "long int": 8, "long": 8, "int": 4, "bool": 1, "unsigned char": 1,
    "signed char": 1,
}  # fmt: skip


@dataclass
class Copies:
    """Copies of one step, by class and by kernel."""

    bytes: Counter[str] = field(default_factory=Counter)
    # "class: kernel" -> bytes
    by_name: Counter[str] = field(default_factory=Counter)
    # "class: kernel" -> how often, and how often without a size
    count: Counter[str] = field(default_factory=Counter)
    unsized: Counter[str] = field(default_factory=Counter)
    num_graph_launches: int = 0


def excess(split: Copies, unsplit: Copies, num_parts: int = 1, launched: Copies | None = None) -> dict[str, Any]:
    """What the first copies beyond the second. `launched`: the first one's plan launch by launch, where that is known.

    A copy of the model's own runs once per part; of those without a size, only what exceeds that can be told.
    """
    expected = Counter({name: num_parts * n for name, n in unsplit.unsized.items()}) if launched is None else launched.count
    by_class = {c: split.bytes[c] - unsplit.bytes[c] for c in (MEMCPY, CAT, COPY, TRITON) if split.bytes[c] > unsplit.bytes[c]}
    names = {n: b - unsplit.by_name[n] for n, b in split.by_name.items() if b > unsplit.by_name[n] and n.split(":")[0] in by_class}
    return {
        "bytes": sum(by_class.values()), "by_class": by_class, "by_kernel": dict(sorted(names.items(), key=lambda kv: -kv[1])[:8]),
        "split_bytes": sum(split.bytes.values()), "unsplit_bytes": sum(unsplit.bytes.values()),
        "unsized_kernels": {n: [k, expected[n]] for n, k in split.unsized.items() if k > expected[n]},
    }  # fmt: skip


def copies_of(case: Case, call: Call, device: str) -> Copies:
    """Profile one step."""
    is_cuda = device.startswith("cuda")
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    for attempt in range(2):  # the first profile of a process loads the profiler, and may lose events
        case.reset()
        if is_cuda:
            torch.cuda.synchronize()
        with profile(activities=activities, record_shapes=True) as profiled:
            call(attempt)
            if is_cuda:
                torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return read(events, is_cuda)


def read(events: Iterable[Mapping[str, Any]], is_cuda: bool) -> Copies:
    """The copies in a chrome trace. On the CPU, ATen's own copy and cat calls stand for kernels."""
    events = [e for e in events if e.get("ph") == "X"]
    ops = {e["args"]["External id"]: e for e in events if e.get("cat") == "cpu_op" and "External id" in e.get("args", {})}
    found = Copies()
    for event in events:
        kind, name, args = event.get("cat", ""), str(event.get("name", "")), event.get("args", {})
        if kind in ("cuda_runtime", "cuda_driver") and name.startswith(("cudaGraphLaunch", "cuGraphLaunch")):
            found.num_graph_launches += 1
        elif kind == "gpu_memcpy" and ("DtoD" in name or "Device -> Device" in name):
            _add(found, MEMCPY, "DtoD", int(args.get("bytes", 0)))
        elif kind == "kernel" and (which := class_of(name)) is not None:
            op = ops.get(args.get("External id"))
            _add(found, which, _short(name), None if op is None else written(op["name"], op.get("args", {})))
        elif not is_cuda and kind == "cpu_op" and name in ("aten::copy_", "aten::cat"):
            _add(found, CAT if name == "aten::cat" else COPY, name, written(name, args))
    return found


def class_of(kernel: str) -> str | None:
    """The class of copy that a kernel is, by its name; None when it is no copy."""
    if kernel.startswith("triton_"):
        words = set(re.sub(r"^triton_[a-z]+_fused_|_\d+$", "", kernel).strip("_").split("_")) - {""}
        return TRITON if words and words <= _MOVES else None
    if "CatArrayBatchedCopy" in kernel:
        return CAT
    return COPY if "copy_kernel" in kernel or "copy_device" in kernel or "direct_copy" in kernel else None


def written(op: str, args: Mapping[str, Any]) -> int:
    """Bytes that an op writes, from the shapes of its inputs."""
    dims, types = args.get("Input Dims", []), args.get("Input type", args.get("Input types", []))
    sizes = []
    for shape, kind in zip(dims, types):
        if shape and isinstance(shape[0], list):  # a list of tensors
            sizes.append(sum(math.prod(s) for s in shape) * _BYTES.get(_element(kind), 2))
        elif isinstance(shape, list) and kind not in ("", "Scalar", "ScalarList", "GenericList"):
            sizes.append(math.prod(shape) * _BYTES.get(_element(kind), 2) if shape else 0)
    if op == "aten::copy_":
        return sizes[0] if sizes else 0
    return max(sizes, default=0)


def _element(kind: Any) -> str:
    return str(kind[0] if isinstance(kind, list) and kind else kind)


def _short(kernel: str) -> str:
    return re.sub(r"_\d+$", "", kernel) if kernel.startswith("triton_") else re.sub(r"<.*", "", kernel)[:60] or kernel[:60]


def _add(found: Copies, which: str, name: str, size: int | None) -> None:
    key = f"{which}: {name}"
    found.count[key] += 1
    if size is None:
        found.unsized[key] += 1
    else:
        found.bytes[which] += size
        found.by_name[key] += size
