# SPDX-License-Identifier: Apache-2.0
"""`advise` on a real pair recommends the drafter exactly if it was faster in all rounds."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from real_models import QWEN, SMOLLM

pytestmark = [
    pytest.mark.full,
    pytest.mark.real,
    pytest.mark.engine,
    pytest.mark.skipif(
        "HETERO_SPEC_REAL_ADVISE" not in os.environ,
        reason="takes long: HETERO_SPEC_REAL_ADVISE=1 runs it",
    ),
]


def test_it_recommends_what_was_faster_in_all_rounds(
    run_as_user: Callable[..., str], humaneval: Path, qwen: Path, smollm: Path
) -> None:
    code = "import sys; from vllm_hetero_spec.cli.main import main; sys.exit(main())"
    load = ["--num-prompts", "2", "--max-tokens", "32", "--batch-sizes", "1", "--temperatures", "0"]
    options = ["--prompts", str(humaneval), *load, "--repeats", "2", "--json"]
    found = json.loads(run_as_user("-c", code, "advise", QWEN, SMOLLM, *options))
    (candidate,) = found["measured"]
    assert not candidate["failure"]
    assert all(len(set(load["identical"])) == 1 for load in candidate["loads"])
    assert all(load["acceptance_length"] > 1.3 for load in candidate["loads"])
    faster = all(load["speedup"]["low"] > 1 for load in candidate["loads"])
    assert (found["recommended"] == candidate["speculative_config"]) is faster
    assert (found["recommended"] is None) is not faster
