# SPDX-License-Identifier: Apache-2.0
"""Weights that are missing on this machine: downloads and refusals."""

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import GatedRepoError
from safetensors.torch import save_file

from vllm_hetero_spec.errors import ConfigError
from vllm_hetero_spec.inputs import tokenizer_source
from vllm_hetero_spec.inputs.tokenizer_source import open_tokenizer
from vllm_hetero_spec.inputs.weights import (
    NO_GGUF,
    fetch_weights,
    missing_weights,
    tensors_of,
    wanted_files,
    weight_bytes,
)

OTHERS = ["README.md", "config.json", "tokenizer.json", "modeling_own.py"]


@pytest.mark.parametrize(
    ("weights", "wanted"),
    [
        (["model.safetensors", "pytorch_model.bin", "original/a.pth"], ["model.safetensors"]),
        (["consolidated.safetensors", "model-1.safetensors"], ["model-1.safetensors"]),
        (["consolidated.safetensors"], ["consolidated.safetensors"]),
        (["pytorch_model.bin", "model.onnx", "onnx/model.onnx"], ["pytorch_model.bin"]),
        (["a.q4.gguf"], []),
    ],
)
def test_one_format_of_weights_is_fetched(weights: list[str], wanted: list[str]) -> None:
    assert wanted_files([*weights, *OTHERS]) == [*wanted, *OTHERS]


def test_missing_weights_are_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is downloaded if `load_format` or `revision` selects other weights."""
    loaded: list[tuple[str, list[str]]] = []

    def download(name: str, allow_patterns: list[str] | None = None, **_: object) -> str:
        if allow_patterns is None:  # a check of the cache
            raise huggingface_hub.errors.LocalEntryNotFoundError("nothing")
        loaded.append((name, allow_patterns))
        return ""

    monkeypatch.setattr(
        huggingface_hub.HfApi, "list_repo_files", lambda self, name: ["a.bin", "config.json"]
    )
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    for engine in ({"load_format": "dummy"}, {"revision": "v1"}, {"revision": None}):
        fetch_weights("org/absent", engine)
    assert loaded == [("org/absent", ["a.bin", "config.json"])]


def test_a_failing_download_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every exception of the hub's HTTP library is handled, for example without a network."""

    def fail(self: object, name: str) -> list[str]:
        raise Exception("no such host\nmore")

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", fail)
    with pytest.raises(ConfigError) as refused:
        fetch_weights("org/absent", {})
    assert str(refused.value) == (
        "the weights of org/absent are not on this machine (`hf download org/absent` gets them); "
        "downloading them failed: no such host."
    )


def test_a_gated_model_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers raises an OSError because of the hub's exception."""
    error = GatedRepoError.__new__(GatedRepoError)

    def fail(*_: object, **__: object) -> None:
        raise error

    def fail_in_transformers(*_: object, **__: object) -> None:
        raise OSError("You are trying to access a gated repo.") from error

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", fail)
    monkeypatch.setattr(tokenizer_source, "_hub_eos_ids", fail_in_transformers)
    told = (
        "org/absent is a gated model: accept its terms on https://huggingface.co/org/absent, run "
        "`hf auth login`, and try again."
    )
    with pytest.raises(ConfigError) as refused:
        fetch_weights("org/absent", {})
    assert str(refused.value) == told
    with pytest.raises(ConfigError) as refused:
        open_tokenizer("org/absent", "target")
    assert str(refused.value) == told


def test_consolidated_weights_are_not_counted_twice(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(3, 5, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "consolidated.safetensors")
    assert weight_bytes(tmp_path, 4) == 60
    save_file(tensors, tmp_path / "model-00001-of-00001.safetensors")
    assert weight_bytes(tmp_path, 4) == 60
    (tmp_path / "model-00001-of-00001.safetensors").unlink()
    save_file({}, tmp_path / "consolidated.safetensors")
    assert weight_bytes(tmp_path, 4) is None


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 1379672\n"


@pytest.mark.parametrize(
    ("spoilt", "told"),
    [
        (lambda whole: POINTER, "are only a Git LFS pointer; get them with `git lfs pull`"),
        (lambda whole: whole[:-1], "end too early, after"),
        (lambda whole: whole[:40], "are not a complete safetensors file; download it again"),
        (lambda whole: whole[:8], "are not a complete safetensors file; download it again"),
        (lambda whole: b"", "are not a complete safetensors file; download it again"),
        (lambda whole: b"\xff" * 64, "are not a complete safetensors file; download it again"),
        (lambda whole: b"\2" + bytes(7) + b"[]", "are not a complete safetensors file"),
    ],
)
def test_incomplete_weights_are_refused(tmp_path: Path, spoilt: Any, told: str) -> None:
    """The refusal is one sentence, and comes before any engine starts."""
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(3, 2), "b": torch.zeros(1)}, file, {"format": "pt"})
    assert missing_weights(str(tmp_path)) == ""
    assert sorted(tensor["shape"] for tensor in tensors_of(file)) == [[1], [3, 2]]
    file.write_bytes(spoilt(file.read_bytes()))
    assert missing_weights(str(tmp_path)).startswith(f"the weights in {file} {told}")
    with pytest.raises(ConfigError, match=r"safetensors [^\n]*[^.]\.$"):
        fetch_weights(str(tmp_path), {})


@pytest.mark.parametrize("text", ["{bad", "[]", "{}", '{"weight_map": 3}'])
def test_a_spoilt_list_of_weights(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert missing_weights(str(tmp_path)).endswith(
        "cannot be read as a list of weights; download it again"
    )


def test_files_outside_the_index_are_ignored(tmp_path: Path) -> None:
    """Some repositories contain the weights in two formats."""
    save_file({"a": torch.zeros(4)}, tmp_path / "model-1.safetensors")
    (tmp_path / "consolidated.safetensors").write_bytes(b"version https://git-lfs")
    assert "Git LFS pointer" in missing_weights(str(tmp_path))
    index = {"weight_map": {"a": "model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert not missing_weights(str(tmp_path))
    (tmp_path / "model-1.safetensors").unlink()
    assert missing_weights(str(tmp_path)) == f"{tmp_path} lacks model-1.safetensors"


def test_every_list_of_weights_is_checked(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file({name: torch.zeros(4)}, tmp_path / f"{name}-1.safetensors")
        index = {"weight_map": {name: f"{name}-1.safetensors"}}
        (tmp_path / f"{name}.safetensors.index.json").write_text(json.dumps(index))
    assert not missing_weights(str(tmp_path))
    for name in ("a", "b"):
        file = tmp_path / f"{name}-1.safetensors"
        whole = file.read_bytes()
        file.write_bytes(whole[:-1])
        assert file.name in missing_weights(str(tmp_path))
        file.write_bytes(whole)


def test_weights_in_gguf_alone_are_none_to_vllm(tmp_path: Path) -> None:
    assert missing_weights(str(tmp_path)).endswith("contains no weights")
    (tmp_path / "model.Q4.gguf").touch()
    assert missing_weights(str(tmp_path)) == NO_GGUF
    save_file({"a": torch.zeros(4)}, tmp_path / "model.safetensors")
    assert not missing_weights(str(tmp_path))
