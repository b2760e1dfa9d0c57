# SPDX-License-Identifier: Apache-2.0
"""The second model: its forward on our own paged KV."""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_hetero_spec.engine.drafter.loading import KVBudget, load_drafter

if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionMetadata


@dataclass
class ForwardBatch:
    """Where the N tokens of a forward go; tensors on the device but for the `_cpu` ones.

    Attributes:
        positions: [N] int64, of each token in its sequence.
        slots: [N] int64, block number * block size + offset.
        starts: [B+1] int32, offset of each request among the N tokens.
        lengths: [B] int32, tokens of each sequence after this forward.
        block_table: [B, W] int32.
        max_query: Most tokens of one request.
        last: [B] int64, each request's last token; None where every request has one token.
    """

    positions: torch.Tensor
    slots: torch.Tensor
    starts: torch.Tensor
    starts_cpu: torch.Tensor
    lengths: torch.Tensor
    lengths_cpu: torch.Tensor
    block_table: torch.Tensor
    max_query: int = 1
    last: torch.Tensor | None = None


class DrafterModel:
    """The drafter's weights and KV tensors.

    Args:
        config: From `drafter_vllm_config`.
        device: Where the target runs.
        kv_budget: Called with a function from tokens to bytes of KV; returns the budget in bytes.

    Attributes:
        num_blocks: Blocks in the KV tensors, block 0 reserved for padding.
        block_size: Tokens per block.
        forward_seconds: Time spent so far in forwards and in picking tokens from their logits.
        forwards: How many there were.

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
        self.forward_seconds = 0.0
        self.forwards = 0
        loaded = load_drafter(config, device, kv_budget)
        self.model = loaded.model
        self.num_blocks, self.block_size = loaded.num_blocks, loaded.block_size
        self._groups, self._layers = loaded.groups, loaded.layers

    def forward(self, ids: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """One ragged forward; writes the KV of all its tokens.

        Args:
            ids: [N] token ids, requests one after the other.
            batch: Where they go.

        Returns:
            [B, V] logits after the last token of each request.
        """
        began = time.perf_counter()
        common = CommonAttentionMetadata(
            query_start_loc=batch.starts,
            query_start_loc_cpu=batch.starts_cpu,
            seq_lens=batch.lengths,
            seq_lens_cpu_upper_bound=batch.lengths_cpu,
            num_reqs=batch.block_table.shape[0],
            num_actual_tokens=ids.shape[0],
            max_query_len=batch.max_query,
            max_seq_len=int(batch.lengths_cpu.max()),
            block_table_tensor=batch.block_table,
            slot_mapping=batch.slots,
            causal=True,
        )
        metadata: dict[str, AttentionMetadata] = {}
        for group in self._groups:
            metadata.update(dict.fromkeys(group.layer_names, group.build_metadata(common)))
        with set_forward_context(
            metadata,
            self.config,
            num_tokens=ids.shape[0],
            slot_mapping=dict.fromkeys(self._layers, batch.slots),
        ):
            hidden = self.model(input_ids=ids, positions=batch.positions)
            logits = self.model.compute_logits(hidden if batch.last is None else hidden[batch.last])
        self.forward_seconds += time.perf_counter() - began
        self.forwards += 1
        return logits
