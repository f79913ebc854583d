"""Where a strategy does not pay or cannot work it falls to fewer parts or gives up, and says why; a wrong parameter is refused."""

import pytest

from dynaflow.errors import OptionError, StrategyRaised
from dynaflow.strategies import (
    CommOverlap,
    DualBatch,
    FusedGemm,
    Greedy,
    Mixed,
    NanoBatch,
    NanoFlow,
    Offload,
    PrefillDecode,
    SingleBatch,
    TokenWeave,
    TwoBatch,
)
from dynaflow.strategies.branches import Branches
from dynaflow.strategies.common import rows_of, stages, tokens_per_row, weight_ops
from dynaflow.testing.notation import flow_of
from tests.cpu.strategies.plans import chain, dense, fsdp, make, moe


@pytest.mark.parametrize(("strategy", "flow", "small", "large", "why"), [
    (DualBatch(100), moe(1), 99, 100, "fewer than 100 tokens"),
    (NanoFlow(min_tokens=30), dense(1), 59, 60, "fewer than 30 tokens in a part"),
    (CommOverlap(4, 50), dense(1), 99, 100, "no network op can be hidden"),
    (TokenWeave(16, 100), dense(1), 99, 100, "fewer than 100 tokens"),
    (TokenWeave(64, 0), dense(1), 127, 128, "two waves"),
    (DualBatch(0), moe(1), 1, 2, "a single row cannot be split"),
])  # fmt: skip
def test_small_batches_stay_in_one_piece(strategy, flow, small, large, why):
    assert why in make(flow, strategy, small).reason and len(make(flow, strategy, large).parts) >= 2


@pytest.mark.parametrize(("strategy", "flow", "why"), [
    (DualBatch(0), chain(), "no network op can be split"),
    (DualBatch(0), moe(1, "whole"), "no network op can be split"),
    (NanoFlow(min_tokens=1), chain(), "no network or memory op can be split"),
    (SingleBatch(), chain(), "no op can run beside a network op"),
    (SingleBatch(), dense(1), "no op can run beside a network op"),
    (SingleBatch(shared="*.nothing"), moe(1), "no op can run beside a network op and is named *.nothing"),
    (TokenWeave(1, 0), chain(), "no network op can be split, and no fused kernel"),
    (CommOverlap(4, 1), chain(), "no network op can be hidden"),
    (FusedGemm(2, 1), dense(1), "no product's rows are known"),
    (PrefillDecode(5), chain(), "no op that can be split is named"),
    (PrefillDecode(), dense(1), "the context has no tag num_prefill"),
    (PrefillDecode(0), dense(1), "all rows are in one phase"),
    (PrefillDecode(64), dense(1), "all rows are in one phase"),
])  # fmt: skip
def test_gives_up_with_a_reason(strategy, flow, why):
    assert why in make(flow, strategy).reason


@pytest.mark.parametrize("strategy", [
    DualBatch(0), NanoFlow(min_tokens=1), CommOverlap(4, 1), TokenWeave(1, 0), Mixed(TwoBatch(), Branches()),
], ids=lambda s: type(s).__name__)  # fmt: skip
@pytest.mark.parametrize("batch_size", [2, 3, 5, 16])
def test_every_part_has_a_row(strategy, batch_size):
    for part in make(dense(1), strategy, batch_size).parts:
        lo, hi = part.bounds(batch_size)
        assert lo < hi


def test_dual_batch_splits_fewer_tokens_where_it_decodes():
    assert make(moe(1), DualBatch(), 64).reason and not make(moe(1), DualBatch(), 64, phase="decode").reason


def test_nano_flow_gives_attention_a_lane_where_it_reads_a_cache():
    cases = {("prefill", None): False, ("decode", None): True, ("mixed", None): True, ("mixed", "prefill"): False,
             ("mixed", "decode"): True, ("decode", "prefill"): True}  # fmt: skip
    for (phase, mostly), has_lane in cases.items():
        made = make(dense(1), NanoFlow(min_tokens=1), 64, phase=phase, **({"mostly": mostly} if mostly else {}))
        assert not made.reason
        assert any(launch.stream == "memory" for launch in made.launches) == has_lane, (phase, mostly)


def test_nano_flow_cuts_less_before_it_gives_up():
    made = {size: make(dense(1), NanoFlow(min_tokens=30), size, phase="decode") for size in (100, 160)}
    parts = {size: {launch.calls[0][1] for launch in plan.launches} for size, plan in made.items()}
    assert len(parts[100]) == 2 and len(parts[160]) == 6


def test_a_plan_serves_every_size_that_looks_the_same():
    """Thresholds are comparisons; only a cut at given rows needs the exact size."""
    assert make(moe(1), DualBatch(100), 150).context == ("tag.phase == None", "batch_size >= 100")
    assert "batch_size == 90" in make(dense(1), TokenWeave(16, 0), 90).context


def test_fused_gemm_takes_fewer_chunks_of_fewer_tokens():
    assert "fewer than two chunks" in make(dense(1), FusedGemm(4, 40), 64).reason


@pytest.mark.parametrize(("make_one", "why"), [
    (lambda: NanoFlow(compute=(0.5, 0.6)), "add up to 1.1"),
    (lambda: NanoFlow(memory=(1.5, -0.5)), "add up to 1"),
    (lambda: NanoFlow(sms={"tensor": 3}), "no stream 'tensor'"),
    (lambda: NanoFlow(sms={"memory": 0}), "memory=0"),
    (lambda: DualBatch(-1), "min_tokens=-1"),
    (lambda: DualBatch(lead=0), "lead=0"),
    (lambda: DualBatch(comm_sms=0), "comm_sms=0"),
    (lambda: SingleBatch(max_aux_tokens=-3), "max_aux_tokens=-3"),
    (lambda: CommOverlap(0), "max_parts=0"),
    (lambda: CommOverlap(ahead=0), "ahead=0"),
    (lambda: CommOverlap(min_part_tokens=1.5), "min_part_tokens=1.5"),
    (lambda: TokenWeave(wave=0), "wave=0"),
    (lambda: TokenWeave(num_ctas=0), "num_ctas=0"),
    (lambda: FusedGemm(1), "num_chunks=1"),
    (lambda: PrefillDecode(-1), "num_prefill=-1"),
    (lambda: PrefillDecode(decode_sms=True), "decode_sms=True"),
    (lambda: Mixed(TwoBatch(), TwoBatch), "inner"),
    (lambda: NanoFlow(compute="half"), "compute='half'"),
    (lambda: NanoFlow(sms=["memory"]), "sms=['memory']"),
    (lambda: NanoBatch(0), "num_parts=0"),
    (lambda: NanoBatch(2.5), "num_parts=2.5"),
    (lambda: TwoBatch("8"), "min_batch_size='8'"),
    (lambda: Branches(0), "num_streams=0"),
    (lambda: Branches(slack=7), "slack=7"),
    (lambda: Greedy(0), "num_streams=0"),
    (lambda: Offload("1 GiB"), "budget='1 GiB'"),
    (lambda: Offload(float("nan")), "budget=nan"),
])  # fmt: skip
def test_rejects_a_wrong_parameter(make_one, why):
    with pytest.raises(OptionError) as error:
        make_one()
    assert why in str(error.value) and error.value.fix


def test_accepts_the_least_parameters():
    assert not make(dense(1), NanoBatch(1, 0)).parts and len(make(dense(1), TwoBatch(0), 2).parts) == 2
    assert make(chain(), Branches(1, slack=0)).launches == make(chain(), Greedy(1)).launches and Offload(1.0).budget == 1


@pytest.mark.parametrize("at", [65, -2, "three"])
def test_rejects_a_boundary_outside_of_the_batch(at):
    with pytest.raises(OptionError, match="num_prefill"):
        make(dense(1), PrefillDecode(), 64, num_prefill=at)


def test_a_tag_may_have_another_name():
    assert make(dense(1), PrefillDecode(tag="cut"), 64, cut=3).rows == ("cut", "-1")


def test_phases_that_no_one_cut_parts():
    assert "no one cut parts them" in make(dense(1), PrefillDecode(), 64, num_prefill=3, first="neither").reason
    with pytest.raises(OptionError, match="the tag first is 'decoding'"):
        make(dense(1), PrefillDecode(), 64, num_prefill=3, first="decoding")


# -- what strategies ask of a flow


def test_tokens_per_row_are_read_from_what_is_sent():
    from dataclasses import replace

    flow = dense(1)
    assert tokens_per_row(flow) == 1 and rows_of(flow, 7) == 7 and rows_of(flow, 0) == 1
    wide = tuple(replace(v, shape=("s0", "16", "4")) for v in flow.values)
    assert tokens_per_row(replace(flow, values=wide)) == 16 and rows_of(replace(flow, values=wide), 100) == 7


def test_stages_count_network_ops_on_the_way_but_not_weights():
    assert stages(moe(1)) == {"L0.attn": 0, "L0.dispatch": 0, "L0.shared": 0, "L0.experts": 1, "L0.combine": 1, "L0.add": 2}
    assert set(stages(fsdp(3)).values()) == {0}


def test_weight_ops_depend_on_parameters_alone():
    flow = flow_of("""
        input x
        param w state
        cast memory whole: w -> v^
        gather network whole: v -> W^
        mm: x W -> y
        noise whole rng: w -> n^
        add: y n -> z
        output z""")  # fmt: skip
    assert weight_ops(flow) == {"cast", "gather"}


def test_a_strategy_that_raises_is_named():
    class Broken(Branches):
        def schedule(self, flow):
            raise KeyError("x")

    with pytest.raises(StrategyRaised, match="raised KeyError"):
        make(dense(1), Mixed(TwoBatch(), Broken()))
