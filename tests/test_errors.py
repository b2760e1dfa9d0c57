# SPDX-License-Identifier: Apache-2.0
"""Parts of sentences, and folders of a user's machine."""

from pathlib import Path

import pytest

from vllm_hetero_spec import paths
from vllm_hetero_spec.errors import first_line, nearest, one_line


def test_errors_of_others_become_one_line() -> None:
    assert first_line(OSError("\nno such model.\nTraceback")) == "no such model"
    assert one_line("a\n  b\tc") == "a b c"


def test_only_near_names_are_proposed() -> None:
    assert nearest("slam", ["slem", "tli"]) == " (did you mean 'slem'?)"
    assert nearest("zzz", ["slem", "tli"]) == nearest(3, []) == ""


def test_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HETERO_SPEC_DEMO", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert paths.cache_folder() == tmp_path / "vllm_hetero_spec"
    assert paths.demo_folder() == tmp_path / "vllm_hetero_spec" / "demo"
    monkeypatch.setenv("HETERO_SPEC_DEMO", str(tmp_path / "elsewhere"))
    assert paths.demo_folder() == tmp_path / "elsewhere"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert paths.cache_folder() == tmp_path / ".cache" / "vllm_hetero_spec"
