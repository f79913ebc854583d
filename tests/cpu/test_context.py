"""What a strategy read is the key of its plan, no more and no less."""

import pytest

import dynaflow as df
from dynaflow.context import Context, current_tags

FACTS = {"batch_size": 100, "device": "cpu", "needs_grad": False, "shape.x": (100, 8), "dtype.x": "float32", "tag.phase": "decode"}


def looks(read):
    context = Context(FACTS)
    read(context)
    return [str(look) for look in context.looks]


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        (lambda c: c.batch_size < 64, ["batch_size >= 64"]),
        (lambda c: c.batch_size >= 64, ["batch_size >= 64"]),
        (lambda c: 64 > c.batch_size, ["batch_size >= 64"]),
        (lambda c: min(c.batch_size, 64), ["batch_size > 64"]),
        (lambda c: c.batch_size // 2, ["batch_size == 100"]),
        (lambda c: range(c.batch_size), ["batch_size == 100"]),
        (lambda c: f"{c.batch_size}", ["batch_size == 100"]),
        (lambda c: c.tags.get("phase"), ["tag.phase == 'decode'"]),
        (lambda c: c.tags.get("other"), ["tag.other == None"]),
        (lambda c: "other" in c.tags, ["tag.other == None"]),
        (lambda c: c.shapes["x"], ["shape.x == (100, 8)"]),
        (lambda c: c.device, ["device == 'cpu'"]),
        (lambda c: None, []),
    ],
)
def test_every_look_is_written_down(read, expected):
    assert looks(read) == expected


def test_a_look_holds_where_the_strategy_would_see_the_same():
    context = Context(FACTS)
    assert context.batch_size >= 64
    (look,) = context.looks
    assert look.holds({"batch_size": 64}) and not look.holds({"batch_size": 63})


def test_arithmetic_on_a_size_gives_plain_numbers():
    context = Context(FACTS)
    size = context.batch_size
    assert (size + 1, 1 + size, size - 1, 1 - size, size * 2, size % 7, size / 8) == (101, 101, 99, -99, 200, 2, 12.5)


def test_tags_nest_and_end():
    with df.context(phase="prefill", layer=1):
        with df.context(phase="decode"):
            assert dict(current_tags()) == {"phase": "decode", "layer": 1}
        assert dict(current_tags()) == {"phase": "prefill", "layer": 1}
    assert dict(current_tags()) == {}


def test_iterating_over_tags_notes_that_there_were_no_others():
    assert "tag.* == ('tag.phase',)" in looks_with_all(lambda c: list(c.tags))
    assert "tag.* == ('tag.phase',)" in looks_with_all(lambda c: len(c.tags))


def looks_with_all(read):
    context = Context({**FACTS, "tag.*": ("tag.phase",)})
    read(context)
    return [str(look) for look in context.looks]


def test_a_size_does_what_a_number_does():
    size = Context(FACTS).batch_size
    assert divmod(size, 7) == (14, 2) and divmod(700, size) == (7, 0)
    assert (-size, abs(size), size & 4, size >> 1, round(size), size.bit_length(), float(size)) == (-100, 100, 4, 50, 100, 7, 100.0)
