"""Ops compiled by Inductor, writing where they are told."""

from dynaflow.inductor.structure import NotCompiled, Spec
from dynaflow.inductor.units import ALIGNMENT, CompiledUnit, Variant

__all__ = ["ALIGNMENT", "CompiledUnit", "NotCompiled", "Spec", "Variant"]
