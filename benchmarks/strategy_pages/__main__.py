"""Put together what is made in docs/strategies: `python -m benchmarks.strategy_pages` rewrites pages and pictures, `--check` only looks."""

import sys

from benchmarks.strategy_pages.pages import PAGES, path_of, rendered
from benchmarks.strategy_pages.plans import SHOWN, draw, source, source_of


def stale() -> list[str]:
    """Pages and pictures that are not as they would be made now."""
    texts = {name: path_of(name).read_text(encoding="utf-8") for name in ("index", *PAGES)}
    pages = [path_of(name).name for name, text in texts.items() if rendered(name, text) != text]
    return pages + [s.path.name for name, s in SHOWN.items() if not s.path.exists() or source_of(s.path) != source(name)]


def main() -> int:
    if "--check" in sys.argv:
        found = stale()
        print("\n".join(f"{name} is stale: run python -m benchmarks.strategy_pages" for name in found))
        return int(bool(found))
    for name in SHOWN:
        draw(name)
    for name in ("index", *PAGES):
        path = path_of(name)
        path.write_text(rendered(name, path.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
