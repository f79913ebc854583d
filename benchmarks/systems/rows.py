"""The rows: what is called, how often the model runs in one call, and what of the result is compared.

Compared is, on fresh random inputs, the relative error against the same model in float32 (bf16 weights, made wide): of prefills and all
decode steps their logits, with the tokens given, so that all variants decode the same ones; of a denoising step the latents behind it; of
training the change of the weights.
"""

from __future__ import annotations

import copy
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

import dynaflow as df
from benchmarks import system_models as systems
from benchmarks.cases import built
from benchmarks.systems import variants as v
from benchmarks.zoo import _roughen

Inputs = dict[str, Any]
Result = dict[str, Any]

# the variant that others are compared with: eager, in float32
WIDE = "float32"
# calls before a variant is timed: two sets of outputs are recorded, and what takes them as inputs for each
NUM_WARM = 6


class Way(Protocol):
    """A variant of a row, ready to be called."""

    def first(self) -> None:
        """The shortest call that compiles all there is to compile."""
        ...

    def warm(self) -> None:
        """Until nothing changes any more. Plans are timed here."""
        ...

    def block(self, count: int) -> list[float]:
        """Milliseconds per unit, of so many calls behind one that is not timed."""
        ...

    def results(self) -> list[torch.Tensor]: ...


@dataclass(frozen=True, kw_only=True)
class Row(ABC):
    name: str
    # the page in docs/systems that quotes it
    page: str
    # what a figure is of
    unit: str = "call"

    @abstractmethod
    def variants(self) -> tuple[str, ...]:
        """Those that there are, in the order in which they are built."""

    @abstractmethod
    def make(self, tiny: bool, device: str, dtype: torch.dtype) -> Any:
        """The system's own object, with random weights."""

    def switch(self, made: Any, name: str) -> None:
        """One variant, on."""
        if name in v.OPTIONS:
            df.optimize(made, **v.OPTIONS[name])
        elif name in (v.COMPILE, v.REDUCE):
            v.compile_forward(self.workers(made), name)

    @abstractmethod
    def workers(self, made: Any) -> list[Any]:
        """The modules that do the work."""

    def widen(self, made: Any) -> None:
        """In float32 from now on."""
        made.float()

    @abstractmethod
    def inputs(self, made: Any, tiny: bool, seed: int) -> Inputs: ...

    @abstractmethod
    def num_steps(self, tiny: bool) -> int:
        """How many of the row's units one call is."""

    def config(self, tiny: bool) -> Result:
        return {"unit": self.unit, "steps_per_call": self.num_steps(tiny), "page": self.page}

    def rate(self, ms: float) -> dict[str, float]:
        """What else a figure says."""
        return {}

    @abstractmethod
    def way(self, made: Any, name: str, sets: Sequence[Inputs], device: str, tiny: bool) -> Way:
        """A variant, to be timed and compared."""


@dataclass(frozen=True, kw_only=True)
class Called(Row):
    """A row whose unit of work is a call."""

    @abstractmethod
    def call(self, made: Any, inputs: Inputs, name: str) -> Any:
        """What is timed."""

    def first(self, made: Any, inputs: Inputs, name: str) -> Any:
        """The shortest call that compiles all there is to compile."""
        return self.call(made, inputs, name)

    def result(self, made: Any, inputs: Inputs, name: str) -> torch.Tensor:
        """What is compared."""
        return self.call(made, inputs, name)  # type: ignore[no-any-return]

    def way(self, made: Any, name: str, sets: Sequence[Inputs], device: str, tiny: bool) -> Way:
        return Calls(self, made, name, sets, device, self.num_steps(tiny))


class Calls:
    """Calls with one set of inputs after the other, each until its result is there."""

    def __init__(self, row: Called, made: Any, name: str, sets: Sequence[Inputs], device: str, num_steps: int):
        self._row, self._made, self._name, self._sets, self._num_steps = row, made, name, sets, num_steps
        self._synchronise = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
        self._next = itertools.cycle(sets)

    def first(self) -> None:
        self._row.first(self._made, next(self._next), self._name)
        self._synchronise()

    def warm(self) -> None:
        for _ in range(0 if self._name == WIDE else NUM_WARM):
            self._row.call(self._made, next(self._next), self._name)
        self._synchronise()

    def block(self, count: int) -> list[float]:
        times = []
        for _ in range(count + 1):
            inputs = next(self._next)
            began = time.perf_counter()
            self._row.call(self._made, inputs, self._name)
            self._synchronise()
            times.append((time.perf_counter() - began) * 1e3 / self._num_steps)
        return times[1:]

    def results(self) -> list[torch.Tensor]:
        return [self._row.result(self._made, inputs, self._name).float().cpu() for inputs in self._sets]


def twin(made: Any) -> Any:
    """A copy over the same weights, those aside that are trained."""
    parts = made.components.values() if hasattr(made, "components") else [made]
    modules = [part for part in parts if isinstance(part, torch.nn.Module)]
    shared = {id(t): t for module in modules for t in (*module.parameters(), *module.buffers()) if not t.requires_grad}
    return copy.deepcopy(made, shared)


# -- Transformers and PEFT

Model = Callable[[bool, str, torch.dtype], Any]


def llama(tiny: bool, device: str, dtype: torch.dtype) -> Any:
    return built(lambda: systems.llama(tiny), device, dtype, seed=0)


def lora(tiny: bool, device: str, dtype: torch.dtype) -> Any:
    def make() -> Any:
        return systems.lora(tiny, num_adapters=1, rank=4 if tiny else 16, autocast_adapter_dtype=False)

    return built(make, device, dtype, seed=0)


def _tokens(made: Any, batch: int, length: int, seed: int) -> torch.Tensor:
    vocabulary = made.config.vocab_size
    return torch.randint(1, vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed)).to(made.device)


@dataclass(frozen=True, kw_only=True)
class Prefill(Called):
    """One call of the model, without a cache: the logits of the last token."""

    model: Model
    num_tokens: int

    def variants(self) -> tuple[str, ...]:
        return v.EAGER, v.COMPILE, v.REDUCE, v.OURS, v.FIXED, v.SPLIT, v.BRANCHES

    def make(self, tiny: bool, device: str, dtype: torch.dtype) -> Any:
        return self.model(tiny, device, dtype)

    def workers(self, made: Any) -> list[Any]:
        return [made.get_base_model() if hasattr(made, "get_base_model") else made]

    def inputs(self, made: Any, tiny: bool, seed: int) -> Inputs:
        ids = _tokens(made, 2 if tiny else 1, 16 if tiny else self.num_tokens, seed)
        return {"input_ids": ids, "use_cache": False, "logits_to_keep": 1}

    def call(self, made: Any, inputs: Inputs, name: str) -> Any:
        return made(**inputs).logits

    def num_steps(self, tiny: bool) -> int:
        return 1

    def rate(self, ms: float) -> dict[str, float]:
        return {"tokens_per_s": round(self.num_tokens * 1e3 / ms, 1)}


@dataclass(frozen=True, kw_only=True)
class Generate(Called):
    """`generate`, greedy: a prefill and `num_new - 1` decode steps. Figures are per new token of every row."""

    model: Model
    cache: str
    batch: int
    prompt: int = 256
    num_new: int = 24
    unit: str = "token"

    def variants(self) -> tuple[str, ...]:
        # By itself, generate compiles nothing where the cache grows; where it does not, decode steps, with mode="reduce-overhead". (With
        # a variant beside it that had this mode for prefill and decode alike, processes ended in segmentation faults on torch 2.11.)
        own = (v.SYSTEM,) if self.cache == "static" else ()
        return v.EAGER, v.COMPILE, *own, v.OURS, v.FIXED, v.SPLIT, v.BRANCHES

    def make(self, tiny: bool, device: str, dtype: torch.dtype) -> Any:
        return self.model(tiny, device, dtype)

    workers = Prefill.workers

    def inputs(self, made: Any, tiny: bool, seed: int) -> Inputs:
        ids = _tokens(made, 4 if tiny else self.batch, 8 if tiny else self.prompt, seed)
        # as long as the longest call needs it: the first one is shorter
        longest = ids.shape[1] + self.num_steps(tiny)
        cached = {"cache_implementation": self.cache, "max_cache_len": longest} if self.cache == "static" else {}
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": self.num_steps(tiny), "do_sample": False,
                "eos_token_id": None, "pad_token_id": systems.PAD, **cached}  # fmt: skip

    def call(self, made: Any, inputs: Inputs, name: str, **more: Any) -> Any:
        # df.optimize takes the place of generate's own torch.compile, and needs no word about it
        plain = {"disable_compile": True} if name in (v.EAGER, v.COMPILE, v.REDUCE) else {}
        return made.generate(**inputs, **plain, **more)

    def first(self, made: Any, inputs: Inputs, name: str) -> Any:
        # where the cache grows, the second decode step is the first one of many lengths
        return self.call(made, {**inputs, "max_new_tokens": 2 if self.cache == "static" else 3}, name)

    def result(self, made: Any, inputs: Inputs, name: str) -> torch.Tensor:
        ids = inputs["input_ids"]
        given = torch.randint(1, made.config.vocab_size, (ids.shape[0], inputs["max_new_tokens"]),
                              generator=torch.Generator().manual_seed(int(ids.sum()))).to(ids.device)  # fmt: skip
        more = {"logits_processor": [_Given(given, ids.shape[1])], "return_dict_in_generate": True, "output_logits": True}
        return torch.stack(self.call(made, inputs, name, **more).logits)

    def num_steps(self, tiny: bool) -> int:
        return 4 if tiny else self.num_new

    def config(self, tiny: bool) -> Result:
        return {**super().config(tiny), "cache": self.cache, "batch": self.batch, "prompt": self.prompt}

    def rate(self, ms: float) -> dict[str, float]:
        return {"tokens_per_s": round(self.batch * 1e3 / ms, 1)}


class _Given:
    """A logits processor that lets given tokens win: all variants decode the same ones, wherever two are almost as likely."""

    def __init__(self, tokens: torch.Tensor, start: int):
        self._tokens, self._start = tokens, start

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        at = input_ids.shape[1] - self._start
        return torch.full_like(scores, -1.0).scatter_(1, self._tokens[:, at : at + 1], 1.0)


# -- diffusers


@dataclass(frozen=True, kw_only=True)
class Denoise(Called):
    """A pipeline from noise to latents: one image, no guidance by a negative prompt, so that the denoiser's batch is 1."""

    pipeline: str
    size: int
    steps: int = 4
    page: str = "diffusers"
    unit: str = "step"

    def variants(self) -> tuple[str, ...]:
        own = (v.SYSTEM,) if self.pipeline != "sd3" else ()  # the class names no repeated blocks
        return v.EAGER, v.COMPILE, v.REDUCE, *own, v.OURS, v.FIXED, v.SPLIT, v.BRANCHES

    def make(self, tiny: bool, device: str, dtype: torch.dtype) -> Any:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                pipe = systems.PIPELINES[self.pipeline](tiny)
        finally:
            torch.set_default_dtype(before)
        pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config)  # its tables stay with the host, in float32
        pipe.to(device, dtype)
        for module in self.workers(pipe):
            _roughen(module.requires_grad_(False))
            if self.pipeline == "sdxl" and not tiny:
                module.to(memory_format=torch.channels_last)  # as diffusers recommends, for all variants
        return pipe

    def workers(self, made: Any) -> list[Any]:
        names = ("unet", "controlnet") if self.pipeline == "sdxl" else ("transformer",)
        return [getattr(made, name) for name in names]

    def switch(self, made: Any, name: str) -> None:
        if name != v.SYSTEM:
            return super().switch(made, name)
        for module in self.workers(made):
            if getattr(module, "_repeated_blocks", None):
                module.compile_repeated_blocks(fullgraph=True)
            else:
                v.compile_forward([module], v.COMPILE)

    def widen(self, made: Any) -> None:
        """The denoisers alone: timesteps are rounded as before."""
        for module in self.workers(made):
            module.forward = _Wide(module)

    def inputs(self, made: Any, tiny: bool, seed: int) -> Inputs:
        dtype, size = self.workers(made)[0].dtype, None if tiny else self.size
        return systems.request(self.pipeline, 1, self.num_steps(tiny), tiny, made.device, dtype, size, seed, is_guided=tiny)

    def call(self, made: Any, inputs: Inputs, name: str) -> Any:
        # the same noise each time
        generator = torch.Generator(made.device).manual_seed(inputs["generator"].initial_seed())
        return systems.pixels(made(**{**inputs, "generator": generator}))

    def first(self, made: Any, inputs: Inputs, name: str) -> Any:
        return self.call(made, {**inputs, "num_inference_steps": 1}, name)

    def result(self, made: Any, inputs: Inputs, name: str) -> torch.Tensor:
        return self.first(made, inputs, name)  # type: ignore[no-any-return]

    def num_steps(self, tiny: bool) -> int:
        return 2 if tiny else self.steps

    def config(self, tiny: bool) -> Result:
        return {**super().config(tiny), "size": self.size}


class _Wide:
    """A module's forward in float32, with what goes in and comes out as it was."""

    def __init__(self, module: Any):
        self._dtype, self._wide = module.dtype, copy.deepcopy(module).float()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._cast((args, kwargs), torch.float32)
        return self._cast(self._wide(*args, **kwargs), self._dtype)

    @staticmethod
    def _cast(tree: Any, dtype: torch.dtype) -> Any:
        return pytree.tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, tree)


def rows() -> Mapping[str, Row]:
    from benchmarks.systems.training import Training

    found: list[Row] = [
        *(Generate(name=f"lora decode {n} token{'s' * (n > 1)}", page="peft", model=lora, cache="static", batch=n) for n in (1, 16)),
        *(Prefill(name=f"lora prefill {n} tokens", page="peft", model=lora, num_tokens=n) for n in (512, 2048)),
        *(Generate(name=f"llama generate static b={n}", page="transformers", model=llama, cache="static", batch=n) for n in (1, 16)),
        Training(name="lora trainer step 512 tokens"),
        *(Denoise(name=f"{name} {(size // 16) ** 2} tokens", pipeline=name, size=size) for name in ("flux", "sd3") for size in (512, 1024)),
        *(Denoise(name=f"sdxl+controlnet {size // 8}x{size // 8}", pipeline="sdxl", size=size) for size in (512, 1024)),
        *(Generate(name=f"llama generate dynamic b={n}", page="transformers", model=llama, cache="dynamic", batch=n, num_new=12)
          for n in (1, 16)),
    ]  # fmt: skip
    return {row.name: row for row in found}
