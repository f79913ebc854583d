"""What plans of kernels may hold, and what they hold: all that lives beside them included.

Contract: a plan that `Room.take` accepts holds at most so many times what Inductor's own order of the same kernels does, weights and inputs
included (`max_memory`; 1.25 where nothing is said).

1. Of one call: what it is given, the plan's peak, workspaces of libraries, what the allocator keeps for each stream.
2. Of a training step: what a forward saves stands until its next call, and the gradients come beside it. Inductor lets go of what is
   saved while its backward goes on, and gradients take its place. Where nothing is said, that counts on a device on which it would be
   missed: a small step is recorded for the time that launching it takes, not for its branches alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from dynaflow.costs import Costs
from dynaflow.inductor.kernels import Kernels
from dynaflow.ir import CALLER, Flow, Stream, evaluate
from dynaflow.measure import SMALL_SEGMENT
from dynaflow.runtime.program import Bound
from dynaflow.runtime.workspaces import workspace_bytes
from dynaflow.strategies.confined import Confined
from dynaflow.way import device_of, is_recorded

if TYPE_CHECKING:
    from dynaflow.region import Region

# what a plan may hold where nothing is said: so many times what Inductor's own order holds, or so much more, where that is more: what the
# allocator asks for at a time, at least
MAX_MEMORY, SPARE_BYTES = 1.25, SMALL_SEGMENT
# streams with a workspace that measuring products is worth
MIN_MEASURED = 3
# products, and kernels that allocate, stay on the caller's stream where they take less than this share of the time: memory is kept for
# every other stream that they run on
FEW = 0.1
# what stands in training is not missed where there is so many times as much free
NOT_MISSED = 10
# streams of a plan that is tried, at most
MAX_STREAMS = 16


@dataclass(frozen=True)
class Beside:
    """In a training step: what one of its two calls holds, or lets go of, for the other's sake."""

    # gradients, which come in a backward while all that this forward saves stands
    gradient_bytes: int = 0
    # of Inductor's peak: what this backward lets go of, where it would all stand
    freed_bytes: int = 0


ALONE = Beside()


class Room:
    """What plans of these kernels may hold, what the call is given included.

    Inductor's order has one workspace for its products. A plan has one more for every side stream that has some, and those are kept for
    good: of plans that were tried before, too. What kernels allocate themselves, results or memory to work in, the allocator keeps for
    each stream on its own, in segments: in Inductor's order results lie with all else.
    """

    def __init__(
        self, args: Sequence[Any], serial: Bound, max_memory: float | None, costs: Costs | None = None, beside: Beside = ALONE
    ):
        self._beside = beside
        device = device_of(args)
        self._given_bytes, self._workspace_bytes, self._free_bytes = _num_bytes(args), workspace_bytes(device), free_bytes(device)
        self._serial, self._max_memory, self._products = serial, max_memory, serial.program.products or frozenset()
        # side streams that have a workspace by now
        self._streams: frozenset[Stream] = frozenset()
        self.learn(costs or {})

    def learn(self, costs: Costs) -> None:
        """What the allocator holds for kernels counts from now on."""
        self._held_bytes = {name: cost.held_bytes for name, cost in costs.items() if cost.held_bytes}
        held, recorded = self._inductors(), self._sum(self._serial, frozenset())
        if self._max_memory is None and NOT_MISSED * (recorded - held) <= self._free_bytes:
            held = recorded
        self.limit = max(MAX_MEMORY * held, held + SPARE_BYTES) if self._max_memory is None else self._max_memory * held
        # workspaces that there is room for, beside that of Inductor's order
        left = max(0.0, self.limit - recorded)
        self.num_spare = int(left // self._workspace_bytes) if self._workspace_bytes else MAX_STREAMS

    def held(self, bound: Bound) -> int:
        """With it, once it has run."""
        return self._sum(bound, self._streams | bound.product_streams)

    def _inductors(self) -> int:
        """At the peak of Inductor's own order: of a forward's step, that is now, or when all gradients are there."""
        now = self._sum(self._serial, frozenset()) - self._beside.gradient_bytes
        return max(now - self._beside.freed_bytes, self._given_bytes + self._beside.gradient_bytes)

    def _sum(self, bound: Bound, streams: Collection[Stream]) -> int:
        num_workspaces = bool(bound.program.products) + len(streams)
        here = self._given_bytes + bound.peak_bytes + self._beside.gradient_bytes
        return here + num_workspaces * self._workspace_bytes + self._kept_by_streams(bound)

    def _kept_by_streams(self, bound: Bound) -> int:
        """For what kernels allocate: per stream the most that one of them takes. Results are part of the plan's peak: what counts is what
        the allocator holds beside them, and on the caller's stream, where all else lies, nothing."""
        if not self._held_bytes:
            return 0
        most: dict[str, int] = {}
        loose = set(bound.plan.loose)
        for launch in bound.plan.launches:
            for name, _ in launch.calls:
                results = loose.intersection(bound.program.flow.op(name).writes) if name in self._held_bytes else ()
                if launch.stream != CALLER or not results:
                    beside = self._held_bytes.get(name, 0) - sum(map(bound.nbytes, results))
                    most[launch.stream] = max(most.get(launch.stream, 0), beside)
        return sum(most.values())

    def take(self, bound: Bound) -> bool:
        """Whether it may run; it is taken to, then."""
        if self.held(bound) > self.limit:
            return False
        self._streams |= bound.product_streams
        return True

    def make(self, streams: Sequence[Stream]) -> Sequence[Stream]:
        """Those of them that get a workspace to measure products by: none where it would be few. One is left for what has another
        priority, and one for what the allocator keeps for streams."""
        made = streams[: self.num_spare - 2] if self.num_spare - 2 >= MIN_MEASURED else ()
        self._streams |= frozenset(made)
        return made

    def confined(self, costs: Costs) -> Iterator[Confined]:
        """Products, and kernels that allocate, to as many streams as there is room for what is kept for them, and as they are worth; then,
        for where that is too much together, one of the two to the caller's stream, and both."""
        kept_for = ((self._products, self._workspace_bytes), self._allocating(costs))
        groups = [(names, self._num_streams(costs, names, each_bytes)) for names, each_bytes in kept_for if names]
        narrowed = (
            tuple((names, 1 if k in to_one else count) for k, (names, count) in enumerate(groups)) for to_one in ((), (1,), (0,), (0, 1))
        )
        yield from map(Confined, dict.fromkeys(narrowed))

    def _allocating(self, costs: Costs) -> tuple[frozenset[str], int]:
        """Those that take more than the smallest segment, and the most that one of them takes."""
        large = {name: cost.held_bytes for name, cost in costs.items() if cost.held_bytes > SMALL_SEGMENT and name not in self._products}
        return frozenset(large), max(large.values(), default=0)

    def _num_streams(self, costs: Costs, names: Collection[str], each_bytes: int) -> int:
        if sum(costs[name].us for name in names) < FEW * sum(cost.us for cost in costs.values()):
            return 1
        return 1 + (int(max(0.0, self.limit - self._sum(self._serial, frozenset())) // each_bytes) if each_bytes else MAX_STREAMS)


def free_bytes(device: torch.device) -> int:
    """On a GPU, what the allocator has and nobody uses included."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.mem_get_info(device)[0]) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _num_bytes(args: Sequence[Any]) -> int:
    """What the arguments hold."""
    storages = {s.data_ptr(): s.nbytes() for s in (a.untyped_storage() for a in args if isinstance(a, torch.Tensor))}
    return sum(storages.values())


def room_for(region: Region, kernels: Kernels, serial: Bound, args: Sequence[Any], costs: Costs | None = None) -> Room:
    """`serial`: the kernels in Inductor's order."""
    # in training; what is not recorded lets go of what it saves as Inductor does
    stands = region.num_returned is not None and is_recorded(region.settings.runtime, device_of(args))
    gradients = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad] if stands else ()
    saved = {name for i, name in kernels.inputs if _is_saved(args[i])} if region.is_backward else ()
    return Room(args, serial, region.settings.max_memory, costs, Beside(_num_bytes(gradients), freed_bytes(kernels.flow, saved)))


def _is_saved(arg: torch.Tensor) -> bool:
    """Among a backward's inputs, whether it is most likely a forward's intermediate, and not a weight (a quantised one has other types)."""
    return arg.is_floating_point() and not isinstance(arg, torch.nn.Parameter)


def freed_bytes(flow: Flow, saved: Collection[str]) -> int:
    """How much lower the peak of the program's order is for letting go of these inputs, each behind its last use."""
    if not saved:
        return 0
    born: dict[str, int] = {}
    last: dict[str, int] = {}
    for at, op in enumerate(flow.ops):
        for name in map(flow.home, (*op.reads, *op.writes, *op.mutates)):
            if flow.value[name].role in ("temp", "output"):
                born.setdefault(name, at)
            last[name] = at
    last.update(dict.fromkeys(flow.outputs, len(flow.ops)))
    change = [0] * (len(flow.ops) + 2)
    for name, at in born.items():
        change[at] += _size(flow, name)
        change[last[name] + 1] -= _size(flow, name)
    made = list(accumulate(change))
    standing = sum(_size(flow, name) for name in saved)
    for name in saved:
        change[last.get(name, -1) + 1] -= _size(flow, name)
    left = [standing + now for now in accumulate(change)]
    return standing + max(made) - max(left)


def _size(flow: Flow, name: str) -> int:
    return evaluate(flow.value[name].nbytes, {})
