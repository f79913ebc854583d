"""Benchmarks' processes: loaded side by side, timed one after another."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from benchmarks import fresh, runner, turn

_CHILD = """
import json, sys, time
from pathlib import Path
from benchmarks import turn
wish = json.loads(sys.argv[1])
turn.expect(wish["turn"])
log = Path(wish["log"])
def say(what):
    with log.open("a") as f:
        f.write(f"{what} {wish['row']}\\n")
say("load")
for _ in range(15 if wish["row"] == "slow" else 1):
    time.sleep(0.2)
    if wish["row"] == "slow":
        say("loading")
if wish["row"] == "fails":
    sys.exit(1)
turn.take()
say("begin")
time.sleep(0.1)
say("end")
"""


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """Other tests of this machine are none of our business."""
    monkeypatch.setattr(turn, "MACHINE", tmp_path / "machine")


def _run(tmp_path: Path, monkeypatch, rows: list[str], num_jobs: int, in_turns: bool = True) -> tuple[list, list[str]]:
    child, log = tmp_path / "child.py", tmp_path / "log"
    child.write_text(_CHILD)
    log.touch()
    monkeypatch.setattr(fresh, "command", lambda suite, wish: [sys.executable, str(child), json.dumps(wish)])
    jobs = [runner.Job("time", row, {"log": str(log)}) for row in rows]
    done = list(runner.run("any", jobs, num_jobs, lambda: 60.0, 60.0, 0.0, in_turns))
    return done, log.read_text().splitlines()


def test_a_wave_loads_side_by_side_and_is_timed_one_after_another(tmp_path, monkeypatch):
    done, log = _run(tmp_path, monkeypatch, ["a", "b", "c"], 2)
    assert {d.row for d in done} == {"a", "b", "c"} and all(d.rc == 0 for d in done)
    assert sorted(log[:2]) == ["load a", "load b"]
    assert log[2:] == ["begin a", "end a", "begin b", "end b", "load c", "begin c", "end c"]


@pytest.mark.parametrize("patience", [0.5, 60.0])
def test_who_has_waited_long_enough_waits_for_nobody(tmp_path, monkeypatch, patience):
    monkeypatch.setattr(runner, "PATIENCE_S", patience)
    done, log = _run(tmp_path, monkeypatch, ["slow", "a", "b"], 3)
    assert {d.row for d in done} == {"slow", "a", "b"} and all(d.rc == 0 for d in done)
    short = [line for line in log if line.split()[1] != "slow"]
    assert short[2:] == ["begin a", "end a", "begin b", "end b"]
    turns = log[log.index("begin a") : log.index("end b") + 1]
    assert "loading slow" not in turns, "who loads is held while others are timed"
    num_before = log[: log.index("begin a")].count("loading slow")
    assert num_before == 15 if patience > 1 else num_before < 15
    assert log[-2:] == (["begin slow", "end slow"] if patience < 1 else ["begin b", "end b"])
    (slow,) = [d for d in done if d.row == "slow"]
    assert slow.seconds > 3, "what it did before it was held counts, too"


def _running(tmp_path: Path, name: str, code: str) -> runner._Running:
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / name)], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None and process.stdout.readline() == b"here\n"
    return runner._Running(runner.Job("time", name, {}), process, tmp_path, tmp_path, tmp_path / f"{name}.place")


def test_who_was_held_as_it_became_ready_gets_its_turn(tmp_path):
    each = _running(tmp_path, "a", "print('here', flush=True); import time; time.sleep(0.1)")
    turn.ready(each.place).touch()
    each.hold()
    each.look()
    runner._next_turn([each], turn.Machine())
    assert each.process.wait(timeout=10) == 0


def test_who_is_ready_does_not_wait_for_those_that_are_held(tmp_path):
    held, ready = (_running(tmp_path, name, "print('here', flush=True); import time; time.sleep(60)") for name in ("slow", "a"))
    try:
        held.hold()
        turn.ready(ready.place).touch()
        ready.look()
        runner._next_turn([held, ready], turn.Machine())
        assert turn.given(ready.place).exists() and held.held_at is not None
    finally:
        for each in (held, ready):
            runner._end(each.process)


def test_who_is_held_gets_no_lock_that_it_waited_for(tmp_path, monkeypatch):
    """Whoever has the turn may tune, too."""
    monkeypatch.setattr(turn, "LOCK", tmp_path / "lock")
    tune = """if True:
        import fcntl, sys
        print("here", flush=True)
        while True:
            with open(sys.argv[1], "w") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
        """
    each = _running(tmp_path, "lock", tune)
    try:
        for _ in range(20):
            with turn._alone():
                time.sleep(0.01)  # it waits
                each.hold()
            time.sleep(0.02)
            with turn.nobody_tunes() as is_free:
                assert is_free
            each.go_on()
    finally:
        runner._end(each.process)


def test_without_turns_nobody_waits(tmp_path, monkeypatch):
    done, log = _run(tmp_path, monkeypatch, ["a"], 1, in_turns=False)
    assert [d.rc for d in done] == [0] and log == ["load a", "begin a", "end a"]


def test_a_process_that_fails_while_it_loads_keeps_nobody_waiting(tmp_path, monkeypatch):
    done, log = _run(tmp_path, monkeypatch, ["fails", "a"], 2)
    assert {(d.row, d.rc) for d in done} == {("fails", 1), ("a", 0)} and log[-2:] == ["begin a", "end a"]


def test_what_waited_is_not_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "_CHILD", _CHILD.replace("time.sleep(0.1)", "time.sleep(2.0)"))
    began = time.monotonic()
    done, _ = _run(tmp_path, monkeypatch, ["a", "b", "c", "d"], 4)
    wall = time.monotonic() - began
    assert wall > 8 and max(d.seconds for d in done) < wall - 4


def test_tuning_takes_the_lock(monkeypatch, tmp_path):
    monkeypatch.setattr(turn, "LOCK", tmp_path / "lock")
    hold = "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); time.sleep(1.0)"
    with subprocess.Popen([sys.executable, "-c", hold, str(tmp_path / "lock")], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        began = time.monotonic()
        assert turn._locked(lambda: time.monotonic())() - began > 0.3


def test_no_turn_while_another_suite_loads(tmp_path, monkeypatch):
    other, log = turn.Machine(), tmp_path / "log"
    log.touch()
    assert other.try_share()

    def load() -> None:
        while "load a" not in log.read_text():
            time.sleep(0.01)
        time.sleep(1.0)
        with log.open("a") as file:
            file.write("other is done\n")
        other.leave()

    threading.Thread(target=load).start()
    _, said = _run(tmp_path, monkeypatch, ["a"], 1)
    assert said == ["load a", "other is done", "begin a", "end a"]


def test_nothing_is_started_in_anothers_turn(tmp_path, monkeypatch):
    other = turn.Machine()
    assert other.try_own()
    threading.Timer(0.5, lambda: (tmp_path / "log").open("a").write("other is done\n") and other.leave()).start()
    _, log = _run(tmp_path, monkeypatch, ["a"], 1)
    assert log == ["other is done", "load a", "begin a", "end a"]
