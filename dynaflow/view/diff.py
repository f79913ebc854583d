"""Two plans -> what changed: one line in words, then the unified diff of their texts.

    2 launches moved (L0.ar 0/2: compute -> comm, ...); waits 3 -> 5; streams +comm
"""

from __future__ import annotations

import difflib
from collections import Counter

from dynaflow.ir import Plan

MAX_EXAMPLES = 2


def diff(a: Plan, b: Plan) -> str:
    """What turns plan `a` into plan `b`; says so where nothing does."""
    if a == b:
        return "the plans are equal\n"
    lines = difflib.unified_diff(str(a).splitlines(), str(b).splitlines(), a.flow, b.flow, lineterm="", n=2)
    return "\n".join([summary(a, b), *lines]) + "\n"


def summary(a: Plan, b: Plan) -> str:
    """One line: launches added, removed, moved, reordered; waits; streams; memory."""
    told = []
    if a.flow != b.flow:
        told.append(f"another flow ({a.flow} -> {b.flow})")
    added, removed, moved = _launches(a, b)
    for count, word in ((added, "added"), (removed, "removed")):
        if count:
            told.append(_listed(len(count), word, count))
    if moved:
        told.append(_listed(len(moved), "moved", [f"{label}: {old} -> {new}" for label, old, new in moved]))
    if not (added or removed or moved) and a.launches != b.launches:
        told.append("launches in another order")
    if a.waits != b.waits:
        told.append(f"waits {len(a.waits)} -> {len(b.waits)}" if len(a.waits) != len(b.waits) else "other waits")
    streams = [f"+{s.name}" for s in b.streams if s not in a.streams] + [f"-{s.name}" for s in a.streams if s not in b.streams]
    if streams:
        told.append(f"streams {' '.join(streams)}")
    if a.slots != b.slots:
        told.append(f"memory slots {len({s for _, s in a.slots})} -> {len({s for _, s in b.slots})}")
    if a.context != b.context:
        told.append("another context")
    if a.reason != b.reason:
        told.append("another reason to be sequential")
    return "; ".join(told) if told else "records differ"


def _launches(a: Plan, b: Plan) -> tuple[list[str], list[str], list[tuple[str, str, str]]]:
    """Labels that only b has, that only a has, and those of both that changed their stream."""
    old = Counter((launch.label, launch.stream) for launch in a.launches)
    new = Counter((launch.label, launch.stream) for launch in b.launches)
    gone: dict[str, list[str]] = {}
    for label, stream in (old - new).elements():
        gone.setdefault(label, []).append(stream)
    added, moved = [], []
    for label, stream in (new - old).elements():
        if gone.get(label):
            moved.append((label, gone[label].pop(0), stream))
        else:
            added.append(label)
    return added, [label for label, streams in gone.items() for _ in streams], moved


def _listed(count: int, word: str, examples: list[str]) -> str:
    shown = ", ".join(examples[:MAX_EXAMPLES]) + (", ..." if count > MAX_EXAMPLES else "")
    return f"{count} launch{'es' if count > 1 else ''} {word} ({shown})"
