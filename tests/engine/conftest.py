# SPDX-License-Identifier: Apache-2.0
"""What the target alone answers, for the engine tests."""

from pathlib import Path

import pytest
from harness import engine
from scenarios import Outputs, generate, greedy


@pytest.fixture(scope="session")
def texts(prompts: list[str]) -> list[str]:
    return prompts[:8]


@pytest.fixture(scope="session")
def alone(demo_pair: Path, texts: list[str]) -> Outputs:
    """Greedy tokens; a module's engine must ask for them first: two cannot live side by side."""
    with engine(demo_pair / "target") as llm:
        return generate(llm, texts, greedy())
