# SPDX-License-Identifier: Apache-2.0
"""A target on two ranks, its drafter whole on the first or split like it."""

import os
from pathlib import Path

import pytest
from harness import engine, slem
from scenarios import Outputs, generate, greedy

from vllm_hetero_spec.engine.stats import read_stats

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("mode", ["rank0", "sharded"])
def test_same_tokens_on_two_ranks(
    demo_pair: Path,
    texts: list[str],
    alone: Outputs,
    mode: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or (os.cpu_count() or 1) < 2:
        pytest.skip("needs a CPU build of vLLM and two cores")
    # Two ranks on one NUMA node want their cores named.
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    spec = slem(demo_pair / "drafter", tensor_parallel=mode)
    with engine(demo_pair / "target", spec, tensor_parallel_size=2) as llm:
        assert generate(llm, texts, greedy()) == alone
        counts = read_stats(llm)
    assert counts["drafts"] > 0
    assert counts["draft_tokens"] <= 4 * counts["drafts"]
    assert not counts["skipped"]
