"""What a call in a wrapper reads and writes.

Contract: `Signatures` knows the kernels that the wrapper's module defines; `kernel` and `op` give each tensor argument of a statement's
call a mode: READ, WRITE (all of it, without looking) or BOTH. Where nothing is known for sure, a tensor counts as BOTH.

1. Triton: parameters of Inductor's own kernels are named by what is done with them (in_ptr0, out_ptr0, in_out_ptr0), and those that are
   changed are listed. A user's kernel may do anything with any pointer.
2. C++: the same names; a `const` pointer is read.
3. Ops: the schema says what is written. `out=` is written without looking.
"""

from __future__ import annotations

import ast
import re
from typing import Any, Iterator, Mapping, NamedTuple

import torch

from dynaflow.inductor.source import NotUnderstood

READ, WRITE, BOTH = "r", "w", "rw"

# heuristics of kernels that Inductor wrote, parameter names included
_INDUCTORS_OWN = ("pointwise", "reduction", "persistent_reduction", "split_scan", "foreach", "cooperative_reduction", "template")
# what templates of products and convolutions call what they read
_OPERANDS = ("arg_A", "arg_B", "arg_X", "arg_W")
# the random state of an attention, which it has for its dropout
_RANDOM_STATE = ("philox_seed", "philox_offset")
# ops that are launched on the caller's stream: they talk to other ranks, or wait for them
_NETWORK = ("_c10d_functional", "c10d", "symm_mem", "_dtensor")


class Effects(NamedTuple):
    """A call's tensors, as (expression, mode) in order; and what it uses besides tensors."""

    tensors: tuple[tuple[ast.expr, str], ...]
    # "rng": draws random numbers; "caller": code that we know nothing about, on the stream it expects
    uses: tuple[str, ...] = ()
    # those of the tensors that it takes and never looks at; and results, by their numbers, that mean nothing
    idle: tuple[ast.expr, ...] = ()
    idle_results: tuple[int, ...] = ()


class Signatures:
    def __init__(self, tree: ast.Module, scope: Mapping[str, Any]):
        self._scope = scope
        # kernel -> mode per pointer, None for a number, in the order of its parameters
        self._kernels: dict[str, list[str | None]] = {}
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and isinstance(node.targets[0], ast.Name):
                modes = _modes(node.value)
                if modes is not None:
                    self._kernels[node.targets[0].id] = modes

    def kernel(self, call: ast.Call, name: str, is_tensor: Mapping[str, bool]) -> Effects:
        """`triton_poi_fused_0.run(arg0_1, buf0, 64, stream=stream0)`, `cpp_fused_0(arg0_1, buf0, s0)`."""
        modes = self._kernels.get(name)
        tensors = [(i, arg) for i, arg in enumerate(call.args) if _is_tensor(arg, is_tensor)]
        if modes is None or any(i >= len(modes) or modes[i] is None for i, _ in tensors):
            return Effects(tuple((arg, BOTH) for _, arg in tensors))
        return Effects(tuple((arg, modes[i] or BOTH) for i, arg in tensors))

    def op(self, call: ast.Call, target: str, is_tensor: Mapping[str, bool]) -> Effects:
        """`extern_kernels.mm(a, b, out=buf0)`, `torch.ops.aten.index_put_.default(...)`, `workspace_0.zero_()`."""
        out = [k.value for k in call.keywords if k.arg == "out"]
        rest = [*call.args, *(k.value for k in call.keywords if k.arg != "out")]
        base = target.split(".")[0]
        if is_tensor.get(base):
            mine: ast.expr = ast.Name(base, ast.Load())
            mode = WRITE if target in (f"{base}.zero_", f"{base}.fill_") else BOTH
            return Effects(((mine, mode), *((t, READ) for arg in rest for t in _tensors(arg, is_tensor))))
        written = tuple((t, WRITE) for arg in out for t in _tensors(arg, is_tensor))
        if base == "extern_kernels":
            return Effects((*((t, READ) for arg in rest for t in _tensors(arg, is_tensor)), *written))
        overload = self._overload(target)
        if overload is None:
            return Effects(tuple((t, BOTH) for arg in [*rest, *out] for t in _tensors(arg, is_tensor)), ("caller",))
        modes = {a.name: BOTH if a.alias_info is not None and a.alias_info.is_write else READ for a in overload._schema.arguments}
        names = [a.name for a in overload._schema.arguments if not a.kwarg_only]
        bound = [*zip(names, call.args), *((k.arg, k.value) for k in call.keywords if k.arg not in (None, "out"))]
        if len(call.args) > len(names) or len(bound) + len(out) != len(call.args) + len(call.keywords):
            raise NotUnderstood(f"{target} does not take these arguments")
        is_network = overload.namespace in _NETWORK
        tensors = tuple((t, BOTH if is_network else modes.get(str(name), BOTH)) for name, arg in bound for t in _tensors(arg, is_tensor))
        by_name = {str(name): arg for name, arg in bound}
        idle: tuple[ast.expr, ...] = ()
        idle_results: tuple[int, ...] = ()
        if overload.namespace == "aten" and "attention" in overload.name() and _chance(overload, by_name) == 0:
            idle = tuple(t for name in _RANDOM_STATE if name in by_name for t in _tensors(by_name[name], is_tensor))
            idle_results = tuple(i for i, r in enumerate(overload._schema.returns) if r.name in _RANDOM_STATE)
        return Effects((*tensors, *written), self._uses(overload, by_name), idle, idle_results)

    def makes_memory(self, target: str) -> bool:
        """Whether what the call returns is memory of its own."""
        overload = self._overload(target)
        if overload is None:
            return target.startswith("extern_kernels.")
        return all(r.alias_info is None for r in overload._schema.returns)

    def _overload(self, target: str) -> torch._ops.OpOverload | None:
        try:
            found = eval(target, {"__builtins__": {}}, dict(self._scope))  # noqa: S307 (a dotted name of Inductor's text)
        except Exception:  # noqa: BLE001 (whatever it is, it is not an op)
            return None
        if isinstance(found, torch._ops.OpOverloadPacket) and len(found.overloads()) == 1:
            found = getattr(found, found.overloads()[0])
        return found if isinstance(found, torch._ops.OpOverload) else None

    @staticmethod
    def _uses(overload: torch._ops.OpOverload, bound: Mapping[str, ast.expr]) -> tuple[str, ...]:
        if overload.namespace not in ("aten", "prims", "inductor", "mkldnn", "quantized"):
            return ("caller",)
        if torch.Tag.nondeterministic_seeded not in overload.tags:
            return ()
        # attention draws only for its dropout
        return () if "attention" in overload.name() and _chance(overload, bound) == 0 else ("rng", "caller")


def _chance(overload: torch._ops.OpOverload, bound: Mapping[str, ast.expr]) -> Any:
    """Of dropout; None where it is not known."""
    default = next((a.default_value for a in overload._schema.arguments if a.name == "dropout_p"), None)
    chance = bound.get("dropout_p")
    return default if chance is None else chance.value if isinstance(chance, ast.Constant) else None


def _modes(call: ast.Call) -> list[str | None] | None:
    """`async_compile.triton('name', '''...''')` or `async_compile.cpp_pybinding([...], '''...''')` -> modes of its parameters."""
    how = ast.unparse(call.func)
    texts = [a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    if how == "async_compile.triton" and len(texts) == 2:
        return _triton(*texts)
    if how == "async_compile.cpp_pybinding" and len(texts) == 1:
        return _cpp(texts[0])
    return None


def _triton(name: str, text: str) -> list[str | None] | None:
    functions = [n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef) and n.name == name]
    if len(functions) != 1:
        return None
    for decorator in functions[0].decorator_list:
        if not isinstance(decorator, ast.Call) or not isinstance(decorator.func, ast.Attribute):
            continue
        if decorator.func.attr not in _INDUCTORS_OWN:
            return None
        meta = {k.arg: _literals(k.value) for k in decorator.keywords if k.arg in ("triton_meta", "inductor_meta")}
        signature, changed = meta.get("triton_meta", {}).get("signature"), meta.get("inductor_meta", {}).get("mutated_arg_names")
        if not isinstance(signature, dict) or (changed is None and decorator.func.attr != "template"):
            return None
        if changed is None:  # templates list nothing; one for attention writes to what looks like an argument
            changed = [arg for arg in signature if arg.startswith("arg_") and arg not in _OPERANDS]
        return [_mode(arg, arg in changed) if str(kind).startswith("*") else None for arg, kind in signature.items()]
    return None


def _cpp(text: str) -> list[str | None] | None:
    found = re.search(r'extern "C"\s+(?:\w+\s+)*?void\s+(?:\w+\s+)*?kernel\(([^)]*)\)', text)
    if found is None:
        return None
    modes: list[str | None] = []
    for parameter in found[1].split(","):
        kind, name = parameter.strip().rsplit(None, 1)
        modes.append(None if "*" not in parameter else READ if kind.startswith("const ") else _mode(name.lstrip("*"), False))
    return modes


def _mode(name: str, is_changed: bool) -> str:
    if is_changed:
        return BOTH
    if name.startswith(("in_ptr", "arg_")):
        return READ
    return WRITE if name.startswith("out_ptr") else BOTH


def _literals(node: ast.expr) -> dict[str, Any]:
    """The entries of a dict display that are literals."""
    found: dict[str, Any] = {}
    if isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values):
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                try:
                    found[key.value] = ast.literal_eval(value)
                except ValueError:
                    continue
    return found


def _is_tensor(node: ast.expr, is_tensor: Mapping[str, bool]) -> bool:
    base = view_base(node)
    return base is not None and is_tensor.get(base, False)


def _tensors(node: ast.expr, is_tensor: Mapping[str, bool]) -> Iterator[ast.expr]:
    """Tensors of the wrapper's own in an argument: itself, or those of a list of them."""
    if _is_tensor(node, is_tensor):
        yield node
    elif isinstance(node, (ast.List, ast.Tuple)):
        for element in node.elts:
            yield from _tensors(element, is_tensor)
    elif any(isinstance(n, ast.Name) and is_tensor.get(n.id) for n in ast.walk(node)):
        raise NotUnderstood(f"a tensor inside of {ast.unparse(node)}")


def view_base(node: ast.expr) -> str | None:
    """`buf0`, or the buf0 of `reinterpret_tensor(buf0, ...)`."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "reinterpret_tensor" and isinstance(node.args[0], ast.Name):
        return node.args[0].id
    return None
