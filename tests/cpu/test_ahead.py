"""benchmarks.ahead: what is kept of caches, how it travels, and which keys must be equal (the rest: tests/systems/test_ahead.py)."""

import json
import tarfile
from pathlib import Path

import pytest

from benchmarks.ahead import kept, keys

IN_GRAPH, ALONE = "A" * 52, "B" * 52
NAME = "triton_poi_fused_add_0"


@pytest.fixture
def caches(tmp_path: Path) -> Path:
    """As Inductor and Triton leave them: a graph with one kernel in it, one kernel that is in none, and what must not travel."""
    files = {
        "inductor/fxgraph/ab/fab1/entry": f"a graph with {IN_GRAPH} in it",
        "inductor/aotautograd/aab1/entry": "what AOT says of it",
        "inductor/dynaflow/unit.json": "a unit",
        "inductor/dynaflow/unit.lock": "",
        "inductor/ab/cab1.py": "text that is written when the graph is loaded",
        "inductor/ab/cab1.best_config": "chosen by a clock that is made up",
        "inductor/cache/system": "measured products",
        "chosen/choices/plan.json": "a plan that was chosen",
        "triton/CCCC/cuda_utils.so": "a shared library",
    }
    for kernel in (IN_GRAPH, ALONE):
        group = {"child_paths": {f"{NAME}.{s}": f"/elsewhere/{kernel}/{NAME}.{s}" for s in ("source", "cubin", "json")}}
        files |= {f"triton/{kernel}/{NAME}.{suffix}": f"{kernel} {suffix}" for suffix in ("source", "cubin", "json")}
        files[f"triton/{kernel}/__grp__{NAME}.json"] = json.dumps(group)
    for name, text in files.items():
        path = tmp_path / "caches" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "caches"


def _unpacked(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_only_what_is_found_by_its_key_travels(caches: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    kept.pack([caches], tmp_path / "out", there)
    kept.unpack(tmp_path / "out", there)
    assert _unpacked(there) == {
        "inductor/fxgraph/ab/fab1/entry", "inductor/aotautograd/aab1/entry", "inductor/dynaflow/unit.json",
        f"triton/{ALONE}/{NAME}.cubin", f"triton/{ALONE}/{NAME}.json", f"triton/{ALONE}/__grp__{NAME}.json",
    }  # fmt: skip


def test_a_kernels_list_names_its_files_where_they_lie_there(caches: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    kept.pack([caches], tmp_path / "out", there)
    kept.unpack(tmp_path / "out", there)
    group = json.loads((there / "triton" / ALONE / f"__grp__{NAME}.json").read_text())["child_paths"]
    assert set(group) == {f"{NAME}.cubin", f"{NAME}.json"}
    assert {name: Path(path).read_text() for name, path in group.items()} == {n: f"{ALONE} {n.rpartition('.')[2]}" for n in group}


def test_pieces_are_as_lent_takes_them(caches: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import lent

    monkeypatch.setattr(kept, "PIECE", 100)
    out = tmp_path / "out"
    out.mkdir()
    (out / "caches.99").write_bytes(b"of another day")
    size = kept.pack([caches], out)
    pieces = sorted(out.glob("caches.*"))
    assert len(pieces) == -(-size // 100) > 1 and all(piece.stat().st_size <= 100 for piece in pieces)
    machine = object.__new__(lent.Lent)
    machine.caches = tmp_path / "machine"
    monkeypatch.setattr(lent, "WORK", tmp_path)
    machine._unpack_caches(pieces)
    assert "inductor/fxgraph/ab/fab1/entry" in _unpacked(machine.caches)


def test_several_folders_are_one_archive(caches: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    (other / "inductor" / "fxgraph" / "cd").mkdir(parents=True)
    (other / "inductor" / "fxgraph" / "cd" / "entry").write_text("another graph")
    kept.pack([caches, other], tmp_path / "out")
    kept.unpack(tmp_path / "out", tmp_path / "there")
    assert {"inductor/fxgraph/ab/fab1/entry", "inductor/fxgraph/cd/entry"} <= _unpacked(tmp_path / "there")


def test_rejects_folders_without_anything(tmp_path: Path) -> None:
    with pytest.raises(kept.NotCaches, match="nothing was compiled"):
        kept.pack([tmp_path], tmp_path / "out")


def _returned(folder: Path, cache: dict) -> Path:
    """Caches as `benchmarks.lent` packs them on the machine with the GPU."""
    made = folder / "all" / "inductor" / "cache" / "abc"
    made.parent.mkdir(parents=True)
    made.write_text(json.dumps({"system": {"hash": "abc"}, "cache": cache}))
    with tarfile.open(folder / "caches.00", "w:xz") as tar:
        tar.add(folder / "all", arcname=".")
    return folder


def test_what_the_gpu_measured_goes_back_to_it(caches: Path, tmp_path: Path) -> None:
    measured = kept.measured_in([_returned(tmp_path / "a", {"x": True, "y": 1.0}), _returned(tmp_path / "b", {"x": False})])
    assert measured == {"system": {"hash": "abc"}, "cache": {"x": False, "y": 1.0}}
    kept.pack([caches], tmp_path / "out", measured=measured)
    kept.unpack(tmp_path / "out", tmp_path / "there")
    assert json.loads((tmp_path / "there" / "inductor" / "cache" / "abc").read_text()) == measured


def test_rejects_folders_that_lent_did_not_fill(tmp_path: Path) -> None:
    with pytest.raises(kept.NotCaches, match=r"caches\.\*"):
        kept.measured_in([tmp_path])


HERE = {
    "torch": {"key": "1", "git": "x"}, "device": {"inductor": {"cc": "90"}, "torch": {"L2_cache_size": "1"}}, "attention": {"cudnn": 91900},
}  # fmt: skip


def test_differences_are_named() -> None:
    there = {"torch": {"key": "2", "git": "x"}, "device": {"inductor": {"cc": "90"}}, "attention": {"cudnn": 91900}}
    assert list(keys.differences(HERE, there)) == ["device.torch: {'L2_cache_size': '1'} is not None", "torch.key: '1' is not '2'"]
    assert list(keys.differences([1, [2, 3]], [1, [2, 4]], "at")) == ["at[1][1]: 3 is not 4"]


@pytest.mark.parametrize("part", [{"torch": {"key": "2"}}, {"device": {"inductor": {"cc": "100"}}}, {"attention": {"cudnn": None}}])
def test_rejects_other_keys(part: dict) -> None:
    with pytest.raises(keys.OtherKeys, match=next(iter(part))):
        keys.refuse(HERE, HERE | {name: HERE[name] | value for name, value in part.items()})


def test_what_no_key_has_may_differ() -> None:
    there = HERE | {"device": HERE["device"] | {"torch": {"L2_cache_size": "2"}}, "python": {"version": "3.12.3"}}
    keys.refuse(HERE, there)
    assert keys.differences(HERE, there) and not keys.decisive(HERE, there)


def test_rows_have_folders_of_their_own() -> None:
    from benchmarks.branches.rows import NAMES

    assert len({keys.slug(name) for name in NAMES}) == len(NAMES)
