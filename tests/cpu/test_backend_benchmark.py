"""benchmarks.backend without a GPU: small models, a few sections, the form of the file, and that what is bad is said to be bad."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

import dynaflow as df
from benchmarks.backend import report, trace, variants
from benchmarks.backend.models import ROWS, select
from benchmarks.backend.sections import SECTIONS, Effort, copies_target
from benchmarks.backend.variants import GUARDS, OURS, OURS_BORROW, SPLITS, Variants, df_compile
from benchmarks.measure import Times, ratio
from benchmarks.store import command, load, stamped, target

ROOT = Path(__file__).parents[2]
FORM = {"row", "section", "config", "repetitions", "ours", "baselines", "against", "speedup", "equal", "emulated", "note", "targets",
        "date", "commit", "hardware", "versions", "made_by"}  # fmt: skip


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


# -- the sections, on the smallest decode step


@pytest.fixture(scope="module")
def results():
    with torch.no_grad():
        (row,) = select("llama decode b=16")
        case = row.case("cpu", torch.bfloat16, tiny=True)
        made = Variants(case, "cpu")
        for name in (variants.COMPILE, variants.EAGER_SPLIT, variants.TWO_BATCH):  # they take long on a CPU
            made.missing[name] = "left out of this test"
        effort = Effort(num_rounds=2, host_steps=4, replays=5)
        return {name: SECTIONS[name](case, made, effort) for name in ("split", "host", "trace", "equal")}


def test_equal_section_finds_replays_equal_and_earlier_outputs_intact(results):
    replays = results["equal"]["replays"]
    assert (replays["count"], replays["different"], replays["kept"], replays["overwritten"]) == (5, 0, 5, 0)
    assert results["equal"]["error_ratio"][OURS] <= 2


def test_host_section_measures_guards(results):
    host = results["host"]
    assert host["guards_us"] > 0 and host["copied_inputs"] == 1
    # what a variant took more than Dynamo's guards did in the same turn
    assert host["targets"][1]["limit"] == 25 + 5
    assert host["targets"][1]["value"] == host["host"][OURS_BORROW]["over_base_us"] > host["host"][GUARDS]["over_base_us"] == 0


def test_trace_section_counts_copies(results):
    assert set(results["trace"]["copies"]) >= {SPLITS[2][0], SPLITS[4][0]}


def test_split_section(results):
    assert results["split"]["slowdown"][f"{SPLITS[2][0]} / {OURS}"]["ratio"] > 0
    for t in results["split"]["targets"]:
        assert t["is_met"] == (t["value"] is not None and t["value"] <= t["limit"])
        assert t["value"] is not None or t["note"], "what is not measured has a reason"


def test_file_has_the_form_of_a_result(results, tmp_path):
    path = tmp_path / "backend.json"
    rows = [stamped("llama decode b=16", name, {"tiny": True}, found, "test", "cpu") for name, found in results.items()]
    report.save(path, report.merged(load(path), rows))
    whole = json.loads(path.read_text())
    assert {"suite", "made_by", "commit", "date", "hardware", "versions", "rows", "summary"} <= set(whole)
    assert whole["suite"] == "backend" and all(set(r) >= FORM for r in whole["rows"])
    summary = whole["summary"]
    assert summary["targets"] == summary["met"] + len(summary["missed"]) + len(summary["not_measured"])
    assert "targets met" in report.table(rows) and "## Equality" in report.markdown(rows)


def test_command_measures_a_row_and_writes_it(tmp_path):
    path = tmp_path / "tiny.json"
    command = "-m benchmarks.backend --tiny --device cpu --rows llama*b=1 --only split,layers --limit-s 0 --json".split()
    done = subprocess.run([sys.executable, *command, str(path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    assert "NOT RUN" in done.stdout and "time: llama decode b=1;" in done.stdout and "layers" in done.stdout


# -- rows


# resnet is in the zoo's tests; two of the decode rows differ in their batch only
LEFT_OUT = ("resnet50 b=32", "llama decode b=16", "llama decode b=256")


@pytest.mark.parametrize("row", [r for r in ROWS if r.name not in LEFT_OUT], ids=lambda r: r.name)
def test_row_is_one_graph_and_splits(row):
    case = row.case("cpu", torch.bfloat16, tiny=True)
    fast = df.compile(case.module, strategy=variants.Parts(2))
    case.reset()
    got = case.outputs(fast(**case.args(0)))
    eager = case.run(case.sets[0])
    assert all(torch.isfinite(t).all() for t in got)
    if "moe" not in row.name:  # a rounding flips the choice of experts
        torch.testing.assert_close(got, eager, rtol=0.05, atol=0.05)
    stats = df.stats(fast)
    assert stats.captures == 1
    if case.args(0)[next(iter(case.sets[0]))].shape[0] > 1:
        assert not stats.fallbacks and stats.num_part_launches


# -- bad news


def test_rejects_a_copy():
    unsplit, split = trace.Copies(), trace.Copies()
    trace._add(split, trace.CAT, "CatArrayBatchedCopy", 4096)
    bad = copies_target("split 2", trace.excess(split, unsplit))
    assert not bad["is_met"] and bad["value"] == 4096 and "CatArrayBatchedCopy" in bad["note"]
    row = stamped("x", "split", {}, {"targets": [bad]}, "test", "cpu")
    assert "MISSED" in report.table([row]) and report.summary([row])["missed"] == [f"split, x: {bad['what']}: 4,096, at most 0"]
    assert copies_target("split 2", trace.excess(unsplit, unsplit))["is_met"]


def test_rejects_copies_of_unknown_size():
    unsplit, split = trace.Copies(), trace.Copies()
    trace._add(unsplit, trace.TRITON, "triton_poi_fused_cat", None)
    for _ in range(2):
        trace._add(split, trace.TRITON, "triton_poi_fused_cat", None)
    assert copies_target("split 2", trace.excess(split, unsplit, num_parts=2))["is_met"]
    assert not copies_target("split 2", trace.excess(split, unsplit, num_parts=1))["is_met"]


def test_rejects_a_split_that_fell_back():
    nothing = trace.excess(trace.Copies(), trace.Copies())
    assert not copies_target("split 2", nothing, problem="fell back: batch too small")["is_met"]


def test_rejects_what_was_not_measured():
    assert not target("time", None, 1.02)["is_met"] and target("time", 1.02, 1.02)["is_met"] and not target("time", 1.03, 1.02)["is_met"]


def test_rejects_options_that_df_compile_lacks():
    with pytest.raises(variants.NotAvailable, match="nonsense="):
        df_compile(torch.nn.Linear(2, 2), nonsense=True)


def test_rejects_rows_of_different_kinds_in_one_file():
    rows = [stamped("x", "split", {"tiny": tiny}, {}, "test", "cpu") for tiny in (True, False)]
    rows[1]["row"] = "y"
    with pytest.raises(SystemExit, match="different kinds"):
        report.merged(rows)


def test_later_row_wins():
    old, new = (stamped("x", "split", {}, {"note": note}, "test", "cpu") for note in ("old", "new"))
    old["date"] = "2020-01-01T00:00:00+00:00"
    assert [r["note"] for r in report.merged([new], [old])] == ["new"]


# -- readings


def test_ratio_and_its_interval():
    ours, theirs = Times([[2.0, 2.2], [2.1, 2.1]] * 5), Times([[1.0, 1.1], [1.05, 1.05]] * 5)
    found = ratio(ours, theirs)
    assert found["ratio"] == 2.0 and found["low"] <= 2.0 <= found["high"]


def test_ratio_does_not_see_what_slows_both_down():
    slow = [1.0, 5.0, 1.0, 7.0, 2.0, 1.0, 9.0]
    ours, theirs = Times([[1.1 * s] for s in slow]), Times([[s] for s in slow])
    found = ratio(ours, theirs)
    assert found["low"] == found["ratio"] == found["high"] == 1.1


@pytest.mark.parametrize("kernel, which", [
    ("triton_poi_fused_cat_3", trace.TRITON), ("triton_poi_fused_clone_12", trace.TRITON), ("triton_poi_fused_add_cat_1", None),
    ("triton_red_fused__to_copy_mean_0", None), ("triton_poi_fused_index_copy_4", None),
    ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, 1>", trace.CAT),
    ("void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>", trace.COPY),
    ("sm90_xmma_gemm_bf16bf16", None),
])  # fmt: skip
def test_which_kernels_are_copies(kernel, which):
    assert trace.class_of(kernel) == which


def test_bytes_of_copies_in_a_trace():
    events = [
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoD (Device -> Device)", "args": {"bytes": 64}},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD (Pageable -> Device)", "args": {"bytes": 1}},
        {"ph": "X", "cat": "cpu_op", "name": "aten::cat",
         "args": {"External id": 7, "Input Dims": [[[2, 8], [2, 8]], []], "Input type": ["TensorList", "Scalar"]}},
        {"ph": "X", "cat": "kernel", "name": "void CatArrayBatchedCopy<x>", "args": {"External id": 7}},
        {"ph": "X", "cat": "kernel", "name": "triton_poi_fused_cat_0", "args": {}},
    ]  # fmt: skip
    found = trace.read(events, is_cuda=True)
    assert found.bytes == {trace.MEMCPY: 64, trace.CAT: 64} and found.unsized == {"triton copy: triton_poi_fused_cat": 1}


def test_a_row_says_how_it_was_made_and_not_where():
    words = ["--rows", "llama decode b=16,resnet*", "--json", "somewhere/b.json", "--limit-s", "300", "--rounds", "12"]
    assert command("backend", words) == "python -m benchmarks.backend --rows 'llama decode b=16,resnet*' --rounds 12"
