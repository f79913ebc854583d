"""The all-reduces of 8 tensor parallel ranks, emulated on one: behind every row-parallel linear, where vLLM has its own.

vLLM traces, compiles and records the op like any other. It holds SMs for latency + bytes/bandwidth (`dynaflow/testing/network.py`), and
returns what it was given. Numbers measured with it are emulated, and are called so.
"""

from __future__ import annotations

from typing import Any

from dynaflow.testing.network import NVLINK_H100, all_reduce

# whole numbers: Dynamo takes those for constants
LATENCY_NS, BITS_PER_SECOND = round(NVLINK_H100.latency_us * 1e3), round(NVLINK_H100.gbps * 1e9)
RANKS, SMS = 8, NVLINK_H100.sms
LINK = {"link": f"{NVLINK_H100.name} (emulated)", "ranks": RANKS, "latency_us": LATENCY_NS / 1e3, "gbps": BITS_PER_SECOND / 1e9, "sms": SMS}


def put_all_reduces() -> None:
    """Before a model is made."""
    from vllm.model_executor.layers.linear import RowParallelLinear

    linear = RowParallelLinear.forward

    def reduced(self: Any, input_: Any) -> Any:
        output = linear(self, input_)
        x = output[0] if isinstance(output, tuple) else output
        x = all_reduce(x, LATENCY_NS / 1e3, BITS_PER_SECOND / 1e9, RANKS, SMS)
        return (x, *output[1:]) if isinstance(output, tuple) else x

    RowParallelLinear.forward = reduced
