"""What a serving engine is asked for, what it says, and how DynaFlow gets into it."""

import logging

import pytest
import torch

import dynaflow as df
from dynaflow.errors import OptionError
from dynaflow.integrations.around import put_around
from dynaflow.integrations.ops import find_op, tell_split_rules
from dynaflow.integrations.serving import Engine, first_that_holds, read_options

WHERE = "config['dynaflow']"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in ("STRATEGY", "MIN_TOKENS", "COMPILER", "RUNTIME"):
        monkeypatch.delenv(f"DYNAFLOW_{name}", raising=False)


def test_off_until_asked_for(monkeypatch):
    assert read_options(None, WHERE) is None
    monkeypatch.setenv("DYNAFLOW_MIN_TOKENS", "4")
    assert read_options(None, WHERE) is None, "only a strategy asks"
    monkeypatch.setenv("DYNAFLOW_STRATEGY", "nano_batch")
    options = read_options(None, WHERE)
    assert (type(options.strategy), options.min_tokens, options.compiler) == (df.NanoBatch, 4, "auto")


@pytest.mark.parametrize(
    "given, strategy, min_tokens, is_auto, is_branches",
    [
        ({}, df.TwoBatch, 512, False, False),
        ("nano_batch", df.NanoBatch, 512, False, False),
        ("prefill_decode", df.PrefillDecode, 512, False, False),
        ({"strategy": "auto", "min_tokens": 16}, df.NanoFlow, 16, True, False),
        ({"strategy": None}, df.NanoFlow, 512, True, False),
        ("branches", df.Branches, 512, False, True),
        ({"strategy": "dynaflow:NanoFlow"}, df.NanoFlow, 512, False, False),
    ],
)
def test_options(given, strategy, min_tokens, is_auto, is_branches):
    options = read_options(given, WHERE)
    assert type(options.strategy) is strategy and (options.compiler, options.runtime) == ("auto", "auto")
    assert (options.min_tokens, options.is_auto, options.is_branches) == (min_tokens, is_auto, is_branches)


def test_the_configuration_comes_before_the_environment(monkeypatch):
    monkeypatch.setenv("DYNAFLOW_STRATEGY", "auto")
    monkeypatch.setenv("DYNAFLOW_RUNTIME", "serial")
    options = read_options({"strategy": "two_batch"}, WHERE)
    assert (type(options.strategy), options.is_auto, options.runtime) == (df.TwoBatch, False, "serial")


def test_rejects_an_unknown_option():
    with pytest.raises(OptionError, match=r"config\['dynaflow'\] has 'min_token'.\n.*use strategy, min_tokens, compiler, runtime"):
        read_options({"min_token": 16}, WHERE)
    assert read_options({"min_tokens": 16}, WHERE).min_tokens == 16


@pytest.mark.parametrize(
    "given, said",
    [
        (False, r"config\['dynaflow'\] is False"),
        (True, r"config\['dynaflow'\] is True"),
        (["two_batch"], r"config\['dynaflow'\] is \['two_batch'\]"),
        ({"min_tokens": "many"}, "min_tokens .* is 'many'"),
        ({"min_tokens": -1}, "min_tokens .* is -1"),
        ({"min_tokens": True}, "min_tokens .* is True"),
        ({"min_tokens": 0.5}, "min_tokens .* is 0.5"),
        ({"strategy": "two_batches"}, "unknown strategy 'two_batches'"),
        ({"strategy": "dynaflow:Mixed"}, "strategy Mixed cannot be made of its name alone"),
        ({"compiler": "gcc"}, "unknown compiler 'gcc'"),
        ({"runtime": "gpu"}, "unknown runtime 'gpu'"),
    ],
)
def test_rejects_a_value(given, said):
    """Here, and not once a model is loaded."""
    with pytest.raises(OptionError, match=said):
        read_options(given, WHERE)


def test_variables_are_text(monkeypatch):
    monkeypatch.setenv("DYNAFLOW_STRATEGY", "two_batch")
    monkeypatch.setenv("DYNAFLOW_MIN_TOKENS", "many")
    with pytest.raises(OptionError, match=r"DYNAFLOW_MIN_TOKENS\) is 'many'"):
        read_options(None, WHERE)
    monkeypatch.setenv("DYNAFLOW_MIN_TOKENS", "4")
    assert read_options(None, WHERE).min_tokens == 4
    monkeypatch.setenv("DYNAFLOW_STRATEGY", "")
    assert read_options(None, WHERE) is None, "an empty one asks for nothing"


def test_a_refusal_is_said_and_can_be_taken_back(caplog):
    engine = Engine("Toy", logging.getLogger("toy"))
    engine.refuse(first_that_holds({"two ranks": False, "a pipeline": True, "LoRA": True}))
    assert engine.stats.refusal == "a pipeline"
    assert [(r.name, r.getMessage()) for r in caplog.records] == [("toy.dynaflow", "dynaflow leaves this model to Toy: a pipeline")]
    engine.refuse(first_that_holds({"two ranks": False}))
    assert engine.stats.refusal == "" and len(caplog.records) == 1


@pytest.mark.parametrize("has_handlers", [False, True])
def test_the_engine_shows_our_log_unless_somebody_else_does(has_handlers, monkeypatch):
    ours, theirs = logging.getLogger("dynaflow"), logging.getLogger("toy_shown")
    own, handler = [logging.NullHandler()] if has_handlers else [], logging.NullHandler()
    for name, value in (("handlers", own), ("propagate", True), ("level", logging.NOTSET)):
        monkeypatch.setattr(ours, name, value)
    monkeypatch.setattr(theirs, "handlers", [handler])
    monkeypatch.setattr(theirs, "level", logging.WARNING)
    Engine("Toy", theirs).show_log()
    assert (ours.handlers, ours.propagate) == ((own, True) if has_handlers else ([handler], False))
    assert ours.level == (logging.NOTSET if has_handlers else logging.WARNING)


# -- ops by name, methods with something around them


@torch.library.custom_op("dynaflow_serving::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


double.register_fake(lambda x: torch.empty_like(x))


def test_ops_that_this_build_has():
    assert find_op("dynaflow_serving.double") is torch.ops.dynaflow_serving.double
    assert find_op("dynaflow_serving.double.default") is torch.ops.dynaflow_serving.double.default
    assert find_op("dynaflow_serving.triple") is None and find_op("dynaflow_serving.triple.default") is None
    # nothing is known about an op until somebody tells it
    fast = df.compile(lambda x: torch.ops.dynaflow_serving.double(x) + 1, strategy=df.TwoBatch())
    tell_split_rules(["dynaflow_serving.triple", "dynaflow_serving.double"])
    with torch.no_grad():
        assert torch.equal(fast(torch.ones(4, 2)), torch.full((4, 2), 3.0))
    assert df.stats(fast).split_calls == 1 and df.stats(fast).num_unsplittable == 0


@pytest.mark.parametrize(
    "shape, axis, is_split",
    [((None, 2), 0, True), ((1, None, 2), 1, True), ((1, 1, None, 2), 2, True), ((3, None, 2), 1, False), ((1, None), 1, False)],
)
def test_tokens_of_one_sequence_are_rows(shape, axis, is_split):
    """Behind other dims than those of size 1, rows are not contiguous; and along the last one an op may do anything."""
    tell_split_rules(["dynaflow_serving.double"])
    fast = df.compile(lambda x: torch.ops.dynaflow_serving.double(x) + 1, strategy=df.TwoBatch(), batch={"x": axis})
    x = torch.randn([6 if n is None else n for n in shape])
    with torch.no_grad():
        assert torch.equal(fast(x), x * 2 + 1)
    assert df.stats(fast).num_unsplittable == (not is_split)


def test_something_is_put_around_a_method_once():
    class Runner:
        def add(self, a, b=1):
            """Theirs."""
            return a + b

    def around(method, runner, a, **named):
        return [method(runner, a, **named)]

    for _ in range(2):
        put_around(Runner, "add", around)
    assert Runner().add(2, b=3) == [5] and Runner.add.__doc__ == "Theirs."
    put_around(Runner, "add", lambda method, runner, *args: (method(runner, *args),))
    assert Runner().add(2) == ([3],), "another one goes around it"
