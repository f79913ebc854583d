"""Hugging Face Transformers: the same tokens with DynaFlow on as off, and how many steps were split."""

import copy
import logging
import pickle

import pytest
import torch

pytest.importorskip("transformers")

from transformers import CompileConfig, ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

import dynaflow as df
from benchmarks.system_models import PAD, llama
from dynaflow import errors
from tests.ranks.harness import run

NEW_TOKENS = 6


def prompts(batch_size=4, length=7):
    """Left-padded, as generate wants them."""
    ids = torch.randint(1, 60, (batch_size, length), generator=torch.Generator().manual_seed(batch_size))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    return {"input_ids": ids.masked_fill(mask == 0, PAD), "attention_mask": mask}


def generated(model, cache="dynamic", batch_size=4, **settings):
    cached = {} if cache == "dynamic" else {"cache_implementation": cache}
    return model.generate(**prompts(batch_size), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, **cached, **settings)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("strategy", [df.TwoBatch(), df.NanoBatch(3), df.Branches(2), "auto"], ids=lambda s: type(s).__name__)
def test_generate(cache, strategy):
    expected = generated(llama(), cache)
    model = df.optimize(llama(), strategy=strategy)
    assert torch.equal(generated(model, cache), expected)
    stats = df.stats(model)
    assert stats.calls == NEW_TOKENS and not stats.fallbacks, stats
    assert stats.split_calls == (NEW_TOKENS if isinstance(strategy, df.NanoBatch) else 0)


def test_other_batch_sizes_need_no_other_captures():
    model = df.optimize(llama(), strategy=df.TwoBatch(), strict=True)
    for batch_size in (4, 6, 9):
        assert torch.equal(generated(model, batch_size=batch_size), generated(llama(), batch_size=batch_size))
        if batch_size == 4:
            num_captures = df.stats(model).captures
    assert df.stats(model).captures == num_captures and df.stats(model).split_calls == 3 * NEW_TOKENS


def test_a_batch_of_one_falls_back_and_is_counted():
    model, ids = df.optimize(llama(), strategy=df.TwoBatch()), prompts(1 + 1)["input_ids"][:1]
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None}
    assert torch.equal(model.generate(ids, **settings), llama().generate(ids, **settings))
    assert df.stats(model).fallbacks == {"batch smaller than 2": NEW_TOKENS} and not df.stats(model).split_calls


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_one_row_has_branches(cache):
    """Keys of a static cache are written in place, and repeated for groups of heads: a copy, however many rows there are."""
    model, ids = df.optimize(llama(), strategy=df.Branches(2), strict=True), prompts(2)["input_ids"][:1]
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None}
    settings |= {} if cache == "dynamic" else {"cache_implementation": cache}
    assert torch.equal(model.generate(ids, **settings), llama().generate(ids, **settings))
    assert df.stats(model).planned_calls == df.stats(model).calls == NEW_TOKENS


def test_beams_and_sampling():
    """Caches that are reordered between steps; tokens that are drawn."""
    model = df.optimize(llama(), strategy=df.TwoBatch())
    assert torch.equal(generated(model, num_beams=2), generated(llama(), num_beams=2))
    tokens = []
    for sampler in (llama(), model):
        torch.manual_seed(3)
        tokens.append(sampler.generate(**prompts(), max_new_tokens=NEW_TOKENS, do_sample=True, top_k=5, eos_token_id=None))
    assert torch.equal(*tokens)
    assert df.stats(model).split_calls == 2 * NEW_TOKENS and not df.stats(model).fallbacks


def test_generate_leaves_compiling_to_us(caplog):
    """With a static cache, on a GPU, generate compiles its decode steps itself. The setting makes it do so here, too."""
    compile_config = CompileConfig()
    compile_config._compile_all_devices = True
    expected = generated(llama(), "static")
    model = df.optimize(llama(), strategy=df.TwoBatch(), strict=True)
    with caplog.at_level(logging.WARNING, "dynaflow"):
        assert torch.equal(generated(model, "static", compile_config=compile_config), expected)
    assert df.stats(model).split_calls == df.stats(model).calls == NEW_TOKENS
    assert sum("compile_config is not used" in message for message in caplog.messages) == 1


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("how", ["forward", "module", "auto"])
def test_torch_compile(cache, how, counted):
    """Without an import of ours. A batch that changes is what torch.compile calls dynamic."""
    expected = generated(llama(), cache)
    model, options = llama(), {"dynamic": True, "options": {"strategy": "two_batch", "strict": True}}
    if how == "module":
        model.compile(backend="dynaflow", **options)
    else:
        model.forward = torch.compile(model.forward, backend="dynaflow", **(options if how == "forward" else {}))
    assert torch.equal(generated(model, cache), expected)
    assert counted().calls == NEW_TOKENS and counted().split_calls == (0 if how == "auto" else NEW_TOKENS)


def test_generates_own_compile_config_may_name_us(counted):
    compile_config = CompileConfig(backend="dynaflow", mode=None, fullgraph=False, dynamic=True, options={"strategy": "two_batch"})
    compile_config._compile_all_devices = True
    assert torch.equal(generated(llama(), "static", compile_config=compile_config), generated(llama(), "static"))
    assert counted().split_calls == NEW_TOKENS - 1 and not counted().fallbacks  # the prefill is not compiled


# -- continuous batching


def served(model, lengths=(5, 9, 3, 12, 7)):
    generator = torch.Generator().manual_seed(0)
    requests = [torch.randint(1, 60, (n,), generator=generator).tolist() for n in lengths]
    greedy = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=PAD)
    small = ContinuousBatchingConfig(num_blocks=16, block_size=8, max_batch_tokens=16)
    outputs = model.generate_batch(requests, generation_config=greedy, continuous_batching_config=small, progress_bar=False)
    assert not any(output.error for output in outputs.values())
    return [output.generated_tokens for output in outputs.values()]


def test_continuous_batching():
    """All tokens of a step are one row: they are the batch. Prompts of 36 tokens in steps of 16 are cut anywhere."""
    expected = served(llama(attn_implementation="paged|sdpa"))
    model = df.optimize(llama(attn_implementation="paged|sdpa"), strategy=df.TwoBatch())
    assert served(model) == expected
    stats = df.stats(model)
    # Which requests share a step is up to the manager's thread. A step that reads no cache has a square mask, which makes its size a
    # constant when it is seen first; a step may hold a single token.
    assert set(stats.fallbacks) <= {"there is no batch to split: its size is a constant of the graph", "batch smaller than 2"}
    assert stats.split_calls > 4 and stats.split_calls + stats.fallbacks.total() == stats.calls, stats


def test_generate_and_continuous_batching_of_one_model():
    model = df.optimize(llama(), strategy=df.TwoBatch())
    assert torch.equal(generated(model), generated(llama()))
    model.set_attn_implementation("paged|sdpa")
    assert served(model) == served(llama(attn_implementation="paged|sdpa"))
    assert df.stats(model).split_calls > NEW_TOKENS + 4


# -- in place


def test_restore():
    model = llama()
    df.optimize(model, strategy=df.TwoBatch())
    assert df.restore(model) is model and "forward" not in vars(model) and "get_compiled_call" not in vars(model)
    df.optimize(model, strategy=df.Branches(2))
    assert torch.equal(generated(model), generated(llama()))


def test_copies_are_compiled_for_themselves_and_saved_models_are_not():
    model = df.optimize(llama(), strategy=df.TwoBatch())
    twin, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        twin.lm_head.weight.neg_()
    assert not torch.equal(generated(twin), generated(model))
    assert df.stats(twin).split_calls == df.stats(model).split_calls == NEW_TOKENS
    assert torch.equal(generated(loaded), generated(model)) and df.stats(loaded).calls == 0
    assert not any(p.requires_grad is False for p in loaded.parameters())
    df.restore(twin)
    assert "forward" not in vars(twin) and "forward" in vars(model)


def test_rejects_what_is_compiled_already():
    model = df.optimize(llama())
    with pytest.raises(errors.OptionError, match="optimized already"):
        df.optimize(model)
    compiled = llama()
    compiled.compile(backend="dynaflow")
    for other in (compiled, torch.compile(llama())):
        with pytest.raises(errors.OptionError, match="compiled by torch.compile already"):
            df.optimize(other)
    with pytest.raises(errors.OptionError, match="compiled by DynaFlow already"):
        df.optimize(df.compile(llama()))


def test_rejects_what_it_does_not_know():
    with pytest.raises(errors.OptionError, match="nothing that df.optimize knows"):
        df.optimize(LlamaConfig())
    with pytest.raises(errors.OptionError, match="unknown strategy"):
        df.optimize(model := llama(), strategy="fastest")
    assert "forward" not in vars(model)
    with pytest.raises(errors.OptionError, match="was not given to df.optimize"):
        df.restore(model)


def test_rejects_to_restore_under_a_hook_that_came_later():
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    model = df.optimize(llama(), strategy=df.TwoBatch())
    add_hook_to_module(model, ModelHook())
    assert torch.equal(generated(model), generated(llama()))
    assert df.stats(model).split_calls == NEW_TOKENS
    with pytest.raises(errors.OptionError, match="was replaced since"):
        df.restore(model)
    remove_hook_from_module(model)
    df.restore(model)
    assert torch.equal(generated(model), generated(llama()))


def test_a_model_with_a_hook_of_accelerate():
    from accelerate.hooks import ModelHook, add_hook_to_module

    model = llama()
    add_hook_to_module(model, ModelHook())
    df.optimize(model, strategy=df.TwoBatch(), strict=True)
    assert torch.equal(generated(model), generated(llama()))
    assert df.stats(model).split_calls == NEW_TOKENS


# -- ranks


def tensor_parallel(folder):
    """Tokens with DynaFlow off and on, on one rank of several, and what was counted."""
    tokens = generated(LlamaForCausalLM.from_pretrained(folder, tp_plan="auto").eval())
    model = df.optimize(LlamaForCausalLM.from_pretrained(folder, tp_plan="auto").eval(), strategy=df.TwoBatch(), strict=True)
    with df.profile() as profiled:
        fast = generated(model)
    return tokens.tolist(), fast.tolist(), df.stats(model), [span.label for span in profiled.timeline.spans if span.kind == "network"]


def test_tp_plan_on_two_ranks(tmp_path):
    llama(num_key_value_heads=4).save_pretrained(tmp_path)
    expected = generated(LlamaForCausalLM.from_pretrained(tmp_path).eval()).tolist()
    for tokens, fast, stats, labels in run(tensor_parallel, 2, str(tmp_path)):
        assert fast == tokens == expected
        assert stats.split_calls == stats.calls == NEW_TOKENS and not stats.fallbacks
        assert "model.layers.1.mlp.down_proj.all_reduce 1/2" in labels
