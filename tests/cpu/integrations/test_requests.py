"""Cuts of a serving engine's step."""

import numpy as np
import pytest

from dynaflow.errors import FellBack
from dynaflow.integrations.requests import place_cuts, readers_and_writers

PLACED = {
    # lengths of requests, cuts, requests that stay together, where the cuts go
    "between decodes": ([1] * 8, [4], [], [4]),
    "at the nearest request": ([30, 40, 30], [50], [], [30 + 40 // 2]),
    "a request is near": ([45, 25, 30], [50], [], [45]),
    "one long request": ([100], [25, 50, 75], [], [25, 50, 75]),
    "a long one behind decodes": ([1, 1, 1, 97], [50], [], [50]),
    "never twice": ([1, 1, 98], [1, 2], [], [1, 2]),
    "kept together, behind": ([20, 49, 11], [40], [(0, 1)], [69]),
    "kept together, before": ([15, 20, 49], [42], [(1, 2)], [15]),
    "two pairs that overlap": ([10, 10, 10, 70], [30], [(0, 1), (1, 2)], [30]),
    "two cuts at one request": ([99, 1], [97, 99], [], [97, 99]),
    "two cuts, one place": ([50, 30, 20], [79, 80], [(1, 2)], [49, 50]),
    "readers of one writer": ([10, 10, 10, 10, 10, 50], [30], [(0, 4), (1, 4)], [50]),
}  # fmt: skip


@pytest.mark.parametrize("case", PLACED)
def test_cuts(case):
    lengths, cuts, together, wanted = PLACED[case]
    starts = np.cumsum([0, *lengths])
    assert place_cuts(cuts, starts, together) == wanted
    for first, last in together:
        assert not any(starts[first] < cut < starts[last + 1] for cut in wanted)


def test_rejects_a_step_without_a_place():
    with pytest.raises(FellBack, match="no cut leaves readers"):
        place_cuts([35], np.array([0, 20, 69]), [(0, 1)])
    with pytest.raises(FellBack):
        place_cuts([1, 1], np.array([0, 1, 2]))
    assert place_cuts([1, 1], np.array([0, 1, 3])) == [1, 2], "the twin: two places"


# block tables: requests' blocks in order; a block of 4 tokens
SHARED = {
    # computed, lengths, blocks, pairs
    "strangers": ([4, 0], [4, 8], [[1, 2], [3, 4]], set()),
    "the writer comes first": ([0, 4], [8, 3], [[1, 2], [1, 3]], {(1, 0)}),
    "the reader comes first": ([4, 0], [3, 8], [[1, 3], [1, 2]], {(0, 1)}),
    "of earlier steps": ([4, 4], [3, 8], [[1, 3, 0], [1, 2, 4]], set()),
    "one token is left": ([4, 0], [1, 8], [[1, 3], [1, 2]], {(0, 1)}),
    "the rest of a block": ([4, 2], [3, 2], [[1, 3], [1, 0]], {(0, 1)}),
    "its own": ([5, 0], [3, 4], [[1, 2], [3, 0]], set()),
    "two readers": ([4, 4, 0], [1, 2, 5], [[1, 3], [1, 4], [1, 2]], {(0, 2), (1, 2)}),
    "a decode that shares an old block": ([7, 4], [1, 4], [[1, 2], [1, 3]], set()),
}  # fmt: skip


@pytest.mark.parametrize("case", SHARED)
def test_readers_of_what_is_being_written(case):
    computed, lengths, blocks, wanted = SHARED[case]
    assert readers_and_writers(np.array(computed), np.cumsum([0, *lengths]), np.array(blocks), 4) == wanted


@pytest.mark.parametrize("window, wanted", [(None, {(0, 1)}), (1, set()), (2, set()), (3, {(0, 1)}), (99, {(0, 1)})])
def test_what_a_window_has_left_behind_is_not_read(window, wanted):
    """Request 0 is at token 9: its token to come sees tokens 7 to 9 through a window of 3, and block 7, which another one writes by
    now, held 4 to 7."""
    found = readers_and_writers(np.array([9, 0]), np.array([0, 1, 5]), np.array([[3, 7, 8], [7, 0, 0]]), 4, window)
    assert found == wanted
