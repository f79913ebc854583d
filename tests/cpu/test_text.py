"""Print and parse are inverse; what does not parse says where and what was expected."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaflow.errors import PlanSyntaxError
from dynaflow.ir import WHOLE, Launch, Part, Plan, Record, Stream, Wait, equal_parts, tiles

names = st.from_regex(r"[a-z][a-z0-9_.]{0,12}", fullmatch=True)


@st.composite
def _parts(draw):
    of = draw(st.integers(2, 40))
    lo = draw(st.integers(0, of - 1))
    return Part(lo, draw(st.integers(lo + 1, of)), of)


parts = st.one_of(st.just(WHOLE), _parts())
calls = st.tuples(names, parts)
launches = st.one_of(
    st.builds(lambda call, stream: Launch((call,), stream), calls, names),
    st.builds(lambda group, stream, fn: Launch(tuple(group), stream, fn), st.lists(calls, min_size=1, max_size=4), names, names),
    # fused: over one part, and (refused, but printed and parsed) over several
    st.builds(lambda ops, part, s: Launch(tuple((op, part) for op in ops), s), st.lists(names, min_size=2, max_size=5), parts, names),
    st.builds(lambda group, stream: Launch(tuple(group), stream), st.lists(calls, min_size=2, max_size=4), names),
)
steps = st.one_of(launches, st.builds(Record, names, names), st.builds(Wait, names, names))
plans = st.builds(
    Plan,
    names,
    st.lists(st.builds(Stream, names, st.integers(-5, 5), st.one_of(st.none(), st.integers(1, 132))), max_size=4).map(tuple),
    st.lists(steps, max_size=12).map(tuple),
    st.dictionaries(names, st.integers(0, 3), max_size=6).map(lambda d: tuple(sorted(d.items(), key=lambda item: item[1]))),
    st.lists(st.sampled_from(["batch_size >= 64", "tag.phase == 'decode'", "tag.phase == 'a # b'"]), max_size=2).map(tuple),
    st.sampled_from(["", "batch too small to split", "see issue #3"]),
    loose=st.lists(names, max_size=4).map(tuple),
    rows=st.lists(st.one_of(names, st.integers(-1, 9).map(str)), max_size=3).map(tuple),
)


@given(plans)
def test_print_and_parse_are_inverse(plan):
    assert Plan.parse(str(plan)) == plan


@given(st.integers(1, 40), st.integers(0, 1000))
def test_equal_parts_tile_every_batch(num_parts, batch_size):
    cuts = [p.bounds(batch_size) for p in equal_parts(num_parts)]
    assert cuts[0][0] == 0 and cuts[-1][1] == batch_size
    assert all(a[1] == b[0] for a, b in zip(cuts, cuts[1:]))
    assert tiles(equal_parts(num_parts))


def test_tiles_rejects_a_gap_and_an_overlap():
    assert not tiles([Part(0, 1, 3), Part(2, 3, 3)])
    assert not tiles([Part(0, 2, 3), Part(1, 3, 3)])
    assert tiles([Part(0, 1, 2), Part(2, 4, 4)])


@pytest.mark.parametrize(
    ("source", "line", "column", "expected"),
    [
        ("", 1, 1, "'plan <flow>' as the first line"),
        ("launch a @c", 1, 1, "'plan <flow>' as the first line"),
        ("plan f\nlaunch a 1/ @c", 2, 10, "a part such as 1/2 or 0:3/4"),
        ("plan f\nlaunch a 3/2 @c", 2, 10, "a part lo:hi/of with 0 <= lo < hi <= of"),
        ("plan f\nlaunch a 1/2", 2, 13, "'@stream'"),
        ("plan f\nlaunch g[a 0/2; b] @c", 2, 15, "',' or ']'"),
        ("plan f\nlaunch [a, b 0/2] 0/2 @c", 2, 19, "'@stream'"),
        ("plan f\nlaunch g[a, b] 0/2 @c", 2, 16, "'@stream'"),
        ("plan f\nlaunch [] @c", 2, 9, "an op"),
        ("plan f\nslot 0 a:0 b:0\nslot 1 c:0 a:0", 3, 12, "a value that has no slot yet"),
        ("plan f\nloose @c", 2, 7, "a value"),
        ("plan f\nstream c priority=x", 2, 19, "a number"),
        ("plan f\nwait e0 @c extra", 2, 12, "the end of the line"),
        ("plan f\nlunch a @c", 2, 1, "plan (once), sequential, context, rows, stream, slot, loose, launch, record or wait"),
    ],
)
def test_rejects_what_does_not_parse(source, line, column, expected):
    with pytest.raises(PlanSyntaxError) as error:
        Plan.parse(source)
    assert (error.value.line, error.value.column, error.value.expected) == (line, column, expected)


def test_comments_and_blank_lines_are_skipped():
    plan = Plan.parse("# made by hand\nplan f\n\nstream c  # the only one\nlaunch a @c\n")
    assert plan == Plan("f", (Stream("c"),), (Launch((("a", WHOLE),), "c"),))


def test_fused_launches_read_as_one_line():
    plan = Plan.parse("plan f\nlaunch [a, b] 1/2 @caller\nlaunch [c, d, e] @caller\nlaunch [f 0/2, g 0/2] @caller\n")
    half = Part(0, 1, 2)
    assert plan.launches[0] == Launch((("a", Part(1, 2, 2)), ("b", Part(1, 2, 2))), "caller")
    assert plan.launches[2] == Launch((("f", half), ("g", half)), "caller")
    assert [launch.label for launch in plan.launches] == ["a..b 1/2", "c..e", "f..g 0/2"]
    assert "launch [f, g] 0/2 @caller" in str(plan)


def test_save_load_and_diff(tmp_path):
    plan = Plan.parse("plan f\nstream c\nrecord start @caller\nwait start @c\nlaunch a @c\nrecord e0 @c\nwait e0 @caller\n")
    plan.save(tmp_path / "a.plan")
    assert Plan.load(tmp_path / "a.plan") == plan
    other = Plan.parse(str(plan).replace("launch a @c", "launch a @caller"))
    assert "launch a @caller" in plan.diff(other)
