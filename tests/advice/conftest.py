# SPDX-License-Identifier: Apache-2.0
"""Model folders with tiny tokenizers and weights, and no model behind them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from advice_fakes import CONFIG
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from vllm_hetero_spec.text.token_bytes import byte_alphabet

Make = Callable[..., str]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes a folder: 100 weights of two bytes, 64 tokens of context, merges as "h e,he l"."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def made(name: str, merges: str, *, weights: bool = True, known: bool = True) -> str:
        folder = tmp_path / name
        folder.mkdir()
        pairs = [tuple(merge.split()) for merge in merges.split(",") if merge]
        pieces = [*sorted(byte_alphabet()), *map("".join, pairs)]
        tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, pairs))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        if known:
            tokenizer.decoder = decoders.ByteLevel()
        else:  # of which nobody can say what bytes a token stands for
            tokenizer.decoder = decoders.CTC()
        tokenizer.save(str(folder / "tokenizer.json"))
        told = {"tokenizer_class": "PreTrainedTokenizerFast"}
        (folder / "tokenizer_config.json").write_text(json.dumps(told))
        (folder / "config.json").write_text(json.dumps(CONFIG))
        if weights:
            tensors = {"a": torch.zeros(9, 10, dtype=torch.bfloat16), "b": torch.zeros(10)}
            save_file(tensors, folder / "model.safetensors")
        return str(folder)

    return made
