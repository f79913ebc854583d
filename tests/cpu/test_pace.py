"""Which core a timed thread sits on, and which turns count."""

import os
from types import SimpleNamespace

import pytest

from benchmarks import measure, pace


class Machine:
    """Cores with a pace each; and the one that the thread is on."""

    def __init__(self, monkeypatch, us):
        self.us, self.on = dict(us), set(us)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(self.on))
        monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: setattr(self, "on", set(cores)))
        monkeypatch.setattr(pace, "loop_us", lambda: self.us[min(self.on)])


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch, {0: 60.0, 1: 32.0, 2: 40.0})


def test_sits_on_the_fastest_core_and_moves_when_that_slows_down(machine):
    with pace.Core() as core:
        assert machine.on == {1} and core.is_fast()
        machine.us[1] = 35.0
        core.settle()
        assert machine.on == {1} and core.num_moves == 0, "a little slower is no reason to move"
        machine.us[1] = 70.0
        core.settle()
        assert machine.on == {2} and core.num_moves == 1 and not core.is_fast(), "the fastest there is, but slow"
        machine.us[2] = 30.0
        assert core.is_fast() and core.best_us == 30.0
    assert machine.on == {0, 1, 2}


@pytest.mark.parametrize("slow, num_turns, kept", [({1}, 4, 3), ({1, 2, 3, 4, 5, 6, 7}, 9, 2), (set(range(9)), 9, 9), (set(), 3, 3)])
def test_turns_of_a_slow_machine_are_left_out_unless_all_are(machine, monkeypatch, slow, num_turns, kept):
    """A tick takes 5 us, on a slow machine 10; `b` takes one more than `a`."""
    now, turn = [0.0], [-1]

    def tick():
        now[0] += 10e-6 if turn[0] in slow else 5e-6
        return now[0]

    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=tick))
    monkeypatch.setattr(pace.Core, "settle", lambda self: turn.append(turn.pop() + 1))
    monkeypatch.setattr(pace.Core, "is_fast", lambda self: turn[0] not in slow)
    case = SimpleNamespace(reset=lambda: None)
    found, said = measure.host_us(case, {"a": lambda number: None, "b": lambda number: tick()}, "cpu", 18, "a")
    us = 10 if len(slow) == 9 else 5
    assert said["turns"] == num_turns and said["turns_kept"] == kept and said["moves"] == 0
    assert found["a"] == {"median_us": us, "spread_us": 0, "tenth_us": us, "over_base_us": 0} and found["b"]["over_base_us"] == us


def test_the_loop_takes_its_time():
    assert pace.loop_us() > 0 and pace.run_loop(3) == 61
