"""Timelines -> a trace-event file (Perfetto, chrome://tracing): a process per timeline, a thread per stream."""

from __future__ import annotations

import json
from collections.abc import Sequence
from os import PathLike
from typing import Any

from dynaflow.timeline import Timeline


def write(timelines: Sequence[Timeline], path: str | PathLike[str]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"traceEvents": events(timelines), "displayTimeUnit": "ms"}, file, indent=0)
        file.write("\n")


def events(timelines: Sequence[Timeline]) -> list[dict[str, Any]]:
    """Metadata first, then complete events; every timeline starts at zero."""
    names: list[dict[str, Any]] = []
    spans: list[dict[str, Any]] = []
    for pid, timeline in enumerate(timelines, 1):
        tids = {stream: tid for tid, stream in enumerate(timeline.streams, 1)}
        names.append(_name("process_name", pid, 0, name=timeline.title or f"timeline {pid}"))
        names.append(_name("process_sort_index", pid, 0, sort_index=pid))
        for stream, tid in tids.items():
            names.append(_name("thread_name", pid, tid, name=stream))
            names.append(_name("thread_sort_index", pid, tid, sort_index=tid))
        for s in timeline.spans:
            start, length = round(s.start_us - timeline.start_us, 3), round(s.end_us - s.start_us, 3)
            about = {"ph": "X", "pid": pid, "tid": tids[s.stream], "name": s.label, "cat": s.kind or "launch"}
            spans.append({**about, "ts": start, "dur": length})
    return names + spans


def _name(what: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": args}
