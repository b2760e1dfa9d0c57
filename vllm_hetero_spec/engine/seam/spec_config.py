# SPDX-License-Identifier: Apache-2.0
"""vLLM's SpeculativeConfig with the options of this package.

vLLM treats it as a `custom_class` configuration, without lookahead slots in the target's KV cache.
Our options and the drafter's ModelConfig are pickled with it for spawned workers and Ray. Never use
`dataclasses.replace` on it: vLLM's checks refuse the `prompt_lookup_max=0` that `custom_class`
sets.
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
    """A `custom_class` configuration with the drafter's configuration.

    Attributes:
        hetero: Validated options of the user.
        drafter_model_config: The drafter's; `draft_model_config` is the target's, as `custom_class`
            requires.
        takes_all_params: True if drafts are verified under every sampling parameter; set by
            `request_params`.
        plugin_version: Version of this package in the front end.
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
        """Restore the state in another process, such as a worker, and install the hooks there.

        vLLM loads no plugins in a replica of Ray Serve, which receives a finished configuration.

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
        """Return a hash that includes the drafter and all options.

        vLLM's startup plan uses it to reuse the measured KV cache memory of an earlier start.
        """
        parts = super().compute_hash(), self.drafter_model_config.compute_hash(), self.hetero
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def __repr__(self) -> str:
        return (
            f"HeteroSpeculativeConfig(method={self.hetero.method!r}, model={self.hetero.model!r}, "
            f"num_spec_tokens={self.num_speculative_tokens})"
        )


def _concerns_users(record: logging.LogRecord) -> bool:
    """Return False for vLLM's warning to authors of proposers; we check the release at startup."""
    return "custom class-based proposer" not in record.getMessage()


def install_hooks() -> None:
    """Install all hooks of an engine with our drafter in this process. Idempotent."""
    from vllm_hetero_spec.engine.seam import (
        async_scheduling,
        cache_salt,
        request_params,
        runner_choice,
    )
    from vllm_hetero_spec.engine.trees import scratch

    for part in (cache_salt, request_params, runner_choice, scratch):
        part.install()
    async_scheduling.install(scratch.reserve_rows)
