"""The oracle of random programs: what a call does must be what eager mode does, and bit for bit what its serialised plan does.

1. `Tally`: what was checked, and what went wrong.
2. `World`: all that the outside can see of one call; `difference` of two.
3. `check_program`: under every strategy, runtime and batch size, through one compiled callable, a program must do what eager mode
   does (results, strides, changed inputs and buffers, what shares memory with what).

Programs that are trained have an oracle of their own, which stands on this one: `program_histories.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Callable

import torch
from torch import nn

import dynaflow as df
from dynaflow.capture import Compiled
from dynaflow.engine import CapturedGraph
from dynaflow.settings import Stats, read_settings
from dynaflow.strategies import Auto
from dynaflow.strategy import Strategy
from dynaflow.testing.strategies import RandomStrategy

if TYPE_CHECKING:
    from dynaflow.testing.programs import Program

BATCH_SIZES = (8, 3, 2, 5, 17, 1)


# ---------------------------------------------------------------------------- 1. what was checked


@dataclass
class Tally:
    """What was checked, why calls fell back, and what went wrong."""

    counts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    # what plain torch.compile does wrong, too
    not_ours: list[str] = field(default_factory=list)

    def fell_back(self, stats: Stats) -> None:
        for reason, count in stats.fallbacks.items():
            self.reasons[re.sub(r"'[^']*'|\d+|\[.*?\]", "_", reason.splitlines()[0])[:110]] += count

    def __str__(self) -> str:
        return "\n".join([
            *(self._of_training() if self.counts["histories"] else self._of_calls()),
            *(f"  fell back {n:>5} times: {reason}" for reason, n in self.reasons.most_common(12)),
            *(f"NOT OURS {text}" for text in self.not_ours),
            *(f"VIOLATION {v}" for v in self.violations),
            f"{len(self.violations)} violations",
        ])  # fmt: skip

    def _of_calls(self) -> list[str]:
        c = self.counts
        share = c["split"] / max(c["programs"], 1)
        return [
            f"{c['programs']} programs ({c['invalid']} more not valid in eager mode), {c['lines']} lines, {c['captures']} captures",
            f"{c['split']} ran split ({share:.0%}), {c['whole']} were planned but never split, {c['never']} never planned",
            f"{c['calls']} calls of graphs, {c['planned calls']} under plans: {c['launches']} launches, {c['part launches']} on parts",
            f"{c['ops']} ops, {c['whole ops']} of them only over the whole batch",
            f"{c['runs']} runs compared with eager mode, and bit for bit with the serialised plan",
        ]

    def _of_training(self) -> list[str]:
        c = self.counts
        return [
            f"{c['trained']} programs were trained ({c['invalid']} more not valid in eager mode, of {c['unstable']} rounding decides), "
            f"{c['lines']} lines, {c['captures']} captures",
            f"{c['histories']} histories: {c['forwards']} forwards, {c['backwards']} backwards, {c['plans']} plans, "
            f"{c['planned calls']} of {c['forwards'] + c['backwards']} under plans: {c['launches']} launches",
            f"{c['tensors']} tensors compared with eager mode, and {c['exact']} bit for bit with one stream; {c['kept']} that were kept",
        ]


# ---------------------------------------------------------------------------- 2. one call


# under what a model without gradients is called
MODES: dict[str, Callable[[str], Any]] = {
    "no_grad": lambda device: torch.no_grad(), "inference": lambda device: torch.inference_mode(),
    "nothing": lambda device: contextlib.nullcontext(), "autocast": lambda device: torch.autocast(device, torch.bfloat16),
}  # fmt: skip


class World:
    """Everything that the outside can see of one call: results, inputs, buffers, and what shares memory with what."""

    def __init__(
        self, program: Program, batch_size: int, function: Callable[..., Any], model: nn.Module, draw: int = 0, mode: str = "no_grad"
    ):
        args, kwargs = program.inputs(batch_size, draw)
        torch.manual_seed(program.seed + draw)
        with MODES[mode](program.device):
            result = function(*args, **kwargs)
        leaves = leaves_of(result)
        self.outputs = [t for t in leaves if isinstance(t, torch.Tensor)]
        # all but tensors, and where tensors are
        self.form = ["tensor" if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves]
        self._tensors = {f"output {i}": t for i, t in enumerate(self.outputs)}
        self._tensors.update((f"input {i}", t) for i, t in enumerate(leaves_of((args, kwargs))) if isinstance(t, torch.Tensor))
        self._tensors.update((f"buffer {name}", t) for name, t in model.named_buffers())
        self._tensors.update((f"weight {name}", t.detach()) for name, t in model.named_parameters() if program.is_odd)
        if program.device == "cpu":
            self._tensors["random state"] = torch.get_rng_state()
        self.shared = sharing(self._tensors)
        self.look()

    def look(self) -> None:
        """Buffers live on in later worlds: what is compared are copies."""
        self.seen = {name: (t.detach().clone(), t.stride()) for name, t in self._tensors.items()}

    def touch(self) -> World:
        """Change every output in place: whatever shares its memory shows it."""
        for number, output in enumerate(self.outputs):
            if output.is_floating_point() and not any(n > 1 and stride == 0 for n, stride in zip(output.shape, output.stride())):
                output.mul_(0.5).add_(number + 1)
        self.look()
        return self


def leaves_of(thing: Any) -> list[Any]:
    """Those in dataclasses, too."""
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        return [type(thing).__name__, *leaves_of(list(vars(thing).values()))]
    if isinstance(thing, dict):
        return [*thing, *leaves_of(list(thing.values()))]
    if isinstance(thing, (list, tuple)):
        return [type(thing).__name__, *(leaf for item in thing for leaf in leaves_of(item))]
    return [thing]


def sharing(tensors: dict[str, torch.Tensor]) -> list[list[str]]:
    """Who shares memory with whom."""
    owners: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            owners.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    return sorted(names for names in owners.values() if len(names) > 1)


def difference(got: World, wanted: World, tolerance: float, has_rows: bool = True) -> str:
    """What differs first; empty if nothing does. Tolerance 0: bit for bit. With one row, copies may be views: only numbers count."""
    if got.form != wanted.form:
        return f"returned {got.form}, not {wanted.form}"
    if got.seen.keys() != wanted.seen.keys():
        return f"returned {len(got.outputs)} tensors, not {len(wanted.outputs)}"
    for name, (a, stride) in got.seen.items():
        b, wanted_stride = wanted.seen[name]
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return f"{name} is {a.dtype}{list(a.shape)}, not {b.dtype}{list(b.shape)}"
        if has_rows and a.numel() and any(n > 1 and x != y for n, x, y in zip(a.shape, stride, wanted_stride)):
            return f"{name} of shape {list(a.shape)} has strides {stride}, not {wanted_stride}"
        if problem := off(name, a, b, tolerance):
            return problem
    return "" if got.shared == wanted.shared or not has_rows else f"shares memory as {got.shared}, not {wanted.shared}"


def off(name: str, got: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> str:
    """By how much the numbers differ, where that is more than is allowed. Tolerance 0: bit for bit."""
    allowed = tolerance * max(1.0, float(wanted.abs().max())) if wanted.is_floating_point() and wanted.numel() else 0.0
    if torch.allclose(got, wanted, rtol=0, atol=allowed) if allowed else torch.equal(got, wanted):
        return ""
    return f"{name} is off by {float((got.double() - wanted.double()).abs().max()):.2g}, allowed {allowed:.2g}"


def is_valid(program: Program) -> bool:
    """Eager mode accepts it at every size, and its numbers stay small."""
    try:
        worlds = [World(program, n, model, model) for n in BATCH_SIZES if (model := program.model())]
    except Exception:  # whatever eager mode refuses is no program
        return False
    return all(bool((t.double().abs() < 1e4).all()) for world in worlds for t, _ in world.seen.values())


# ---------------------------------------------------------------------------- 3. one program


class Replanned(CapturedGraph):
    """A graph that can be planned anew, by another strategy: captures are what takes time."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.settings.graphs.append(self)

    def forget(self) -> None:
        if self._is_analysed and self.refusal is None:
            self.bindings.clear()
        for region in self.regions:
            region.forget()


def _ways_to_run(seed: int, rng: random.Random, device: str, compiler: str, kernels: bool = False) -> list[tuple[Strategy, str, int]]:
    """(strategy, runtime, calls per size). Compiling takes seconds: two strategies per program. What is recorded is recorded by the
    second call and replayed by the third; whether anything is recorded is decided at capture."""
    strategies: list[Strategy] = [df.TwoBatch(), df.NanoBatch(3), df.Branches(3), RandomStrategy(seed)]
    for_kernels = [df.Branches(3), RandomStrategy(seed), Auto()]
    if device == "cuda":
        runtime = "graph" if rng.random() < 0.8 else "auto"
        return [(strategy, runtime, 3) for strategy in rng.sample(for_kernels if kernels else strategies, 2)]
    fakes = ["fake:lazy", "fake:greedy", f"fake:{seed}", f"fake:{seed + 1}", "threads"]
    if kernels:  # looked at by the first call, planned by the second
        return [(strategy, rng.choice(["serial", "graph", *fakes]), 3) for strategy in for_kernels]
    if compiler == "eager":
        return [(strategy, rng.choice(fakes), 1) for strategy in strategies]
    # Sequential last: a graph that is captured under it is never planned
    strategies = sorted(rng.sample([df.Sequential(), *strategies], 2), key=lambda s: isinstance(s, df.Sequential))
    if rng.random() < 0.3:
        return [(strategy, "graph", 3) for strategy in strategies]
    return [(strategy, rng.choice(["auto", "serial", *fakes]), 1) for strategy in strategies]


def _ways_to_record(rng: random.Random) -> dict[str, Any]:
    """Options of df.compile's that are about recordings."""
    buckets = rng.choice([None, None, "powers", [4, 8]])
    return {"runtime": "graph", "buckets": buckets, "borrow": rng.random() < 0.1, "fixed_weights": rng.random() < 0.2}


def check_program(program: Program, tally: Tally, compiler: str = "eager", kernels: bool = False) -> None:
    rng = random.Random(program.seed)
    model = program.model()
    torch._dynamo.reset()
    partition = "kernels" if kernels else program.partition
    ways = _ways_to_run(program.seed, rng, program.device, compiler, kernels)
    recording = _ways_to_record(rng) if program.device == "cuda" and ways[0][1] == "graph" and not kernels else {}
    settings = read_settings(
        strategy="two_batch", partition=partition, batch=program.batch, compiler="auto" if kernels else compiler, **recording)
    fast, stats = Compiled(model, settings, Replanned), settings.stats
    sizes = list(BATCH_SIZES)
    if rng.random() < 0.3:
        rng.shuffle(sizes)
    kept = None if settings.borrow else Kept(rng)
    for strategy, runtime, num_calls in ways:
        settings.runtime, settings.strategy = runtime, strategy
        for graph in settings.graphs:
            graph.forget()
        calls = [n for n in sizes for _ in range(num_calls)]
        if runtime == "graph":
            calls += rng.choices(sizes, k=len(sizes))  # replays in any order
        for number, n in enumerate(calls):
            # a replay of what was recorded must be of this call's numbers, and leave those of earlier calls alone
            draw = number if program.device == "cuda" else 0
            # what is padded is bit-equal to the plan of that size
            is_padded = settings.buckets is not None and n not in (settings.buckets if settings.buckets != "powers" else (1, 2, 8))
            mode = rng.choice(list(MODES)) if program.is_odd and rng.random() < 0.4 else "no_grad"
            problem = check_call(program, model, fast, n, kept, program.tolerance if is_padded else 0.0, draw, mode)
            tally.counts["runs"] += 1
            if problem:
                name = f"{type(strategy).__name__} on {runtime}, batch {n}{'' if mode == 'no_grad' else ', ' + mode}"
                is_ours = compiler == "eager" and not kernels and not program.is_odd or not _is_plain(problem, program, n, draw)
                (tally.violations if is_ours else tally.not_ours).append(f"program {program.seed}, {name}: {problem}")
                break
    is_split, is_planned = stats.num_part_launches > 0, stats.planned_calls > 0
    tally.counts.update({
        "programs": 1, "lines": program.source.count("\n"), "captures": stats.captures, "calls": stats.calls,
        "planned calls": stats.planned_calls, "launches": stats.num_launches, "part launches": stats.num_part_launches,
        "ops": stats.num_ops, "whole ops": stats.num_unsplittable,
        "split": is_split, "whole": is_planned and not is_split, "never": not is_planned,
    })  # fmt: skip
    tally.fell_back(stats)


def _is_plain(problem: str, program: Program, batch_size: int, draw: int) -> bool:
    """Whether plain torch.compile does the same wrong, for the sizes at hand or for all. (Dropout that is off is a copy; what is changed
    behind a reshape of all sizes, and what zeros are added to, may be one or not.)"""
    for dynamic in (False, True):
        torch._dynamo.reset()
        eager, model = program.model(), program.model()
        try:
            wanted = World(program, batch_size, eager, eager, draw)
            got = World(program, batch_size, torch.compile(model, dynamic=dynamic), model, draw)
        except Exception as error:
            found = said(error)
        else:
            found = difference(got, wanted, program.tolerance, batch_size > 1)
        if found == problem:
            return True
    return False


def said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"


class Kept:
    """Results that somebody keeps while the model is called again: no later call may change them."""

    def __init__(self, rng: random.Random):
        self._rng, self._worlds = rng, list[World]()

    def keep(self, world: World) -> None:
        if self._rng.random() < 0.5:
            self._worlds.append(world)
        if len(self._worlds) > 6:
            self._worlds.pop(self._rng.randrange(6))

    def changed(self) -> str:
        """What no longer is what it was; empty where all is. (What lies in a buffer of the model's is everybody's.)"""
        for world in self._worlds:
            of_the_model = {name for names in world.shared if any(n.startswith(("buffer", "weight")) for n in names) for name in names}
            for i, output in enumerate(world.outputs):
                if (name := f"output {i}") not in of_the_model and not torch.equal(output, world.seen[name][0]):
                    return f"{name} of an earlier call was changed"
        return ""


def check_call(
    program: Program, model: nn.Module, fast: Any, batch_size: int, kept: Kept | None = None, tolerance: float = 0.0, draw: int = 0,
    mode: str = "no_grad",
) -> str:  # fmt: skip
    """One call, against eager mode and against its serialised plan. Every world starts from the same weights and buffers."""
    start = program.model().state_dict()

    def world(function: Callable[..., Any], owner: nn.Module) -> World:
        with torch.no_grad():
            for name, tensor in owner.state_dict().items():
                tensor.copy_(start[name])
        return World(program, batch_size, function, owner, draw, mode)

    try:
        eager = program.model()
        wanted = world(eager, eager)
    except RuntimeError:
        if mode == "no_grad":
            raise
        return ""  # torch refuses it in that mode: there is nothing to compare with
    try:
        serial = world(functools.partial(df.run_serialised, fast), model)
        got = world(fast, model)
    except Exception as error:
        return said(error)
    allowed = max(program.tolerance, 5e-2) if mode == "autocast" else program.tolerance
    problem = difference(got, serial, tolerance) or difference(got, wanted, allowed, batch_size > 1)
    if not problem and batch_size > 1 and mode != "inference" and (problem := difference(got.touch(), wanted.touch(), allowed)):
        problem = f"after the outputs were changed in place: {problem}"
    if problem or kept is None:
        return problem
    kept.keep(got)
    return kept.changed()
