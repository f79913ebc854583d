"""Fresh processes that are timed in turns."""

import json
import sys
from types import SimpleNamespace

import torch

from benchmarks import fresh, store

CHILD = """
import json, os, sys, time
from pathlib import Path
from benchmarks import turn
name, log = sys.argv[1:]
if name == "broken":
    sys.exit("no such model")
turn.expect(os.environ["DYNAFLOW_BENCHMARKS_TURN"], tunes_alone=False)
turn.take()
with open(log, "a") as file:
    print("begin", file=file, flush=True)
time.sleep(0.3)
with open(log, "a") as file:
    print("end", file=file, flush=True)
cache = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
is_warm = cache.exists()
cache.mkdir(parents=True, exist_ok=True)
print(json.dumps({"first_s": 1.0, "is_warm": is_warm}), flush=True)
time.sleep(60.0 if is_warm else 0.0)
"""


def children(monkeypatch, log):
    monkeypatch.setattr(fresh, "command", lambda suite, wish: [sys.executable, "-c", CHILD, wish["variant"], str(log)])
    return {name: {"row": "toy", "variant": name} for name in ("theirs", "ours")}


def test_those_of_a_turn_begin_together_and_after_the_turn_before(monkeypatch, tmp_path):
    log = tmp_path / "log"
    found = fresh.cold_and_warm("toy", children(monkeypatch, log), once=["theirs"])
    assert {name: [each[when]["is_warm"] for when in ("cold", "warm")] for name, each in found.items()} == {
        "theirs": [False, True], "ours": [False, True]}  # fmt: skip
    cold, warm = (text.split() for text in (log.read_text()[: 2 * len("begin end ")], log.read_text()[2 * len("begin end ") :]))
    assert sorted(cold) == ["begin", "begin", "end", "end"], "nothing is timed beside another turn"
    assert warm == ["begin", "end"] * (1 + fresh.NUM_WARM), "each warm start is alone"


def test_the_warm_start_is_the_median_of_some_and_fails_where_one_does():
    starts = [{"first_s": s, "process_s": 10 * s} for s in (3.0, 1.0, 2.0)]
    assert fresh._median(starts) == {"first_s": 2.0, "process_s": 20.0, "each_s": [1.0, 2.0, 3.0]}
    assert fresh._median([*starts, {"note": "child failed"}]) == {"note": "child failed"}


def test_a_child_that_fails_says_why(monkeypatch, tmp_path):
    wishes = children(monkeypatch, tmp_path / "log") | {"broken": {"row": "toy", "variant": "broken"}}
    found = fresh.cold_and_warm("toy", wishes)
    assert "no such model" in found["broken"]["cold"]["note"] and found["ours"]["warm"]["first_s"] == 1.0
    assert json.dumps(found)


def test_a_model_that_ran_before_is_said_to_have(capsys):
    """An older figure, and its twin of now."""
    case = SimpleNamespace(dtype=torch.float32, reset=lambda: None)
    fresh.time_first(case, lambda case, options: lambda number: None, {}, "cpu")
    now = json.loads(capsys.readouterr().out)
    older = {"first_s": 1.0, "third_s": 1.0}
    row = {"row": "toy", "first": {"ours": {"cold": now | {"process_s": 2.0}, "warm": older | {"process_s": 2.0}}}}
    *_, cold, warm = store.first_table("Time", [row])
    assert "| ours, cold |" in cold and "| ours, warm, after an eager run |" in warm
