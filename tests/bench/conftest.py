# SPDX-License-Identifier: Apache-2.0
"""Suite files, a demo pair without training, and folders of tiny models."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from advice_fakes import CONFIG
from recipes import build_bytes
from safetensors.torch import save_file
from tokenizers import decoders

Make = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that writes a suite file beside a file of prompts, and returns its path."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b", "kind": 1}\n')

    def to_file(text: str) -> Path:
        path = tmp_path / "suite.yaml"
        path.write_text(text)
        return path

    return to_file


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder that looks like the demo pair until a model is loaded."""
    folder = tmp_path / "demo"
    for model in ("target", "target-wide", "drafter", "parallel"):
        (folder / model).mkdir(parents=True)
        (folder / model / "config.json").write_text("{}")
    lines = ['{"prompt": "' + letter * 800 + '"}\n' for letter in "abcdefghijklmnopqrst"]
    (folder / "prompts.jsonl").write_text("".join(lines))
    monkeypatch.setenv("HETERO_SPEC_DEMO", str(folder))
    return folder


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Return a function that makes a model folder and returns its path.

    It has 100 weights of two bytes, 64 tokens of context, and merges such as "h e,he l".
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def made(name: str, merges: str, *, weights: bool = True, known: bool = True) -> str:
        folder = tmp_path / name
        folder.mkdir()
        tokenizer = build_bytes(merges)
        if not known:  # the bytes of its tokens cannot be derived
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
