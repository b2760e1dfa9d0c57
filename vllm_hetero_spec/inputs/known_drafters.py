# SPDX-License-Identifier: Apache-2.0
"""Small public models that draft well, with what their model cards say of each."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from vllm_hetero_spec.inputs.model_folder import text_config
from vllm_hetero_spec.inputs.weights import local_folder, weight_bytes


class KnownDrafter(NamedTuple):
    """A public drafter, by its Hugging Face name."""

    name: str
    millions: int  # of parameters, embeddings included
    layers: int
    tokenizer: str  # its family
    licence: str
    languages: str
    chat: bool = True  # it has a chat template
    parallel: bool = False  # it writes a draft in one forward

    @property
    def is_local(self) -> bool:
        """True if its files are on this machine."""
        return local_folder(self.name) is not None


_QWEN, _LLAMA, _SMOL, _GEMMA = "Qwen", "Llama 3", "SmolLM2", "Gemma 3"
_ON_CARD = "see its model card"
KNOWN = (
    KnownDrafter("HuggingFaceTB/SmolLM2-135M-Instruct", 135, 30, _SMOL, "Apache-2.0", "English"),
    KnownDrafter("HuggingFaceTB/SmolLM2-360M-Instruct", 362, 32, _SMOL, "Apache-2.0", "English"),
    KnownDrafter("google/gemma-3-270m-it", 268, 18, _GEMMA, "Gemma", "over 140"),
    KnownDrafter("Qwen/Qwen2.5-0.5B-Instruct", 494, 24, _QWEN, "Apache-2.0", "29"),
    KnownDrafter("Qwen/Qwen2.5-Coder-0.5B-Instruct", 494, 24, _QWEN, "Apache-2.0", "code"),
    KnownDrafter("Qwen/Qwen3-0.6B", 596, 28, _QWEN, "Apache-2.0", "over 100"),
    KnownDrafter("meta-llama/Llama-3.2-1B-Instruct", 1236, 16, _LLAMA, "Llama 3.2", "8"),
    KnownDrafter("amd/PARD-Qwen2.5-0.5B", 494, 24, _QWEN, _ON_CARD, "29", parallel=True),
    KnownDrafter("amd/PARD-Qwen3-0.6B", 596, 28, _QWEN, _ON_CARD, "over 100", parallel=True),
    KnownDrafter("amd/PARD-Llama-3.2-1B", 1236, 16, _LLAMA, _ON_CARD, "8", parallel=True),
)
# Tokenizer family by the beginning of a model type, and for Llama by its vocabulary.
_FAMILIES = (("qwen", _QWEN), ("gemma3", _GEMMA))
_LLAMA_3_IDS = 128_256
_LARGEST_SHARE = 0.34  # of the target's parameters; a larger drafter takes too long per token
_BYTES = 2  # per parameter, so that bytes of weights give a number of parameters


def known_for(target: str, trust_remote_code: bool) -> Sequence[KnownDrafter]:
    """Return the public drafters for a target; ConfigError if its files cannot be read."""
    config = text_config(target, trust_remote_code)
    folder = local_folder(target)
    size = None if folder is None else weight_bytes(folder, _BYTES)
    found = ranked(family_of(config), None if size is None else size / _BYTES / 1e6)
    return [each for each in found if each.name != target]


def family_of(config: Any) -> str | None:
    """Return the tokenizer family of a model from its text configuration; None if unknown."""
    kind = str(getattr(config, "model_type", ""))
    if kind == "llama" and getattr(config, "vocab_size", 0) == _LLAMA_3_IDS:
        return _LLAMA
    return next((family for start, family in _FAMILIES if kind.startswith(start)), None)


def ranked(family: str | None, millions: float | None) -> Sequence[KnownDrafter]:
    """Return the known drafters for a target, the most promising first.

    Parallel ones take one forward per draft. Those with the target's own tokenizer lose nothing in
    translation. Smaller ones cost less. Those too large for a target of so many `millions` of
    parameters are left out; None keeps all.
    """
    most = float("inf") if millions is None else _LARGEST_SHARE * millions
    small = [each for each in KNOWN if each.millions <= most]
    return sorted(
        small, key=lambda each: (not each.parallel, each.tokenizer != family, each.millions)
    )
