"""What a strategy read is the key of its plan, no more and no less."""

import pytest

import dynaflow as df
from dynaflow.context import ApartLook, Context, current_tags, cuts_of
from dynaflow.errors import OptionError

FACTS = {"batch_size": 100, "device": "cpu", "needs_grad": False, "shape.x": (100, 8), "dtype.x": "float32", "tag.phase": "decode",
         "tag.num": 7}  # fmt: skip


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
        (lambda c: c.count("num") == 0, ["tag.num != None", "tag.num != 0"]),
        (lambda c: c.count("num") < c.batch_size, ["tag.num != None", "tag.num < batch_size"]),
        (lambda c: c.batch_size > c.count("num"), ["tag.num != None", "batch_size > tag.num"]),
        (lambda c: int(c.count("num")), ["tag.num != None", "tag.num == 7"]),
        (lambda c: c.count("other"), ["tag.other == None"]),
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


@pytest.mark.parametrize("num, batch_size, holds", [(7, 100, True), (99, 100, True), (100, 100, False), (7, 7, False), (None, 9, False),
                                                    ("three", 100, False)])  # fmt: skip
def test_a_look_may_compare_two_facts(num, batch_size, holds):
    context = Context(FACTS)
    assert context.count("num") < context.batch_size
    assert all(look.holds({"batch_size": batch_size, "tag.num": num}) for look in context.looks) == holds


@pytest.mark.parametrize("value", [-1, 1.0, True, "three"])
def test_rejects_a_count_that_is_none(value):
    for read in (lambda facts: Context(facts).count("num"), lambda facts: cuts_of(("num", "-1"), facts)):
        with pytest.raises(OptionError, match="the tag num is"):
            read({**FACTS, "tag.num": value})


@pytest.mark.parametrize("rows, cuts", [(("num", "-1"), (7,)), (("-1", "num"), (93,)), (("3", "num", "-1"), (3, 10)), (("-1",), ())])
def test_rows_that_tags_count(rows, cuts):
    assert cuts_of(rows, FACTS) == cuts


@pytest.mark.parametrize("vouched, state", [
    (("kv:*", (7,)), "kv:*"), (("kv:*", (8,)), ""), (("kv:*", (7, 9)), ""), (None, ""), ("kv:*", ""), ((7, "kv:*"), ""),
])  # fmt: skip
def test_parts_are_apart_where_the_caller_vouches_for_these_cuts_and_no_others(vouched, state):
    facts = {**FACTS, "tag.apart": vouched}
    context = Context(facts)
    assert context.state_apart(("num", "-1")) == state
    (look,) = context.looks
    assert look == ApartLook(("num", "-1"), state) and look.holds(facts)
    assert look.holds({**facts, "tag.num": 9}) == (not state), "another boundary than the one that was vouched for"
    assert look.holds({**facts, "tag.num": 9, "tag.apart": ("kv:*", (9,))}) == bool(state), "every boundary that is"
