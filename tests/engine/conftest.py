# SPDX-License-Identifier: Apache-2.0
"""Prompts, and what the target alone answers, for the engine tests."""

import json
from pathlib import Path

import pytest
from harness import engine
from scenarios import Outputs, generate, greedy


@pytest.fixture(scope="session")
def code_prompts(demo_pair: Path) -> list[str]:
    """Held-out code, whole: what the demo models have learnt to continue."""
    lines = (demo_pair / "prompts.jsonl").read_text().splitlines()
    return [json.loads(line)["prompt"] for line in lines]


@pytest.fixture(scope="session")
def prompts(code_prompts: list[str], shared_or_none: Path | None) -> list[str]:
    """64 prompts: of every kind where real ones are at hand, else pieces of held-out code."""
    if shared_or_none is None:
        parts = [(text, part) for part in (4, 3, 2, 1) for text in code_prompts]
        return [text[: len(text) * part // 4] for text, part in parts][:64]
    files = sorted((shared_or_none / "data" / "prompts").glob("*.jsonl"))
    kinds = [[json.loads(line)["prompt"] for line in f.read_text().splitlines()] for f in files]
    mixed = [kind[i] for i in range(64) for kind in kinds if i < len(kind)]
    return [text[:900] for text in mixed[:64]]


@pytest.fixture(scope="module")
def texts(prompts: list[str]) -> list[str]:
    return prompts[:8]


@pytest.fixture(scope="module")
def alone(demo_pair: Path, texts: list[str]) -> Outputs:
    with engine(demo_pair / "target") as llm:
        return generate(llm, texts, greedy())
