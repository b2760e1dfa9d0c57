# SPDX-License-Identifier: Apache-2.0
"""The second model: built by a nested runner, run on our own paged KV.

The nested runner is a factory. It is never scheduled: it loads the weights, allocates the KV
tensors and builds the attention groups for whatever platform the target runs on; from then on only
its model and attention groups are used, so there is no code per platform here.

Who owns which KV: the target's blocks belong to vLLM's scheduler, the drafter's tensors to this
object and its block numbers to `KVPool`. Both models register their layers in separate
static_forward_contexts, so neither sees the other's.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts

from vllm_hetero_spec.config import ConfigError
from vllm_hetero_spec.engine.compat.releases import plan_kv_cache

if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

# From (bytes of KV for a number of tokens) to the bytes that may be used.
KVBudget = Callable[[Callable[[int], int]], int]


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
        runner_class: The class of the target's own model runner.
        device: Where the target runs.
        kv_budget: Called with a function from tokens to bytes of KV; returns the budget in bytes.

    Attributes:
        num_blocks: Blocks in the KV tensors, block 0 reserved for padding.
        block_size: Tokens per block.
        forward_seconds: Time spent so far in forwards and in picking tokens from their logits.
        forwards: How many there were.

    Raises:
        ConfigError: The drafter's layers do not share one kind of KV cache, or the budget does not
            hold a single block.
    """

    def __init__(
        self,
        config: VllmConfig,
        runner_class: "type[GPUModelRunner]",
        device: torch.device,
        kv_budget: KVBudget,
    ) -> None:
        self.config = config
        self.device = device
        self.forward_seconds = 0.0
        self.forwards = 0
        with set_current_vllm_config(config):
            runner = runner_class(config, device)
            runner.load_model()
            self.model = runner.model
            # vLLM settles the target's block size once its layers exist, which is after this; the
            # drafter's is its own, of what its own attention backends take.
            current_platform.update_block_size_for_backend(config)
            plan = self._planned_kv(runner, kv_budget)
            runner.initialize_kv_cache(plan)
        group = plan.kv_cache_groups[0]
        self.num_blocks: int = plan.num_blocks
        self.block_size: int = group.kv_cache_spec.block_size
        self._groups = runner.attn_groups[0]
        self._layers = list(group.layer_names)

    def _planned_kv(self, runner: "GPUModelRunner", kv_budget: KVBudget) -> "KVCacheConfig":
        spec = runner.get_kv_cache_spec()
        kinds = {type(layer).__name__ for layer in spec.values()}
        if len(set(spec.values())) != 1:
            raise ConfigError(
                f"the drafter's layers need {len(set(spec.values()))} kinds of KV cache "
                f"({', '.join(sorted(kinds))}); supported: one kind of attention in all layers."
            )
        layer = next(iter(spec.values()))
        block_bytes = layer.page_size_bytes * len(spec)
        budget = kv_budget(lambda tokens: block_bytes * (-(-tokens // layer.block_size) + 1))
        # One block for padding and one to work with. vLLM's own check asks for a sequence of full
        # length, which the pool need not hold: what does not fit goes undrafted.
        num_blocks = budget // block_bytes
        if num_blocks < 2:
            raise ConfigError(
                f"kv_cache_memory_bytes={budget} is less than two KV blocks of the drafter "
                f"({block_bytes} bytes each); give it at least {2 * block_bytes}."
            )
        cache = self.config.cache_config
        if cache.kv_cache_layout is None:
            layers = get_layers_from_vllm_config(self.config, AttentionLayerBase)
            layouts = get_supported_kv_cache_layouts(
                {layer.get_attn_backend() for layer in layers.values()}
            )
            cache.kv_cache_layout = layouts[0].name
        cache.num_gpu_blocks_override = num_blocks
        model = self.config.model_config
        full_length = model.max_model_len
        model.max_model_len = min(full_length, (num_blocks - 1) * layer.block_size)
        try:
            return plan_kv_cache(self.config, spec, budget)
        finally:
            model.max_model_len = full_length

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
