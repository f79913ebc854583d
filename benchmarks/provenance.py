"""Where a result comes from: which commit, which versions."""

import os
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def commit() -> str:
    if named := os.environ.get("DYNAFLOW_COMMIT"):  # a copy of the tree without its history
        return named
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    return done.stdout.strip() if done.returncode == 0 else ""


def versions(*packages: str) -> dict[str, str]:
    """Of those that are installed."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
