# SPDX-License-Identifier: Apache-2.0
"""Configuration hooks in vLLM's front end: our methods in `--speculative-config`.

`EngineArgs.create_speculative_config` is wrapped. Where the user asks for one of our methods, our
keys are taken out, the rest is rewritten to vLLM's `custom_class`, and the original builds
`HeteroSpeculativeConfig` from it; every other configuration goes to the original untouched.
"""

import argparse
import logging
from typing import Any, get_args

from vllm_hetero_spec.config import METHODS, ConfigError, HeteroOptions, parse, wants_us
from vllm_hetero_spec.engine.compat import patching

logger = logging.getLogger("vllm.hetero_spec")

_FLAGS = {
    "spec_method": ("--spec-method", "method"),
    "spec_model": ("--spec-model", "model"),
    "spec_tokens": ("--spec-tokens", "num_speculative_tokens"),
}


def install() -> None:
    """Install the configuration hooks in this process. Idempotent, and inert until asked for."""
    from vllm.engine.arg_utils import EngineArgs

    patching.replace(EngineArgs, "create_speculative_config", "configuration", _wrap_create)
    patching.replace(EngineArgs, "add_cli_args", "command line", _wrap_cli)


def _wrap_create(original: Any) -> Any:
    def create_speculative_config(
        self: Any, target_model_config: Any, target_parallel_config: Any
    ) -> Any:
        user = _merged(self)
        if not wants_us(user, _vllm_methods()):
            return original(self, target_model_config, target_parallel_config)
        from vllm_hetero_spec.engine.compat import release

        release()  # refuses an unsupported vLLM before anything is built
        assert user is not None
        options, vllm_keys = parse(
            user, target_tensor_parallel=target_parallel_config.tensor_parallel_size
        )
        _check_parallel(target_parallel_config)
        return _build(
            original, self, target_model_config, target_parallel_config, options, vllm_keys
        )

    return create_speculative_config


def _wrap_cli(original: Any) -> Any:
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = original(parser)
        for action in parser._actions:
            if "--spec-method" in action.option_strings and action.choices is not None:
                action.choices = [*action.choices, *METHODS]
        return parser

    return add_cli_args


def _merged(args: Any) -> dict[str, Any] | None:
    """`--speculative-config` with the `--spec-*` flags laid over it, as vLLM merges them."""
    user = dict(args.speculative_config or {})
    for attribute, (flag, key) in _FLAGS.items():
        value = getattr(args, attribute)
        if value is None:
            continue
        if key in user:
            raise ConfigError(f"{flag} and {key!r} in --speculative-config exclude each other.")
        user[key] = value
    return user or None


def _vllm_methods() -> tuple[str, ...]:
    from vllm.config.speculative import SpeculativeMethod

    def leaves(literal: Any) -> list[str]:
        return [x for a in get_args(literal) for x in ([a] if isinstance(a, str) else leaves(a))]

    return tuple(leaves(SpeculativeMethod))


def _check_parallel(parallel: Any) -> None:
    if parallel.pipeline_parallel_size > 1:
        raise ConfigError(
            f"pipeline_parallel_size={parallel.pipeline_parallel_size} is not supported with "
            f"{_listed_methods()}; use tensor or data parallelism."
        )


def _listed_methods() -> str:
    return " / ".join(METHODS)


def _build(
    original: Any,
    args: Any,
    target: Any,
    parallel: Any,
    options: HeteroOptions,
    vllm_keys: dict[str, Any],
) -> Any:
    from vllm_hetero_spec.engine.metrics import transport as metrics
    from vllm_hetero_spec.engine.seam import cache_salt as salt
    from vllm_hetero_spec.engine.seam.drafter_config import drafter_model_config
    from vllm_hetero_spec.engine.seam.spec_config import PROPOSER, HeteroSpeculativeConfig
    from vllm_hetero_spec.engine.seam.tokenizers import check_pair

    # The original rewrites these attributes; a second create_engine_config() must see the user's.
    saved = {name: getattr(args, name) for name in ("speculative_config", *_FLAGS)}
    args.spec_method = args.spec_model = args.spec_tokens = None
    args.speculative_config = {
        "method": "custom_class",
        "model": PROPOSER,
        "num_speculative_tokens": options.num_speculative_tokens,
        **vllm_keys,
    }
    try:
        plain = original(args, target, parallel)
        entries = args.speculative_config
    finally:
        for name, value in saved.items():
            setattr(args, name, value)
    del plain  # built for vLLM's own checks; ours carries the options as well
    config = HeteroSpeculativeConfig(
        hetero=options, drafter_model_config=drafter_model_config(options, target), **entries
    )
    check_pair(target, config.drafter_model_config, options)
    salt.install()
    metrics.require()
    logger.info(
        "Speculative decoding by %s: drafter %s, lookahead %d target tokens, verification exact.",
        options.method,
        options.model,
        options.num_speculative_tokens,
    )
    return config
