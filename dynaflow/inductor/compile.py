"""A canonical graph -> a function: AOT, Inductor, and the wrapper's text redirected.

Contract: the function takes one list (numbers, tensors, constants, destinations), empties it, and returns one tensor per output. Tracing
uses a fake mode and a shape environment of its own; nothing of Dynamo's is touched.

1. Example inputs from the Specs; a dynamic variant has one symbol per number, from 1 up, not specialised to the number at hand.
2. AOT and Inductor compile. Guards on the numbers that they add are kept as text.
3. Where no output is an alias and changes of inputs happen inside the graph, AOT's wrappers have nothing to do: Inductor's `call` is
   used directly, redirected. Its text is compiled in the namespace of the module that Inductor loaded: kernels are not loaded again.
4. Else AOT's function is used, and every output comes back as it has it.
"""

from __future__ import annotations

import ast
import logging
import math
import time
import types
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Iterable, Sequence

import sympy
import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._functorch import config as functorch_config
from torch._guards import TracingContext, tracing
from torch._inductor import config as inductor_config
from torch._inductor.codecache import PyCodeCache
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.output_code import CompiledFxGraph
from torch._subclasses import FakeTensorMode
from torch.fx.experimental import _config as fx_config
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, constrain_range
from torch.utils._sympy.printers import PythonPrinter

from dynaflow import collector
from dynaflow.inductor import kept
from dynaflow.inductor.redirect import Redirected, redirect
from dynaflow.inductor.source import find_call
from dynaflow.inductor.structure import NotCompiled, Spec, Structure, canonical_graph, evaluate

log = logging.getLogger("dynaflow")

_INDUCTOR = {
    "graph_partition": False, "cpp_wrapper": False, "memory_planning": False, "triton.cudagraphs": False,
    "fallback_random": True,  # random numbers are eager's; nothing else depends on it
    "keep_output_stride": True, "size_asserts": True,
}  # fmt: skip

# facts about sizes that are kept per compiled unit
MAX_FOUND = 1024

Boxed = Callable[[list[Any]], Sequence[Any]]
# per device type: is autocast on, and its dtype
Autocast = tuple[tuple[str, bool, torch.dtype], ...]


@dataclass(frozen=True, eq=False)
class Compiled:
    """What equal units share. Numbers are in canonical order."""

    call: Boxed
    own: tuple[str, ...]
    source: str
    path: str
    # the numbers that a static variant is for
    static: tuple[int, ...] | None
    # the wrapper's symbols, one per number (or per number that it can tell from the others)
    symbols: tuple[str, ...]
    guards: tuple[str, ...]
    strides: tuple[tuple[str, ...] | None, ...]
    # positions among (numbers, tensors, constants)
    aligned: tuple[int, ...]
    redirected: Redirected
    # bytes per element that results of extern kernels are taken to have
    itemsize: int
    # (what, numbers) -> what was found out for them: equal layers ask for the same
    _found: dict[tuple[str, tuple[int, ...]], Any] = field(default_factory=dict, repr=False, compare=False)

    def once(self, what: str, numbers: tuple[int, ...], find: Callable[[], Any]) -> Any:
        if (what, numbers) not in self._found:
            if len(self._found) >= MAX_FOUND:
                self._found.clear()
            self._found[what, numbers] = find()
        return self._found[what, numbers]

    def scope(self, numbers: Sequence[int]) -> dict[str, Any]:
        return {"math": math, "max": max, "min": min, "abs": abs, "int": int, "float": float, **dict(zip(self.symbols, numbers))}

    def holds(self, numbers: tuple[int, ...]) -> bool:
        return bool(numbers == self.static if self.static is not None else self.once("holds", numbers, lambda: self._holds(numbers)))

    def _holds(self, numbers: tuple[int, ...]) -> bool:
        try:
            return all(eval(guard, {}, self.scope(numbers)) for guard in self.guards)  # noqa: S307 (torch's own guards)
        except Exception:  # noqa: BLE001 (a guard that cannot be computed ahead of the call does not hold)
            return False


def compile_graph(
    fn: fx.GraphModule, shape: Structure, autocast: Autocast, numbers: tuple[int, ...], *, static: bool, state: tuple[Any, ...] = ()
) -> Compiled:
    """Raises NotCompiled with the reason. `state`: the settings of the process that change what is compiled."""
    began = time.perf_counter()
    path = kept.path_of(shape, (autocast, state), numbers, static)
    found = kept.load(path)
    compiled = _from_disk(found, path, shape, autocast, numbers, static) if found is not None and path is not None else None
    how = "found on disk"
    if compiled is None:
        compiled, how = _compile(fn, shape, autocast, numbers, static, path), "compiled"
    if not compiled.holds(numbers):
        raise NotCompiled(f"guards do not hold for the sizes that were compiled for: {compiled.guards}")
    log.debug("%s a unit of %d nodes in %.1f s | %d of %d outputs in place | %s", how, len(fn.graph.nodes), time.perf_counter() - began,
              compiled.own.count(""), len(compiled.own), "static" if static else "dynamic")  # fmt: skip
    return compiled


def _from_disk(
    found: kept.Kept, kept_at: Path, shape: Structure, autocast: Autocast, numbers: tuple[int, ...], static: bool
) -> Compiled | None:
    """None where what was kept cannot be loaded: it is made anew."""
    try:
        module, redirected = kept.module(found, kept_at), found.redirected
        compiled = Compiled(_uncast(module.call, autocast), redirected.own, redirected.text, module.__file__, numbers if static else None,
                            found.symbols, found.guards, found.strides, found.aligned, redirected, _itemsize(shape))  # fmt: skip
    except Exception as error:  # noqa: BLE001 (a cache that was cut short, or another version's)
        log.info("a unit that was kept on disk cannot be loaded: %s: %s", type(error).__name__, error)
        return None
    return compiled if compiled.holds(numbers) else None


def _compile(
    fn: fx.GraphModule, shape: Structure, autocast: Autocast, numbers: tuple[int, ...], static: bool, kept_at: Path | None
) -> Compiled:
    named = {f"n{i}": n for i, n in enumerate(numbers)}
    graph = canonical_graph(fn, shape, named if static else None)
    (output,) = [n for n in graph.graph.nodes if n.op == "output"]
    if not isinstance(output.args[0], (tuple, list)):
        raise NotCompiled("the graph does not return a tuple")
    num_outputs = len(output.args[0])
    # 1. example inputs
    env = ShapeEnv(specialize_zero_one=False, duck_shape=False)
    fake_mode = FakeTensorMode(shape_env=env)
    symbols = {} if static else dict(_symbol(env, name, n) for name, n in named.items())
    context = TracingContext(fake_mode)
    made: list[Any] = []

    def inner(*args: Any, **kwargs: Any) -> Any:
        made.append(compile_fx_inner(*args, **kwargs))
        return made[-1]

    # 2. compile
    with ExitStack() as stack:
        for entered in (
            collector.let_go(), torch.inference_mode(False), torch.no_grad(), tracing(context),
            fx_config.patch(backed_size_oblivious=True),  # type: ignore[attr-defined]
            functorch_config.patch(enable_autograd_cache=False),  # type: ignore[attr-defined]
            inductor_config.patch(_INDUCTOR),
            *(torch.autocast(device, dtype=dtype, enabled=on) for device, on, dtype in autocast),
        ):  # fmt: skip
            stack.enter_context(entered)
        try:
            examples = _examples(shape, fake_mode, list(symbols.values()), named)
            aot = compile_fx(graph, examples, inner_compile=inner)
        except Exception as e:  # noqa: BLE001 (whatever it is, the unit can still run eagerly)
            raise NotCompiled(f"Inductor: {type(e).__name__}: {(str(e).strip() or '?').splitlines()[0]}") from e
    # 3. and 4.
    inductor = made[0] if len(made) == 1 and isinstance(made[0], CompiledFxGraph) else None
    wrapped = ("Inductor did not compile it as one graph",) * num_outputs
    if inductor is not None:
        wrapped = _why_wrapped(context.fw_metadata, num_outputs)
    names, guards, strides = tuple(map(str, symbols)), _guards(env, symbols), _strides(inductor, num_outputs)
    aligned = tuple(inductor.inputs_to_check) if inductor is not None else ()
    call: Boxed = lambda args: aot(*args)  # type: ignore[operator]  # noqa: E731
    redirected, path = Redirected("", wrapped, (True,) * num_outputs), ""
    if inductor is not None:
        redirected, module = redirect(inductor.source_code, num_outputs), loaded_module(inductor)
        if any(wrapped):
            redirected, path = Redirected(inductor.source_code, wrapped, redirected.shared, redirected.wrapper), module.__file__ or ""
        elif redirected.replaced or redirected.wrapper is not None:
            call, path = _in_place(redirected, module, autocast)
            kept.save(kept_at, inductor, kept.Kept(redirected, names, guards, strides, aligned))
    return Compiled(
        call, redirected.own, redirected.text, path, numbers if static else None, names, guards, strides, aligned, redirected,
        _itemsize(shape),
    )  # fmt: skip


def _in_place(redirected: Redirected, module: types.ModuleType, autocast: Autocast) -> tuple[Boxed, str]:
    """Inductor's own function, its results where they are told to be; and where its text is."""
    call, path = _load(redirected.text, module) if redirected.replaced else (module.call, module.__file__ or "")
    return _uncast(call, autocast), path


# -- 1. example inputs


def _symbol(env: ShapeEnv, name: str, number: int) -> tuple[sympy.Symbol, torch.SymInt]:
    source = ConstantSource(name)
    symbol = env.create_symbol(number, source, DimDynamic.DYNAMIC, None, do_not_specialize_zero_one=True)
    size = env.create_symintnode(symbol, hint=number, source=source)
    assert isinstance(size, torch.SymInt)
    constrain_range(size, min=1)
    return symbol, size


def _examples(shape: Structure, fake_mode: FakeTensorMode, symbols: Sequence[torch.SymInt], named: dict[str, int]) -> list[Any]:
    values: dict[str, Any] = dict(zip(named, symbols)) if symbols else dict(named)
    with fake_mode:
        tensors = [
            torch.empty_strided(
                [evaluate(d, values) for d in arg.shape], [evaluate(s, values) for s in arg.stride], dtype=arg.dtype, device=arg.device)
            for arg in shape.args if isinstance(arg, Spec)
        ]  # fmt: skip
        constants = [torch.empty_strided(c.shape, c.stride(), dtype=c.dtype, device=c.device) for c in shape.constants]
    return [*symbols, *tensors, *constants]


# -- 2. what Inductor says about its result


def _guards(env: ShapeEnv, symbols: Iterable[sympy.Symbol]) -> tuple[str, ...]:
    printer = PythonPrinter()
    guards = [printer.doprint(guard.expr) for guard in env.guards]
    for symbol in symbols:
        bounds = env.bound_sympy(symbol)
        guards.append(f"{symbol} >= {int(bounds.lower)}")
        if isinstance(bounds.upper, sympy.Integer):
            guards.append(f"{symbol} <= {int(bounds.upper)}")
    return tuple(dict.fromkeys(guards))


def _strides(inductor: CompiledFxGraph | None, num_outputs: int) -> tuple[tuple[str, ...] | None, ...]:
    strides = inductor.output_strides if inductor is not None else None
    if strides is None or len(strides) != num_outputs:
        return (None,) * num_outputs
    return tuple(None if s is None else tuple(map(str, s)) for s in strides)


def _itemsize(shape: Structure) -> int:
    dtypes = [arg.dtype for arg in shape.args if isinstance(arg, Spec)]
    return max((d.itemsize for d in dtypes if d.is_floating_point), default=max((d.itemsize for d in dtypes), default=8))


# -- 3. Inductor's function


def _why_wrapped(meta: Any, num_outputs: int) -> tuple[str, ...]:
    """Per output, why AOT's own function has to be called; all empty when it has not."""
    if meta is None or len(meta.output_info) != num_outputs:
        return ("AOT says nothing about it",) * num_outputs
    kinds = [info.output_type.name for info in meta.output_info]
    own = ("non_alias", "unsafe_view_alias", "custom_function_view")
    reasons = ["" if kind in own else f"AOT: {kind.replace('_', ' ')}" for kind in kinds]
    others = []
    if any(info.mutation_type.name == "MUTATED_OUT_GRAPH" for info in meta.input_info):
        others.append("an input is changed outside of the graph")
    if meta.tokens:
        others.append("ops with ordered side effects")
    if meta.num_intermediate_bases:
        others.append("outputs are views of one buffer")
    if meta.grad_enabled_mutation is not None:
        raise NotCompiled("the graph changes grad mode")
    if not others and not any(reasons):
        return tuple(reasons)
    rest = others[0] if others else "beside an output that is an alias"
    return tuple(reason or f"AOT: {rest}" for reason in reasons)


def loaded_module(inductor: CompiledFxGraph) -> types.ModuleType:
    """The module that Inductor loaded for this graph: its text, kernels and constants."""
    found = next((m for m in reversed(PyCodeCache.modules) if getattr(m, "key", None) == inductor.cache_key), None)
    if found is None:
        raise NotCompiled("the module of Inductor's code is not loaded")
    return found


def _load(text: str, module: types.ModuleType) -> tuple[Boxed, str]:
    """The text's `call`, with the module's globals. The text is saved beside the module's, for people and tracebacks."""
    _, path = PyCodeCache.write(text)
    tree = ast.parse(text)
    function = find_call(tree)
    is_method = function not in tree.body
    scope: dict[str, Any] = {}
    code = compile(ast.Module([function], []), path, "exec")
    exec(code, module.__dict__, scope)  # noqa: S102 (Inductor's code, redirected)
    return (types.MethodType(scope["call"], getattr(module, "runner", None)) if is_method else scope["call"]), path


def _uncast(call: Boxed, autocast: Autocast) -> Boxed:
    """Casts are in the graph already; extern kernels must not cast again."""
    if not any(on for _, on, _ in autocast):
        return call

    def run(args: list[Any]) -> Sequence[Any]:
        with torch._C._DisableAutocast():
            return call(args)

    return run
