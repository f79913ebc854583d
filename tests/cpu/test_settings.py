"""Options are honoured or refused by name, when they are given: never ignored, never found out in the middle of a call."""

import pytest
import torch

import dynaflow as df
from dynaflow.errors import OptionError
from dynaflow.settings import read_settings

REFUSED = {
    "unknown": ({"stratgy": 1}, "unknown option 'stratgy'"),
    "buckets without recordings": ({"buckets": [4, 8]}, "buckets= is about recordings"),
    "buckets for threads": ({"buckets": "powers", "runtime": "threads"}, "runtime='threads' records nothing"),
    "a word": ({"buckets": "fives", "runtime": "graph"}, "buckets='fives' names no batch sizes"),
    "no bucket": ({"buckets": [], "runtime": "graph"}, "names no batch sizes"),
    "an empty bucket": ({"buckets": [0, 4], "runtime": "graph"}, "names no batch sizes"),
    "half a row": ({"buckets": [2.5], "runtime": "graph"}, "names no batch sizes"),
    "a bucket that is true": ({"buckets": [True], "runtime": "graph"}, "names no batch sizes"),
    "one number": ({"buckets": 8, "runtime": "graph"}, "names no batch sizes"),
    "borrow without recordings": ({"borrow": True}, "borrow=True is about recordings"),
    "fixed weights without recordings": ({"fixed_weights": True, "runtime": "threads"}, "fixed_weights=True is about recordings"),
    "fixed a little": ({"fixed_weights": 1, "runtime": "graph"}, "fixed_weights=1 is neither"),
    "borrow a little": ({"borrow": "yes", "runtime": "graph"}, "borrow='yes' is neither"),
    "compiler": ({"compiler": "nvcc"}, "unknown compiler 'nvcc'"),
    "no compiler": ({"compiler": None}, "unknown compiler None"),
    "runtime": ({"runtime": "tpu"}, "unknown runtime 'tpu'"),
    "no runtime": ({"runtime": None}, "unknown runtime None"),
    "batch": ({"batch": -1}, "batch=-1 names no dim"),
    "part_context": ({"part_context": 3}, "part_context must be a function"),
    "align": ({"align": 5}, "align must be a function"),
    "align and recordings": ({"align": list, "runtime": "graph"}, "align= moves cuts from call to call"),
    "a strategy of no module": ({"strategy": "nowhere.at.all:Mine"}, "there is no strategy 'nowhere.at.all:Mine'"),
    "no such strategy": ({"strategy": "dynaflow:Mine"}, "there is no strategy 'dynaflow:Mine'"),
    "no strategy at all": ({"strategy": "dynaflow:compile"}, "is no strategy"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_rejects(case):
    options, words = REFUSED[case]
    with pytest.raises(OptionError, match=words.replace("[", r"\[")) as error:
        read_settings(**options)
    assert "fix" in str(error.value)
    if case != "unknown":
        with pytest.raises(OptionError):
            df.compile(torch.sin, **options)


@pytest.mark.parametrize("options", [
    {}, {"runtime": "graph", "buckets": "powers", "borrow": True}, {"runtime": "graph", "buckets": (8, 1, 4)}, {"borrow": False},
    {"fixed_weights": True},
    {"runtime": "graph", "buckets": range(1, 9)}, {"compiler": "inductor"}, {"compiler": "eager", "runtime": "fake:7"}, {"batch": {"x": 0}},
])  # fmt: skip
def test_accepts(options):
    settings = read_settings(**options)
    assert all(getattr(settings, name) == value for name, value in options.items())


def test_a_strategy_by_its_place():
    strategy = read_settings(strategy="dynaflow.strategies.nano_flow:NanoFlow").strategy
    assert isinstance(strategy, df.NanoFlow)


def test_inductor_where_it_pays():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert not read_settings().wants_inductor(cpu) and read_settings(compiler="inductor").wants_inductor(cpu)
    assert not read_settings(compiler="eager").wants_inductor(cuda)
