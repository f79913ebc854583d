"""CUDA's driver, through the package cuda-bindings, which torch's own builds for CUDA bring along."""

from __future__ import annotations

from typing import Any


class DriverError(RuntimeError):
    """The driver refused, or cannot be reached."""


def cuda_driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DriverError("the package cuda-bindings is not installed") from error
    return driver


def function(driver: Any, name: str) -> Any:
    """One that knows of edges' data: its name has a number before CUDA 13."""
    found = getattr(driver, f"{name}_v2", None) or getattr(driver, name, None)
    if found is None:
        raise DriverError(f"the package cuda-bindings has no {name}")
    return found


def ask(call: Any, *args: Any) -> Any:
    """What the driver answers: nothing, a value, or a list of them."""
    try:
        status, *values = call(*args)
    except RuntimeError as error:  # there is no driver, or none that has this function
        raise DriverError(f"{call.__name__}: {error}") from error
    if int(status) != 0:
        raise DriverError(f"{call.__name__} says {status.name}")
    return values[0] if len(values) == 1 else values


def graph_nodes(driver: Any, graph: Any) -> list[Any]:
    _, count = ask(driver.cuGraphGetNodes, graph, 0)
    nodes, count = ask(driver.cuGraphGetNodes, graph, count)
    return list(nodes[:count])
