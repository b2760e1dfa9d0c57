# SPDX-License-Identifier: Apache-2.0
"""Fixtures shared by every test: where optional data lies, and an environment without a network."""

import os
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent

# Nothing in the tests may reach a hub: models are trained here or read from disk.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of optional real tokenizers, models and prompts; skips where it is absent."""
    path = Path(os.environ.get("VLLM_HETERO_SPEC_SHARED", REPO.parent / "shared"))
    if not path.is_dir():
        pytest.skip(f"needs real tokenizers and models; none at {path}")
    return path
