"""benchmarks.branches without a GPU: every row's model, small; that what is bad is said to be bad; the page, the plot, the pictures."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("timm")

from benchmarks import runner
from benchmarks.branches import ours, pictures, report, sections, variants
from benchmarks.branches.models.lora import LoRALinear
from benchmarks.branches.plot import plot
from benchmarks.branches.rows import BRANCHY, CONTROL, HRNET, LORA, NAMES, ROWS, TRAINING
from benchmarks.measure import Times
from benchmarks.store import failed, load, stamped
from benchmarks.variants import entry
from dynaflow.timeline import Span, Timeline

ROOT = Path(__file__).parents[2]


def _kind(row):
    """Rows that differ in their size only are the same when they are small."""
    family = {"mmdit": "mmdit", "hrnet": "hrnet"}.get(row.name[:5], row.name.split("b=")[0] if "b=" in row.name else row.name.split()[0])
    return family, row.name.split()[1] if row.is_training else "", bool(row.decode_batch)


DISTINCT = {_kind(row): row.name for row in reversed(ROWS)}.values()


# -- the models


@pytest.mark.parametrize("row", [r for r in ROWS if r.name in DISTINCT], ids=lambda r: r.name)
def test_model_is_one_graph_with_finite_outputs(row):
    with torch.set_grad_enabled(row.is_training):
        torch._dynamo.reset()
        case = row.case("cpu", tiny=True)
        fast = torch.compile(entry(case.module), backend="eager", fullgraph=True, dynamic=False)
        case.reset()
        got = [t.detach().clone() for t in case.outputs(case.finish(fast(**case.args(0))))]
        want = case.run(case.sets[0])
        assert got and all(torch.isfinite(t).all() and t.any() for t in got)
        # not to the bit: a rounding in bf16 is allowed to a graph
        norms = [(float((a.float() - b.float()).norm()), float(b.float().norm())) for a, b in zip(got, want, strict=True)]
        assert all(error <= 0.05 * norm for error, norm in norms), norms
        assert not torch.equal(case.outputs(case.finish(case.module(**case.args(1))))[0], want[0]), "inputs are fresh, and matter"


@pytest.mark.parametrize("row", [r for r in ROWS if r.name not in DISTINCT], ids=lambda r: r.name)
def test_model_of_another_size_builds(row):
    with torch.set_grad_enabled(row.is_training):
        case = row.case("cpu", tiny=True)
        assert all(torch.isfinite(t).all() and t.any() for t in case.run(case.sets[0]))


def test_important_rows_come_first():
    assert NAMES[:3] == [HRNET, "inception_v3 b=1", LORA] and NAMES.index("lora-llama 64 tokens") == 3 and len(set(NAMES)) == len(NAMES)
    assert {row.group for row in ROWS} == {BRANCHY, CONTROL, TRAINING}
    for row in ROWS:
        assert variants.names(row, is_cuda=True)[-2:] == variants.TUNED == (variants.MAX_AUTOTUNE, variants.OURS_TUNED)
        assert set(variants.to_warm(row, is_cuda=True)) >= {variants.COMPILE, variants.OURS}


def test_own_adapter_is_the_merged_product():
    torch.manual_seed(0)
    layer, x = LoRALinear(torch.nn.Linear(8, 6), rank=2, scaling=2.0), torch.randn(3, 8)
    merged = layer.base_layer.weight + 2.0 * layer.lora_B.weight @ layer.lora_A.weight
    torch.testing.assert_close(layer(x), torch.nn.functional.linear(x, merged, layer.base_layer.bias))


# -- equality


class _Doubling:
    """A case whose step doubles its input into a buffer that it keeps, as a CUDA Graph does."""

    def __init__(self):
        self.sets, self.buffer = [], torch.zeros(4)

    def fresh(self):
        return {"x": torch.randn(4)}

    def reset(self):
        pass

    def outputs(self, result):
        return [result]

    def changed(self):
        return []

    def reference(self, _):
        return 2 * self.sets[0]["x"]

    def into_buffer(self, _):
        return torch.mul(self.sets[0]["x"], 2, out=self.buffer)

    def all_but_one(self, _):
        self.buffer[1:] = 2 * self.sets[0]["x"][1:]
        return self.buffer


def test_equality_accepts_a_buffer_that_is_written_whole():
    case = _Doubling()
    found = sections.compared(case, case.into_buffer, case.reference, 3)
    assert sections.verdict(found) == "bit" and found["max_abs"] == 0 and found["reference_repeats"]


def test_rejects_an_output_that_is_not_written():
    case = _Doubling()
    found = sections.compared(case, case.all_but_one, case.reference, 3)
    assert sections.verdict(found) == "max abs inf" and found["bit_equal"] == 0


def test_rejects_equality_of_what_runs_no_plan_with_itself():
    same = {"inputs": 3, "bit_equal": 3, "max_abs": 0.0, "reference_repeats": True, "reference_sound": True}
    other = {**same, "bit_equal": 0, "max_abs": 0.5}
    assert sections.headline({"one stream": same, variants.COMPILE: other}) == "bit"
    assert sections.headline({variants.COMPILE: other}) == "max abs 5.0e-01"
    assert sections.headline({}) == "no plan ran"
    assert sections.headline({"one stream": same, sections.TUNED_ALONE: other}) == "max abs 5.0e-01"
    assert sections.headline({"one stream": same, sections.TUNED_ALONE: same}) == "bit"


def test_the_fastest_of_ours_is_against_the_fastest_baseline(monkeypatch):
    ms = {variants.COMPILE_GRAPH: 3.0, variants.MAX_AUTOTUNE: 2.0, variants.OURS: 1.5, variants.OURS_TUNED: 1.0}
    made = {name: SimpleNamespace(name=name, call=None, build_s=1.0, reserved_mib=None, warnings=()) for name in ms}
    monkeypatch.setattr(sections, "side_by_side", lambda *_: {name: Times([[value] * 4]) for name, value in ms.items()})
    asked = []
    plan = {"ms": 0.5, "planned_calls": 1, "calls": 1, "fallbacks": {}, "chosen": {}}
    for what in ("choice", "bound"):
        monkeypatch.setattr(sections.ours, what, lambda mode="default": asked.append(mode) or plan)
    some = SimpleNamespace(some=lambda *names: made, device="cpu", missing={})
    found = sections.time_section(SimpleNamespace(num_bytes=0), some, tuple(ms), 4)
    assert (found["against"], found["mode"], found["speedup"], found["bound"]) == (variants.MAX_AUTOTUNE, "max-autotune", 2.0, 4.0)
    assert set(found["modes"]) == set(variants.MINE) and not set(found["baselines"]) & set(variants.MINE)
    assert "max-autotune" in asked
    row = stamped(HRNET, "time", {"group": BRANCHY}, {**found, "equal": "bit", "differences": {}, "targets": []}, "test", "cpu")
    assert "1.000 (0.000), max-autotune |" in report.markdown([row])


def test_rejects_a_reference_that_says_nothing():
    case = _Doubling()
    found = sections.compared(case, case.reference, lambda _: torch.full((4,), torch.nan), 1)
    assert sections.verdict(found).startswith("says nothing")


def test_rejects_a_reference_that_does_not_repeat():
    case = _Doubling()
    found = sections.compared(case, case.reference, lambda _: torch.randn(4), 2)
    assert "does not repeat" in sections.verdict(found)


# -- the report, on made-up rows


def test_why_a_row_is_short_of_its_bound():
    """Under 80%: what the plan loses in simulation, and what the device loses beyond it. Not under, not known: nothing."""
    limit = {"ms": 0.4, "critical_path_us": 400.0, "total_work_us": 300.0, "plan_us": 800.0}
    row = made_up("hrnet_w18 b=1", 1.5) | {"bound_of": limit}
    assert "60%: the bound is the longest chain of kernels, 400 us" in report._why_short(row)
    assert "simulates to 800 us; the device takes 1,333 us, 67% more" in report._why_short(row)
    assert "work of all kernels" in report._why_short(row | {"bound_of": limit | {"total_work_us": 500.0}})
    assert not report._why_short(row | {"speedup": 2.0}) and not report._why_short(row | {"bound_of": {"ms": 0.4}})
    assert not report._why_short(row | {"speedup_in_graph": 2.1}), "the host's time is not the schedule's"


def made_up(name: str, speedup: float, equal: str = "bit", **more) -> dict:
    (row,) = [r for r in ROWS if r.name == name]
    against = {"median_ms": 2.0, "spread_ms": 0.02, "reserved_mib": 64.0, "allocated_mib": 60.0}
    found = {
        "repetitions": 100, "ours": {**against, "median_ms": 2.0 / speedup}, "against": variants.COMPILE_GRAPH, "speedup": speedup,
        "baselines": {variants.EAGER_GRAPH: {**against, "median_ms": 3.0}, variants.COMPILE_GRAPH: against},
        "interval": [speedup - 0.01, speedup + 0.01], "bound": 2.5, "bound_of": {"ms": 0.8}, "equal": equal,
        "differences": {variants.COMPILE: {"inputs": 3, "bit_equal": 3, "max_abs": 0.0}},
        "plan": {"chosen": {"flow.kernels": "a plan of the kernels"}, "calls": 9, "planned_calls": 9, "fallbacks": {}},
        "given_mib": 100.0, **more,
    }  # fmt: skip
    return stamped(name, "time", report.config(row, False, {}), found, "test", "cpu")


GOOD = {HRNET: 2.0, LORA: 1.4, "inception_v3 b=1": 1.5, "nasnetalarge b=1": 1.0, "resnet50 b=1": 0.98, "train vit-l b=8": 1.0}


def first(seconds: float) -> dict:
    """A warm start of ours, where torch.compile's takes two seconds."""
    found = {"repetitions": 1, "first": {
        variants.COMPILE: {"cold": {"first_s": 9.0}, "warm": {"first_s": 2.0}},
        variants.OURS: {"cold": {"first_s": 9.0}, "warm": {"first_s": seconds}}}}  # fmt: skip
    return stamped(LORA, "first", {}, found, "test", "cpu")


def good(**changed: float) -> list[dict]:
    return report.merged([made_up(name, changed.get(name, value)) for name, value in GOOD.items()], [first(2.6)])


def test_rejects_a_late_first_result():
    rows = report.merged(good(), [first(2.7)])
    assert [t for t, is_met in verdicts(rows).items() if not is_met] == [
        f"time to first result, warm: {variants.OURS} / {variants.COMPILE}, most of all rows"]


def verdicts(rows: list[dict]) -> dict[str, bool]:
    return {t["what"]: t["is_met"] for t in report.targets(rows)}


def test_targets_are_met():
    assert all(verdicts(good()).values())
    assert report.summary(good())["geomean_speedup"] == pytest.approx((2.0 * 1.4 * 1.5 * 1.0) ** (1 / 4), abs=1e-4)
    assert "MISSED" not in report.table(good()) and "MISSED" not in report.markdown(good())


@pytest.mark.parametrize("name, value, what", [
    (HRNET, 1.99, f"speedup: {HRNET}"), (LORA, 1.39, f"speedup: {LORA}"),
    ("inception_v3 b=1", 1.3, "speedup, geometric mean over branchy rows"),
    ("resnet50 b=1", 0.97, "speedup, least of all rows"), ("train vit-l b=8", 0.9, "speedup, least of all rows"),
])  # fmt: skip
def test_rejects_a_row_that_is_too_slow(name, value, what):
    rows = good(**{name: value})
    assert [t for t, is_met in verdicts(rows).items() if not is_met] == [what]
    assert "MISSED" in report.table(rows) and "**MISSED**" in report.markdown(rows)
    assert len(report.summary(rows)["missed"]) == 1


def test_controls_and_training_do_not_count_as_branchy():
    mean = "speedup, geometric mean over branchy rows"
    assert verdicts(good(**{"resnet50 b=1": 9.0, "train vit-l b=8": 9.0, "inception_v3 b=1": 1.3}))[mean] is False


def test_rejects_a_row_that_is_not_bit_equal():
    rows = report.merged(good(), [made_up(HRNET, 2.0, equal="max abs 1.0e-02")])
    assert [t for t, is_met in verdicts(rows).items() if not is_met] == ["rows that are not bit-equal to one stream"]
    assert f"; {HRNET} |" in report.markdown(rows)


def test_rejects_a_plan_that_holds_too_much():
    held = {"median_ms": 1.0, "spread_ms": 0.02, "reserved_mib": 64.0 + 0.26 * 164.0, "allocated_mib": 60.0}
    rows = report.merged(good(), [made_up(HRNET, 2.0, ours=held)])
    assert [t for t, is_met in verdicts(rows).items() if not is_met] == ["peak memory, weights and inputs included, most of all rows"]


def test_rejects_what_was_not_measured():
    rows = [r for r in good() if r["row"] != LORA]
    broken = stamped(HRNET, "time", {"group": BRANCHY}, failed("time", RuntimeError("no such kernel")), "test", "cpu")
    rows = report.merged(rows, [broken])
    found = {t["what"]: t for t in report.targets(rows)}
    assert not found[f"speedup: {HRNET}"]["is_met"] and "no such kernel" in found[f"speedup: {HRNET}"]["note"]
    assert not found[f"speedup: {LORA}"]["is_met"] and found[f"speedup: {LORA}"]["note"] == "not run"
    page = report.markdown(rows)
    assert f"- {HRNET}: RuntimeError: no such kernel" in page and f"- {LORA}\n" in page and "2 of 22 branchy rows" in page


def test_page_shows_rows_bound_memory_and_pictures(tmp_path):
    rows = good()
    path = tmp_path / "branches.json"
    report.save(path, rows)
    whole = json.loads(path.read_text())
    assert whole["suite"] == "branches" and whole["summary"]["min_speedup"] == 0.98 and len(whole["summary"]["not_run"]) == len(NAMES) - 6
    plot(load(path), path)
    assert path.with_suffix(".svg").exists() and path.with_suffix(".png").exists()
    one = Timeline((Span("caller", "conv.0", 0, 10), Span("caller", "conv.1", 10, 20)))
    many = Timeline((Span("caller", "conv.0", 0, 10), Span("lane1", "conv.1", 0, 12)))
    pictures.add_timelines(tmp_path / "t.json", HRNET, one, many)
    read = pictures.load_timelines(tmp_path / "t.json")[HRNET]
    assert read == (one, many)
    assert pictures.draw(HRNET, *read, folder=tmp_path / "img") == tmp_path / "img" / "branches-hrnet_w18-b-1.png"
    page = report.markdown(rows, tmp_path)
    row = "| [hrnet_w18 b=1](img/branches-hrnet_w18-b-1.png) | 3.000 (0.020) | torch.compile+graph | 2.000 (0.020) | 1.000 (0.020) "
    assert row + "| **2.00x** (1.99 to 2.01) | - | 2.50x | 80% | bit (bit) | 64 / 64 |" in page
    assert "Geometric mean 0.980x over 1 rows" in page, "controls have a mean of their own"


# -- the command


def _command(path: Path, *more: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "benchmarks.branches", "--tiny", "--device", "cpu", "--json", str(path), *more]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_command_times_a_row_in_a_process_of_its_own(tmp_path):
    path = tmp_path / "tiny.json"
    done = _command(path, "--rows", "mmdit*256*", "--variants", "eager,dynaflow", "--rounds", "2")
    assert done.returncode == 1, done.stderr  # no baseline of torch.compile, so no target is met
    (row,) = load(path)
    # whether lanes have cores of their own here or not
    is_planned = any(chosen.startswith("a plan of the kernels") for chosen in row["plan"]["chosen"].values())
    assert row["equal"] == ("bit" if is_planned else "no plan ran") and ("one stream" in row["differences"]) is is_planned
    assert row["ours"]["median_ms"] > 0
    assert set(row["baselines"]) == {"eager"} and row["speedup"] is None
    assert row["plan"]["captures"] == 1 and row["config"]["tiny"] and "time mmdit-1536 256+128: ok" in done.stdout


def _steps(phase: str, rows: list[str], left_s: list[float], row_limit_s: float) -> list:
    wish = {"tiny": True, "device": "cpu", "options": {}, "variants": ["eager"], "made_by": "test", "rounds": 1, "timelines": ""}
    jobs = [runner.Job(phase, row, wish) for row in rows]
    return list(runner.run("branches", jobs, 1, lambda: left_s.pop(0) if len(left_s) > 1 else left_s[0], row_limit_s))


def test_rows_past_the_limit_are_not_run_and_said():
    assert [job.row for job in _steps("time", [HRNET, LORA], [1.0], 60.0)] == [HRNET, LORA]


def test_a_row_that_takes_too_long_is_ended():
    done, not_run = _steps("time", [HRNET, LORA], [60.0, 60.0, 1.0], 0.3)
    assert done.rc is None and done.row == HRNET and done.seconds < 20 and load(done.json) == [] and not_run.row == LORA


def test_adapter_says_what_this_version_cannot_say():
    assert ours.bound() is None or ours.bound()["ms"] > 0
    assert {"captures", "calls", "planned_calls", "fallbacks"} <= set(ours.choice())
