"""Where a wrapper's results lie: outputs redirected into the caller's memory, and the peak of what it allocates.

Contract: `redirect` changes where outputs lie and nothing else: kernels, their order and their arguments stay, so bits do too. What
is not proved to be possible stays as it is, with the reason. A destination has its output's shape, strides and dtype, is aligned
as an allocation would be, and overlaps no input: its memory may be scratch before it is the result.

1. Trace every name to the memory it lies in: an allocation, an argument, or the result of an extern kernel; through reuse and views.
2. An output is redirected when it is all of one allocation, without gaps, and no other output lies there; symbolically, for every size.
3. The allocation's call becomes `_df_outK`, or a view of it where the shape is another; `_df_outK` joins the arguments. Where None is
   passed for it, the allocation is made as Inductor has it. The result of an aten op that has a kernel for writing into `out=` is
   written there; None will not do.
4. The peak: allocations and frees in order, for given numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Mapping, Sequence

import sympy
import torch

from dynaflow.inductor.source import NotUnderstood, Statement, Wrapper, read

Expressions = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Redirected:
    text: str
    # per output: empty when it lies in the caller's tensor, else why not
    own: tuple[str, ...]
    # per output: whether it is, or may be, memory of an argument, of a constant, or of another output, whatever the graph says
    shared: tuple[bool, ...]
    # what `text` was made from; None when that was not understood
    wrapper: Wrapper | None = None
    # names whose allocations were replaced
    replaced: frozenset[str] = frozenset()
    # whether None will do for every tensor of the caller's
    allocates: bool = False


@dataclass(frozen=True, slots=True)
class _Place:
    """What a name means: all of a root's memory, or a view of it."""

    # an "allocate", "own" or "item" statement; or "setup" for an argument
    root: Statement
    shape: Expressions | None
    stride: Expressions | None
    # whether every view on the way starts where its base starts
    at_start: bool = True


def redirect(text: str, num_outputs: int) -> Redirected:
    """The text with outputs redirected where that is possible."""
    try:
        wrapper = read(text)
        if len(wrapper.outputs) != num_outputs:
            raise NotUnderstood(f"{len(wrapper.outputs)} results are returned, {num_outputs} were expected")
        places = _trace(wrapper)
    except NotUnderstood as e:
        return Redirected(text, (f"Inductor's code has an unknown form: {e}",) * num_outputs, (True,) * num_outputs)
    scope, device = _symbols(wrapper), "CUDA" if "_DeviceGuard" in text else "CPU"
    roots = [_place(places, out) for out in wrapper.outputs]
    own: list[str] = []
    raw = text.encode()
    edits: list[tuple[int, int, str]] = []
    names: list[str] = []
    replaced = set()
    allocates = True
    for k, (out, place) in enumerate(zip(wrapper.outputs, roots)):
        reason = _why_own(out, place, scope, device)
        if not reason and any(j != k and other is not None and other.root is place.root for j, other in enumerate(roots) if place):
            reason = "the same buffer is returned twice"
        own.append(reason)
        if reason or place is None:
            continue
        root, name = place.root, f"_df_out{k}"
        if root.kind == "own":
            edits += [(*root.function, out_overload(root.target, device) or ""), (root.span[1] - 1, root.span[1] - 1, f", out={name}")]
            names.append(name)
            replaced.add(root.makes)
            allocates = False
            continue
        is_same = (root.shape, root.stride) == (place.shape, place.stride)
        there = name if is_same else f"reinterpret_tensor({name}, {_tuple(root.shape)}, {_tuple(root.stride)}, 0)"
        edits.append((*root.span, f"({there} if {name} is not None else {raw[slice(*root.span)].decode()})"))
        names.append(name)
        replaced.add(root.makes)
    if names:
        at, before, after = wrapper.slot
        edits.append((at, at, f"{before}{', '.join(names)}{after}"))
    for start, end, new in sorted(edits, reverse=True):
        raw = raw[:start] + new.encode() + raw[end:]
    shared = tuple(_is_shared(k, roots) for k in range(len(roots)))
    return Redirected(raw.decode(), tuple(own), shared, wrapper, frozenset(replaced), allocates)


# -- 1. trace


def _trace(wrapper: Wrapper) -> dict[str, _Place]:
    places = {name: _Place(Statement("setup", name), None, None) for name in wrapper.args}
    for s in wrapper.statements:
        if s.kind in ("allocate", "own"):
            places[s.makes] = _Place(s, s.shape, s.stride)
        elif s.kind == "item":
            base = places.get(s.uses[0])
            if base is None or base.root.kind not in ("own", "item"):
                raise NotUnderstood(f"{s.makes} is an item of {s.uses[0]}")
            places[s.makes] = _Place(replace(s, target=base.root.target), None, None)
        elif s.kind == "alias":
            place = _place(places, s)
            if place is None:
                raise NotUnderstood(f"{s.makes} is made from {s.uses[0]}, which is not known")
            places[s.makes] = place
    return places


def _place(places: Mapping[str, _Place], s: Statement) -> _Place | None:
    base = places.get(s.uses[0]) if s.kind == "alias" else None
    if base is None:
        return None
    if s.shape is None:
        return base
    return _Place(base.root, s.shape, s.stride, base.at_start and s.offset == "0")


# -- 2. what can be redirected


def out_overload(target: str, device: str) -> str | None:
    """`torch.ops.aten.cumsum.default` -> `torch.ops.aten.cumsum.out`, where that has a kernel of its own for the device: one that is
    generated from the functional op would allocate, and copy."""
    parts = target.split(".")
    if parts[:3] != ["torch", "ops", "aten"] or len(parts) != 5:
        return None
    packet = getattr(torch.ops.aten, parts[3], None)
    functional = getattr(packet, parts[4], None) if packet is not None else None
    name = "out" if parts[4] == "default" else f"{parts[4]}_out"
    if packet is None or functional is None or name not in packet.overloads() or len(functional._schema.returns) != 1:
        return None
    if {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(functional.tags):
        return None  # its size is known when it has run
    mine, other = functional._schema.arguments, getattr(packet, name)._schema.arguments
    is_same = [a.name for a in other if not a.is_out] == [a.name for a in mine] and [a.name for a in other if a.is_out] == ["out"]
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{parts[3]}.{name}", device)
    return ".".join([*parts[:4], name]) if is_same and has_kernel else None


def _why_own(out: Statement, place: _Place | None, scope: dict[str, Any], device: str) -> str:
    if place is None:
        return f"returns {out.target or out.uses[0]}, which is no buffer of its own"
    root = place.root
    if root.kind == "setup":
        return f"a view of input {root.makes}" if out.shape is not None else f"returns input {root.makes}"
    if root.kind == "own" and place.shape is None and out_overload(root.target, device):
        return ""
    if root.kind != "allocate":
        return f"extern kernel {root.target.removeprefix('torch.ops.')} allocates its own result"
    if not place.at_start:
        return f"a view into {root.makes}"
    try:
        sizes = {expr for p in (root, place) for expr in _extents(p.shape, p.stride, scope)}
    except Exception as e:  # noqa: BLE001 (a size that sympy cannot take)
        return f"the size of {root.makes} is not an expression: {e}"
    return "" if len(sizes) == 1 else f"a view that is not all of {root.makes}"


def _is_shared(k: int, roots: Sequence[_Place | None]) -> bool:
    place = roots[k]
    if place is None or place.root.kind == "setup":
        return True
    return any(other is not None and j != k and other.root.makes == place.root.makes for j, other in enumerate(roots))


def _extents(shape: Expressions | None, stride: Expressions | None, scope: dict[str, Any]) -> tuple[Any, Any]:
    """(elements, distance from the first to behind the last): equal when there are no gaps."""
    numel, extent = sympy.Integer(1), sympy.Integer(1)
    for size, step in zip(shape or (), stride or ()):
        n, by = (sympy.sympify(_evaluate(text, scope)) for text in (size, step))
        numel, extent = numel * n, extent + (n - 1) * by
    return sympy.expand(numel), sympy.expand(extent)


def _symbols(wrapper: Wrapper) -> dict[str, Any]:
    """Every number of the wrapper as an expression over those that have none. Sizes count as positive: nothing is written at 0."""
    scope: dict[str, Any] = {"max": sympy.Max, "min": sympy.Min}
    for s in wrapper.statements:
        if s.kind == "symbol":
            try:
                scope[s.makes] = _evaluate(s.target, scope)
            except Exception:  # noqa: BLE001 (comes from an argument)
                scope[s.makes] = sympy.Symbol(s.makes, integer=True, positive=True)
    return scope


def _evaluate(text: str, scope: Mapping[str, Any]) -> Any:
    return eval(text, {"__builtins__": {}}, scope)  # noqa: S307 (Inductor's own sizes)


def _tuple(items: Sequence[str] | None) -> str:
    return f"({''.join(f'{item}, ' for item in items or ())})"


# -- 4. peak


def peak_bytes(wrapper: Wrapper, numbers: Mapping[str, int], replaced: frozenset[str] = frozenset(), itemsize: int = 8) -> int:
    """The most that is alive at once of what `call` allocates, without what was redirected.

    `numbers` are the wrapper's number arguments by name. The text does not say the dtype of what an extern kernel returns: `itemsize`
    bytes are assumed per element. Its shape is what is asserted after it; results that nothing is asserted of, and workspaces inside
    libraries, count as nothing.
    """
    scope: dict[str, Any] = {"max": max, "min": min, **numbers}
    asserted = {s.uses[0]: s for s in wrapper.statements if s.kind == "assert" and s.shape is not None and s.uses}
    # name -> memory that it keeps alive
    holds: dict[str, set[str]] = {}
    nbytes: dict[str, int] = {}
    alive = peak = 0
    for s in wrapper.statements:
        if s.kind == "symbol":
            try:
                scope[s.makes] = _evaluate(s.target, scope)
            except Exception:  # noqa: BLE001 (known when the kernel before it has run)
                continue
        elif s.kind in ("allocate", "own", "item"):
            what, size = (s, torch_itemsize(s.dtype)) if s.kind == "allocate" else (asserted.get(s.makes, s), itemsize)
            nbytes[s.makes] = 0 if s.makes in replaced or what.shape is None else _span(what, scope) * size
            holds[s.makes] = {s.makes}
            if s.kind == "item":
                holds.setdefault(s.uses[0], set()).add(s.makes)
            alive += nbytes[s.makes]
            peak = max(peak, alive)
        elif s.kind == "alias":
            holds[s.makes] = set(holds.get(s.uses[0], ()))
        elif s.kind == "free":
            for memory in holds.pop(s.uses[0], set()):
                if not any(memory in other for other in holds.values()):
                    alive -= nbytes.pop(memory, 0)
    return peak


def torch_itemsize(dtype: str) -> int:
    return getattr(torch, dtype.removeprefix("torch.")).itemsize


def _span(s: Statement, scope: Mapping[str, Any]) -> int:
    shape, stride = ([int(_evaluate(text, scope)) for text in texts or ()] for texts in (s.shape, s.stride))
    return 0 if 0 in shape else 1 + sum((n - 1) * by for n, by in zip(shape, stride))
