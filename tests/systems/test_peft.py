"""PEFT: unmerged LoRA adapters, several at once, beside their base layers."""

import pytest
import torch

pytest.importorskip("peft")

import dynaflow as df
from benchmarks.system_models import llama, lora
from dynaflow import errors

CONSTANT = "there is no batch to split: its size is a constant of the graph"


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def tokens(batch_size=4):
    return torch.randint(1, 60, (batch_size, 7), generator=torch.Generator().manual_seed(batch_size))


def both(num_adapters=2, **options):
    """A plain model, and one under a strategy."""
    return lora(num_adapters=num_adapters), df.optimize(lora(num_adapters=num_adapters), **options)


def assert_same(plain, fast, x=None, **arguments):
    x = tokens() if x is None else x
    torch.testing.assert_close(fast(input_ids=x, **arguments).logits, plain(input_ids=x, **arguments).logits)


@pytest.mark.parametrize("strategy", [df.TwoBatch(), df.Branches(3)], ids=lambda s: type(s).__name__)
def test_adapters_come_and_go(strategy):
    plain, fast = both(strategy=strategy, strict=True)
    assert_same(plain, fast)
    for model in (plain, fast):
        model.set_adapter("a1")
    assert_same(plain, fast)
    for model in (plain, fast):
        model.base_model.set_adapter(["a0", "a1"])
    assert_same(plain, fast)
    assert_same(plain, fast, tokens(6))
    with plain.disable_adapter(), fast.disable_adapter():
        assert_same(plain, fast)
        assert_same(llama(), fast)
    stats = df.stats(fast)
    assert stats.planned_calls == stats.calls == 6 and stats.split_calls == (6 if isinstance(strategy, df.TwoBatch) else 0), stats


def test_adapters_run_beside_their_base_layers():
    """Both adapters and the base layer of q_proj are independent ops, and `Branches` puts them on streams of their own."""
    model = lora()
    model.base_model.set_adapter(["a0", "a1"])
    plan = df.explain(model.get_base_model(), {"input_ids": tokens()}, strategy=df.Branches(6)).plan
    stream = {name: launch.stream for launch in plan.launches for name, _ in launch.calls}
    layer = "model.layers.0.self_attn.q_proj"
    assert len({stream[f"{layer}.{name}"] for name in ("base_layer", "lora_A.a0", "lora_A.a1")}) == 3


def test_generate():
    plain, fast = both(strategy=df.TwoBatch(), strict=True)
    settings = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    for adapter in ("a0", "a1"):
        plain.set_adapter(adapter)
        fast.set_adapter(adapter)
        assert torch.equal(fast.generate(input_ids=tokens(), **settings), plain.generate(input_ids=tokens(), **settings))
    assert df.stats(fast).split_calls == df.stats(fast).calls == 10


def test_many_adapters_of_a_model_that_generates():
    """Four adapters, with three kinds of steps each: more captures than Dynamo makes of a function by itself."""
    plain, fast = both(4, strategy=df.TwoBatch(), strict=True)
    settings = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    for adapter in ("a0", "a1", "a2", "a3", "a0"):
        plain.set_adapter(adapter)
        fast.set_adapter(adapter)
        assert torch.equal(fast.generate(input_ids=tokens(), **settings), plain.generate(input_ids=tokens(), **settings))
    stats = df.stats(fast)
    assert stats.captures > 8 and stats.split_calls == stats.calls == 20


def test_an_adapter_that_is_added_later_and_one_that_is_merged():
    from peft import LoraConfig

    plain, fast = both(1, strategy=df.TwoBatch(), strict=True)
    assert_same(plain, fast)
    for model in (plain, fast):
        torch.manual_seed(5)
        model.add_adapter("late", LoraConfig(r=3, target_modules=["up_proj"], init_lora_weights=False))
        model.set_adapter("late")
    assert_same(plain, fast)
    for model in (plain, fast):
        model.merge_adapter()
    assert_same(plain, fast)
    assert df.stats(fast).split_calls == 3


@pytest.mark.parametrize("is_padded", [False, True])
def test_another_adapter_per_row(is_padded):
    """Which rows go to which adapter is a list of Python's: the batch size is a constant, and the sequential graph runs."""
    plain, fast = both(3, strategy=df.TwoBatch())
    masked = {"attention_mask": (torch.arange(7) > 2).long().expand(4, 7).clone()} if is_padded else {}
    for names in (["a0", "a1", "__base__", "a2"], ["a1", "a1", "__base__", "a0"]):
        assert_same(plain, fast, adapter_names=names, **masked)
    assert df.stats(fast).fallbacks == {CONSTANT: 2} and not df.stats(fast).split_calls
    assert_same(plain, fast, **masked)  # and without names it is split
    assert df.stats(fast).split_calls == 1


def test_training_adapters():
    with torch.enable_grad():
        grads = []
        for model in both(2, strategy=df.TwoBatch()):
            model.train()(input_ids=tokens(), labels=tokens()).loss.backward()
            grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert grads[0] and grads[0].keys() == grads[1].keys()
    torch.testing.assert_close(grads[1], grads[0])


def test_restore():
    plain, fast = both(strategy=df.TwoBatch())
    df.restore(fast)
    assert "forward" not in vars(fast.get_base_model())
    assert_same(plain, fast)


def test_a_model_whose_adapters_were_merged_for_good_is_still_ours():
    """PEFT gives back the base model, which is compiled; its wrapper may be gone."""
    model = df.optimize(lora(num_adapters=1), strategy=df.TwoBatch(), strict=True).merge_and_unload()
    plain = lora(num_adapters=1).merge_and_unload()
    assert_same(plain, model)
    assert df.stats(model).split_calls == 1
    with pytest.raises(errors.OptionError, match="optimized already.(.|\n)*df.restore"):
        df.optimize(model)
    df.restore(model)
    assert "forward" not in vars(model)
    df.optimize(model, strategy=df.Branches(2), strict=True)
    assert_same(plain, model)
    assert df.stats(model).planned_calls == 1


def test_adapters_around_a_model_that_is_ours_already():
    model, plain = lora(model=df.optimize(llama(), strategy=df.TwoBatch(), strict=True)), lora()
    assert_same(plain, model)
    assert df.stats(model).split_calls == 1
    with pytest.raises(errors.OptionError, match="optimized already.\n  where    base_model\n"):
        df.optimize(model)
    df.optimize(df.restore(model), strategy=df.TwoBatch(), strict=True)
    assert_same(plain, model)
    df.restore(model)
    with pytest.raises(errors.OptionError, match="was not given to df.optimize"):
        df.restore(model)


def test_what_is_inside_of_a_model_of_peft():
    """A tuner and a layer are modules of PEFT, too, and no whole models."""
    plain, fast = lora(), lora()
    tuner = df.optimize(fast.base_model, strategy=df.TwoBatch(), strict=True)
    assert_same(plain, fast)
    assert df.stats(tuner).split_calls == 1
    df.restore(tuner)
    layer = df.optimize(fast.get_base_model().model.layers[0].self_attn.q_proj, strategy=df.TwoBatch(), strict=True)
    assert_same(plain, fast)
    assert df.stats(layer).split_calls == 1


def test_rejects_what_is_no_module_of_peft():
    from peft import LoraConfig

    with pytest.raises(errors.OptionError, match="LoraConfig is nothing that df.optimize knows"):
        df.optimize(LoraConfig())
