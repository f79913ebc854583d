import json
import random

import pytest

from dynaflow.timeline import Span, Timeline


def timeline(*spans: tuple[str, float, float], **kwargs) -> Timeline:
    return Timeline(tuple(Span(stream, f"op{i} 0/2", start, end) for i, (stream, start, end) in enumerate(spans)), **kwargs)


CASES = [
    # spans, total, busy of a, overlap, hidden share of b
    ((), 0, 0, 0, 0),
    ((("a", 5, 15),), 10, 10, 0, 0),
    ((("a", 0, 10), ("b", 10, 20)), 20, 10, 0, 0),
    ((("a", 0, 10), ("b", 5, 15)), 15, 10, 5, 0.5),
    ((("a", 0, 10), ("b", 2, 4), ("b", 6, 8)), 10, 10, 4, 1),
    # spans of one stream that lie over one another count once
    ((("a", 0, 10), ("a", 5, 20), ("b", 8, 12)), 20, 20, 4, 1),
    # three streams
    ((("a", 0, 4), ("b", 2, 6), ("c", 3, 10)), 10, 4, 4, 1),
    # an empty span is nothing
    ((("a", 0, 10), ("b", 5, 5)), 10, 10, 0, 0),
]


@pytest.mark.parametrize(("spans", "total", "busy_a", "overlap", "hidden_b"), CASES)
def test_sums(spans, total, busy_a, overlap, hidden_b):
    t = timeline(*spans)
    assert (t.total_us, t.busy_us("a"), t.overlap_us(), t.hidden_share("b")) == (total, busy_a, overlap, hidden_b)


def test_sums_against_counting_ticks():
    for seed in range(50):
        rng = random.Random(seed)
        spans = [(rng.choice("abc"), start := rng.randrange(30), start + rng.randrange(6)) for _ in range(rng.randrange(1, 12))]
        t = timeline(*spans)
        ticks = [{s for s, start, end in spans if start <= tick < end} for tick in range(40)]
        assert t.overlap_us() == sum(len(busy) > 1 for busy in ticks)
        for stream in "abc":
            mine = [busy for busy in ticks if stream in busy]
            assert t.busy_us(stream) == len(mine)
            assert t.hidden_share(stream) == (sum(len(busy) > 1 for busy in mine) / len(mine) if mine else 0)


def test_lanes_come_first_in_their_order():
    t = timeline(("comm", 0, 1), ("aux", 0, 1), ("compute", 0, 1), lanes=("compute", "comm", "unused"))
    assert t.streams == ("compute", "comm", "aux")


def test_chrome_trace_reads_back(tmp_path):
    t = timeline(("compute", 100, 110), ("comm", 105, 125), title="two")
    t.to_chrome(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = [(threads[e["tid"]], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert spans == [("compute", "op0 0/2", 0, 10), ("comm", "op1 0/2", 5, 20)]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["two"]


def test_str_says_what_was_hidden():
    text = str(timeline(("compute", 0, 2000), ("comm", 1000, 3000), title="two"))
    assert text == "two: 3.0 ms | compute busy 2.0 ms (50% beside another) | comm busy 2.0 ms (50% beside another)"


def test_short_times_are_told_in_microseconds():
    """A simulated one of a few kernels is no '0.0 ms'."""
    text = str(timeline(("compute", 0, 62.4), ("comm", 10, 13.44), title="two"))
    assert text == "two: 62 us | compute busy 62 us (6% beside another) | comm busy 3.4 us (100% beside another)"
