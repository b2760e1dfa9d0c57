# SPDX-License-Identifier: Apache-2.0
"""A small model in the shape of a large one says the same."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from _shell import Shape, Shell, shell_weights, write_shell
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

INNER = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
GROWN = {
    "hidden_size": 144,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
QWEN = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}


def small_model(folder: Path, *, tied: bool, family: str = "llama") -> Path:
    torch.manual_seed(0)
    kind, configured = {
        "llama": (LlamaForCausalLM, LlamaConfig),
        "qwen2": (Qwen2ForCausalLM, Qwen2Config),
    }[family]
    model = kind(configured(**INNER, tie_word_embeddings=tied, rms_norm_eps=1e-3))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=float("norm" in name), std=0.3 if "norm" in name else 0.15)
    model.save_pretrained(folder)
    return folder


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model.eval()(ids).logits


@pytest.mark.parametrize(
    ("inner", "tied", "shape"),
    [
        ("llama", True, {**LLAMA, "head_dim": 24, "vocab_size": 400, "tie_word_embeddings": False}),
        ("llama", True, {**QWEN, "head_dim": 12, "vocab_size": 400, "tie_word_embeddings": True}),
        ("llama", False, {**LLAMA, "head_dim": 36, "vocab_size": 300}),
        ("qwen2", True, {**QWEN, "head_dim": 24, "vocab_size": 333, "tie_word_embeddings": True}),
    ],
)
def test_a_shell_says_what_is_in_it(
    tmp_path: Path, inner: str, tied: bool, shape: Mapping[str, Any]
) -> None:
    small = small_model(tmp_path / "small", tied=tied, family=inner)
    write_shell(small, {**GROWN, **shape}, tmp_path / "shell")
    within = AutoModelForCausalLM.from_pretrained(small, dtype=torch.float32)
    around = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "shell"))
    left = around.load_state_dict(dict(shell_weights(tmp_path / "shell")), strict=False)
    assert not left.unexpected_keys
    assert set(left.missing_keys) <= {"lm_head.weight"}
    assert around.config.num_hidden_layers == 4
    ids = torch.randint(0, 300, (2, 200), generator=torch.Generator().manual_seed(1))
    expected, found = logits(within, ids), logits(around, ids)
    own, padding = found[..., :300], found[..., 300:]
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
    assert (own - expected).abs().max() < 1e-3 * expected.abs().max()
    if padding.numel():
        assert padding.max() < expected.min() - 1000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 32}, "48 hidden features does not fit into 32"),
        ({"num_key_value_heads": 12}, "2 heads in a group does not fit into 1"),
        ({"head_dim": 30}, "heads of 12 do not divide heads of 30"),
        ({"hidden_size": 48, "vocab_size": 400}, "takes more hidden features"),
        ({"tie_word_embeddings": True}, "untied head"),
    ],
)
def test_what_does_not_fit_is_refused(change: Mapping[str, Any], message: str) -> None:
    inner = {**INNER, "model_type": "llama"}
    outer = {**inner, **GROWN, "head_dim": 12, **change}
    with pytest.raises(ValueError, match=message):
        Shell(Shape.of(inner), Shape.of(outer))
