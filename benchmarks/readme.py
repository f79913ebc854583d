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


def _missed(summary: dict) -> str:
    """A row says what it misses beside what it meets."""
    missed = len(summary["missed"]) + len(summary["not_measured"])
    return f"{summary['met']} targets met, {missed} missed"


def _models() -> tuple[str, str, str]:
    both = [_load(name)["summary"] for name in ("models", "models-cuda")]
    rows, ok, cases, equal = (sum(s[key] for s in both) for key in ("rows", "ok", "cases", "bit_equal"))
    return (
        "16 real models x 4 strategies x 5 batch sizes, CPU threads and CUDA streams",
        f"{ok} of {rows} ok ([CPU](docs/models.md), [H200](docs/models-cuda.md)); {equal} of {cases} results bit-equal to the same plan "
        "on one stream",
        "models models-cuda",
    )


def _backend() -> tuple[str, str, str]:
    """The price of being there: all rows that were measured, the misses counted."""
    data = _load("backend")
    rows, overall = data["rows"], {t["what"]: t["value"] for t in data["summary"]["overall"]}
    timed = [r["row"] for r in rows if r["section"] == "time"]
    copied = sum(t["value"] for r in rows for t in r["targets"] if t["what"].startswith("copied"))
    graph, plain = (overall[f"time, geometric mean: {pair}"] for pair in
                    ("dynaflow graph borrow / torch.compile+graph", "dynaflow / torch.compile"))  # fmt: skip
    return (
        f"sequential plan against torch.compile, {len(timed)} rows",
        f"{graph:.3f}x the time in a CUDA Graph, {plain:.3f}x without; {copied:,} bytes copied to split and merge; "
        f"{_missed(data['summary'])} ([which](docs/backend.md))",
        "backend",
    )


def _branches() -> tuple[str, str, str]:
    """One line of code on one GPU; what is not measured yet is said."""
    data = _load("branches")
    rows = [r for r in data["rows"] if r["section"] == "time" and r["speedup"]]
    s, best = data["summary"], max(rows, key=lambda r: r["speedup"])
    num_branchy = sum(r["config"]["group"] == "branchy" for r in rows)
    least = min(r["speedup"] for r in rows)
    left_out = "" if all("max-autotune" in r["baselines"] for r in rows) else "; max-autotune not measured yet"
    return (
        f'`torch.compile(model, backend="dynaflow")` against torch.compile in a CUDA Graph, {len(rows)} rows{left_out}',
        f"{s['geomean_speedup']:.2f}x over {num_branchy} branchy rows, {best['speedup']:.2f}x at best ({best['row']}), {least:.3f}x at "
        f"least; {_missed(s)} ([all](docs/branches.md))",
        "branches",
    )


def _overlap() -> tuple[str, str, str]:
    """One rank of many on one GPU; the network is emulated, and called so."""
    data = _load("overlap")
    s, rows = data["summary"], [r for r in data["rows"] if r["speedup"]]
    kinds = dict.fromkeys(r["config"]["kind"] for r in rows)
    best = [max((r for r in rows if r["config"]["kind"] == kind), key=lambda r: r["speedup"]) for kind in kinds]
    found = ", ".join(f"{kind} {r['speedup']:.2f}x ({r['config']['strategy']})" for kind, r in zip(kinds, best))
    return (
        f"{len(s['strategies'])} strategies on one rank of many, network emulated, {s['measured']} rows",
        f"at best {found}; {s['min_speedup']:.3f}x at least; "
        f"{_missed(s)} ([by strategy](docs/strategies/index.md), [all](docs/overlap.md))",
        "overlap",
    )


def _vllm() -> tuple[str, str, str]:
    """The engine is real, the other ranks are not, and the all-reduce is called emulated."""
    data = _load("vllm_serving")
    rows = [r for r in data["rows"] if r["emulated"] and r["config"]["way"] == "dynaflow:NanoFlow"]
    found = ", ".join(f"{r['row'].split(', ')[1]} {r['speedup']:.2f}x" for r in rows)
    config = rows[0]["config"]
    rank = f"{config['layers']} layers of one rank of {config['model'].removesuffix(' emulated')}"
    return (
        f"vLLM {config['vllm']['vllm']} under NanoFlow against vLLM's own best, {rank}, all-reduce emulated",
        f"{found}; of all ways, {_missed(data['summary'])} ([all](docs/systems/vllm-measured.md))",
        "vllm_serving",
    )


def _systems() -> tuple[str, str, str]:
    """A row whose strongest baseline did not run says nothing here."""
    data = _load("systems")
    rows = [r for r in data["rows"] if r["speedup"] and "reduce-overhead not measured" not in r["note"]]
    found = ", ".join(f"{r['row']} {r['speedup']:.2f}x" for r in rows)
    against = " or ".join(sorted({r["against"] for r in rows}))
    return (
        f"`df.optimize` in PEFT, Trainer and diffusers, against the fastest baseline ({against})",
        f"{found}; {_missed(data['summary'])} ([all](docs/systems/measured.md))",
        "systems",
    )


def _loopback() -> tuple[str, str, str]:
    """Two real processes; the link between them is emulated, and called so."""
    rows = [r for r in _load("loopback")["rows"] if r["config"]["strategy"] == "TwoBatch"]
    found = "; ".join(f"{r['speedup']:.2f}x on {r['config']['link']}, {r['hidden_share']:.0%} of the network time hidden" for r in rows)
    return "TwoBatch over gloo on two CPU cores, slow link emulated", found, "loopback"


def _checked() -> list[tuple[str, str, str]]:
    fuzz, planning = _load("fuzz")["summary"], {r["row"]: r["ours"]["median_ms"] for r in _load("planning")["rows"]}
    return [
        (
            f"{fuzz['flows']:,} random flows x {fuzz['plans'] // fuzz['flows']} strategies, {fuzz['mutants']:,} mutated plans, CPU",
            f"{fuzz['runs']:,} runs bit-equal; of {fuzz['wrong']:,} plans that an oracle shows wrong, {fuzz['missed']} accepted; "
            "no valid plan refused",
            "fuzz",
        ),
        (
            "planning 5,000 launches, CPU",
            f"planned and placed in {planning['plan + synchronise + place, 5,000 launches']:.0f} ms, verified in "
            f"{planning['verify, 5,000 launches']:.0f} ms; a new size for 504 launches takes "
            f"{planning['bind a new size, 504 launches']:.2f} ms",
            "planning",
        ),
    ]


def table() -> str:
    rows = [_models(), _backend(), _branches(), _overlap(), _vllm(), _systems(), _loopback(), *_checked()]
    lines = ["| what was checked or measured (one H200, unless it says CPU) | result | file |", "|---|---|---|"]
    for what, result, names in rows:
        files = ", ".join(f"[{name}](benchmarks/results/{name}.json)" for name in names.split())
        lines.append(f"| {what} | {result} | {files} |")
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
