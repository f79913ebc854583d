"""Strategies that come with DynaFlow, one short file each."""

from dynaflow.strategies.auto import Auto
from dynaflow.strategies.branches import Branches
from dynaflow.strategies.greedy import Greedy
from dynaflow.strategies.nano_batch import NanoBatch
from dynaflow.strategies.offload import Offload
from dynaflow.strategies.sequential import Sequential
from dynaflow.strategies.two_batch import TwoBatch

__all__ = ["Auto", "Branches", "Greedy", "NanoBatch", "Offload", "Sequential", "TwoBatch"]
