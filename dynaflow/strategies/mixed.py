from dataclasses import replace
from itertools import groupby

from dynaflow.errors import OptionError, StrategyError
from dynaflow.ir import CALLER, WHOLE
from dynaflow.planner import Planner
from dynaflow.strategy import Strategy


class Mixed(Strategy):
    """One strategy inside of another: the outer one decides parts and stretches, the inner one schedules each stretch.

    Mixed(TwoBatch(), Branches(2)), where A is a, then b beside c, then d:

    compute      | A0: a b d        A1: a b d        B0 ...
    compute.aux0 |       c                c
    comm         |             ar 0             ar 1

    The rule: the outer strategy is run first. What it launches in a row on one part and one stream is a stretch. A stretch is a flow of
    its own for the inner strategy, whose `caller` is the stretch's stream and whose other streams are named behind it. What the outer
    strategy replaces, or executes after something, stays as it is. The inner one must not split. Where one gives up, the other has it all.
    """

    def __init__(self, outer: Strategy, inner: Strategy):
        for name, strategy in (("outer", outer), ("inner", inner)):
            if not callable(getattr(strategy, "schedule", None)) or isinstance(strategy, type):
                raise OptionError(f"{name}={strategy!r} is no strategy.", fix="Mixed(TwoBatch(), Branches())")
        self.outer, self.inner = outer, inner

    def schedule(self, flow: Planner) -> None:
        trial = flow.trial()
        trial.follow(self.outer)
        outer = trial.finish()
        if outer.reason:
            return flow.follow(self.inner)
        flow.split_as(trial)
        for stream in outer.streams:
            flow.stream(stream.name, priority=stream.priority, sms=stream.sms)
        priority = {s.name: s.priority for s in outer.streams}
        key = lambda launch: (launch.calls[0][1], launch.stream, bool(launch.replace or launch.after))  # noqa: E731
        for (part, stream, is_kept), launches in groupby(outer.launches, key):
            stretch = list(launches)
            if is_kept or len(stretch) == 1:
                for launch in stretch:
                    flow.repeat(launch, trial, stream)
                continue
            names = {launch.calls[0][0] for launch in stretch}
            ops = tuple(replace(op, unsplittable="") for op in flow.ops if op.name in names)
            inside = flow.trial(replace(flow.flow, ops=ops, name=f"{flow.flow.name}.stretch"), part)
            inside.follow(self.inner)
            inner = inside.finish()
            if any(part != WHOLE for launch in inner.launches for _, part in launch.calls):
                raise StrategyError(
                    f"{self.inner!r} splits a stretch of {self.outer!r}.", why="its parts are the outer strategy's",
                    fix="put the strategy that splits outside: Mixed(TwoBatch(), Branches())")  # fmt: skip
            for lane in inner.streams:
                flow.stream(f"{stream}.{lane.name}", priority=lane.priority + priority.get(stream, 0), sms=lane.sms)
            for launch in inner.launches:
                flow.repeat(launch, inside, stream if launch.stream == CALLER else f"{stream}.{launch.stream}", part)
