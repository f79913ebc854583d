"""The variants of a row. Inference: baselines in a CUDA Graph. Training: whatever torch.compile has to offer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks import variants
from benchmarks.branches import ours
from benchmarks.branches.rows import Row
from benchmarks.cases import Call, Case
from benchmarks.variants import compiled, graphed, plain

EAGER, EAGER_GRAPH = "eager", "eager+graph"
COMPILE, COMPILE_GRAPH = "torch.compile", "torch.compile+graph"
REDUCE, MAX_AUTOTUNE = "reduce-overhead", "max-autotune"
OURS = ours.NAME
# inside of the caller's own CUDA Graph, as the baselines are: no guards, no copies of outputs
OURS_GRAPH = "dynaflow+graph"
# with the kernels that max-autotune found
OURS_TUNED = "dynaflow, max-autotune"


def _eager(case: Case, _: Mapping[str, Any]) -> Call:
    return lambda number: case.finish(case.module(**case.args(number)))


class Variants(variants.Variants):
    builders = {
        EAGER: _eager,
        EAGER_GRAPH: graphed(plain),
        COMPILE: compiled(),
        COMPILE_GRAPH: graphed(),
        REDUCE: compiled(mode="reduce-overhead"),
        MAX_AUTOTUNE: compiled(mode="max-autotune"),
        OURS: ours.build,
        OURS_GRAPH: graphed(ours.compiled),
        OURS_TUNED: ours.build_tuned,
    }  # fmt: skip
    on_cuda_only = frozenset({EAGER_GRAPH, COMPILE_GRAPH, OURS_GRAPH, REDUCE, MAX_AUTOTUNE, OURS_TUNED})


def names(row: Row, is_cuda: bool) -> tuple[str, ...]:
    """The variants of a row, those that tune last: they take the longest to make."""
    if not is_cuda:
        return EAGER, COMPILE, OURS
    if row.is_training:
        return EAGER, COMPILE, REDUCE, OURS, *TUNED
    return EAGER_GRAPH, COMPILE_GRAPH, OURS, OURS_GRAPH, *TUNED


TUNED = (MAX_AUTOTUNE, OURS_TUNED)
# the baselines that a speedup may be against: the fastest of them is, and ours is the faster of these two
BASELINES = (COMPILE, COMPILE_GRAPH, REDUCE, MAX_AUTOTUNE)
MINE = (OURS, OURS_TUNED)


def to_warm(row: Row, is_cuda: bool) -> tuple[str, ...]:
    """What fills the caches on disk for `names`, without max-autotune. torch.compile+graph runs torch.compile's code."""
    wanted = [n for n in names(row, is_cuda) if n in (*BASELINES, OURS) and n != MAX_AUTOTUNE]
    return tuple(COMPILE if n == COMPILE_GRAPH else n for n in wanted)
