"""A real CUDA wrapper (torch 2.11: two Llama-like blocks with LoRA adapters, 4 tokens), without a GPU.

`texts/lora_cuda.txt` is what Inductor generated, kernels without their bodies. Who must wait for whose data is found a second time here,
by patterns over lines, and compared with the flow's edges.
"""

import ast
import re
from pathlib import Path

import pytest
import torch

from dynaflow.costs import Cost, bound_us
from dynaflow.inductor.kernels import Kernels, kernels
from dynaflow.memory import place
from dynaflow.planned import finish_plan
from dynaflow.planner import sequential_plan
from dynaflow.runtime.binder import Binder
from dynaflow.search import search
from dynaflow.verify import verify

TEXT = (Path(__file__).parent / "texts" / "lora_cuda.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def lora() -> Kernels:
    shapes = dict(re.findall(r"assert_size_stride\((arg\d+_1), (\(.*?\), \(.*?\))\)", TEXT))
    names = re.search(r"^ +(arg0_1, .*) = args", TEXT, re.MULTILINE)[1].split(", ")
    args = [torch.empty_strided(*ast.literal_eval(f"({shapes[name]})"), dtype=torch.bfloat16, device="meta") for name in names]
    return kernels(TEXT, {"torch": torch, "reinterpret_tensor": None}, args, {}, "lora")


def needed(text: str) -> set[tuple[int, int]]:
    """(writer, reader) of data, as numbers of launches."""
    parameters = {name: re.findall(r"'(\w+)': '\*", signature)
                  for name, signature in re.findall(r"async_compile\.triton\('(\w+)', '''\n(.*)", text)}  # fmt: skip
    memory: dict[str, int] = {}  # name -> which allocation it lies in
    writer: dict[int, int] = {}
    found, launch = set(), 0
    for line in text[text.index("def call") :].splitlines():
        line = line.strip()
        if match := re.match(r"(buf\d+) = empty_strided_cuda", line):
            memory[match[1]] = len(memory) + 1000
        elif match := re.match(r"(buf\d+) = (?:reinterpret_tensor\()?((?:buf|arg)\w+).*; del", line):
            memory[match[1]] = memory[match[2]]
        elif match := re.match(r"(triton_\w+)\.run\((.*), stream=stream0\)", line):
            names = re.findall(r"(?:buf|arg)\w+", match[2])
            pairs = list(zip(parameters[match[1]], names, strict=True))
        elif match := re.match(r"extern_kernels\.\w+\((.*), out=(.*)\)$", line):
            outs = re.findall(r"(?:buf|arg)\w+", match[2])
            pairs = [("in_ptr", n) for n in re.findall(r"(?:buf|arg)\w+", match[1])] + [("out_ptr", outs[0])]
        else:
            continue
        if ".run(" not in line and not line.startswith("extern_kernels"):
            continue
        places = [(parameter, memory.setdefault(name, len(memory))) for parameter, name in pairs]
        found |= {(writer[at], launch) for parameter, at in places if parameter.startswith("in_") and at in writer}
        writer.update({at: launch for parameter, at in places if "out_" in parameter})
        launch += 1
    return found


def test_every_kernel_waits_for_its_data(lora):
    pairs = needed(TEXT)
    before = [{i} for i in range(len(lora.flow.ops))]
    for edge in sorted(lora.flow.edges, key=lambda e: e.after):
        before[edge.after] |= before[edge.before]
    assert len(lora.flow.ops) == 65 and len(pairs) > 60
    assert all(a in before[b] for a, b in pairs)
    # the twin: without the edges of one launch, somebody would not wait
    victim = next(b for _, b in pairs)
    alone = [{i} for i in range(len(lora.flow.ops))]
    for edge in sorted(lora.flow.edges, key=lambda e: e.after):
        if edge.after != victim:
            alone[edge.after] |= alone[edge.before]
    assert not all(a in alone[b] for a, b in pairs)


def test_nothing_but_data_makes_it_wait(lora):
    """What Inductor reuses would chain the adapters to their layers."""
    extra = [e for e in lora.flow.edges if (e.before, e.after) not in needed(TEXT)]
    assert all(_changes(lora, e) for e in extra)


def _changes(lora: Kernels, edge) -> bool:
    """Whether the later one changes in place what the earlier one reads."""
    return bool(set(lora.flow.ops[edge.after].mutates) & set(lora.flow.ops[edge.before].reads))


def test_branches_are_planned_beside_each_other(lora):
    costs = {op.name: Cost(8.0, 0.3) if op.name.startswith(("mm", "addmm", "bmm")) else Cost(3.0, 0.1) for op in lora.flow.ops}
    serial = Binder(finish_plan(lora.flow, sequential_plan(lora.flow, "")), lora.program).bind({})
    best = search(lora.flow, costs)[0]
    assert best.num_streams > 1 and bound_us(lora.flow, costs) < best.simulated_us < 0.75 * sum(c.us for c in costs.values())
    plan = place(lora.flow, best.plan)
    verify(plan, lora.flow)
    assert Binder(plan, lora.program).bind({}).peak_bytes < 1.25 * serial.peak_bytes
