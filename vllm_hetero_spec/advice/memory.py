# SPDX-License-Identifier: Apache-2.0
"""The memory that a drafter takes, told from its files without loading them."""

import math
from dataclasses import dataclass
from pathlib import Path

from vllm_hetero_spec.inputs.model_folder import kv_bytes_per_token, text_config
from vllm_hetero_spec.inputs.weights import local_folder, missing_weights, tensors_of
from vllm_hetero_spec.options import DEFAULT_CONTEXT

# Of weights that are converted when they are loaded; others, as quantized ones, stay what they are.
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_RUN_BYTES = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2, "auto": 2}


@dataclass(frozen=True)
class Memory:
    """What a drafter takes beside the target.

    Attributes:
        weight_bytes: As they will lie in memory; None where the weights are not on this machine.
        kv_bytes_per_token: Keys and values of one drafter token.
        tokens: Longest context of the figures below, in drafter tokens.
        sequences: Contexts at the same time.
    """

    weight_bytes: int | None
    kv_bytes_per_token: int
    tokens: int
    sequences: int

    @property
    def kv_bytes(self) -> int:
        """Keys and values of all sequences at that length."""
        return self.kv_bytes_per_token * self.tokens * self.sequences


def memory_of(drafter: str, dtype: str, sequences: int, trust_remote_code: bool) -> Memory:
    """What a drafter takes, for contexts of the default length where it can read so many.

    Args:
        drafter: A Hugging Face name or a folder.
        dtype: What vLLM runs it in.
        sequences: Contexts at the same time.
        trust_remote_code: Run code of its repository.

    Raises:
        ConfigError: Its configuration cannot be read.
    """
    text = text_config(drafter, trust_remote_code)
    element = _RUN_BYTES.get(dtype, 2)
    folder = local_folder(drafter)
    return Memory(
        None if folder is None or missing_weights(drafter) else _weight_bytes(folder, element),
        kv_bytes_per_token(text, element),
        min(DEFAULT_CONTEXT, getattr(text, "max_position_embeddings", DEFAULT_CONTEXT)),
        sequences,
    )


def _weight_bytes(folder: Path, element: int) -> int | None:
    """Of all safetensors files, from their headers; of older formats the files as they are."""
    files = sorted(folder.glob("*.safetensors"))
    if files:
        return sum(_tensor_bytes(file, element) for file in files)
    return sum(file.stat().st_size for file in folder.glob("*.bin")) or None


def _tensor_bytes(file: Path, element: int) -> int:
    total = 0
    for tensor in tensors_of(file):
        begin, end = tensor["data_offsets"]
        count = math.prod(tensor["shape"])
        total += count * element if tensor["dtype"] in _FLOATS else end - begin
    return total
