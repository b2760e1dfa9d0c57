# SPDX-License-Identifier: Apache-2.0
"""The drafter's KV of a common prefix is reused, but never between different cache salts."""

from pathlib import Path
from typing import Any

import pytest
from harness import engine, proposer_of, slem
from scenarios import generate, greedy

from vllm_hetero_spec import read_stats

pytestmark = pytest.mark.engine


def test_reuse_and_salts(demo_pair: Path, code_prompts: list[str]) -> None:
    prefix = "\n".join(code_prompts)[:1500]

    def reused(llm: Any, salt: str | None) -> int:
        """Tokens reused by a request that comes after an equal one."""
        prompt = {"prompt": prefix} | ({"cache_salt": salt} if salt else {})
        before = read_stats(llm)["reused_tokens"]
        answers.append(generate(llm, [prompt], greedy(max_tokens=8)))
        return read_stats(llm)["reused_tokens"] - before

    answers: list[dict] = []
    with engine(demo_pair / "target", slem(demo_pair / "drafter")) as llm:
        assert reused(llm, None) == 0
        assert reused(llm, None) > 0
        assert reused(llm, "tenant a") == 0
        assert reused(llm, "tenant b") == 0
        assert reused(llm, "tenant a") > 0
        assert reused(llm, None) > 0
        # A request whose context is forgotten after a fault, and read afresh, still has its salt.
        drafting = proposer_of(llm).drafting
        real = drafting.begin

        def forgets(step: Any) -> None:
            if step.requests[0].num_output_tokens >= 3 and not forgot:
                drafting.reset()
                forgot.append(drafting.pool.reused_tokens)
            real(step)

        forgot: list[int] = []
        drafting.begin = forgets
        reused(llm, "tenant c")
        drafting.begin = real
        assert forgot == [0]
        assert reused(llm, "tenant d") == 0
        assert reused(llm, "tenant c") > 0
    assert all(answer == answers[0] for answer in answers)
