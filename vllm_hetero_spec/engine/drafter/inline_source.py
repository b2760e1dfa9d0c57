# SPDX-License-Identifier: Apache-2.0
"""Make drafts in the worker process, between two steps of the target."""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from vllm.config import ModelConfig, VllmConfig

from vllm_hetero_spec.draft.draft import Draft
from vllm_hetero_spec.draft.token_map import most_rows
from vllm_hetero_spec.engine.drafter.decode_loop import Drafter
from vllm_hetero_spec.engine.drafter.draft_batch import DraftBatchRunner
from vllm_hetero_spec.engine.drafter.kv_pool import KVPool
from vllm_hetero_spec.engine.drafter.method import sampling_of
from vllm_hetero_spec.engine.drafter.model import DrafterModel
from vllm_hetero_spec.engine.drafter.parallel import make_parallel, without_mask
from vllm_hetero_spec.engine.drafter.recording import Recording, idle_prefill, idle_step
from vllm_hetero_spec.engine.drafter.requests import RequestState
from vllm_hetero_spec.engine.drafter.slrs_spans import SlrsSpans
from vllm_hetero_spec.engine.drafter.tasks import Control, DraftTask
from vllm_hetero_spec.engine.drafter.token_healing import TokenHealing
from vllm_hetero_spec.engine.drafter.token_picking import PickConfig
from vllm_hetero_spec.engine.metrics.counters import DraftStats
from vllm_hetero_spec.engine.seam.drafter_config import (
    drafter_vllm_config,
    drafting_mode,
    kv_budget,
)
from vllm_hetero_spec.engine.seam.drafter_model import parallel_mask
from vllm_hetero_spec.engine.seam.parallel_state import IsolatedParallelState
from vllm_hetero_spec.engine.seam.tokenizers import TokenizerPair
from vllm_hetero_spec.options import HeteroOptions
from vllm_hetero_spec.slrs.slrs import SlrsMethod

if TYPE_CHECKING:
    from vllm.distributed.parallel_state import GroupCoordinator

# tokens; candidates per position that may become nodes of a tree. The probability of less likely
# ones is too small for a node of any tree.
_BESIDE = 12


class InlineSource:
    """A `DraftSource` whose drafter runs in the worker process, on the target's device.

    Args:
        group: The target's tensor parallel group.
        likeliest: Number of top drafter tokens that sampling is limited to; None for all.

    Raises:
        ConfigError: The drafter's KV cache cannot be built.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        drafter_config: ModelConfig,
        options: HeteroOptions,
        pair: TokenizerPair,
        device: torch.device,
        stats: DraftStats,
        group: "GroupCoordinator",
        likeliest: int | None,
    ) -> None:
        solo = group.world_size > 1 and options.tensor_parallel == "rank0"
        mask, lookahead = parallel_mask(drafter_config, options), options.num_speculative_tokens
        places = 1  # tokens that a forward predicts; as many may be read beside the context
        if mask is not None:
            places += math.ceil(lookahead * max(1.0, pair.bridge.tokens_ratio))
        config = drafter_vllm_config(vllm_config, drafter_config, options, solo=solo, added=places)
        self._alone = IsolatedParallelState(vllm_config, config, solo=solo)
        # The drafter uses vLLM's sleep mode memory if the target does.
        config.model_config.enable_cumem_allocator = vllm_config.model_config.enable_cumem_allocator
        length, scheduler = drafter_config.max_model_len, vllm_config.scheduler_config
        # All ranks verify with the same random numbers. Building the drafter must not consume any,
        # because it may be built on one rank only.
        used = [device] if device.type != "cpu" else []
        with self._alone, torch.random.fork_rng(used, device_type=device.type):
            budget_of = partial(kv_budget, options, vllm_config, length)
            model = DrafterModel(config, device, budget_of)
        width = vllm_config.model_config.get_vocab_size()
        ranks = 1 if solo else group.world_size
        sampling = sampling_of(options, pair, width, device, ranks, likeliest, merges=mask is None)
        self.draws = sampling is not None
        rules = PickConfig(
            vocab_size=pair.drafter.vocab_size,
            banned=torch.tensor(sorted(pair.bridge.banned), dtype=torch.long, device=device),
            ends=pair.bridge.drafter_eos,
            sampling=sampling,
            confidences=options.controller != "fixed",
            beside=_BESIDE if options.tree_nodes else 0,
            back=pair.token_healing,
        )
        if mask is not None:
            rules = without_mask(rules, mask)
        self.drafter = Drafter(model, rules, lookahead, scheduler.max_num_seqs)
        if mask is not None:
            make_parallel(self.drafter, mask, places)
        self.drafter.may_wait = scheduler.async_scheduling  # `begin` and `finish` run together
        self.max_length, self.most_steps = self.drafter.max_length, self.drafter.most_steps
        # vLLM's sleep mode allocator keeps freed memory, so that graphs could not use it.
        measured = vllm_config.cache_config.kv_cache_memory_bytes is None
        measured = measured and not vllm_config.model_config.enable_cumem_allocator
        mode = drafting_mode(options, vllm_config)
        rows = scheduler.max_num_seqs * lookahead if self.draws else 0
        later = 4 * width * min(rows, most_rows(width))  # bytes; the draft_probs of a round
        self._recording = Recording(self.drafter, mode, measured=measured, later=later)
        self.pool = KVPool(model.num_blocks, model.block_size, model.clean_blocks)
        budget = scheduler.max_num_batched_tokens
        self._healing = TokenHealing(self.drafter, pair.bridge)
        self.drafter.extensions.append(self._healing)
        if isinstance(sampling, SlrsMethod):
            self.drafter.extensions.append(SlrsSpans(self.drafter, self.pool, sampling, budget))
        self.rounds = DraftBatchRunner(pair.bridge, self.drafter, self.pool, stats, budget)
        with self._alone:
            self._recording.read_most(budget, scheduler.max_num_seqs)

    @property
    def early(self) -> bool:
        """True on a device. On a CPU a round would delay the output of the step's own tokens."""
        return self.drafter.waits

    def begin(
        self, tasks: Sequence[DraftTask], outside: Iterator[RequestState], control: Control
    ) -> None:
        with self._alone:
            self.rounds.begin(tasks, outside, control)

    def finish(self) -> list[Draft]:
        with self._alone:
            return self.rounds.finish()

    def record(self) -> int:
        with self._alone:
            return self._recording.record()

    def step(self, batch: int) -> None:
        with self._alone:
            idle_step(self.drafter, batch)

    def read(self, tokens: int) -> None:
        with self._alone:
            idle_prefill(self.drafter, tokens)

    def reset(self) -> None:
        self.pool.reset()
        self._healing.choosers = {}

    def sleep(self, level: int) -> None:
        """Do nothing: vLLM's allocator keeps the drafter's weights at every sleep level."""

    def wake(self) -> None:
        self.drafter.model.clear()

    def close(self) -> None:
        pass

    def export_to(self, stats: DraftStats) -> None:
        stats.kv_blocks_held = self.pool.held
        stats.reused_tokens = self.pool.reused_tokens
        stats.forward_seconds = self.drafter.stopwatch.seconds
        stats.forwards = self.drafter.forwards
        stats.graph_forwards = self.drafter.steps.replays
        stats.restarted_rounds = self.drafter.restarted_rounds
        stats.shortened_drafts = self._healing.shortened_drafts
