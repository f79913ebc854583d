"""Put the README's table together from the result files: `python -m benchmarks.readme` rewrites it, `--check` only looks.

Every number in the table comes from a file under benchmarks/results/, named in its row.
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- results: made by python -m benchmarks.readme -->", "<!-- end of results -->"


def _load(name: str) -> dict:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def _models(name: str, where: str) -> tuple[str, str, str]:
    s = _load(name)["summary"]
    what = f"16 real models x 4 strategies x 5 batch sizes, {where}"
    return what, f"{s['ok']} of {s['rows']} ok; {s['bit_equal']} of {s['cases']} results bit-equal to the same plan on one stream", name


def _backend() -> list[tuple[str, str, str]]:
    """The price of being there: all rows that were measured, the misses counted."""
    data = _load("backend")
    rows, overall = data["rows"], {t["what"]: t["value"] for t in data["summary"]["overall"]}
    timed = [r["row"] for r in rows if r["section"] == "time"]
    copied = {r["row"]: sum(found) for r in rows if (found := [t["value"] for t in r["targets"] if t["what"].startswith("copied")])}
    gpu = f"one {data['hardware']['gpu'].removeprefix('NVIDIA ')}"
    graph, plain = (overall[f"time, geometric mean: {pair}"] for pair in
                    ("dynaflow graph borrow / torch.compile+graph", "dynaflow / torch.compile"))  # fmt: skip
    missed = len(data["summary"]["missed"])
    return [
        (f"sequential plan in one CUDA Graph, against torch.compile in one: {', '.join(timed)}; {gpu}",
         f"{graph:.3f}x the time (geometric mean); without graphs {plain:.3f}x", "backend"),
        (f"bytes copied to split and merge a batch, in 2 and 4 parts, {len(copied)} of these rows", f"{sum(copied.values()):,}", "backend"),
        ("targets of that suite", f"{data['summary']['met']} met, {missed} missed ([which](docs/backend.md))", "backend"),
    ]  # fmt: skip


def _branches() -> tuple[str, str, str]:
    """One line of code on one GPU; what is not measured yet is said."""
    data = _load("branches")
    rows = [r for r in data["rows"] if r["section"] == "time" and r["speedup"]]
    best = ", ".join(f"{r['row']} {r['speedup']:.2f}x" for r in sorted(rows, key=lambda r: -r["speedup"])[:4])
    s, against = data["summary"], sorted({r["against"] for r in rows})
    branchy = [r for r in rows if r["config"]["group"] == "branchy"]
    left_out = sorted({name for r in rows for name in ("max-autotune",) if name not in r["baselines"]})
    without = f" ({', '.join(left_out)} not measured yet)" if left_out else ""
    what = f'`torch.compile(model, backend="dynaflow")` against {" or ".join(against)}{without}; {len(rows)} rows, one H200'
    result = f"{best}; geometric mean {s['geomean_speedup']:.2f}x over {len(branchy)} branchy rows, least {s['min_speedup']:.2f}x"
    return what, f"{result} ([all](docs/branches.md))", "branches"


def _overlap() -> tuple[str, str, str]:
    """One rank of many on one GPU; the network is emulated, and called so."""
    data = _load("overlap")
    best = {name: max((r for r in data["rows"] if r["config"]["strategy"] == name and r["speedup"]), key=lambda r: r["speedup"])
            for name in data["summary"]["strategies"]}  # fmt: skip
    found = "; ".join(f"{name} up to {r['speedup']:.2f}x ({r['config']['workload']})" for name, r in best.items())
    s = data["summary"]
    what = f"strategies on one rank of tensor-, expert- and sequence-parallel models, network emulated, {s['measured']} rows, one H200"
    return what, f"{found}; least of all rows {s['min_speedup']:.2f}x ([all](docs/overlap.md))", "overlap"


def _vllm() -> tuple[str, str, str]:
    """The engine is real, the other ranks are not, and the all-reduce is called emulated."""
    rows = [r for r in _load("vllm_serving")["rows"] if r["emulated"] and r["config"]["way"] == "dynaflow:NanoFlow"]
    found = ", ".join(f"{r['row'].split(', ')[1]} {r['speedup']:.2f}x" for r in rows)
    what = (f"vLLM {rows[0]['config']['vllm']['vllm']} under NanoFlow against vLLM's own best, one rank of {rows[0]['config']['model']}, "
            f"{rows[0]['config']['layers']} layers, all-reduce emulated, one H200")  # fmt: skip
    return what, f"{found} ([all](docs/systems/vllm-measured.md))", "vllm_serving"


def _systems() -> tuple[str, str, str]:
    """A row whose strongest baseline did not run says nothing here."""
    rows = [r for r in _load("systems")["rows"] if r["speedup"] and "reduce-overhead not measured" not in r["note"]]
    found = ", ".join(f"{r['row']} {r['speedup']:.2f}x (against {r['against']})" for r in rows)
    return "`df.optimize` in PEFT, Trainer and diffusers, against the fastest baseline, one H200", (
        f"{found} ([all](docs/systems/measured.md))"), "systems"  # fmt: skip


def _loopback() -> tuple[str, str, str]:
    """Two real processes; the link between them is emulated, and called so."""
    rows = [r for r in _load("loopback")["rows"] if r["config"]["strategy"] == "TwoBatch"]
    found = "; ".join(f"{r['config']['link']}: {r['speedup']:.2f}x, {r['hidden_share']:.0%} of the network time hidden" for r in rows)
    return "a tensor-parallel model over gloo on two CPU cores, TwoBatch against sequential, on a slow link (emulated)", found, "loopback"


def table() -> str:
    fuzz, planning = _load("fuzz")["summary"], {r["row"]: r["ours"]["median_ms"] for r in _load("planning")["rows"]}
    rows = [
        _models("models", "eager ops, CPU threads"),
        _models("models-cuda", "eager ops, CUDA streams of one H200"),
        *_backend(),
        _branches(),
        _overlap(),
        _vllm(),
        _systems(),
        _loopback(),
        (
            f"{fuzz['flows']:,} random flows x {fuzz['plans'] // fuzz['flows']} strategies x 10 interleavings and more",
            f"{fuzz['runs']:,} runs bit-equal",
            "fuzz",
        ),
        (
            f"{fuzz['mutants']:,} mutated plans in {fuzz['classes']} classes",
            f"{fuzz['wrong']:,} shown wrong by an independent oracle, {fuzz['missed']} of them accepted; no valid plan refused",
            "fuzz",
        ),
        ("plan, synchronise and place 5,000 launches", f"{planning['plan + synchronise + place, 5,000 launches']:.0f} ms", "planning"),
        ("verify 5,000 launches", f"{planning['verify, 5,000 launches']:.0f} ms", "planning"),
        ("bind a plan of 504 launches to a new size", f"{planning['bind a new size, 504 launches']:.2f} ms", "planning"),
    ]
    lines = ["| what was checked or measured | result | file |", "|---|---|---|"]
    lines += [f"| {what} | {result} | [{name}.json](benchmarks/results/{name}.json) |" for what, result, name in rows]
    return "\n".join(lines)


def rendered(readme: str) -> str:
    before, rest = readme.split(BEGIN, 1)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END, 1)[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="end with 1 where it is older than the result files")
    args = parser.parse_args()
    path = ROOT / "README.md"
    old = path.read_text(encoding="utf-8")
    new = rendered(old)
    if args.check:
        sys.exit("README.md is older than benchmarks/results: run python -m benchmarks.readme" if new != old else 0)
    path.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
