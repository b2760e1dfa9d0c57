# SPDX-License-Identifier: Apache-2.0
"""What the drafter's own process runs, and on which device or cores."""

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import cloudpickle
import torch
from vllm.config import ModelConfig, VllmConfig
from vllm.transformers_utils.config import maybe_register_config_serialize_by_value

from vllm_hetero_spec.draft.token_map import TokenMap
from vllm_hetero_spec.engine.ahead.cores import checked_cores, free_cores
from vllm_hetero_spec.engine.drafter.round_plan import STEPS_PER_TOKEN
from vllm_hetero_spec.engine.seam.tokenizers import TokenizerPair
from vllm_hetero_spec.errors import ConfigError
from vllm_hetero_spec.options import HeteroOptions

logger = logging.getLogger("vllm.hetero_spec")

# Texts for each request of the largest batch: those of waiting requests are kept as long.
_SLOTS = 2
# Guesses of what the target writes instead of the drafter's chain.
_BRANCHES = 8
# Tokens of a forward on a CPU at most. There one of thousands may take longer than a process may
# show no sign of life.
_CPU_TOKENS = 512


@dataclass(frozen=True)
class Deployment:
    """What a drafter process is to run. See `packed`.

    Attributes:
        vllm_config: The target's, without its layers.
        drafter_config: The drafter's model.
        options: The user's.
        banned: Ids that are never drafted.
        vocab_size: Ids of the drafter's tokenizer.
        ends: Ids after which nothing is drafted.
        device: Of torch.
        cores: Of the CPU, for its threads; none for those of the engine.
        slots: Texts.
        longest: Most drafter tokens of a line behind a text.
        tokens: Which target tokens are proposed, where drafts are drawn; on the host.
        branches: Lines beside the chain of a text.
    """

    vllm_config: VllmConfig
    drafter_config: ModelConfig
    options: HeteroOptions
    banned: frozenset[int]
    vocab_size: int
    ends: frozenset[int]
    device: str
    cores: Sequence[int]
    slots: int
    longest: int
    tokens: TokenMap | None = None
    branches: int = _BRANCHES

    @property
    def most_rows(self) -> int:
        """Lines of a forward."""
        return int(self.vllm_config.scheduler_config.max_num_seqs) + self.branches

    @property
    def most_tokens(self) -> int:
        """Tokens of a forward."""
        most = int(self.vllm_config.scheduler_config.max_num_batched_tokens)
        return min(most, _CPU_TOKENS) if torch.device(self.device).type == "cpu" else most

    @property
    def table_shape(self) -> tuple[int, int, int, int]:
        """Texts, most tokens of a line, lines beside a chain, and most drawn tokens of a line."""
        # Each is a target token or more: of two drafts, and of the tokens between and behind them.
        drawn = 2 * (self.options.num_speculative_tokens + 1) * (self.tokens is not None)
        return self.slots, self.longest, self.branches, drawn

    @classmethod
    def of(
        cls,
        vllm_config: VllmConfig,
        drafter_config: ModelConfig,
        options: HeteroOptions,
        pair: TokenizerPair,
        tokens: TokenMap | None,
        beside: torch.device,
    ) -> "Deployment":
        """What the drafter process of an engine runs.

        Args:
            vllm_config: The worker's configuration.
            drafter_config: The drafter's model.
            options: The user's.
            pair: The two tokenizers.
            tokens: Which target tokens are proposed, where drafts are drawn.
            beside: The target's device.

        Raises:
            ConfigError: The drafter is to run on a device of another type, on none, on cores
                that are not there, or on a CPU whose cores are all the target's.
        """
        where = str(beside if options.drafter_device is None else options.drafter_device)
        on_cores = where[:1].isdigit()
        if not on_cores and where.partition(":")[0] != beside.type:
            raise ConfigError(
                f"drafter_device is {where!r}, and the target runs on {beside}: a drafter runs on "
                f'a device of the same type, as "{beside.type}"; give one, or CPU cores as "2-3".'
            )
        cores = checked_cores(where) if on_cores else []
        if not on_cores and beside.type == "cpu" and (cores := free_cores(vllm_config)):
            logger.info("Drafter process: CPU cores %s, which the target leaves free.", cores)
        return cls(
            vllm_config=_without_layers(vllm_config),
            drafter_config=drafter_config,
            options=options,
            banned=pair.bridge.banned,
            vocab_size=pair.drafter.vocab_size,
            ends=pair.bridge.drafter_eos,
            device=str(beside) if on_cores else where,
            cores=cores,
            slots=_SLOTS * vllm_config.scheduler_config.max_num_seqs,
            longest=STEPS_PER_TOKEN * (options.num_speculative_tokens + 1),
            tokens=tokens,
        )


def packed(deployment: Deployment) -> bytes:
    """Pickled, with the classes that come from a model's repository: nobody else has them."""
    maybe_register_config_serialize_by_value()
    made: bytes = cloudpickle.dumps(deployment)
    return made


def _without_layers(config: VllmConfig) -> VllmConfig:
    """A copy of a worker's configuration that can be sent: its layers are in it, with their KV.

    Nor has it what is settled later of the target's KV: the drafter settles its own.
    """
    compilation = copy.copy(config.compilation_config)
    compilation.static_forward_context = {}
    compilation.static_all_moe_layers = []
    config = copy.copy(config)
    config.compilation_config, config.cache_config = compilation, copy.copy(config.cache_config)
    return config
