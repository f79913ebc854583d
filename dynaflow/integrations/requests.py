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
    is_allowed = np.ones(num_tokens, bool)
    is_allowed[0] = False
    for first, last in together:
        is_allowed[starts[first] + 1 : starts[last + 1]] = False
    rows = np.flatnonzero(is_allowed)
    if rows.size < len(cuts):
        raise FellBack("no cut leaves readers of the prefix cache with their writers.")
    near = num_tokens // (4 * (len(cuts) + 1))
    placed: list[int] = []
    for i, cut in enumerate(cuts):
        free = rows[: rows.size - (len(cuts) - 1 - i)]  # the last ones are for the cuts that follow
        between = np.intersect1d(starts, free)
        if between.size and np.abs(between - cut).min() <= near:
            free = between
        placed.append(int(free[np.abs(free - cut).argmin()]))
        rows = rows[rows > placed[-1]]
    return placed


def readers_and_writers(
    computed: np.ndarray, starts: np.ndarray, blocks: np.ndarray, block_size: int, window: int | None = None
) -> set[tuple[int, int]]:
    """Pairs (reader, writer) of requests: the reader shares blocks of a prefix cache that the writer, admitted earlier, is only computing
    now. In a step as a whole, all writes come before all reads; in parts, those of later parts do not.

    computed   tokens per request that are in the cache, or will be by this step
    blocks     per request: the numbers of its blocks, in order
    window     how many tokens each one looks at, itself included, where attention slides; what lies before is given to other requests,
               and its numbers stay in the table
    """
    first, end = computed // block_size, -(-(computed + np.diff(starts)) // block_size)
    columns = np.arange(int(end.max()))
    blocks = blocks[: len(computed), : len(columns)]
    writer = np.full(int(blocks.max()) + 1, -1)
    requests, at = np.nonzero((columns >= first[:, None]) & (columns < end[:, None]))
    writer[blocks[requests, at]] = requests
    # whole blocks only: one that is partly filled is its request's own
    oldest = 0 * first if window is None else np.maximum(computed - window + 1, 0) // block_size
    readers, at = np.nonzero((columns >= oldest[:, None]) & (columns < first[:, None]))
    writers = writer[blocks[readers, at]]
    return {(int(r), int(w)) for r, w in zip(readers, writers) if w >= 0}
