"""A small run of `python -m dynaflow.testing.programs`, and that it would notice."""

import logging

import pytest
import torch

from dynaflow import batching
from dynaflow.boundary import Boundary
from dynaflow.sources import Sources
from dynaflow.testing import program_oracle, programs
from dynaflow.testing.program_oracle import World, difference, is_valid
from dynaflow.testing.programs import Pair, Record, check_many, random_program


@pytest.fixture(autouse=True)
def quiet():
    logging.getLogger("dynaflow").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("dynaflow").setLevel(logging.NOTSET)


def test_random_programs_do_what_eager_mode_does():
    tally = check_many(range(8))
    assert not tally.violations, str(tally)
    counts = tally.counts
    assert counts["programs"] >= 7 and counts["split"] >= 0.7 * counts["programs"], "a fuzz in which everything falls back proves nothing"
    assert counts["part launches"] > 0.3 * counts["launches"] and counts["planned calls"] > 0.6 * counts["calls"]


def test_odd_programs_do_what_eager_mode_does():
    tally = check_many(range(4), odd=True)
    assert not tally.violations and not tally.not_ours, str(tally)
    assert tally.counts["programs"] == 4 and tally.counts["split"] >= 3, "a fuzz in which everything falls back proves nothing"


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


def test_notices_rows_that_are_other_rows_of_what_is_changed(monkeypatch):
    assert not check_many([1875], odd=True).violations
    monkeypatch.setattr(Boundary, "rows_are_apart", lambda self, args: True)
    assert check_many([1875], odd=True).violations


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


def test_odd_programs_have_what_models_do_now_and_then():
    made = [random_program(seed, is_odd=True) for seed in range(400)]
    assert sum(map(is_valid, made[:20])) >= 18
    text = "\n".join(p.source for p in made)
    for wanted in (
        "accumulate=True", "torch.where(", ".bfloat16()", "nn.MultiheadAttention", "attn_mask=", "padding_idx=0", "nn.LSTM", ".cumprod(",
        ".topk(", "F.dropout(", "torch.einsum(", "torch.vmap(", "box.", "Pair(", "Record(", "box['tensors']", "self.a0[:2]",
        " if x.shape[0] > 4",
    ):  # fmt: skip
        assert wanted in text, wanted
    assert {layout for p in made for layout in p.layouts.values()} >= {"tied", "shifted", "beside"}
    assert random_program(3).source == random_program(3, is_odd=False).source, "what is not odd is as it was"


def test_two_inputs_in_one_place():
    for wanted in ("shifted", "beside"):
        program = next(p for p in (random_program(s, is_odd=True) for s in range(2000)) if wanted in p.layouts.values() and p.batch == 0)
        name = next(name for name, layout in program.layouts.items() if layout == wanted)
        twin = next(v.name for v in program.given if v.root == next(v.root for v in program.given if v.name == name))
        found = program.made(5)
        assert found[name].shape == found[twin].shape and found[name] is not found[twin]
        assert found[name].untyped_storage().data_ptr() == found[twin].untyped_storage().data_ptr()


def test_a_difference_is_told_in_whatever_is_returned():
    program = random_program(3, is_odd=True)
    model, value = program.model(), torch.ones(2)

    def world(result):
        return World(program, 2, lambda *args, **kwargs: result, model)

    same = Record([Pair(value, 0.5)], "a")
    assert not difference(world(same), world(Record([Pair(value.clone(), 0.5)], "a")), 0.0)
    assert "is off by 1" in difference(world(same), world(Record([Pair(value + 1, 0.5)], "a")), 0.0)
    for other in (Record([Pair(value, 0.5)], "b"), Record([(value, 0.5)], "a"), [Pair(value, 0.5)], Record([Pair(value)], "a"), None):
        assert "returned" in difference(world(same), world(other), 0.0), other


def test_the_command_prints_a_summary_and_fails_on_a_violation(monkeypatch, capsys):
    assert programs.main(["--programs", "1", "--show"]) == 0
    printed = capsys.readouterr().out
    assert "0 violations" in printed and "class Model" in printed and "ran split" in printed
    monkeypatch.setattr(program_oracle, "difference", lambda *args: "all of it")
    assert programs.main(["--programs", "1"]) == 1
    assert "VIOLATION program 0" in capsys.readouterr().out
