# SPDX-License-Identifier: Apache-2.0
"""The second model: its forward on our own paged KV."""

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

# Of FlashInfer's metadata builder: TensorRT-LLM's decoding kernel, if any.
_KERNEL = "flashinfer_trtllm_api_decode_kernel"

# What the attention layers read of a forward, by layer.
Metadata: TypeAlias = "dict[str, AttentionMetadata]"


class ForwardBatch(NamedTuple):
    """One forward over N tokens of B requests; on the device but for the `_cpu` ones.

    Attributes:
        ids: [N] int32 drafter ids, requests one after the other.
        positions: [N] int64, of each token in its sequence.
        slots: [N] int64, block number * block size + offset; -1 where no KV is to be written.
        starts: [B+1] int32, offset of each request among the N tokens.
        lengths: [B] int32, tokens of each sequence after this forward.
        table: [B, W] int32, its KV blocks.
        max_query: Most tokens of one request.
        max_length: At least the longest of `lengths`.
        rows: int64 [B], each request's last token, or [2B] with the ones before behind them; None
            where every request has `max_query`.
        back: See `round_plan.Feed`.
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
    """What attention can be recorded with.

    Attributes:
        in_graph: Its metadata is brought up to date by operations of the graph itself; otherwise it
            is made on the host before every replay.
        several_tokens: Of each request in one forward.
    """

    in_graph: bool
    several_tokens: bool


class DrafterModel:
    """The drafter's weights and KV tensors.

    Args:
        config: From `drafter_vllm_config`.
        device: Where the target runs.
        kv_budget: Called with a function from tokens to bytes of KV; returns the budget in bytes.

    Attributes:
        num_blocks: Blocks in the KV tensors, block 0 reserved for padding.
        block_size: Tokens per block.
        max_lines: Most sequences of a forward.

    Raises:
        ConfigError: The drafter's KV cache cannot be built.
    """

    def __init__(
        self,
        config: VllmConfig,
        device: torch.device,
        kv_budget: KVBudget,
    ) -> None:
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
        # FlashInfer, but with TensorRT-LLM's kernels, plans each forward in one and the same place,
        # from where the device copies it.
        plans = [getattr(builder, _KERNEL, _KERNEL) is None for builder in builders]
        self._planned = torch.cuda.Event() if any(plans) else None

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """One forward, its metadata made on the host: see `logits`."""
        with self.context(self.metadata(batch), batch):
            return self.logits(batch)

    def logits(self, batch: ForwardBatch) -> torch.Tensor:
        """The model itself, inside a `context`.

        Returns:
            [B, V] logits after each request's last token; [2B, V] where `back`: those in its place
            behind them.
        """
        hidden = self.model(input_ids=batch.ids, positions=batch.positions)
        if batch.rows is not None:
            hidden = hidden[batch.rows]
        elif batch.max_query > 1:
            lines = hidden.view(-1, batch.max_query, hidden.shape[-1])
            hidden = torch.cat([lines[:, -1], lines[:, -2]]) if batch.back else lines[:, -1]
        logits: torch.Tensor = self.model.compute_logits(hidden)
        return logits

    def metadata(self, batch: ForwardBatch, *, to_capture: bool = False) -> Metadata:
        """What the attention layers read of a forward, by layer.

        Args:
            batch: The forward.
            to_capture: For a graph that is going to be recorded.
        """
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
        """Copy the KV of blocks in all layers.

        Args:
            copies: (from, to); no block is both.
        """
        copy_kv_cache_blocks_inplace(self._kv_caches.values(), self.num_blocks, copies)

    def clean_blocks(self, blocks: Sequence[int]) -> None:
        """Have nothing but finite KV in blocks: that of block 0, which is no text's."""
        self.copy_blocks([(0, block) for block in blocks])

    @property
    def graph_support(self) -> GraphSupport | None:
        """What its attention can be recorded with; None where it cannot."""
        builders = [group.get_metadata_builder() for group in self._groups]
        least = min(
            (
                builder.get_cudagraph_support(self.config, builder.kv_cache_spec)
                for builder in builders
            ),
            key=lambda support: support.value,
        )
        if least == AttentionCGSupport.NEVER:
            return None
        # A backend that orders batches takes a request of several tokens for a prompt, unless its
        # configuration speaks of speculation: such forwards are planned anew each time.
        several = all(builder.reorder_batch_threshold is None for builder in builders)
        return GraphSupport(
            all(group.supports_draft_decode_metadata_update for group in self._groups),
            several and least != AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE,
        )

    def update(self, metadata: Metadata) -> None:
        """Bring metadata up to date with the tensors it was built from, by operations alone."""
        for group in self._groups:
            group.update_draft_decode_metadata(metadata)

    def context(
        self, metadata: Metadata, batch: ForwardBatch
    ) -> "contextlib.AbstractContextManager[None]":
        """In which a forward finds its metadata and slots."""
        return set_forward_context(
            metadata,
            self.config,
            num_tokens=len(batch.ids),
            slot_mapping=dict.fromkeys(self._layers, batch.slots),
        )
