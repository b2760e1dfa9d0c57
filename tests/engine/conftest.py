# SPDX-License-Identifier: Apache-2.0
"""Prompts for the engine tests."""

import json
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def prompts(demo_pair: Path, shared_or_none: Path | None) -> list[str]:
    """64 prompts: of every kind where real ones are at hand, else held-out code."""
    if shared_or_none is None:
        lines = (demo_pair / "prompts.jsonl").read_text().splitlines()
        texts = [json.loads(line)["prompt"] for line in lines]
        return [text[i : i + 600] for i in (0, 300, 600, 900) for text in texts][:64]
    files = sorted((shared_or_none / "data" / "prompts").glob("*.jsonl"))
    kinds = [[json.loads(line)["prompt"] for line in f.read_text().splitlines()] for f in files]
    mixed = [kind[i] for i in range(64) for kind in kinds if i < len(kind)]
    return [text[:900] for text in mixed[:64]]
