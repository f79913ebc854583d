"""Timelines -> a picture: one above the other on a shared time axis, a lane per stream, a colour per part.

Labels stand where they fit; network launches are hatched. Needs matplotlib: pip install dynaflow[view].
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from os import PathLike
from typing import Any

from dynaflow.errors import OptionError
from dynaflow.timeline import Span, Timeline, duration
from dynaflow.view.grid import short_names

# one fill per part, in order of first use; the whole batch is grey. Dark text reads on all of them.
WHOLE_COLOUR = "#c9ced6"
PART_COLOURS = ("#7fb2e5", "#f4a66a", "#8fcf8f", "#d9a3d9", "#e8d36b", "#83cfc8", "#e59a9a", "#b3a7e6")
INK = "#1f2733"
LANE_HEIGHT = 0.78
WIDTH_INCHES = 13.0
# how wide a character of a label is, in inches, at its font size
CHARACTER_INCHES = 0.066
LANE_CHARACTER_INCHES = 0.083
LABEL_SIZE = 7.5
_PART = re.compile(r"^(?P<op>.*?) (?P<part>\d+(?::\d+)?/\d+)$")
# functions that share a name are numbered behind it
_FUNCTION = re.compile(r"^(?P<name>[^\[(]+?)(\(.*?\))?(\.\d+)?\[(?P<calls>.*)\]$")


def picture(
    timelines: Sequence[Timeline], path: str | PathLike[str], *, subtitles: Sequence[str] = (), time_label: str = "", source: str = ""
) -> None:
    """Draws the timelines into one file; `subtitles` stand at the right of their titles.

    With `time_label` it stands at the time axis, which then has no numbers: for times that are nobody's. `source` is kept in the file as
    its description: what the picture was drawn from.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise OptionError("a picture needs matplotlib, which is not installed", fix="pip install 'dynaflow[view]'") from error

    lanes = [len(t.streams) for t in timelines]
    heights = [0.52 * n + 0.62 for n in lanes]
    figure = Figure(figsize=(WIDTH_INCHES, sum(heights) + 0.75), facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(timelines), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    longest_name = max((len(stream) for t in timelines for stream in t.streams), default=0)
    left, right = max(0.075, (longest_name + 2) * LANE_CHARACTER_INCHES / WIDTH_INCHES), 0.985
    figure.subplots_adjust(left=left, right=right, top=1 - 0.42 / figure.get_figheight(), bottom=0.72 / figure.get_figheight(), hspace=0.42)

    longest = max((t.total_us for t in timelines), default=0.0) or 1.0
    character_us = CHARACTER_INCHES / (WIDTH_INCHES * (right - left)) * longest
    colours = part_colours(timelines)
    for i, (axis, timeline) in enumerate(zip(axes, timelines)):
        total = "" if time_label else duration(timeline.total_us)
        _draw(axis, timeline, colours, character_us, subtitles[i] if i < len(subtitles) else total)
    axes[-1].set_xlim(0, longest * 1.002)
    _time_axis(axes[-1], longest, time_label)
    _legend(figure, colours, any(s.kind == "network" for t in timelines for s in t.spans))
    figure.savefig(path, dpi=130, metadata={"Description": source} if source else None)


def split_label(label: str) -> tuple[str, str]:
    """`layers.0.attn 1/2` -> ("layers.0.attn", "1/2"); the part is empty for the whole batch. A function in the place of ops is its name,
    on their part: `pkg.fn(ctas=8)[ar 1/2, norm 1/2]` -> ("fn", "1/2"), or on none where they have several."""
    if function := _FUNCTION.match(label):
        parts = {split_label(call)[1] for call in function["calls"].split(", ")}
        return function["name"].rsplit(".", 1)[-1], parts.pop() if len(parts) == 1 else ""
    match = _PART.match(label)
    return (match["op"], match["part"]) if match else (label, "")


def _ends(op: str) -> list[str]:
    """The first and the last of fused ops: `layers.0.attn..layers.0.mlp`; an op alone is itself."""
    return op.split("..")


def part_colours(timelines: Sequence[Timeline]) -> dict[str, str]:
    """A colour per part, by its place in its own split: 0/2 and 0/4 look the same."""
    parts = dict.fromkeys(split_label(s.label)[1] for t in timelines for s in t.spans)
    by_split: dict[str, list[str]] = {}
    for part in parts:
        if part:
            by_split.setdefault(part.rsplit("/", 1)[1], []).append(part)
    colours = {"": WHOLE_COLOUR} if "" in parts else {}
    for members in by_split.values():
        for i, part in enumerate(sorted(members, key=_first_row)):
            colours[part] = PART_COLOURS[i % len(PART_COLOURS)]
    return colours


def _first_row(part: str) -> int:
    return int(re.split("[:/]", part)[0])


def _draw(axis: Any, timeline: Timeline, colours: dict[str, str], character_us: float, subtitle: str) -> None:
    names, _ = short_names(dict.fromkeys(name for s in timeline.spans for name in _ends(split_label(s.label)[0])))
    rows = {stream: i for i, stream in enumerate(timeline.streams)}
    for span in timeline.spans:
        _draw_span(axis, span, span.start_us - timeline.start_us, rows[span.stream], colours, names, character_us)
    axis.axvline(timeline.total_us, color=INK, linewidth=1.0, linestyle=(0, (3, 2)))
    axis.set_ylim(max(len(rows), 1) - 0.5, -0.5)
    axis.set_yticks(range(len(rows)), list(rows))
    axis.tick_params(axis="y", length=0, labelsize=9.5, labelcolor=INK)
    axis.tick_params(axis="x", labelsize=9, labelcolor=INK, color="#9aa3af")
    axis.grid(axis="x", color="#e3e7ec", linewidth=0.8)
    axis.set_axisbelow(True)
    for side, spine in axis.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color("#9aa3af")
    axis.set_title(timeline.title, loc="left", fontsize=10.5, fontweight="bold", color=INK, pad=5)
    axis.set_title(subtitle, loc="right", fontsize=9.5, color=INK, pad=5)


def _draw_span(axis: Any, span: Span, start: float, row: int, colours: dict[str, str], names: dict[str, str], character_us: float) -> None:
    op, part = split_label(span.label)
    length = span.end_us - span.start_us
    hatch = "////" if span.kind == "network" else None
    axis.barh(row, length, left=start, height=LANE_HEIGHT, color=colours[part], edgecolor="white", linewidth=0.5, hatch=hatch)
    short = "..".join(names[name] for name in _ends(op))
    word = short.rsplit(".", 1)[-1]
    for text in (f"{short} {part}".rstrip(), short, "" if word.isdigit() else word):
        if text and (len(text) + 1) * character_us <= length:
            box = {"facecolor": colours[part], "edgecolor": "none", "pad": 0.8} if hatch else None
            axis.text(start + length / 2, row, text, ha="center", va="center", fontsize=LABEL_SIZE, color=INK, clip_on=True, bbox=box)
            break


def _time_axis(axis: Any, longest_us: float, label: str) -> None:
    if label:
        axis.set_xticks([])
        axis.set_xlabel(label, fontsize=9.5, color=INK)
        return
    scale, unit = (1e3, "milliseconds") if longest_us >= 2e3 else (1.0, "microseconds")
    axis.xaxis.set_major_formatter(lambda value, _: f"{value / scale:g}")
    axis.set_xlabel(unit, fontsize=9.5, color=INK)


def _legend(figure: Any, colours: dict[str, str], with_network: bool) -> None:
    from matplotlib.patches import Patch

    # parts of several splits share a colour: one patch for "0/2, 0/4"
    by_colour: dict[str, list[str]] = {}
    for part, colour in colours.items():
        by_colour.setdefault(colour, []).append(part or "whole batch")
    labels = {colour: parts[0] if parts == ["whole batch"] else f"part {', '.join(parts)}" for colour, parts in by_colour.items()}
    patches = [Patch(facecolor=colour, label=label) for colour, label in labels.items()]
    if with_network:
        patches.append(Patch(facecolor="white", edgecolor="#9aa3af", hatch="////", label="network"))
    if patches:
        place = {"loc": "lower left", "bbox_to_anchor": (0.065, 0.0)}
        figure.legend(handles=patches, ncols=len(patches), fontsize=9, frameon=False, handlelength=1.4, **place)
