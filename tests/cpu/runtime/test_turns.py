"""Whose turn it is: what shares workspaces comes one after the other, on made-up streams."""

import threading
from types import SimpleNamespace

import pytest
import torch

from dynaflow.ir import Stream
from dynaflow.runtime import cuda, turns


class Machine:
    """Streams and events that write down what is asked of them."""

    def __init__(self, monkeypatch):
        self.log, self.current = [], 1
        self.streams = {}
        machine = self

        class Event:
            where = None

            def record(self, stream):
                self.where = stream.cuda_stream

        class Made:
            def __init__(self, raw):
                self.cuda_stream = raw

            def wait_event(self, event):
                if event.where is not None:  # CUDA waits for no event that was never recorded
                    machine.log.append(f"{self.cuda_stream} waits for {event.where}")

            def wait_stream(self, other):
                machine.log.append(f"{self.cuda_stream} waits for all of {other.cuda_stream}")

        monkeypatch.setattr(turns, "raw_stream", lambda index: self.current)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.streams.setdefault(self.current, Made(self.current)))
        self.turns = turns.Turns(torch.device("cuda", 0))

    def replay(self, name, on):
        self.current = on
        self.turns.takes(lambda: self.log.append(f"{name} on {on}"))()


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


def test_recordings_run_one_after_the_other(machine):
    for name, stream in (("mine", 1), ("yours", 1), ("yours", 2), ("mine", 2), ("mine", 1)):
        machine.replay(name, stream)
    assert machine.log == ["mine on 1", "yours on 1", "2 waits for 1", "yours on 2", "mine on 2", "1 waits for 2", "mine on 1"]


def test_what_is_issued_launch_by_launch_has_a_turn_too(machine):
    machine.replay("recorded", 1)
    machine.current = 2
    machine.turns.enter()
    machine.log.append("launches on 2")
    machine.turns.leave()
    machine.replay("recorded", 1)
    assert machine.log == ["recorded on 1", "2 waits for 1", "launches on 2", "1 waits for 2", "recorded on 1"]


def test_who_comes_in_between_is_over_before_the_next(machine):
    """2 came while 1 was issuing: 3 waits for both, by waiting for 1, which waited for 2."""
    machine.turns.enter()
    machine.replay("another", 2)
    machine.current = 1
    machine.turns.leave()
    machine.replay("next", 3)
    assert machine.log == ["another on 2", "1 waits for 2", "3 waits for 1", "next on 3"]


def test_a_turn_is_no_one_else_s_until_it_is_launched(machine):
    is_launching, may_go_on, done = threading.Event(), threading.Event(), []

    def slow():
        is_launching.set()
        assert may_go_on.wait(10)
        done.append("slow")

    threads = [threading.Thread(target=machine.turns.takes(slow))]
    threads[0].start()
    assert is_launching.wait(10)
    threads.append(threading.Thread(target=machine.turns.takes(lambda: done.append("quick"))))
    threads[1].start()
    threads[1].join(0.2)
    assert done == []
    may_go_on.set()
    for thread in threads:
        thread.join(10)
    assert done == ["slow", "quick"]


def test_a_replay_that_fails_ends_its_turn(machine):
    def fail():
        raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        machine.turns.takes(fail)()
    machine.replay("next", 1)
    assert machine.log == ["next on 1"]


@pytest.mark.parametrize("is_capturing", [False, True])
@pytest.mark.parametrize("products", [frozenset(), frozenset({Stream("aux0")})])
def test_plans_with_products_on_side_streams_take_turns(machine, monkeypatch, products, is_capturing):
    """Inside of a recording it is the recording that does."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)
    monkeypatch.setattr(cuda, "side_streams", lambda device, streams, products: [])
    monkeypatch.setattr(cuda, "turns_of", lambda device: machine.turns)
    monkeypatch.setattr(cuda, "_callers", {})
    machine.replay("recorded", 1)
    machine.current = 2
    mine = cuda.CudaStreams(torch.device("cuda", 0), SimpleNamespace(streams=(Stream("aux0"),), product_streams=products))
    mine.leave()
    machine.replay("recorded", 1)
    has_turn = bool(products) and not is_capturing
    assert machine.log == ["recorded on 1", *["2 waits for 1"] * has_turn, *["1 waits for 2"] * has_turn, "recorded on 1"]
