"""An Inductor wrapper -> a flow whose ops are its kernels, for given numbers.

Contract: what the flow's ops read, write and change is exact, or more than exact where the text does not say; running the units in any
order that the flow allows computes, bit for bit, what the wrapper's `call` does. A form that is not known raises NotUnderstood, and the
wrapper runs as it is.

1. Names become places in values: allocations, arguments, and what extern kernels return. Where Inductor reuses the memory of a dead
   buffer for a new one, the new one is a value of its own: reuse would chain branches. (It is an in-place change, not a reuse, where
   the first kernel that touches the new name reads it too.)
2. Kernels become ops, with the places that each touches.
3. Values that several kernels write disjoint slices of (a concatenation) have a piece per slice.
4. Ops become units: functions that bind the wrapper's names to the tensors they are given, and run the statement as it stands; or,
   of an extern kernel that allocates its result and can be told where to write it, the same into memory that is given (`writers`).

What an op takes or returns on the host and nobody looks at (the random state of an attention without dropout) is no value: a constant
stands for it.

    buf5 = empty_strided_cuda((2, 24, 6, 6), ...)            value buf5
    buf3 = reinterpret_tensor(buf5, (2, 8, 6, 6), ..., 0)    piece buf5[0]
    triton_poi_fused_relu_1.run(buf0, buf3, 576, ...)        op triton_poi_fused_relu_1.7  reads buf0  writes buf5[0]
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from typing import Any, Mapping, NamedTuple, Sequence

import torch

from dynaflow.inductor.places import Place, are_disjoint
from dynaflow.inductor.signature import BOTH, READ, WRITE, Effects, Signatures, view_base
from dynaflow.inductor.source import NotUnderstood, Statement, Wrapper, read
from dynaflow.inductor.writers import Write, writer
from dynaflow.ir import CALLER, Flow, Op, Plan, Value
from dynaflow.memory import pack
from dynaflow.runtime.binder import Binder
from dynaflow.runtime.program import Bound, Entry, Geometry, Layout, Program, Unit
from dynaflow.runtime.workspaces import is_product
from dynaflow.verify import verify_memory

WHOLE_BATCH = "a kernel runs over the whole batch"
ALLOCATES = "an extern kernel allocates its own result"


@dataclass(frozen=True)
class Kernels:
    """A wrapper's kernels for given numbers."""

    flow: Flow
    program: Program
    # values that extern kernels allocate, and cannot be told where
    allocated: frozenset[str]
    # (argument's position, value) of the tensors that come in; those that are changed in place
    inputs: tuple[tuple[int, str], ...]
    changed: tuple[int, ...]
    # per op, what its statement calls
    targets: tuple[str, ...]
    # op -> what tells kernels apart that cost the same: the kernel, its numbers, and how its tensors lie
    keys: Mapping[str, Any]
    # what the wrapper returns: (value, place of it or None for all of it), or a constant in a tuple of one
    returns: tuple[tuple[str, Place | None] | tuple[Any], ...]

    def bind(self, plan: Plan) -> Bound:
        """Numbers are given: values lie as close to each other as they can, and that is verified."""
        memory = pack(self.flow, plan, {})
        verify_memory(self.flow, plan, memory, {})
        return Binder(plan, self.program).bind({}, memory)

    def hand_out(self, args: Sequence[Any], outputs: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
        """What the wrapper would return, from the flow's outputs and the call's arguments."""
        given = {name: args[i] for i, name in self.inputs}
        found = []
        for result in self.returns:
            if len(result) == 1:
                found.append(result[0])
                continue
            tensor = outputs[result[0]] if result[0] in outputs else given[result[0]]
            place = result[1]
            found.append(tensor if place is None else place.of(tensor))
        return tuple(found)


def kernels(
    text: str, scope: Mapping[str, Any], args: Sequence[Any], seen: Mapping[str, Geometry], name: str, static: Sequence[int] = ()
) -> Kernels:
    """`scope`: names of the wrapper's module. `args`: a call's arguments, of which numbers and geometries are looked at. `seen`: what
    extern kernels returned in a call of these numbers (`observed`). `static`: arguments that stay where they are, such as parameters.
    """
    return _Reader(text, scope, args, seen).read(name, frozenset(static))


class _Value:
    """A value under way."""

    def __init__(self, name: str, geometry: Geometry, role: str):
        self.name, self.geometry, self.role = name, geometry, role
        self.place = Place(0, tuple(geometry.shape), tuple(geometry.stride))
        # slices that are written apart from each other
        self.pieces: dict[Place, str] = {}

    @property
    def nbytes(self) -> int:
        return self.place.extent * self.geometry.dtype.itemsize

    def parts(self, place: Place) -> list[str]:
        """What is touched there: pieces, or the value where it has none."""
        if not self.pieces:
            return [self.name]
        if place in self.pieces:
            return [self.pieces[place]]
        return [piece for other, piece in self.pieces.items() if place == self.place or not are_disjoint(place, other)]

    def named(self, parts: list[str]) -> list[str]:
        """All pieces together are the value."""
        return [self.name] if self.pieces and len(parts) == len(self.pieces) else parts


class _Name(NamedTuple):
    """A name of the wrapper's: all of a value, or a place in what another name means."""

    value: _Value | None
    base: str = ""
    shape: tuple[int, ...] | None = None
    stride: tuple[int, ...] = ()
    offset: int = 0
    # the memory of a buffer that is dead otherwise
    is_reuse: bool = False


@dataclass
class _Kernel:
    """An op under way."""

    statement: Statement
    target: str
    uses: tuple[str, ...]
    touched: list[tuple[_Value, Place, str]] = field(default_factory=list)
    # the wrapper's names that it needs, and where they lie
    names: dict[str, tuple[_Value, Place]] = field(default_factory=dict)
    # names that it takes and never looks at
    idle: set[str] = field(default_factory=set)
    # what it allocates: (value, index into what is returned; None: all of it)
    made: list[tuple[_Value, int | None]] = field(default_factory=list)
    # how it writes its result where it is told; None: it runs as it stands
    write: Write | None = None


class _Reader:
    def __init__(self, text: str, scope: Mapping[str, Any], args: Sequence[Any], seen: Mapping[str, Geometry]):
        tree = ast.parse(text)
        self._wrapper: Wrapper = read(text)
        self._raw = text.encode()
        self._scope, self._args, self._seen = scope, args, seen
        self._signatures = Signatures(tree, scope)
        self._numbers: dict[str, Any] = {}
        # what stands for tensors of the host that nobody looks at
        self._constants: dict[str, torch.Tensor] = {}
        self._setup: dict[str, str] = {}
        self._names: dict[str, _Name] = {}
        # id of a value -> the names that lie in its memory and can still be used
        self._live: dict[int, set[str]] = {}
        self._values: list[_Value] = []
        self._kernels: list[_Kernel] = []

    def read(self, name: str, static: frozenset[int]) -> Kernels:
        wrapper = self._wrapper
        if len(wrapper.args) != len(self._args):
            raise NotUnderstood(f"{len(self._args)} arguments for {len(wrapper.args)} names")
        inputs = []
        for i, (arg, given) in enumerate(zip(wrapper.args, self._args)):
            if isinstance(given, torch.Tensor):
                geometry = Geometry(tuple(given.shape), given.stride(), given.dtype, given.device)
                self._bind_value(arg, geometry, "param" if i in static else "input")
                inputs.append((i, arg))
            elif type(given) is int:
                self._numbers[arg] = given
            else:
                raise NotUnderstood(f"argument {arg} is a {type(given).__name__}")
        # 1. and 2.
        statements = wrapper.statements
        for k, s in enumerate(statements):
            self._statement(s, statements[k + 1 :])
        returns = tuple(self._returned(out) for out in wrapper.outputs)
        outputs = {result[0] for result in returns if len(result) == 2}
        touched = {id(value) for kernel in self._kernels for value, _, _ in kernel.touched}
        unseen = {name for name in self._constants if name in wrapper.args and name not in outputs and id(self._value(name)) not in touched}
        self._values = [value for value in self._values if value.name not in unseen]
        inputs = [(i, arg) for i, arg in inputs if arg not in unseen]
        for value in self._values:
            if value.role == "temp" and value.name in outputs:
                value.role = "output"
        # 3. and 4.
        self._cut()
        flow = self._flow(name, returns)
        layouts = {v.name: Layout(v.geometry.dtype, v.geometry.device, tuple(map(str, v.geometry.stride))) for v in self._values}
        units = {op.name: self._unit(op.name, kernel) for op, kernel in zip(flow.ops, self._kernels)}
        changed = {value for op in flow.ops for value in op.mutates}
        allocated = frozenset(value.name for kernel in self._kernels for value, _ in kernel.made)
        keys = {op.name: self._key(kernel) for op, kernel in zip(flow.ops, self._kernels)}
        # code that we know nothing about, which stays on the caller's stream, may multiply, too
        pairs = zip(flow.ops, self._kernels)
        products = frozenset(op.name for op, kernel in pairs if is_product(kernel.target) or CALLER in op.uses)
        return Kernels(
            flow, Program(flow, units, layouts, compiler=_AsTheyAre(), products=products), allocated, tuple(inputs),
            tuple(i for i, arg in inputs if arg in changed), tuple(k.target for k in self._kernels), keys, returns,
        )  # fmt: skip

    # -- 1. names

    def _bind_value(self, name: str, geometry: Geometry, role: str) -> _Value:
        value = _Value(name, geometry, role)
        self._values.append(value)
        self._names[name] = _Name(value)
        self._live.setdefault(id(value), set()).add(name)
        return value

    def _statement(self, s: Statement, rest: Sequence[Statement]) -> None:
        if s.kind in ("unpack", "assert", "return"):
            return
        if s.kind == "setup":
            if s.target == "get_raw_stream":
                self._setup[s.makes] = self._text(s.span)
        elif s.kind == "symbol":
            self._numbers[s.makes] = self._number(s.target) if (dims := self._dims(s.target)) is None else dims
        elif s.kind == "allocate":
            shape, stride = self._sizes(s.shape), self._sizes(s.stride)
            dtype = getattr(torch, s.dtype.removeprefix("torch."))
            self._bind_value(s.makes, Geometry(shape, stride, dtype, self._device(s.device)), "temp")
        elif s.kind == "alias":
            base = s.uses[0]
            if base not in self._names:
                raise NotUnderstood(f"{base} is not known to be memory of its own")
            is_reuse = bool(rest) and rest[0].kind == "free" and rest[0].uses == (base,)
            view = None if s.shape is None else self._sizes(s.shape)
            self._names[s.makes] = _Name(None, base, view, self._sizes(s.stride), self._number(s.offset), is_reuse)
            self._live[id(self._value(base))].add(s.makes)
        elif s.kind == "item":
            is_known = s.makes in self._names or s.makes in self._constants
            if not is_known and any(s.makes in r.uses for r in rest if r.kind not in ("free", "assert")):
                raise NotUnderstood(f"{s.makes} is no tensor of its own")
        elif s.kind == "free":
            if s.uses[0] in self._names:
                self._live[id(self._value(s.uses[0]))].discard(s.uses[0])
        elif s.kind in ("kernel", "extern", "own"):
            self._kernel(s, rest)
        else:
            raise NotUnderstood(f"a statement of kind {s.kind}")

    def _value(self, name: str) -> _Value:
        """The value in whose memory a name lies now (a reuse that is not decided yet: the old one's)."""
        while (found := self._names[name]).value is None:
            name = found.base
        return found.value

    def _resolve(self, name: str, mode: str) -> tuple[_Value, Place]:
        """What a kernel touches that uses `name`; decides whether a name that reuses memory is a new value."""
        found = self._names[name]
        if found.value is not None:
            return found.value, found.value.place
        old = self._value(name)
        if found.is_reuse and mode == WRITE and self._live[id(old)] <= {name, *self._aliases(name)}:
            base, place = self._peek(found.base)
            lie = place if found.shape is None else Place(0, found.shape, found.stride)
            geometry = Geometry(lie.shape, lie.stride, base.geometry.dtype, base.geometry.device)
            mine = self._live[id(old)]
            value = self._bind_value(name, geometry, "temp")
            self._live[id(value)] = set(mine)
            return value, value.place
        value, place = self._resolve(found.base, mode)
        if found.is_reuse:
            self._names[name] = found._replace(is_reuse=False)
        if found.shape is None:
            return value, place
        return value, Place(place.offset + found.offset, found.shape, found.stride)

    def _peek(self, name: str) -> tuple[_Value, Place]:
        """Like `_resolve`, decides nothing."""
        found = self._names[name]
        if found.value is not None:
            return found.value, found.value.place
        value, place = self._peek(found.base)
        return value, place if found.shape is None else Place(place.offset + found.offset, found.shape, found.stride)

    def _aliases(self, name: str) -> set[str]:
        """Names that are defined by way of `name`."""
        found: set[str] = set()
        for other in self._names:
            at = other
            while self._names[at].value is None:
                at = self._names[at].base
                if at == name:
                    found.add(other)
                    break
        return found

    def _returned(self, s: Statement) -> tuple[str, Place | None] | tuple[Any]:
        if s.kind != "alias":
            return (self._number(s.target),)
        name = s.uses[0]
        if name not in self._names:
            constant = self._numbers.get(name, self._constants.get(name))
            if constant is None:
                raise NotUnderstood(f"{name} is returned, and not known to be memory of its own")
            return (constant,)
        value, place = self._resolve(name, READ)
        if s.shape is not None:
            place = Place(place.offset + self._number(s.offset), self._sizes(s.shape), self._sizes(s.stride))
        return value.name, None if place == value.place else place

    # -- 2. kernels

    def _kernel(self, s: Statement, rest: Sequence[Statement]) -> None:
        call = ast.parse(self._text(s.span), mode="eval").body
        assert isinstance(call, ast.Call)
        is_tensor = dict.fromkeys((*self._names, *self._constants), True)
        effects: Effects
        if s.kind == "kernel":
            effects = self._signatures.kernel(call, s.target, is_tensor)
        else:
            effects = self._signatures.op(call, s.target, is_tensor)
        kernel = _Kernel(s, s.target, effects.uses, idle=self._idle(effects))
        # What is written first: it may decide that a name is a new value. What is read by another argument is not written without looking.
        read = {view_base(node) for node, mode in effects.tensors if mode != WRITE}
        for node, mode in sorted(effects.tensors, key=lambda t: t[1] != WRITE):
            if view_base(node) in kernel.idle:
                continue
            self._touch(kernel, node, BOTH if view_base(node) in read and mode == WRITE else mode)
        for name in s.uses:
            if not any(name in known for known in (kernel.names, self._numbers, self._setup, kernel.idle)):
                raise NotUnderstood(f"{s.target} uses {name} in a way that is not known")
        if s.kind == "own":
            if not self._signatures.makes_memory(s.target):
                raise NotUnderstood(f"{s.target} may return memory that is not its own")
            kernel.write = None if effects.uses else self._writer(s, call)
            if kernel.write is None:
                kernel.made = list(self._made(s, rest, effects.idle_results))
            else:
                value = self._bind_value(s.makes, self._seen[s.makes], "temp")
                kernel.names[s.makes] = (value, value.place)
                kernel.touched.append((value, value.place, WRITE))
        if "wait_tensor" in s.target:
            kernel.touched += self._in_flight([value for value, _, _ in kernel.touched])
        self._kernels.append(kernel)

    def _idle(self, effects: Effects) -> set[str]:
        """Names of the host's tensors that a call takes and never looks at."""
        found = {node.id for node in effects.idle if isinstance(node, ast.Name)}
        for name in found & set(self._names):
            value = self._value(name)
            if value.geometry.device.type == "cpu" and value.role in ("input", "param"):
                self._constants[name] = _nothing(value.geometry)
        return found & set(self._constants)

    def _in_flight(self, awaited: Sequence[_Value]) -> list[tuple[_Value, Place, str]]:
        """What collectives read whose results are awaited: until then, that is nobody else's memory."""
        found = []
        for kernel in self._kernels:
            mine = {id(value) for value, _ in kernel.made} | {id(value) for value, _, _ in kernel.touched}
            if "c10d" in kernel.target and any(id(value) in mine for value in awaited):
                found += [(value, place, READ) for value, place, _ in kernel.touched if value not in awaited]
        return found

    def _writer(self, s: Statement, call: ast.Call) -> Write | None:
        def taken() -> tuple[list[Any], dict[str, Any]]:
            return [self._taken(arg) for arg in call.args], {str(k.arg): self._taken(k.value) for k in call.keywords}

        try:
            return writer(s.target, taken, self._seen[s.makes]) if s.makes in self._seen else None
        except NotUnderstood:
            return None  # it runs as it stands

    def _taken(self, node: ast.expr) -> Any:
        """What an argument is: the geometry of a tensor, or a number."""
        name = view_base(node)
        if name not in self._names:
            return self._evaluate(ast.unparse(node))
        value, place = self._peek(name)
        if isinstance(node, ast.Call):
            place = self._view(node, place)
        return Geometry(place.shape, place.stride, value.geometry.dtype, value.geometry.device)

    def _view(self, node: ast.Call, base: Place) -> Place:
        shape, stride, offset = (self._evaluate(ast.unparse(a)) for a in node.args[1:4])
        return Place(base.offset + offset, tuple(shape), tuple(stride))

    def _touch(self, kernel: _Kernel, node: ast.expr, mode: str) -> None:
        if view_base(node) not in self._names:
            raise NotUnderstood(f"{kernel.target} reads {view_base(node)}, which means nothing")
        if isinstance(node, ast.Name):
            value, place = self._resolve(node.id, mode)
            kernel.names[node.id] = (value, place)
        else:
            assert isinstance(node, ast.Call) and isinstance(node.args[0], ast.Name)  # view_base
            name = node.args[0].id
            value, base = self._resolve(name, mode)
            kernel.names[name] = (value, base)
            place = self._view(node, base)
        kernel.touched.append((value, place, mode))

    def _made(self, s: Statement, rest: Sequence[Statement], idle: Sequence[int]) -> Sequence[tuple[_Value, int | None]]:
        if s.makes in self._seen:
            return [(self._bind_value(s.makes, self._seen[s.makes], "temp"), None)]
        made: list[tuple[_Value, int | None]] = []
        for item in rest:
            if item.kind == "item" and item.uses[0] == s.makes and item.makes in self._seen:
                index = int(re.sub(r".*\[(\d+)\]$", r"\1", self._text(item.span)))
                if index in idle and self._seen[item.makes].device.type == "cpu":
                    self._constants[item.makes] = _nothing(self._seen[item.makes])
                    continue
                made.append((self._bind_value(item.makes, self._seen[item.makes], "temp"), index))
        return made

    # -- 3. pieces and the flow

    def _cut(self) -> None:
        written: dict[int, dict[Place, None]] = {}
        for kernel in self._kernels:
            for value, place, mode in kernel.touched:
                if mode != READ and place != value.place:
                    written.setdefault(id(value), {})[place] = None
        for value in self._values:
            places = list(written.get(id(value), ()))
            if len(places) > 1 and value.role in ("temp", "output"):
                if all(are_disjoint(a, b) for i, a in enumerate(places) for b in places[:i]) and not self._is_changed_early(value, places):
                    value.pieces = {place: f"{value.name}.{i}" for i, place in enumerate(places)}

    def _is_changed_early(self, value: _Value, places: Sequence[Place]) -> bool:
        """Whether a kernel changes all of it while some of its slices are there, and others are not."""
        missing = set(places)
        for kernel in self._kernels:
            for touched, place, mode in kernel.touched:
                if touched is value and mode != READ and place not in places:
                    return 0 < len(missing) < len(places)
            missing -= {place for touched, place, mode in kernel.touched if touched is value and mode != READ}
        return False

    def _flow(self, name: str, returns: Sequence[Any]) -> Flow:
        values = []
        for v in self._values:
            geometry = v.geometry
            dtype = str(geometry.dtype).removeprefix("torch.")
            values.append(Value(v.name, tuple(map(str, geometry.shape)), dtype, str(v.nbytes), None, v.role, v.name))
            for place, piece in v.pieces.items():
                nbytes = place.extent * geometry.dtype.itemsize
                values.append(Value(piece, tuple(map(str, place.shape)), dtype, str(nbytes), None, "piece", piece, v.name))
        made = {v.name for v in self._values if v.role in ("input", "param")}
        ops = []
        for number, kernel in enumerate(self._kernels):
            reads: dict[str, None] = {}
            mutates: dict[str, None] = {}
            writes: dict[str, None] = {value.name: None for value, _ in kernel.made}
            written = set(writes)
            for value, place, mode in kernel.touched:
                parts = value.parts(place)
                there = [part for part in parts if part in made]
                new = [part for part in parts if part not in made]
                if mode == READ and not there and not written.intersection(parts):
                    raise NotUnderstood(f"{kernel.target} reads {value.name}, which nothing has written")
                if mode != WRITE:
                    reads.update(dict.fromkeys(value.named(there)))
                if mode != READ:
                    mutates.update(dict.fromkeys(value.named(there)))
                    writes.update(dict.fromkeys(value.named(new)))
                    written.update(new)
            made |= written
            label = f"{re.sub(r'^(extern_kernels|torch[.]ops[.]aten|torch[.]ops|aten)[.]', '', kernel.target)}.{number}"
            kind = "network" if "c10d" in kernel.target else "compute"
            ops.append(Op(label, kind, tuple(reads), tuple(writes), tuple(mutates), kernel.uses, WHOLE_BATCH))
        outputs = tuple(dict.fromkeys(r[0] for r in returns if len(r) == 2))
        return Flow(name, tuple(values), tuple(ops), outputs)

    # -- 4. units

    def _unit(self, name: str, kernel: _Kernel) -> Unit:
        made = {value.name for value, _ in kernel.made}
        args = tuple(dict.fromkeys(value.name for value, _ in kernel.names.values() if value.name not in made))
        lines = [f"{', '.join(args)}, = args"] if args else []
        for used, (value, place) in kernel.names.items():
            if place != value.place:
                lines.append(f"{used} = reinterpret_tensor({value.name}, {place.shape}, {place.stride}, {place.offset})")
            elif used != value.name:
                lines.append(f"{used} = {value.name}")
        s = kernel.statement
        for used in s.uses:
            if used in self._numbers:
                lines.append(f"{used} = {self._numbers[used]!r}")
            elif used in self._setup:
                lines.append(f"{used} = {self._setup[used]}")
            elif used in kernel.idle:
                lines.append(f"{used} = constants[{used!r}]")
        if kernel.write is not None:
            lines += [f"_df_write({s.makes}, {self._text((s.function[1] + 1, s.span[1]))}", "return ()"]
        elif s.kind == "own":
            lines.append(f"{s.makes} = {self._text(s.span)}")
            results = "".join(f"{s.makes}{'' if i is None else f'[{i}]'}, " for _, i in kernel.made)
            lines.append(f"return ({results})")
        else:
            lines += [self._text(s.span), "return ()"]
        source = "\n    ".join(["def kernel(args):", *lines])
        found: dict[str, Any] = {}
        scope = {**self._scope, "constants": self._constants, "_df_write": kernel.write}
        exec(compile(source, f"<{name}>", "exec"), scope, found)  # noqa: S102 (Inductor's statement, its names bound)
        return Unit(found["kernel"], args, tuple(v.name for v, _ in kernel.made), frozenset(made), (name,))

    def _key(self, kernel: _Kernel) -> Any:
        names = {*kernel.names, *kernel.idle}
        words = re.sub(r"\b[A-Za-z_]\w*\b", lambda m: "_" if m[0] in names else str(self._numbers.get(m[0], m[0])),
                       self._text(kernel.statement.span))  # fmt: skip
        return words, tuple((str(value.geometry.dtype), place) for value, place, _ in kernel.touched)

    # -- numbers

    def _text(self, span: tuple[int, int]) -> str:
        return self._raw[span[0] : span[1]].decode()

    def _evaluate(self, text: str) -> Any:
        try:
            return eval(text, {"__builtins__": {}, "max": max, "min": min, "math": self._scope.get("math")}, self._numbers)  # noqa: S307
        except Exception as error:  # noqa: BLE001 (known when a kernel has run, or not at all)
            raise NotUnderstood(f"{text}: {type(error).__name__}: {error}") from None

    def _dims(self, text: str) -> tuple[int, ...] | None:
        """`arg1_1.size()`: where Inductor finds a size that is no argument."""
        name, _, what = text.partition(".")
        value = self._names[name].value if name in self._names and what in ("size()", "stride()") else None
        if value is None:
            return None
        return value.geometry.shape if what == "size()" else value.geometry.stride

    def _number(self, text: str) -> Any:
        found = self._evaluate(text)
        if found is not None and type(found) not in (int, float, bool):
            raise NotUnderstood(f"{text} is a {type(found).__name__}")
        return found

    def _sizes(self, texts: Sequence[str] | None) -> tuple[int, ...]:
        return tuple(int(self._evaluate(text)) for text in texts or ())

    def _device(self, kind: str) -> torch.device:
        found = [a.device for a in self._args if isinstance(a, torch.Tensor) and a.device.type == kind]
        return found[0] if found else torch.device(kind)


def _nothing(geometry: Geometry) -> torch.Tensor:
    return torch.zeros(geometry.shape, dtype=geometry.dtype, device=geometry.device)


class _AsTheyAre:
    """Units of kernels are entries already."""

    def entry(self, unit: Unit, sizes: Mapping[str, Any]) -> Entry:
        return Entry(unit.fn, (ALLOCATES,) * len(unit.outs), source="kernel")
