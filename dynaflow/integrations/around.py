"""Methods of a system's classes, with something of ours around them: how a plugin gets in without a line of the system changed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def put_around(cls: type, name: str, around: Callable[..., Any]) -> None:
    """`around(method, self, ...)` is called in the place of `method(self, ...)`. Once, however often it is asked for: systems may call
    their plugins several times."""
    method = getattr(cls, name)
    if getattr(method, "_dynaflow_around", None) is around:
        return

    @functools.wraps(method)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(method, self, *args, **kwargs)

    called._dynaflow_around = around  # type: ignore[attr-defined]
    setattr(cls, name, called)
