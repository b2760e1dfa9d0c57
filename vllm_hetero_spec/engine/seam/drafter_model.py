# SPDX-License-Identifier: Apache-2.0
"""Drafter model configuration, read and checked in the front end before weights are loaded."""

import contextlib
import logging
import os
import re
from dataclasses import replace
from typing import Any

from huggingface_hub import constants, snapshot_download
from pydantic import ValidationError
from vllm.config import AttentionConfig, CacheConfig, LoadConfig, ModelConfig, VllmConfig
from vllm.model_executor.models.registry import _SPECULATIVE_DECODING_MODELS

from vllm_hetero_spec.errors import ConfigError, one_line
from vllm_hetero_spec.inputs.model_folder import mask_token
from vllm_hetero_spec.inputs.weights import NO_GGUF, only_gguf
from vllm_hetero_spec.options import DEFAULT_CONTEXT, HeteroOptions

logger = logging.getLogger("vllm.hetero_spec")

_MODEL_FILES = "config.json", "params.json"  # vLLM reads the architecture from one of these

_OPTIONAL = "quantization", "dtype", "revision"  # keys that may make a drafter unusable

# Margin over the measured ratio of drafter to target tokens, because the ratio depends on the text.
# The drafter reads only the end of a longer request.
_LENGTH_SLACK = 1.5


def drafter_model_config(options: HeteroOptions, target: ModelConfig) -> ModelConfig:
    """Read the drafter's configuration, so that a bad drafter fails before weights are loaded.

    The default dtype is the target's if the drafter supports it, else the drafter's own.

    Raises:
        ConfigError: The drafter cannot be read, or cannot draft.
    """
    _check_kernels(options)
    _check_folders(options)
    config, failure = _first_read(options, target)
    if config is not None:
        _check_drafts(config, options.model)
        if failure is not None:
            logger.info(
                "The drafter runs in %s, the target in %s: %s.",
                config.dtype,
                target.dtype,
                first_sentence(failure),
            )
        return config
    assert failure is not None
    _check_values(options, failure)
    for key in _OPTIONAL:
        left_out: dict[str, Any] = {key: None}
        without = replace(options, **left_out)
        if without != options and _first_read(without, target)[0] is not None:
            raise ConfigError(
                f"{key} is {getattr(options, key)!r}: {first_sentence(failure)}; leave it out, "
                f"because the drafter {options.model!r} can be read without it."
            ) from failure
    readable = None
    with contextlib.suppress(OSError, ValueError):
        readable = _read(options, target, "auto", "auto")
    if readable is not None:
        _check_drafts(readable, options.model)
    why = (
        NO_GGUF
        if only_gguf(options.model)
        else f"{first_sentence(failure)}; give a folder or Hugging Face name of a causal language "
        "model that this vLLM supports"
    )
    raise ConfigError(f"the drafter {options.model!r} cannot be used: {why}.") from failure


def _first_read(
    options: HeteroOptions, target: ModelConfig
) -> tuple[ModelConfig | None, Exception | None]:
    """Return the configuration in the first usable dtype, and the first error of other dtypes."""
    failure: Exception | None = None
    for dtype in (options.dtype,) if options.dtype else (target.dtype, "auto"):
        try:
            config = _read(options, target, "draft", dtype)
            VllmConfig.get_quantization_config(config, LoadConfig())  # raises if unsupported
        except (OSError, ValueError, TypeError) as error:  # TypeError: no quantization in its files
            failure = failure or error
            if "float" not in str(error):  # the error is not about the dtype
                break
        else:
            return config, failure
    return None, failure


def _read(options: HeteroOptions, target: ModelConfig, runner: str, dtype: Any) -> ModelConfig:
    trust, revision = options.trust_remote_code, options.debug.tokenizer_revision
    revision = revision or options.revision
    return ModelConfig(
        model=_here(options.model, options.revision),
        tokenizer=_here(options.tokenizer or options.model, revision),
        tokenizer_mode=options.tokenizer_mode,
        runner=runner,
        trust_remote_code=target.trust_remote_code if trust is None else trust,
        dtype=dtype,
        seed=target.seed,
        revision=options.revision,
        tokenizer_revision=revision,
        quantization=options.quantization,
        language_model_only=True,  # the drafter reads only text
    )


def _here(name: str, revision: str | None) -> str:
    """Return a model's folder in the hub's cache if the hub is offline, as vLLM does for targets.

    With a hub name, vLLM would request the metadata of the weights, retry, and log errors.
    """
    if not constants.HF_HUB_OFFLINE or os.path.exists(name):
        return name
    try:
        folder: str = snapshot_download(name, revision=revision, local_files_only=True)
    except (OSError, ValueError):
        return name  # vLLM reports the error
    return folder


def _check_kernels(options: HeteroOptions) -> None:
    for key, part, field in (
        ("attention_backend", AttentionConfig, "backend"),
        ("kv_cache_dtype", CacheConfig, "cache_dtype"),
    ):
        if (found := getattr(options, key)) is None:
            continue
        try:
            part(**{field: found})
        except ValueError as error:
            _, _, why = one_line(error).partition(f" {field} ")
            why = why.removeprefix("Value error, ").partition(" [type=")[0].rstrip(".")
            raise ConfigError(f"{key} is {found!r}: {why}.") from error


def _check_values(options: HeteroOptions, error: Exception) -> None:
    """Raise ConfigError if the error is about the value of one option, not about the drafter."""
    for each in error.errors() if isinstance(error, ValidationError) else []:
        key = str(each["loc"][0]) if each["loc"] else ""
        if getattr(options, key, None) is not None:
            raise ConfigError(f"{key} is {getattr(options, key)!r}: {each['msg']}.") from error


def _check_folders(options: HeteroOptions) -> None:
    """Raise ConfigError for a missing folder or model; vLLM would report a bad repository name."""
    for what, name in (("drafter", options.model), ("drafter's tokenizer", options.tokenizer)):
        if str(name).startswith(("/", "./", "../")) and not os.path.exists(str(name)):
            raise ConfigError(
                f"the {what} {name!r} cannot be used: there is no such folder; give a folder or "
                "Hugging Face name."
            )
    files = (os.path.join(options.model, name) for name in _MODEL_FILES)
    if os.path.isdir(options.model) and not any(map(os.path.exists, files)):
        why = (
            NO_GGUF
            if only_gguf(options.model)
            else f"that folder has no {_MODEL_FILES[0]}; give one that has, in a hub's cache "
            "snapshots/REVISION, or a Hugging Face name"
        )
        raise ConfigError(f"the drafter {options.model!r} cannot be used: {why}.")


def _check_drafts(config: ModelConfig, name: str) -> None:
    what, kind = f"the drafter {name!r}", ", ".join(config.architectures)
    if config.runner_type == "pooling" or config.is_encoder_decoder:
        raise ConfigError(
            f"{what} is {kind}, which does not "
            "generate text left to right; a drafter must be a decoder-only causal language model."
        )
    if any(name in _SPECULATIVE_DECODING_MODELS for name in config.architectures):  # as EAGLE, MTP
        raise ConfigError(
            f"{what} is {kind}, which reads the hidden states of one target and no text; give a "
            "causal language model, or a parallel drafter (PARD), or use vLLM's own method for it."
        )
    if config.is_hybrid or config.is_attention_free:
        raise ConfigError(
            f"{what} is {kind}, which keeps a recurrent state, and rejected drafts would stay in "
            "it; supported: attention in all layers, full, or some of them with a sliding window."
        )


def parallel_mask(config: ModelConfig, options: HeteroOptions) -> int | None:
    """Return the mask token of a drafter that drafts in parallel; None for an ordinary drafter.

    Raises:
        ConfigError: The drafter or an option does not fit to parallel drafting.
    """
    what, mask = f"the drafter {options.model!r}", mask_token(config.hf_text_config)
    if options.parallel_drafting is False or (mask is None and not options.parallel_drafting):
        return None
    if mask is None:
        raise ConfigError(
            f"parallel_drafting is true, but the config of {what} names no mask token (pard_token, "
            "ptd_token_id or mask_token_id); leave it out, or give a parallel drafter."
        )
    rows = config.get_vocab_size()
    if not 0 <= mask < rows:
        raise ConfigError(
            f"{what} has the mask token {mask} and embeddings of {rows} tokens; give a complete "
            'parallel drafter, or "parallel_drafting": false to run it as an ordinary one.'
        )
    if options.method == "slrs":
        raise ConfigError(
            f"method 'slrs' looks ahead token by token, and {what} is a parallel drafter, which "
            'writes all tokens of a draft at once; use "hetero", or add "parallel_drafting": false '
            "to run it as an ordinary drafter."
        )
    return mask


def first_sentence(error: Exception) -> str:
    """Return the message of an error of vLLM, pydantic or transformers, without its frame."""
    text = one_line(error)
    text = re.sub(r"^\d+ validation errors? for \w+ (Value error, )?", "", text)
    ends = r"[.;] (?=[A-Z])|(?: from one of)?: \(1\)| \[type=|\.$"
    return re.split(ends, text, maxsplit=1)[0][:300]


def bound_context(
    drafter: ModelConfig, options: HeteroOptions, target_len: int, ratio: float
) -> None:
    """Shorten `drafter.max_model_len` to the context that the drafter reads.

    The default covers `target_len` target tokens, up to `DEFAULT_CONTEXT`. `ratio` is the number of
    drafter tokens per target token on ordinary text.

    Raises:
        ConfigError: `context` is longer than the drafter supports.
    """
    longest, wanted = drafter.max_model_len, options.context
    if wanted is None:
        need = int(target_len * ratio * _LENGTH_SLACK) + 4 * options.num_speculative_tokens
        wanted = min(longest, need, DEFAULT_CONTEXT)
    if wanted > longest:
        raise ConfigError(
            f"context is {wanted}, but the drafter {options.model!r} reads at most {longest} "
            "tokens; leave it out or give less."
        )
    drafter.max_model_len = wanted
