"""A CUDA wrapper as Inductor writes it (torch 2.11), kernels without their bodies, and what its kernels touch."""

import textwrap

import torch

from dynaflow.inductor.kernels import Kernels, kernels
from dynaflow.runtime.program import Geometry


def triton(name: str, signature: dict[str, str], changed: tuple[str, ...] = (), heuristic: str = "pointwise") -> str:
    parameters = ", ".join(f"{p} : tl.constexpr" if kind == "constexpr" else p for p, kind in signature.items())
    return f"""
{name} = async_compile.triton('{name}', '''
import triton
import triton.language as tl

@triton_heuristics.{heuristic}(
    size_hints={{'x': 64}},
    triton_meta={{'signature': {signature!r}, 'device': DeviceProperties(type='cuda', index=0), 'constants': {{}}}},
    inductor_meta={{'autotune_hints': set(), 'kernel_name': '{name}', 'mutated_arg_names': {list(changed)!r}}},
)
@triton.jit
def {name}({parameters}):
    pass
''', device_str='cuda')
"""


def module(definitions: str, body: str, args: str) -> str:
    return f"""
import torch
{definitions}
async_compile.wait(globals())
del async_compile

class Runner:
    def __init__(self, partitions):
        self.partitions = partitions

    def call(self, args):
        {args} = args
        args.clear()
        with torch.cuda._DeviceGuard(0):
            torch.cuda.set_device(0)
{textwrap.indent(textwrap.dedent(body), " " * 12)}

runner = Runner(partitions=[])
call = runner.call
"""


POINTWISE = {"in_ptr0": "*fp32", "out_ptr0": "*fp32", "xnumel": "i32", "XBLOCK": "constexpr"}
IN_PLACE = {"in_out_ptr0": "*fp32", "xnumel": "i32", "XBLOCK": "constexpr"}
RELU = triton("triton_poi_fused_relu_0", POINTWISE)
ADD = triton("triton_poi_fused_add_1", IN_PLACE, ("in_out_ptr0",))


def read(body: str, *given: torch.Tensor | int, definitions: str = RELU + ADD, seen: dict[str, Geometry] | None = None) -> Kernels:
    """The kernels of a wrapper whose arguments are arg0_1, arg1_1, ..."""
    args = "".join(f"arg{i}_1, " for i in range(len(given)))
    scope = {"torch": torch, "aten": torch.ops.aten, "reinterpret_tensor": torch._C._dynamo.guards._reinterpret_tensor}
    return kernels(module(definitions, body, args), scope, given, seen or {}, "sample")


def touched(made: Kernels) -> list[tuple[str, tuple[str, ...], tuple[str, ...], tuple[str, ...]]]:
    """Per op: its name, and what it reads, writes and changes."""
    return [(op.name, op.reads, op.writes, op.mutates) for op in made.flow.ops]
