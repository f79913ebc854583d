"""Each strategy's plan has the overlap that its lane diagram claims: on toy flows, which launches no wait orders."""

import pytest

from dynaflow.context import Context
from dynaflow.costs import Cost
from dynaflow.planner import run_strategy
from dynaflow.simulate import Device, simulate
from dynaflow.strategies import (
    CommOverlap,
    DualBatch,
    Mixed,
    NanoBatch,
    NanoFlow,
    PrefillDecode,
    Sequential,
    SingleBatch,
    TokenWeave,
    TwoBatch,
)
from dynaflow.strategies.branches import Branches
from dynaflow.testing.notation import flow_of
from tests.cpu.flows import diamond
from tests.cpu.strategies.plans import beside, dense, fsdp, labels, layers, make, moe

FREE = Device(0.0, 0.0)


def network_costs(flow, compute_us=10.0, network_us=10.0):
    """Compute fills the device, the network leaves it to others."""
    return {op.name: Cost(network_us, 0.0) if op.kind == "network" else Cost(compute_us, 1.0) for op in flow.ops}


def us(flow, strategy, costs, **context):
    return simulate(flow, make(flow, strategy, costs=None, **context), costs, FREE)


# -- DualBatch


def test_dual_batch_takes_turns():
    made = make(moe(1), DualBatch(0))
    assert labels(made, "comm") == ["L0.dispatch 0/2", "L0.dispatch 1/2", "L0.combine 0/2", "L0.combine 1/2"]
    assert labels(made, "compute") == [f"L0.{op} {k}/2" for op, k in [
        ("attn", 0), ("shared", 0), ("attn", 1), ("shared", 1), ("experts", 0), ("experts", 1), ("add", 0), ("add", 1)]]  # fmt: skip
    assert beside(made) >= {
        ("L0.dispatch 0/2", "L0.attn 1/2"), ("L0.dispatch 1/2", "L0.experts 0/2"), ("L0.combine 0/2", "L0.experts 1/2")}  # fmt: skip


def test_dual_batch_the_end_of_a_layer_meets_the_next_one():
    assert ("L0.combine 1/2", "L1.attn 0/2") in beside(make(moe(2), DualBatch(0)))


def test_dual_batch_with_a_lead_of_two_hides_the_network_behind_attention():
    made = make(moe(3), DualBatch(0, lead=2))
    assert labels(made, "compute")[:3] == ["L0.attn 0/2", "L0.shared 0/2", "L0.experts 0/2"], "warm-up: the first part alone"
    assert labels(made, "compute")[-2:] == ["L2.experts 1/2", "L2.add 1/2"], "drain: the second part alone"
    pairs = beside(made)
    assert {("L0.combine 0/2", "L0.attn 1/2"), ("L0.dispatch 1/2", "L1.attn 0/2"), ("L1.dispatch 0/2", "L0.experts 1/2"),
            ("L0.combine 1/2", "L1.experts 0/2")} <= pairs  # fmt: skip
    assert ("L0.dispatch 0/2", "L0.attn 1/2") not in beside(make(moe(3), DualBatch(0, lead=2))), "that is the other order"


@pytest.mark.parametrize("lead", [1, 2])
def test_dual_batch_hides_the_network(lead):
    """10 layers whose network takes as long as computing: all but the ends is hidden."""
    flow = moe(10)
    costs = network_costs(flow)
    costs.update({op.name: Cost(0.0, 0.0) for op in flow.ops if op.name.endswith(("shared", "add"))})
    plain, made = us(flow, Sequential(), costs), us(flow, DualBatch(0, lead=lead), costs)
    assert plain.total_us == 400 and made.total_us <= 220 and made.hidden_share("comm") > 0.9


# -- SingleBatch


def test_single_batch_runs_shared_experts_beside_the_rest():
    made = make(moe(2), SingleBatch())
    assert labels(made, "aux") == ["L0.shared", "L1.shared"] and labels(made, "comm")[:2] == ["L0.dispatch", "L0.combine"]
    assert {("L0.shared", f"L0.{op}") for op in ("dispatch", "experts", "combine")} <= beside(made)
    assert not made.parts


def test_single_batch_keeps_a_full_device_to_one_stream():
    """With many tokens shared experts run beside the dispatch, not beside the experts."""
    made = make(moe(2), SingleBatch(max_aux_tokens=32))
    assert labels(made, "compute")[:3] == ["L0.attn", "L0.shared", "L0.experts"]
    assert ("L0.shared", "L0.dispatch") in beside(made) and ("L0.shared", "L0.experts") not in beside(made)


def test_single_batch_takes_names():
    flow = flow_of("input x\na: x -> y\nar network: y -> z\nb: y -> u\nc: y -> v\nd: z u v -> w\noutput w")
    assert labels(make(flow, SingleBatch()), "aux") == ["b", "c"]
    assert labels(make(flow, SingleBatch(shared="c")), "aux") == ["c"]


# -- NanoFlow


def test_nano_flow_has_three_lanes_and_two_cuts():
    uneven = {"compute": (0.375, 0.625), "memory": (0.1875, 0.1875, 0.3125, 0.3125)}
    assert not labels(make(dense(2), NanoFlow(min_tokens=1, **uneven)), "memory"), "only where it reads a cache"
    made = make(dense(2), NanoFlow(min_tokens=1, **uneven), phase="decode")
    assert labels(made, "memory")[:4] == [f"L0.attn {rows}/16" for rows in ("0:3", "3:6", "6:11", "11:16")]
    assert labels(made, "network")[:2] == ["L0.ar 0:3/8", "L0.ar 3:8/8"]
    assert labels(made, "compute")[:6] == [f"L0.{op} {rows}/8" for op in ("qkv", "o", "mlp") for rows in ("0:3", "3:8")]
    pairs = beside(made)
    assert {("L0.attn 0:3/16", "L0.qkv 3:8/8"), ("L0.attn 6:11/16", "L0.o 0:3/8"), ("L0.ar 0:3/8", "L0.o 3:8/8"),
            ("L0.ar 0:3/8", "L0.attn 11:16/16"), ("L0.ar 3:8/8", "L0.mlp 0:3/8")} <= pairs  # fmt: skip


def test_nano_flow_knows_what_reads_a_cache():
    """Products over a cache that has another name than attention. Who writes it is none of them, nor who reads what nobody changes."""
    text = """
        input x
        input keys
        param w state
        kv: x keys! -> k
        q: x w -> q
        scores: q keys -> s
        o: s k -> o
        ar network group:tp: o -> y
        output y"""
    decode = {"phase": "decode"}
    assert labels(make(flow_of(text), NanoFlow(min_tokens=1), **decode), "memory") == [f"scores {k}/4" for k in range(4)]
    assert not labels(make(flow_of(text), NanoFlow(min_tokens=1)), "memory"), "a prompt: its products are the cache's"
    assert not labels(make(flow_of(text.replace("keys!", "keys")), NanoFlow(min_tokens=1), **decode), "memory"), "it is no cache"
    assert labels(make(flow_of(text), NanoFlow(min_tokens=1, memory_ops="q"), **decode), "memory") == [f"q {k}/4" for k in range(4)]


def test_nano_flow_gives_lanes_their_sms():
    made = make(dense(1), NanoFlow(min_tokens=1, sms={"network": 16, "memory": 32}), phase="decode")
    assert {s.name: s.sms for s in made.streams} == {"compute": None, "memory": 32, "network": 16}


def test_nano_flow_with_a_lead_runs_one_parts_products_beside_the_others_attention():
    made = make(dense(2), NanoFlow(min_tokens=1, memory=(0.5, 0.5), lead=2), phase="decode")
    ahead = {("L0.mlp 0/2", "L0.attn 1/2"), ("L0.mlp 1/2", "L1.attn 0/2"), ("L1.mlp 0/2", "L1.attn 1/2")}
    assert ahead <= beside(made)
    assert labels(made, "compute")[:4] == ["L0.qkv 0/2", "L0.o 0/2", "L0.qkv 1/2", "L0.mlp 0/2"], "warm-up: the first part alone"
    assert not ahead <= beside(make(dense(2), NanoFlow(min_tokens=1, memory=(0.5, 0.5)), phase="decode")), "that is the other order"


@pytest.mark.parametrize(("lead", "least", "most"), [(None, 0.4, 0.7), (1, 0.4, 0.7), (2, 0.9, 1.0)])
def test_nano_flow_hides_attention_too(lead, least, most):
    """Attention leaves half the device to products: beside them it is free. With parts in step, the products wait for it."""
    flow = dense(8)
    took = {"qkv": 10.0, "attn": 20.0, "o": 5.0, "ar": 8.0, "mlp": 30.0, "ar2": 8.0}
    costs = {op.name: Cost(took[op.name.split(".")[1]], 0.0 if op.kind == "network" else 0.5) for op in flow.ops}
    made = us(flow, NanoFlow(min_tokens=1, lead=lead), costs, phase="decode")
    assert made.total_us < 0.9 * us(flow, TwoBatch(), costs).total_us and least < made.hidden_share("memory") < most


# -- CommOverlap


def test_comm_overlap_in_parts():
    made = make(dense(2), CommOverlap(2, 1))
    assert {("L0.ar 0/2", "L0.qkv 1/2"), ("L0.ar 1/2", "L0.mlp 0/2"), ("L0.ar2 1/2", "L1.qkv 0/2")} <= beside(made)


def test_comm_overlap_without_a_split():
    """Ulysses, where the all-to-all exchanges rows: q on its way while k is computed."""
    flow = layers(1, """
        q: {x} -> q
        a2a network whole: q -> qa
        k: {x} -> k
        a2a.1 network whole: k -> ka
        v: {x} -> v
        a2a.2 network whole: v -> va
        attn: qa ka va -> {y}""")  # fmt: skip
    made = make(flow, CommOverlap(4, 1))
    assert not made.parts and {("a2a", "k"), ("a2a", "v"), ("a2a.1", "v")} <= beside(made)


@pytest.mark.parametrize("ahead", [1, 2, 3])
@pytest.mark.parametrize("strategy", [CommOverlap, lambda **kw: CommOverlap(2, 1, **kw)])
def test_comm_overlap_gathers_weights_ahead_and_no_further(ahead, strategy):
    made = make(fsdp(6), strategy(ahead=ahead))
    waiting, most = {}, 0
    num_parts = max(1, len(made.parts))
    for label in labels(made):
        layer, op = label.split(" ")[0].split(".")
        if op == "gather":
            waiting[layer] = num_parts
            most = max(most, len(waiting))
        else:
            waiting[layer] -= 1
            if not waiting[layer]:
                del waiting[layer]
    assert most == ahead
    pairs, first = beside(made), labels(made, "compute")[0]
    assert [(f"L{k}.gather", first) in pairs for k in range(1, 4)] == [k < ahead for k in range(1, 4)], "beside the first product"
    slots = dict(made.slots)
    assert len({slots[f"W{i}"] for i in range(6)}) == ahead, "memory for so many weights, not for all"


def test_comm_overlap_gathers_in_the_order_of_use():
    """What comes last in the program's list of inputs may be needed first."""
    assert labels(make(fsdp(4), CommOverlap()), "prefetch") == [f"L{i}.gather" for i in range(4)]


def test_comm_overlap_takes_as_many_parts_as_pay():
    flow = dense(4)
    assert len(make(flow, CommOverlap(8, 16), 64).parts) == 4, "16 tokens in each"
    assert len(make(flow, CommOverlap(8, 16), 40).parts) == 2

    def parts(compute_us, network_us):
        costs = network_costs(flow, compute_us, network_us)
        return len(make(flow, CommOverlap(8, 1), 64, costs=costs).parts)

    assert parts(100.0, 100.0) > parts(20.0, 20.0) > 0, "launches cost"
    assert parts(1.0, 1.0) == 0


@pytest.mark.parametrize("strategy, batch_size, costs, wanted", [
    (CommOverlap(min_part_tokens=16), 64, None, [2, 4, 3, 1]),
    (CommOverlap(min_part_tokens=16), 63, None, [2, 3, 1]),
    (CommOverlap(min_part_tokens=16), 47, None, [2, 1]),
    (CommOverlap(min_part_tokens=16), 31, None, [1]),
    (CommOverlap(3, 16), 64, None, [3, 2, 1]),
    (CommOverlap(min_part_tokens=16), 64, 1000.0, [4, 3, 2, 1]),
    (CommOverlap(), 3, 1000.0, [3, 2, 1]),
    (CommOverlap(3, 16), 64, 1000.0, [3, 2, 1]),
    (CommOverlap(), 64, 1.0, [1, 4, 3, 2]),
])  # fmt: skip
def test_comm_overlap_measures_other_numbers_of_parts(strategy, batch_size, costs, wanted):
    """The first is what runs unmeasured: two, or as many as are said or estimated."""
    flow = dense(4)
    facts = {"batch_size": batch_size, "device": "cpu"}
    known = costs and network_costs(flow, costs, costs)
    first = run_strategy(flow, strategy, Context(facts), costs=known)
    (num_options,) = first.num_options
    made = [run_strategy(flow, strategy, Context(facts), costs=known, chosen=(k,)).finish() for k in range(num_options)]
    assert list(dict.fromkeys(max(len(plan.parts), 1) for plan in made)) == wanted, "those that do not fit come to others"
    assert [bool(plan.reason) for plan in made] == [not plan.parts for plan in made]
    context = Context(facts)
    run_strategy(flow, strategy, context, costs=known)
    assert len(context.looks) <= 2, "what is not taken is not looked at: every look may be another plan"


def test_comm_overlap_hides_the_network():
    flow = dense(10)
    costs = network_costs(flow, 10.0, 10.0)
    plain, made = us(flow, Sequential(), costs), us(flow, CommOverlap(2, 1), costs)
    assert plain.total_us == 600 and made.total_us <= 410 and made.hidden_share("comm") > 0.9


# -- TokenWeave without functions behind the flow: the split alone (with them: test_replacements.py)


def test_token_weave_cuts_at_a_wave():
    made = make(dense(1), TokenWeave(wave=16, min_tokens=0), 90)
    assert made.parts[0].bounds(90) == (0, 32) and made.parts[1].bounds(90) == (32, 90)
    assert ("L0.ar 0:32/90", "L0.qkv 32:90/90") in beside(made)


# -- PrefillDecode


def test_prefill_beside_decode():
    for first, rows in ((None, ("num_prefill", "-1")), ("prefill", ("num_prefill", "-1")), ("decode", ("-1", "num_prefill"))):
        made = make(dense(2), PrefillDecode(), 64, num_prefill=5, first=first)
        for stream, part in zip(("prefill", "decode"), ("1/2", "0/2") if first == "decode" else ("0/2", "1/2")):
            assert labels(made, stream) == [f"L{i}.attn {part}" for i in range(2)]
        assert made.rows == rows and ("L0.attn 0/2", "L0.attn 1/2") in beside(made)
        assert labels(made, "compute")[:3] == ["L0.qkv", "L0.o", "L0.ar"], "all else over the whole batch"


def test_phases_of_an_inner_strategy():
    made = make(dense(2), Mixed(PrefillDecode(), Branches(2)), 64, num_prefill=5)
    assert made.rows == ("num_prefill", "-1") and ("L0.attn 0/2", "L0.attn 1/2") in beside(made)


def test_a_number_of_rows_that_prefill_may_be_a_parameter():
    for first, rows in (("prefill", ["0:5", "5:64"]), ("decode", ["0:59", "59:64"])):
        made = make(dense(1), PrefillDecode(5), 64, first=first)
        assert sorted(labels(made, "prefill") + labels(made, "decode")) == [f"L0.attn {part}/64" for part in rows]


def test_prefill_and_decode_have_their_sms():
    made = make(dense(1), PrefillDecode(4, prefill_sms=96, decode_sms=32))
    assert {s.name: (s.sms, s.priority) for s in made.streams if s.sms} == {"prefill": (96, 0), "decode": (32, -1)}


# -- Mixed


def branching(num_layers):
    return layers(num_layers, """
        L{i}.a: {x} -> a{i}
        L{i}.b: a{i} -> b{i}
        L{i}.c: a{i} -> c{i}
        L{i}.d: b{i} c{i} -> d{i}
        L{i}.ar network group:tp: d{i} -> {y}""")  # fmt: skip


def test_branches_inside_of_the_parts_of_two_batch():
    made = make(branching(2), Mixed(TwoBatch(), Branches(2)))
    assert {launch.stream for launch in made.launches} == {"compute", "compute.aux0", "comm"}
    pairs = beside(made)
    assert {("L0.b 0/2", "L0.c 0/2"), ("L0.b 1/2", "L0.c 1/2"), ("L1.b 0/2", "L1.c 0/2")} <= pairs, "branches"
    assert {("L0.ar 0/2", "L0.a 1/2"), ("L0.ar 1/2", "L1.a 0/2")} <= pairs, "and parts"
    alone = beside(make(branching(2), TwoBatch()))
    assert ("L0.b 0/2", "L0.c 0/2") not in alone and ("L0.ar 0/2", "L0.a 1/2") in alone


def test_mixed_takes_both_gains():
    flow = branching(8)
    costs = {op.name: Cost(10.0, 0.0 if op.kind == "network" else 0.5) for op in flow.ops}
    both = us(flow, Mixed(TwoBatch(), Branches(2)), costs).total_us
    assert both < us(flow, TwoBatch(), costs).total_us and both < us(flow, Branches(2), costs).total_us


def test_mixed_with_an_inner_one_that_gives_up_is_the_outer_one():
    plain, mixed = make(branching(2), TwoBatch()), make(branching(2), Mixed(TwoBatch(), Sequential()))
    assert sorted(labels(plain)) == sorted(labels(mixed)) and {s.name for s in mixed.streams} == {"compute", "comm"}
    assert ("L0.ar 0/2", "L0.a 1/2") in beside(mixed)


def test_mixed_with_an_outer_one_that_gives_up_is_the_inner_one():
    assert make(diamond(), Mixed(TwoBatch(100), Branches(2)), 8).launches == make(diamond(), Branches(2), 8).launches


def test_mixed_three_deep():
    made = make(branching(2), Mixed(TwoBatch(), Mixed(Branches(2), Sequential())))
    assert ("L0.b 0/2", "L0.c 0/2") in beside(made)


def test_rejects_an_inner_strategy_that_splits():
    from dynaflow.errors import StrategyError

    with pytest.raises(StrategyError, match="splits a stretch") as error:
        make(branching(2), Mixed(TwoBatch(), NanoBatch(2)))
    assert "outside" in error.value.fix
