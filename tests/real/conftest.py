# SPDX-License-Identifier: Apache-2.0
"""Published models in a Hugging Face cache folder; without them these tests are skipped."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from real_models import GEMMA, QWEN, SMOLLM


@pytest.fixture(scope="session")
def hub() -> Path:
    """Folder of the models, to be used as HF_HOME."""
    named = os.environ.get("HETERO_SPEC_REAL")
    if not named:
        pytest.skip("needs real models (HETERO_SPEC_REAL names a folder to be used as HF_HOME)")
    return Path(named)


@pytest.fixture(scope="session")
def model(hub: Path) -> Callable[[str], Path]:
    """Return a function that returns a model's folder by its hub name, or skips the test."""

    def folder(name: str) -> Path:
        try:
            return Path(snapshot_download(name, cache_dir=hub / "hub", local_files_only=True))
        except LocalEntryNotFoundError:
            pytest.skip(f"needs {name} in HETERO_SPEC_REAL")

    return folder


@pytest.fixture(scope="session")
def qwen(model: Callable[[str], Path]) -> Path:
    return model(QWEN)


@pytest.fixture(scope="session")
def smollm(model: Callable[[str], Path]) -> Path:
    return model(SMOLLM)


@pytest.fixture(scope="session")
def gemma(model: Callable[[str], Path]) -> Path:
    return model(GEMMA)


@pytest.fixture(scope="session")
def run_as_user(hub: Path) -> Callable[..., str]:
    """Return a function that runs Python and returns its output.

    The process finds models by their names on the hub.
    """

    def run(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        ended = subprocess.run(
            command,
            env=os.environ | {"HF_HOME": str(hub), "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        return ended.stdout

    return run


@pytest.fixture(scope="session")
def humaneval(shared: Path) -> Path:
    """File of prompts, one JSON object per line."""
    return shared / "data" / "prompts" / "humaneval.jsonl"


@pytest.fixture(scope="session")
def functions(humaneval: Path) -> list[str]:
    """Beginnings of functions to complete."""
    lines = humaneval.read_text().splitlines()
    return [json.loads(line)["prompt"] for line in lines[:6]]
