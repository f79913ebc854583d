"""How long the strategies are: lines of code, beside what the field has for the same."""

import ast
import inspect
import textwrap

import dynaflow as df
from dynaflow.strategies import common

# strategy -> what the field has for it, as counted in its sources
PEERS = {
    df.NanoFlow: "vLLM PR 23592: 558 in three files",
    df.DualBatch: "vLLM DBO: 1,277; SGLang TBO: 2,218, and 1,344 in nine models",
    df.SingleBatch: "SGLang SBO: 144",
    df.CommOverlap: "vLLM PR 44677, all-reduce alone: 172",
    df.TokenWeave: "TokenWeave: 339, and each model edited",
    df.FusedGemm: "",
    df.Offload: "",
    df.PrefillDecode: "SGLang PD multiplexing: 394",
    df.Mixed: "",
    df.NanoBatch: "",
    df.Branches: "",
}


def num_lines(strategy: type) -> int:
    """Lines of code in its methods, what only takes parameters (`__init__`), comments, blank lines and docstrings aside."""
    (body,) = ast.parse(source := textwrap.dedent(inspect.getsource(strategy))).body
    assert isinstance(body, ast.ClassDef)
    return _num_lines(source, [m for m in body.body if isinstance(m, ast.FunctionDef) and m.name != "__init__"])


def num_lines_shared() -> int:
    """The same of the functions that strategies share."""
    source = inspect.getsource(common)
    return _num_lines(source, [f for f in ast.parse(source).body if isinstance(f, ast.FunctionDef)])


def _num_lines(source: str, functions: list[ast.FunctionDef]) -> int:
    lines: set[int] = set()
    for function in functions:
        code = [n for n in function.body if not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))]
        first = min([function.lineno, *(d.lineno for d in function.decorator_list)])
        lines.update(range(first, function.body[0].lineno))
        lines.update(line for n in code for line in range(n.lineno, (n.end_lineno or n.lineno) + 1))
    text = source.splitlines()
    return sum(bool(text[n - 1].strip()) and not text[n - 1].strip().startswith("#") for n in lines)


def table() -> str:
    rows = [(f"`{cls.__name__}`", num_lines(cls), peer) for cls, peer in PEERS.items()]
    rows.append(("`common.py`, which they share", num_lines_shared(), ""))
    return "\n".join(["| strategy | lines of scheduling | the field |", "|---|---|---|", *(f"| {a} | {b} | {c} |" for a, b, c in rows)])
