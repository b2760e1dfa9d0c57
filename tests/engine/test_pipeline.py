# SPDX-License-Identifier: Apache-2.0
"""A target in two pipeline stages, its drafter on the last."""

import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness import engine, metrics_of, slem
from scenarios import greedy

from vllm_hetero_spec import read_stats
from vllm_hetero_spec.config import ConfigError
from vllm_hetero_spec.engine.seam import pipeline, runner_v1

# Eight requests of 150 tokens and more in fewer blocks than they need: vLLM preempts.
TIGHT: dict[str, Any] = {
    "pipeline_parallel_size": 2,
    "max_num_seqs": 8,
    "max_model_len": 512,
    "block_size": 32,
    "num_gpu_blocks_override": 22,
    "enable_prefix_caching": False,  # what is preempted is computed again from its beginning
}
LONG = greedy(max_tokens=150, ignore_eos=True, logprobs=0)


def config_of(stages: int = 2, *, v2: bool = False, ahead: bool = False, **options: Any) -> Any:
    hetero = SimpleNamespace(**({"pipeline": "refuse"} | options))
    return SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages),
        scheduler_config=SimpleNamespace(async_scheduling=ahead),
        speculative_config=SimpleNamespace(hetero=hetero),
        use_v2_model_runner=v2,
    )


def test_a_pipeline_on_v1_is_refused_unless_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    pipeline.check(config_of(stages=1))
    pipeline.check(config_of(v2=True, ahead=True))
    with pytest.raises(ConfigError) as refused:
        pipeline.check(config_of())
    for word in ("pipeline_parallel_size=2", "tensor", "V2", '"pipeline": "one_batch"'):
        assert word in str(refused.value)
    with pytest.raises(ConfigError, match="V2 needs asynchronous scheduling"):
        pipeline.check(config_of(v2=True))
    assert not caplog.messages
    with caplog.at_level(logging.WARNING, "vllm.hetero_spec"):
        pipeline.check(config_of(stages=3, pipeline="one_batch"))
    (said,) = caplog.messages
    assert "3 times its throughput" in said


@pytest.fixture
def two_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or (os.cpu_count() or 1) < 2:
        pytest.skip("needs a CPU build of vLLM and two cores")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")


def forget(worker: Any) -> None:
    """In a worker: a stage that does not sample is told one token a step, and no more."""
    runner_v1.recall = lambda runner, scheduler_output: None


def with_logprobs(llm: Any, texts: list[str]) -> tuple[list[list[int]], list[float]]:
    """Greedy tokens, and the log-probabilities of all of them, one text after the other."""
    outputs = [each.outputs[0] for each in llm.generate(texts, LONG, use_tqdm=False)]
    tokens = [list(each.token_ids) for each in outputs]
    return tokens, [
        row[token].logprob
        for each in outputs
        for token, row in zip(each.token_ids, each.logprobs, strict=True)
    ]


@pytest.mark.full
@pytest.mark.engine
def test_same_tokens_in_two_stages_behind_preemptions(
    demo_pair: Path, code_prompts: list[str], two_stages: None
) -> None:
    texts = code_prompts[:8]
    with engine(demo_pair / "target", max_num_seqs=8, max_model_len=512) as llm:
        alone, logprobs = with_logprobs(llm, texts)
    spec = slem(demo_pair / "drafter", pipeline="one_batch")
    with engine(demo_pair / "target", spec, **TIGHT) as llm:
        llm.collective_rpc("execute_dummy_batch")  # vLLM's stages need one, where eager on a CPU
        tokens, found = with_logprobs(llm, texts)
        counted, ours = metrics_of(llm), read_stats(llm)
    # Where all drafts are accepted, every step of a request that is preempted had several tokens.
    spec = slem(demo_pair / "target", pipeline="one_batch")
    with engine(demo_pair / "target", spec, **TIGHT) as llm:
        llm.collective_rpc("execute_dummy_batch")
        llm.collective_rpc(forget)
        _, forgotten = with_logprobs(llm, texts)
        preempted_again = metrics_of(llm)["num_preemptions"]
    assert tokens == alone
    assert found == pytest.approx(logprobs, abs=1e-3)
    assert counted["num_preemptions"] > 0
    # Of a request that is preempted, vLLM drops the draft that waits.
    dropped = ours["drafts"] - counted["num_drafts"]
    assert 0 <= dropped <= counted["num_preemptions"]
    assert 0 <= ours["draft_tokens"] - counted["num_draft_tokens"] <= 4 * dropped
    assert counted["num_accepted_tokens"] > 0
    # Without what this package tells the first stage, that would go wrong.
    assert preempted_again > 0
    assert forgotten != pytest.approx(logprobs, abs=1e-2)  # right ones differ by a tenth of that
