# SPDX-License-Identifier: Apache-2.0
"""vLLM's startup plan reuses memory figures by a hash, which includes the drafter."""

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import slem
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs


def configured(demo_pair: Path, drafter: str = "drafter", **keys: Any) -> VllmConfig:
    spec = slem(demo_pair / drafter, **keys)
    target = str(demo_pair / "target")
    return EngineArgs(target, dtype="float32", speculative_config=spec).create_engine_config()


@pytest.mark.parametrize(
    "changes",
    [
        {"drafter": "target"},
        {"kv_cache_memory_bytes": "32MiB"},
        {"context": 128},
        {"draft_ahead": True},
        {"debug": {"translation": "text"}},
    ],
)
def test_another_drafter_or_budget_is_another_start(demo_pair: Path, changes: Any) -> None:
    one, other = configured(demo_pair), configured(demo_pair, **changes)
    assert one.compute_hash() != other.compute_hash()


def test_equal_configurations_are_the_same_start_in_any_process(
    demo_pair: Path, tmp_path: Path
) -> None:
    one, same = configured(demo_pair), configured(demo_pair)
    assert one.compute_hash() == same.compute_hash()
    (tmp_path / "config").write_bytes(pickle.dumps(one))
    code = "import pickle, sys; print(pickle.load(open(sys.argv[1], 'rb')).compute_hash())"
    command = [sys.executable, "-c", code, str(tmp_path / "config")]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert told.split()[-1] == one.compute_hash()
