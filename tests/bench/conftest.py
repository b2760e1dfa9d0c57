# SPDX-License-Identifier: Apache-2.0
"""Suite files to write, and a demo pair that is there without training."""

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a suite file, beside a file of prompts, and returns its path."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b", "kind": 1}\n')

    def to_file(text: str) -> Path:
        path = tmp_path / "suite.yaml"
        path.write_text(text)
        return path

    return to_file


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that looks like the demo pair until a model is loaded."""
    folder = tmp_path / "demo"
    for model in ("target", "target-wide", "drafter"):
        (folder / model).mkdir(parents=True)
        (folder / model / "config.json").write_text("{}")
    lines = ['{"prompt": "' + letter * 800 + '"}\n' for letter in "abcdefghijklmnopqrst"]
    (folder / "prompts.jsonl").write_text("".join(lines))
    monkeypatch.setenv("HETERO_SPEC_DEMO", str(folder))
    return folder
