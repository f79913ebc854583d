from pathlib import Path

import pytest

from dynaflow.ir import Plan
from dynaflow.view.diff import summary

GOLDEN = Path(__file__).parents[2] / "golden"
TEXT = (GOLDEN / "two_batch.plan").read_text()
BASE = Plan.parse(TEXT)


def test_equal_plans():
    assert BASE.diff(Plan.parse(TEXT)) == "the plans are equal\n"


def test_diff_is_unified_under_a_summary():
    other = Plan.parse(TEXT.replace("launch model.layers.0.ar 0/2 @comm", "launch model.layers.0.ar 0/2 @compute"))
    lines = BASE.diff(other).splitlines()
    assert lines[0] == "1 launch moved (model.layers.0.ar 0/2: comm -> compute)"
    assert lines[1:3] == ["--- llama.3f2a90b1", "+++ llama.3f2a90b1"]
    assert "-launch model.layers.0.ar 0/2 @comm" in lines
    assert "+launch model.layers.0.ar 0/2 @compute" in lines


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("launch model.embed @compute\n", "", "1 launch removed (model.embed)"),
        ("launch model.embed @compute\n", "launch model.embed @compute\nlaunch model.pos @compute\n", "1 launch added (model.pos)"),
        ("wait e3 @compute\n", "", "waits 6 -> 5"),
        ("wait e3 @compute\n", "wait e2 @compute\n", "other waits"),
        ("sms=16", "sms=8", "streams +comm -comm"),
        (" model.layers.1.attn:0", "\nslot 1 model.layers.1.attn:0", "memory slots 1 -> 2"),
        (">= 64", ">= 32", "another context"),
        ("slot 0", "rows num_prefill -1\nslot 0", "other rows"),
        ("plan llama.3f2a90b1", "plan llama.00000000", "another flow (llama.3f2a90b1 -> llama.00000000)"),
        ("record e4 @compute\nwait e4", "record e5 @compute\nwait e5", "other waits"),
    ],
)
def test_summary(old, new, told):
    assert summary(BASE, Plan.parse(TEXT.replace(old, new))) == told


def test_summary_of_fused_launches():
    fused = TEXT.replace("launch model.embed @compute\n", "").replace("model.layers.0.attn 0/2", "[model.embed, model.layers.0.attn]", 1)
    alone = TEXT.replace("launch model.layers.0.attn 0/2", "launch model.layers.0.attn", 1)
    assert summary(Plan.parse(alone), Plan.parse(fused)) == "2 launches regrouped into 1 (model.embed..model.layers.0.attn)"
    other = fused.replace("slot 0", "loose a\nslot 0").replace("[model.embed, model", "[model.embed, more, model")
    told = "1 launch added (model.embed..model.layers.0.attn); 1 launch removed (model.embed..model.layers.0.attn); loose values 0 -> 1"
    assert summary(Plan.parse(fused), Plan.parse(other)) == told


def test_summary_of_another_order():
    first, second = "launch model.layers.0.attn 0/2 @compute", "launch model.layers.0.attn 1/2 @compute"
    swapped = TEXT.replace(first, "<first>").replace(second, first).replace("<first>", second)
    assert summary(BASE, Plan.parse(swapped)) == "launches in another order"


def test_summary_names_two_of_many():
    told = summary(BASE.serialised(), BASE)
    assert told.startswith("8 launches moved (model.embed: caller -> compute, model.layers.0.attn 0/2: caller -> compute, ...)")
