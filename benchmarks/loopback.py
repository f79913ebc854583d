"""What overlap hides between two real processes: a tensor-parallel model over gloo, its collectives on a link made slow.

    python -m benchmarks.loopback [--rounds 12] [--json FILE]      measure and write the file
    python -m benchmarks.loopback --plot                           plot from the file
    python -m benchmarks.loopback --tiny --json out/loopback.json  small

Two processes on one machine, one thread of torch's own each, hold half the heads and half the MLP of a small transformer. Every
all-reduce is a real one (gloo, loopback); behind it the caller sleeps for what a slow link would take (emulated: latency +
bytes/bandwidth; other lanes compute meanwhile). Ways, in turns, after a barrier each:

    sequential      the graph as it is
    split           the strategy's parts and order, one thread: what splitting costs
    overlapped      the same on lanes: one computes while the other waits
    compute alone   the model without its collectives
    network alone   its collectives without the model

Hideable is what is shorter, compute or network; hidden is what `overlapped` is faster than `sequential`. Results must be bit-equal to the
same plan on one thread and close to the unsharded model's; both ranks check. It is a figure of a CPU, over an emulated link. Other
processes on the machine show in it: each row notes the load (runnable processes, a minute's average) before it, and the number of cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

import dynaflow as df
from benchmarks import store
from benchmarks.measure import Times, ratio
from benchmarks.store import Result, stamped
from dynaflow.testing.network import Collective, Link

RESULTS = store.RESULTS / "loopback.json"
RANKS = 2
# of Ethernet's rates; slow enough that the network takes about as long as a CPU's compute
LINKS = {"2.5G": Link("2.5G", latency_us=200, gbps=2.5), "1G": Link("1G", latency_us=200, gbps=1.0)}
SIZES: dict[str, int] = {"layers": 2, "hidden": 512, "heads": 8, "batch": 32, "seq": 64}
TINY: dict[str, int] = {"layers": 1, "hidden": 32, "heads": 2, "batch": 4, "seq": 4}
STRATEGIES: dict[str, Callable[[], df.Strategy]] = {"TwoBatch": df.TwoBatch, "NanoBatch(4)": lambda: df.NanoBatch(4)}
WAYS = ("sequential", "split", "overlapped", "compute alone", "network alone")


# ---------------------------------------------------------------------------- the model


class Reduce(nn.Module):
    """A real all-reduce, and the rest of the time that the slow link would take."""

    def __init__(self, link: Link):
        super().__init__()
        self.link = Collective("all_reduce", link, RANKS)

    def forward(self, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return self.link(x)


class Block(nn.Module):
    """A rank's share: `ranks` of them, reduced, are the whole block."""

    def __init__(self, hidden: int, heads: int, ranks: int, link: Link | None):
        super().__init__()
        self.heads = heads // ranks
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden // ranks, bias=False), nn.Linear(hidden // ranks, hidden, bias=False)
        self.up, self.down = nn.Linear(hidden, 4 * hidden // ranks, bias=False), nn.Linear(4 * hidden // ranks, hidden, bias=False)
        self.reduce1, self.reduce2 = (Reduce(link), Reduce(link)) if link else (nn.Identity(), nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        x = x + self.reduce1(self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)))
        return x + self.reduce2(self.down(F.gelu(self.up(self.norm2(x)))))


def whole(sizes: Mapping[str, int]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(sizes["hidden"], sizes["heads"], 1, None) for _ in range(sizes["layers"])))


def shard(model: nn.Sequential, sizes: Mapping[str, int], rank: int, link: Link | None) -> nn.Sequential:
    """Rank's heads and rank's part of the MLP."""
    shards = nn.Sequential(*(Block(sizes["hidden"], sizes["heads"], RANKS, link) for _ in range(sizes["layers"])))
    for mine, full in zip(shards, model):
        mine.norm1.load_state_dict(full.norm1.state_dict())
        mine.norm2.load_state_dict(full.norm2.state_dict())
        mine.qkv.weight.copy_(full.qkv.weight.unflatten(0, (3, RANKS, -1))[:, rank].flatten(0, 1))
        mine.up.weight.copy_(full.up.weight.chunk(RANKS, 0)[rank])
        mine.out.weight.copy_(full.out.weight.chunk(RANKS, 1)[rank])
        mine.down.weight.copy_(full.down.weight.chunk(RANKS, 1)[rank])
    return shards


# ---------------------------------------------------------------------------- one rank


def run_rank(rank: int, folder: str, wish: Result) -> None:
    """Measures each link and strategy; rank 0 leaves what was found in a file."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    try:
        found = [_measured(rank, link, strategy, wish) for link in wish["links"] for strategy in wish["strategies"]]
        if rank == 0:
            torch.save(found, f"{folder}/found")
    finally:
        dist.destroy_process_group()


def _measured(rank: int, link: str, strategy: str, wish: Result) -> Result:
    load = os.getloadavg()[0]
    sizes, rules = wish["sizes"], [df.SplitModule("*.reduce?", kind="network"), "auto"]
    full = whole(sizes)
    torch.manual_seed(1)
    x = torch.randn(sizes["batch"], sizes["seq"], sizes["hidden"])
    model, bare = shard(full, sizes, rank, LINKS[link]), shard(full, sizes, rank, None)
    make = STRATEGIES[strategy]
    split = df.compile(model, strategy=make(), partition=rules, runtime="serial", strict=True)
    overlapped = df.compile(model, strategy=make(), partition=rules, runtime="threads", strict=True)

    def network_alone(x: Tensor) -> Tensor:
        for block in model:
            x = block.reduce2(block.reduce1(x.clone()))
        return x

    ways = dict(zip(WAYS, (
        df.compile(model, strategy="sequential"), split, overlapped, df.compile(bare, strategy="sequential"), network_alone)))  # fmt: skip
    # equality, which also compiles everything
    got, want = overlapped(x), df.run_serialised(overlapped, x)
    checks = torch.tensor([torch.equal(got, want), torch.equal(got, split(x)), torch.allclose(got, full(x), rtol=1e-4, atol=1e-4)])
    checks = checks.to(torch.int32)
    dist.all_reduce(checks, dist.ReduceOp.MIN)
    error = float((got - full(x)).abs().max())
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(wish["rounds"] + 2):
        names = list(ways)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            dist.barrier()
            began = time.perf_counter()
            ways[name](x)
            if number >= 2:
                times[name].append((time.perf_counter() - began) * 1e3)
    stats = df.stats(overlapped)
    return {"link": link, "strategy": strategy, "load": load, "times": times, "checks": checks.tolist(), "error": error,
            "num_part_launches": stats.num_part_launches, "fallbacks": dict(stats.fallbacks)}  # fmt: skip


# ---------------------------------------------------------------------------- results


def as_row(found: Result, sizes: Mapping[str, int], made_by: str, tiny: bool) -> Result:
    times = {name: Times([[ms] for ms in found["times"][name]]) for name in WAYS}
    medians, figures = {name: statistics.median(t.all) for name, t in times.items()}, {name: t.figures() for name, t in times.items()}
    gain = ratio(times["sequential"], times["overlapped"])
    hideable = min(medians["compute alone"], medians["network alone"])
    hidden = medians["sequential"] - medians["overlapped"]
    is_planned = found["num_part_launches"] > 0 and not found["fallbacks"]
    is_equal = all(found["checks"]) and is_planned
    link = LINKS[found["link"]]
    config = {**sizes, "ranks": RANKS, "dtype": "fp32", "strategy": found["strategy"], "link": link.name, "latency_us": link.latency_us,
              "gbps": link.gbps, **({"tiny": True} if tiny else {})}  # fmt: skip
    result = {
        "repetitions": len(found["times"]["sequential"]), "ours": figures["overlapped"],
        "baselines": {name: figures[name] for name in ("sequential", "split")}, "against": "sequential",
        "alone": {"compute": figures["compute alone"], "network": figures["network alone"]},
        "speedup": gain["ratio"], "interval": [gain["low"], gain["high"]],
        "bound": round(medians["sequential"] / max(medians["compute alone"], medians["network alone"]), 4),
        "hidden_ms": round(hidden, 3), "hideable_ms": round(hideable, 3), "hidden_share": round(hidden / hideable, 4),
        "equal": f"bit, on both ranks; max abs {found['error']:.1e} against the unsharded model" if is_equal else "NOT EQUAL",
        "emulated": True, "note": "two gloo processes on loopback; the link is emulated by sleeping; "
                                  f"load before: {found['load']:.1f} on {os.cpu_count()} cores"
                                  + ("" if is_planned else f"; NO PLAN RAN: {found['fallbacks']}"),
    }  # fmt: skip
    return stamped(f"{found['strategy']}, {found['link']} link (emulated)", "time", config, result, made_by, "cpu")


def summary(rows: Sequence[Result]) -> Result:
    return {"rows": len(rows), "emulated": True, "geomean_speedup": round(store.geomean([r["speedup"] for r in rows]), 4),
            "min_speedup": min(r["speedup"] for r in rows), "min_hidden_share": min(r["hidden_share"] for r in rows),
            "not_equal": [r["row"] for r in rows if r["equal"] == "NOT EQUAL"]}  # fmt: skip


def table(rows: Sequence[Result]) -> str:
    lines = []
    for r in rows:
        ms = ", ".join(f"{way} {f['median_ms']:.1f} ({f['spread_ms']:.1f})" for way in WAYS if (f := _figures(r, way)))
        low, high = r["interval"]
        hidden = f"{r['hidden_ms']:.1f} of {r['hideable_ms']:.1f} ms hidden ({r['hidden_share']:.0%})"
        gain = f"{r['speedup']:.2f}x ({low:.2f} to {high:.2f}), bound {r['bound']:.2f}x"
        lines += [r["row"], f"  ms, median (spread): {ms}", f"  {gain}; {hidden}; {r['equal']}; {r['note']}"]
    return "\n".join(lines)


def plot(rows: Sequence[Result], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 1.6 + 0.9 * len(rows)))
    colours = ("#bab0ac", "#f58518", "#4c78a8", "#54a24b", "#e45756")
    for number, (way, colour) in enumerate(zip(WAYS, colours)):
        found = [_figures(r, way) for r in rows]
        at = [i + 0.16 * number for i in range(len(rows))]
        axes.barh(at, [f["median_ms"] for f in found], height=0.15, color=colour, label=way,
                  xerr=[f["spread_ms"] / 2 for f in found], error_kw={"linewidth": 0.8, "capsize": 2})  # fmt: skip
    axes.set_yticks([i + 0.32 for i in range(len(rows))],
                    [f"{r['row']}\n{r['hidden_share']:.0%} of the hideable time hidden" for r in rows], fontsize=8)  # fmt: skip
    axes.invert_yaxis()
    axes.set_xlabel("ms per step, median and spread (10th to 90th percentile); two gloo processes on one CPU, link emulated")
    axes.legend(fontsize=8)
    figure.tight_layout()
    for suffix in (".svg", ".png"):
        figure.savefig(path.with_suffix(suffix), dpi=130)
    plt.close(figure)


def _figures(row: Result, way: str) -> Result:
    if way.endswith(" alone"):
        return row["alone"][way.removesuffix(" alone")]
    return row["ours"] if way == "overlapped" else row["baselines"][way]


def measure(wish: Result) -> list[Result]:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, args=(folder, wish), nprocs=RANKS)
        return torch.load(f"{folder}/found", weights_only=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--plot", action="store_true", help="plot from the json, measure nothing")
    args = parser.parse_args()
    if args.tiny and args.json == RESULTS:
        parser.error("--tiny does not go into benchmarks/results: give --json")
    if not args.plot:
        sizes = TINY if args.tiny else SIZES
        wish = {"sizes": sizes, "rounds": args.rounds, "links": list(LINKS)[: 1 if args.tiny else None], "strategies": list(STRATEGIES)}
        made_by = "python -m benchmarks.loopback " + " ".join(sys.argv[1:])
        rows = [as_row(found, sizes, made_by.strip(), args.tiny) for found in measure(wish)]
        store.save(args.json, "loopback", rows, summary(rows))
    rows = store.load(args.json)
    print(table(rows))
    plot(rows, args.json)
    return 1 if summary(rows)["not_equal"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
