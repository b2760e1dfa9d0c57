# SPDX-License-Identifier: Apache-2.0
"""What the target alone answers, for the engine tests."""

from pathlib import Path

import pytest
from harness import engine
from scenarios import Outputs, generate, greedy


@pytest.fixture(scope="module")
def texts(prompts: list[str]) -> list[str]:
    return prompts[:8]


@pytest.fixture(scope="module")
def alone(demo_pair: Path, texts: list[str]) -> Outputs:
    with engine(demo_pair / "target") as llm:
        return generate(llm, texts, greedy())
