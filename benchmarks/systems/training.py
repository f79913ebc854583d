"""Steps of Transformers' Trainer: everything that `trainer.train()` does, timed from the end of one step to the end of the next."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import system_models as systems
from benchmarks.cases import built
from benchmarks.systems import variants as v
from benchmarks.systems.rows import WIDE, Inputs, Result, Row, Way

# steps of a run before the clock starts; steps behind the first one whose outcome is compared
NUM_WARM, NUM_COMPARED = 2, 8
LEARNING_RATE = 0.1


@dataclass(frozen=True, kw_only=True)
class Training(Row):
    """LoRA on a Llama of 2,048 wide, mixed precision; adapters in float32, as PEFT has them. A call is one run of the Trainer."""

    name: str = "lora trainer step"
    page: str = "transformers"
    unit: str = "step"
    num_tokens: int = 512

    def variants(self) -> tuple[str, ...]:
        return v.EAGER, v.COMPILE, v.REDUCE, v.OURS

    def make(self, tiny: bool, device: str, dtype: torch.dtype) -> Any:
        def make() -> Any:
            wide = {} if tiny else {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_hidden_layers": 4}
            return systems.llama(tiny, **wide)

        base = built(make, device, dtype, seed=0)
        return systems.lora(tiny, num_adapters=1, rank=4 if tiny else 16, model=base).train().to(device)

    def workers(self, made: Any) -> list[Any]:
        return [made]

    def switch(self, made: Any, name: str) -> None:
        """It is the Trainer that is told: `Run`."""

    def way(self, made: Any, name: str, sets: Sequence[Inputs], device: str, tiny: bool) -> Way:
        return Run(self, made, name, sets, device, tiny)

    def inputs(self, made: Any, tiny: bool, seed: int) -> Inputs:
        generator, length = torch.Generator().manual_seed(seed), 8 if tiny else self.num_tokens
        rows = [torch.randint(1, made.config.vocab_size, (length,), generator=generator) for _ in range(32)]
        return {"rows": [{"input_ids": row, "labels": row} for row in rows]}

    def num_steps(self, tiny: bool) -> int:
        return 1

    def config(self, tiny: bool) -> Result:
        return {**super().config(tiny), "tokens": self.num_tokens, "hidden": 2048, "layers": 4, "rank": 16}

    def rate(self, ms: float) -> dict[str, float]:
        return {"tokens_per_s": round(self.num_tokens * 1e3 / ms, 1)}


class Run:
    """One model in one Trainer, which may be asked for steps again and again: it is compiled in the first run."""

    def __init__(self, row: Training, made: Any, name: str, sets: Sequence[Inputs], device: str, tiny: bool):
        from accelerate.state import AcceleratorState
        from transformers import Trainer, TrainerCallback, TrainingArguments

        import dynaflow.integrations.accelerate  # noqa: F401 (makes the name known)

        ends = self._ends = list[float]()

        class Clock(TrainerCallback):
            def on_step_end(self, *args: Any, **kwargs: Any) -> None:
                if device.startswith("cuda"):
                    torch.cuda.synchronize()
                ends.append(time.perf_counter())

        wanted: dict[str, Any] = {} if name in (v.EAGER, WIDE) else {"torch_compile": True, "torch_compile_backend": "inductor"}
        if name in v.OPTIONS:
            wanted["torch_compile_backend"] = "dynaflow"
        if name == v.REDUCE:
            wanted["torch_compile_mode"] = "reduce-overhead"
        if name == WIDE:
            wanted["tf32"] = False  # torch_compile=True switches it on, for the process
        # what accelerate knows of the last Trainer is the process's, and so are the variables that tell it
        AcceleratorState._reset_state(reset_partial_state=True)
        for variable in ("ACCELERATE_DYNAMO_BACKEND", "ACCELERATE_DYNAMO_MODE"):
            os.environ.pop(variable, None)
        self._folder = tempfile.TemporaryDirectory()
        self._arguments = TrainingArguments(
            output_dir=self._folder.name, per_device_train_batch_size=1, max_steps=1, report_to=[], save_strategy="no",
            logging_strategy="no", disable_tqdm=True, optim="sgd", learning_rate=LEARNING_RATE, lr_scheduler_type="constant",
            use_cpu=not device.startswith("cuda"), bf16=not tiny and name != WIDE, seed=0, dataloader_pin_memory=False,
            **wanted)  # fmt: skip
        self._trainer = Trainer(made, self._arguments, train_dataset=list(sets[0]["rows"]), callbacks=[Clock()])
        # accelerate has one state for the process
        self._plugin = self._trainer.accelerator.state.dynamo_plugin
        self._made, self._before = made, _trained(made)
        self._change: torch.Tensor | None = None

    def first(self) -> None:
        self._train(1)

    def warm(self) -> None:
        self._train(NUM_COMPARED)
        self._change = torch.cat([(after - self._before[name]).flatten() for name, after in _trained(self._made).items()])

    def block(self, count: int) -> list[float]:
        """Milliseconds of so many steps."""
        self._train(NUM_WARM + count)
        ends = self._ends[NUM_WARM - 1 :]
        return [(after - before) * 1e3 for before, after in zip(ends, ends[1:])]

    def results(self) -> list[torch.Tensor]:
        """How far training had moved the weights when it was warm."""
        assert self._change is not None, "warm() comes first"
        return [self._change]

    def _train(self, num_steps: int) -> None:
        self._ends.clear()
        self._arguments.max_steps = num_steps
        self._trainer.accelerator.state.dynamo_plugin = self._plugin
        with torch.enable_grad():
            self._trainer.train()


def _trained(made: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().float().cpu().clone() for name, p in made.named_parameters() if p.requires_grad}
