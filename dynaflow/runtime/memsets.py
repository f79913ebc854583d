"""Memsets of a recording become kernels.

cuBLAS sets its counters to zero with a memset ahead of a large product. The driver launches a line of kernels in a few microseconds,
however long it is; every memset in it costs the host about two more. So the recording's graph is changed before it is made executable:
in a memset's place comes a kernel that writes the same.
"""

from __future__ import annotations

import logging
from typing import Any, Callable, NamedTuple, Sequence

import torch

from dynaflow.runtime.driver import DriverError, ask, cuda_driver, function, graph_nodes
from dynaflow.runtime.lent import tensor_at

log = logging.getLogger("dynaflow")

_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class Fill(NamedTuple):
    """`num_elements` of `size` bytes each, from `address` on, get `value`."""

    address: int
    value: int
    size: int
    num_elements: int

    def run(self, device: torch.device) -> None:
        dtype = _DTYPES[self.size]
        value = self.value if self.size == 1 or self.value < 1 << (8 * self.size - 1) else self.value - (1 << 8 * self.size)
        tensor_at(self.address, self.num_elements, dtype, device).fill_(value)


# the kernel nodes that do these fills, and what must stay until they are copied
Recorded = tuple[Sequence[Any], Any]


def without_memsets(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> None:
    """The graph is captured and kept, and not yet executable. `stream`: one to capture on. Where the driver cannot, memsets stay."""
    try:
        driver = cuda_driver()
        replace_memsets(driver, driver.CUgraph(graph.raw_cuda_graph()), lambda fills: _record(driver, fills, stream))
    except DriverError as error:  # (DriverError alone: what else fails makes the recording void)
        log.info("memsets stay in CUDA Graphs: %s", error)


def replace_memsets(driver: Any, graph: Any, record: Callable[[Sequence[Fill]], Recorded]) -> int:
    """How many memsets became kernels. Where the driver refuses, the graph does what it did; should it refuse to take back what it
    just added, that is no DriverError, and the graph is of no use."""
    found: list[tuple[Any, Fill]] = []
    for node in graph_nodes(driver, graph):
        if ask(driver.cuGraphNodeGetType, node) == driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET:
            memset = ask(driver.cuGraphMemsetNodeGetParams, node)
            if int(memset.height) <= 1:
                value = int(memset.value) & ((1 << 8 * int(memset.elementSize)) - 1)
                found.append((node, Fill(int(memset.dst), value, int(memset.elementSize), int(memset.width))))
    if not found:
        return 0
    fills = list(dict.fromkeys(fill for _, fill in found))
    kernels, kept = record(fills)
    params = {fill: ask(driver.cuGraphKernelNodeGetParams, kernel) for fill, kernel in zip(fills, kernels)}
    for node, fill in found:
        before, after = _neighbours(driver, "Dependencies", node), _neighbours(driver, "DependentNodes", node)
        made = ask(driver.cuGraphAddKernelNode, graph, before, len(before), params[fill])
        try:
            if after:
                _take_priority(driver, made, after)
                plain = [driver.CUgraphEdgeData() for _ in after]
                ask(function(driver, "cuGraphAddDependencies"), graph, [made] * len(after), after, plain, len(after))
            ask(driver.cuGraphDestroyNode, node)
        except DriverError:
            _take_back(driver, made)
            raise
    del kept
    return len(found)


def _take_back(driver: Any, made: Any) -> None:
    """What was just added: nothing waits for it, and it must not run."""
    try:
        ask(driver.cuGraphDestroyNode, made)
    except DriverError as error:
        raise RuntimeError("a CUDA Graph cannot be put back as it was captured") from error


def _record(driver: Any, fills: Sequence[Fill], stream: torch.cuda.Stream) -> Recorded:
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for fill in fills:
                fill.run(stream.device)
        finally:
            graph.capture_end()
    # one behind the other
    nodes = graph_nodes(driver, driver.CUgraph(graph.raw_cuda_graph()))
    line = [node for node in nodes if not _neighbours(driver, "Dependencies", node)]
    while following := _neighbours(driver, "DependentNodes", line[-1]):
        line += following
    if len(line) != len(fills):
        raise DriverError(f"{len(fills)} fills were recorded as {len(line)} nodes")
    return line, graph


def _neighbours(driver: Any, which: str, node: Any) -> list[Any]:
    call = function(driver, f"cuGraphNodeGet{which}")
    *_, count = ask(call, node, 0)
    if not count:
        return []
    nodes, *_ = ask(call, node, count)
    return list(nodes[:count])


def _take_priority(driver: Any, made: Any, after: Sequence[Any]) -> None:
    """A kernel that others wait for is as urgent as the most urgent of them: the least number."""
    kernel, what = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL, driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PRIORITY
    kernels = [node for node in after if ask(driver.cuGraphNodeGetType, node) == kernel]
    values = [ask(driver.cuGraphKernelNodeGetAttribute, node, what) for node in kernels]
    if values:
        ask(driver.cuGraphKernelNodeSetAttribute, made, what, min(values, key=lambda value: value.priority))
