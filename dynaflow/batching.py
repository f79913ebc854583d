"""Which dim carries the batch, what may run on a slice of it, and what memory every node touches.

Contract: `analyse` reads a graph as TorchDynamo hands it to a backend (not functionalised) and changes nothing: no node, no
guard, none of the given fakes. Where it is not sure, a node is unsplittable. What it promises of the others: run on rows
[lo, hi) of its batch-carrying inputs, with the batch symbols bound to hi - lo, a node gives exactly rows [lo, hi) of its
batch-carrying outputs; its other outputs do not depend on the batch, unless they come from a node that ran over all of it.

 1. Walk: the graph is interpreted over fake tensors, one node after the other; what repeats (`repeats.py`) is not run again.
 2. Listen: a dispatch mode sees every op that a node comes down to. Composite ops are looked through.
 3. Touch: from the op's schema and from the identity of storages, what it reads, writes and makes.
 4. Judge: `batch_rules.judge` says whether the op treats rows alike. A node may be split if all its ops may.
 5. Sum up: one `NodeFacts` per node; storages are numbered in the order in which nodes hand them out.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace
from typing import Any, Iterable, Iterator, Mapping, Sequence
from unittest import mock

import sympy
import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import rebind_unbacked
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from dynaflow.batch_rules import Call, Sizes, find, groups, register_split_rule, rowwise, tensors_in
from dynaflow.batch_rules.judge import Memory, is_random, judge, storage_key, survives
from dynaflow.batch_rules.table import is_users
from dynaflow.repeats import Repeats, Signature

__all__ = ["Facts", "NodeFacts", "analyse", "register_split_rule", "rowwise"]

# higher-order ops that run their body as it is, and how many arguments stand between the body and what it is given
_TRANSPARENT = {"wrap": 0, "wrap_activation_checkpoint": 0, "tag_activation_checkpoint": 0, "invoke_subgraph": 1}

_DROPOUT = {torch.nn.functional.dropout, torch.dropout}

# ops that ask for something other than data; the last few are asked of wrappers (a nested tensor)
_ASKS = {"aten::_fused_sdp_choice", "aten::_assert_tensor_metadata"} | {
    f"aten::{name}" for name in (
        "sym_size", "sym_stride", "sym_numel", "sym_storage_offset", "sym_is_contiguous", "size", "stride", "numel", "dim",
        "is_contiguous", "is_strides_like_format", "is_non_overlapping_and_dense")}  # fmt: skip

# ops that change a tensor's shape in place, beside those that are tagged as such
_RESIZES = {"aten::resize_", "aten::resize_as_", "aten::set_", "inductor::resize_storage_bytes_"}

_ASSERTS = {torch.ops.aten._assert_async.default, torch.ops.aten._assert_async.msg}

@dataclass(frozen=True, slots=True)
class NodeFacts:
    # why it must run over the whole batch; empty when it may be split
    unsplittable: str = ""
    # the only reason is that it changes a tensor without a batch axis, by something that does not depend on the batch
    writes_state: bool = False
    # storages, of those that exist before the node, that it looks at (a view counts as looking)
    reads: frozenset[int] = frozenset()
    # storages, of those that exist before the node, that it changes
    writes: frozenset[int] = frozenset()
    # storages that it creates and that its output holds
    makes: frozenset[int] = frozenset()
    # "rng" for random ops, "group:<name>" for collectives
    uses: tuple[str, ...] = ()
    # every tensor it returns lies in a storage that existed before, and it changes nothing
    is_view: bool = False
    # multiply-accumulates of its matmuls, convolutions and attentions, at hint sizes; sizes that depend on data count as 1
    macs: int = 0
    # the ops it came down to: ("aten.t.default", "aten.mm.default")
    calls: tuple[str, ...] = ()


@dataclass(frozen=True)
class Facts:
    nodes: dict[fx.Node, NodeFacts]
    # what every node returned: fakes, symbolic numbers, pytrees of them
    fake: dict[fx.Node, Any]
    # the same pytrees, with the batch axis of every tensor; None for tensors without one, and for everything else
    axis: dict[fx.Node, Any]
    _storage_ids: dict[Any, int] = field(repr=False)

    def storage(self, fake_tensor: torch.Tensor) -> int:
        """Number of the storage that a fake lies in. Works for the inputs and for everything in `fake`."""
        return self._storage_ids[storage_key(fake_tensor)]


def analyse(gm: fx.GraphModule, inputs: Sequence[Any], axes: Mapping[str, int], symbols: Iterable[sympy.Symbol]) -> Facts:
    """`inputs` are the fakes of the placeholders, `axes` says which of them carry the batch and where, and `symbols` are all
    the symbols that mean the batch size. Placeholders that are not in `axes` carry the batch where their shape says so."""
    # the mode that Dynamo traced in, where its fakes are from: for its backends it has a new one
    traced = next((x.fake_mode for x in inputs if isinstance(x, FakeTensor)), None)
    fake_mode = traced or detect_fake_mode(list(inputs)) or FakeTensorMode()
    shape_env = fake_mode.shape_env
    listener = _Listener(Sizes(symbols, shape_env))
    with contextlib.ExitStack() as stack:
        if shape_env is not None:
            stack.enter_context(shape_env.suppress_guards())
            stack.enter_context(shape_env.ignore_fresh_unbacked_symbols())
            stack.enter_context(mock.patch.object(shape_env, "evaluate_sym_node", listener.spy(shape_env.evaluate_sym_node)))
        stack.enter_context(mock.patch.object(fake_mode, "allow_non_fake_inputs", True))
        stack.enter_context(_functorch_stack_kept())
        stack.enter_context(torch.no_grad())
        stack.enter_context(fake_mode)
        stack.enter_context(enable_python_dispatcher())  # kernels written in C++ know no symbolic sizes
        # fakes of our own over the same storages: an in-place op may change a fake's shape
        own = [x.detach() if isinstance(x, torch.Tensor) else x for x in inputs]
        walk = _Walk(gm, listener, axes, fake_mode)
        with listener:
            walk.run(*own, enable_io_processing=False)
        return Facts(walk.facts, walk.env_of, walk.axis_of, listener.memory.ids)


# ---------------------------------------------------------------------------- 1 and 5: one node after the other


class _Walk(fx.Interpreter):
    def __init__(self, gm: fx.GraphModule, listener: _Listener, axes: Mapping[str, int], fake_mode: FakeTensorMode):
        super().__init__(gm, garbage_collect_values=False)
        self.listener, self.axes, self.fake_mode = listener, axes, fake_mode
        self.facts: dict[fx.Node, NodeFacts] = {}
        self.env_of: dict[fx.Node, Any] = {}
        self.axis_of: dict[fx.Node, Any] = {}
        # functorch transforms that are open
        self.transforms: list[str] = []
        self.repeats = Repeats(fake_mode, listener.memory)

    def run_node(self, node: fx.Node) -> Any:
        heard = self.listener.start()
        reason = self._transform(node)
        signature = self.repeats.signature(node, self.env_of) if not reason else None
        if signature is not None and self._repeat(node, signature):
            return self.env_of[node]
        try:
            value = super().run_node(node)
            if "unbacked_bindings" in node.meta:  # sizes that depend on data: by the symbols that Dynamo knows them by
                rebind_unbacked(self.fake_mode.shape_env, node, value)
        except Exception as error:  # one node that we cannot run must not cost the others
            value, reason = self._fall_back(node, heard), f"could not be analysed: {type(error).__name__}"
        if heard.reasons and tensors_in(value):
            args, kwargs = self._arguments(node)
            if survives((r[0] for r in heard.reasons), Call(node.target, args, kwargs, value, self.listener.sizes)):
                heard.reasons = []
        if not heard.calls and value is None and self.listener.sizes.has_batch(self._arguments(node)):
            reason = reason or f"checks the batch size ({node.name})"
        if node.op == "placeholder":
            self._check_axis(node, value)
        if heard.calls and (reason or heard.is_special):
            signature = None  # what it did says nothing of others
        if signature is not None and heard.calls:
            self.listener.keep(value)
            value = self.repeats.borrowed(signature, node, value)
        self.facts[node] = self.listener.finish(heard, node.op, reason, value)
        self.env_of[node] = value
        self.axis_of[node] = pytree.tree_map(self.listener.axis, value)
        if signature is not None and heard.calls:
            self.repeats.add(signature, self.facts[node], value, self.axis_of[node])
        elif heard.is_reshaped or (not heard.calls and not _is_data(value)):
            self.repeats.begin_anew(node)
        return value

    def _repeat(self, node: fx.Node, signature: Signature) -> bool:
        """Whether an equal node was run before; then this one does the same."""
        found = self.repeats.find(signature, node)
        if found is None:
            return False
        known, value = found
        self.env_of[node], self.axis_of[node] = value, known.axis
        storages = [self.listener.memory.ids[key] for key in signature.storages]
        self.facts[node] = replace(
            known.facts, reads=frozenset(storages[i] for i in known.reads), writes=frozenset(storages[i] for i in known.writes),
            makes=self.listener.number(value, known.carriers))  # fmt: skip
        return True

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target in _DROPOUT and args and not kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True)):
            return args[0]  # as the real one does; the decomposition that fakes go through makes a copy
        if _is_transparent(target):
            return args[0](*args[1 + _TRANSPARENT[target.name()] :])
        return super().call_function(target, args, kwargs)

    def get_attr(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        value = super().get_attr(target, args, kwargs)
        if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
            return self.fake_mode.from_tensor(value, static_shapes=True)
        return value

    def _arguments(self, node: fx.Node) -> Any:
        return pytree.tree_map(lambda a: self.env_of.get(a) if isinstance(a, fx.Node) else a, (list(node.args), dict(node.kwargs)))

    def _transform(self, node: fx.Node) -> str:
        """Why a node between the brackets of vmap and friends cannot be split: its tensors hide the dim that is mapped."""
        name = getattr(node.target, "__name__", "")
        if name.endswith("_increment_nesting"):
            self.transforms.append(name.removesuffix("_increment_nesting").strip("_"))
        reason = f"inside {self.transforms[-1]}" if self.transforms else ""
        if name.endswith("_decrement_nesting") and self.transforms:
            self.transforms.pop()
        return reason

    def _check_axis(self, node: fx.Node, value: Any) -> None:
        """A tensor that is said to carry the batch in a dim whose size does not say so must not be taken for a constant."""
        axis = self.axes.get(str(node.target), self.axes.get(node.name))
        if axis is not None and isinstance(value, torch.Tensor) and self.listener.axis(value) != axis % max(value.ndim, 1):
            self.listener.memory.opaque.add(id(value))

    def _fall_back(self, node: fx.Node, heard: _Heard) -> Any:
        """What Dynamo saw; it may have changed everything it got, and may return parts of it."""
        value = node.meta.get("example_value", node.meta.get("val"))
        same: dict[Any, Any] = {}
        for source in node.all_input_nodes:
            ours = tensors_in(self.env_of.get(source))
            theirs = tensors_in(source.meta.get("example_value"))
            heard.read.update(storage_key(t) for t in ours)
            if len(ours) == len(theirs):
                same.update({storage_key(t): storage_key(o) for t, o in zip(theirs, ours)})
        heard.written.update(heard.read)
        heard.uses["rng"] = None
        self.listener.keep(value)
        for key in map(storage_key, tensors_in(value)):
            if same.get(key) in self.listener.memory.ids:
                self.listener.memory.ids.setdefault(key, self.listener.memory.ids[same[key]])
        return value


# ---------------------------------------------------------------------------- 2 and 3: the ops of a node


class _Heard:
    """What one node came down to, so far. Storages by key."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.read: set[Any] = set()
        self.written: set[Any] = set()
        self.uses: dict[str, None] = {}
        # (reason, is it only a change of state, what the op returned)
        self.reasons: list[tuple[str, bool, Any]] = []
        # results of `all` that were asserted: the rows of every part pass if all rows do
        self.asserted: list[torch.Tensor] = []
        self.macs = 0
        # a user's rule was asked, a body was not seen, or what was asserted is remembered by its tensors
        self.is_special = False
        # some tensor's shape was changed in place
        self.is_reshaped = False


class _Listener(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.sizes = sizes
        self.memory = Memory()
        # storages and fakes are known by their addresses, which are reused when one of them dies
        self._alive: list[Any] = []
        self._heard = _Heard()

    def start(self) -> _Heard:
        self._heard = _Heard()
        return self._heard

    def keep(self, value: Any) -> None:
        self._alive.append(value)

    def axis(self, value: Any) -> int | None:
        if not isinstance(value, torch.Tensor) or id(value) in self.memory.opaque or torch._C._functorch.is_functorch_wrapped_tensor(value):
            return None
        return self.sizes.axis(value)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_op = isinstance(func, torch._ops.OpOverload)
        if is_op and (torch.Tag.inplace_view in func.tags or func._schema.name in _RESIZES):
            self._heard.is_special = self._heard.is_reshaped = True
        if is_op and (func.namespace == "prim" or func._schema.name in _ASKS):
            return func(*args, **kwargs)
        if is_op and _only_restrides(func, args, self.sizes):
            result = func(*args, **kwargs)
            self.keep(result)
            return result
        # a wrapper answers for itself: what it is asked for comes down to the same question, without end, and others to what it cannot do
        if is_op and func._can_decompose() and not any(hasattr(t, "__tensor_flatten__") for t in types):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if _is_transparent(func):
            with self:
                return args[0](*args[1 + _TRANSPARENT[func.name()] :])
        # its fake returns a new tensor, the real one returns what it was given
        is_wait = is_op and func._schema.name.endswith("functional::wait_tensor")
        result = args[0] if is_wait else func(*args, **kwargs)
        self.keep((args, kwargs, result))
        call = Call(func, args, kwargs, result, self.sizes)
        call.is_opaque = not is_op and find(func) is None
        if (call.is_opaque and _may_write(args)) or func.namespace == "c10d":
            call.written = call.tensors  # no schema says which
        self._note(call)
        if is_wait:
            self._heard.written.update(map(storage_key, call.tensors))  # only now do its bytes arrive
        return result

    def _note(self, call: Call) -> None:
        heard = self._heard
        heard.calls.append(str(call.func))
        heard.read.update(storage_key(t) for t in call.tensors)
        heard.written.update(storage_key(t) for t in call.written)
        entry = find(call.func)
        heard.is_special = heard.is_special or call.is_opaque or call.func in _ASSERTS or is_users(call.func)
        is_told = entry is not None and entry.uses is not None
        heard.uses.update(dict.fromkeys(entry.uses(call) if is_told else groups(call.arguments)))  # type: ignore[union-attr, misc]
        if is_random(call) or call.is_opaque:
            heard.uses["rng"] = None
        reason, is_state = judge(call, self.memory)
        if reason or _holds(heard.asserted, call.tensors):
            heard.reasons.append((reason or f"reduces over the batch ({call.func})", is_state, call.outs))
        if call.func in _ASSERTS:
            kept = [r for r in heard.reasons if not _holds(r[2], call.tensors) or not r[0].endswith("(aten.all.default)")]
            heard.asserted += call.tensors if len(kept) < len(heard.reasons) else []
            heard.reasons = kept
        heard.macs += _macs(call)

    def spy(self, evaluate: Any) -> Any:
        """Some numbers (the scale of an attention) are made concrete before the op is dispatched, and look like constants."""

        def evaluate_and_note(sym_node: Any, *args: Any, **kwargs: Any) -> Any:
            if sym_node.pytype is not bool and self.sizes.has_batch_symbol(sym_node.expr):
                self._heard.reasons.append(("uses the batch size as a number", False, ()))
            return evaluate(sym_node, *args, **kwargs)

        return evaluate_and_note

    def number(self, value: Any, carriers: Sequence[bool]) -> frozenset[int]:
        """Take note of what a node that was not run returns; the numbers of its new storages."""
        self.keep(value)
        ids, made = self.memory.ids, []
        for tensor, is_carrier in zip(tensors_in(value), carriers):
            key = storage_key(tensor)
            if key not in ids:
                made.append(ids.setdefault(key, len(ids)))
            if is_carrier:
                self.memory.with_batch.add(key)
        return frozenset(made)

    def finish(self, heard: _Heard, op: str, reason: str, value: Any) -> NodeFacts:
        self.keep(value)
        tensors = tensors_in(value)
        keys = list(dict.fromkeys(storage_key(t) for t in tensors))
        existed = set(self.memory.ids)
        for key in keys:
            self.memory.ids.setdefault(key, len(self.memory.ids))
        carriers = (t for t in tensors if id(t) in self.memory.opaque or any(map(self.sizes.has_batch, t.shape)))
        self.memory.with_batch.update(map(storage_key, carriers))
        if op in ("placeholder", "get_attr", "output"):
            return NodeFacts()
        # a node that dispatches nothing hands on what it was given: getitem, dropout in eval mode
        read = heard.read if heard.calls else set(keys)
        if _holds(heard.asserted, tensors):
            heard.reasons.append(("reduces over the batch", False, ()))
        reasons = [(reason, False, ())] if reason else sorted(heard.reasons, key=lambda r: r[1])
        writes = heard.written & existed
        return NodeFacts(
            unsplittable=reasons[0][0] if reasons else "",
            writes_state=bool(reasons) and all(is_state for _, is_state, _ in reasons),
            reads=frozenset(self.memory.ids[key] for key in read & existed),
            writes=frozenset(self.memory.ids[key] for key in writes),
            makes=frozenset(self.memory.ids[key] for key in keys if key not in existed),
            uses=tuple(heard.uses),
            is_view=bool(tensors) and not writes and existed.issuperset(keys),
            macs=heard.macs,
            calls=tuple(heard.calls),
        )


# ---------------------------------------------------------------------------- small questions


def _only_restrides(func: Any, args: Sequence[Any], sizes: Sizes) -> bool:
    """Whether `as_strided` gives strides to dims of size 1, and leaves every element where it is: a change of memory format."""
    if func._schema.name not in ("aten::as_strided", "aten::as_strided_") or len(args[1]) != args[0].ndim:
        return False
    x, shape, strides, *offset = args
    return (
        all(sizes.expr(a) == sizes.expr(b) for a, b in zip(shape, x.shape))
        and all(sizes.expr(a) == sizes.expr(b) or sizes.expr(n) == 1 for n, a, b in zip(shape, strides, x.stride()))
        and all(o is None or sizes.expr(o) == sizes.expr(x.storage_offset()) for o in offset)
    )


def _is_transparent(target: Any) -> bool:
    return isinstance(target, torch._ops.HigherOrderOperator) and target.name() in _TRANSPARENT


def _may_write(args: Sequence[Any]) -> bool:
    """Whether a higher-order op may change what it is given: one without a body that we can read, or with a body that may."""
    bodies = [arg for arg in pytree.tree_leaves(list(args)) if isinstance(arg, fx.GraphModule)]
    nodes = [(body, node) for body in bodies for node in body.graph.nodes]
    inner = [getattr(body, node.target, None) for body, node in nodes if node.op == "get_attr"]
    return not bodies or any(_is_inplace(node) for _, node in nodes) or any(_may_write([b]) for b in inner if isinstance(b, fx.GraphModule))


def _is_inplace(node: fx.Node) -> bool:
    if isinstance(node.target, torch._ops.OpOverloadPacket):
        return any(getattr(node.target, name)._schema.is_mutable for name in node.target.overloads())
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    name = getattr(node.target, "__name__", str(node.target))
    is_call = node.op in ("call_function", "call_method", "call_module")
    return is_call and (name.endswith("_") or name in ("setitem", "iadd", "imul", "isub", "itruediv") or "out" in node.kwargs)


def _is_data(value: Any) -> bool:
    """Whether it is made of tensors and numbers."""
    leaves = pytree.tree_leaves(value)
    return bool(leaves) and all(isinstance(x, (torch.Tensor, int, float, torch.SymInt, torch.SymFloat, torch.SymBool)) for x in leaves)


def _holds(tensors: Iterable[Any], wanted: Iterable[torch.Tensor]) -> bool:
    return not {id(t) for t in tensors}.isdisjoint(map(id, wanted))


def _macs(call: Call) -> int:
    op = getattr(call.func, "overloadpacket", call.func)
    if op is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
        op = torch.ops.aten._scaled_dot_product_flash_attention  # torch counts it on GPUs only
    if op not in flop_registry:
        return 0
    formula = flop_registry[op]
    args, kwargs, out = pytree.tree_map_only(torch.Tensor, _hint_shape, (tuple(call.args), call.kwargs, call.outs[0]))
    for given in ((args, kwargs, out), (call.args, call.kwargs, call.outs[0])):  # some formulas want shapes, some tensors
        with contextlib.suppress(Exception):
            return _hint(formula(*given[0], **given[1], out_val=given[2])) // 2
    return 0


def _hint_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(map(_hint, tensor.shape))


def _hint(number: Any) -> int:
    if isinstance(number, torch.SymInt):
        return number.node.hint if number.node.has_hint() else 1
    return int(number)


@contextlib.contextmanager
def _functorch_stack_kept() -> Iterator[None]:
    """A graph whose closing bracket of a vmap could not be run must not leave the vmap open."""
    depth = len(torch._C._functorch.get_interpreter_stack() or ())
    try:
        yield
    finally:
        while len(torch._C._functorch.get_interpreter_stack() or ()) > depth:
            torch._C._functorch.pop_dynamic_layer_stack()
