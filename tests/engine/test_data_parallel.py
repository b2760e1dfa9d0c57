# SPDX-License-Identifier: Apache-2.0
"""Data parallelism: two engines behind one front end, each with its own drafter and counters."""

import asyncio
import gc
import os
from pathlib import Path

import pytest
from harness import BASE, slem
from prometheus_client import REGISTRY
from scenarios import Outputs, answers
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from vllm_hetero_spec.engine.metrics.sinks import PREFIX


@pytest.mark.full
@pytest.mark.engine
def test_two_engines_with_a_drafter_each(
    demo_pair: Path, texts: list[str], alone: Outputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or (os.cpu_count() or 1) < 2:
        pytest.skip("needs a CPU build of vLLM and two cores")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    # vLLM 0.33 needs a NUMA node for each engine, unless this variable exists. 0 simulates none.
    monkeypatch.setenv("VLLM_CPU_SIM_MULTI_NUMA", "0")
    arguments = BASE | {"model": str(demo_pair / "target"), "data_parallel_size": 2}
    spec = slem(demo_pair / "drafter")
    try:
        assert asyncio.run(answers(texts, **arguments, speculative_config=spec)) == alone
        for engine in ("0", "1"):
            drafts = REGISTRY.get_sample_value(
                f"{PREFIX}drafts_total", {"engine": engine, "model_name": arguments["model"]}
            )
            assert drafts is not None
            assert drafts > 0
    finally:
        unregister_vllm_metrics()
        gc.collect()
