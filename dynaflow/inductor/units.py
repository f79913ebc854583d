"""One unit -> functions compiled by Inductor that write their results where they are told.

Contract: `CompiledUnit.variant(sizes, static=...)` gives a function that computes what the unit's graph does, on the same arguments, and
writes each output into the tensor passed for it, except those that `own` gives a reason for. Or it raises NotCompiled, and the unit
runs eagerly.

What the caller sees to:
- autograd is off (no_grad or inference mode) around a call; arguments have the shapes, strides and devices that their Specs say;
- a tensor that the unit changes in place overlaps no other argument; a destination overlaps no argument;
- on CUDA, the arguments in `aligned` and all destinations start at a multiple of ALIGNMENT bytes: nothing checks it per call;
- version counters of arguments that are changed in place are not advanced.

Equal units share their variants: see `structure` for what is equal, `compile` for how a variant is made.

    unit = CompiledUnit(gm, [Spec(("s0", "64"), ("64", "1"), torch.float32, cpu), ...], ["s0"])
    variant = unit.variant({"s0": 6}, static=False)
    variant.bind({"s0": 3})([x, w], [out[6:9]])                                 # convenient
    variant.call([3, x, w, out[6:9]])                                           # lean: in the order of variant.inputs, destinations last
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Callable, Mapping, Sequence

import torch
from torch import fx
from torch._dynamo.convert_frame import compile_lock
from torch._inductor import config as inductor_config

from dynaflow.inductor.compile import Boxed, Compiled, compile_graph
from dynaflow.inductor.redirect import peak_bytes
from dynaflow.inductor.structure import NotCompiled, Spec, structure
from dynaflow.runtime.program import Expr

# bytes; what Inductor's CUDA kernels assume of pointers
ALIGNMENT = 16
# kept per distinct unit, oldest dropped first
MAX_STATIC = 64
# a unit whose guards split the sizes into more cases than this runs eagerly on the rest
MAX_DYNAMIC = 8

Sizes = Mapping[str, int]


@dataclass(frozen=True, eq=False)
class Variant:
    """A unit compiled for every size that its guards allow, or (static) for one."""

    # what `call` takes, in one list that it empties: a symbol's number, an argument by position, a constant; then the destinations of
    # the outputs whose `own` is empty, in order (None, where `allocates`). It returns one tensor per output.
    inputs: tuple[str | int | torch.Tensor, ...]
    call: Boxed
    # per output: empty when it is written into the destination passed, else why it comes back as a tensor of its own
    own: tuple[str, ...]
    # positions of arguments that must be aligned; destinations on CUDA must be, all of them
    aligned: tuple[int, ...]
    _compiled: Compiled = field(repr=False)
    _symbols: tuple[str, ...] = field(repr=False)

    @property
    def is_static(self) -> bool:
        return self._compiled.static is not None

    @property
    def source(self) -> str:
        return self._compiled.source

    @property
    def path(self) -> str:
        return self._compiled.path

    @property
    def allocates(self) -> bool:
        return self._compiled.redirected.allocates

    @property
    def shared(self) -> tuple[bool, ...]:
        """Per output: whether it lies in memory that is not its own, though the graph makes it; empty where none does."""
        return self._compiled.redirected.shared if any(self._compiled.redirected.shared) else ()

    def holds(self, sizes: Sizes) -> bool:
        """Whether the guards that were added while compiling allow these sizes."""
        return self._compiled.holds(_numbers(self._symbols, sizes))

    def bind(self, sizes: Sizes) -> Callable[[Sequence[Any], Sequence[torch.Tensor]], Sequence[Any]]:
        """(the unit's arguments, destinations) -> outputs, for these sizes."""
        call = self.call
        inputs: list[tuple[bool, Any]] = [(True, sizes[x]) if isinstance(x, str) else (not isinstance(x, int), x) for x in self.inputs]

        def run(args: Sequence[Any], destinations: Sequence[torch.Tensor]) -> Sequence[Any]:
            return call([*(x if is_fixed else args[x] for is_fixed, x in inputs), *destinations])

        return run

    def strides(self, sizes: Sizes) -> tuple[tuple[int, ...] | None, ...]:
        """Strides of the outputs; None for one that is no tensor, or whose strides depend on data."""
        compiled, numbers = self._compiled, _numbers(self._symbols, sizes)

        def find() -> tuple[tuple[int, ...] | None, ...]:
            scope = compiled.scope(numbers)
            try:
                return tuple(s if s is None else tuple(int(eval(e, {}, scope)) for e in s) for s in compiled.strides)  # noqa: S307
            except NameError:
                return (None,) * len(self.own)

        return compiled.once("strides", numbers, find)  # type: ignore[no-any-return]

    def peak_bytes(self, sizes: Sizes) -> int | None:
        """The most that a call holds at once beside arguments and destinations; None when it depends on data or is not understood."""
        compiled = self._compiled
        wrapper, numbers = compiled.redirected.wrapper, _numbers(self._symbols, sizes)
        if wrapper is None:
            return None
        given = {} if compiled.static is not None else dict(zip(wrapper.args, numbers))

        def find() -> int | None:
            try:
                return peak_bytes(wrapper, given, compiled.redirected.replaced, compiled.itemsize)
            except NameError:
                return None

        return compiled.once("peak", numbers, find)  # type: ignore[no-any-return]


class CompiledUnit:
    """One unit. Cheap to make: compiling starts with `variant`, and equal units compile once."""

    def __init__(
        self, fn: fx.GraphModule, args: Sequence[Spec | Expr], symbols: Sequence[str], options: Mapping[str, Any] | None = None
    ):
        """`options`: of Inductor's configuration, while it is compiled."""
        self.structure = structure(fn, args, symbols)
        self.fn, self.options = fn, tuple(sorted((options or {}).items()))
        # tracing bakes casts in; the thread that compiles may not have the caller's autocast state
        self.autocast = tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda"))
        self._shared: dict[tuple[Any, ...], _Shared] = {}

    def variant(self, sizes: Sizes, *, static: bool) -> Variant:
        """For these sizes; compiled now, if no variant that is there holds for them. Raises NotCompiled."""
        shape = self.structure
        numbers = _numbers(shape.symbols, sizes)
        # a dynamic variant is for sizes from 1 up
        compiled = self._share().variant(self, numbers, static or 0 in numbers)
        names: tuple[str, ...] = shape.symbols if compiled.static is None else ()
        inputs: tuple[Any, ...] = (*names, *(i for i, arg in enumerate(shape.args) if isinstance(arg, Spec)), *shape.constants)
        aligned = tuple(x for x in (inputs[i] for i in compiled.aligned) if isinstance(x, int))
        return Variant(inputs, compiled.call, compiled.own, aligned, compiled, shape.symbols)

    def _share(self) -> _Shared:
        state = (self.autocast, ambient(), self.options)
        with _LOCK:
            if state not in self._shared:
                key = (self.structure.key, *state)
                shared = _SHARED.get(key)
                if shared is None:
                    shared = _SHARED[key] = _Shared()
                self._shared[state] = shared
            return self._shared[state]


def _numbers(symbols: Sequence[str], sizes: Sizes) -> tuple[int, ...]:
    for symbol in symbols:
        if type(sizes[symbol]) is not int:
            raise NotCompiled(f"the number {symbol} is a {type(sizes[symbol]).__name__}")
    return tuple(sizes[symbol] for symbol in symbols)


def ambient() -> tuple[Any, ...]:
    """Settings of the process that change what is traced or generated. Read while nobody compiles: meanwhile they are patched."""
    with compile_lock:
        return _settings()


def _settings() -> tuple[Any, ...]:
    backends: Any = torch.backends
    deterministic: Any = torch.utils.deterministic
    cuda, cudnn, mkldnn = backends.cuda, backends.cudnn, backends.mkldnn
    # (torch.get_float32_matmul_precision raises where these were set one by one)
    precisions = (cuda.matmul.fp32_precision, cudnn.fp32_precision, mkldnn.matmul.fp32_precision)
    return (
        torch.get_default_dtype(), torch.get_default_device(),
        torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(),
        *precisions, deterministic.fill_uninitialized_memory, cuda.matmul.allow_fp16_reduced_precision_reduction,
        cuda.matmul.allow_bf16_reduced_precision_reduction, cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled(), cudnn.enabled, cudnn.deterministic, cudnn.benchmark,
        mkldnn.is_available(), inductor_config.get_hash(),
    )  # fmt: skip


class _Shared:
    """The variants of one structure."""

    def __init__(self) -> None:
        self.dynamic: list[Compiled] = []
        self.static: OrderedDict[tuple[int, ...], Compiled] = OrderedDict()
        self.failed: dict[tuple[int, ...] | None, str] = {}

    def variant(self, unit: CompiledUnit, numbers: tuple[int, ...], static: bool) -> Compiled:
        found = self._find(numbers, static)
        if found is not None:
            return found
        with compile_lock, _LOCK:
            found = self._find(numbers, static)
            if found is not None:
                return found
            attempt = numbers if static else None
            if attempt in self.failed:
                raise NotCompiled(self.failed[attempt])
            if not static and len(self.dynamic) >= MAX_DYNAMIC:
                raise NotCompiled(f"guards hold for none of {MAX_DYNAMIC} variants")
            try:
                state = (*ambient(), unit.options)
                with inductor_config.patch(dict(unit.options)):
                    compiled = compile_graph(unit.fn, unit.structure, unit.autocast, numbers, static=static, state=state)
            except NotCompiled as e:
                self.failed[attempt] = str(e)
                raise
            if static:
                self.static[numbers] = compiled
                while len(self.static) > MAX_STATIC:
                    self.static.popitem(last=False)
            else:
                self.dynamic.append(compiled)
            return compiled

    def _find(self, numbers: tuple[int, ...], static: bool) -> Compiled | None:
        if static:
            return self.static.get(numbers)
        return next((c for c in self.dynamic if c.holds(numbers)), None)


# Units that hold a structure keep its variants alive. Compiling is covered by Dynamo's lock, too, which is taken first: settings of torch's
# are patched meanwhile, for all threads, and Inductor compiles one graph at a time.
_LOCK = threading.RLock()
_SHARED: weakref.WeakValueDictionary[tuple[Any, ...], _Shared] = weakref.WeakValueDictionary()
