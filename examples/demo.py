"""One real model, three schedules: a Transformers Llama with a slow network, one after the other and overlapped.

    make demo

The weights are random and made here; the network is emulated (an all-reduce that costs time and changes nothing, behind attention
and MLP of each block, as a tensor-parallel Llama has them). Without a GPU, streams are CPU threads: while one part of the batch
computes, another part's all-reduce is on its way. Writes out/demo.png and out/demo.trace.json.
"""

import argparse
import dataclasses
import statistics
import time
import warnings
from pathlib import Path

import torch

import dynaflow as df
import dynaflow.testing.torchvision_shim  # before transformers looks for torchvision
from dynaflow.testing.network import add_collectives, all_reduce, duration_us
from dynaflow.timeline import Timeline
from dynaflow.view import chrome
from dynaflow.view.grid import grid
from dynaflow.view.picture import picture

# the emulated network takes this share of the time that computing takes, on whatever machine this is
NETWORK_SHARE = 0.5
STRATEGIES = {"sequential": df.Sequential(), "TwoBatch": df.TwoBatch(), "NanoBatch(4)": df.NanoBatch(4)}


def main():
    options = parse()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    torch.set_num_threads(1)  # one core per lane
    torch.set_grad_enabled(False)

    say("1/5", "make a Llama with random weights")
    model, inputs = llama(device, options.quick)
    model(**inputs)
    compute_us = median_us(lambda: model(**inputs), device, 3)
    network_us = add_network(model, compute_us)
    expected = model(**inputs).logits
    say("", f"computing takes {compute_us / 1e3:.0f} ms, each of {num_collectives(model)} emulated all-reduces {network_us / 1e3:.1f} ms")

    say("2/5", "capture, partition, plan and verify")
    rules = {"partition": [df.SplitFunc(all_reduce, kind="network")]}
    explained = {name: df.explain(model, inputs, strategy=strategy, **rules) for name, strategy in STRATEGIES.items()}
    print()
    print(grid(explained["TwoBatch"].plan, max_rows=options.rows))

    say("3/5", "run, and compare with plain PyTorch and with the same launches on one stream")
    fast = {name: df.compile(model, strategy=strategy, strict=name != "sequential", **rules) for name, strategy in STRATEGIES.items()}
    for name in fast:
        result = fast[name](**inputs).logits
        difference = float((result - expected).abs().max() / expected.abs().max())
        assert difference < 1e-4, f"{name} differs from plain PyTorch by {difference:.1e} of the largest logit"
        told = f"{name}: within {(result - expected).abs().max():.1e} of plain PyTorch"
        if name != "sequential":
            assert torch.equal(result, df.run_serialised(fast[name], **inputs).logits), f"{name} is not bit-equal to its serialised plan"
            told += ", bit-equal to the same launches on one stream"
        say("", told)

    say("4/5", f"measure: {options.rounds} rounds, the schedules in turn")
    times = {name: [] for name in fast}
    for _ in range(options.rounds):
        for name, run in fast.items():
            times[name].append(median_us(lambda run=run: run(**inputs), device, 1))
    timelines = {name: profiled(name, run, inputs, explained[name].flow) for name, run in fast.items()}

    say("5/5", "draw")
    options.out.mkdir(parents=True, exist_ok=True)
    written = [options.out / "demo.trace.json"]
    try:
        picture(list(timelines.values()), options.out / "demo.png", subtitles=[subtitle(t) for t in timelines.values()])
        written.append(options.out / "demo.png")
    except df.DynaFlowError as error:  # no matplotlib
        print(error)
    chrome.write(list(timelines.values()), options.out / "demo.trace.json")
    print()
    table({name: (statistics.median(times[name]), timelines[name]) for name in fast})
    print(f"\nwrote {' and '.join(map(str, written))} (the trace is for Perfetto or chrome://tracing)")


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the picture and the trace")
    parser.add_argument("--rows", type=int, default=20, help="steps of the plan to print")
    parser.add_argument("--rounds", type=int, default=7, help="measurements per schedule")
    parser.add_argument("--quick", action="store_true", help="a smaller model, fewer measurements")
    options = parser.parse_args()
    if options.quick:
        options.rounds = 2
    return options


def llama(device, is_small):
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden = 128 if is_small else 512
    if device.type == "cuda":
        hidden = 4096
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=11 * hidden // 4, num_hidden_layers=4, vocab_size=1024,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 128, max_position_embeddings=1024, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().to(device)
    length = 512 if device.type == "cuda" else 32
    return model, {"input_ids": torch.randint(0, config.vocab_size, (16, length), device=device)}


def add_network(model, compute_us):
    """Emulated all-reduces whose time grows with the bytes, and which take NETWORK_SHARE of the time that computing takes."""
    hidden = torch.empty(16, 32 if model.device.type == "cpu" else 512, model.config.hidden_size, dtype=model.dtype, device="meta")
    wanted_us = NETWORK_SHARE * compute_us / num_collectives(model)
    gbps = hidden.numel() * hidden.element_size() * 8e-3 / wanted_us
    add_collectives(model, ["*.o_proj", "*.down_proj"], latency_us=0.02 * wanted_us, gbps=gbps / 0.98)
    return duration_us(hidden, 0.02 * wanted_us, gbps / 0.98)


def num_collectives(model):
    return 2 * model.config.num_hidden_layers


def median_us(call, device, rounds):
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


def profiled(name, run, inputs, flow):
    """The timeline of the middle one of three calls, with every op's kind."""
    with df.profile() as profile:
        for _ in range(3):
            run(**inputs)
    measured = sorted(profile.timelines, key=lambda t: t.total_us)[1]
    kinds = {op.name: op.kind for op in flow.ops}
    spans = tuple(dataclasses.replace(s, kind=kinds.get(s.label.split(" ")[0], "")) for s in measured.spans)
    return Timeline(spans, title=name, lanes=("caller", "compute", "comm"))


def subtitle(timeline):
    return f"{timeline.total_us / 1e3:.0f} ms, {timeline.hidden_share('comm'):.0%} of the network time hidden (emulated network)"


def table(rows):
    base = rows["sequential"][0]
    head = ("schedule", "median time", "against sequential", "network (emulated)", "of it hidden")
    body = []
    for name, (time_us, timeline) in rows.items():
        network_us = sum(s.end_us - s.start_us for s in timeline.spans if s.kind == "network")
        hidden = f"{timeline.hidden_share('comm'):.0%}"
        body.append((name, f"{time_us / 1e3:.0f} ms", f"{base / time_us:.2f}x", f"{network_us / 1e3:.0f} ms", hidden))
    try:
        from rich.console import Console
        from rich.table import Table

        view = Table(*head)
        for cells in body:
            view.add_row(*cells)
        Console().print(view)
    except ImportError:
        for cells in (head, *body):
            print("  ".join(cell.ljust(18) for cell in cells))


def say(step, text):
    print(f"{step:>4}  {text}", flush=True)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    main()
