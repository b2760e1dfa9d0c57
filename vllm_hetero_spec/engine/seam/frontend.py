# SPDX-License-Identifier: Apache-2.0
"""Configuration hooks in vLLM's front end, which add our methods to `--speculative-config`.

If the user names one of our methods, the wrapped `EngineArgs.create_speculative_config` builds a
`HeteroSpeculativeConfig`, which vLLM treats as a `custom_class` configuration. The original method
handles every other configuration.
"""

import argparse
import logging
from typing import TYPE_CHECKING, Any, get_args

from vllm_hetero_spec.engine.compat import patching, releases
from vllm_hetero_spec.errors import ConfigError
from vllm_hetero_spec.options import DEFAULT_METHOD, METHODS, FuzzyOptions, parse, wants_us

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig, VllmConfig
    from vllm.engine.arg_utils import EngineArgs

logger = logging.getLogger("vllm.hetero_spec")

_FLAGS = {
    "spec_method": ("--spec-method", "method"),
    "spec_model": ("--spec-model", "model"),
    "spec_tokens": ("--spec-tokens", "num_speculative_tokens"),
}


def install() -> None:
    """Install the configuration hooks in this process. Idempotent; inert for other methods."""
    from vllm.config import SpeculativeConfig
    from vllm.engine.arg_utils import EngineArgs

    patching.wrap(EngineArgs, "create_speculative_config", "configuration", _create_config)
    patching.wrap(EngineArgs, "create_engine_config", "configuration", _check_engine)
    patching.wrap(EngineArgs, "add_cli_args", "command line", _add_methods)
    name = "verify_equal_vocab_size_if_draft_model"
    patching.wrap(SpeculativeConfig, name, "vocabularies", _name_method)


def _create_config(
    original: patching.Function,
    self: "EngineArgs",
    target_model_config: "ModelConfig",
    target_parallel_config: "ParallelConfig",
) -> "SpeculativeConfig | None":
    user = _merged(self)
    if not user or not wants_us(user, _vllm_methods()):
        return original(self, target_model_config, target_parallel_config)
    config = _build(user, target_model_config, target_parallel_config)
    if getattr(self.kv_transfer_config, "kv_role", None) == "kv_producer":
        logger.info("No drafter is loaded, because this instance only prefills (kv_producer).")
        return None
    return config


def _check_engine(
    original: patching.Function, self: "EngineArgs", *args: Any, **kwargs: Any
) -> "VllmConfig":
    config: VllmConfig = original(self, *args, **kwargs)
    if hasattr(config.speculative_config, "hetero"):
        check_stages(config)  # needs the choice of the model runner
    return config


def check_stages(config: "VllmConfig") -> None:
    """Raise ConfigError for pipeline stages that are not supported.

    Model Runner V1 schedules drafts before it has sampled the token in front of them, so its output
    would be wrong. Model Runner V2 sends sampled tokens and drafts between stages, but only with
    asynchronous scheduling. The drafter runs on the last stage.
    """
    stages = config.parallel_config.pipeline_parallel_size
    if stages == 1:
        return
    if not config.use_v2_model_runner:
        raise ConfigError(
            f"pipeline_parallel_size={stages} is not supported on Model Runner V1; use tensor "
            "parallelism, or Model Runner V2 (VLLM_USE_V2_MODEL_RUNNER=1) with asynchronous "
            "scheduling."
        )
    if not config.scheduler_config.async_scheduling:
        raise ConfigError(
            f"pipeline_parallel_size={stages} on Model Runner V2 needs asynchronous "
            "scheduling, and steps are scheduled one after the other, for which the log gives "
            "the reason; remove that, or use tensor parallelism."
        )


def _add_methods(
    original: patching.Function, parser: argparse.ArgumentParser
) -> argparse.ArgumentParser:
    parser = original(parser)
    for action in parser._actions:
        if "--spec-method" in action.option_strings and action.choices is not None:
            action.choices = [*action.choices, *METHODS]
    return parser


def _name_method(original: patching.Function, self: "SpeculativeConfig") -> None:
    try:
        original(self)
    except ValueError as error:
        raise ValueError(
            f'{error} "method": "{DEFAULT_METHOD}" in the speculative configuration '
            "(vllm_hetero_spec) serves such pairs."
        ) from error


def _merged(args: "EngineArgs") -> dict[str, Any]:
    """Merge the `--spec-*` flags into `--speculative-config`, as vLLM does."""
    user = dict(args.speculative_config or {})
    for attribute, (flag, key) in _FLAGS.items():
        value = getattr(args, attribute, None)
        if value is None:
            continue
        if key in user:
            raise ConfigError(f"{flag} and {key!r} in --speculative-config exclude each other.")
        user[key] = value
    return user


def _vllm_methods() -> tuple[str, ...]:
    from vllm.config import speculative

    return get_args(getattr(speculative, "SpeculativeMethod", None))  # Literals in it are flat


def _build(
    user: dict[str, Any], target: "ModelConfig", parallel: "ParallelConfig"
) -> "SpeculativeConfig":
    releases.installed()  # refuses an unsupported vLLM before anything is built
    options = parse(user, target_tensor_parallel=parallel.tensor_parallel_size)
    if parallel.enable_elastic_ep:
        raise ConfigError(
            f"enable_elastic_ep is not supported with {' / '.join(METHODS)}: engines that come "
            "later would have no drafter; leave it out, or serve without speculation."
        )
    if parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1:
        # Every rank then has its own scheduler, and only one scheduler would receive the drafts.
        raise ConfigError(
            f"external_launcher with {parallel.world_size} ranks to an engine is not supported "
            f"with {' / '.join(METHODS)}; give each engine one rank, leave the launching to vLLM "
            '("mp" or "ray"), or serve without speculation.'
        )
    for key in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, key) > 1:
            # Attention would exchange the drafter's KV with ranks that do not draft, and hang.
            raise ConfigError(
                f"{key}={getattr(parallel, key)} is not supported with {' / '.join(METHODS)}: the "
                "drafter's KV is not split over ranks; leave it out, or serve without speculation."
            )
    if "LongcatFlashNgramForCausalLM" in target.architectures:
        # Its embeddings depend on all rows of the last steps, and keep those of rejected drafts.
        raise ConfigError(
            f"LongcatFlashNgramForCausalLM targets are not supported with {' / '.join(METHODS)}: "
            "vLLM does not undo their state after rejected drafts; serve without speculation."
        )
    from vllm_hetero_spec.engine.metrics import transport as metrics
    from vllm_hetero_spec.engine.seam import request_params
    from vllm_hetero_spec.engine.seam.drafter_model import drafter_model_config, parallel_mask
    from vllm_hetero_spec.engine.seam.spec_config import (
        PROPOSER,
        HeteroSpeculativeConfig,
        install_hooks,
    )
    from vllm_hetero_spec.engine.seam.tokenizers import check_pair

    drafter = drafter_model_config(options, target)
    parallel_drafter = parallel_mask(drafter, options) is not None
    config = HeteroSpeculativeConfig(
        hetero=options,
        drafter_model_config=drafter,
        method="custom_class",
        model=PROPOSER,
        num_speculative_tokens=options.num_speculative_tokens,
        target_model_config=target,
        target_parallel_config=parallel,
    )
    check_pair(target, config.drafter_model_config, options)
    install_hooks()
    request_params.install_http()
    metrics.require()
    logger.info(
        "Speculative decoding by %s: %s %s, lookahead %d target tokens, verification %s.",
        options.method,
        "parallel drafter" if parallel_drafter else "drafter",
        options.model,
        options.num_speculative_tokens,
        "LOSSY (fuzzy)" if isinstance(options.verification, FuzzyOptions) else "lossless",
    )
    return config
