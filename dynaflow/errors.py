"""One class per mistake. Every message says what, where, why and what to do about it, in at most 12 lines.

    PlanRace: 'L3.mlp 0/2' on comm writes what 'L3.attn 1/2' on compute may still be reading.
      where    my_overlap.py:41   flow.execute(mlp, stream="comm")
      region   hidden, rows 0/2
      why      no path of waits orders compute#57 before comm#22
      fix      df.synchronise(flow, plan) makes the waits anew
"""

from __future__ import annotations

import linecache
from typing import Self

MAX_LINES, MAX_CHARACTERS = 12, 600


class DynaFlowError(ValueError):
    """Base of everything that a user can get wrong. `what` is the first line; the other fields are optional."""

    def __init__(self, what: str, *, where: str = "", region: str = "", why: str = "", fix: str = "", picture: str = ""):
        self.what, self.where, self.region, self.why, self.fix, self.picture = what, where, region, why, fix, picture
        labelled = (("where", quote(where)), ("region", region), ("why", why), ("fix", fix))
        below = [f"  {label:<8} {_short(text, 1)}" for label, text in labelled if text]
        below += ["  " + line for line in picture.splitlines()[:6]]
        super().__init__("\n".join([_short(what, MAX_LINES - len(below)), *below]))

    def bare(self) -> Self:
        """The same without where it was raised, to be kept: a traceback keeps the frames that it goes through, and what was called with."""
        same = type(self).__new__(type(self), *self.args)
        same.__dict__.update(self.__dict__)
        return same


def _short(text: str, num_lines: int) -> str:
    """Others' messages, and what a user's objects say of themselves, may be long."""
    lines = text.splitlines() or [""]
    short = "\n".join(line if len(line) <= MAX_CHARACTERS else f"{line[:MAX_CHARACTERS]} ..." for line in lines[:num_lines])
    return short if len(lines) <= num_lines else f"{short} ..."


def quote(where: str) -> str:
    """`file:line` followed by the source text of that line, where it can be read."""
    path, _, number = where.rpartition(":")
    source = linecache.getline(path, int(number)).strip() if number.isdigit() else ""
    return f"{where}   {source}" if source else where


# -- the strategy's mistakes, found while it plans


class StrategyError(DynaFlowError):
    """A strategy did something that no plan can be made of."""


class OpNotReady(StrategyError):
    """An op was executed before the ops that it depends on."""


class OpExecutedTwice(StrategyError):
    """An op was executed a second time on the same part."""


class OpNeverExecuted(StrategyError):
    """The strategy returned while ops were left."""


class StrategyStuck(StrategyError):
    """The strategy keeps asking for ready ops and executes none."""


class StreamConflict(StrategyError):
    """A stream was declared twice with different settings, or under a reserved name."""


class PartsDoNotTile(StrategyError):
    """The parts of a split leave rows out, or hold rows twice."""


class SplitTooLate(StrategyError):
    """`flow.split` was called after the first op was looked at or executed."""


class UnsplittableOp(StrategyError):
    """An op that mixes the batch was asked to be split."""


class UnknownOp(StrategyError):
    """A name or pattern that matches no op of the flow, or a thing that is no ready op."""


class ReplacementMismatch(StrategyError):
    """A replacement function returns other outputs than the ops it stands in for."""


class StrategyRaised(StrategyError):
    """The strategy's own code raised."""


class FellBack(StrategyError):
    """strict=True, and the call would have run the sequential graph."""


class BatchTooSmall(StrategyError):
    """The batch has fewer rows than the strategy has parts."""


# -- the caller's mistakes


class AmbiguousBatch(DynaFlowError):
    """Several dims could be the batch, or arguments disagree on its size."""


class Misaligned(DynaFlowError):
    """A tensor that compiled code would change in place starts where it cannot."""


class ContextMismatch(DynaFlowError):
    """A plan was made for another flow or context than the one it is run in."""


class OptionError(DynaFlowError):
    """An option or argument that is unknown or cannot be honoured."""


class PartitionError(DynaFlowError):
    """A partition rule that matches nothing, or contradicts another."""


class Unplannable(DynaFlowError):
    """A graph that runs, but not under a plan."""

    def __init__(self, what: str, *, fix: str = "", **more: str):
        super().__init__(what, fix=fix or "leave strict=True out: the sequential graph does the same; or write that part otherwise", **more)


class SplitMismatch(DynaFlowError):
    """`df.check` ran an op split and unsplit, and the results differ."""


class PlanSyntaxError(DynaFlowError):
    """A plan's text does not parse. `line` and `column` count from 1."""

    def __init__(self, what: str, *, line: int, column: int, expected: str, picture: str = ""):
        self.line, self.column, self.expected = line, column, expected
        super().__init__(what, where=f"line {line}, column {column}", why=f"expected {expected}", picture=picture)


# -- what the verifier refuses


class PlanRefused(DynaFlowError):
    """A plan that could give a wrong result. Nothing of it was launched."""


class PlanRace(PlanRefused):
    """Two launches touch the same bytes, one of them writes, and no path of waits orders them."""


class WrongOrder(PlanRefused):
    """Two launches that touch the same bytes are ordered against the program."""


class WaitBeforeRecord(PlanRefused):
    """A wait on an event that is not recorded yet; CUDA would let it pass, silently."""


class UnjoinedStream(PlanRefused):
    """A stream whose last step the caller's stream does not wait for, or whose first does not wait for the caller's."""


class PartGap(PlanRefused):
    """Rows of the batch that an op never runs over."""


class PartOverlap(PlanRefused):
    """Rows of the batch that an op runs over twice."""


class OpMissing(PlanRefused):
    """An op of the flow that the plan never launches."""


class OpDoubled(PlanRefused):
    """An op that the plan launches twice over the same rows."""


class MalformedPlan(PlanRefused):
    """A plan that names an op, value, stream or event that does not exist, or declares one twice."""


class ArenaOverflow(PlanRefused):
    """A buffer that lies outside the arena."""


class LiveOverlap(PlanRefused):
    """Two values that are alive at the same time share bytes."""


class RankMismatch(PlanRefused):
    """Ranks would call collectives in different order."""


class RankMissing(RankMismatch):
    """A rank did not say which collectives it would call. What it runs is not known, so nothing is launched here."""
