"""A product and the collective behind it in chunks of rows: each chunk is sent while the next is computed.

On CUDA the collectives run on a stream beside the current one, on the CPU on a thread. Results are those of the two ops one after the
other, as far as a matrix product gives the same for some of its rows as for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from torch._subclasses import FakeTensor

from dynaflow.replacement import Body
from dynaflow.runtime.lanes import Ambient

Tensors = tuple[torch.Tensor, ...]


def can_chunk(product: Body, send: Body, both: Body) -> bool:
    """Whether rows of the product can be told apart, and the collective alone takes them and gives rows back (or changes them in place)."""
    takes_rows = send.inputs == product.unit.outs and None not in send.in_axes + send.out_axes
    return product.rows_at is not None and takes_rows and len(both.unit.outs) == 1 and both.unit.outs == (send.unit.outs or send.inputs)


class Chunked:
    """Takes what the product takes, returns what the collective returns; with `outs`, leaves it there. `in_turn`: the same chunks, each
    sent before the next is computed: what sending beside is held against."""

    takes_outs = True

    def __init__(self, product: Body, send: Body, num_chunks: int, in_turn: bool = False):
        self.product, self.send, self.num_chunks, self.in_turn = product, send, num_chunks, in_turn
        self.__qualname__ = f"chunked(num_chunks={num_chunks}{', in_turn' * in_turn})"  # what plans call it

    def serialised(self) -> Chunked:
        return Chunked(self.product, self.send, self.num_chunks, in_turn=True)

    def __call__(self, *inputs: torch.Tensor, outs: Sequence[torch.Tensor] = ()) -> torch.Tensor:
        x, dim, cuts = inputs[0], (self.send.out_axes or self.send.in_axes)[0] or 0, self._cuts(inputs)
        beside = in_turn if self.in_turn or isinstance(x, FakeTensor) else on_stream if x.is_cuda else on_thread
        if not outs:
            return torch.cat([result for (result,) in beside(self._chunks(inputs, cuts), self._send)], dim)
        (out,) = outs
        places = iter([_cut(out, dim, cuts[-1], lo, hi) for lo, hi in zip(cuts, cuts[1:])])

        def send_into_place(*chunk: torch.Tensor) -> Tensors:
            """Beside the next product, too."""
            (result,), place = self._send(*chunk), next(places)
            assert result.shape == place.shape, f"a collective made {tuple(result.shape)} of a chunk, not {tuple(place.shape)}"
            place.copy_(result)
            return (result,)

        beside(self._chunks(inputs, cuts), send_into_place)
        return out

    def _send(self, *chunk: torch.Tensor) -> Tensors:
        return self.send(*chunk) or chunk  # one that works in place returns nothing

    def _cuts(self, inputs: Tensors) -> list[int]:
        """The rows between chunks, with the first and the last."""
        at, dim = self.product.rows_at or (0, 0)
        rows = inputs[at].shape[dim]
        num_chunks = min(self.num_chunks, rows)
        return [rows * k // num_chunks for k in range(num_chunks + 1)]

    def _chunks(self, inputs: Tensors, cuts: Sequence[int]) -> Iterator[Tensors]:
        for lo, hi in zip(cuts, cuts[1:]):
            each = zip(inputs, self.product.in_axes, strict=True)
            yield self.product(*(_cut(x, axis, cuts[-1], lo, hi) for x, axis in each))


def _cut(x: torch.Tensor, axis: int | None, rows: int, lo: int, hi: int) -> torch.Tensor:
    if axis is None:
        return x
    per_row = x.shape[axis] // rows
    return x.narrow(axis, lo * per_row, (hi - lo) * per_row)


def in_turn(chunks: Iterator[Tensors], send: Callable[..., Tensors]) -> list[Tensors]:
    return [send(*chunk) for chunk in chunks]


def on_thread(chunks: Iterator[Tensors], send: Callable[..., Tensors]) -> list[Tensors]:
    """Each collective starts when its chunk is there; one after the other, in order, as all ranks expect."""
    ambient = Ambient()

    def run(chunk: Tensors) -> Tensors:
        with ambient.enter():
            return send(*chunk)

    with ThreadPoolExecutor(1, "dynaflow-chunks") as thread:
        sent: list[Future[Tensors]] = [thread.submit(run, chunk) for chunk in chunks]
        return [one.result() for one in sent]


@cache
def _side_stream(device: int, stream: int) -> Any:
    """One per stream that calls: its memory is used again only after that stream's earlier work."""
    return torch.cuda.Stream(device, priority=-1)


def on_stream(chunks: Iterator[Tensors], send: Callable[..., Tensors]) -> list[Tensors]:
    main = torch.cuda.current_stream()
    side = _side_stream(main.device.index, main.cuda_stream)
    made, sent = [], []  # both are kept until the streams have met again
    try:
        for chunk in chunks:
            made.append(chunk)
            side.wait_stream(main)
            with torch.cuda.stream(side):
                sent.append(send(*chunk))
    finally:
        main.wait_stream(side)
    return sent
