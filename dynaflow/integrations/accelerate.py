"""accelerate, and Transformers' Trainer, which asks it: importing this file makes "dynaflow" a name that they know.

    import dynaflow.integrations.accelerate
    TrainingArguments(torch_compile_backend="dynaflow")
    Accelerator(dynamo_backend="dynaflow")

accelerate keeps the names of backends in an enum and refuses all others, those that torch itself finds too. torch finds ours where DynaFlow
is installed; a copy of the tree that is only on the path is made known to it here.
"""

from __future__ import annotations

import torch
from accelerate.utils import DynamoBackend

from dynaflow.capture import backend

NAME = "DYNAFLOW"


def register() -> None:
    """What the enum's own class statement does for a member."""
    if NAME.lower() not in torch._dynamo.list_backends(exclude_tags=()):
        torch._dynamo.register_backend(compiler_fn=backend, name=NAME.lower())
    if NAME in DynamoBackend._member_map_:
        return
    member = str.__new__(DynamoBackend, NAME)
    member._name_ = member._value_ = NAME
    member._sort_order_ = len(DynamoBackend._member_names_)
    DynamoBackend._member_names_.append(NAME)
    DynamoBackend._member_map_[NAME] = DynamoBackend._value2member_map_[NAME] = member


register()
