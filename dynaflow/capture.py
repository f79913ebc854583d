"""Model -> captured graphs: `df.compile`, and the backend that `torch.compile(model, backend="dynaflow")` finds.

`df.compile` marks the batch dynamic before Dynamo looks, so that one capture serves every batch size. What runs is torch.compile
with our backend: guards, graph breaks and Python side effects are Dynamo's.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import logging
import re
import types
from typing import Any, Callable, Mapping, Sequence

import sympy
import torch
from torch import fx
from torch._dynamo.callback import callback_handler
from torch._dynamo.exc import BackendCompilerFailed, TorchRuntimeError
from torch.fx.experimental import _config as fx_config
from torch.utils import _pytree as pytree

from dynaflow import collector
from dynaflow.engine import CapturedGraph
from dynaflow.entry import Entry, entry_of
from dynaflow.errors import AmbiguousBatch, FellBack, OptionError
from dynaflow.fakes import for_all_batch_sizes
from dynaflow.hooks import Hooks, State
from dynaflow.ongoing import Ongoing, ongoing, serialised
from dynaflow.settings import Batch, Settings, check_batch, read_settings
from dynaflow.sources import hint
from dynaflow.strategies import Sequential
from dynaflow.subclasses import take_apart

log = logging.getLogger("dynaflow")

# states of a model's hooks whose captures are kept; the oldest goes first
MAX_HOOK_STATES = 16


# -- the backend


def backend(gm: fx.GraphModule, inputs: Sequence[Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None) -> Any:
    """torch.compile's way in. `options` are df.compile's keyword arguments."""
    asked = {} if mode is None else {"mode": mode}
    return capture(gm, inputs, read_settings(**{**dict(options or {}), **asked}))


def capture(
    gm: fx.GraphModule, inputs: Sequence[Any], settings: Settings, graph: type[CapturedGraph] = CapturedGraph
) -> Callable[..., Any]:
    if (apart := take_apart(gm, inputs)) is not None:
        captured = capture(apart.gm, apart.inside(inputs), settings, graph)
        return lambda *args: captured(*apart.inside(args))
    if torch._guards.TracingContext.try_get() is not None:
        # Dynamo writes the code that calls the graph behind its backend. Its own record of the time would take microseconds of every call.
        _listen()
        _set_until_captured(torch._dynamo.config, "record_runtime_overhead", False)
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    fakes = [n.meta["example_value"] for n in placeholders]
    call = ongoing.get()
    if call is not None and not (call.asks_sizes or call.num_graphs) and call.cuts_batch() and _is_guessed(gm):
        raise _Guessed
    if call is None:
        axes = _guess_axes(placeholders, fakes, settings)
    else:
        axes = call.batch_axes([n.name for n in placeholders], inputs)
    # What Dynamo made static anyway is no batch axis.
    shapes = {n.name: f.shape for n, f in zip(placeholders, fakes) if n.name in axes}
    sizes = {name: shapes[name][axis] for name, axis in axes.items()}
    symbols = {size.node.expr for size in sizes.values() if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol)}
    axes = {name: axes[name] for name, size in sizes.items() if isinstance(size, torch.SymInt) and size.node.expr.free_symbols & symbols}
    constants = {name: int(size) for name, size in sizes.items() if isinstance(size, int) or size.node.expr.is_number}
    if call is not None and next(iter(sizes), None) in constants:
        # The batch is what the call's first argument has of it. A mask that nothing ties to it here would be split, and nothing else.
        axes, symbols = {}, set()
    fixed = next(iter(constants.values())) if constants and not symbols else None
    with collector.held():  # not until Dynamo is done: of what is captured ahead of time (`aot_compile`) nobody hears the end
        return graph(gm, fakes, axes, symbols, fixed, settings, inputs)


class _Guessed(Exception):
    """A capture that did not look at sizes took a number of rows for another."""


# a size that depends on data, or is taken for one, and one that does not
_GUESS = re.compile(r"expression Eq\((?=.*\bu\d+)(?=.*\bs\d+)")


def _is_guessed(gm: fx.GraphModule) -> bool:
    """torch 2.11 takes rows that are cut from the batch (x[n // 2 :][:1]) for all of it where they are broadcast, and asserts that."""
    asserts = gm.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_scalar.default)
    return any(_GUESS.search(str(node.args[1])) for node in asserts)


def _guess_axes(placeholders: list[fx.Node], fakes: list[Any], settings: Settings) -> dict[str, int]:
    """Without df.compile: the same dim of every input that has the first one's size there."""
    axis = settings.batch if settings.batch is not None else 0
    if not isinstance(axis, int):
        if isinstance(settings.strategy, Sequential):
            return {}  # nothing is split, and a call of ours that is warm says nothing of itself
        raise OptionError(
            "batch= as a mapping or function needs df.compile: a backend does not see argument names.", fix="give a dim, or use df.compile")
    tensors = [(n, f) for n, f in zip(placeholders, fakes) if isinstance(f, torch.Tensor) and f.dim() > axis and not _is_parameter(n)]
    if not tensors:
        return {}
    size = tensors[0][1].shape[axis]
    if isinstance(size, int) and settings.batch is None and not isinstance(settings.strategy, Sequential):
        dynamic = [f"{n.name} dim {d}" for n, f in tensors for d, s in enumerate(f.shape) if isinstance(s, torch.SymInt)]
        if dynamic:
            raise AmbiguousBatch(
                f"dim 0 of the first input ({tensors[0][0].name}) is fixed at {size}; the batch could be: {', '.join(dynamic)}.",
                fix="say which: options={'batch': dim}, or use df.compile(model, batch=...)")  # fmt: skip
    return {n.name: axis for n, f in tensors if hint(f.shape[axis]) == hint(size)}


def _is_parameter(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.nn.Parameter) or "_parameters_" in node.name or "_buffers_" in node.name


_undo: list[Callable[[], None]] = []


def _before_capture(_: Any) -> None:
    """Dynamo is about to capture: if a call of ours is the cause, mark its batch and let no capture depend on the batch size."""
    call = ongoing.get()
    if call is None:
        return
    _undo.append(collector.hold())
    wanted: list[tuple[Any, str, bool]] = []
    if call.cuts_batch():
        call.mark()
        _undo.append(call.unmark)
        _undo.extend(for_all_batch_sizes())
        wanted += [(fx_config, "backed_size_oblivious", not call.asks_sizes), (fx_config, "use_duck_shape", False)]
    if not call.watches_hooks:  # a function: whose hooks to watch, only Dynamo knows
        wanted.append((torch._dynamo.config, "skip_nnmodule_hook_guards", False))
    for config, name, value in wanted:
        _set_until_captured(config, name, value)


def _set_until_captured(config: Any, name: str, value: bool) -> None:
    _undo.append(functools.partial(setattr, config, name, getattr(config, name)))
    setattr(config, name, value)


def _after_capture(_: Any) -> None:
    while _undo:
        _undo.pop()()


def _listen() -> None:
    """Hear of captures. Checked on every call: torch._dynamo.reset() forgets listeners."""
    if _before_capture not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(_before_capture)
        callback_handler.register_end_callback(_after_capture)


# -- df.compile


def compile(
    model: Any,
    *,
    strategy: Any = "auto",
    partition: Any = "auto",
    batch: Batch = None,
    strict: bool = False,
    runtime: str = "auto",
    compiler: str = "auto",
    mode: str = "default",
    buckets: str | Sequence[int] | None = None,
    borrow: bool = False,
    fixed_weights: bool = False,
    never_slower: bool = False,
    max_memory: float | None = None,
    part_context: Callable[[Sequence[Any]], Sequence[Any]] | None = None,
    align: Callable[[Sequence[int]], Sequence[int]] | None = None,
) -> Any:
    """Run `model` (a module or a function) under the plans that `strategy` makes.

    A module comes back as an object of the same class that shares everything with the original (parameters, buffers, hooks,
    attributes, state_dict) and whose calls are compiled, those of `forward` too. A function comes back as a function.

    strategy      a df.Strategy, or its class, or a name: "sequential", "two_batch", "nano_batch", "branches", "prefill_decode" or
                  "package.module:Class". "auto": never splits a batch, and has kernels side by side where that measured faster
    partition     what an op is: df.SplitModule, df.SplitFunc and "auto", one or a list of them; or "kernels", those of Inductor
    batch         the batch dim of every tensor argument, or a mapping from argument name to dim; by default dim 0 of every
                  tensor argument that has the first one's size. Or a function that gives one of these for a call's arguments by name
    strict        raise instead of falling back to the sequential graph
    runtime       "auto" (CUDA streams or CPU threads), "cuda", "graph" (CUDA streams, recorded in one CUDA Graph per size), "threads",
                  "serial", "fake" ("fake:lazy", "fake:greedy", "fake:<seed>")
    compiler      "inductor", "eager", or "auto": Inductor on CUDA, and on the CPU where nothing else is asked for (a strategy, a
                  partition, a runtime) and there is a C++ compiler; else eager ops
    mode          torch.compile's: under "max-autotune" Inductor tries kernels out as it compiles, which takes minutes. CUDA Graphs are
                  runtime='s to decide on: "max-autotune-no-cudagraphs" is the same, and "reduce-overhead" changes nothing (it is
                  refused where nothing would be recorded on CUDA)
    buckets       batch sizes that are recorded (runtime="graph"); a call takes the next larger one, where padding cannot show.
                  "powers": powers of two. None: every size is recorded as it is
    borrow        outputs are only valid until the next call (runtime="graph"): nothing is copied, and one recording does
    fixed_weights nobody moves the weights (`model.to`, `p.data = ...`) once they are recorded: where they are is not looked at on
                  every call, which takes the host time for each of them
    never_slower  for each size, the strategy's plan is timed against the sequential one before it is used, on copies of what a call
                  changes, and runs where it is faster (on all ranks); remembered on disk
    max_memory    a plan of kernels that "auto" chooses may hold this many times what Inductor's own order would, weights and
                  inputs included. None: 1.25 times, or 2 MiB more where that is more. What cuBLAS keeps counts, 32 MiB per stream with
                  products, and what the allocator keeps for kernels that allocate: where there is no room, they stay on fewer streams. A
                  training step counts as a whole where this is given, or the device has little free
    part_context  `fn(parts)` gives one context manager per part, entered around that part's launches
    align         `fn(rows)` moves the rows that this call's parts are cut at to where it may be cut (a request's first token)
    """
    if not callable(model):
        raise OptionError(f"df.compile got {model!r}, which cannot be called.", fix="give it a module or a function")
    name = type(model).__name__ if isinstance(model, torch.nn.Module) else getattr(model, "__name__", "function")
    settings = read_settings(
        strategy=strategy, partition=partition, batch=batch, strict=strict, runtime=runtime, compiler=compiler, mode=mode,
        buckets=buckets, borrow=borrow, fixed_weights=fixed_weights, never_slower=never_slower, max_memory=max_memory,
        part_context=part_context, align=align, name=name,
    )  # fmt: skip
    compiled = Compiled(model, settings)
    if not isinstance(model, torch.nn.Module):
        return functools.update_wrapper(compiled, model, updated=())
    return _twin(model, compiled)


def _itself(model: Any) -> Any:
    return model


def _twin(model: torch.nn.Module, compiled: Compiled) -> torch.nn.Module:
    """An object of the model's class with the model's own __dict__ and slots, whose calls are compiled."""
    cls = type(model)
    # without hooks, as the model's own
    compiled_forward = Compiled(model, compiled.settings, is_forward=True)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return compiled(*args, **kwargs)

    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return compiled_forward(*args, **kwargs)

    def copy_of_the_model(self: Any, memo: Any) -> Any:
        return copy.deepcopy(model, memo)

    slots = {name: _SharedSlot(model, slot) for base in reversed(cls.__mro__) for name, slot in vars(base).items()
             if isinstance(slot, types.MemberDescriptorType)}  # fmt: skip
    namespace = {
        **slots, "__call__": call, "forward": forward, "__module__": cls.__module__, "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__, "_dynaflow": compiled, "__deepcopy__": copy_of_the_model,
        "__reduce_ex__": lambda self, protocol: (_itself, (model,)),
    }  # fmt: skip
    twin: torch.nn.Module = object.__new__(type(cls.__name__, (cls,), namespace))
    object.__setattr__(twin, "__dict__", model.__dict__)
    return twin


class _SharedSlot:
    """A slot (`__slots__`) of the twin: the model's own."""

    def __init__(self, model: Any, slot: Any):
        self._model, self._slot = model, slot

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self._slot if instance is None else self._slot.__get__(self._model)

    def __set__(self, instance: Any, value: Any) -> None:
        self._slot.__set__(self._model, value)

    def __delete__(self, instance: Any) -> None:
        self._slot.__delete__(self._model)


class Compiled:
    """A callable that captures on first sight of a new kind of input and then runs plans.

    Captures are kept per state of the model's hooks (`hooks.py`), each in a code object and under a backend of its own, so that a
    hook that comes and goes is captured once, and a code object's recompile limit is not eaten up by hooks. (What runs in pieces,
    around graph breaks, has captures on the model's own code objects: there, all states share Dynamo's limit.)
    """

    def __init__(self, model: Any, settings: Settings, graph: type[CapturedGraph] = CapturedGraph, is_forward: bool = False):
        self.model, self.settings = model, settings
        self._graph, self._is_forward = graph, is_forward
        owner = getattr(model, "__self__", model)
        self._hooks = Hooks(owner) if isinstance(owner, torch.nn.Module) else None
        # nothing to tell captures: the graph as a whole, and hooks that we watch
        is_whole = isinstance(settings.strategy, Sequential) and settings.buckets is None and not graph.inspects
        self._is_plain = is_whole and self._hooks is not None
        # by the state of the hooks
        self._entries: dict[State, Entry] = {}
        self._is_warm = False
        self._call = self._entry(())
        try:
            settings.parameters = tuple(inspect.signature(model.forward if isinstance(model, torch.nn.Module) else model).parameters)
        except (TypeError, ValueError):  # a builtin such as torch.sin: its arguments have no names
            settings.parameters = ()

    def _entry(self, state: State) -> Entry:
        if state not in self._entries:
            if len(self._entries) >= MAX_HOOK_STATES:
                self._entries.pop(next(iter(self._entries))).forget()
            backend = functools.partial(capture, settings=self.settings, graph=self._graph)
            self._entries[state] = Entry(entry_of(self.model, self._is_forward), backend)
            self._is_warm = False
        return self._entries[state]

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """A compiled function in a class body is a method."""
        return self if instance is None else functools.partial(self, instance)

    def __deepcopy__(self, memo: dict[int, Any]) -> Compiled:
        """As for functions and methods: a function is itself, a method of a copied object is compiled anew for the copy."""
        model = copy.deepcopy(self.model, memo)
        same = model is self.model or getattr(model, "__self__", self) is getattr(self.model, "__self__", None)
        if same:
            return self
        twin = Compiled(model, self.settings.fresh(), self._graph, self._is_forward)
        if not isinstance(model, torch.nn.Module):
            functools.update_wrapper(twin, model, updated=())
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A method that was compiled in its own place (df.optimize) is saved as what it was."""
        return (_itself, (self.model,)) if inspect.ismethod(self.model) else super().__reduce_ex__(protocol)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            # part of the capture around it, and under its strategy
            return self.model.forward(*args, **kwargs) if self._is_forward else self.model(*args, **kwargs)
        hooks = self._hooks
        if hooks is not None and hooks.may_have_changed():
            with self.settings.lock:
                self._call = self._entry(hooks.look())
        if self._is_plain and self._is_warm:
            return self._call(*args, **kwargs)  # Dynamo, and nothing else
        if self.settings.batch is not None and not (self._is_warm and callable(self.settings.batch)):
            self.batch_dims(args, kwargs)  # raises what is wrong with it, outside of Dynamo
        _listen()
        call, result, is_done = self._ongoing(args, kwargs), None, False
        try:
            result, is_done = self._under(call, args, kwargs), True
        except (TorchRuntimeError, BackendCompilerFailed) as error:
            is_guessed = isinstance(getattr(error, "inner_exception", None), _Guessed)
            if call.num_graphs or not self._cuts_batch() or not (is_guessed or isinstance(error, TorchRuntimeError)):
                raise
        if not is_done:
            # A batch of 1 is captured like any other, and so are rows that are cut from one (x[n // 2 :][:1]); a model that broadcasts
            # these needs to see the 1. (Not in the handler: what is wrong with a model is to be said once.)
            call = self._ongoing(args, kwargs, asks_sizes=True)
            result = self._under(call, args, kwargs)
        if not call.num_graphs:
            self._nothing_captured()
        return result

    def _ongoing(self, args: tuple[Any, ...], kwargs: dict[str, Any], asks_sizes: bool = False) -> Ongoing:
        return Ongoing(self.batch_dims, args, kwargs, asks_sizes, self._hooks is not None, self._cuts_batch)

    def _cuts_batch(self) -> bool:
        """Whether a capture now is to serve all batch sizes. What runs as a whole, or under autograd, is captured as torch.compile
        does it: for the sizes at hand, and for all when a second one comes."""
        if self._graph.inspects:
            return True
        settings = self.settings
        if settings.partition == "kernels" or (isinstance(settings.strategy, Sequential) and settings.buckets is None):
            return False
        owner = getattr(self.model, "__self__", self.model)
        parameters = owner.parameters() if isinstance(owner, torch.nn.Module) else ()
        return not (torch.is_grad_enabled() and any(p.requires_grad for p in parameters))

    def _under(self, call: Ongoing, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        token = ongoing.set(call)
        try:
            if self._is_warm:
                return self._call(*args, **kwargs)
            with self.settings.lock:  # threads that call first at the same time would each capture
                result = self._call.wrapper(*args, **kwargs)
                self._is_warm = True
                return result
        finally:
            ongoing.reset(token)

    def _nothing_captured(self) -> None:
        reason = "Dynamo ran this call without capturing a graph (its own warning says why; often the recompile limit)"
        if self.settings.strict:
            raise FellBack(
                f"{self.settings.name}: {reason}.", fix="raise torch._dynamo.config.recompile_limit, or see TORCH_LOGS=recompiles")
        if self.settings.count_fallback(reason):
            log.warning("%s: %s", self.settings.name, reason)

    def batch_dims(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[torch.Tensor, int]]:
        """Every tensor in the arguments with its batch dim, -1 where it has none."""
        tensors = _tensors(args, kwargs)
        named = {**dict(zip(self.settings.parameters, args)), **kwargs}
        batch = self.settings.batch
        if callable(batch):
            batch = check_batch(batch(named))
        if isinstance(batch, Mapping):
            dims = self._named_dims(batch, named)
            return [(t, dims.get(id(t), -1)) for t in tensors]
        dim = 0 if batch is None else batch
        first = next((t for t in tensors if t.dim() > dim), None)
        if first is None and batch is not None and tensors:
            raise AmbiguousBatch(
                f"batch={batch}, and no argument has a dim {batch}.", why=f"shapes: {', '.join(str(list(t.shape)) for t in tensors[:6])}",
                fix="count dims from 0, or give a mapping from argument to dim")  # fmt: skip
        return [(t, dim if first is not None and t.dim() > dim and t.shape[dim] == first.shape[dim] else -1) for t in tensors]

    def _named_dims(self, batch: Mapping[str, int], named: Mapping[str, Any]) -> dict[int, int]:
        dims: dict[int, int] = {}
        sizes: dict[str, int] = {}
        for name, dim in batch.items():
            if name not in named:
                candidates = [f"{n} {list(t.shape)}" for n, t in named.items() if isinstance(t, torch.Tensor)]
                raise AmbiguousBatch(
                    f"batch= names '{name}', which is not among this call's arguments.",
                    why=f"candidates: {', '.join(candidates) or 'none'}", fix="use the names of forward's arguments")  # fmt: skip
            for tensor in _tensors((named[name],), {}):
                if dim >= tensor.dim():
                    raise AmbiguousBatch(f"batch= says dim {dim} of '{name}', which has {tensor.dim()} dims.", fix="count dims from 0")
                dims[id(tensor)] = dim
                sizes[f"{name} dim {dim}"] = int(tensor.shape[dim])
        if len(set(sizes.values())) > 1:
            raise AmbiguousBatch(
                "the arguments that batch= names disagree on the batch size.", why=", ".join(f"{k}: {v}" for k, v in sizes.items()),
                fix="name only arguments that carry the batch")  # fmt: skip
        return dims


_LEAVES = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device)


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Every tensor in the arguments, those inside plain objects (a KV cache) too."""
    found: list[torch.Tensor] = []
    seen: set[int] = set()

    def visit(thing: Any, depth: int) -> None:
        if isinstance(thing, torch.Tensor):
            found.append(thing)
        elif isinstance(thing, _LEAVES) or depth > 6 or id(thing) in seen:
            return
        elif isinstance(thing, Mapping):
            seen.add(id(thing))
            for item in thing.values():
                visit(item, depth + 1)
        elif isinstance(thing, (list, tuple)):
            for item in thing:
                visit(item, depth + 1)
        elif not isinstance(thing, (torch.nn.Module, type)) and not callable(thing):
            seen.add(id(thing))
            leaves = pytree.tree_leaves(thing)
            is_leaf = len(leaves) == 1 and leaves[0] is thing
            for item in _attributes(thing) if is_leaf else leaves:
                visit(item, depth + 1)

    for thing in (*args, *kwargs.values()):
        visit(thing, 0)
    return found


def _attributes(thing: Any) -> list[Any]:
    """What a plain object has, in slots (`@dataclass(slots=True)`) or not."""
    slots = [slot for base in type(thing).__mro__ if "__slots__" in vars(base) for slot in vars(base).values()
             if isinstance(slot, types.MemberDescriptorType)]  # fmt: skip
    own = list(getattr(thing, "__dict__", {}).values())
    for slot in slots:
        with contextlib.suppress(AttributeError):  # nothing in it yet
            own.append(slot.__get__(thing))
    return own


def of(fast: Any) -> Compiled:
    """The Compiled behind what df.compile returned."""
    forward = getattr(fast, "__dict__", {}).get("forward")  # compiled in its own place, by df.optimize
    compiled = next((c for c in (fast, forward) if isinstance(c, Compiled)), getattr(type(fast), "_dynaflow", None))
    if compiled is None:
        raise OptionError(f"this {type(fast).__name__} was not made by df.compile, nor given to df.optimize.")
    return compiled


def run_serialised(fast: Any, *args: Any, **kwargs: Any) -> Any:
    """Call `fast` with the same plan on one stream: the reference that plans are bit-equal to."""
    with serialised():
        return fast(*args, **kwargs)
