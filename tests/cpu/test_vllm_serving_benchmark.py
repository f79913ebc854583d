"""What rounds of serving come to, without vLLM."""

from argparse import Namespace

import pytest

from benchmarks.vllm_serving import report
from benchmarks.vllm_serving.suites import AGAIN, AUTO, DEFAULT, SUITES

(QWEN,) = [suite for suite in SUITES if suite.name == "qwen3-8b"]


def served(*ms: float, slow: tuple[int, ...] = ()) -> dict:
    """One round of one way. While the machine is slow, the loop takes twice as long."""
    loops = [54.0 if i in slow else 27.0 for i in range(len(ms))]
    return {"ms": list(ms), "loop_us": loops, "tokens": {"0": [1, 2]}, "steps": 3, "split_steps": 0, "fallbacks": {}, "refusal": "",
            "regions": 0, "planned_regions": 0}  # fmt: skip


def row(**rounds: list[dict]) -> dict:
    ways = {DEFAULT: rounds["plain"], AGAIN: rounds["plain"], AUTO: rounds["ours"]}
    (found,) = report.rows(QWEN, "batch 1", ways, {}, Namespace(made_by="a test"))
    return found


def test_what_was_served_while_the_machine_was_slow_is_left_out():
    plain = [served(10.0, 10.0, 10.0)] * 3
    noisy = [served(10.0, 30.0, 30.0, slow=(1, 2))] * 3
    found = row(plain=plain, ours=noisy)
    assert found["speedup"] == 1.0 and found["left_out"] == {DEFAULT: 0, AUTO: 6}
    assert found["ours"]["spread_ms"] == 0.0


def test_a_way_that_is_slow_itself_stays_slow():
    """The twin: the machine was as fast as ever."""
    found = row(plain=[served(10.0, 10.0)] * 3, ours=[served(30.0, 30.0)] * 3)
    assert found["speedup"] == pytest.approx(1 / 3, abs=1e-3) and found["left_out"] == {DEFAULT: 0, AUTO: 0}
    assert not any(t["is_met"] for t in found["targets"])


def test_a_round_that_was_slow_throughout_for_one_way_is_left_out_for_all():
    """What an engine finds fast is not what it saw just now: others saw it faster."""
    slow = served(20.0, 20.0, slow=(0, 1))
    found = row(plain=[served(10.0, 10.0), served(11.0, 11.0)], ours=[slow, served(11.0, 11.0)])
    assert found["speedup"] == 1.0 and found["left_out"] == {DEFAULT: 2, AUTO: 2}


def test_where_no_round_was_fast_for_all_they_count():
    found = row(plain=[served(10.0, 10.0)], ours=[served(20.0, 20.0, slow=(0, 1))])
    assert found["speedup"] == 0.5 and found["left_out"][AUTO] == 0


def test_rows_of_a_suite_that_is_another_now_are_listed():
    found = row(plain=[served(10.0)], ours=[served(10.0)])
    older = found | {"config": found["config"] | {"layers": 8}}
    assert not report.has_changed(found) and report.has_changed(older)
    assert "to be measured anew:\n\n- qwen3-8b, batch 1, auto" in report.markdown([older])
    assert "to be measured anew" not in report.markdown([found])
