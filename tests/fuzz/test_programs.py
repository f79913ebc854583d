"""A small run of `python -m dynaflow.testing.programs`, and that it would notice."""

import logging

import pytest
import torch

from dynaflow import batching
from dynaflow.sources import Sources
from dynaflow.testing import program_oracle, programs
from dynaflow.testing.program_oracle import is_valid
from dynaflow.testing.programs import check_many, random_program


@pytest.fixture(autouse=True)
def quiet():
    logging.getLogger("dynaflow").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("dynaflow").setLevel(logging.NOTSET)


def test_random_programs_do_what_eager_mode_does():
    tally = check_many(range(12))
    assert not tally.violations, str(tally)
    counts = tally.counts
    assert counts["programs"] >= 11 and counts["split"] >= 0.7 * counts["programs"], "a fuzz in which everything falls back proves nothing"
    assert counts["part launches"] > 0.3 * counts["launches"] and counts["planned calls"] > 0.6 * counts["calls"]


# -- it would notice: each hole was one of ours once, and a program shows it


def _first_alias_only(self, node, seen):
    reason = self.facts.nodes[node].unsplittable
    for arg in node.all_input_nodes:
        arg = self.alias.get(arg, arg)
        if not reason and arg not in seen and self.kind[arg] in ("view", "project"):
            seen.add(arg)
            reason = _first_alias_only(self, arg, seen)
    return reason


# hole -> where it is made, and the seed of a program that shows it (seeds mean other programs when the generator changes)
HOLES = {
    "views that mix rows are not judged": ((Sources, "unsplittable", lambda self, node: self.facts.nodes[node].unsplittable), 2),
    "only one in-place result is looked through": ((Sources, "unsplittable", lambda self, n: _first_alias_only(self, n, set())), 2821),
    "copies of one row may be views": ((Sources, "may_alias", lambda self, node: False), 9),
    "dropout that is off is a copy": ((batching, "_DROPOUT", frozenset()), 514),
}


@pytest.mark.parametrize("hole", HOLES)
def test_notices_a_hole_in_the_analysis(monkeypatch, hole):
    patch, seed = HOLES[hole]
    assert not check_many([seed]).violations
    monkeypatch.setattr(*patch)
    assert check_many([seed]).violations, f"{hole}, and the program does not show it"


# -- the generator itself


def test_the_same_seed_gives_the_same_program():
    one, two = random_program(3), random_program(3)
    assert one.source == two.source and str(one.partition) == str(two.partition)
    for a, b in zip(one.model().state_dict().values(), two.model().state_dict().values()):
        assert torch.equal(a, b)
    assert all(torch.equal(a, b) for a, b in zip(one.inputs(5)[0], two.inputs(5)[0]))


def test_programs_are_valid_and_have_everything_in_them():
    made = [random_program(seed) for seed in range(250)]
    assert sum(map(is_valid, made[:30])) >= 28
    text = "\n".join(p.source for p in made)
    for wanted in (
        "linear(", " @ ", "F.scaled_dot_product", "F.conv1d", "torch.softmax", "F.layer_norm", "torch.cat(", "torch.stack(",
        ".chunk(2", ".permute(", ".reshape(", ".flatten(", ".expand(", ".select(0, 0)", "torch.where(", ".gather(", ".sort(", ".flip(",
        ".mean(0)", "torch.autocast", "F.dropout", "df.mark", "graph_break", ".shape[0]", "index_copy_", "register_buffer", ".contiguous()",
    ):  # fmt: skip
        assert wanted in text, wanted
    assert {p.batch for p in made} == {0, 1}
    assert {layout for p in made for layout in p.layouts.values()} >= {"", "transposed", "strided", "expanded", "tied"}


def test_the_command_prints_a_summary_and_fails_on_a_violation(monkeypatch, capsys):
    assert programs.main(["--programs", "1", "--show"]) == 0
    printed = capsys.readouterr().out
    assert "0 violations" in printed and "class Model" in printed and "ran split" in printed
    monkeypatch.setattr(program_oracle, "difference", lambda *args: "all of it")
    assert programs.main(["--programs", "1"]) == 1
    assert "VIOLATION program 0" in capsys.readouterr().out
