"""A picture per model, from two timelines: the plan on one stream above, as planned below. docs/img/branches-<row>.png.

    python -m benchmarks.branches.pictures FILE [--folder docs/img]      of every row in a file of timelines
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from benchmarks.runner import slug
from benchmarks.store import DOCS
from dynaflow.timeline import Span, Timeline
from dynaflow.view.picture import picture

IMAGES = DOCS / "img"


def path_of(row: str, folder: Path = IMAGES) -> Path:
    return folder / f"branches-{slug(row)}.png"


def draw(row: str, one: Timeline, many: Timeline, folder: Path = IMAGES) -> Path:
    """Both timelines on one time axis; the titles say what is gained. They are simulated from the costs that were measured."""
    path = path_of(row, folder)
    folder.mkdir(parents=True, exist_ok=True)
    names = ("one stream (simulated)", f"{len(many.streams)} streams (simulated)")
    titled = [Timeline(t.spans, f"{row}, {name}", t.lanes) for t, name in zip((one, many), names)]
    gain = one.total_us / many.total_us if many.total_us else 0.0
    picture(titled, path, subtitles=(f"{one.total_us:,.0f} us", f"{many.total_us:,.0f} us, {gain:.2f}x"))
    return path


def add_timelines(path: Path, row: str, one: Timeline, many: Timeline) -> None:
    """Write the row's two timelines into the file, beside the other rows'."""
    whole = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    whole[row] = [asdict(t) for t in (one, many)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(whole) + "\n", encoding="utf-8")


def load_timelines(path: Path) -> dict[str, tuple[Timeline, Timeline]]:
    found = {}
    for row, pair in json.loads(path.read_text(encoding="utf-8")).items():
        one, many = (Timeline(tuple(Span(**s) for s in t["spans"]), t["title"], tuple(t["lanes"])) for t in pair)
        found[row] = one, many
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--folder", type=Path, default=IMAGES)
    args = parser.parse_args()
    for file in args.files:
        for row, (one, many) in load_timelines(file).items():
            print(draw(row, one, many, args.folder))


if __name__ == "__main__":
    main()
