"""A small run of `python -m dynaflow.testing.programs --train`, and that it would notice."""

import logging
import random

import pytest
import torch

from dynaflow.region import Case
from dynaflow.runtime import graphs, lent
from dynaflow.testing.program_histories import Run, Trained, random_history, run_difference
from dynaflow.testing.program_ops import Var
from dynaflow.testing.program_oracle import Tally
from dynaflow.testing.programs import Program, check_many, main, random_program


@pytest.fixture(autouse=True)
def quiet():
    logging.getLogger("dynaflow").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("dynaflow").setLevel(logging.NOTSET)


def test_random_programs_are_trained_as_in_eager_mode():
    tally = check_many(range(4), train=True)
    assert not tally.violations and not tally.not_ours, str(tally)
    counts = tally.counts
    assert counts["trained"] >= 3 and counts["exact"] > 0.9 * counts["tensors"] > 1000 and counts["kept"] > 50
    assert counts["planned calls"] > 0.6 * (counts["forwards"] + counts["backwards"]), "what runs as Inductor has it proves nothing"


# -- it would notice: what an engine might do wrong, and a program that shows it


def _swap_two_gradients(monkeypatch):
    run = Case._run

    def swapped(self, args):
        results = list(run(self, args))
        if self.region.is_backward and self._way is not self.region.plain and self._way is not None:
            alike = [(i, k) for k, b in enumerate(results) for i, a in enumerate(results[:k]) if _lie_alike(a, b)]
            for i, k in alike[:1]:
                results[i], results[k] = results[k], results[i]
        return results

    monkeypatch.setattr(Case, "_run", swapped)


def _lie_alike(a, b):
    return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and (a.shape, a.dtype) == (b.shape, b.dtype)


def _lend_what_somebody_has(monkeypatch):
    """As if nobody had what was handed out last. (It is not given back to the allocator: to read that would end the process.)"""

    def leave(self):
        lent._homes.remove(self._addresses)
        lent.outlived[next(lent._numbers)] = self

    monkeypatch.setattr(lent.Lent, "is_gone", lambda self: True)
    monkeypatch.setattr(lent.Lent, "leave", leave)
    monkeypatch.setattr(graphs, "let_go", lambda: None)


# what is wrong -> how it is made so, and the seed of a program that shows it (seeds mean other programs when the generator changes)
HOLES = {
    "two gradients are swapped": (_swap_two_gradients, 2),
    "what is saved or kept is overwritten": (_lend_what_somebody_has, 2),
}


@pytest.mark.parametrize("hole", HOLES)
def test_notices(monkeypatch, hole):
    make, seed = HOLES[hole]
    assert not check_many([seed], train=True).violations
    make(monkeypatch)
    assert check_many([seed], train=True).violations, f"{hole}, and the program does not show it"


def _twice(results, earlier):
    return [2 * t for t in results]


def _wrong_gradient(results, earlier):
    for t in results:
        if t.requires_grad:
            t.register_hook(lambda gradient: 1.5 * gradient)
    return results


def _changes_earlier(results, earlier):
    for t in earlier:
        t.zero_()
    earlier.extend(t.detach() for t in results)
    return results


def _detached(results, earlier):
    return [t.detach() for t in results]


def _raises(results, earlier):
    earlier.append(None)
    if len(earlier) > 6:
        raise ValueError("no more")
    return results


WRONGS = [
    (_twice, "is off by"), (_wrong_gradient, ": gradient of"), (_changes_earlier, "which somebody keeps, was changed by"),
    (_detached, "whether output 1 requires gradients is off"), (_raises, "ValueError: no more"),
]  # fmt: skip


MODEL = """class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a0 = linear(4, 6)
    def forward(self, x, *, scale=1.0, number=0):
        return torch.relu(x), self.a0(x)
"""


@pytest.mark.parametrize("wrong, said", [(None, ""), *WRONGS], ids=lambda x: getattr(x, "__name__", ""))
def test_a_run_differs_by_what_is_wrong_with_it(wrong, said):
    x = Var("x", ("1B", 4), "float32", 0)
    program = Program(2, random.Random(2), is_trained=True, source=MODEL, given=[x], layouts={"x": ""})
    trained = Trained.find(program, random.Random(2), Tally())
    model, earlier = trained.program.model(), []

    def call(*args, **kwargs):
        results = model(*args, **kwargs)
        return results if wrong is None else wrong(results, earlier)

    found = run_difference(Run(trained.program, trained.history, model, call), trained.wanted, 1e-4)
    assert said in found and bool(said) == bool(found), found


# -- the generator itself


def test_histories_have_everything_in_them():
    made = [random_history(random.Random(seed), (8, 3), 3, retains=seed % 2 == 0) for seed in range(40)]
    assert made[3] == random_history(random.Random(3), (8, 3), 3, retains=False)
    kinds = {step.what for history in made for step in history}
    assert kinds == {"f", "n", "b", "g", "d", "step", "zero", "blank", "move", "train", "eval"}
    assert not any(step.what == "b" and step.keeps for history in made[1::2] for step in history)
    text = " ".join(map(str, made[0]))
    assert text.startswith("f0/8") and "b0 step zero" in text and "/3" in text
    for history in made:
        waiting = set()
        for step in history:
            if step.what == "f":
                waiting.add(step.number)
            elif step.what in "bgd":
                assert step.number in waiting, "a forward has one backward that does not retain its graph, or none"
                waiting -= set() if step.keeps else {step.number}
            assert step.what not in ("step", "move", "train", "eval") or not waiting, "who changes what a backward needs gets an error"
        assert not waiting


def test_programs_that_are_trained_have_more_in_them():
    made = [random_program(seed, is_trained=True) for seed in range(150)]
    text = "\n".join(p.source for p in made)
    for wanted in ("nn.BatchNorm1d", "self.training", "checkpoint(", ".detach()", "torch.no_grad()", "graph_break", "@ self.a0.t()"):
        assert wanted in text, wanted
    assert {how for p in made for how in p.learned.values()} == {"leaf", "made"} and any(p.is_autocast for p in made)
    parameters = [parameter for p in made[:30] for parameter in p.model().parameters()]
    assert {p.requires_grad for p in parameters} == {True, False}
    assert sum(Trained.find(p, random.Random(p.seed), Tally()) is not None for p in made[:40]) >= 20


def test_the_command_prints_a_summary(capsys):
    assert main(["--programs", "1", "--train", "--show", "--seed", "2"]) == 0
    printed = capsys.readouterr().out
    assert "class Model" in printed and "1 programs were trained" in printed and "0 violations" in printed and "# f0/" in printed
