"""The text of an Inductor wrapper, read as a syntax tree -> one record per statement of its `call`.

Contract: `read` takes `CompiledFxGraph.source_code` and gives every statement of `call` a kind, or raises `NotUnderstood`: a form
that is not known here is never guessed at. Names, expressions and targets are the text's own; nothing is evaluated.

1. The function: `def call(args)`, or the method `call(self, args)` of `class Runner`.
2. Its body, the part under a device guard unrolled.
3. One record per statement; what is returned as one record per output.

    buf0 = empty_strided_cpu((s0, 64), (64, 1), torch.float32)     allocate  makes buf0
    extern_kernels.mm(arg1_1, arg2_1, out=buf0)                    extern    uses arg1_1, arg2_1, buf0
    buf1 = buf0; del buf0  # reuse                                 alias     makes buf1 of buf0; free buf0
    cpp_fused_relu_0(buf1, s0)                                     kernel    uses buf1, s0
    return (buf1, )                                                return
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import Any, Iterator, Sequence

# what a statement of `call` can be
KINDS = (
    "unpack",  # arg0_1, arg1_1 = args
    "setup",  # args.clear(), torch.cuda.set_device(0), stream0 = get_raw_stream(0), arg1_1 = copy_if_misaligned(arg1_1)
    "symbol",  # s0 = arg0_1; triton_poi_fused_0_xnumel = 64*s0; buf2 = None
    "assert",  # assert_size_stride(...), assert_alignment(...)
    "allocate",  # buf0 = empty_strided_cuda((s0, 64), (64, 1), torch.bfloat16)
    "alias",  # buf1 = buf0; buf1 = reinterpret_tensor(buf0, ...): a view, or a reuse where `del buf0` follows
    "kernel",  # triton_poi_fused_relu_0.run(buf1, ..., stream=stream0); cpp_fused_relu_0(buf1, s0)
    "extern",  # extern_kernels.mm(..., out=buf0); torch.ops.my.op_(arg0_1): writes into memory that is there
    "own",  # buf0 = torch.ops.aten.sdpa.default(...): allocates its own result
    "item",  # buf1 = buf0[0]
    "free",  # del buf0
    "return",  # return (buf1, reinterpret_tensor(buf2, ...), )
)


class NotUnderstood(Exception):
    """The wrapper's text has a form that is not known here."""


@dataclass(frozen=True, slots=True)
class Statement:
    # one of KINDS
    kind: str
    # the name that it binds
    makes: str = ""
    # names of `call`'s own that it uses, in order of first use
    uses: tuple[str, ...] = ()
    # what it calls: "extern_kernels.mm", "triton_poi_fused_relu_0"; for a symbol: its expression
    target: str = ""
    # of an allocation, an alias or an assert; expressions over the wrapper's symbols. None: the shape of what it is an alias of
    shape: tuple[str, ...] | None = None
    stride: tuple[str, ...] | None = None
    offset: str = "0"
    # of an allocation: "torch.float32", "cuda"
    dtype: str = ""
    device: str = ""
    # bytes [start, end) of the text: the value that is bound, or all of the statement
    span: tuple[int, int] = (0, 0)
    # ... of what is called, for a kernel that allocates its own result
    function: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Wrapper:
    text: str
    args: tuple[str, ...]
    # one statement per name that `del a, b` frees
    statements: tuple[Statement, ...]
    # what is returned: "alias" (binds no name), or "own" with the text of anything else
    outputs: tuple[Statement, ...]
    # where names of more arguments go, and what is written there before and after them
    slot: tuple[int, str, str]


def read(text: str) -> Wrapper:
    try:
        return _Reader(text).read()
    except SyntaxError as e:
        raise NotUnderstood(f"the wrapper is no Python: {e}") from None


def find_call(tree: ast.Module) -> ast.FunctionDef:
    """`def call(args)` of the module, or `def call(self, args)` of its class Runner."""
    bodies = [tree.body, *(n.body for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Runner")]
    found = [n for body in bodies for n in body if isinstance(n, ast.FunctionDef) and n.name == "call"]
    if len(found) != 1:
        raise NotUnderstood(f"the wrapper has {len(found)} functions 'call'")
    if [a.arg for a in found[0].args.args][-1:] != ["args"]:
        raise NotUnderstood("call does not take 'args'")
    return found[0]


class _Reader:
    def __init__(self, text: str):
        self.text = text
        self._bytes = text.encode()
        self._lines = [0]
        for line in self._bytes.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))
        self._args: tuple[str, ...] = ()
        self._bound: set[str] = set()

    def read(self) -> Wrapper:
        call = find_call(ast.parse(self.text))
        start = self._span(call.body[0])[0]
        slot = (start, "", f", = args\n{' ' * call.body[0].col_offset}")
        statements: list[Statement] = []
        outputs: tuple[Statement, ...] | None = None
        for node in self._unrolled(call.body):
            if outputs is not None:
                raise NotUnderstood("statements after the return")
            if isinstance(node, ast.Return):
                outputs = self._outputs(node)
                statements.append(Statement("return", uses=self._names(node), span=self._span(node)))
                continue
            new = [self._statement(node)] if not isinstance(node, ast.Delete) else list(self._frees(node))
            statements.extend(new)
            if new and new[0].kind == "unpack":
                slot = (self._span(node.targets[0])[1], "" if self._is_open(node) else ", ", "")  # type: ignore[attr-defined]
        if outputs is None:
            raise NotUnderstood("call does not return")
        return Wrapper(self.text, self._args, tuple(statements), outputs, slot)

    def _is_open(self, node: ast.stmt) -> bool:
        """`arg0_1, = args` ends in a comma already."""
        return self._bytes[: self._span(node.targets[0])[1]].rstrip().endswith(b",")  # type: ignore[attr-defined]

    def _unrolled(self, body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
        for node in body:
            if isinstance(node, ast.With):
                if len(node.items) != 1 or not re.fullmatch(r"torch\.\w+\._DeviceGuard\(\d+\)", ast.unparse(node.items[0].context_expr)):
                    raise NotUnderstood(f"with {ast.unparse(node.items[0].context_expr)}")
                yield from self._unrolled(node.body)
            else:
                yield node

    def _span(self, node: Any) -> tuple[int, int]:
        return self._lines[node.lineno - 1] + node.col_offset, self._lines[node.end_lineno - 1] + node.end_col_offset

    def _names(self, node: ast.AST) -> tuple[str, ...]:
        """Names of `call`'s own that are used here; functions and constants of the module are not."""
        found = [n for n in ast.walk(node) if isinstance(n, ast.Name) and n.id in self._bound]
        return tuple(dict.fromkeys(n.id for n in sorted(found, key=lambda n: (n.lineno, n.col_offset))))

    def _frees(self, node: ast.Delete) -> Iterator[Statement]:
        for target in node.targets:
            if not isinstance(target, ast.Name):
                raise NotUnderstood(ast.unparse(node))
            yield Statement("free", uses=(target.id,), span=self._span(node))

    def _statement(self, node: ast.stmt) -> Statement:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            return self._call(node.value)
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            return self._assign(node.targets[0], node.value, node)
        is_check = isinstance(node, ast.If) and not node.orelse and all(isinstance(n, ast.Raise) for n in node.body)
        if isinstance(node, ast.Assert) or is_check:
            return Statement("assert", uses=self._names(node), span=self._span(node))
        raise NotUnderstood(ast.unparse(node).splitlines()[0])

    def _call(self, call: ast.Call) -> Statement:
        target = ast.unparse(call.func)
        uses, span = self._names(call), self._span(call)
        if target == "assert_size_stride" and isinstance(call.args[0], ast.Name):
            return Statement("assert", "", uses, target, _items(call.args[1]), _items(call.args[2]), span=span)
        if target.startswith("assert_"):
            return Statement("assert", "", uses, target, span=span)
        if target == "args.clear" or re.fullmatch(r"torch\.\w+\.set_device", target):
            return Statement("setup", "", uses, target, span=span)
        if target.endswith(".run") and any(k.arg == "stream" for k in call.keywords):
            return Statement("kernel", "", uses, target.removesuffix(".run"), span=span)
        if isinstance(call.func, ast.Name) and target.startswith("cpp_"):
            return Statement("kernel", "", uses, target, span=span)
        if isinstance(call.func, ast.Attribute):
            return Statement("extern", "", uses, target, span=span)
        raise NotUnderstood(ast.unparse(call))

    def _assign(self, target: ast.expr, value: ast.expr, node: ast.stmt) -> Statement:
        span, uses = self._span(value), self._names(value)
        if isinstance(value, ast.Name) and value.id == "args":
            elements = target.elts if isinstance(target, ast.Tuple) else []
            if self._args or not elements or not all(isinstance(e, ast.Name) for e in elements):
                raise NotUnderstood(ast.unparse(node))
            self._args = tuple(e.id for e in elements if isinstance(e, ast.Name))
            self._bound.update(self._args)
            return Statement("unpack", span=self._span(node))
        if not isinstance(target, ast.Name):
            raise NotUnderstood(ast.unparse(node))
        name = target.id
        called = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
        if called == "copy_if_misaligned" and uses == (name,) and name in self._args:
            return Statement("setup", name, uses, called, span=span)
        if called == "get_raw_stream":
            self._bound.add(name)
            return Statement("setup", name, uses, called, span=span)
        if name in self._bound and re.match(r"(buf|arg)\d", name):
            raise NotUnderstood(f"{name} is bound twice")
        self._bound.add(name)
        if alias := self._alias(value, name):
            return alias
        if not re.match(r"(buf|workspace_?|semaphores_?)\d*", name) or isinstance(value, ast.Constant):
            return Statement("symbol", name, uses, ast.unparse(value), span=span)
        if isinstance(value, ast.Subscript) and isinstance(value.value, ast.Name):
            return Statement("item", name, (value.value.id,), span=span)
        if isinstance(value, ast.Call) and (match := re.fullmatch(r"empty_strided_(cpu|cuda|xpu|mtia)", called)) and len(value.args) == 3:
            dtype = ast.unparse(value.args[2])
            return Statement("allocate", name, uses, called, _items(value.args[0]), _items(value.args[1]), "0", dtype, match[1], span)
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
            if re.search(r"\bempty_strided|\bas_strided$", called):
                raise NotUnderstood(ast.unparse(node))
            return Statement("own", name, uses, called, span=span, function=self._span(value.func))
        raise NotUnderstood(ast.unparse(node))

    def _alias(self, value: ast.expr, name: str = "") -> Statement | None:
        """A name, or reinterpret_tensor of a name, that stands for memory."""
        span = self._span(value)
        is_memory = isinstance(value, ast.Name) and (re.match(r"buf\d", value.id) or value.id in self._args)
        if isinstance(value, ast.Name) and is_memory and (not name or name.startswith("buf")):
            return Statement("alias", name, (value.id,), span=span)
        if isinstance(value, ast.Call) and ast.unparse(value.func) == "reinterpret_tensor" and len(value.args) == 4:
            base = value.args[0]
            if isinstance(base, ast.Name):
                shape, stride = _items(value.args[1]), _items(value.args[2])
                return Statement("alias", name, (base.id,), "", shape, stride, ast.unparse(value.args[3]), span=span)
        return None

    def _outputs(self, node: ast.Return) -> tuple[Statement, ...]:
        if not isinstance(node.value, ast.Tuple):
            raise NotUnderstood(ast.unparse(node))
        return tuple(self._alias(e) or Statement("own", "", self._names(e), ast.unparse(e)) for e in node.value.elts)


def _items(node: ast.expr) -> tuple[str, ...]:
    if not isinstance(node, ast.Tuple):
        raise NotUnderstood(f"{ast.unparse(node)} is no shape")
    return tuple(ast.unparse(e) for e in node.elts)
