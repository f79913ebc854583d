"""Programs that are trained: random histories of forwards, backwards and steps, and their oracle.

1. A history is data, and prints: "f0/8 f1/8! b1 b0+ n2/3 b0.1 step zero!" is

       f0/8   forward 0, of batch size 8; what follows names forwards by their numbers
       n2/3   the same without gradients
       b1     backward of the loss of all outputs of forward 1; b0+: its graph is retained; b0.1: of output 1 alone, and retained
       g1     gradients of that loss with respect to inputs and parameters, which nothing adds up (torch.autograd.grad)
       d1     forward 1 is dropped without a backward
       step   of the optimizer, in place;  zero  gradients are let go;  blank  they are filled with zeros
       move   every weight goes elsewhere, and with it what else would be there;  train, eval
       !      somebody keeps the outputs (of zero: the gradients) from then on

2. `Run` goes through a history with a model, and writes down all that shows: outputs, changed inputs and buffers, gradients, weights,
   and whether what somebody keeps was changed behind his back.
3. `Trained` finds a history that eager mode accepts. What rounding decides (the slope of `abs` at a zero that is computed) is nobody's
   to promise: eager mode itself, with noise of the size of its rounding, shows it.
4. `check_training` is the oracle. Through one compiled callable, forward and backward under plans of the kernels must do
     a. what eager mode does, within the tolerance (unless random numbers are drawn: Inductor's are others), and
     b. bit for bit what the kernels do in Inductor's own order, wherever they repeat that themselves;
   and what Inductor's own order does differently from eager mode is ours, unless plain torch.compile does it, too.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Callable, Iterable, Sequence

import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import dynaflow as df
from dynaflow.capture import Compiled, capture
from dynaflow.settings import Settings, read_settings
from dynaflow.strategies import Auto
from dynaflow.strategy import Strategy
from dynaflow.testing.program_oracle import BATCH_SIZES, Replanned, Tally, off, said, sharing
from dynaflow.testing.strategies import RandomStrategy

if TYPE_CHECKING:
    from dynaflow.testing.programs import Program

# steps of a history, beside the loop that it begins with: looked at, planned, recorded and replayed
NUM_STEPS, NUM_LOOPS = 70, 4
# of each output and gradient that is kept, the last so many
MAX_KEPT = 40
LEARNING_RATE = 0.01


# ---------------------------------------------------------------------------- 1. histories


@dataclass(frozen=True, slots=True)
class Step:
    # "f", "n", "b", "g", "d", "step", "zero", "blank", "move", "train" or "eval"
    what: str
    # of the forward that it is, or is about
    number: int = -1
    size: int = 0
    # of a backward: of this output alone (of those with a loss, counted around); of all
    output: int | None = None
    # what is retained (a backward's graph), or kept
    keeps: bool = False

    def __str__(self) -> str:
        if self.number < 0:
            return self.what + "!" * self.keeps
        size = f"/{self.size}" if self.size else ""
        output = "" if self.output is None else f".{self.output}"
        return f"{self.what}{self.number}{size}{output}{('+' if self.what == 'b' and not output else '!') if self.keeps else ''}"


History = tuple[Step, ...]
_WEIGHTS = {"f": 8, "n": 1, "b": 8, "g": 1, "d": 0.5, "step": 2, "zero": 1.5, "blank": 0.5, "move": 0.3, "train": 0.3, "eval": 0.3}


def random_history(rng: random.Random, sizes: Sequence[int], max_open: int, retains: bool, num_steps: int = NUM_STEPS) -> History:
    """`max_open`: forwards that wait for their backwards at the same time. A step of the optimizer, or a switch to what changes running
    statistics, waits until there are none: who changes what a backward needs gets an error."""
    size, number, history, waiting = sizes[0], 0, list[Step](), list[int]()

    def forward(what: str) -> None:
        nonlocal number
        history.append(Step(what, number, size, keeps=rng.random() < 0.3))
        waiting.extend([number] * (what == "f"))
        number += 1

    def backward(what: str, retains: bool) -> None:
        one = rng.choice(waiting)
        output = rng.randrange(4) if what == "b" and retains and rng.random() < 0.2 else None
        keeps = what == "b" and retains and (output is not None or rng.random() < 0.2)
        history.append(Step(what, one, output=output, keeps=keeps))
        if not keeps:
            waiting.remove(one)

    for _ in range(NUM_LOOPS):
        forward("f")
        backward("b", False)
        history.append(Step("step"))
        history.append(Step("zero", keeps=rng.random() < 0.3))
    for _ in range(num_steps):
        size = rng.choice(sizes) if rng.random() < 0.15 else size
        what = rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
        if what in "fn":
            if what == "n" or len(waiting) < max_open:
                forward(what)
        elif what in "bg":
            if waiting:
                backward(what, retains)
        elif what == "d":
            if waiting:
                history.append(Step("d", waiting.pop(rng.randrange(len(waiting)))))
        elif what in ("zero", "blank") or not waiting:
            history.append(Step(what, keeps=what == "zero" and rng.random() < 0.3))
    history.extend(Step("b", one) for one in rng.sample(waiting, len(waiting)))
    return tuple(history)


# ---------------------------------------------------------------------------- 2. a run


@dataclass
class _Open:
    """A forward that waits for its backward."""

    losses: list[torch.Tensor]
    leaves: dict[str, torch.Tensor]


class Run:
    """A history, gone through with a fresh state of a model's. `function` is what is called, in the place of the model."""

    def __init__(self, program: Program, history: History, model: nn.Module, function: Callable[..., Any]):
        self._program, self._model, self._function = program, model, function
        self._open: dict[int, _Open] = {}
        self._kept: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        self._homes: dict[Any, torch.Tensor] = {}
        # "b1: gradient of a0.weight" -> a copy, or None where there is none
        self.seen: dict[str, torch.Tensor | None] = {}
        # the same of a forward -> what shares memory with what
        self.shared: dict[str, list[list[str]]] = {}
        self.num_kept = 0
        # the first thing that somebody kept, and that was changed; the error that ended the run
        self.changed, self.error = "", ""
        self.has_losses = False
        # Some call changes both what requires gradients and what does not: AOT then hands out other outputs than the model's (2.13)
        self.is_mixed = False
        _put_back(model, program)
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._optimizer = torch.optim.SGD(self._parameters.values(), LEARNING_RATE) if self._parameters else None
        torch.manual_seed(program.seed)
        for place, step in enumerate(history):
            try:
                self._do(step, f"{place}. {step}")
            except Exception as error:  # whatever it is: who compares wants to know of it
                self.error = f"{place}. {step}: {said(error)}"
                return
            if not self.changed:
                lost = next((name for name, tensor, copy in self._kept if not torch.equal(tensor, copy)), "")
                self.changed = lost and f"{lost}, which somebody keeps, was changed by {place}. {step}"

    def _do(self, step: Step, name: str) -> None:
        if step.what in ("f", "n"):
            self._forward(step, name)
        elif step.what == "b":
            one = self._open[step.number] if step.keeps else self._open.pop(step.number)
            losses = one.losses if step.output is None else one.losses[step.output % max(1, len(one.losses)) :][:1]
            if losses:
                functools.reduce(torch.add, losses).backward(retain_graph=step.keeps)
            self._see(name, {f"gradient of {n}": t.grad for n, t in (self._parameters | one.leaves).items()})
        elif step.what == "g":
            one = self._open.pop(step.number)
            wanted = one.leaves | self._parameters
            if one.losses and wanted:
                found = torch.autograd.grad(functools.reduce(torch.add, one.losses), list(wanted.values()), allow_unused=True)
                self._see(name, found_here := {f"gradient of {n}": t for n, t in zip(wanted, found)})
                self._keep(name, found_here)
        elif step.what == "d":
            del self._open[step.number]
        elif step.what == "step" and self._optimizer is not None:
            self._optimizer.step()
            self._see(name, {f"weight {n}": p.detach() for n, p in self._parameters.items()})
        elif step.what == "zero":
            if step.keeps:
                self._keep(name, {f"gradient of {n}": p.grad for n, p in self._parameters.items()})
            self._model.zero_grad()
        elif step.what == "blank":
            self._model.zero_grad(set_to_none=False)
        elif step.what == "move":
            for parameter in self._model.parameters():
                parameter.data = parameter.data.clone()
        elif step.what in ("train", "eval"):
            self._model.train(step.what == "train")

    def _forward(self, step: Step, name: str) -> None:
        has_grad = step.what == "f"
        leaves: dict[str, torch.Tensor] = {}
        args, kwargs = self._program.inputs(step.size, step.number, leaves if has_grad else None)
        if not self._open and step.number % 3:  # in the same place as earlier ones, which nobody needs any more
            args, kwargs = pytree.tree_map_only(torch.Tensor, _Homes(self._homes, step.size), (args, kwargs))
        may_change = [*(t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)), *self._model.buffers()]
        versions = [t._version for t in may_change]
        low = torch.autocast(self._program.device, torch.bfloat16, enabled=self._program.is_autocast)
        with torch.set_grad_enabled(has_grad), low:
            result = self._function(*args, **kwargs)
        changed = {t.requires_grad for t, version in zip(may_change, versions) if t._version != version}
        self.is_mixed = self.is_mixed or len(changed) == 2
        outputs = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
        given = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
        losses = []
        for i, output in enumerate(outputs):
            if output.requires_grad:
                generator = torch.Generator().manual_seed(100 * step.number + i)
                weights = torch.randn(output.shape, generator=generator).to(output)
                losses.append((output * weights).sum().float())
        if has_grad:
            self._open[step.number] = _Open(losses, leaves)
            self.has_losses = self.has_losses or bool(losses)
        mine = {f"output {i}": t.detach() for i, t in enumerate(outputs)}
        theirs = {f"input {i}": t.detach() for i, t in enumerate(given)} | {f"buffer {n}": b for n, b in self._model.named_buffers()}
        self._see(name, {f"whether output {i} requires gradients": torch.tensor(t.requires_grad) for i, t in enumerate(outputs)})
        self._see(name, mine | theirs)
        shared = sharing(mine | theirs | {f"weight {n}": p.detach() for n, p in self._model.named_parameters()})
        if step.size > 1:
            self.shared[name] = shared
        if step.keeps:  # what is the model's is everybody's, and inputs' places are filled again
            others = {n for names in shared if any(n.startswith(("buffer", "weight", "input")) for n in names) for n in names}
            held = {f"output {i}": t for i, t in enumerate(outputs)} if step.number % 2 else mine  # with their history, or without
            self._keep(name, {n: t for n, t in held.items() if n not in others})

    def _see(self, where: str, tensors: dict[str, torch.Tensor | None] | dict[str, torch.Tensor]) -> None:
        self.seen.update((f"{where}: {name}", None if t is None else t.clone()) for name, t in tensors.items())

    def _keep(self, where: str, tensors: dict[str, torch.Tensor | None] | dict[str, torch.Tensor]) -> None:
        self._kept.extend((f"{where}: {name}", t, t.clone()) for name, t in tensors.items() if t is not None)
        self.num_kept += len(tensors)
        del self._kept[:-MAX_KEPT]


class _Homes:
    """Where a call's inputs lie that need no gradients: the same place for each, of each size."""

    def __init__(self, homes: dict[Any, torch.Tensor], size: int):
        self._homes, self._size = homes, size
        # by what it was before: one that is passed twice stays one
        self._moved: dict[int, torch.Tensor] = {}

    def __call__(self, given: torch.Tensor) -> torch.Tensor:
        if given.requires_grad or _overlaps(given):
            return given
        if id(given) not in self._moved:
            as_it_lies = torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device=given.device)
            home = self._homes.setdefault((self._size, len(self._moved)), as_it_lies)
            self._moved[id(given)] = home.copy_(given).detach()  # a tensor of its own: what a call does to it, the next does not see
        return self._moved[id(given)]


def _put_back(model: nn.Module, program: Program) -> None:
    """A fresh model's state, in the memory that is there."""
    model.train()
    model.zero_grad()
    with torch.no_grad():
        for tensor, new in zip((*model.parameters(), *model.buffers()), (*(fresh := program.model()).parameters(), *fresh.buffers())):
            tensor.copy_(new)


def run_difference(got: Run, wanted: Run, tolerance: float, exact: Iterable[str] = ()) -> str:
    """What differs first; empty if nothing does. `exact`: names that are to be the same bit for bit."""
    exact = frozenset(exact)
    for name, b in wanted.seen.items():
        if name not in got.seen:
            return got.error or f"{name} is missing"
        a = got.seen[name]
        if a is None or b is None:  # no gradient, or one of zeros: eager mode gives the former more often
            if any(t is not None and bool(t.count_nonzero()) for t in (a, b)):
                return f"{name} is {'missing' if a is None else 'there, and should not be'}"
        elif (a.shape, a.dtype) != (b.shape, b.dtype):
            return f"{name} is {a.dtype}{list(a.shape)}, not {b.dtype}{list(b.shape)}"
        elif problem := off(name, a, b, 0.0 if name in exact else tolerance):
            return problem
    if _place(got.error) != _place(wanted.error):
        return got.error or f"nothing was raised, but should be: {wanted.error}"
    if added := next((name for name in got.seen if name not in wanted.seen), ""):
        return f"{added} should not be there"
    found = next((name for name, shared in wanted.shared.items() if got.shared[name] != shared), "")
    return f"{found} shares memory as {got.shared[found]}, not {wanted.shared[found]}" if found else got.changed


def _place(error: str) -> str:
    """Where in the history, and of which class. What it says may well count calls."""
    return ":".join(error.split(":", 2)[:2])


# ---------------------------------------------------------------------------- 3. a history that eager mode accepts


def _eager(program: Program, history: History) -> Run:
    model = program.model()
    return Run(program, history, model, model)


class _Rounding(TorchDispatchMode):
    """Every float that is computed is off by about its rounding."""

    def __init__(self) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(1)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_copy = func.overloadpacket in (torch.ops.aten.clone, torch.ops.aten.copy_)
        if not is_copy and all(r.alias_info is None or r.alias_info.is_write for r in func._schema.returns):
            for tensor in pytree.tree_leaves(result):
                if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and not _overlaps(tensor):
                    noise = torch.randn(tensor.shape, generator=self._generator) * 2 * torch.finfo(tensor.dtype).eps
                    tensor.mul_((1 + noise.double()).to(tensor))
        return result


def _overlaps(tensor: torch.Tensor) -> bool:
    return any(n > 1 and stride == 0 for n, stride in zip(tensor.shape, tensor.stride()))


@dataclass
class Trained:
    """A program, with a history for it and what eager mode makes of that."""

    program: Program
    history: History
    wanted: Run

    @staticmethod
    def find(program: Program, rng: random.Random, tally: Tally) -> Trained | None:
        """What eager mode does not accept is tried with less: inputs that may be changed, one forward at a time, no gradients of inputs."""
        sizes = rng.sample(BATCH_SIZES[:5] if rng.random() < 0.7 else BATCH_SIZES, 2)
        retains = rng.random() < 0.4
        several, one = (random_history(rng, sizes, max_open, retains) for max_open in (3, 1))
        may_change = replace(program, learned=dict.fromkeys(program.learned, "made"))
        for learner, history in [(program, several), (may_change, several), (may_change, one), (replace(program, learned={}), one)]:
            found = Trained(learner, history, _eager(learner, history))
            if found.is_accepted():
                if found.is_stable():
                    return found
                tally.counts["unstable"] += 1
                return None
        return None

    def is_accepted(self) -> bool:
        run = self.wanted
        return run.has_losses and not run.is_mixed and not run.error and not run.changed and all(
            t is None or bool((t.double().abs() < 1e6).all()) for t in run.seen.values())  # fmt: skip

    def is_stable(self) -> bool:
        with _Rounding():
            run = _eager(self.program, self.history)
        return self.program.is_random or not run_difference(run, self.wanted, self.program.tolerance / 2)


# ---------------------------------------------------------------------------- 4. the oracle


@torch.enable_grad()  # type: ignore[untyped-decorator]
def check_training(program: Program, tally: Tally, show: bool = False) -> None:
    rng = random.Random(program.seed)
    trained = Trained.find(program, rng, tally)
    if trained is None:
        tally.counts["invalid"] += 1
        return
    if show:
        print(f"# {' '.join(map(str, trained.history))}")
    torch._dynamo.reset()
    # Inductor lets backwards write to what was saved, unless told that graphs are retained
    with functorch_config.patch(donated_buffer=not any(step.what == "b" and step.keeps for step in trained.history)):
        _check(trained, rng, tally)


def _check(trained: Trained, rng: random.Random, tally: Tally) -> None:
    program, history, wanted = trained.program, trained.history, trained.wanted
    settings = read_settings(strategy="sequential", partition="kernels", batch=program.batch)
    model, dynamic = program.model(), rng.choice([None, None, True, False])
    fast: Any = Compiled(model, settings, Replanned)
    if rng.random() < 0.6:
        fast = torch.compile(model, backend=functools.partial(capture, settings=settings, graph=Replanned), dynamic=dynamic)
    # once to capture; then each call finds all captures there, and what differs among two runs in the same order does not repeat
    _, first, serial = (Run(program, history, model, fast) for _ in range(3))
    exact = [name for name, t in serial.seen.items() if _are_equal(t, first.seen.get(name))]
    name = f"program {program.seed}, trained"
    problem = "" if program.is_random else run_difference(serial, wanted, program.tolerance)
    if why := next((graph.why_eager for graph in settings.graphs if graph.why_eager), ""):
        problem = f"a graph runs as it was captured: {why}"
    if problem:
        if why := _plain_problem(trained, dynamic):
            tally.not_ours.append(f"{name}: {why}")
        else:
            tally.violations.append(f"{name}, in Inductor's order: {problem}")
    for strategy, runtime in _ways_to_train(program.seed, rng, program.device):
        _replan(settings, strategy, runtime)
        got = Run(program, history, model, fast)
        num_forwards, num_backwards = (sum(s.what in what for s in history) for what in ("fn", "bg"))
        tally.counts.update({"histories": 1, "forwards": num_forwards, "backwards": num_backwards, "tensors": len(got.seen),
                             "exact": len(exact), "kept": got.num_kept})  # fmt: skip
        if problem := run_difference(got, serial, program.tolerance, exact):
            tally.violations.append(f"{name}, {type(strategy).__name__} on {runtime}: {problem}")
    stats = settings.stats
    tally.counts.update({"trained": 1, "lines": program.source.count("\n"), "captures": stats.captures, "plans": stats.plans,
                         "planned calls": stats.planned_calls, "launches": stats.num_launches})  # fmt: skip
    tally.fell_back(stats)


def _plain_problem(trained: Trained, dynamic: bool | None) -> str:
    """What plain torch.compile does differently from eager mode, with what it captures first or later."""
    program, model = trained.program, trained.program.model()
    plain = torch.compile(model, dynamic=dynamic)
    found = [run_difference(Run(program, trained.history, model, plain), trained.wanted, program.tolerance) for _ in range(3)]
    return next(filter(None, found), "")


def _ways_to_train(seed: int, rng: random.Random, device: str) -> list[tuple[Strategy, str]]:
    """On the CPU, what is recorded is what "graph" issues again, over the same memory."""
    fakes = ["fake:lazy", "fake:greedy", f"fake:{seed}", "threads", "serial"]
    runtimes = ["graph", "auto"] if device == "cuda" else ["graph", rng.choice(fakes)]
    strategies = [df.Branches(3), RandomStrategy(seed), *[Auto()] * (rng.random() < 0.3)]
    return list(zip(rng.sample(strategies, 2), runtimes, strict=True))


def _replan(settings: Settings, strategy: Strategy, runtime: str) -> None:
    settings.strategy, settings.runtime = strategy, runtime
    for graph in settings.graphs:
        graph.forget()


def _are_equal(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b if a is None or b is None else a.shape == b.shape and torch.equal(a, b)
