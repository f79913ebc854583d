"""A bound plan as one CUDA Graph: all its streams, one launch per call.

1. The first call with given sizes runs the plan launch by launch (kernels load, libraries make their workspaces).
2. The second records it: inputs get slots that the engine owns; parameters, and inputs that the plan changes, are bound by address.
3. Later calls copy their inputs into the slots, replay, and hand out copies of the outputs, which belong to the caller.
   A call whose addresses differ records anew; the oldest recordings go first.
4. What cannot be recorded (an op that waits for the device, say) is said once, and runs launch by launch for good.

How a recording is made is a parameter: on the CPU nothing is recorded, and a replay issues the plan again on the same memory.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from contextlib import nullcontext
from typing import Callable, Mapping
from weakref import WeakSet

import torch

from dynaflow.runtime.lanes import Run
from dynaflow.runtime.program import Bound

log = logging.getLogger("dynaflow")

# recordings kept per captured graph
MAX_RECORDINGS = 32

Issue = Callable[[Bound, Run], None]
# takes a function that issues work, returns what does that work again and again; does not do it itself
Record = Callable[[Callable[[], None]], Callable[[], None]]


def record_nothing(body: Callable[[], None]) -> Callable[[], None]:
    return body


def record_cuda(body: Callable[[], None]) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    spare = generator.clone_state()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            body()
    except BaseException:
        generator.graphsafe_set_state(spare)  # a capture that fails leaves its own state behind, which refuses to draw
        raise
    return graph.replay


class Recording:
    """One bound plan on fixed memory. One call at a time: the next one waits for the last, on the host and on the device."""

    def __init__(self, bound: Bound, inputs: Mapping[str, torch.Tensor], issue: Issue, record: Record):
        self.bound = bound
        flow = bound.program.flow
        changed = {flow.value[v].storage for op in flow.ops for v in op.mutates}
        self._slots: dict[str, torch.Tensor] = {}
        self._addresses: dict[str, int] = {}
        for name, tensor in inputs.items():
            value = flow.value[name]
            if value.role == "input" and value.storage not in changed and _is_dense(tensor):
                self._slots[name] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
            else:
                self._addresses[name] = tensor.data_ptr()
        given = {**inputs, **self._slots}
        self._is_cuda = any(t.is_cuda for t in inputs.values())
        self._outputs: dict[str, torch.Tensor] = {}

        def body() -> None:
            tensors, outputs = bound.tensors(given)
            self._outputs = outputs
            issue(bound, Run(bound, tensors))

        self._replay = record(body)
        self._lock = threading.Lock()
        self._done = torch.cuda.Event() if self._is_cuda else None

    def fits(self, inputs: Mapping[str, torch.Tensor]) -> bool:
        return all(inputs[name].data_ptr() == address for name, address in self._addresses.items())

    def __call__(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        with self._lock:
            if self._done is not None:
                torch.cuda.current_stream().wait_event(self._done)
            for name, slot in self._slots.items():
                slot.copy_(inputs[name], non_blocking=True)
            self._replay()
            outputs = {name: output.clone() for name, output in self._outputs.items()}
            if self._done is not None:
                self._done.record()
        return outputs


def _is_dense(tensor: torch.Tensor) -> bool:
    return all(step > 0 for size, step in zip(tensor.shape, tensor.stride()) if size > 1)


class Recordings:
    """The recordings of one captured graph."""

    def __init__(self, name: str, record: Record):
        self._name, self._record = name, record
        self._seen: WeakSet[Bound] = WeakSet()
        self._failed: WeakSet[Bound] = WeakSet()
        self._kept: OrderedDict[Bound, Recording] = OrderedDict()
        self._lock = threading.Lock()

    def run(self, bound: Bound, inputs: Mapping[str, torch.Tensor], issue: Issue) -> dict[str, torch.Tensor] | None:
        """The outputs of a replay; None when this call is to run launch by launch."""
        with self._lock:
            recording = self._kept.get(bound)
            if recording is None or not recording.fits(inputs):
                if bound not in self._seen or bound in self._failed:
                    self._seen.add(bound)
                    return None
                recording = self._make(bound, inputs, issue)
                if recording is None:
                    return None
            self._kept.move_to_end(bound)
        return recording(inputs)

    def _make(self, bound: Bound, inputs: Mapping[str, torch.Tensor], issue: Issue) -> Recording | None:
        device = next((t.device for t in inputs.values() if t.is_cuda), None)
        try:
            with torch.cuda.device(device) if device is not None else nullcontext():
                recording = self._kept[bound] = Recording(bound, inputs, issue, self._record)
        except Exception as error:
            self._failed.add(bound)
            log.warning("%s cannot be recorded in a CUDA Graph and runs launch by launch: %s: %s", self._name, type(error).__name__, error)
            return None
        if len(self._kept) > MAX_RECORDINGS:
            self._kept.popitem(last=False)
        return recording
