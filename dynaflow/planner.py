"""Flow + Strategy -> launches, in the order in which the strategy executed them.

Contract: every op of the flow is launched over every row exactly once, and never before an op that it depends on. Waits and
memory are not decided here (`sync.py`, `memory.py`). The planner never looks at tensors.

1. The strategy declares splits and streams.
2. On the first look at ready ops, each op and its parts become items, and the flow's edges become edges between items.
3. `execute` turns ready items into one launch and makes their successors ready.
4. When the strategy returns, nothing may be left.
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from fnmatch import fnmatchcase
from fractions import Fraction
from functools import cached_property, partial
from itertools import accumulate
from math import lcm
from types import FrameType
from typing import Any, Callable, Iterable, Sequence

from dynaflow import errors
from dynaflow.context import Context
from dynaflow.costs import Cost, Costs, check_costs, heights_us
from dynaflow.ir import CALLER, WHOLE, Flow, Launch, Op, Part, Plan, Stream, covers, equal_parts, evaluate, tiles
from dynaflow.text import NAME

# why a plan that splits the batch is none
CONSTANT_BATCH = "there is no batch to split: its size is a constant of the graph"
# A strategy that looks this often without executing anything will not get anywhere.
MAX_IDLE_LOOKS = 10_000


class ReadyOp:
    """An Op on a Part, with the op's attributes. `users` are the items that depend on it (ready or not).

    `height_us` is the longest path from its start to the end of the flow, its own cost included, over the whole batch; every op
    counts 1 where no costs are known (`cost` is None). `is_merged_later`: an op that runs over the whole batch, and has others behind
    it, depends on it.
    """

    __slots__ = ("_planner", "_item", "op", "part", "name", "kind", "depth", "height", "cost", "height_us", "is_merged_later")

    def __init__(
        self, planner: Planner, item: int, op: Op, part: Part, depth: int, height: int, cost: Cost | None, height_us: float, merged: bool
    ):
        self._planner, self._item, self.op, self.part, self.is_merged_later = planner, item, op, part, merged
        self.name, self.kind, self.depth, self.height, self.cost, self.height_us = op.name, op.kind, depth, height, cost, height_us

    @property
    def users(self) -> list[ReadyOp]:
        return [self._planner._handles[i] for i in self._planner._successors[self._item]]

    @property
    def needs(self) -> list[ReadyOp]:
        """What it depends on and is not executed yet."""
        planner = self._planner
        return [planner._handles[i] for i in planner._predecessors[self._item] if not planner._done[i]]

    @property
    def grows(self) -> bool:
        """Whether its results take more memory than what it reads, parameters aside."""
        flow = self._planner.flow
        written, read = (sum(evaluate(flow.value[v].nbytes, flow.nominal_sizes) for v in names if flow.value[v].role != "param")
                         for names in (self.op.writes, self.op.reads))  # fmt: skip
        return bool(written > read)

    @property
    def is_ready(self) -> bool:
        return self._item in self._planner._ready

    @property
    def is_executed(self) -> bool:
        return bool(self._planner._done[self._item])

    def __repr__(self) -> str:
        return f"{self.name} {self.part}".rstrip()


class Planner:
    """What a strategy sees as `flow`."""

    def __init__(
        self,
        flow: Flow,
        context: Context,
        costs: Costs | None = None,
        check_replacement: Callable[[Callable[..., Any], Sequence[tuple[str, Part]], str], None] | None = None,
        make_body: Callable[[Sequence[tuple[str, Part]]], Callable[..., Any] | None] | None = None,
        chosen: Sequence[int] = (),
    ):
        """`chosen`: which option the first, second, ... `any_of` gives; 0 for those that are not named."""
        # what the strategy gives up to, and its own flow: parts may be apart in that one
        self._whole, self.flow, self.context = flow, flow, context
        self.functions: dict[str, Callable[..., Any]] = {}
        if costs:
            check_costs(flow, costs)
        self._costs = costs or {}
        self._check_replacement, self._make_body = check_replacement, make_body
        self._chosen = tuple(chosen)
        # how many options each any_of had
        self.num_options: list[int] = []
        self._default_parts: tuple[Part, ...] = (WHOLE,)
        self._parts_of: dict[str, tuple[Part, ...]] = {}
        # how ops are cut: by the rows that tags give; or, as one way among these, by shares of the batch: ()
        self._ways: dict[tuple[str, ...], None] = {}
        self._streams: dict[str, Stream] = {}
        self._declared: set[str] = set()
        self._launches: list[Launch] = []
        self._reason: str | None = None
        self._handles: list[ReadyOp] = []
        self._successors: list[list[int]] = []
        self._num_unmet: list[int] = []
        self._ready: dict[int, ReadyOp] = {}
        self._done: bytearray = bytearray()
        self._idle_looks = 0
        self._lines: dict[tuple[str, int], str] = {}

    # -- 1. what the strategy declares

    @property
    def ops(self) -> tuple[Op, ...]:
        return self.flow.ops

    def split(self, into: int | Sequence[int] | Sequence[float] | Sequence[int | str], *, ops: Any = None) -> None:
        """Cut the batch: `split(2)`, sizes `split([3, 5, -1])` (-1: the rest), boundaries `split([0, 3, 8, 17])`, shares
        `split([0.5, 0.3, 0.2])`. `ops` (a name, a glob, names, or a predicate over Op) limits it to some ops.
        A size may be the name of a tag, `split(["num_prefill", -1])`: one plan serves all its values. No op is then cut in another way.

        Ops that mix the batch run over all of it; naming one in `ops` is an error.
        """
        where = self._where(sys._getframe(1))
        if self._handles:
            raise errors.SplitTooLate(
                "flow.split was called after the ready ops were looked at.", where=where,
                fix="split first, then get_ready_ops and execute")  # fmt: skip
        parts = self._parts(into, where)
        if len(parts) > 1:
            self._ways[self._rows_by_tag(into)] = None
        if len(self._ways) > 1:
            raise errors.StrategyError(
                f"flow.split({into!r}) cuts in another way than a split before it.", where=where,
                why="where a tag says how many rows a part has, all ops that are split are cut so", fix="split all of them alike")
        if ops is None:
            self._default_parts = parts
            return
        for op in self._select(ops, where):
            if op.unsplittable and len(parts) > 1:
                raise errors.UnsplittableOp(
                    f"'{op.name}' cannot be split into {len(parts)} parts.", where=where, why=op.unsplittable,
                    fix="leave it out of ops=: it then runs once over the whole batch")  # fmt: skip
            self._parts_of[op.name] = parts

    def any_of(self, *options: Any) -> Any:
        """One of the options, where the strategy cannot know which is best: the first. With `never_slower=True` the strategy is run once
        for each, and the plan that the device finds fastest is kept."""
        if not options:
            raise errors.StrategyError("flow.any_of() has no options.", where=self._where(sys._getframe(1)), fix="give one or more")
        at = self._chosen[len(self.num_options)] if len(self.num_options) < len(self._chosen) else 0
        self.num_options.append(len(options))
        return options[min(at, len(options) - 1)]

    def stream(self, name: str, *, priority: int = 0, sms: int | None = None) -> str:
        """Declare a stream. Returns its name, for `execute(..., stream=name)`."""
        return self._declare(name, priority, sms, self._where(sys._getframe(1)))

    def sequential(self, reason: str) -> None:
        """Give up: run the graph as it is, and say why."""
        if not isinstance(reason, str) or not reason.strip():
            raise errors.StrategyError(
                f"flow.sequential({reason!r}) gives no reason.", where=self._where(sys._getframe(1)),
                why="whoever runs the model is told why it is not split", fix='say it: flow.sequential("batch too small")')  # fmt: skip
        self._reason = reason

    def cost_of(self, op: Op) -> Cost | None:
        """What an op takes over the whole batch, where known."""
        return self._costs.get(op.name)

    def body(self, items: Sequence[ReadyOp]) -> Any:
        """What these ops of one part do, as one function: `execute(items, replace=flow.body(items))` changes nothing.

        None where it cannot be had: the flow has no functions behind it, or an op takes a size that none of its inputs has.
        """
        return self._make_body([(item.name, item.part) for item in items]) if self._make_body is not None else None

    # -- 2. items

    def get_ready_ops(self) -> list[ReadyOp]:
        """Items whose dependencies are all executed, in the order in which they became ready. Empty when all is done."""
        if not self._handles and self.flow.ops:
            self._make_items()
        self._idle_looks += 1
        if self._idle_looks > MAX_IDLE_LOOKS:
            raise errors.StrategyStuck(
                f"the strategy looked at the ready ops {MAX_IDLE_LOOKS:,} times in a row and executed none.",
                where=self._where(sys._getframe(1)), why=f"ready: {self._names(self._ready.values())}",
                fix="execute at least one ready op in every round")  # fmt: skip
        return list(self._ready.values())

    def find(self, name: str, part: Part | int = 0) -> ReadyOp:
        """The item of op `name` on a part (or on the part with that index), ready or not."""
        if not self._handles:
            self._make_items()
        if name not in self.flow.index:
            raise self._unknown(name, self._where(sys._getframe(1)))
        first, parts = self._first_item[name], self._parts_for(self.flow.op(name))
        return self._handles[first + (parts.index(part) if isinstance(part, Part) else part)]

    def _parts_for(self, op: Op) -> tuple[Part, ...]:
        return (WHOLE,) if op.unsplittable else self._parts_of.get(op.name, self._default_parts)

    def _make_items(self) -> None:
        if self._rows and (state := self.context.state_apart(self._rows)):
            self.flow = replace(self.flow, apart=state)
        flow, handles = self.flow, self._handles
        depth = [0] * len(flow.ops)
        for before, after, _ in sorted(flow.edges, key=lambda e: e.after):
            depth[after] = max(depth[after], depth[before] + 1)
        height = [0] * len(flow.ops)
        for before, after, _ in sorted(flow.edges, key=lambda e: -e.before):
            height[before] = max(height[before], height[after] + 1)
        is_cut = [len(self._parts_for(op)) > 1 for op in flow.ops]
        is_merged_later = [False] * len(flow.ops)
        for before, after, _ in sorted(flow.edges, key=lambda e: -e.before):
            is_merged_later[before] |= is_merged_later[after] or (height[after] > 0 and not is_cut[after])
        height_us = heights_us(flow, self._costs) if self._costs else [h + 1.0 for h in height]
        self._first_item: dict[str, int] = {}
        parts_of = []
        for i, op in enumerate(flow.ops):
            self._first_item[op.name] = len(handles)
            parts = self._parts_for(op)
            parts_of.append((len(handles), parts))
            cost = self._costs.get(op.name)
            for part in parts:
                mine = cost and cost.of(part)
                handles.append(ReadyOp(self, len(handles), op, part, depth[i], height[i], mine, height_us[i], is_merged_later[i]))
        self._successors = [[] for _ in handles]
        self._num_unmet = [0] * len(handles)
        self._done = bytearray(len(handles))
        self._number = [0] * len(handles)  # of the launch that an item is in
        for before, after, by_rows in flow.edges:
            (a, a_parts), (b, b_parts) = parts_of[before], parts_of[after]
            if by_rows and a_parts == b_parts:
                pairs: Iterable[tuple[int, int]] = ((k, k) for k in range(len(a_parts)))
            else:
                pairs = (
                    (j, k) for j, p in enumerate(a_parts) for k, q in enumerate(b_parts)
                    if not by_rows or (p.lo * q.of < q.hi * p.of and q.lo * p.of < p.hi * q.of)
                )  # fmt: skip
            for j, k in pairs:
                self._successors[a + j].append(b + k)
                self._num_unmet[b + k] += 1
        # Parts of one op that change the same state (no rows of their own) keep their order.
        groups = {flow.storage_index[t] for op in flow.ops for t in op.uses if t.startswith("group:")}
        for i, (first, parts) in enumerate(parts_of):
            if len(parts) > 1 and any(a.is_write and not a.by_rows and a.storage not in groups for a in flow.accesses[i]):
                for k in range(len(parts) - 1):
                    self._successors[first + k].append(first + k + 1)
                    self._num_unmet[first + k + 1] += 1
        self._ready = {i: h for i, h in enumerate(handles) if self._num_unmet[i] == 0}

    @cached_property
    def _predecessors(self) -> list[list[int]]:
        table: list[list[int]] = [[] for _ in self._handles]
        for i, successors in enumerate(self._successors):
            for j in successors:
                table[j].append(i)
        return table

    # -- 3. execute

    def execute(
        self, ready: ReadyOp | Sequence[ReadyOp], stream: str = "compute", *, replace: Callable[..., Any] | None = None,
        after: Sequence[ReadyOp] = (),
    ) -> None:  # fmt: skip
        """Launch one ready op; or one op over several adjacent parts; or `replace`, one function, in the place of several.

        `replace` gets the group's external inputs in order of first use and returns its external outputs in order.
        `after`: executed ops that must be over first, although it does not depend on them. What is fetched ahead must not be so too far:
        its memory is that of what those used.
        """
        where = self._where(sys._getframe(1))
        if stream not in self._streams:
            self._declare(stream, 0, None, where, is_use=True)
        if type(ready) is ReadyOp and replace is None:
            self._finish(ready, (ready,), where)
            self._launches.append(Launch(((ready.name, ready.part),), stream, "", where, self._numbers(after, where) if after else ()))
            return
        group = (ready,) if isinstance(ready, ReadyOp) else tuple(ready)
        for item in group:
            if not isinstance(item, ReadyOp):
                raise errors.UnknownOp(
                    f"flow.execute got {item!r}, which is no ready op.", where=where,
                    fix="pass what flow.get_ready_ops() returned")  # fmt: skip
        if not group:
            raise errors.UnknownOp("flow.execute got an empty list.", where=where, fix="pass at least one ready op")
        if replace is not None:
            calls = tuple((item.name, item.part) for item in group)
            name = self._function(replace)
            if self._check_replacement is not None:
                self._check_replacement(replace, calls, where)
            for item in group:
                self._finish(item, group, where)
            self._launches.append(Launch(calls, stream, name, where, self._numbers(after, where)))
            return
        part = self._joined(group, where)
        for item in group:
            self._finish(item, group, where)
        self._launches.append(Launch(((group[0].name, part),), stream, "", where, self._numbers(after, where)))

    def _numbers(self, after: Sequence[ReadyOp], where: str) -> tuple[int, ...]:
        for item in after:
            if not item.is_executed or self._number[item._item] == len(self._launches):
                raise errors.OpNotReady(f"'{item}' is not executed, and nothing can come after it.", where=where, fix="execute it first")
        return tuple(sorted({self._number[item._item] for item in after}))

    def _finish(self, item: ReadyOp, group: Sequence[ReadyOp], where: str) -> None:
        i = item._item
        if item._planner is not self:
            raise errors.UnknownOp(
                f"'{item}' comes from another schedule.", where=where, fix="use the ready ops of this call of schedule(flow)")
        if i not in self._ready:
            raise self._not_ready(item, group, where)
        del self._ready[i]
        self._done[i] = 1
        self._number[i] = len(self._launches)
        self._idle_looks = 0
        num_unmet, handles, newly = self._num_unmet, self._handles, self._ready
        for j in self._successors[i]:
            num_unmet[j] -= 1
            if not num_unmet[j]:
                newly[j] = handles[j]

    def _joined(self, group: Sequence[ReadyOp], where: str) -> Part:
        first = group[0]
        if any(item.op is not first.op for item in group):
            raise errors.StrategyError(
                f"flow.execute got different ops in one list: {self._names(group)}.", where=where,
                fix="execute them one by one, or pass replace=fn to put one function in their place")  # fmt: skip
        parts = sorted(item.part for item in group)
        for left, right in zip(parts, parts[1:]):
            if left.hi != right.lo:
                raise errors.PartsDoNotTile(
                    f"'{first.name}' cannot run once over the parts {', '.join(map(str, parts))}.", where=where,
                    why=f"{left} and {right} are not adjacent rows", fix="pass adjacent parts")  # fmt: skip
        joined = Part(parts[0].lo, parts[-1].hi, first.part.of)
        return WHOLE if joined.is_whole else joined

    # -- strategies inside of strategies

    def trial(self, flow: Flow | None = None, part: Part = WHOLE) -> Planner:
        """A planner of its own: for the same flow, or for some ops of it on one part. `repeat` does here what was done there."""
        costs = {name: cost.of(part) for name, cost in self._costs.items()}
        make_body = self._make_body

        def body(calls: Sequence[tuple[str, Part]]) -> Any:
            return make_body([(name, part) for name, _ in calls]) if make_body is not None else None

        made = Planner(flow or self.flow, self.context, costs, None, self._make_body if flow is None else body, self._chosen)
        made.num_options = self.num_options  # options are counted together
        return made

    def split_as(self, trial: Planner) -> None:
        """Cut the batch as a trial did."""
        self._default_parts, self._parts_of, self._ways = trial._default_parts, dict(trial._parts_of), dict(trial._ways)

    def repeat(self, launch: Launch, trial: Planner, stream: str, part: Part | None = None) -> None:
        """Execute a trial's launch, on another stream; `part`: the part that the trial was for."""
        calls = [(name, part or mine) for name, mine in launch.calls]
        items = [item for name, mine in calls for item in self._items_in(name, mine)]
        before = [call for number in launch.after for call in trial._launches[number].calls]
        after = [item for name, mine in before for item in self._items_in(name, part or mine)]
        self.execute(items, stream, replace=trial.functions[launch.replace] if launch.replace else None, after=after)

    def _items_in(self, name: str, part: Part) -> list[ReadyOp]:
        first, parts = self.find(name)._item, self._parts_for(self.flow.op(name))
        return [self._handles[first + k] for k, mine in enumerate(parts) if covers([part], mine)]

    # -- 4. the end

    def finish(self) -> Plan:
        """The launches as a Plan without waits, once the strategy returned."""
        if self._reason is not None:
            return sequential_plan(self._whole, self._reason, self._looks())
        if (len(self._default_parts) > 1 or self._rows) and not self.flow.batch:
            return sequential_plan(self._whole, CONSTANT_BATCH, self._looks())
        if not self._handles and self.flow.ops:
            self._make_items()
        left = [h for h in self._handles if not self._done[h._item]]
        if left:
            raise errors.OpNeverExecuted(
                f"the strategy returned with {len(left)} of {len(self._handles)} ops left: {self._names(left)}.",
                why=f"ready and not executed: {self._names(self._ready.values())}",
                fix="loop until flow.get_ready_ops() is empty, or give up with flow.sequential(reason)")  # fmt: skip
        used = dict.fromkeys(launch.stream for launch in self._launches)
        streams = tuple(s for s in self._streams.values() if s.name in used and s.name != CALLER)
        return Plan(self.flow.label, streams, tuple(self._launches), context=self._looks(), rows=self._rows)

    def _looks(self) -> tuple[str, ...]:
        return tuple(str(look) for look in self.context.looks)

    # -- what the checks need

    @property
    def _rows(self) -> tuple[str, ...]:
        return next(iter(self._ways), ())

    @staticmethod
    def _rows_by_tag(into: Any) -> tuple[str, ...]:
        is_by_tag = isinstance(into, Sequence) and any(isinstance(n, str) for n in into)
        return tuple(map(str, into)) if is_by_tag else ()

    def _parts(self, into: Any, where: str) -> tuple[Part, ...]:
        if rows := self._rows_by_tag(into):
            missing = [n for n in into if isinstance(n, str) and self.context.count(n) is None]
            if missing or rows.count("-1") != 1:
                raise errors.PartsDoNotTile(
                    f"flow.split({into!r}) does not tile the batch.", where=where,
                    why=f"the context has no tag {missing[0]}" if missing else "one part must be the rest",
                    fix="name tags that the call has (df.context), and give -1 once")  # fmt: skip
            return equal_parts(len(rows))
        if isinstance(into, int) or not hasattr(into, "__iter__"):
            if not hasattr(into, "__index__") or int(into) < 1:
                raise errors.PartsDoNotTile(f"flow.split({into}) makes no part.", where=where, fix="split into 1 part or more")
            return equal_parts(int(into))
        numbers = list(into)
        if any(isinstance(n, float) for n in numbers):
            are_shares = all(0 < n <= 1 for n in numbers)
            ends = [Fraction(n).limit_denominator(10_000) for n in accumulate(numbers)] if are_shares else []
            if not are_shares or ends[-1] != 1:
                raise errors.PartsDoNotTile(
                    f"the shares {numbers} do not tile the batch.", where=where, why=f"they add up to {sum(numbers):g}",
                    fix="give positive shares that add up to 1")  # fmt: skip
            of = lcm(*(end.denominator for end in ends))
            marks = [0, *(int(end * of) for end in ends)]
        else:
            of = int(self.context.batch_size)
            if numbers and numbers[0] == 0:
                marks = [int(n) for n in numbers]
            else:
                sizes = [int(n) for n in numbers]
                if sizes.count(-1) == 1:
                    sizes[sizes.index(-1)] = of - (sum(sizes) + 1)
                marks = [0, *accumulate(sizes)]
        parts = tuple(Part(a, b, of) for a, b in zip(marks, marks[1:]))
        if not parts or not tiles(parts):
            raise errors.PartsDoNotTile(
                f"flow.split({into!r}) does not tile the batch of {of} rows.", where=where,
                why=f"the parts would be {', '.join(f'[{p.lo}, {p.hi})' for p in parts)}",
                fix="give sizes that add up to the batch size, or rising boundaries from 0 to it")  # fmt: skip
        return parts

    def _select(self, ops: Any, where: str) -> list[Op]:
        if callable(ops) and not isinstance(ops, (Op, ReadyOp)):
            return [op for op in self.flow.ops if ops(op)]
        wanted = [ops] if isinstance(ops, (str, Op, ReadyOp)) else list(ops)
        found = []
        for want in wanted:
            pattern = want if isinstance(want, str) else want.name
            matched = [op for op in self.flow.ops if op.name == pattern or fnmatchcase(op.name, pattern)]
            if not matched:
                raise self._unknown(pattern, where)
            found.extend(matched)
        return found

    def _declare(self, name: str, priority: int, sms: int | None, where: str, is_use: bool = False) -> str:
        if not isinstance(name, str) or NAME.fullmatch(name) is None:
            raise errors.StreamConflict(f"{name!r} is no name for a stream.", where=where, fix="use a word without spaces, such as 'comm'")
        new, old = Stream(name, priority, sms), self._streams.get(name)
        if name == CALLER and not is_use:
            raise errors.StreamConflict(
                f"'{CALLER}' is the caller's own stream and cannot be declared.", where=where, fix="choose another name")
        if old is not None and name in self._declared and old != new:
            raise errors.StreamConflict(
                f"stream '{name}' is declared twice with different settings.", where=where,
                why=f"first {old}, now {new}", fix="declare it once")  # fmt: skip
        if old is not None and name not in self._declared and old != new:
            raise errors.StreamConflict(
                f"stream '{name}' is declared after its first use.", where=where,
                why="its launches already assume the default settings", fix="declare streams before executing on them")  # fmt: skip
        if not is_use:
            self._declared.add(name)
        self._streams[name] = new
        return name

    def _function(self, function: Callable[..., Any]) -> str:
        """The function's qualified name; with a number where the plan has others of that name, in order of their first use."""
        name, number = _qualified_name(function), 0
        free = name
        while self.functions.setdefault(free, function) != function:
            number += 1
            free = f"{name}.{number}"
        return free

    def _not_ready(self, item: ReadyOp, group: Sequence[ReadyOp], where: str) -> errors.StrategyError:
        if self._done[item._item]:
            return errors.OpExecutedTwice(
                f"'{item}' was executed twice.", where=where, fix="execute only what flow.get_ready_ops() returns now")
        missing = [h for h in self._handles if not self._done[h._item] and item._item in self._successors[h._item]]
        is_group = len(group) > 1
        return errors.OpNotReady(
            f"'{item}' is not ready.", where=where, why=f"it depends on {self._names(missing)}, not executed yet",
            fix="order the group so that producers come first" if is_group else "execute those first")  # fmt: skip

    def _unknown(self, pattern: str, where: str) -> errors.UnknownOp:
        return errors.UnknownOp(
            f"no op is named '{pattern}'.", where=where, why=f"the flow has {self._names(self.flow.ops)}",
            fix="print df.explain(...) for the partition")  # fmt: skip

    @staticmethod
    def _names(items: Iterable[Any], most: int = 5) -> str:
        names = [str(getattr(i, "name", i)) if isinstance(i, Op) else repr(i) for i in items]
        return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "") or "nothing"

    def _where(self, frame: FrameType) -> str:
        key = (frame.f_code.co_filename, frame.f_lineno)
        text = self._lines.get(key)
        if text is None:
            text = self._lines[key] = f"{key[0]}:{key[1]}"
        return text


def _qualified_name(function: Any) -> str:
    """`strategies.mine.fused`; of a functools.partial `strategies.mine.scale(2;by=3)`. The same in every process."""
    if isinstance(function, partial):
        given = [*map(_value_name, function.args), *(f"{key}={_value_name(value)}" for key, value in function.keywords.items())]
        return f"{_qualified_name(function.func)}({';'.join(given)})"
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__qualname__)}"
    return name.replace("<locals>.", "").replace("<", "").replace(">", "")


def _value_name(value: Any) -> str:
    text = str(value) if isinstance(value, (bool, int, float, str, type(None))) else type(value).__qualname__
    return re.sub(r"[\s@,\[\]#;()<>]", "_", text)[:40]


def sequential_plan(flow: Flow, reason: str, context: tuple[str, ...] = ()) -> Plan:
    """Every op once, over the whole batch, in program order, on the caller's stream."""
    steps = tuple(Launch(((op.name, WHOLE),), CALLER) for op in flow.ops)
    return Plan(flow.label, (), steps, context=context, reason=reason)


def plan(flow: Flow, strategy: Any, context: Context | None = None, **options: Any) -> Plan:
    """Run the strategy once. The plan has launches alone: `synchronise` and `place` add the rest."""
    return run_strategy(flow, strategy, context or Context({"batch_size": 64}), **options).finish()


def run_strategy(flow: Flow, strategy: Any, context: Context, **options: Any) -> Planner:
    planner = Planner(flow, context, **options)
    try:
        strategy.schedule(planner)
    except errors.DynaFlowError:
        raise
    except Exception as error:
        where, tb = "", error.__traceback__
        while tb is not None:
            if not _is_ours(tb.tb_frame):
                where = f"{tb.tb_frame.f_code.co_filename}:{tb.tb_lineno}"
            tb = tb.tb_next
        raise errors.StrategyRaised(
            f"strategy {type(strategy).__name__} raised {type(error).__name__}: {error}", where=where,
            fix="this is the strategy's own code; df.explain(model, inputs, strategy) raises it with the full traceback",
        ) from error  # fmt: skip
    return planner


def _is_ours(frame: FrameType) -> bool:
    """What a strategy called, not a line of its own."""
    module = frame.f_globals.get("__name__", "")
    return module.startswith("dynaflow.") and not module.startswith(("dynaflow.strategies.", "dynaflow.testing."))
