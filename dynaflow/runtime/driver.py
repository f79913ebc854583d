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


def ask(call: Any, *args: Any) -> Any:
    """What the driver answers: nothing, a value, or a list of them."""
    status, *values = call(*args)
    if int(status) != 0:
        raise DriverError(f"{call.__name__} says {status.name}")
    return values[0] if len(values) == 1 else values
