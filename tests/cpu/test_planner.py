"""What a strategy may do, and the error for each thing that it may not."""

from dataclasses import replace

import pytest

from dynaflow import errors
from dynaflow.context import Context
from dynaflow.costs import Cost
from dynaflow.ir import WHOLE, Launch, Part, Plan, Record
from dynaflow.planner import CONSTANT_BATCH, plan
from dynaflow.strategies import Branches, Mixed, NanoBatch, Sequential, TwoBatch
from dynaflow.strategy import Strategy
from dynaflow.sync import synchronise
from tests.cpu.flows import chain, diamond, stateful


def schedule(function):
    """A strategy from a function, so that a test reads as the strategy's body."""
    return type("Test", (Strategy,), {"schedule": lambda self, flow: function(flow)})()


def run(function, flow=None, **facts):
    return plan(flow or chain(), schedule(function), Context({"batch_size": 16, **facts}))


def drain(flow, stream="compute"):
    while ready := flow.get_ready_ops():
        flow.execute(ready[0], stream=stream)


def labels(p):
    return [launch.label for launch in p.launches]


def test_whole_batch_in_program_order():
    assert labels(run(drain)) == ["L0.a", "L0.ar", "L1.a", "L1.ar"]


def test_two_batch_puts_network_ops_on_their_own_stream():
    p = plan(chain(), TwoBatch(), Context({"batch_size": 16}))
    assert [(launch.label, launch.stream) for launch in p.launches[:4]] == [
        ("L0.a 0/2", "compute"), ("L0.ar 0/2", "comm"), ("L0.a 1/2", "compute"), ("L0.ar 1/2", "comm"),
    ]  # fmt: skip
    assert p.context == ("batch_size >= 2",)


def test_nano_batch_runs_every_part():
    p = plan(chain(), NanoBatch(4), Context({"batch_size": 16}))
    assert sorted(labels(p)) == sorted(f"L{i}.{op} {k}/4" for i in range(2) for op in ("a", "ar") for k in range(4))


def test_branches_uses_several_streams_without_a_split():
    p = plan(diamond(), Branches(2), Context({"batch_size": 16}))
    streams = {launch.label: launch.stream for launch in p.launches}
    assert streams["b"] != streams["c"] and set(streams) == {"a", "b", "c", "d"}


def test_the_callers_stream_may_be_used_without_being_declared():
    p = run(lambda flow: drain(flow, stream="caller"))
    assert {launch.stream for launch in p.launches} == {"caller"} and p.streams == ()


COSTS = {"a": Cost(2.0, 0.1), "b": Cost(10.0, 0.5), "c": Cost(3.0), "d": Cost(1.0)}


def test_ready_ops_have_costs_and_the_longest_path_to_the_end():
    seen = {}

    def body(flow):
        while ready := flow.get_ready_ops():
            seen.update({r.name: (r.cost, r.height_us, r.height) for r in ready})
            flow.execute(ready[0])

    plan(diamond(), schedule(body), costs=COSTS)
    assert seen == {"a": (COSTS["a"], 13.0, 2), "b": (COSTS["b"], 11.0, 1), "c": (COSTS["c"], 4.0, 1), "d": (COSTS["d"], 1.0, 0)}


def test_without_costs_every_op_counts_one():
    seen = {}

    def body(flow):
        seen.update({name: (flow.find(name).cost, flow.find(name).height_us) for name in "abcd"})
        drain(flow)

    run(body, diamond())
    assert seen == {"a": (None, 3.0), "b": (None, 2.0), "c": (None, 2.0), "d": (None, 1.0)}


def test_a_part_costs_by_its_rows():
    seen = []

    def body(flow):
        flow.split([0.25, 0.75])
        seen.extend(flow.get_ready_ops())
        drain(flow)

    plan(diamond(), schedule(body), costs=COSTS)
    assert [r.cost for r in seen] == [Cost(0.5, 0.1), Cost(1.5, 0.1)] and {r.height_us for r in seen} == {13.0}


def test_rejects_costs_that_leave_an_op_out():
    with pytest.raises(errors.OptionError, match="1 of 4 ops of diamond have no cost: d"):
        plan(diamond(), schedule(drain), costs={name: COSTS[name] for name in "abc"})


def test_sequential_gives_up_with_a_reason():
    p = plan(chain(), Sequential(), Context({"batch_size": 16}))
    assert p.reason == "strategy Sequential" and [part for launch in p.launches for _, part in launch.calls] == [WHOLE] * 4


@pytest.mark.parametrize(
    ("into", "bounds"),
    [
        (3, [(0, 5), (5, 10), (10, 16)]),
        ([3, 5, 8], [(0, 3), (3, 8), (8, 16)]),
        ([3, -1], [(0, 3), (3, 16)]),
        ([0, 4, 16], [(0, 4), (4, 16)]),
        ([0.5, 0.25, 0.25], [(0, 8), (8, 12), (12, 16)]),
        ([0.5, 0.3, 0.2], [(0, 8), (8, 12), (12, 16)]),
    ],
)
def test_splits(into, bounds):
    p = run(lambda flow: (flow.split(into), drain(flow)))
    got = sorted(part.bounds(16) for launch in p.launches for op, part in launch.calls if op == "L0.a")
    assert got == bounds


def test_shares_do_not_read_the_batch_size_but_sizes_do():
    assert run(lambda flow: (flow.split([0.5, 0.5]), drain(flow))).context == ()
    assert run(lambda flow: (flow.split([8, 8]), drain(flow))).context == ("batch_size == 16",)


def test_different_splits_for_different_ops():
    def body(flow):
        flow.split(2)
        flow.split(4, ops="*.ar")
        drain(flow)

    p = run(body)
    assert sum(launch.calls[0][0] == "L0.ar" for launch in p.launches) == 4
    assert sum(launch.calls[0][0] == "L1.a" for launch in p.launches) == 2
    order = labels(p)
    # a part of L1.a needs the two parts of L0.ar that cover its rows
    assert order.index("L1.a 0/2") > max(order.index("L0.ar 0/4"), order.index("L0.ar 1/4"))


def test_one_op_over_several_parts():
    def body(flow):
        flow.split(3)
        a = flow.get_ready_ops()
        flow.execute(a[:2])
        flow.execute(a[2])
        drain(flow)

    assert labels(run(body))[:2] == ["L0.a 0:2/3", "L0.a 2/3"]


def test_all_parts_together_are_the_whole_batch():
    def body(flow):
        flow.split(2)
        flow.execute(flow.get_ready_ops())
        drain(flow)

    assert labels(run(body))[0] == "L0.a"


def fused(x):
    return x


def test_one_function_in_the_place_of_several():
    def body(flow):
        flow.split(2)
        for a in flow.get_ready_ops():
            (ar,) = a.users
            flow.execute([a, ar], replace=fused)
        drain(flow)

    p = run(body)
    assert p.launches[0].label == "tests.cpu.test_planner.fused[L0.a 0/2, L0.ar 0/2]"


def test_one_function_across_parts():
    def body(flow):
        flow.split(2)
        flow.execute(flow.get_ready_ops(), replace=fused)
        drain(flow)

    assert run(body).launches[0].calls == (("L0.a", Part(0, 1, 2)), ("L0.a", Part(1, 2, 2)))


def test_state_changes_after_its_last_reader_and_once():
    order = labels(run(lambda flow: (flow.split(2), drain(flow)), stateful()))
    assert order.count("count") == 1
    assert order.index("count") > max(order.index("read 0/2"), order.index("read 1/2"))


def test_a_part_reads_the_cache_after_its_own_write_only():
    def body(flow):
        flow.split(2)
        while ready := flow.get_ready_ops():
            flow.execute(min(ready, key=lambda r: r.part))

    order = labels(run(body, stateful()))
    assert order.index("look 0/2") < order.index("read 1/2")


# -- rejections, each beside what must pass above


def assert_rejects(error, function, flow=None, match=None):
    with pytest.raises(error, match=match) as caught:
        run(function, flow)
    return caught.value


def test_rejects_an_op_that_is_not_ready():
    def body(flow):
        flow.execute(flow.find("L1.a"))

    error = assert_rejects(errors.OpNotReady, body, match="'L1.a' is not ready")
    assert "L0.ar" in error.why and "test_planner.py" in error.where and 'flow.execute(flow.find("L1.a"))' in str(error)


def test_rejects_an_op_executed_twice():
    def body(flow):
        (a,) = flow.get_ready_ops()
        flow.execute(a)
        flow.execute(a)

    assert_rejects(errors.OpExecutedTwice, body, match="'L0.a' was executed twice")


def test_rejects_ops_never_executed():
    error = assert_rejects(errors.OpNeverExecuted, lambda flow: flow.execute(flow.get_ready_ops()[0]), match="3 of 4 ops left")
    assert "L0.ar" in error.why


def test_rejects_a_stream_declared_twice_with_different_settings():
    def body(flow):
        flow.stream("comm", priority=-1)
        flow.stream("comm", priority=0)

    assert_rejects(errors.StreamConflict, body, match="declared twice")
    run(lambda flow: (flow.stream("comm", priority=-1), flow.stream("comm", priority=-1), drain(flow)))


def test_rejects_a_stream_declared_after_its_use():
    def body(flow):
        flow.execute(flow.get_ready_ops()[0], stream="comm")
        flow.stream("comm", priority=-1)

    assert_rejects(errors.StreamConflict, body, match="after its first use")


@pytest.mark.parametrize("name", ["caller", "two words", "a@b", ""])
def test_rejects_names_that_are_no_stream(name):
    assert_rejects(errors.StreamConflict, lambda flow: flow.stream(name))


@pytest.mark.parametrize("into", [[3, 5], [8, 8, 8], [0, 8, 8, 16], [0.5, 0.4], [1.5, -0.5], [0, 20], 0, 2.5, None, [float("nan"), 0.5]])
def test_rejects_parts_that_do_not_tile(into):
    assert_rejects(errors.PartsDoNotTile, lambda flow: flow.split(into))


@pytest.mark.parametrize("into", [2.5, 0.5, None, "2", [[8, 8]], [None, -1]])
def test_rejects_a_split_into_what_is_no_number(into):
    error = assert_rejects(errors.PartsDoNotTile, lambda flow: flow.split(into), match="says no parts")
    assert "split(2)" in error.fix


@pytest.mark.parametrize("shares", [[float("nan"), 0.5], [float("inf"), 0.5], ["x", 0.5, -1]])
def test_rejects_shares_that_are_no_numbers(shares):
    assert_rejects(errors.PartsDoNotTile, lambda flow: flow.split(shares))


def test_any_whole_number_is_a_number_of_parts():
    class Two:
        def __index__(self):
            return 2

    for into, part in ((2, "1/2"), (Two(), "1/2"), ([Two(), -1], "2:16/16")):
        assert f"L0.a {part}" in labels(run(lambda flow: (flow.split(into), drain(flow))))


@pytest.mark.parametrize("settings", [{"priority": "high"}, {"priority": 0.5}, {"sms": 0}, {"sms": -1}, {"sms": 0.5}, {"sms": True}])
def test_rejects_settings_that_no_stream_has(settings):
    error = assert_rejects(errors.StreamConflict, lambda flow: flow.stream("comm", **settings), match="cannot have")
    assert str(next(iter(settings))) in error.what
    made = run(lambda flow: (flow.stream("comm", priority=-1, sms=1), drain(flow, "comm")))
    assert Plan.parse(str(made)) == made


@pytest.mark.parametrize("reason", ["", "  ", None, 3])
def test_rejects_giving_up_without_a_reason(reason):
    assert_rejects(errors.StrategyError, lambda flow: flow.sequential(reason), match="gives no reason")
    assert run(lambda flow: flow.sequential("not\n today")).reason == "not today"


@pytest.mark.parametrize("part", [-1, 2, 0.0, Part(0, 1, 3)])
def test_rejects_a_part_that_an_op_does_not_have(part):
    """Not the part of another op that lies beside it."""
    error = assert_rejects(errors.UnknownOp, lambda flow: (flow.split(2), flow.find("L0.ar", part)), match="has no part")
    assert error.why == "its parts are 0/2, 1/2"
    seen = []
    run(lambda flow: (flow.split(2), seen.extend(str(flow.find("L0.ar", part)) for part in (0, 1, Part(1, 2, 2))), drain(flow)))
    assert seen == ["L0.ar 0/2", "L0.ar 1/2", "L0.ar 1/2"]


def test_rejects_parts_that_are_not_adjacent():
    def body(flow):
        flow.split(3)
        a = flow.get_ready_ops()
        flow.execute([a[0], a[2]])

    assert_rejects(errors.PartsDoNotTile, body, match="cannot run once")


def test_rejects_a_split_of_an_op_that_mixes_the_batch():
    flow = chain(unsplittable=("L0.ar",))
    error = assert_rejects(errors.UnsplittableOp, lambda f: f.split(2, ops=["L0.ar"]), flow, match="'L0.ar' cannot be split")
    assert error.why == "mixes the batch"
    p = run(lambda f: (f.split(2), drain(f)), flow)
    assert "L0.ar" in labels(p) and "L0.a 0/2" in labels(p)


def test_rejects_a_strategy_that_makes_no_progress():
    def body(flow):
        while flow.get_ready_ops():
            pass

    assert "L0.a" in assert_rejects(errors.StrategyStuck, body).why


def test_rejects_a_split_after_the_first_look():
    assert_rejects(errors.SplitTooLate, lambda flow: (flow.get_ready_ops(), flow.split(2)))


def test_rejects_unknown_ops():
    assert_rejects(errors.UnknownOp, lambda flow: flow.split(2, ops="nope.*"), match="nope")
    assert_rejects(errors.UnknownOp, lambda flow: flow.execute(["L0.a"]), match="no ready op")
    assert_rejects(errors.UnknownOp, lambda flow: flow.execute([]), match="empty")
    assert_rejects(errors.UnknownOp, lambda flow: flow.execute("L0.a"), match="got 'L0.a', which")
    assert_rejects(errors.UnknownOp, lambda flow: flow.execute(flow.ops[0]), match="got the op 'L0.a'")
    assert_rejects(errors.UnknownOp, lambda flow: flow.execute(None), match="got None")
    assert_rejects(errors.UnknownOp, lambda flow: flow.split(2, ops=[3]), match="names no ops")


def test_after_takes_one_op_as_well_as_several():
    def body(several):
        def schedule(flow):
            (a,) = flow.get_ready_ops()
            flow.execute(a)
            (ar,) = flow.get_ready_ops()
            flow.execute(ar, after=[a] if several else a)
            drain(flow)

        return schedule

    assert [launch.after for launch in run(body(False)).launches] == [launch.after for launch in run(body(True)).launches]
    assert_rejects(errors.UnknownOp, lambda flow: flow.execute(flow.get_ready_ops()[0], after=["L0.a"]), match="no ready op")


def test_rejects_a_group_in_the_wrong_order():
    def body(flow):
        (a,) = flow.get_ready_ops()
        flow.execute([a.users[0], a], replace=fused)

    assert "producers come first" in assert_rejects(errors.OpNotReady, body).fix


def test_rejects_different_ops_without_a_replacement():
    flow = diamond()

    def body(f):
        f.execute(f.get_ready_ops()[0])
        f.execute(f.get_ready_ops())

    assert_rejects(errors.StrategyError, body, flow, match="different ops in one list")


def test_an_error_of_the_strategy_itself_names_its_line():
    error = assert_rejects(errors.StrategyRaised, lambda flow: flow.nonsense, match="AttributeError")
    assert "test_planner.py" in error.where


def test_an_error_behind_what_the_strategy_called_names_its_own_line():
    """Also where it comes from us, from Python's library, or from a predicate that we call."""
    import json

    for body in (lambda flow: flow.context.tags["phase"], lambda flow: flow.context.batch_size < "8",
                 lambda flow: json.loads("{"), lambda flow: flow.split(2, ops=lambda op: op.nme),
                 lambda flow: flow.execute(flow.get_ready_ops()[0], "comm", later=True)):  # fmt: skip
        error = assert_rejects(errors.StrategyRaised, body)
        assert "test_planner.py" in error.where, error


def test_an_error_of_a_strategy_inside_of_another_is_its_own():
    mixed = Mixed(schedule(drain), schedule(lambda flow: flow.nonsense))
    with pytest.raises(errors.StrategyRaised, match="strategy Test raised AttributeError") as caught:
        plan(chain(), mixed, Context({"batch_size": 16}))
    assert "test_planner.py" in caught.value.where


def test_who_forgets_ops_is_named():
    error = assert_rejects(errors.OpNeverExecuted, lambda flow: None)
    assert "test_planner.py" in error.where


def test_every_message_is_at_most_twelve_lines():
    error = assert_rejects(errors.OpNeverExecuted, lambda flow: None, chain(50))
    assert len(str(error).splitlines()) <= 12


# -- what an op waits for, and what it is to come after


def test_needs_are_what_is_not_executed_yet():
    seen = []

    def look(flow):
        flow.split(2)
        last = flow.find("d", 1)
        while ready := flow.get_ready_ops():
            seen.append((sorted(r.name for r in last.needs), last.is_executed))
            flow.execute(min(ready, key=lambda r: (r.depth, r.name, r.part)))
        seen.append((last.needs, last.is_executed))

    run(look, diamond())
    steps = [needs for needs, _ in seen]
    assert steps[0] == ["b", "c"] and steps.index(["c"]) < steps.index([]) and seen[-1] == ([], True) and not seen[-2][1]


def after_first(flow, is_after=True):
    """Two branches on two streams; the second one's op waits for the first one's, if it is to come after it."""
    a, b, c, d = (flow.find(name) for name in "abcd")
    flow.execute(a)
    flow.execute(b, stream="compute")
    flow.execute(c, stream="aux", after=[b] if is_after else [])
    flow.execute(d)


def waits(p, flow):
    """(launch, what its stream was made to wait for right before it) by labels."""
    recorded, found, open_waits, last = {}, {}, {}, {}
    for step in synchronise(flow, p).steps:
        if isinstance(step, Launch):
            found[step.label] = open_waits.pop(step.stream, [])
            last[step.stream] = step.label
        elif isinstance(step, Record):
            recorded[step.event] = last.get(step.stream)
        else:
            open_waits.setdefault(step.stream, []).append(recorded[step.event])
    return found


def test_after_makes_a_wait_and_nothing_else_does():
    assert waits(run(after_first, diamond()), diamond())["c"] == ["b"]
    assert waits(run(lambda flow: after_first(flow, False), diamond()), diamond())["c"] == ["a"]


def test_after_on_one_stream_needs_no_wait():
    def one_stream(flow):
        a, b, c, d = (flow.find(name) for name in "abcd")
        flow.execute(a)
        flow.execute(b)
        flow.execute(c, after=[a, b])
        flow.execute(d)

    assert waits(run(one_stream, diamond()), diamond()) == {"a": [None], "b": [], "c": [], "d": []}


def test_rejects_after_what_is_not_executed():
    def too_early(flow):
        flow.execute(flow.find("a"))
        flow.execute(flow.find("b"), after=[flow.find("c")])

    with pytest.raises(errors.OpNotReady, match="'c' is not executed") as error:
        run(too_early, diamond())
    assert "test_planner.py" in error.value.where


def test_rejects_after_itself():
    def itself(flow):
        flow.execute(flow.find("a"), after=[flow.find("a")])

    with pytest.raises(errors.OpNotReady, match="'a' is not executed"):
        run(itself, diamond())


def test_costs_are_known_before_the_split():
    seen = []

    def look(flow):
        seen.extend(flow.cost_of(op) for op in flow.ops)
        flow.split(2)
        drain(flow)

    plan(diamond(), schedule(look), costs=COSTS)
    assert seen == [COSTS[name] for name in "abcd"]
    seen.clear()
    run(look, diamond())
    assert seen == [None] * 4


# -- a schedule tried out, and repeated


def test_a_trial_is_repeated():
    def tried(flow):
        trial = flow.trial()
        TwoBatch().schedule(trial)
        flow.split_as(trial)
        for launch in trial.finish().launches:
            flow.repeat(launch, trial, "one")

    assert labels(run(tried)) == labels(run(TwoBatch().schedule))
    assert {launch.stream for launch in run(tried).launches} == {"one"}


def test_a_trial_changes_nothing():
    def tried(flow):
        NanoBatch(3).schedule(flow.trial())
        drain(flow)

    assert labels(run(tried)) == labels(run(drain))


def test_a_repeated_launch_comes_after_the_same():
    def tried(flow):
        trial = flow.trial()
        after_first(trial)
        for launch in trial.finish().launches:
            flow.repeat(launch, trial, launch.stream)

    assert run(tried, diamond()).launches[2].after == (1,)


# -- rows that tags count


def by_tag(*rows, ops=None):
    def body(flow):
        flow.split(list(rows), ops=ops)
        drain(flow)

    return body


def test_rows_that_a_tag_counts_are_no_part_of_the_plans_key():
    p = run(by_tag("num", -1), **{"tag.num": 5})
    assert p.rows == ("num", "-1") and labels(p)[:2] == ["L0.a 0/2", "L0.a 1/2"]
    assert p.context == ("tag.num != None", "tag.apart at num -1 == ''"), "any number, any batch size"
    assert "rows num -1" in str(p).splitlines() and Plan.parse(str(p)) == p and p.serialised().rows == p.rows


@pytest.mark.parametrize("rows, why", [
    (("other", -1), "the context has no tag other"), (("num", 3), "one part must be the rest"),
    ((-1, "num", -1), "one part must be the rest"),
])  # fmt: skip
def test_rejects_rows_that_do_not_tile(rows, why):
    with pytest.raises(errors.PartsDoNotTile) as error:
        run(by_tag(*rows), **{"tag.num": 5})
    assert error.value.why == why and error.value.where


def test_rejects_another_cut_beside_one_that_a_tag_gives():
    for first, second in ((["num", -1], 2), (2, ["num", -1]), (["num", -1], [-1, "num"])):
        with pytest.raises(errors.StrategyError, match="cuts in another way"):
            run(lambda flow: (flow.split(first, ops="L0.a"), flow.split(second, ops="L1.a")), **{"tag.num": 5})
    run(lambda flow: (flow.split(["num", -1], ops="L0.a"), flow.split(["num", -1], ops="L1.a"), drain(flow)), **{"tag.num": 5})


def test_a_constant_batch_has_no_rows_to_count():
    made = run(by_tag("num", -1, ops="L0.a"), replace(chain(), batch=(), symbols=()), **{"tag.num": 5})
    assert made.reason == CONSTANT_BATCH


def test_who_gives_up_late_gives_up_to_the_flow_as_it_is():
    def late(flow):
        flow.split(["num", -1])
        flow.get_ready_ops()
        flow.sequential("on second thoughts")

    flow = stateful()
    made = run(late, flow, **{"tag.num": 5, "tag.apart": ("*", (5,))})
    assert made.flow == flow.label and made.reason == "on second thoughts"
    assert run(by_tag("num", -1), flow, **{"tag.num": 5, "tag.apart": ("*", (5,))}).flow == replace(flow, apart="*").label != flow.label
