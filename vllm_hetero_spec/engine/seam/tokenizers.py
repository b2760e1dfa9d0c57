# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of target and drafter, and their bridge, from vLLM's model configurations."""

import copy
import logging
from typing import Any, NamedTuple

import numpy as np
from vllm.config import ModelConfig
from vllm.tokenizers.registry import cached_tokenizer_from_config

from vllm_hetero_spec.engine.seam.drafter_model import bound_context, first_sentence
from vllm_hetero_spec.errors import ConfigError
from vllm_hetero_spec.options import HeteroOptions
from vllm_hetero_spec.text.bridge import Bridge, make_bridge
from vllm_hetero_spec.text.loading import load_tokenizer
from vllm_hetero_spec.text.sample_text import CALIBRATION_TEXT
from vllm_hetero_spec.text.statistics import straddling
from vllm_hetero_spec.text.tokenizer import TextTokenizer, UnsupportedTokenizer, alike

logger = logging.getLogger("vllm.hetero_spec")


# Minimum share of target tokens that end inside a drafter token, for token healing. Below it, few
# drafts begin inside a drafter token, and the drafter would compute the last token twice in vain.
_OFTEN_INSIDE = 0.05


class TokenizerPair(NamedTuple):
    """Tokenizers of target and drafter, and the bridge between them."""

    target: TextTokenizer
    drafter: TextTokenizer
    bridge: Bridge

    @property
    def token_healing(self) -> bool:
        """True if target tokens often end inside a drafter token."""
        if self.bridge.identity:
            return False
        target, drafter = (
            np.cumsum([len(of.token_bytes[i]) for i in of.encode(CALIBRATION_TEXT)])
            for of in (self.target, self.drafter)
        )
        return straddling(drafter, target) > _OFTEN_INSIDE * len(target)


def load_pair(target: ModelConfig, drafter: ModelConfig, options: HeteroOptions) -> TokenizerPair:
    """Load the tokenizers of two models and bridge them.

    Raises:
        ConfigError: A tokenizer is missing or cannot be bridged.
    """
    target_tokenizer, target_chat = _load("target", target)
    drafter_tokenizer, drafter_chat = _load("drafter", drafter)
    target_tokenizer, drafter_tokenizer = alike(target_tokenizer, drafter_tokenizer)
    try:
        bridge = make_bridge(
            target_tokenizer,
            drafter_tokenizer,
            mode=options.debug.translation,
            target_eos=_eos(target),
            drafter_eos=_eos(drafter),
            chats=None if options.debug.chat_template == "off" else (target_chat, drafter_chat),
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return TokenizerPair(target_tokenizer, drafter_tokenizer, bridge)


def check_pair(target: ModelConfig, drafter: ModelConfig, options: HeteroOptions) -> None:
    """Refuse a pair that cannot be bridged (ConfigError), and bound the drafter's context."""
    pair = load_pair(target, drafter, options)
    logger.info("Chat templates of target and drafter: %s.", pair.bridge.chat)
    ratio = len(pair.drafter.encode(CALIBRATION_TEXT)) / len(pair.target.encode(CALIBRATION_TEXT))
    bound_context(drafter, options, target.max_model_len, ratio)


def _load(role: str, config: ModelConfig) -> tuple[TextTokenizer, Any]:
    # Drafting needs the tokenizer even if the engine does not (skip_tokenizer_init).
    own = copy.copy(config)
    own.skip_tokenizer_init = False
    try:
        tokenizer = cached_tokenizer_from_config(own)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        where = "--tokenizer"
        if role == "drafter":
            where = '"tokenizer" in the speculative configuration'
        mode = "" if config.tokenizer_mode == "auto" else 'set tokenizer_mode to "auto", or '
        instead = ""
        if config.skip_tokenizer_init:
            instead = ", and give detokenize=False in SamplingParams instead of skip_tokenizer_init"
        raise ConfigError(
            f"no tokenizer can be loaded for the {role} {config.tokenizer!r}: "
            f"{first_sentence(error)}; {mode}name a folder or repository that has one with {where}"
            f"{instead}."
        ) from error
    try:
        text = load_tokenizer(tokenizer, name=str(config.tokenizer))
        return text.limited_to(config.get_vocab_size()), tokenizer
    except UnsupportedTokenizer as error:
        raise ConfigError(f"the {role}'s tokenizer cannot be bridged: {error}") from error


def _eos(config: ModelConfig) -> list[int] | None:
    found: int | list[int] | None = config.try_get_generation_config().get("eos_token_id")
    if found is None:
        return None
    return [found] if isinstance(found, int) else list(found)
