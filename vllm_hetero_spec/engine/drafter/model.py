# SPDX-License-Identifier: Apache-2.0
"""The drafter's forward on its own paged KV."""

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.worker.utils import copy_kv_cache_blocks_inplace

from vllm_hetero_spec.engine.drafter.loading import KVBudget, load_drafter

if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionMetadata

# Attribute of FlashInfer's metadata builder: TensorRT-LLM's decode kernel, or None.
_KERNEL = "flashinfer_trtllm_api_decode_kernel"

# Attention metadata of a forward, by layer.
Metadata: TypeAlias = "dict[str, AttentionMetadata]"


class ForwardBatch(NamedTuple):
    """One forward over N tokens of B requests. Tensors are on the device, except `*_cpu`.

    Attributes:
        ids: [N] int32 drafter ids, request after request.
        positions: [N] int64, position of each token in its sequence.
        slots: [N] int64, block number * block size + offset; -1 to write no KV.
        starts: [B+1] int32, offset of each request among the N tokens.
        lengths: [B] int32, tokens of each sequence after this forward.
        table: [B, W] int32, KV blocks of each sequence.
        max_query: Largest number of tokens of one request.
        max_length: Upper bound of `lengths`.
        rows: int64 [B], index of each request's last token; [2B] if `back`, with the tokens before
            them in the second half. None if every request has `max_query` tokens.
        back: Same as `BatchFeed.back`.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    starts: torch.Tensor
    starts_cpu: torch.Tensor
    lengths: torch.Tensor
    lengths_cpu: torch.Tensor
    table: torch.Tensor
    max_query: int
    max_length: int
    rows: torch.Tensor | None = None
    back: bool = False


class GraphSupport(NamedTuple):
    """CUDA graph features of the drafter's attention.

    Attributes:
        in_graph: Operations in the graph update the metadata. If False, the host builds the
            metadata before every replay.
        several_tokens: Graphs may have several tokens per request.
    """

    in_graph: bool
    several_tokens: bool


class DrafterModel:
    """The drafter's weights and KV tensors.

    Attributes:
        num_blocks: Blocks in the KV tensors; block 0 is reserved for padding.
        max_length: Longest sequence in tokens.
        max_lines: Largest number of sequences in a forward.
    """

    def __init__(self, config: VllmConfig, device: torch.device, kv_budget: KVBudget) -> None:
        self.config = config
        self.device = device
        loaded = load_drafter(config, device, kv_budget)
        self.model = loaded.model
        self.num_blocks, self.block_size = loaded.num_blocks, loaded.block_size
        self.max_length: int = config.model_config.max_model_len
        self._groups, self._layers = loaded.groups, loaded.layers
        self._kv_caches = loaded.kv_caches
        self.max_lines: int = config.scheduler_config.max_num_seqs
        builders = [group.get_metadata_builder() for group in self._groups]
        # Without TensorRT-LLM's kernels, FlashInfer plans every forward in the same host buffer.
        # The device copies it asynchronously; the event marks the end of that copy.
        plans = [getattr(builder, _KERNEL, _KERNEL) is None for builder in builders]
        self._planned = torch.cuda.Event() if any(plans) else None

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Build the metadata on the host, run the forward and return its `logits`."""
        with self.context(self.metadata(batch), batch):
            return self.logits(batch)

    def logits(self, batch: ForwardBatch) -> torch.Tensor:
        """Run the model inside a `context`; return [B, V] logits after each request's last token.

        If `back`, return [2B, V]: the second half has the logits at the position of the last token.
        """
        hidden = self.model(input_ids=batch.ids, positions=batch.positions)
        if batch.rows is not None:
            hidden = hidden[batch.rows]
        elif batch.max_query > 1:
            lines = hidden.view(-1, batch.max_query, hidden.shape[-1])
            hidden = torch.cat([lines[:, -1], lines[:, -2]]) if batch.back else lines[:, -1]
        return self.model.compute_logits(hidden)

    def metadata(self, batch: ForwardBatch, *, to_capture: bool = False) -> Metadata:
        """Build the attention metadata of a forward, by layer."""
        common = CommonAttentionMetadata(
            query_start_loc=batch.starts,
            query_start_loc_cpu=batch.starts_cpu,
            seq_lens=batch.lengths,
            seq_lens_cpu_upper_bound=batch.lengths_cpu,
            num_reqs=len(batch.lengths),
            num_actual_tokens=len(batch.ids),
            max_query_len=batch.max_query,
            max_seq_len=batch.max_length,
            block_table_tensor=batch.table,
            slot_mapping=batch.slots,
            causal=True,
        )
        if self._planned is not None:
            self._planned.synchronize()
        metadata: Metadata = {}
        for group in self._groups:
            build = group.build_metadata
            if to_capture:
                build = group.build_metadata_for_cudagraph_capture
            metadata.update(dict.fromkeys(group.layer_names, build(common)))
        if self._planned is not None:
            self._planned.record()
        return metadata

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy KV blocks in all layers, given as (source, destination). No block is both."""
        copy_kv_cache_blocks_inplace(self._kv_caches.values(), self.num_blocks, copies)

    def clear(self) -> None:
        """Write zeros to all KV. Memory that was just mapped may contain NaN, also in block 0."""
        for cache in self._kv_caches.values():
            cache.zero_()

    def clean_blocks(self, blocks: Sequence[int]) -> None:
        """Overwrite blocks with the KV of block 0, which is always finite."""
        self.copy_blocks([(0, block) for block in blocks])

    @property
    def graph_support(self) -> GraphSupport | None:
        """CUDA graph features of the attention backends; None if they support no graphs."""
        builders = [group.get_metadata_builder() for group in self._groups]
        supports = [of.get_cudagraph_support(self.config, of.kv_cache_spec) for of in builders]
        least = min(supports, key=lambda support: support.value)
        if least == AttentionCGSupport.NEVER:
            return None
        # A backend that reorders batches treats a request of several tokens as a prefill, unless
        # its configuration has speculative decoding. Every prefill needs a new plan.
        several = all(builder.reorder_batch_threshold is None for builder in builders)
        return GraphSupport(
            all(group.supports_draft_decode_metadata_update for group in self._groups),
            several and least != AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE,
        )

    def update(self, metadata: Metadata) -> None:
        """Update metadata from its tensors, by device operations only."""
        for group in self._groups:
            group.update_draft_decode_metadata(metadata)

    def context(
        self, metadata: Metadata, batch: ForwardBatch
    ) -> "contextlib.AbstractContextManager[None]":
        """Return the context in which a forward finds its metadata and slots."""
        return set_forward_context(
            metadata,
            self.config,
            num_tokens=len(batch.ids),
            slot_mapping=dict.fromkeys(self._layers, batch.slots),
        )
