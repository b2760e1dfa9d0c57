# SPDX-License-Identifier: Apache-2.0
"""Configuration of the drafter process, with its device or CPU cores."""

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

# Slots per request of the largest batch. Waiting requests keep theirs while there are enough.
_SLOTS = 2
# Maximum number of branches beside each chain.
_BRANCHES = 8
# Maximum tokens of a forward on a CPU, where thousands may take longer than `supervisor.SILENCE`.
_CPU_TOKENS = 512


@dataclass(frozen=True)
class Deployment:
    """Everything that a drafter process needs. `packed` serializes it.

    Attributes:
        vllm_config: The configuration of the target's worker, without the target's layers.
        banned: Drafter ids that are never drafted.
        ends: Drafter ids that end a draft.
        cores: CPU cores for its threads; empty to run on those of the engine.
        slots: Maximum number of requests.
        longest: Maximum drafter tokens of a continuation.
        tokens: Target token that each drafter token proposes first, on the host. None if all drafts
            are greedy.
        branches: Maximum number of branches beside a chain.
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
        """Maximum sequences of a forward."""
        return int(self.vllm_config.scheduler_config.max_num_seqs) + self.branches

    @property
    def most_tokens(self) -> int:
        """Maximum tokens of a forward."""
        most = int(self.vllm_config.scheduler_config.max_num_batched_tokens)
        return min(most, _CPU_TOKENS) if torch.device(self.device).type == "cpu" else most

    @property
    def table_shape(self) -> tuple[int, int, int, int]:
        """Arguments of `DraftTable`: slots, longest, branches, drawn."""
        # A sampled token proposes at least one target token. The table has room for two drafts, and
        # for the target's own tokens between and after them.
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
        """Build the deployment of an engine; `beside` is the target's device.

        Raises:
            ConfigError: `drafter_device` is no device of the target's type, or names cores that are
                not available; or a target on a CPU uses all cores.
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
    """Pickle a deployment. Classes from a model's repository are pickled by value."""
    maybe_register_config_serialize_by_value()
    made: bytes = cloudpickle.dumps(deployment)
    return made


def _without_layers(config: VllmConfig) -> VllmConfig:
    """Copy a worker's configuration without the layers and their KV, which cannot be pickled.

    Later changes to the target's cache configuration do not reach the copy.
    """
    compilation = copy.copy(config.compilation_config)
    compilation.static_forward_context = {}
    compilation.static_all_moe_layers = []
    config = copy.copy(config)
    config.compilation_config, config.cache_config = compilation, copy.copy(config.cache_config)
    return config
