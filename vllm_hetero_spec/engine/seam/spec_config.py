# SPDX-License-Identifier: Apache-2.0
"""vLLM's SpeculativeConfig with our options beside it.

To vLLM it is an ordinary `custom_class` configuration, which fixes what drafting may assume: no
look-ahead slots in the target's KV cache. `runner_choice` says which model runner it gets,
`async_scheduling` whether steps are scheduled ahead. Our options and the drafter's ModelConfig
travel with it through pickling, spawned workers and Ray. Never `dataclasses.replace` it: vLLM's own
checks refuse the `prompt_lookup_max=0` that `custom_class` sets.
"""

import hashlib
import logging
import platform

from pydantic import SkipValidation
from vllm.config import ModelConfig, SpeculativeConfig, speculative
from vllm.config.utils import config

from vllm_hetero_spec import __version__, register
from vllm_hetero_spec.errors import ConfigError
from vllm_hetero_spec.options import HeteroOptions

PROPOSER = "vllm_hetero_spec.engine.proposer.build"


@config
class HeteroSpeculativeConfig(SpeculativeConfig):
    """A `custom_class` configuration that knows the drafter.

    Attributes:
        hetero: The user's validated options.
        drafter_model_config: The drafter as vLLM sees a model. `draft_model_config` stays the
            target's, as `custom_class` demands.
        takes_all_params: Whether drafts are verified under every sampling parameter; set where
            requests are checked (`params_check`).
        plugin_version: Of this package, where the configuration was made.
    """

    hetero: SkipValidation[HeteroOptions] = None  # type: ignore[assignment]
    drafter_model_config: SkipValidation[ModelConfig] = None
    takes_all_params: bool = False
    plugin_version: str = __version__

    def __post_init__(self) -> None:
        speculative.logger.addFilter(_concerns_users)
        try:
            super().__post_init__()
        finally:
            speculative.logger.removeFilter(_concerns_users)

    def __setstate__(self, state: dict[str, object]) -> None:
        """Unpickled in another process (engine core, worker): install there what it needs.

        A replica of Ray Serve gets its configuration ready-made, and vLLM loads no plugin there.

        Raises:
            ConfigError: This process has another version of this package.
        """
        self.__dict__.update(state)
        if self.plugin_version != __version__:
            raise ConfigError(
                f"vllm_hetero_spec is {__version__} in this process on {platform.node()} and "
                f"{self.plugin_version} where the engine was configured; install one version on "
                "all nodes."
            )
        register()
        install_hooks()

    def compute_hash(self) -> str:
        """Of the drafter and all options too.

        By it vLLM knows how much memory the KV cache had at an earlier start (its startup plan).
        """
        parts = super().compute_hash(), self.drafter_model_config.compute_hash(), self.hetero
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def __repr__(self) -> str:
        return (
            f"HeteroSpeculativeConfig(method={self.hetero.method!r}, model={self.hetero.model!r}, "
            f"num_spec_tokens={self.num_speculative_tokens})"
        )


def _concerns_users(record: logging.LogRecord) -> bool:
    """False for vLLM's warning to authors of proposers: supported releases are checked at start."""
    return "custom class-based proposer" not in record.getMessage()


def install_hooks() -> None:
    """Install in this process all that an engine with a drafter of ours needs. Idempotent."""
    from vllm_hetero_spec.engine.seam import (
        async_scheduling,
        cache_salt,
        params_check,
        runner_choice,
    )
    from vllm_hetero_spec.engine.trees import scratch

    for part in (cache_salt, params_check, runner_choice, async_scheduling, scratch):
        part.install()
