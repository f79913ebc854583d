"""Strategies that come with DynaFlow, one short file each."""

from dynaflow.strategies.auto import Auto
from dynaflow.strategies.branches import Branches
from dynaflow.strategies.comm_overlap import CommOverlap
from dynaflow.strategies.dual_batch import DualBatch
from dynaflow.strategies.fused_gemm import FusedGemm
from dynaflow.strategies.greedy import Greedy
from dynaflow.strategies.mixed import Mixed
from dynaflow.strategies.nano_batch import NanoBatch
from dynaflow.strategies.nano_flow import NanoFlow
from dynaflow.strategies.offload import Offload
from dynaflow.strategies.prefill_decode import PrefillDecode
from dynaflow.strategies.sequential import Sequential
from dynaflow.strategies.single_batch import SingleBatch
from dynaflow.strategies.token_weave import TokenWeave
from dynaflow.strategies.two_batch import TwoBatch

__all__ = [
    "Auto", "Branches", "CommOverlap", "DualBatch", "FusedGemm", "Greedy", "Mixed", "NanoBatch", "NanoFlow", "Offload", "PrefillDecode",
    "Sequential", "SingleBatch", "TokenWeave", "TwoBatch",
]  # fmt: skip
