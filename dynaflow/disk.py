"""Where files go that outlive a process: plans for the curious, and choices that need not be made twice."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path


def directory(kind: str) -> Path:
    root = os.environ.get("DYNAFLOW_DIR") or os.path.join(tempfile.gettempdir(), f"dynaflow_{os.getuid()}")
    return Path(root) / kind


def save(path: Path, content: str | bytes) -> None:
    """All of it or nothing; a disk that refuses costs nothing but that."""
    name = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            name = file.name
            file.write(content if isinstance(content, bytes) else content.encode())
        os.replace(name, path)
    except OSError:
        if name:
            with suppress(OSError):
                os.unlink(name)


def load(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
