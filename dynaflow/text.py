"""Plan <-> text. One line per thing; `parse_plan(print_plan(plan)) == plan`.

    plan llama.3f2a90b1
    context batch_size >= 64
    rows num_prefill -1
    stream compute
    stream comm priority=-1 sms=16
    slot 0 layers.0.attn:0 layers.1.attn:0
    loose layers.0.mlp:0
    record start @caller
    wait start @compute
    launch layers.0.attn 0/2 @compute
    record e0 @compute
    wait e0 @comm
    launch mypkg.fused[layers.0.ar 0/2, layers.0.norm 0/2] @comm
    launch [layers.0.mlp, layers.1.norm] 0/2 @compute
    wait e7 @caller
"""

from __future__ import annotations

import re
from typing import Iterator

from dynaflow.errors import PlanSyntaxError
from dynaflow.ir import WHOLE, Launch, Part, Plan, Record, Stream, Wait

NAME = re.compile(r"[^\s@,\[\]#]+")
_PART = re.compile(r"(\d+)(?::(\d+))?/(\d+)")
_NUMBER = re.compile(r"-?\d+")


def print_plan(plan: Plan) -> str:
    return "\n".join(_lines(plan)) + "\n"


def _lines(plan: Plan) -> Iterator[str]:
    yield f"plan {plan.flow}"
    if plan.reason:
        yield f"sequential {' '.join(plan.reason.split())}"
    for read in plan.context:
        yield f"context {read}"
    if plan.rows:
        yield f"rows {' '.join(plan.rows)}"
    for s in plan.streams:
        yield f"stream {s.name}" + (f" priority={s.priority}" if s.priority else "") + (f" sms={s.sms}" if s.sms is not None else "")
    members: dict[int, list[str]] = {}
    for value, slot in plan.slots:
        members.setdefault(slot, []).append(value)
    for slot, values in members.items():
        yield f"slot {slot} {' '.join(values)}"
    if plan.loose:
        yield f"loose {' '.join(plan.loose)}"
    for step in plan.steps:
        if isinstance(step, Launch):
            yield f"launch {launch_text(step)} @{step.stream}"
        else:
            yield f"{'record' if type(step) is Record else 'wait'} {step.event} @{step.stream}"


def launch_text(launch: Launch) -> str:
    """`attn 0/2`; fused `[attn, mlp] 0/2`; `pkg.fn[ar 0/2, norm 1/2]`. Unlike the label it names every call."""
    parts = {part for _, part in launch.calls}
    if launch.replace or len(parts) != 1:
        return f"{launch.replace}[{', '.join(f'{op} {part}'.rstrip() for op, part in launch.calls)}]"
    names = ", ".join(op for op, _ in launch.calls)
    return f"{names if len(launch.calls) == 1 else f'[{names}]'} {parts.pop()}".rstrip()


class _Cursor:
    """A line under the reader's finger: takes tokens from the left, and knows where it is when one is missing."""

    def __init__(self, line: str, number: int):
        self.line, self.number, self.at = line, number, 0

    def fail(self, expected: str) -> PlanSyntaxError:
        rest = self.line[self.at :].strip()
        what = f"line {self.number} of the plan does not parse: " + (f"found {rest[:40]!r}" if rest else "the line ends")
        picture = f"{self.line}\n{' ' * self.at}^"
        return PlanSyntaxError(what, line=self.number, column=self.at + 1, expected=expected, picture=picture)

    def skip_space(self) -> None:
        while self.at < len(self.line) and self.line[self.at] in " \t":
            self.at += 1

    def take(self, pattern: re.Pattern[str], expected: str) -> re.Match[str]:
        self.skip_space()
        match = pattern.match(self.line, self.at)
        if match is None:
            raise self.fail(expected)
        self.at = match.end()
        return match

    def accept(self, literal: str) -> bool:
        self.skip_space()
        found = self.line.startswith(literal, self.at)
        if found:
            self.at += len(literal)
        return found

    def name(self, expected: str) -> str:
        return self.take(NAME, expected).group()

    def new(self, slots: dict[str, int]) -> str:
        """A value that has no slot yet."""
        self.skip_space()
        at, value = self.at, self.name("a value")
        if value in slots:
            self.at = at
            raise self.fail("a value that has no slot yet")
        return value

    def rest(self) -> str:
        text = self.line[self.at :].strip()
        self.at = len(self.line)
        return text

    def end(self) -> None:
        self.skip_space()
        if self.at < len(self.line):
            raise self.fail("the end of the line")

    def stream(self) -> str:
        if not self.accept("@"):
            raise self.fail("'@stream'")
        return self.name("a stream name")


def parse_plan(source: str) -> Plan:
    """The plan that `source` says, or PlanSyntaxError with line, column and what was expected. '#' starts a comment."""
    flow, reason = None, ""
    context: list[str] = []
    rows: list[str] = []
    streams: list[Stream] = []
    slots: dict[str, int] = {}
    loose: list[str] = []
    steps: list[Launch | Record | Wait] = []
    for number, raw in enumerate(source.splitlines(), 1):
        # (a reason and what a strategy read are text, to the end of the line)
        line = (raw if raw.split(maxsplit=1)[:1] in (["sequential"], ["context"]) else raw.split("#", 1)[0]).rstrip()
        if not line.strip():
            continue
        cursor = _Cursor(line, number)
        word = cursor.name("a line that begins with plan, context, rows, stream, slot, loose, launch, record or wait")
        if word == "plan" and flow is None:
            flow = cursor.name("the flow's label")
        elif flow is None:
            cursor.at = 0
            raise cursor.fail("'plan <flow>' as the first line")
        elif word == "sequential":
            reason = cursor.rest()
        elif word == "context":
            context.append(cursor.rest())
        elif word == "rows":
            rows.append(cursor.name("a number of rows, or a tag"))
            while cursor.at < len(line):
                rows.append(cursor.name("a number of rows, or a tag"))
        elif word == "stream":
            streams.append(_stream(cursor))
        elif word == "slot":
            slot = int(cursor.take(_NUMBER, "a slot number").group())
            slots[cursor.new(slots)] = slot
            while cursor.at < len(line):
                slots[cursor.new(slots)] = slot
        elif word == "loose":
            loose.append(cursor.name("a value"))
            while cursor.at < len(line):
                loose.append(cursor.name("a value"))
        elif word == "launch":
            steps.append(_launch(cursor))
        elif word in ("record", "wait"):
            event = cursor.name("an event")
            steps.append((Record if word == "record" else Wait)(event, cursor.stream()))
        else:
            cursor.at = 0
            raise cursor.fail("plan (once), sequential, context, rows, stream, slot, loose, launch, record or wait")
        cursor.end()
    if flow is None:
        raise PlanSyntaxError("the plan is empty", line=1, column=1, expected="'plan <flow>' as the first line")
    ordered = tuple(sorted(slots.items(), key=lambda item: item[1]))
    return Plan(flow, tuple(streams), tuple(steps), ordered, tuple(context), reason, loose=tuple(loose), rows=tuple(rows))


def _stream(cursor: _Cursor) -> Stream:
    name, priority, sms = cursor.name("a stream name"), 0, None
    while True:
        if cursor.accept("priority="):
            priority = int(cursor.take(_NUMBER, "a number").group())
        elif cursor.accept("sms="):
            sms = int(cursor.take(_NUMBER, "a number").group())
        else:
            return Stream(name, priority, sms)


def _launch(cursor: _Cursor) -> Launch:
    is_fused = cursor.accept("[")
    name = "" if is_fused else cursor.name("an op, a function or '['")
    if not is_fused and not cursor.accept("["):
        part = _part(cursor)
        return Launch(((name, part),), cursor.stream())
    calls = []
    while True:
        op = cursor.name("an op")
        calls.append((op, _part(cursor)))
        if cursor.accept("]"):
            break
        if not cursor.accept(","):
            raise cursor.fail("',' or ']'")
    cursor.skip_space()
    at, part = cursor.at, _part(cursor)
    if cursor.at > at:  # one part for all
        if not is_fused or any(own != WHOLE for _, own in calls):
            cursor.at = at
            raise cursor.fail("'@stream'")
        calls = [(op, part) for op, _ in calls]
    return Launch(tuple(calls), cursor.stream(), replace=name)


def _part(cursor: _Cursor) -> Part:
    cursor.skip_space()
    if cursor.at >= len(cursor.line) or not cursor.line[cursor.at].isdigit():
        return WHOLE
    start = cursor.at
    lo, hi, of = cursor.take(_PART, "a part such as 1/2 or 0:3/4").groups()
    part = Part(int(lo), int(hi) if hi else int(lo) + 1, int(of))
    if not 0 <= part.lo < part.hi <= part.of:
        cursor.at = start
        raise cursor.fail("a part lo:hi/of with 0 <= lo < hi <= of")
    return part
