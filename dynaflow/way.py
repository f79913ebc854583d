"""A plan of kernels as a callable, in the place of Inductor's own: on CUDA as one recording, on the CPU on lanes."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Callable, Sequence

import torch

from dynaflow.inductor.kernels import Kernels
from dynaflow.inductor.units import ALIGNMENT
from dynaflow.recorded import PlanBody, is_dense, streams_for
from dynaflow.runtime import fake, generated, graphs, lent, threads
from dynaflow.runtime.lanes import Run
from dynaflow.runtime.program import Bound

if TYPE_CHECKING:
    from dynaflow.region import Region

# sets of addresses at which a case gets the outputs of other recordings, and of all its inputs that are remembered with them
MAX_ADDRESSES, MAX_KNOWN = 8, 64
# of a forward's outputs, those are copied beside which what it saves for its backward has so many times their bytes
MIN_SAVED = 64

_NOTHING = nullcontext()

# a list of arguments, which it empties -> results
Boxed = Callable[[list[Any]], Sequence[Any]]


class Way:
    """A case under a plan: on CUDA as one recording, on the CPU on lanes.

    Parameters and what is changed in place are bound by address, and so is what another recording returned (a backward's saved
    tensors): the same few addresses come again. Of a backward's other inputs Inductor says that they stay where they are; those that are
    seen to move are copied from then on, as all other inputs are. While nothing is recorded, Inductor's own callable runs.
    """

    def __init__(self, region: Region, kernels: Kernels, bound: Bound, device: torch.device, trial: graphs.Pool | None = None):
        """`trial`: memory for a way that is tried. What it takes is not the calls': recordings on other streams leave holes that others
        cannot use."""
        self._is_trial = trial is not None
        self._region, self._kernels, self._bound, self._device = region, kernels, bound, device
        settings = region.settings
        self._runtime, _, self._seed = settings.runtime.partition(":")
        pool = trial or settings.pool
        self._recordings = graphs.Recordings(region.name, device, pool, settings.borrow) if is_recorded(settings.runtime, device) else None
        # of a backward's inputs that Inductor takes to stay where they are, some are saved tensors
        weights = region.static if settings.fixed_weights and not region.is_backward else ()
        names = self._names = [name for name, _ in bound.outputs]
        returns = self._kernels.returns
        # results that the caller gets, of a forward in training: the others are saved for its backward
        num_returned = len(returns) if region.num_returned is None else region.num_returned
        returned, kept = ({r[0] for r in part if len(r) == 2} for part in (returns[:num_returned], returns[num_returned:]))
        saved = [n for n, name in enumerate(names) if name not in returned]
        # (a copy of what is saved as well would be new to the backward in every call)
        little = _little([n for n, name in enumerate(names) if name in returned - kept], saved, [bound.nbytes(name) for name in names])
        self._body = PlanBody(bound, self._kernels.inputs, self._kernels.changed, device, lambda op: "", weights, saved, little)
        # where the plan's outputs, each as a whole, and constants are all that is returned: their numbers
        is_plain = all(len(r) == 1 or (r[1] is None and r[0] in names) for r in returns)
        self._constants = [r[0] for r in returns if len(r) == 1]
        behind = itertools.count(len(names))
        self._order = [next(behind) if len(r) == 1 else names.index(r[0]) for r in returns] if is_plain else None
        inputs = [i for i, _ in self._kernels.inputs if i not in self._kernels.changed]
        static = set(region.static)
        # inputs that may move, and those that do
        self._checked = inputs if region.is_backward else [i for i in inputs if i not in static]
        self._moving = {i for i in self._checked if i not in static}
        # inputs whose addresses tell recordings apart where they are lent: a backward may well change a saved tensor in place
        self._keyed = [*self._checked, *self._kernels.changed]
        self._keys: dict[tuple[int, ...], _Key] = {}
        # the same by the addresses of all of them, for as long as the same of them are lent
        self._known: dict[tuple[int, ...], _Key] = {}
        self._known_at = -1

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        with torch.no_grad() if torch.is_grad_enabled() else _NOTHING, on(self._device):
            outputs = self._recorded(args) if self._recordings is not None else None
            if outputs is None:
                if self._device.type == "cuda" and not (torch.cuda.is_current_stream_capturing() and are_aligned(args)):
                    return self._region.plain(args)
                outputs = self._issue(args)
        if not self._is_trial:
            self._region.settings.count_planned(self._bound.num_launches, 0)
        if self._order is not None:
            all_of_them = [*outputs, *self._constants] if self._constants else outputs
            results: Sequence[Any] = [all_of_them[i] for i in self._order]
        else:
            results = self._kernels.hand_out(args, dict(zip(self._names, outputs)))
        args.clear()
        return results

    def warm_up(self, args: Sequence[Any]) -> None:
        """Launch by launch: streams are made, kernels load, libraries make their workspaces. Nothing of it may happen in a capture."""
        with torch.no_grad(), on(self._device):
            self._issue(args)

    def _recorded(self, args: list[Any]) -> Sequence[torch.Tensor] | None:
        assert self._recordings is not None
        key = self._key(args)
        if key is None:
            return None
        outputs = self._recordings.replay(key, args)
        if outputs is None and self._is_aligned(args):
            self._moving.update(i for i, address in key.addresses.items() if args[i].data_ptr() != address)
            copied = self._slots(args)
            key.addresses = {i: args[i].data_ptr() for i in self._checked if i not in copied}
            outputs = self._recordings.record(key, args, lambda: copied, self._body)
        return outputs

    def _key(self, args: Sequence[Any]) -> _Key | None:
        """On the path of every call, and a backward has hundreds of inputs: whether each is lent is asked once."""
        if self._known_at != (version := lent.version()) or len(self._known) >= MAX_KNOWN:
            self._known.clear()
            self._known_at = version
        everywhere = tuple([args[i].data_ptr() for i in self._keyed])
        key = self._known.get(everywhere)
        if key is None:
            addresses = tuple([address for i, address in zip(self._keyed, everywhere) if lent.is_lent(args[i])])
            key = self._keys.get(addresses)
            if key is None:
                if len(self._keys) >= MAX_ADDRESSES:
                    return None
                key = self._keys[addresses] = _Key()
            self._known[everywhere] = key
        return key

    def _slots(self, args: Sequence[Any]) -> dict[int, tuple[int, int] | None]:
        """Inputs that are copied. What is expanded cannot be: its slot would be written several times in one place."""
        return {i: None for i in self._checked if i in self._moving and not lent.is_lent(args[i]) and is_dense(args[i])}

    def _is_aligned(self, args: Sequence[Any]) -> bool:
        copied = self._slots(args)
        return not any(args[i].data_ptr() % ALIGNMENT for i, _ in self._kernels.inputs if i not in copied)

    def _issue(self, args: Sequence[Any]) -> Sequence[torch.Tensor]:
        bound = self._bound
        values = {name: args[i] for i, name in self._kernels.inputs}
        if self._device.type == "cuda" or self._runtime in ("serial", "graph") or not bound.streams:
            return generated.run(bound, values, streams_for(self._device if self._device.type == "cuda" else None, bound))
        is_fake = self._runtime == "fake"
        tensors = bound.tensors(values, poison=is_fake)
        run = Run(bound, tensors, {})
        if is_fake:
            fake.issue(bound, run, int(self._seed) if self._seed.isdigit() else self._seed or "issue")
        else:
            threads.issue(bound, run)
        return list(bound.results(tensors).values())


class _Key:
    """Stands for a recording's outputs of other recordings, by address."""

    def __init__(self) -> None:
        # where inputs were that may move, and are bound by address
        self.addresses: dict[int, int] = {}


def _little(outputs: Sequence[int], saved: Sequence[int], num_bytes: Sequence[int]) -> list[int]:
    """Outputs, the smallest first, which together are little beside what is saved."""
    found, left = [], sum(num_bytes[n] for n in saved) // MIN_SAVED
    for n in sorted(outputs, key=lambda n: num_bytes[n]):
        left -= num_bytes[n]
        if left < 0:
            break
        found.append(n)
    return found


def device_of(args: Sequence[Any]) -> torch.device:
    devices = [a.device for a in args if isinstance(a, torch.Tensor)]
    return next((d for d in devices if d.type == "cuda"), devices[0] if devices else torch.device("cpu"))


def is_recorded(runtime: str, device: torch.device) -> bool:
    return runtime == "graph" or (runtime == "auto" and device.type == "cuda")


def on(device: torch.device) -> Any:
    """Kernels are launched on the current device."""
    is_elsewhere = device.type == "cuda" and device.index not in (None, torch.cuda.current_device())
    return torch.cuda.device(device) if is_elsewhere else _NOTHING


def are_aligned(args: Sequence[Any]) -> bool:
    """Kernels take for granted that what they read is aligned; around Inductor's own callable it is seen to."""
    return not any(isinstance(a, torch.Tensor) and a.device.type == "cuda" and a.data_ptr() % ALIGNMENT for a in args)


def is_capturing(args: Sequence[Any]) -> bool:
    return device_of(args).type == "cuda" and torch.cuda.is_current_stream_capturing()
