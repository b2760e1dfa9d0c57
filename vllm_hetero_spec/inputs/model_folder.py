# SPDX-License-Identifier: Apache-2.0
"""Facts about a model from its name or folder, before an engine starts."""

from pathlib import Path
from typing import Any

from vllm_hetero_spec.errors import ConfigError, first_line
from vllm_hetero_spec.inputs.weights import NO_GGUF, only_gguf, tensors_of


def check_model(name: str, role: str) -> str:
    """The name of a model with a role, "target" or "drafter"; with `~` expanded for a folder.

    Raises:
        ConfigError: The name can only be a folder and there is no model in it.
    """
    folder = Path(name).expanduser()
    if any((folder / config).is_file() for config in ("config.json", "params.json")):
        return str(folder)
    if folder.exists() and only_gguf(name):
        raise ConfigError(f"the {role} {name} cannot be used: {NO_GGUF}.")
    if folder.is_dir():
        raise ConfigError(f"the {role} folder {name} holds no config.json.")
    if name.startswith(("/", ".", "~")) or name.count("/") > 1 or folder.exists():
        raise ConfigError(f"the {role} folder {name} does not exist.")
    return name


def tokenizer_of(name: str, trust_remote_code: bool) -> Any:
    """The transformers tokenizer of a model.

    Raises:
        ConfigError: It cannot be loaded.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load the tokenizer of {name}: {first_line(error)}.") from error


def text_config(name: str, trust_remote_code: bool) -> Any:
    """The transformers configuration of a model's text part.

    Raises:
        ConfigError: It cannot be read.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the configuration of {name} cannot be read: {first_line(error)}."
        ) from error
    return config.get_text_config()


def kv_bytes_per_token(config: Any, element: int) -> int:
    """Bytes of keys and values of one token, in numbers of `element` bytes.

    Raises:
        ConfigError: The configuration, of transformers, is of a model without attention.
    """
    try:
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        return int(2 * config.num_hidden_layers * heads * width * element)
    except (AttributeError, TypeError) as error:
        raise ConfigError(
            f"the configuration of this {getattr(config, 'model_type', 'unknown')} model does not "
            f"tell the size of its keys and values ({first_line(error)}); choose a model with "
            "attention, whose num_attention_heads is one number."
        ) from error


def widened_columns(name: str) -> tuple[int, int] | None:
    """Zero and all columns of the first MLP of a model that was made slower on purpose.

    Such a model, as the demo's `target-wide`, costs as much as a larger one and has the output of
    the small one inside it. None for any other model, or if its weights are not whole.
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
