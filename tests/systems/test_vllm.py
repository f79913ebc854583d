"""The real engine, on the CPU: the same tokens in fp32 with DynaFlow on as off, under a load that repeats exactly."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.systems import vllm_load

HERE = Path(__file__).parent
ON = {"min_tokens": 16}
TOGETHER = "no cut leaves readers of the prefix cache with their writers."


def serve(folder, model, arrivals, dynaflow=None, env=None, mistake=None, like_cuda=False, **engine):
    """Results of one engine in a process of its own, and what it logged."""
    results = folder / "results.json"
    if dynaflow is not None:
        engine["additional_config"] = {"dynaflow": dynaflow}
    options = {"model": str(model), "arrivals": arrivals, "engine": engine, "mistake": mistake, "like_cuda": like_cuda}
    env = {**os.environ, "PYTHONPATH": f"{HERE}:{HERE.parents[1]}", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
           **(env or {})}  # fmt: skip
    ran = subprocess.run([sys.executable, HERE / "vllm_load.py", json.dumps(options), results], env=env, capture_output=True, text=True,
                         timeout=240)  # fmt: skip
    log = ran.stdout + ran.stderr
    assert ran.returncode == 0, log[-6000:]
    return json.loads(results.read_text()), log


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="session")
def model(folder):
    vllm_load.make_model(folder / "qwen3", "qwen3")
    return folder / "qwen3"


@pytest.fixture(scope="session")
def plain(folder, model):
    """Without DynaFlow: chunked prefill, prefix caching, 60 requests."""
    results, _ = serve(folder, model, vllm_load.mixed())
    assert len(results["tokens"]) == 60 and results["cached_tokens"] > 500
    assert results["stats"] == [{**results["stats"][0], "steps": 0, "captures": 0, "fallbacks": {}, "refusal": ""}]
    return results


def assert_same(got, wanted):
    differ = [number for number, tokens in wanted["tokens"].items() if got["tokens"].get(number) != tokens]
    assert not differ and len(got["tokens"]) == len(wanted["tokens"]), f"requests {differ} differ"
    assert got["cached_tokens"] == wanted["cached_tokens"]


def assert_split(stats, at_least):
    assert stats["split_steps"] >= at_least and stats["captures"] == 1
    assert stats["steps"] == stats["split_steps"] + sum(stats["fallbacks"].values())
    assert stats["part_launches"] >= stats["split_steps"] * 2


def counts_of_a_reader(folder, model, load, on, num_split_otherwise):
    """Steps that were split, and those that were left alone so that a reader of the prefix cache sees its writer. The same tokens as
    vLLM's; and its twin: without that check, other tokens."""
    wanted, _ = serve(folder, model, load)
    results, _ = serve(folder, model, load, on)
    assert_same(results, wanted)
    otherwise, _ = serve(folder, model, load, on, mistake="together")
    assert otherwise["stats"][0]["split_steps"] == num_split_otherwise and otherwise["tokens"] != wanted["tokens"]
    (stats,) = results["stats"]
    return stats["split_steps"], stats["fallbacks"].get(TOGETHER, 0)


@pytest.mark.parametrize("strategy", ["two_batch", "nano_batch", "vllm_strategies:Uneven", "vllm_strategies:LastFirst"])
def test_the_same_tokens_in_parts(folder, model, plain, strategy):
    results, log = serve(folder, model, vllm_load.mixed(), {**ON, "strategy": strategy})
    assert_same(results, plain)
    (stats,) = results["stats"]
    assert_split(stats, 30)
    assert stats["cut_requests"] > 5 and set(stats["fallbacks"]) == {"fewer than 16 tokens"}
    assert "(0 only over the whole batch)" in log


def test_the_order_of_parts_matters(folder, model, plain):
    """The twin of LastFirst: without the order that the split rule asks for, tokens differ."""
    results, _ = serve(folder, model, vllm_load.mixed(), {**ON, "strategy": "vllm_strategies:LastFirst"}, mistake="order")
    assert_split(results["stats"][0], 30)
    assert results["tokens"] != plain["tokens"]


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_beside_vllms_compiled_model(folder, model, plain, compiler):
    """Steps that are not split run in vLLM's own compiled code."""
    results, _ = serve(folder, model, vllm_load.mixed(), {**ON, "compiler": compiler}, enforce_eager=False)
    assert_same(results, plain)
    assert_split(results["stats"][0], 30)


def test_experts(folder):
    vllm_load.make_model(folder / "moe", "qwen3_moe")
    wanted, _ = serve(folder, folder / "moe", vllm_load.mixed())
    for like_cuda in (False, True):
        results, log = serve(folder, folder / "moe", vllm_load.mixed(), ON, like_cuda=like_cuda)
        assert_same(results, wanted)
        assert_split(results["stats"][0], 30)
        assert "(0 only over the whole batch)" in log


def test_a_window_that_slides(folder):
    """Blocks that a window has left behind are other requests' by now, and their numbers are still in the table."""
    vllm_load.make_model(folder / "gemma3", "gemma3", layers=4)
    load, few, on = vllm_load.mixed(), {"num_gpu_blocks_override": 64}, {**ON, "strategy": "nano_batch"}
    wanted, _ = serve(folder, folder / "gemma3", load, **few)
    results, _ = serve(folder, folder / "gemma3", load, on, **few)
    assert_same(results, wanted)
    assert_split(results["stats"][0], 30)
    assert set(results["stats"][0]["fallbacks"]) == {"fewer than 16 tokens"}
    held_back, _ = serve(folder, folder / "gemma3", load, on, mistake="window", **few)  # the twin: no step needed to be
    assert held_back["stats"][0]["fallbacks"][TOGETHER] > 0


def test_a_model_made_of_transformers_own(folder, model):
    """Its attentions are called as functions, and its tokens are those of one sequence. vLLM has many architectures no other way."""
    impl = {"model_impl": "transformers"}
    wanted, _ = serve(folder, model, vllm_load.mixed(), **impl)
    results, log = serve(folder, model, vllm_load.mixed(), {**ON, "strategy": "vllm_strategies:Uneven"}, **impl)
    assert_same(results, wanted)
    assert_split(results["stats"][0], 30)
    assert "(0 only over the whole batch)" in log and "on 2 streams" in log, "no op is named as an attention"


def test_two_ranks(folder, model):
    two = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    wanted, _ = serve(folder, model, vllm_load.mixed(), **two)
    results, log = serve(folder, model, vllm_load.mixed(), ON, **two)
    assert_same(results, wanted)
    assert len(results["stats"]) == 2 and results["stats"][0] == results["stats"][1]
    assert_split(results["stats"][0], 30)
    assert "on 2 streams" in log, "the all-reduces are no network ops"


# -- prefill beside decode

# vLLM issues all of a step from one thread. "lazy" has the stream that was declared last go first, wherever no wait holds it back.
PHASES = {**ON, "strategy": "prefill_decode"}


@pytest.mark.parametrize("runtime", ["auto", "fake:lazy", "fake:3"])
def test_prefill_beside_decode(folder, model, plain, runtime):
    results, log = serve(folder, model, vllm_load.mixed(), {**PHASES, "runtime": runtime})
    assert_same(results, plain)
    (stats,) = results["stats"]
    assert_split(stats, 25)
    assert stats["cut_requests"] == 0 and all("one phase" in reason or reason.startswith("fewer") for reason in stats["fallbacks"])
    assert log.count("on 3 streams") == 1, "vLLM sorts its requests, and one plan serves every boundary"


def test_prefill_beside_decode_where_requests_lie_as_they_come(folder, model, plain):
    """Either phase first; and where they lie among each other, the step is vLLM's."""
    results, log = serve(folder, model, vllm_load.mixed(), {**ON, "strategy": "vllm_strategies:Unsorted", "runtime": "fake:lazy"})
    assert_same(results, plain)
    (stats,) = results["stats"]
    assert_split(stats, 9)
    assert any("no one cut parts them" in reason for reason in stats["fallbacks"]) and log.count("on 3 streams") == 2


@pytest.mark.parametrize("length_behind, num_split, num_together", [(0, 0, 1), (11, 1, 0)])
def test_attention_of_a_reader_does_not_run_beside_that_of_its_writer(folder, model, length_behind, num_split, num_together):
    load, on = vllm_load.reader_beside_writer(length_behind), {**PHASES, "runtime": "fake:lazy"}
    assert counts_of_a_reader(folder, model, load, on, num_split_otherwise=1) == (num_split, num_together)


# -- auto


def test_auto_leaves_a_single_rank_alone(folder, model, plain):
    results, log = serve(folder, model, vllm_load.mixed(), env={"DYNAFLOW_STRATEGY": "auto"})
    assert_same(results, plain)
    (stats,) = results["stats"]
    assert stats["refusal"] == "auto: one rank has no collectives to hide behind compute" and stats["refusal"] in log
    assert stats["steps"] == stats["captures"] == 0


def test_auto_decides_from_what_steps_take(folder, model):
    """20 steps of 1,000 tokens: 8 pairs, all ranks come to one verdict, and it holds."""
    load = [(i // 5, [(11 * i + 7 * j * j) % 500 + 3 for j in range(200)], 1) for i in range(100)]
    two = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "max_num_batched_tokens": 1024}
    wanted, _ = serve(folder, model, load, **two)
    results, log = serve(folder, model, load, env={"DYNAFLOW_STRATEGY": "auto"}, **two)
    assert_same(results, wanted)
    first, second = results["stats"]
    assert first == second and first["captures"] == 1
    in_parts = "in parts" if first["split_steps"] > 8 else "left to vLLM"
    assert log.count("auto: prefill steps of 512 to 1023 tokens take") == 2 and f"as vLLM has them: {in_parts}" in log
    left = first["fallbacks"]["auto: no faster in parts, or its turn as a whole"]
    assert (first["split_steps"], left) in ((8, 12), (12, 8))


# -- one request cut inside, and the prefix cache


def test_one_long_request_is_cut_inside(folder, model):
    load = [(0, [(7 * i * i + 3) % 500 + 3 for i in range(400)], 8)]
    wanted, _ = serve(folder, model, load)
    results, _ = serve(folder, model, load, {**ON, "strategy": "nano_batch"})
    assert_same(results, wanted)
    assert results["stats"][0]["cut_requests"] == 3 * results["stats"][0]["split_steps"] > 0


@pytest.mark.parametrize("length_behind, num_split, num_together", [(0, 2, 1), (11, 3, 0)])
def test_a_reader_of_the_prefix_cache_stays_with_its_writer(folder, model, length_behind, num_split, num_together):
    load = vllm_load.reader_before_writer(length_behind)
    assert counts_of_a_reader(folder, model, load, ON, num_split_otherwise=3) == (num_split, num_together)


# -- asked for, refused, fallen back


def test_an_environment_variable_is_enough(folder, model, plain):
    asked = {"DYNAFLOW_STRATEGY": "vllm_strategies:DecodeOnly", "DYNAFLOW_MIN_TOKENS": "4"}
    results, log = serve(folder, model, vllm_load.mixed(), env=asked)
    assert_same(results, plain)
    (stats,) = results["stats"]
    assert stats["split_steps"] > 0 and any("a prompt is computed" in reason for reason in stats["fallbacks"])
    assert "steps of 4 tokens or more run under DecodeOnly" in log


def test_a_process_that_did_not_ask_loads_none_of_it():
    """vLLM's server, for one: `vllm.general_plugins` are called there, too."""
    code = """if True:
        import sys
        from vllm import LLM
        from vllm.plugins import load_general_plugins
        load_general_plugins()
        print("LOADED", *sys.modules)"""
    env = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    (loaded,) = [line.split() for line in ran.stdout.splitlines() if line.startswith("LOADED")]
    assert "dynaflow.integrations.vllm" in loaded, "vLLM does not find the plugin"
    ours = {"vllm_steps", "vllm_branches"} & {name.rpartition(".")[2] for name in loaded}
    theirs = {"vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner", "vllm.compilation.piecewise_backend"} & set(loaded)
    assert not ours and not theirs


def test_counters_of_vllms_own_processes(folder, model):
    """As vLLM comes: an engine, and workers, in processes of their own, which send each other plain data alone."""
    results, _ = serve(folder, model, vllm_load.mixed(6), ON, env={"AS_IT_COMES": "1"})
    (stats,) = results["stats"]
    assert stats["split_steps"] > 0 and stats["steps"] == stats["split_steps"] + sum(stats["fallbacks"].values())


def test_small_steps_are_left_alone(folder, model, plain):
    results, _ = serve(folder, model, vllm_load.mixed(), {})
    assert_same(results, plain)
    assert results["stats"][0]["fallbacks"] == {"fewer than 512 tokens": results["stats"][0]["steps"]}
    assert results["stats"][0]["captures"] == 0


def test_a_mistaken_strategy_is_said_once(folder, model, plain):
    results, log = serve(folder, model, vllm_load.mixed(), {**ON, "strategy": "vllm_strategies:Mistaken"})
    assert_same(results, plain)
    (stats,) = results["stats"]
    assert stats["split_steps"] == 0 and stats["steps"] == sum(stats["fallbacks"].values()) and stats["fallbacks"][stats["refusal"]] > 1
    assert log.count("dynaflow leaves this model to vLLM from here on") == 1 and "model.norm" in log


def test_refuses_lora(folder, model, plain):
    results, log = serve(folder, model, vllm_load.mixed(), ON, enable_lora=True)
    assert_same(results, plain)
    (stats,) = results["stats"]
    assert stats["refusal"].startswith("LoRA") and f"dynaflow leaves this model to vLLM: {stats['refusal']}" in log and not stats["steps"]


def test_rejects_an_unknown_option(folder, model):
    with pytest.raises(AssertionError, match=r"additional_config\['dynaflow'\] has 'min_token'"):
        serve(folder, model, vllm_load.mixed(1), {"min_token": 16})
