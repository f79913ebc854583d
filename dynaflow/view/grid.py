"""Plan -> the lane grid that a person can read aloud.

    plan llama.3f2a90b1: 6 launches on 2 streams in 4 steps, 2 of them with several launches; 6 waits
    L = model.layers.        '<- compute 1' starts after what compute launches in step 1
    step | compute               | comm
       1 | L0.attn 0/2           |
       2 | L0.attn 1/2           | L0.ar 0/2  <- compute 1
       3 | L0.mlp 0/2  <- comm 2 | L0.ar 1/2  <- compute 2
       4 | L0.mlp 1/2  <- comm 3 |
    caller continues after compute 4

Contract: every launch stands in exactly one cell, in the column of its stream, in the row of its earliest step. Streams that launch
nothing have no column.

1. step      a launch's earliest step, if every launch took one step: after its stream and after what it waits for
2. names     `model.layers.3.attn` reads L3.attn; the legend says what L is
3. cells     a launch and the waits that hold it; the wait for the caller's start is not shown
4. table     a row per step, a column per stream
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from dynaflow.ir import CALLER, Launch, Part, Plan, Record

MAX_CELL = 64
# fused ops are all named up to here
MAX_FUSED = 40


@dataclass(frozen=True, slots=True)
class Cell:
    launch: Launch
    # earliest step, from 1
    step: int
    # what the stream waited for since its previous launch: (stream, step); step 0 is an event that nothing recorded
    waits: tuple[tuple[str, int], ...]


@dataclass(slots=True)
class _Lane:
    """A stream while the plan is read: what it has launched, and what it waits for."""

    # step of its last launch; 0 before the first
    launched: int = 0
    # its next launch comes after this step
    after: int = 0
    # what it waits for since its last launch
    waits: tuple[tuple[str, int], ...] = ()


def cells(plan: Plan) -> tuple[tuple[Cell, ...], tuple[tuple[str, int], ...]]:
    """Every launch with its earliest step, in host order; and what the caller's stream waits for at the end."""
    lanes: dict[str, _Lane] = {}
    # per event: the launches that it comes after
    events: dict[str, tuple[tuple[str, int], ...]] = {}
    table = []
    for step in plan.steps:
        lane = lanes.setdefault(step.stream, _Lane())
        if isinstance(step, Launch):
            lane.launched = lane.after = lane.after + 1
            table.append(Cell(step, lane.launched, lane.waits))
            lane.waits = ()
        elif isinstance(step, Record):
            own = ((step.stream, lane.launched),) if lane.launched else ()
            events[step.event] = own + lane.waits
        else:
            for wait in events.get(step.event, ((step.event, 0),)):
                lane.after = max(lane.after, wait[1])
                if wait not in lane.waits and wait[0] != step.stream:
                    lane.waits += (wait,)
    return tuple(table), lanes[CALLER].waits if CALLER in lanes else ()


def grid(plan: Plan, max_rows: int | None = None) -> str:
    """The lane grid; with `max_rows`, the middle of a longer one is left out."""
    table, joins = cells(plan)
    names, legend = short_names(dict.fromkeys(op for cell in table for op, _ in cell.launch.calls))
    used = dict.fromkeys(cell.launch.stream for cell in table)
    streams = [s for s in dict.fromkeys([*(s.name for s in plan.streams), *used]) if s in used]

    num_steps = max((cell.step for cell in table), default=0)
    rows = [["" for _ in streams] for _ in range(num_steps)]
    for cell in table:
        rows[cell.step - 1][streams.index(cell.launch.stream)] = _cell(cell, names)
    lines = _table(streams, rows, max_rows)
    if joins:
        lines.append("caller continues after " + ", ".join(_wait(w) for w in joins))
    return "\n".join([*_head(plan, rows, legend, table), *lines]) + "\n"


# ---------------------------------------------------------------------------- 2. names


def short_names(names: Iterable[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Every name's short form, unique among them, and what the capitals in it stand for: {"L": "model.layers."}.

    The words before a layer's number become the last one's capital, or the capitals of all of them where two would be the same.
    What would still not be unique stays long. Where no name has a number, what all names begin with is left out.
    """
    names = list(names)
    prefixes = list(dict.fromkeys(p for name in names if (p := _layer_prefix(name))))
    if not prefixes:
        common = _common_prefix(names)
        return {name: name[len(common) :] for name in names}, {"": common} if common else {}

    last = {p: p.split(".")[-2][0].upper() for p in prefixes}
    initials = {p: "".join(word[0].upper() for word in p.split(".") if word) for p in prefixes}
    wanted = {p: letter if list(last.values()).count(letter) == 1 else initials[p] for p, letter in last.items()}
    legend = {letter: p for p, letter in wanted.items() if list(wanted.values()).count(letter) == 1}
    short = {}
    for name in names:
        letter = next((k for k, p in legend.items() if name.startswith(p) and name[len(p)].isdigit()), None)
        short[name] = letter + name[len(legend[letter]) :] if letter else name
    if len(set(short.values())) < len(names):
        return {name: name for name in names}, {}
    return short, legend


def _layer_prefix(name: str) -> str:
    """`model.layers.` of `model.layers.0.mlp`; nothing for `model.embed.1`, where the number only tells two ops apart."""
    words = name.split(".")
    number = next((i for i, word in enumerate(words[:-1]) if word.isdigit()), 0)
    return ".".join(words[:number]) + "." if number else ""


def _common_prefix(names: list[str]) -> str:
    """The dotted words that every name begins with, never a whole name."""
    if len(names) < 2:
        return ""
    split = [name.split(".")[:-1] for name in names]
    common = []
    for words in zip(*split):
        if len(set(words)) > 1:
            break
        common.append(words[0])
    return ".".join(common) + "." if common else ""


# ---------------------------------------------------------------------------- 3. cells


def _cell(cell: Cell, names: dict[str, str]) -> str:
    text = launch_label(cell.launch, names)
    if len(text) > MAX_CELL:
        text = text[: MAX_CELL - 3] + "..."
    if cell.waits:
        text += "  <- " + ", ".join(_wait(w) for w in cell.waits)
    return text


def launch_label(launch: Launch, names: dict[str, str] | None = None) -> str:
    """`L0.attn 1/2`; fused `[L0.attn, L0.mlp] 1/2` or `[L0.attn..L3.mlp, 12 ops] 1/2`; a replacement `fn[L0.ar, L0.norm] 1/2`."""
    names = names or {}
    ops = [names.get(op, op) for op, _ in launch.calls]
    parts = [part for _, part in launch.calls]
    if not launch.replace:
        if len(ops) == 1:
            return _with_part(ops[0], parts[0])
        listed = ", ".join(ops)
        return _with_part(f"[{listed}]" if len(listed) <= MAX_FUSED else f"[{ops[0]}..{ops[-1]}, {len(ops)} ops]", parts[0])
    # `pkg.fn(by=0.5).3`, the fourth function of that name, is fn(by=0.5)
    name, paren, given = re.sub(r"\.\d+$", "", launch.replace).partition("(")
    function = name.rsplit(".", 1)[-1] + paren + given
    if len(set(parts)) == 1:
        return _with_part(f"{function}[{', '.join(ops)}]", parts[0])
    return f"{function}[{', '.join(_with_part(op, part) for op, part in zip(ops, parts))}]"


def _with_part(text: str, part: Part) -> str:
    return f"{text} {part}".rstrip()


def _wait(wait: tuple[str, int]) -> str:
    stream, step = wait
    return f"{stream} {step}" if step else f"{stream} (never recorded)"


# ---------------------------------------------------------------------------- 4. table


def _head(plan: Plan, rows: list[list[str]], legend: dict[str, str], table: tuple[Cell, ...]) -> list[str]:
    num_streams = len({cell.launch.stream for cell in table})
    num_shared = sum(1 for row in rows if sum(map(bool, row)) > 1)
    shared = f", {num_shared} of them with several launches" if num_streams > 1 else ""
    lines = [
        f"plan {plan.flow}: {_count(len(table), 'launch', 'launches')} on {_count(num_streams, 'stream')} "
        f"in {_count(len(rows), 'step')}{shared}; {_count(len(plan.waits), 'wait')}"
    ]
    if plan.reason:
        lines.append(f"sequential: {' '.join(plan.reason.split())}")
    notes = [f"{letter} = {prefix}" if letter else f"names without {prefix}" for letter, prefix in legend.items()]
    shown = next((cell.waits[0] for cell in table if cell.waits and cell.waits[0][1]), None)
    if shown:
        notes.append(f"'<- {_wait(shown)}' starts after what {shown[0]} launches in step {shown[1]}")
    if notes:
        lines.append("        ".join(notes))
    return lines


def _table(streams: list[str], rows: list[list[str]], max_rows: int | None) -> list[str]:
    widths = [max(len(text) for text in column) for column in zip(streams, *rows)]
    first = max(4, len(str(len(rows))))

    def line(number: object, texts: list[str]) -> str:
        return " | ".join([str(number).rjust(first), *(text.ljust(width) for text, width in zip(texts, widths))]).rstrip()

    body = [line(i, row) for i, row in enumerate(rows, 1)]
    if max_rows is not None and len(body) > max_rows:
        num_head, num_tail = (max_rows + 1) // 2, max_rows // 2
        left_out = len(body) - num_head - num_tail
        middle = " " * first + f" : {_count(left_out, 'step')} left out"
        body = [*body[:num_head], middle, *body[len(body) - num_tail :]]
    return [line("step", streams), *body]


def _count(number: int, word: str, plural: str = "") -> str:
    return f"{number} {word if number == 1 else plural or word + 's'}"
