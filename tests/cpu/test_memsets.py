"""Memsets of a CUDA Graph become kernels, on a graph that is kept in Python."""

from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dynaflow.runtime.driver import DriverError, ask, function
from dynaflow.runtime.memsets import Fill, replace_memsets

Status = Enum("Status", {"CUDA_SUCCESS": 0, "CUDA_ERROR_INVALID_VALUE": 1})
Status.__int__ = lambda self: self.value  # type: ignore[attr-defined]


class Driver:
    """As much of the driver as a graph of kernels and memsets needs. Nodes are numbers, the graph is this object."""

    CUgraphNodeType = Enum("CUgraphNodeType", "CU_GRAPH_NODE_TYPE_KERNEL CU_GRAPH_NODE_TYPE_MEMSET")
    CUlaunchAttributeID = Enum("CUlaunchAttributeID", "CU_LAUNCH_ATTRIBUTE_PRIORITY")
    CUgraphEdgeData = SimpleNamespace

    def __init__(self, refuses: str = "") -> None:
        self.kernels: dict[int, Any] = {}
        self.memsets: dict[int, SimpleNamespace] = {}
        self.edges: list[tuple[int, int]] = []
        self.priorities: dict[int, int] = {}
        self._refuses = refuses

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("cu") and name == object.__getattribute__(self, "_refuses"):

            def refuse(*args: Any) -> tuple[Any]:
                return (Status.CUDA_ERROR_INVALID_VALUE,)

            return refuse
        return object.__getattribute__(self, name)

    def add(self, what: Any, *after: int, priority: int = 0) -> int:
        node = len(self.priorities)
        (self.memsets if isinstance(what, SimpleNamespace) else self.kernels)[node] = what
        self.edges += [(a, node) for a in after]
        self.priorities[node] = priority
        return node

    def _counted(self, nodes: list[int], count: int) -> tuple[Any, ...]:
        return Status.CUDA_SUCCESS, nodes if count else [], [None] * len(nodes), len(nodes)

    def cuGraphGetNodes(self, graph: Any, count: int) -> tuple[Any, ...]:
        nodes = sorted({*self.kernels, *self.memsets})
        return Status.CUDA_SUCCESS, nodes if count else [], len(nodes)

    def cuGraphNodeGetType(self, node: int) -> tuple[Any, ...]:
        kinds = self.CUgraphNodeType
        return Status.CUDA_SUCCESS, kinds.CU_GRAPH_NODE_TYPE_KERNEL if node in self.kernels else kinds.CU_GRAPH_NODE_TYPE_MEMSET

    def cuGraphMemsetNodeGetParams(self, node: int) -> tuple[Any, ...]:
        return Status.CUDA_SUCCESS, self.memsets[node]

    def cuGraphKernelNodeGetParams(self, node: Any) -> tuple[Any, ...]:
        return Status.CUDA_SUCCESS, node

    def cuGraphNodeGetDependencies(self, node: int, count: int) -> tuple[Any, ...]:
        return self._counted([a for a, b in self.edges if b == node], count)

    def cuGraphNodeGetDependentNodes(self, node: int, count: int) -> tuple[Any, ...]:
        return self._counted([b for a, b in self.edges if a == node], count)

    def cuGraphAddKernelNode(self, graph: Any, before: list[int], count: int, params: Any) -> tuple[Any, ...]:
        assert len(before) == count
        return Status.CUDA_SUCCESS, self.add(params, *before)

    def cuGraphAddDependencies(self, graph: Any, ends: list[int], starts: list[int], data: list[Any], count: int) -> tuple[Any, ...]:
        assert len(ends) == len(starts) == len(data) == count
        self.edges += zip(ends, starts)
        return (Status.CUDA_SUCCESS,)

    def cuGraphKernelNodeGetAttribute(self, node: int, what: Any) -> tuple[Any, ...]:
        return Status.CUDA_SUCCESS, SimpleNamespace(priority=self.priorities[node])

    def cuGraphKernelNodeSetAttribute(self, node: int, what: Any, value: Any) -> tuple[Any, ...]:
        self.priorities[node] = value.priority
        return (Status.CUDA_SUCCESS,)

    def cuGraphDestroyNode(self, node: int) -> tuple[Any, ...]:
        del (self.memsets if node in self.memsets else self.kernels)[node]
        self.edges = [edge for edge in self.edges if node not in edge]
        return (Status.CUDA_SUCCESS,)

    def runs(self) -> list[Any]:
        """What runs, in an order that the edges allow."""
        done: list[int] = []
        while len(done) < len(self.kernels) + len(self.memsets):
            done.append(min(n for n in (*self.kernels, *self.memsets) if n not in done and all(a in done for a, b in self.edges if b == n)))
        return [self.kernels.get(n, "memset") for n in done]


def memset(address: int = 64, value: int = 0, size: int = 1, width: int = 16, height: int = 1) -> SimpleNamespace:
    return SimpleNamespace(dst=address, value=value, elementSize=size, width=width, height=height)


def record(fills: Any) -> Any:
    return list(fills), None


def test_a_memset_between_two_kernels_becomes_a_kernel_between_them() -> None:
    driver = Driver()
    first = driver.add("first")
    zero = driver.add(memset(), first)
    driver.add("second", zero, priority=-5)
    assert replace_memsets(driver, driver, record) == 1
    assert driver.runs() == ["first", Fill(64, 0, 1, 16), "second"] and not driver.memsets
    assert len(driver.edges) == 2
    assert driver.priorities[next(n for n, what in driver.kernels.items() if isinstance(what, Fill))] == -5


def test_many_memsets_of_the_same_memory_are_recorded_once() -> None:
    driver = Driver()
    node = driver.add("first")
    for k in range(3):
        node = driver.add(f"product {k}", driver.add(memset(), node))
    asked: list[Fill] = []
    assert replace_memsets(driver, driver, lambda fills: (asked.extend(fills), record(fills))[1]) == 3
    assert asked == [Fill(64, 0, 1, 16)]
    assert driver.runs() == ["first", *(x for k in range(3) for x in (asked[0], f"product {k}"))]


def test_all_that_waited_for_a_memset_waits_for_its_kernel() -> None:
    driver = Driver()
    a, b = driver.add("a"), driver.add("b")
    zero = driver.add(memset(), a, b)
    left, right = driver.add("left", zero), driver.add("right", zero)
    assert replace_memsets(driver, driver, record) == 1
    made = next(n for n, what in driver.kernels.items() if isinstance(what, Fill))
    assert sorted(driver.edges) == sorted([(a, made), (b, made), (made, left), (made, right)])


def test_a_graph_without_memsets_and_one_of_many_rows_stay_as_they_are() -> None:
    driver = Driver()
    driver.add("last", driver.add(memset(height=4), driver.add("first")))
    before = list(driver.edges)
    assert replace_memsets(driver, driver, lambda fills: pytest.fail("nothing is to be recorded")) == 0
    assert driver.edges == before and len(driver.memsets) == 1


@pytest.mark.parametrize("call", [
    "cuGraphGetNodes", "cuGraphNodeGetType", "cuGraphMemsetNodeGetParams", "cuGraphKernelNodeGetParams", "cuGraphNodeGetDependencies",
    "cuGraphNodeGetDependentNodes", "cuGraphAddKernelNode", "cuGraphKernelNodeGetAttribute", "cuGraphKernelNodeSetAttribute",
    "cuGraphAddDependencies",
])  # fmt: skip
def test_where_the_driver_refuses_the_graph_does_what_it_did(call: str) -> None:
    driver = Driver(refuses=call)
    driver.add("last", driver.add(memset(), driver.add("first")))
    before = list(driver.edges)
    with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_VALUE"):
        replace_memsets(driver, driver, record)
    assert driver.runs() == ["first", "memset", "last"] and driver.edges == before


def test_a_graph_that_cannot_be_put_back_is_of_no_use() -> None:
    driver = Driver(refuses="cuGraphDestroyNode")
    driver.add("last", driver.add(memset(), driver.add("first")))
    with pytest.raises(RuntimeError, match="cannot be put back") as raised:
        replace_memsets(driver, driver, record)
    assert not isinstance(raised.value, DriverError)


def test_a_driver_that_is_not_there() -> None:
    def missing(*args: Any) -> Any:
        raise RuntimeError("Failed to dlopen libcuda")

    with pytest.raises(DriverError, match="libcuda"):
        ask(missing)
    with pytest.raises(DriverError, match="no cuGraphSomething"):
        function(SimpleNamespace(), "cuGraphSomething")
    assert function(SimpleNamespace(cuGraphA="old", cuGraphA_v2="new"), "cuGraphA") == "new"


def test_the_most_urgent_of_those_that_wait() -> None:
    driver = Driver()
    zero = driver.add(memset())
    driver.add("easy", zero)
    driver.add("urgent", zero, priority=-5)
    driver.add(memset(address=8, height=2), zero)
    assert replace_memsets(driver, driver, record) == 1
    assert driver.priorities[next(n for n, what in driver.kernels.items() if isinstance(what, Fill))] == -5


@pytest.mark.parametrize("size, value", [(1, 0), (1, 0xAB), (2, 0xFFFE), (4, 7), (4, 0x80000000)])
def test_a_fill_writes_what_a_memset_would(size: int, value: int) -> None:
    memory = torch.full((64,), 0x55, dtype=torch.uint8)
    Fill(memory.data_ptr() + 16, value, size, 8).run(memory.device)
    expected = bytes([0x55] * 16) + value.to_bytes(size, "little") * 8 + bytes([0x55] * (48 - 8 * size))
    assert bytes(memory.tolist()) == expected
