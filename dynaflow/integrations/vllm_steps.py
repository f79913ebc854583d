"""A step of vLLM's engine, in parts (`steps.py`): where vLLM keeps what a step is made of, and what parts of it need.

1. The model is captured once; its tokens are the batch.
2. Each part has a forward context of its own, with the attention metadata that vLLM's builders make for its requests.
3. Attention of one layer runs part after part (`kv:<layer>`); between phases side by side, where requests share nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from vllm import ir
from vllm.config import CUDAGraphMode
from vllm.distributed import parallel_state
from vllm.forward_context import ForwardContext, get_forward_context, override_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.worker.ubatch_utils import UBatchSlice

import dynaflow as df
from dynaflow.engine import Rows
from dynaflow.integrations.serving import Engine, Options
from dynaflow.integrations.steps import Steps

# Attention backends that compute in memory of the call or of the part's own builder, or (the CPU's) are called by one thread alone.
# FlashInfer has a workspace of the process.
OWN_MEMORY = {"FLASH_ATTN", "TRITON_ATTN", "CPU_ATTN"}


class VllmSteps(Steps):
    """Between a model runner and its model: `forward` and `build_metadata` stand in the place of the runner's."""

    def __init__(self, engine: Engine, options: Options, runner: Any):
        self.runner = runner
        self._forward, self._build = runner._model_forward, runner._build_attention_metadata
        # of the step under way: what its metadata was built from, as given and then by name
        self._given: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        self._call: dict[str, Any] = {}
        self._builders: dict[tuple[int, int], Any] = {}
        self._signature = inspect.signature(self._build)
        positions = 1 if runner.uses_mrope or getattr(runner, "uses_xdrope_dim", 0) else 0  # the latter: vLLM 0.25
        model = runner.get_model()
        # vLLM's models made of Transformers' call `forward` itself: there is no module around it
        is_called = not type(model).__module__.startswith("vllm.model_executor.models.transformers")
        attention = df.SplitModule(Attention, kind="memory") if is_called else df.SplitFunc(Attention.forward, kind="memory", name="attn")
        batch = {"input_ids": 0, "positions": positions, "inputs_embeds": 0}
        if {group.backend.get_name() for groups in runner.attn_groups for group in groups} <= OWN_MEMORY:
            self.own_state = "kv:*"
        if options.strategy.wants_phases_sorted and runner.reorder_batch_threshold is None:
            runner.reorder_batch_threshold = 1  # vLLM sorts where a backend asks: requests of so many tokens come first
        super().__init__(engine, options, model, batch=batch, partition=["auto", attention])

    def build_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """It is called again for parts."""
        self._given = args, kwargs
        return self._build(*args, **kwargs)

    def forward(
        self, input_ids: Any = None, positions: Any = None, intermediate_tensors: Any = None, inputs_embeds: Any = None, **others: Any
    ) -> Any:
        args, kwargs = self._given
        num_tokens = kwargs["num_tokens"] if "num_tokens" in kwargs else args[0] if args else 0
        return self.step(num_tokens, input_ids, positions, intermediate_tensors, inputs_embeds, **others)

    def why_whole(self, *call: Any, **others: Any) -> str:
        context = get_forward_context()
        if context.cudagraph_runtime_mode != CUDAGraphMode.NONE:
            return "vLLM has a CUDA Graph for it"
        return "the model takes more than tokens" if context.skip_compiled or others else ""

    def starts(self) -> np.ndarray:
        args, kwargs = self._given
        self._call = self._signature.bind(*args, **kwargs).arguments
        return self.runner.query_start_loc.np[: self._call["num_reqs"] + 1].astype(np.int64)

    def tables(self) -> Iterator[tuple[np.ndarray, np.ndarray, int, int | None]]:
        if self.runner.cache_config.enable_prefix_caching:
            batch = self.runner.input_batch
            computed = batch.num_computed_tokens_cpu[: self._call["num_reqs"]].astype(np.int64)
            for table, group in zip(batch.block_table.block_tables, self.runner.kv_cache_config.kv_cache_groups, strict=True):
                # of other kinds, some layers may see everything
                window = group.kv_cache_spec.sliding_window if isinstance(group.kv_cache_spec, SlidingWindowSpec) else None
                yield computed, table.get_numpy_array(), table.block_size, window

    def in_parts(self, num_tokens: int, input_ids: Any, positions: Any, _: Any, inputs_embeds: Any) -> Any:
        """vLLM's own ops (`vllm.ir`) are captured as what they come down to: lowering them is a pass of its compiler, not of ours."""
        unpadded = replace(get_forward_context(), batch_descriptor=None, is_padding=None, all_moe_layers=None)
        with override_forward_context(unpadded), ir.enable_torch_wrap(False):
            return self.fast(
                input_ids=None if input_ids is None else input_ids[:num_tokens], positions=positions[..., :num_tokens],
                intermediate_tensors=None, inputs_embeds=None if inputs_embeds is None else inputs_embeds[:num_tokens],
            )  # fmt: skip

    def whole(self, *call: Any, **others: Any) -> Any:
        return self._forward(*call, **others)

    def group(self) -> Any:
        return parallel_state.get_tp_group().cpu_group

    def contexts(self, parts: Sequence[Rows]) -> list[AbstractContextManager[None]]:
        whole = get_forward_context()
        return [override_forward_context(self._context(whole, i, part)) for i, part in enumerate(parts)]

    def _context(self, whole: ForwardContext, i: int, part: Rows) -> ForwardContext:
        tokens = slice(part.start, part.stop)
        # One part per call: of several, all would get the first one's metadata where a backend can swap block tables (FlashAttention).
        changed = {"ubatch_slices": [UBatchSlice(self.requests_of(part), tokens)], "num_tokens_padded": None, "num_reqs_padded": None}
        if "cascade_attn_prefix_lens" in self._call:  # vLLM 0.25: a prefix that all requests share, and parts' requests may not
            changed["cascade_attn_prefix_lens"] = None
        with self._own_builders(i):
            (metadata,), _ = self._build(**{**self._call, **changed})
        return replace(whole, attn_metadata=metadata, slot_mapping={layer: slots[tokens] for layer, slots in whole.slot_mapping.items()})

    @contextmanager
    def _own_builders(self, i: int) -> Iterator[None]:
        """Builders may keep buffers: part i has its own, and vLLM's are not touched."""
        groups = [group for groups in self.runner.attn_groups for group in groups]
        theirs = [group.metadata_builders for group in groups]
        try:
            for group, (like, *_) in zip(groups, theirs):
                if (id(group), i) not in self._builders:
                    self._builders[id(group), i] = type(like)(like.kv_cache_spec, group.layer_names, like.vllm_config, like.device)
                group.metadata_builders = [self._builders[id(group), i]]
            yield
        finally:
            for group, builders in zip(groups, theirs):
                group.metadata_builders = builders
