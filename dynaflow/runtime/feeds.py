"""Copies of a recording's inputs that are part of the recording.

A copy ahead of a recording's launch takes the host longer than the launch. So the copies are the recording's first kernels, and before
each launch they are told where to read: the driver changes a kernel's parameters in an executable graph in a microsecond, and what was
launched before is not touched by it. What does not lie as its slot does is copied by torch into the slot, and the recorded copy then
reads the slot itself.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from typing import Any, Protocol, Sequence

import torch

from dynaflow.runtime.driver import DriverError, ask, cuda_driver, graph_nodes
from dynaflow.runtime.native import Feed, Native, Table, describe, native
from dynaflow.runtime.slots import Slot, Slots, fill

log = logging.getLogger("dynaflow")

BLOCK, MAX_BLOCKS = 256, 512

# bytes that a thread copies at once -> how it loads and stores them
_UNITS = {16: ("v4.u32", "{%r5, %r6, %r7, %r8}"), 8: ("v2.u32", "{%r5, %r6}"), 4: ("u32", "%r5"), 2: ("u16", "%r5"), 1: ("u8", "%r5")}

_ENTRY = """
.visible .entry copy{unit}(.param .u64 source, .param .u64 target, .param .u64 count)
{{
  .reg .pred %p1;
  .reg .b32 %r<9>;
  .reg .b64 %rd<12>;
  ld.param.u64 %rd1, [source];
  ld.param.u64 %rd2, [target];
  ld.param.u64 %rd3, [count];
  mov.u32 %r1, %ctaid.x;
  mov.u32 %r2, %ntid.x;
  mov.u32 %r3, %tid.x;
  mov.u32 %r4, %nctaid.x;
  mul.wide.u32 %rd4, %r1, %r2;
  cvt.u64.u32 %rd5, %r3;
  add.u64 %rd6, %rd4, %rd5;
  mul.wide.u32 %rd7, %r4, %r2;
again:
  setp.ge.u64 %p1, %rd6, %rd3;
  @%p1 bra done;
  mul.lo.u64 %rd8, %rd6, {unit};
  add.u64 %rd9, %rd1, %rd8;
  add.u64 %rd10, %rd2, %rd8;
  ld.global.{kind} {registers}, [%rd9];
  st.global.{kind} [%rd10], {registers};
  add.u64 %rd6, %rd6, %rd7;
  bra again;
done:
  ret;
}}
"""

PTX = ".version 7.0\n.target sm_70\n.address_size 64\n" + "".join(
    _ENTRY.format(unit=unit, kind=kind, registers=registers) for unit, (kind, registers) in _UNITS.items())


class Kernel(ctypes.Structure):
    """The driver's CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = [("function", ctypes.c_void_p), *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
                *((name, ctypes.c_void_p) for name in ("params", "extra", "kernel", "context"))]  # fmt: skip


class Copy:
    """One input's copy: the kernel's parameters, which it reads from here."""

    def __init__(self, slot: Slot, function: int, unit: int):
        self.slot, self.unit = slot, unit
        count = slot.nbytes // unit
        self._words = (ctypes.c_uint64 * 3)(slot.address, slot.address, count)
        at = ctypes.addressof(self._words)
        self._pointers = (ctypes.c_void_p * 3)(at, at + 8, at + 16)
        num_blocks = min(-(-count // BLOCK), MAX_BLOCKS)
        self.kernel = Kernel(function, num_blocks, 1, 1, BLOCK, 1, 1, 0, ctypes.addressof(self._pointers), None, None, None)

    @property
    def source_at(self) -> int:
        return ctypes.addressof(self._words)

    def read_itself(self) -> None:
        self._words[0] = self.slot.address


class Device(Protocol):
    """The driver, as far as it is needed."""

    # its function that changes a kernel of an executable graph
    set_params: int

    def function(self, unit: int) -> int: ...
    def launch(self, kernel: Kernel) -> None: ...
    def find(self, graph: Any, copies: Sequence[Copy]) -> tuple[int, list[int]]: ...


class CudaDevice:
    def __init__(self, index: int):
        cuda_driver()  # without it, nothing that is recorded is found again
        try:
            library = ctypes.CDLL("libcuda.so.1")
            self._launch, set_params = library.cuLaunchKernel, library.cuGraphExecKernelNodeSetParams_v2
            self._launch.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3]
            load, get = library.cuModuleLoadData, library.cuModuleGetFunction
        except (OSError, AttributeError) as error:
            raise DriverError(str(error)) from error
        self.set_params = ctypes.cast(set_params, ctypes.c_void_p).value or 0
        module = ctypes.c_void_p()
        with torch.cuda.device(index):
            _check("cuModuleLoadData", load(ctypes.byref(module), ctypes.c_char_p(PTX.encode())))
            self._functions = {unit: ctypes.c_void_p() for unit in _UNITS}
            for unit, found in self._functions.items():
                _check("cuModuleGetFunction", get(ctypes.byref(found), module, f"copy{unit}".encode()))

    def function(self, unit: int) -> int:
        return self._functions[unit].value or 0

    def launch(self, kernel: Kernel) -> None:
        shape = (kernel.gx, kernel.gy, kernel.gz, kernel.bx, kernel.by, kernel.bz, 0)
        stream = torch.cuda.current_stream().cuda_stream
        _check("cuLaunchKernel", self._launch(kernel.function, *shape, stream, kernel.params, None))

    def find(self, graph: torch.cuda.CUDAGraph, copies: Sequence[Copy]) -> tuple[int, list[int]]:
        """The graph as it is launched, and its nodes for these copies."""
        driver = cuda_driver()
        found: dict[int, int] = {}
        functions = {copy.kernel.function for copy in copies}
        for node in graph_nodes(driver, driver.CUgraph(graph.raw_cuda_graph())):
            if ask(driver.cuGraphNodeGetType, node) == driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL:
                params = ask(driver.cuGraphKernelNodeGetParams, node)
                if int(params.func) in functions:
                    target = ctypes.c_void_p.from_address(int(params.kernelParams) + 8).value
                    found[ctypes.c_uint64.from_address(target or 0).value] = int(node)
        if missing := [copy.slot.arg for copy in copies if copy.slot.address not in found]:
            raise DriverError(f"the recording has no copy of its inputs {missing}")
        return int(graph.raw_cuda_graph_exec()), [found[copy.slot.address] for copy in copies]


def _check(name: str, status: int) -> None:
    if status:
        raise DriverError(f"{name} says {status}")


@cache
def cuda_device(index: int) -> CudaDevice:
    return CudaDevice(index)


class Feeds:
    """The copies of one recording's inputs."""

    def __init__(self, pieces: Sequence[Slot], rest: Sequence[Slot], made: Native, device: Device):
        """`rest`: what torch copies."""
        self._native, self._device, self._rest = made, device, rest
        self._copies = [Copy(slot, device.function(unit), unit) for slot in pieces for unit in [_unit(slot)]]
        self._set: Any = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 3)(device.set_params)
        self._num_copies = len(self._copies)
        self._table: Any = None

    def issue(self) -> None:
        """The copies, launched: what runs here is recorded. They read the slots themselves."""
        for copy in self._copies:
            self._device.launch(copy.kernel)

    @property
    def is_bound(self) -> bool:
        return self._table is not None

    @property
    def is_all(self) -> bool:
        """Whether torch copies none of the inputs."""
        return not self._rest

    def bind(self, graph: Any) -> None:
        """They were recorded in this graph, which is executable. Where they cannot be changed in it, they read the slots for good."""
        try:
            executable, nodes = self._device.find(graph, self._copies)
            self._described = [describe(copy.slot.tensor, copy.slot.arg) for copy in self._copies]
        except (DriverError, OSError) as error:
            return _say(str(error))
        facts = ctypes.addressof(self._native.facts)
        for argument, copy in zip(self._described, self._copies):
            argument.type = id(copy.slot.type)  # the slot keeps it
        self._table = (Feed * len(nodes))(*[
            Feed(facts, argument, copy.unit, copy.source_at, self._device.set_params, executable, node, ctypes.addressof(copy.kernel))
            for argument, copy, node in zip(self._described, self._copies, nodes)])  # fmt: skip
        self.facts = Table(ctypes.addressof(self._table), len(nodes))
        self._fed = self._native.fed(self.facts)

    def __call__(self, args: Sequence[Any]) -> bool:
        """The next replay takes its inputs from these arguments; False where the driver refuses."""
        done, num_copies = self._fed(args), self._num_copies
        while done < num_copies:
            copy, each = self._copies[done], self._table[done]
            fill(copy.slot, args)
            copy.read_itself()
            if self._set(each.graph, each.node, each.params):
                return False
            done = self._native.feed(args, ctypes.addressof(self.facts), done + 1)
        for slot in self._rest:
            fill(slot, args)
        return True


def _unit(slot: Slot) -> int:
    return next(unit for unit in _UNITS if slot.nbytes % unit == 0)


@cache
def _say(why: str) -> None:
    log.info("inputs of recordings are copied ahead of them: %s", why)


def feeds_of(slots: Slots | None, device: torch.device) -> Feeds | None:
    """The inputs that a recording copies itself; None where there are none, or it cannot."""
    if slots is None or device.type != "cuda":
        return None
    index = device.index or 0
    pieces = [slot for slot in slots.each if slot.is_piece and slot.tensor.is_cuda and (slot.tensor.device.index or 0) == index]
    made = native() if pieces else None
    if made is None:
        return None
    try:
        return Feeds(pieces, [slot for slot in slots.each if all(slot is not piece for piece in pieces)], made, cuda_device(index))
    except DriverError as error:
        _say(str(error))
        return None
