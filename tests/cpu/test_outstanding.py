"""What result files do not show yet: each reason found in made-up rows, and none in rows that have all."""

import json

import pytest

from benchmarks import lent, outstanding, store
from benchmarks.outstanding import MISSED, MISSING, find, spelled_out


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Rows of a suite's file, in the place of the committed ones."""
    monkeypatch.setattr(store, "RESULTS", tmp_path)
    return lambda suite, rows: (tmp_path / f"{suite}.json").write_text(json.dumps({"rows": rows}))


def row(name, section="time", value=1.0, **more):
    target = {"what": "speedup", "value": value, "limit": 0.99, "is_met": value is not None and value >= 0.99, "note": "", "at_least": True}
    return {"row": name, "section": section, "targets": [target], "note": "", **more}


def offload_rows(**values):
    from benchmarks.offload import ROWS

    return [row(r.name, value=values.get(f"row{i}", 1.0)) for i, r in enumerate(ROWS)]


def test_rows_with_all_their_figures_are_not_outstanding(write):
    write("offload", offload_rows())
    assert find("offload") == []


def test_a_row_that_is_not_there_or_has_no_figure_is_missing_and_one_that_is_short_missed(write):
    rows = offload_rows(row1=None, row2=0.5)
    write("offload", rows[1:])
    assert [(each.name, each.kind) for each in find("offload")] == [
        (rows[0]["row"], MISSING), (rows[1]["row"], MISSING), (rows[2]["row"], MISSED)]  # fmt: skip
    assert [each.name for each in find("offload", kinds=[MISSED])] == [rows[2]["row"]]


@pytest.mark.parametrize("hidden", [2048, 64])
def test_a_row_of_another_workload_is_missing(write, hidden):
    from benchmarks.overlap import report
    from benchmarks.overlap.rows import WORKLOADS
    from benchmarks.overlap.variants import STRATEGIES

    rows = [row(report.name_of(w.name, s), config={"workload": w.name, "strategy": s, **w.config(False)})
            for w in WORKLOADS for s, kinds in STRATEGIES.items() if w.kind in kinds]  # fmt: skip
    (key,) = [key for key, value in rows[0]["config"].items() if key == "layers"]
    rows[0]["config"][key] = rows[0]["config"][key] if hidden == 2048 else hidden
    write("overlap", rows)
    assert outstanding.names(find("overlap")) == ([] if hidden == 2048 else [WORKLOADS[0].name])


@pytest.mark.parametrize("more, kind, why", [
    ({}, None, ""),
    ({"baselines": {}}, MISSING, "without max-autotune"),
    ({"speedup": None, "note": "it raised"}, MISSING, "it raised"),
    ({"speedup": 0.9}, MISSED, "speedup 0.900"),
    ({"equal": "1e-2"}, MISSED, "bit-equal"),
    ({"ours": {"reserved_mib": 300.0}}, MISSED, "peak memory 2.00x"),
])  # fmt: skip
def test_what_a_branchy_row_wants(write, more, kind, why):
    from benchmarks.branches.rows import NAMES

    whole = {"speedup": 1.5, "equal": "bit", "against": "max-autotune", "given_mib": 100.0, "ours": {"reserved_mib": 100.0}, "config": {},
             "baselines": {"max-autotune": {"reserved_mib": 100.0}}}  # fmt: skip
    rows = [{**row(name), **whole} for name in NAMES]
    first = [row(name, "first") for name in ("hrnet_w18 b=1", "lora-llama 1 token")]
    rows[3] |= more
    write("branches", [*rows, *first])
    assert [(each.name, each.kind, why in each.why) for each in find("branches")] == ([(NAMES[3], kind, True)] if kind else [])
    write("branches", rows)
    assert {each.name for each in find("branches", ["first"])} == {"hrnet_w18 b=1", "lora-llama 1 token"}


def test_names_stand_in_the_place_of_the_words(write):
    names = [r["row"] for r in offload_rows()]
    write("offload", offload_rows(row0=None, row2=0.5))
    assert spelled_out("offload", ["--rows", "missing", "--rounds", "3"]) == ["--rows", names[0], "--rounds", "3"]
    assert spelled_out("offload", ["--rows", "missing,missed"]) == ["--rows", f"{names[0]},{names[2]}"]
    assert spelled_out("offload", ["--rows", f"{names[1]},missed"]) == ["--rows", f"{names[1]},{names[2]}"]
    assert spelled_out("offload", ["--rows", "lla*"]) == ["--rows", "lla*"]
    write("offload", offload_rows())
    assert spelled_out("offload", ["--rows", "missed"]) is None


def test_a_step_with_nothing_left_is_said(write, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lent, "WORK", tmp_path / "work")
    write("offload", offload_rows())
    monkeypatch.setattr("sys.argv", ["lent", "--out", str(tmp_path / "out"), "offload --rows missing"])
    assert lent.main() == 0 and "offload --rows missing: nothing is left to measure" in capsys.readouterr().out


def test_every_suite_of_the_results_is_looked_at(capsys):
    """On the committed files: the words of a suite name rows that it has."""
    assert outstanding.main() == 0
    said = capsys.readouterr().out
    assert all(f"{suite}: " in said for suite in outstanding.SUITES)
    from benchmarks.branches.rows import select

    for name in outstanding.names(find("branches")):
        assert [r.name for r in select(name)] == [name]
