"""benchmarks.overlap without a GPU: small models, that every model splits as it should, the form of the file, and bad news."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

import dynaflow as df
from benchmarks.measure import Times
from benchmarks.overlap import __main__ as suite
from benchmarks.overlap import models, report, sections, variants
from benchmarks.overlap.rows import EP, TP, WORKLOADS, Sent, select
from benchmarks.overlap.variants import BESIDE, COMPUTE, NETWORK, SEQUENTIAL, InParts, OneStream, Variants, in_parts, one_stream
from benchmarks.store import load
from dynaflow.testing.network import LINKS, wire_bytes

ROOT = Path(__file__).parents[2]
WISH = {"tiny": True, "device": "cpu", "options": {}, "only": "", "made_by": "test"}
FORM = {"row", "section", "config", "repetitions", "ours", "baselines", "against", "speedup", "equal", "emulated", "note", "targets",
        "date", "commit", "hardware", "versions", "made_by"}  # fmt: skip


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def one(pattern):
    (workload,) = select(pattern)
    return workload


# -- models


# one of each model and phase; the others differ in their size only
KINDS = ["qwen*prefill 2k", "llama-3-8b*decode 64", "deepseek-v3*prefill 2k", "deepseek-v2*decode 64", "flux*1024px b=2"]


@pytest.mark.parametrize("pattern", KINDS)
def test_parts_are_bit_equal_and_close_to_the_model(pattern):
    workload = one(pattern)
    case = workload.case("cpu", tiny=True)
    fast = df.compile(case.module, strategy=df.TwoBatch(), partition=workload.partition, strict=True)
    case.reset()
    got = case.outputs(fast(**case.args(0)))
    case.reset()
    assert all(map(torch.equal, got, case.outputs(df.run_serialised(fast, **case.args(0)))))
    torch.testing.assert_close(got, case.run(case.sets[0]), rtol=0.05, atol=0.05)
    stats = df.stats(fast)
    assert stats.captures == 1 and not stats.fallbacks and stats.num_part_launches
    # collectives are hooks of models or modules in them; without them the model computes the same
    network = [op for op in df.explain(case.module, case.args(0), strategy=df.TwoBatch(), partition=workload.partition).flow.ops
               if op.kind == "network"]  # fmt: skip
    assert len(network) == len(case.collectives()) == 4 and not any(op.unsplittable for op in network)
    case.reset()
    torch.testing.assert_close(case.outputs(case.bare(**case.args(0))), case.run(case.sets[0]), rtol=0.05, atol=0.05)


def test_ranks_hold_their_share():
    """Weights of a rank's two layers, against those of the model that its paper or card names."""
    with torch.device("meta"):
        for family, sizes, ranks, per_layer in (("Llama", models.LLAMA_3_70B, 8, 855.6e6), ("Llama", models.LLAMA_3_8B, 2, 218.1e6)):
            layer = models.tensor_parallel(family, sizes, ranks, tiny=False).layers[0]
            assert ranks * sum(p.numel() for p in layer.parameters()) == pytest.approx(per_layer, rel=1e-3)
        experts = models.RoutedExperts(models.DEEPSEEK_V3, 8)
        assert 8 * sum(p.numel() for p in experts.parameters()) == 256 * 3 * 7168 * 2048


def test_rows_are_routed_evenly():
    """Each expert gets as many tokens, and every pair comes back to its token."""
    c = models.TINY_EXPERTS
    experts = models.RoutedExperts(c, 8)
    x = torch.arange(3 * 8 * c.per_token, dtype=torch.float32).view(3, 8, c.per_token, 1).expand(-1, -1, -1, c.hidden).contiguous()
    rows = x.reshape(3, 8 * c.per_token // experts.num, experts.num, c.hidden).permute(2, 0, 1, 3).flatten(1, 2)
    assert rows.shape[1] * experts.num == 3 * 8 * c.per_token
    y = experts(x)
    for row in range(3):  # a row of the batch alone gives the same
        torch.testing.assert_close(experts(x[row : row + 1]), y[row : row + 1])


def test_bytes_of_a_workload():
    """Llama-3-70B, 2k tokens: each all-reduce is of 2,048 x 8,192 numbers in bf16, and takes 10 us + 58.7 MB at 370 GB/s."""
    workload = one("llama-3-70b*prefill 2k")
    num_bytes = workload.batch * workload.seq * models.LLAMA_3_70B["hidden_size"] * 2
    assert wire_bytes("all_reduce", num_bytes, 8) == pytest.approx(58.7e6, rel=1e-3)
    assert workload.link.duration_us("all_reduce", num_bytes, 8) == pytest.approx(168.7, rel=1e-2)


def test_links_are_those_that_count():
    assert {w.link for w in WORKLOADS if w.kind == EP} == {LINKS["400G-IB"]}
    assert {w.link for w in WORKLOADS if w.kind != EP} == {LINKS["NVLink-H100"]}
    names = [w.name for w in WORKLOADS]
    assert len(set(names)) == len(names)
    assert suite.on_link([WORKLOADS[0]], "PCIe5", 2)[0].link == LINKS["PCIe5"].with_sms(2)


# -- ways


def test_one_stream_has_the_same_launches_on_the_callers_stream():
    workload = one("flux*1024px b=4")
    case = workload.case("cpu", tiny=True)

    def launches(strategy):
        plan = df.explain(case.module, case.args(0), strategy=strategy, partition=workload.partition).plan
        return [(la.calls, la.stream) for la in plan.launches]

    overlapped, alone = launches(df.NanoBatch(4)), launches(OneStream(df.NanoBatch(4)))
    assert {stream for _, stream in alone} == {"caller"} and {stream for _, stream in overlapped} == {"compute", "comm"}
    assert [calls for calls, _ in alone] == [calls for calls, _ in overlapped]


def test_on_one_stream_a_fused_product_sends_on_none_of_its_own():
    workload = one("llama-3-70b*prefill 2k")
    case = workload.case("cpu", tiny=True)

    def explained(strategy):
        return df.explain(case.module, case.args(0), strategy=strategy, partition=workload.partition)

    fused, alone = (str(explained(strategy).plan) for strategy in (df.FusedGemm(2, 1), OneStream(df.FusedGemm(2, 1))))
    assert "chunked(num_chunks=2)" in fused and "chunked(num_chunks=2)" not in alone and "chunked(num_chunks=2, in_turn)" in alone
    fast = df.compile(case.module, strategy=OneStream(df.FusedGemm(2, 1)), partition=workload.partition, strict=True)
    torch.testing.assert_close(case.outputs(fast(**case.args(0))), case.run(case.sets[0]), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("pattern, strategy, num_parts", [
    ("flux*1024px b=4", df.NanoBatch(4), 4), ("llama-3-70b*prefill 2k", df.TwoBatch(), 2), ("deepseek-v3*prefill 2k", df.SingleBatch(), 0),
    ("llama-3-70b*prefill 2k", df.TokenWeave(wave=8, min_tokens=0), 2), ("llama-3-70b*prefill 2k", df.FusedGemm(2, 1), 0),
])  # fmt: skip
def test_parts_of_a_strategy_are_known_and_taken_without_its_network(pattern, strategy, num_parts):
    """What sends is looked at: groups, too. The model without collectives then runs in the same parts, and computes the same."""
    workload = one(pattern)
    case = workload.case("cpu", tiny=True)
    alone = OneStream(strategy)
    df.explain(case.module, case.args(0), strategy=alone, partition=workload.partition)
    assert len(alone.parts) == num_parts and not any(part.is_whole for part in alone.parts)
    if num_parts:
        bounds = [part.bounds(workload.sizes(True)[0]) for part in alone.parts]
        assert bounds[0][0] == 0 and bounds[-1][1] == 4 and all(a[1] == b[0] for a, b in zip(bounds, bounds[1:]))
        fast = df.compile(case.bare, strategy=InParts(alone.parts), strict=True)
        torch.testing.assert_close(case.outputs(fast(**case.args(0))), case.outputs(case.bare(**case.args(0))), rtol=0.05, atol=0.05)
        assert df.stats(fast).num_part_launches and not df.stats(fast).fallbacks


def test_collectives_in_parts_send_all_rows(monkeypatch):
    case = one("flux*1024px b=4").case("cpu", tiny=True)
    parts = tuple(df.Part(k, k + 1, 4) for k in range(4))
    sent = []
    monkeypatch.setattr(Sent, "again", lambda self, x: sent.append(tuple(x.shape)))
    variants._sender(case, parts)()
    assert sent == [(1, *s.shape[1:]) for s in case.collectives() for _ in parts] and len(sent) == 4 * 4


def test_collectives_of_a_step_are_found():
    sent = one("flux*1024px b=2").case("cpu", tiny=True).collectives()
    assert [s.shape for s in sent] == [(2, 8, 8, 3, 8), (2, 8, 8, 8)] * 2 and sent[0].numbers == (10.0, 2960.0, 8, 16)


@pytest.fixture(scope="module")
def results():
    with torch.no_grad():
        case = one("deepseek-v3*decode 64").case("cpu", tiny=True)
        made = Variants(case, "cpu")
        made.missing["DualBatch"] = made.missing[one_stream("DualBatch")] = "dynaflow 0.0 has no strategy DualBatch"
        made.missing["SingleBatch"] = made.missing[one_stream("SingleBatch")] = "ValueError: out of luck"
        return sections.measured(case, made, ["TwoBatch", "DualBatch", "SingleBatch"], 1)


def test_measured(results):
    found = results["TwoBatch"]
    assert found["equal"] == "bit" and found["distance_from_sequential"] < 0.02 and found["emulated"]
    assert {*found["baselines"]} == {SEQUENTIAL, "TwoBatch, one stream"} and {*found["alone"]} == {COMPUTE, NETWORK}
    assert found["speedup"] > 0 and found["bound"] > 0 and BESIDE in found["note"]


def test_what_is_not_available_is_no_failure_and_what_fails_is(results):
    absent, broken = results["DualBatch"], results["SingleBatch"]
    assert absent["ours"] is broken["ours"] is None and absent["baselines"][SEQUENTIAL]
    assert not absent["is_available"] and absent["targets"] == [] and "has no strategy" in absent["note"]
    assert broken["is_available"] and [t["is_met"] for t in broken["targets"]] == [False] and "out of luck" in broken["note"]


def test_file_has_the_form_of_a_result(results, tmp_path):
    path = tmp_path / "overlap.json"
    report.save(path, report.merged(load(path), suite.rows_of(one("deepseek-v3*decode 64"), WISH, results)))
    whole = json.loads(path.read_text())
    assert whole["suite"] == "overlap" and all(set(r) >= FORM and r["emulated"] for r in whole["rows"]) and whole["summary"]["emulated"]
    assert "emulated" in report.table(whole["rows"]) and "network is emulated" in report.markdown(whole["rows"])
    assert whole["summary"]["not_available"] == ["DualBatch"]
    not_run, page = whole["summary"]["not_run"], report.markdown(whole["rows"])
    assert "deepseek-v3 ep8 decode 64" not in not_run and len(not_run) == len(WORKLOADS) - 1 and all(f"\n- {w}\n" in page for w in not_run)
    workload = one("deepseek-v3*decode 64")
    missing = {report.name_of(workload.name, name) for name in suite.strategies_of(workload, "") if name not in results}
    assert missing and {*whole["summary"]["rows_not_run"]} == missing and all(f"\n- {row}\n" in page for row in missing)
    suite.plot(whole["rows"], path)
    assert path.with_suffix(".png").exists()
    assert whole["summary"]["rows_changed"] == []


def test_rows_of_a_workload_that_has_changed_are_told(results):
    fresh, *_ = suite.rows_of(one("deepseek-v3*decode 64"), WISH, results)
    old, other_link = ({**fresh, "config": {**fresh["config"], **changed}} for changed in ({"caches": None}, {"sms": 4}))
    assert [report.has_changed(row) for row in (fresh, old, other_link)] == [False, True, False]
    assert f"measured anew:\n\n- {fresh['row']}\n" in report.markdown([old]) and "measured anew" not in report.markdown([fresh])


def test_command_says_what_was_not_run(tmp_path):
    command = "-m benchmarks.overlap --tiny --device cpu --rows flux* --only TwoBatch --limit-s 0 --json".split()
    done = subprocess.run([sys.executable, *command, str(tmp_path / "tiny.json")], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    assert "NOT RUN" in done.stdout and "flux ulysses8 1024px b=1;" in done.stdout


# -- bad news


def made_times(**ms):
    names = {"sequential": SEQUENTIAL, "split": one_stream("X"), "ours": "X", "compute": COMPUTE, "network": NETWORK, "beside": BESIDE,
             "parts": in_parts("X")}  # fmt: skip
    return {names[n]: Times([[value]] * 4) for n, value in ms.items()}


def test_gains():
    found = sections.gains(made_times(sequential=10, split=11, ours=8, compute=7, network=4, beside=8), "X")
    assert (found["speedup"], found["bound"], found["bound_beside"]) == (1.25, pytest.approx(10 / 7, abs=1e-3), 1.25)
    assert (found["hidden_ms"], found["hideable_ms"], found["hideable_beside_ms"]) == (3, 4, 2)
    assert (found["hidden_share"], found["hidden_share_beside"]) == (0.75, 1.5)
    assert "hidden_ms" not in sections.gains(made_times(sequential=10, split=10, ours=10), "X", gave_up=True)


@pytest.mark.parametrize("ours, share, is_met", [(8.0, 0.75, False), (7.3, 0.925, True), (6.9, 1.025, True)])
def test_what_a_strategys_own_kernels_save_side_by_side_is_what_counts(ours, share, is_met):
    """Unsplit ones save 2 ms, those of the parts 4."""
    times = made_times(sequential=10, split=11, ours=ours, compute=7, network=4, beside=8, parts=7)
    found = sections.gains(times, "X")
    assert (found["hideable_in_parts_ms"], found["hidden_share_in_parts"]) == (4, pytest.approx(share))
    assert sections.hidden_share(found) == found["hidden_share_in_parts"] != found["hidden_share_beside"]
    assert [t["is_met"] for t in sections.targets(found | {"is_split": True})] == [True, is_met]


def test_a_share_of_what_unsplit_kernels_save_is_marked():
    row = {"hidden_share": 0.5, "hidden_share_beside": 0.8}
    new = row | {"hideable_in_parts_ms": 1.0, "hidden_share_in_parts": 0.9}
    assert [sections.shown_share(r) for r in (row, new, {})] == ["~80%", "90%", "-"]
    assert sections.shown_share(row | {"hideable_in_parts_ms": -0.1}) == "-", "nothing could be hidden"


def test_what_does_not_split_is_held_against_unsplit_kernels():
    """Three parts on one stream take 14: that what runs saves six of them is nothing that overlapping does."""
    times = made_times(sequential=10, split=10.5, ours=9.5, compute=7, network=4, beside=9, parts=12)
    row = sections.gains(times, "X", is_split=False) | {"is_split": False, "options": ""}
    assert row["hidden_ms"] == 1 and "hideable_in_parts_ms" not in row and sections.shown_share(row) == "100%"
    older = {key: value for key, value in row.items() if key != "options"} | {"config": {"strategy": "CommOverlap"}}
    assert sections.shown_share(older) == "-", "its parts on one stream may have been another option's"
    assert sections.shown_share(older | {"config": {"strategy": "SingleBatch"}}) == "100%", "it has no other"


class Either(df.Strategy):
    """Two parts, or four."""

    def schedule(self, flow):
        return df.NanoBatch(flow.any_of(2, 4)).schedule(flow)


def test_a_strategy_is_held_against_the_option_that_was_fastest(monkeypatch):
    monkeypatch.setitem(variants.STRATEGIES, "Either", (TP,))
    monkeypatch.setattr(df, "Either", Either, raising=False)
    ways = {**Variants.builders, **{n: variants._way(n, variants.ON_ONE_STREAM) for n in (one_stream("Either"),)}}
    monkeypatch.setattr(Variants, "builders", {**ways, "Either": variants._way("Either", variants.OVERLAPPED)})
    case = one("llama-3-70b*prefill 2k").case("cpu", tiny=True)
    made = Variants(case, "cpu")
    made.some(one_stream("Either"), "Either")
    assert len(case.alone["Either"].parts) == 2
    assert made.choose("Either") == ("", True) and not case.taken, "nothing was measured"
    stats = df.stats(made._made["Either"].call.fast)
    measured = df.settings.Measured("", (4,), ((), (1,)), (2.0, 1.0), 3.0, 1)
    plain = Variants.steps
    monkeypatch.setattr(Variants, "steps", lambda *args: (stats.measured.append(measured), plain(*args)))
    assert made.choose("Either") == ("", True)
    assert len(case.alone["Either"].parts) == 4 and case.taken == {one_stream("Either"): "Either, one stream, options (1,)"}
    before = df.stats(made._made[one_stream("Either")].call.fast).num_part_launches
    made.steps(made._made[one_stream("Either")].call, 1)
    assert df.stats(made._made[one_stream("Either")].call.fast).num_part_launches - before > 4


@pytest.mark.parametrize("ours, split, is_met", [
    (8.0, 10.0, [True, True]), (9.0, 10.0, [True, False]), (10.2, 11.0, [False]), (10.0, 10.0, [True]),
])  # fmt: skip
def test_rejects_a_slowdown_and_what_is_not_hidden(ours, split, is_met):
    """A row that gains must hide 90%; one that does not must not lose."""
    found = sections.gains(made_times(sequential=10, split=split, ours=ours, compute=7, network=4, beside=8), "X")
    assert [t["is_met"] for t in sections.targets(found | {"is_split": True})] == is_met
    assert [t["is_met"] for t in sections.targets(found | {"is_split": False})] == is_met[:1], "nothing was split"


def test_what_follows_from_the_medians_is_worked_out_anew(results):
    rows = suite.rows_of(one("deepseek-v3*decode 64"), WISH, {"TwoBatch": results["TwoBatch"]})
    edited = [r | {"hidden_ms": 1e6, "targets": [], "bound": 0.0} for r in rows]
    assert report.merged(edited) == report.merged(rows) != edited


def test_rejects_a_goal_that_no_row_reaches():
    workload = one("llama-3-70b*prefill 2k")
    for speedup, is_met in ((1.3, True), (1.2, False)):
        rows = suite.rows_of(workload, WISH, {"NanoFlow": {"speedup": speedup, "equal": "bit"}})
        goals = {t["what"]: t["is_met"] for t in report.targets(rows)}
        assert goals["best speedup of NanoFlow (emulated)"] is is_met and not goals["best speedup of TokenWeave (emulated)"]


def test_a_strategy_that_is_not_there_is_not_available(monkeypatch):
    monkeypatch.setitem(variants.STRATEGIES, "Nonsense", (TP,))
    with pytest.raises(variants.NotAvailable, match="has no strategy Nonsense"):
        variants.find("Nonsense")
    assert isinstance(variants.find("TwoBatch"), df.TwoBatch) and variants.find("NanoBatch", tiny=True).num_parts == 4


def test_a_workload_that_fails_stands_in_the_file():
    rows = suite.failed_rows(one("flux*1024px b=2"), WISH | {"only": "TwoBatch"}, RuntimeError("out of memory"))
    assert [r["row"] for r in rows] == ["flux ulysses8 1024px b=2, TwoBatch"]
    assert "out of memory" in rows[0]["note"] and report.summary(rows)["not_measured"]
