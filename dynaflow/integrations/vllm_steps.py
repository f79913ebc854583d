"""A step of vLLM's engine, in parts.

1. The model is captured once; its tokens are the batch. Cuts move to requests' first tokens (`requests.py`).
2. Each part has a forward context of its own, with the attention metadata that vLLM's builders make for its requests.
3. Attention of one layer runs part after part (`kv:<layer>`), so a request may be cut inside: its later tokens read what its earlier
   ones wrote. No cut lies between a reader of the prefix cache and a writer that comes behind it in the batch.
4. All other steps run as vLLM has them. Reasons are counted; one that holds for good is logged. A step that is too small, or that a CUDA
   Graph of vLLM's serves, costs two comparisons; nothing of its metadata is looked at.
"""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch._dynamo.exc import TorchDynamoException
from vllm import ir
from vllm.config import CUDAGraphMode
from vllm.forward_context import ForwardContext, get_forward_context, override_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.v1.worker.ubatch_utils import UBatchSlice

import dynaflow as df
from dynaflow.engine import Rows
from dynaflow.errors import DynaFlowError, FellBack, RankMissing
from dynaflow.integrations.requests import place_cuts, readers_before_writers
from dynaflow.integrations.step_trials import Trials, kind_of

log = logging.getLogger("vllm.dynaflow")


@dataclass
class Stats:
    steps: int = 0
    split_steps: int = 0
    # parts of split steps that begin inside of a request
    cut_requests: int = 0
    # reason -> steps that ran as vLLM has them
    fallbacks: Counter[str] = field(default_factory=Counter)
    # why the model is left to vLLM for good
    refusal: str = ""
    # under "branches": pieces that vLLM compiled, and those of them that run under a plan in its CUDA Graphs; fallbacks are of these
    regions: int = 0
    planned_regions: int = 0


TOTAL = Stats()


class Steps:
    """Stands between a model runner and its model."""

    def __init__(self, runner: Any, strategy: Any, min_tokens: int, compiler: str, runtime: str, trials: Trials | None = None):
        self.runner, self.min_tokens, self.trials = runner, min_tokens, trials
        self._forward, self._build = runner._model_forward, runner._build_attention_metadata
        # of the step under way: what its metadata was built from, as given and then by name; the first token of each request, and the end
        self._given: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        self._call: dict[str, Any] = {}
        self._starts = np.zeros(1, np.int64)
        self._builders: dict[tuple[int, int], Any] = {}
        self._signature = inspect.signature(self._build)
        positions = 1 if runner.uses_mrope or getattr(runner, "uses_xdrope_dim", 0) else 0  # the latter: vLLM 0.25
        self.fast = df.compile(
            runner.get_model(), strategy=strategy, partition=["auto", df.SplitModule(Attention, kind="memory")], compiler=compiler,
            runtime=runtime, batch={"input_ids": 0, "positions": positions, "inputs_embeds": 0}, strict=True,
            part_context=self.contexts, align=self.align,
        )  # fmt: skip

    def build_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """In the place of the runner's: it is called again for parts."""
        self._given = args, kwargs
        return self._build(*args, **kwargs)

    def forward(self, input_ids: Any = None, positions: Any = None, intermediate_tensors: Any = None, inputs_embeds: Any = None,
                **others: Any) -> Any:  # fmt: skip
        """In the place of the runner's."""
        args, kwargs = self._given
        num_tokens, context = kwargs["num_tokens"] if "num_tokens" in kwargs else args[0] if args else 0, get_forward_context()
        reason = TOTAL.refusal or (
            f"fewer than {self.min_tokens} tokens" if num_tokens < self.min_tokens
            else "vLLM has a CUDA Graph for it" if context.cudagraph_runtime_mode != CUDAGraphMode.NONE
            else "the model takes more than tokens" if context.skip_compiled or others else "")  # fmt: skip
        TOTAL.steps += 1
        kind = None
        if not reason:
            tags = self._begin(num_tokens)
            if self.trials is not None:
                kind = kind_of(tags["phase"], num_tokens, tags["mostly"])
                reason = "" if self.trials.wants_parts(kind) else "auto: no faster in parts, or its turn as a whole"
        if not reason:
            try:
                with self._timed(kind, num_tokens, True):
                    return self._split(num_tokens, context, tags, input_ids, positions, inputs_embeds)
            except FellBack as error:
                reason = str(error).splitlines()[0]
                if self.trials is not None and kind is not None:
                    self.trials.refused(kind)
            except RankMissing:
                raise
            except (DynaFlowError, TorchDynamoException) as error:
                reason = TOTAL.refusal = str(error).splitlines()[0]
                log.error("dynaflow leaves this model to vLLM from here on: %s", error)
        TOTAL.fallbacks[reason] += 1
        with self._timed(kind, num_tokens, False):
            return self._forward(input_ids, positions, intermediate_tensors, inputs_embeds, **others)

    def _begin(self, num_tokens: int) -> dict[str, Any]:
        """Reads the step that is to be split. As tags: its phase, the requests that make one token, and what most of its tokens are."""
        args, kwargs = self._given
        self._call = self._signature.bind(*args, **kwargs).arguments
        self._starts = self.runner.query_start_loc.np[: self._call["num_reqs"] + 1].astype(np.int64)
        num_decoding = int((np.diff(self._starts) == 1).sum())
        phase = "prefill" if not num_decoding else "decode" if num_decoding == len(self._starts) - 1 else "mixed"
        return {"phase": phase, "num_decoding": num_decoding, "mostly": "decode" if 2 * num_decoding >= num_tokens else "prefill"}

    def _timed(self, kind: Any, num_tokens: int, in_parts: bool) -> AbstractContextManager[None]:
        return nullcontext() if self.trials is None or kind is None else self.trials.timed(kind, num_tokens, in_parts)

    def _split(
        self, num_tokens: int, context: ForwardContext, tags: dict[str, Any], input_ids: Any, positions: Any, inputs_embeds: Any
    ) -> Any:
        """Without the tokens that pad the step, if any do. vLLM's own ops (`vllm.ir`) are captured as what they come down to: lowering
        them is a pass of its compiler, not of ours."""
        unpadded = replace(context, batch_descriptor=None, is_padding=None, all_moe_layers=None)
        with override_forward_context(unpadded), ir.enable_torch_wrap(False), df.context(**tags):
            result = self.fast(
                input_ids=None if input_ids is None else input_ids[:num_tokens], positions=positions[..., :num_tokens],
                intermediate_tensors=None, inputs_embeds=None if inputs_embeds is None else inputs_embeds[:num_tokens],
            )  # fmt: skip
        TOTAL.split_steps += 1
        return result

    def align(self, cuts: Sequence[int]) -> list[int]:
        moved = place_cuts(cuts, self._starts, self._together())
        TOTAL.cut_requests += int((~np.isin(moved, self._starts)).sum())
        return moved

    def _together(self) -> set[tuple[int, int]]:
        """(reader, writer) of the prefix cache, where the reader comes first in the batch."""
        batch = self.runner.input_batch
        if not self.runner.cache_config.enable_prefix_caching:
            return set()
        computed = batch.num_computed_tokens_cpu[: len(self._starts) - 1].astype(np.int64)
        tables = batch.block_table.block_tables
        return set().union(*(readers_before_writers(computed, self._starts, t.get_numpy_array(), t.block_size) for t in tables))

    def contexts(self, parts: Sequence[Rows]) -> list[AbstractContextManager[None]]:
        whole = get_forward_context()
        return [override_forward_context(self._context(whole, i, part)) for i, part in enumerate(parts)]

    def _context(self, whole: ForwardContext, i: int, part: Rows) -> ForwardContext:
        tokens = slice(part.start, part.stop)
        requests = slice(int(np.searchsorted(self._starts, part.start, side="right")) - 1, int(np.searchsorted(self._starts, part.stop)))
        # One part per call: of several, all would get the first one's metadata where a backend can swap block tables (FlashAttention).
        changed = {"ubatch_slices": [UBatchSlice(requests, tokens)], "num_tokens_padded": None, "num_reqs_padded": None}
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
