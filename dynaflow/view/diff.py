"""Two plans -> what changed: one line in words, then the unified diff of their texts.

    2 launches moved (L0.ar 0/2: compute -> comm, ...); waits 3 -> 5; streams +comm
"""

from __future__ import annotations

import difflib
from collections import Counter
from typing import Any

from dynaflow.ir import Launch, Part, Plan

MAX_EXAMPLES = 2


def diff(a: Plan, b: Plan) -> str:
    """What turns plan `a` into plan `b`; says so where nothing does."""
    if a == b:
        return "the plans are equal\n"
    lines = difflib.unified_diff(str(a).splitlines(), str(b).splitlines(), a.flow, b.flow, lineterm="", n=2)
    return "\n".join([summary(a, b), *lines]) + "\n"


def summary(a: Plan, b: Plan) -> str:
    """One line: launches added, removed, moved, regrouped (fused), reordered; waits; streams; memory."""
    told = []
    if a.flow != b.flow:
        told.append(f"another flow ({a.flow} -> {b.flow})")
    added, removed, moved = _launches(a, b)
    if added and removed and _calls(added) == _calls(removed):
        told.append(_listed(len(removed), f"regrouped into {len(added)}", [launch.label for launch in added]))
    else:
        for launches, word in ((added, "added"), (removed, "removed")):
            if launches:
                told.append(_listed(len(launches), word, [launch.label for launch in launches]))
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
    if a.loose != b.loose:
        told.append(f"loose values {len(a.loose)} -> {len(b.loose)}" if len(a.loose) != len(b.loose) else "other loose values")
    if a.rows != b.rows:
        told.append("other rows")
    if a.context != b.context:
        told.append("another context")
    if a.reason != b.reason:
        told.append("another reason to be sequential")
    return "; ".join(told) if told else "records differ"


def _launches(a: Plan, b: Plan) -> tuple[list[Launch], list[Launch], list[tuple[str, str, str]]]:
    """Launches that only b has, that only a has, and (label, old stream, new stream) of those of both that changed their stream."""
    old, new = Counter(a.launches), Counter(b.launches)
    gone: dict[tuple[Any, ...], list[Launch]] = {}
    for launch in (old - new).elements():
        gone.setdefault((launch.calls, launch.replace), []).append(launch)
    added, moved = [], []
    for launch in (new - old).elements():
        if same := gone.get((launch.calls, launch.replace)):
            moved.append((launch.label, same.pop(0).stream, launch.stream))
        else:
            added.append(launch)
    return added, [launch for launches in gone.values() for launch in launches], moved


def _calls(launches: list[Launch]) -> Counter[tuple[str, Part]]:
    return Counter(call for launch in launches for call in launch.calls)


def _listed(count: int, word: str, examples: list[str]) -> str:
    shown = ", ".join(examples[:MAX_EXAMPLES]) + (", ..." if count > MAX_EXAMPLES else "")
    return f"{count} launch{'es' if count > 1 else ''} {word} ({shown})"
