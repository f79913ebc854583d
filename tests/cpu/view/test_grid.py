"""Hand-made plans -> the grid that stands beside them in tests/golden."""

from pathlib import Path

import pytest

from dynaflow.ir import Launch, Part, Plan
from dynaflow.view.grid import cells, grid, launch_label, short_names

GOLDEN = Path(__file__).parents[2] / "golden"
NAMES = ("two_batch", "branches", "sequential", "fused")


def load(name: str) -> Plan:
    return Plan.load(GOLDEN / f"{name}.plan")


@pytest.mark.parametrize("name", NAMES)
def test_grid_is_golden(name):
    expected = (GOLDEN / f"{name}.grid").read_text()
    assert load(name).grid() == expected, f"tests/golden/{name}.grid differs; if the new one reads better, replace it"


@pytest.mark.parametrize("name", NAMES)
def test_every_launch_is_in_one_cell(name):
    plan = load(name)
    table, _ = cells(plan)
    assert [cell.launch for cell in table] == list(plan.launches)
    places = [(cell.step, cell.launch.stream) for cell in table]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize("name", NAMES)
def test_steps_are_the_earliest(name):
    """Against a fixed-point over 'after my predecessors', which knows nothing of lanes."""
    plan = load(name)
    after: dict[int, set[int]] = {}
    last: dict[str, set[int]] = {}
    events: dict[str, set[int]] = {}
    for i, step in enumerate(plan.steps):
        frontier = last.setdefault(step.stream, set())
        kind = type(step).__name__
        if kind == "Launch":
            after[i] = set(frontier)
            last[step.stream] = {i}
        elif kind == "Record":
            events[step.event] = set(frontier)
        else:
            frontier |= events[step.event]
    level = dict.fromkeys(after, 1)
    for _ in after:
        level = {i: 1 + max((level[j] for j in before), default=0) for i, before in after.items()}
    assert [cell.step for cell in cells(plan)[0]] == [level[i] for i in after]


def test_a_wait_through_an_idle_stream_names_who_launched():
    plan = Plan.parse(
        "plan f.0\nstream a\nstream b\nstream c\nrecord start @caller\nwait start @a\nlaunch x @a\nrecord e0 @a\n"
        "wait e0 @b\nrecord e1 @b\nwait e1 @c\nlaunch y @c\n"
    )
    assert "y  <- a 1" in plan.grid()


def test_a_wait_before_its_record_is_shown():
    plan = Plan.parse("plan f.0\nstream a\nwait e9 @a\nlaunch x @a\n")
    assert "x  <- e9 (never recorded)" in plan.grid()


def test_long_grids_lose_their_middle_only_when_asked():
    steps = "\n".join(f"launch layers.{i}.mlp @caller" for i in range(100))
    plan = Plan.parse(f"plan deep.0\n{steps}\n")
    assert all(f"L{i}.mlp" in plan.grid() for i in range(100))
    short = grid(plan, max_rows=5)
    assert "95 steps left out" in short
    assert [f"L{i}.mlp" in short for i in (0, 1, 2, 3, 97, 98, 99)] == [True, True, True, False, False, True, True]
    assert grid(plan, max_rows=100) == plan.grid()


def test_many_fused_ops_are_named_by_the_first_and_the_last():
    plan = Plan.parse(f"plan f.0\nlaunch [{', '.join(f'layers.{i}.mlp' for i in range(50))}] 0/2 @caller\n")
    assert "[L0.mlp..L49.mlp, 50 ops] 0/2" in plan.grid()


def test_empty_plan():
    assert Plan.parse("plan f.0\n").grid().startswith("plan f.0: 0 launches")


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["model.layers.0.attn", "model.layers.11.mlp", "lm_head"], ["L0.attn", "L11.mlp", "lm_head"]),
        (["net.up", "net.down"], ["up", "down"]),
        (["net", "net.down"], ["net", "net.down"]),
        (["encoder.block.0.mlp", "decoder.block.0.mlp"], ["EB0.mlp", "DB0.mlp"]),
        # initials clash: these stay long, others do not
        (["enc.block.0.a", "ear.block.0.a", "layers.0.a"], ["enc.block.0.a", "ear.block.0.a", "L0.a"]),
        # the short form is taken by another op
        (["layers.0.a", "L0.a"], ["layers.0.a", "L0.a"]),
        # numbers at the end only tell ops apart, unless they are layers elsewhere
        (["model.embed", "model.embed.1"], ["embed", "embed.1"]),
        (["layers.0.mlp", "layers.0", "layers.1"], ["L0.mlp", "L0", "L1"]),
        (["0.up", "1.down"], ["0.up", "1.down"]),
        (["alone"], ["alone"]),
        ([], []),
    ],
)
def test_short_names(names, short):
    assert list(short_names(names)[0].values()) == short


@pytest.mark.parametrize(("name", "shown"), [
    ("pkg.mod.fn", "fn"), ("pkg.mod.fn.3", "fn"), ("pkg.fn(by=0.5)", "fn(by=0.5)"), ("pkg.fn(by=0.5).12", "fn(by=0.5)"),
])  # fmt: skip
def test_a_replacement_is_shown_by_its_function(name, shown):
    """Functions of one name are numbered in the plan; a reader needs the name."""
    launch = Launch((("ar", Part(0, 1, 2)), ("norm", Part(0, 1, 2))), "comm", name)
    assert launch_label(launch) == f"{shown}[ar, norm] 0/2"
