"""Where a step of a serving engine may be cut: its tokens lie request by request, and parts of it run in the order of their rows.

`starts` holds the first token of each request in the step, and the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from dynaflow.errors import FellBack


def place_cuts(cuts: Sequence[int], starts: np.ndarray, together: Iterable[tuple[int, int]] = ()) -> list[int]:
    """The nearest places for cuts: at a request's first token, if one is no further than a quarter of a part; else inside a request, whose
    later tokens then read what its earlier ones have written.

    `together`: pairs (first, last) of requests that no cut may part, because the first reads what the last writes.
    """
    num_tokens = int(starts[-1])
    is_allowed = np.ones(num_tokens + 1, bool)
    for first, last in together:
        is_allowed[starts[first] + 1 : starts[last + 1]] = False
    near = num_tokens // (4 * (len(cuts) + 1))
    placed, before = [], 0
    for cut in cuts:
        rows = before + 1 + np.flatnonzero(is_allowed[before + 1 : num_tokens])
        if not rows.size:
            raise FellBack("no cut leaves readers of the prefix cache with their writers.")
        between = np.intersect1d(starts, rows)
        if between.size and np.abs(between - cut).min() <= near:
            rows = between
        before = int(rows[np.abs(rows - cut).argmin()])
        placed.append(before)
    return placed


def readers_before_writers(computed: np.ndarray, starts: np.ndarray, blocks: np.ndarray, block_size: int) -> set[tuple[int, int]]:
    """Pairs (reader, writer) of requests, the reader first in the step, which shares blocks of a prefix cache that the writer, admitted
    earlier, is only computing now. In a step as a whole, all writes come before all reads; in parts, those of later parts do not.

    computed   tokens per request that are in the cache, or will be by this step
    blocks     per request: the numbers of its blocks, in order
    """
    first, end = computed // block_size, -(-(computed + np.diff(starts)) // block_size)
    columns = np.arange(int(end.max()))
    blocks = blocks[: len(computed), : len(columns)]
    writer = np.full(int(blocks.max()) + 1, -1)
    requests, at = np.nonzero((columns >= first[:, None]) & (columns < end[:, None]))
    writer[blocks[requests, at]] = requests
    # whole blocks only: one that is partly filled is its request's own
    readers, at = np.nonzero(columns < first[:, None])
    writers = writer[blocks[readers, at]]
    return {(int(r), int(w)) for r, w in zip(readers, writers) if w > r}
