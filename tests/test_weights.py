# SPDX-License-Identifier: Apache-2.0
"""Weights that are not on this machine: which files of a repository are fetched, and when."""

import huggingface_hub
import pytest

from vllm_hetero_spec.config import ConfigError
from vllm_hetero_spec.inputs.weights import fetch_weights, wanted_files

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


def test_what_is_missing_is_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing where the arguments of the engine say where weights are."""
    loaded: list[tuple[str, list[str]]] = []

    def download(name: str, allow_patterns: list[str] | None = None, **_: object) -> str:
        if allow_patterns is None:  # a look at what is here
            raise huggingface_hub.errors.LocalEntryNotFoundError("nothing")
        loaded.append((name, allow_patterns))
        return ""

    monkeypatch.setattr(
        huggingface_hub.HfApi, "list_repo_files", lambda self, name: ["a.bin", "config.json"]
    )
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    for engine in ({"load_format": "dummy"}, {"revision": "v1"}, {}):
        fetch_weights("org/absent", engine)
    assert loaded == [("org/absent", ["a.bin", "config.json"])]


def test_a_failing_download_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the hub's HTTP library raises without a network."""

    def fail(self: object, name: str) -> list[str]:
        raise Exception("no such host\nmore")

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", fail)
    with pytest.raises(ConfigError) as refused:
        fetch_weights("org/absent", {})
    assert str(refused.value) == (
        "the weights of org/absent are not on this machine (`hf download org/absent` gets them); "
        "downloading them failed: no such host."
    )
