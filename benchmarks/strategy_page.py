"""Put the pictures and the table of docs/strategies.md together: `python -m benchmarks.strategy_page` rewrites them, `--check` only looks.

Pictures are the grids of real plans: of small flows, or, where functions stand in for ops, of a small model that is captured here.
"""

import ast
import inspect
import re
import sys
import textwrap
from pathlib import Path

import torch
from torch import nn

import dynaflow as df
from benchmarks.overlap.report import RESULTS
from benchmarks.overlap.sections import PAYS
from benchmarks.store import geomean, load
from dynaflow.context import Context
from dynaflow.planner import plan
from dynaflow.strategies import common
from dynaflow.testing.network import all_reduce
from dynaflow.testing.notation import flow_of

PAGE = Path(__file__).parent.parent / "docs" / "strategies.md"
BEGIN, END = "<!-- made by python -m benchmarks.strategy_page: {} -->", "<!-- end -->"

DENSE = """
    input x
    qkv: x -> q
    attn: q -> a
    o: a -> o
    ar network group:tp: o -> r
    mlp: r -> y
    output y"""
MOE = """
    input x
    attn: x -> h
    dispatch network group:ep: h -> d
    experts: d -> e
    combine network group:ep: e -> c
    shared: h -> s
    add memory: c s -> y
    output y"""
BRANCHING = """
    input x
    a: x -> u
    b: u -> v
    c: u -> w
    d: v w -> z
    ar network group:tp: z -> y
    output y"""
GATHERED = "input x0\n" + "\n".join(
    f"param w{i} state\nL{i}.gather network group:dp whole: w{i} -> W{i}^\nL{i}.mm: x{i} W{i} -> x{i + 1}" for i in range(4)
) + "\noutput x4"  # fmt: skip


FETCHED = GATHERED.replace("gather network group:dp whole", "fetch copy whole")


class Block(nn.Module):
    """A tensor-parallel layer, with an emulated all-reduce."""

    def __init__(self, dim: int):
        super().__init__()
        self.o, self.norm, self.mlp = nn.Linear(dim, dim), nn.RMSNorm(dim, eps=1e-5), nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + all_reduce(self.o(x), 1.0, 0.0)
        return x + self.mlp(self.norm(x))


FLOWS = {
    "NanoFlow": (DENSE, df.NanoFlow(min_tokens=1)),
    "DualBatch": (MOE, df.DualBatch(0)),
    "DualBatch(lead=2)": (MOE, df.DualBatch(0, lead=2)),
    "SingleBatch": (MOE, df.SingleBatch()),
    "CommOverlap": (DENSE, df.CommOverlap(2, 1)),
    "CommOverlap, weights": (GATHERED, df.CommOverlap()),
    "Offload": (FETCHED, df.Offload(2 * 16)),
    "PrefillDecode": (DENSE, df.PrefillDecode(16)),
    "Mixed": (BRANCHING, df.Mixed(df.TwoBatch(), df.Branches(2))),
}
MODELS = {"TokenWeave": df.TokenWeave(wave=16, min_tokens=0), "FusedGemm": df.FusedGemm(4, 1)}

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
}


def picture(name: str) -> str:
    if name in FLOWS:
        text, strategy = FLOWS[name]
        flow = flow_of(text)
        made = df.synchronise(flow, plan(flow, strategy, Context({"batch_size": 64, "device": "cpu", "tag.phase": "decode"})))
    else:
        torch._dynamo.reset()
        partition = [df.SplitFunc(all_reduce, kind="network"), *(df.SplitModule(module) for module in ("o", "norm", "mlp"))]
        with torch.no_grad():
            made = df.explain(Block(8), (torch.zeros(64, 8),), strategy=MODELS[name], partition=partition).plan
    return "```\n" + "\n".join(line.rstrip() for line in made.grid().strip().splitlines()) + "\n```"


def numbers(name: str) -> str:
    """What benchmarks/results/overlap.json says of a strategy; empty where it says nothing."""
    rows = [r for r in load(RESULTS) if r["config"]["strategy"] == name and r["speedup"]]
    if not rows:
        return ""
    gains, best = [r for r in rows if r["speedup"] >= PAYS], max(rows, key=lambda r: r["speedup"])
    least, mean = min(r["speedup"] for r in rows), geomean([r["speedup"] for r in rows])
    return (
        f"\n*Measured* over an emulated network on one H200, with `never_slower=True` ([all rows](overlap.md)): it gains on {len(gains)} "
        f"of {len(rows)} rows, {best['speedup']:.2f}x at best ({best['config']['workload']}; side by side, the same kernels would reach "
        f"{best['bound_beside']:.2f}x), {mean:.2f}x in the geometric mean, {least:.2f}x at least."
    )


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


def rendered(page: str) -> str:
    for name in [*FLOWS, *MODELS, "lines"]:
        begin = BEGIN.format(name)
        if page.count(begin) != 1:
            raise ValueError(f"{PAGE.name} has {page.count(begin)} places for {name!r}, not one")
        made = table() if name == "lines" else picture(name) + numbers(name)
        page = re.sub(re.escape(begin) + r".*?" + re.escape(END), lambda _: f"{begin}\n{made}\n{END}", page, count=1, flags=re.DOTALL)
    return page


def main() -> int:
    page = PAGE.read_text(encoding="utf-8")
    new = rendered(page)
    if "--check" in sys.argv:
        return int(new != page)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
