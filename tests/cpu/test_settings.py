"""Options are honoured or refused by name, when they are given: never ignored, never found out in the middle of a call."""

import pytest
import torch
from torch._inductor import config as inductor_config

import dynaflow as df
from dynaflow.errors import OptionError
from dynaflow.settings import read_settings, why_uncompiled

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
    "an order of the real": ({"runtime": "threads:lazy"}, "unknown runtime 'threads:lazy'"),
    "no order": ({"runtime": "fake:"}, "unknown runtime 'fake:'"),
    "an unknown order": ({"runtime": "fake:slow"}, "unknown runtime 'fake:slow'"),
    "a word for a partition": ({"partition": "kernel"}, "partition got 'kernel'"),
    "kernels among rules": ({"partition": ["kernels", df.SplitModule("*")]}, "partition got 'kernels'"),
    "a number among rules": ({"partition": [3]}, "partition got 3"),
    "no partition": ({"partition": None}, "partition got None"),
    "strict a little": ({"strict": "no"}, "strict='no' is neither"),
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


def test_accepts_partitions():
    rule = df.SplitModule("*")
    for given in ("auto", "kernels", rule, [rule, "auto"], (rule,)):
        assert read_settings(partition=given).partition in (given, tuple(given) if isinstance(given, list) else given)
    assert read_settings(partition=(r for r in [rule])).partition == (rule,), "for every graph, not for the first alone"


@pytest.mark.parametrize("model", [3, None, "model", [torch.sin]])
def test_rejects_what_cannot_be_called(model):
    with pytest.raises(OptionError, match="cannot be called"):
        df.compile(model)


def test_a_strategy_by_its_place():
    strategy = read_settings(strategy="dynaflow.strategies.nano_flow:NanoFlow").strategy
    assert isinstance(strategy, df.NanoFlow)


def test_inductor_where_it_pays(monkeypatch):
    monkeypatch.setattr("dynaflow.settings.has_triton", lambda: True)
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    planned = {"strategy": df.TwoBatch()}
    assert read_settings().wants_inductor(cpu) and read_settings(**planned).wants_inductor(cuda)
    assert not read_settings(**planned).wants_inductor(cpu) and read_settings(**planned, compiler="inductor").wants_inductor(cpu)
    assert not any(read_settings(compiler="eager").wants_inductor(device) for device in (cpu, cuda))


def test_whether_inductor_can_compile_is_known_ahead(monkeypatch):
    cpu, cuda, other = (torch.device(kind) for kind in ("cpu", "cuda", "meta"))
    assert not why_uncompiled(cpu) and why_uncompiled(other) == "nothing is compiled for meta"
    with inductor_config.patch({"cpp.cxx": (None, "no-such-compiler")}):
        assert why_uncompiled(cpu).startswith("there is no C++ compiler") and "no-such-compiler" in why_uncompiled(cpu)
        assert not read_settings().wants_inductor(cpu) and read_settings(compiler="inductor").wants_inductor(cpu)
    for is_there in (False, True):
        monkeypatch.setattr("dynaflow.settings.has_triton", lambda is_there=is_there: is_there)
        assert why_uncompiled(cuda) == ("" if is_there else "there is no Triton")
