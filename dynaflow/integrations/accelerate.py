"""accelerate, and Transformers' Trainer, which asks it: importing this file makes "dynaflow" a name that they know.

    import dynaflow.integrations.accelerate
    TrainingArguments(torch_compile_backend="dynaflow")
    Accelerator(dynamo_backend="dynaflow")

accelerate keeps the names of backends in an enum and refuses all others, those that torch itself finds too.
"""

from __future__ import annotations

from accelerate.utils import DynamoBackend

NAME = "DYNAFLOW"


def register() -> None:
    """What the enum's own class statement does for a member."""
    if NAME in DynamoBackend._member_map_:
        return
    member = str.__new__(DynamoBackend, NAME)
    member._name_ = member._value_ = NAME
    member._sort_order_ = len(DynamoBackend._member_names_)
    DynamoBackend._member_names_.append(NAME)
    DynamoBackend._member_map_[NAME] = DynamoBackend._value2member_map_[NAME] = member


register()
