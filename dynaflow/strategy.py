"""The interface that a strategy implements."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dynaflow.planner import Planner


class Strategy:
    """A policy: in which parts, in which order and on which streams the ops of a flow run.

    Subclass it and write `schedule`. It is run once per context (what it reads from `flow.context`), never in the steady state:

        class TwoBatch(df.Strategy):
            def schedule(self, flow):
                flow.split(2)
                while ready := flow.get_ready_ops():
                    r = min(ready, key=lambda r: (r.depth, r.part))
                    flow.execute(r, stream="comm" if r.kind == "network" else "compute")
    """

    # whether a serving engine, where it can, is to put requests that decode before those that prefill
    wants_phases_sorted = False

    def schedule(self, flow: Planner) -> None:
        raise TypeError(f"{type(self).__name__} does not implement schedule(flow)")

    def __repr__(self) -> str:
        settings = ", ".join(f"{k}={v!r}" for k, v in sorted(vars(self).items()))
        return f"{type(self).__name__}({settings})"
