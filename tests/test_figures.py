# SPDX-License-Identifier: Apache-2.0
"""The figures of the project's size are counted correctly, and stay below their limits."""

from pathlib import Path

from figures import constants, figures

REPO = Path(__file__).resolve().parent.parent


def test_numbers_with_names_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text("_A = 3  # seconds\nB, C = 0.5, 1 << 4\nNAME = 'x'\nd = 4\nE = len([1])\n")
    assert list(constants(file)) == ["_A", "B", "C"]


def test_the_project_does_not_grow() -> None:
    found = {name: value for name, value in figures(REPO).items() if isinstance(value, int)}
    assert found["documented keys"] <= 24  # two of them are keys of vLLM
    assert found["package, lines"] <= 30_300
    assert found["scripts, lines"] <= 2_600
    assert found["numbers that decide how far to draft"] <= 47  # two of them decide nothing
