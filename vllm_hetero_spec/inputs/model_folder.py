# SPDX-License-Identifier: Apache-2.0
"""Checks and properties of a model, from its name or folder, before an engine starts."""

from pathlib import Path
from typing import Any

from vllm_hetero_spec.errors import ConfigError, first_line
from vllm_hetero_spec.inputs.weights import NO_GGUF, only_gguf, tensors_of


def check_model(name: str, role: str) -> str:
    """Return a model's name, `~` expanded; ConfigError for a folder that contains no model."""
    folder = Path(name).expanduser()
    if any((folder / config).is_file() for config in ("config.json", "params.json")):
        return str(folder)
    if folder.exists() and only_gguf(name):
        raise ConfigError(f"the {role} {name} cannot be used: {NO_GGUF}.")
    if folder.is_dir():
        raise ConfigError(f"the {role} folder {name} contains no config.json.")
    if name.startswith(("/", ".", "~")) or name.count("/") > 1 or folder.exists():
        raise ConfigError(f"the {role} folder {name} does not exist.")
    return name


def tokenizer_of(name: str, trust_remote_code: bool) -> Any:
    """Load the tokenizer of a model with transformers. Raise ConfigError if that fails."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load the tokenizer of {name}: {first_line(error)}.") from error


def text_config(name: str, trust_remote_code: bool) -> Any:
    """Load the configuration of a model's text part. Raise ConfigError if that fails."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the configuration of {name} cannot be read: {first_line(error)}."
        ) from error
    return config.get_text_config()


def mask_token(config: Any) -> int | None:
    """Return the id of a parallel drafter's mask token, from its Hugging Face configuration.

    None for any other model. The keys are those that vLLM reads, in vLLM's order.
    """
    found = (getattr(config, key, None) for key in ("mask_token_id", "pard_token", "ptd_token_id"))
    return next((int(mask) for mask in found if mask is not None), None)


def kv_bytes_per_token(config: Any, element: int) -> int:
    """Return bytes of a token's keys and values, each of `element`; ConfigError if unknown."""
    try:
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        return int(2 * config.num_hidden_layers * heads * width * element)
    except (AttributeError, TypeError) as error:
        raise ConfigError(
            f"the configuration of this {getattr(config, 'model_type', 'unknown')} model does not "
            f"contain the size of its keys and values ({first_line(error)}); choose a model with "
            "attention, whose num_attention_heads is one number."
        ) from error


def widened_columns(name: str) -> tuple[int, int] | None:
    """Return the numbers of zero columns and of all columns in the first MLP of a widened model.

    A widened model, such as the demo's `target-wide`, is slower than the model inside it and has
    the same output. Return None for any other model, or if its weights are incomplete.
    """
    weights = Path(name) / "model.safetensors"
    try:
        tensors_of(weights)
    except ConfigError:
        return None
    from safetensors import safe_open

    with safe_open(weights, framework="pt") as tensors:
        projection = next((k for k in tensors.keys() if k.endswith(".mlp.up_proj.weight")), None)  # noqa: SIM118
        if projection is None or tensors.get_slice(projection)[-1:].any():
            return None
        used = tensors.get_tensor(projection).any(dim=1)
    return int((~used).sum()), used.numel()
