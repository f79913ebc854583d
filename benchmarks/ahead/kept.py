"""What is kept of caches that were filled here, and how it travels: pieces of one archive, as `benchmarks.lent --caches` takes them.

Contract: only what another machine finds by a key that it makes itself, and nothing that was chosen here by a clock that is made up.

1. Inductor's graphs (`fxgraph`), AOT's (`aotautograd`) and DynaFlow's units (`dynaflow`). Kernels of Triton's lie in them.
2. Triton's own folders where no graph has the kernel (max-autotune's candidates): machine code and what is said of it. The list of a
   folder's files names them by their whole path: it is written anew for where they will lie.
3. What the GPU measured of products (`measured_in`), out of caches that came back from there.
4. Left out: chosen configurations (*.best_config), products that were measured here (`cache`), shared libraries, text that is written
   when a graph is loaded.
"""

from __future__ import annotations

import io
import json
import lzma
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.lent import PIECE, WORK

GRAPHS = ("fxgraph", "aotautograd", "dynaflow")
CODE = (".cubin", ".json")
# where `benchmarks.lent` unpacks them
THERE = WORK / "caches"
# bytes of which two copies are found to be the same
WINDOW = 1 << 26
# {"system": what it was measured on, "cache": {Inductor's name of a product: what was found}}
Measured = dict[str, Any]


class NotCaches(ValueError):
    """A folder without anything that could be kept."""


def files(caches: Path, there: Path = THERE) -> Iterator[tuple[str, bytes]]:
    """(name, content) of what is kept of one folder."""
    in_graphs: set[str] = set()
    for kind in GRAPHS:
        for path in _all(caches / "inductor" / kind):
            content = path.read_bytes()
            in_graphs |= {name for name in _kernels(caches) if name.encode() in content}
            yield str(path.relative_to(caches)), content
    for name in sorted(_kernels(caches) - in_graphs):
        yield from _kernel(caches / "triton" / name, there / "triton" / name, f"triton/{name}")


def pack(folders: Iterable[Path], out: Path, there: Path = THERE, measured: Measured | None = None) -> int:
    """All of them together, into OUT/caches.*; the bytes. What lay there is replaced."""
    found = {} if measured is None else {f"inductor/cache/{measured['system']['hash']}": json.dumps(measured).encode()}
    for folder in folders:
        found |= dict(files(folder, there))
    if len(found) == (measured is not None):
        raise NotCaches("nothing was compiled in these folders: python -m benchmarks.ahead --suite ... fills them")
    data = _archive(found)
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("caches.*"):
        old.unlink()
    for k, at in enumerate(range(0, len(data), PIECE)):
        (out / f"caches.{k:02}").write_bytes(data[at : at + PIECE])
    return len(data)


def unpack(pieces: Path, caches: Path) -> None:
    """As `benchmarks.lent` does."""
    with tarfile.open(fileobj=io.BytesIO(_whole(pieces))) as tar:
        tar.extractall(caches, filter="tar")


def measured_in(folders: Iterable[Path]) -> Measured | None:
    """What a GPU measured of products, in caches that `benchmarks.lent` packed there; the last folder has the last word."""
    found: Measured | None = None
    for folder in folders:
        with tarfile.open(fileobj=io.BytesIO(_whole(folder))) as tar:
            for member in tar:
                name = Path(member.name)
                if member.isfile() and name.parts[-3:-1] == ("inductor", "cache"):
                    file = tar.extractfile(member)
                    assert file is not None
                    new = json.load(file)
                    is_same = found is not None and found["system"] == new["system"]
                    found = {**new, "cache": {**(found["cache"] if is_same and found else {}), **new["cache"]}}
    return found


def _whole(pieces: Path) -> bytes:
    if not (paths := sorted(pieces.glob("caches.*"))):
        raise NotCaches(f"{pieces} has no caches.*")
    return b"".join(path.read_bytes() for path in paths)


def num_bytes(folder: Path) -> int:
    """Of a folder's own archive."""
    return len(_archive(dict(files(folder))))


def _archive(found: dict[str, bytes]) -> bytes:
    made = io.BytesIO()
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": WINDOW}]
    with lzma.open(made, "w", filters=filters) as compressed, tarfile.open(fileobj=compressed, mode="w") as tar:
        for name, content in sorted(found.items()):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return made.getvalue()


def _all(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".lock", ".tmp"))


def _kernels(caches: Path) -> set[str]:
    """Folders of Triton's that have a kernel."""
    return {path.parent.name for path in (caches / "triton").glob("*/*.cubin")}


def _kernel(folder: Path, there: Path, name: str) -> Iterator[tuple[str, bytes]]:
    listed = [path for path in sorted(folder.iterdir()) if path.suffix in CODE and not path.name.startswith("__grp__")]
    for path in listed:
        yield f"{name}/{path.name}", path.read_bytes()
        if path.suffix == ".json":
            group = {"child_paths": {other.name: str(there / other.name) for other in listed}}
            yield f"{name}/__grp__{path.name}", json.dumps(group).encode()
