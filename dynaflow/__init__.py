"""DynaFlow: run an unmodified PyTorch model under a physical execution schedule that a few lines of Python describe."""

from dynaflow.annotate import SplitFunc, SplitModule, mark
from dynaflow.batching import register_split_rule, rowwise
from dynaflow.capture import compile, run_serialised
from dynaflow.check import check
from dynaflow.contest import unmeasured
from dynaflow.context import context
from dynaflow.errors import DynaFlowError, PlanRefused, StrategyError
from dynaflow.explain import explain
from dynaflow.integrations import optimize, restore, stats
from dynaflow.ir import Flow, Op, Part, Plan
from dynaflow.memory import place
from dynaflow.offload import offload, onload
from dynaflow.runtime.lanes import profile
from dynaflow.strategies import (
    Branches,
    CommOverlap,
    DualBatch,
    FusedGemm,
    Mixed,
    NanoBatch,
    NanoFlow,
    Offload,
    PrefillDecode,
    Sequential,
    SingleBatch,
    TokenWeave,
    TwoBatch,
)  # fmt: skip
from dynaflow.strategy import Strategy
from dynaflow.sync import synchronise
from dynaflow.verify import verify

__version__ = "0.1.0"

__all__ = [
    "Branches", "CommOverlap", "DualBatch", "DynaFlowError", "Flow", "FusedGemm", "Mixed", "NanoBatch", "NanoFlow", "Offload", "Op",
    "Part", "Plan", "PlanRefused", "PrefillDecode", "Sequential", "SingleBatch", "SplitFunc", "SplitModule", "Strategy",
    "StrategyError", "TokenWeave", "TwoBatch", "check", "compile", "context", "explain", "mark", "offload", "onload",
    "optimize", "place", "profile", "register_split_rule", "restore", "rowwise", "run_serialised", "stats", "synchronise",
    "unmeasured", "verify",
]  # fmt: skip
