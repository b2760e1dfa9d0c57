# SPDX-License-Identifier: Apache-2.0
"""The drafter's KV of a common prefix is reused, but never between different cache salts."""

from pathlib import Path
from typing import Any

import pytest
from harness import engine, proposer_of, slem
from scenarios import generate, greedy

from vllm_hetero_spec import read_stats
from vllm_hetero_spec.engine.drafter.requests import DraftSequence, RequestState
from vllm_hetero_spec.engine.drafter.tasks import DraftRow, DraftTask
from vllm_hetero_spec.text.context import IdentityContext

pytestmark = [pytest.mark.full, pytest.mark.engine]

STEPS = 5


def test_reuse_and_salts(demo_pair: Path, code_prompts: list[str]) -> None:
    prefix = "\n".join(code_prompts)[:1500]

    def reused(llm: Any, salt: str | None) -> int:
        """Return the reused tokens of a request with this salt."""
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
        # A request keeps its salt if its context is forgotten after a fault and read again.
        drafting = proposer_of(llm).drafting
        real = drafting.begin

        def forgets(step: Any) -> None:
            if step.requests[0].num_output_tokens >= 3 and not forgot:
                drafting.reset()
                forgot.append(drafting.source.pool.reused_tokens)  # this counter never decreases
            real(step)

        forgot: list[int] = []
        so_far = read_stats(llm)["reused_tokens"]
        drafting.begin = forgets
        reused(llm, "tenant c")
        drafting.begin = real
        assert forgot == [so_far]
        assert reused(llm, "tenant d") == 0
        assert reused(llm, "tenant c") > 0
        forks_draft_as_their_origin(drafting)
    assert all(answer == answers[0] for answer in answers)


def forks_draft_as_their_origin(drafting: Any) -> None:
    """Check forks that begin between two blocks, and forks inside a block, whose KV is copied."""
    pool, drafter = drafting.source.pool, drafting.source.drafter

    def drafted(table: Any, written: list[int], pending: list[int]) -> list[int]:
        assert pool.grow(table, len(written) + len(pending) + STEPS)
        sequence = DraftSequence(table, written.copy())
        task = DraftTask(RequestState("fork", IdentityContext()), STEPS)
        return drafter.run([DraftRow(task, sequence, pending, STEPS)])[0].tokens

    ids = [7 + number % 50 for number in range(2 * pool.block_size + 30)]
    for length in (2 * pool.block_size, len(ids) - 1):
        origin, _ = pool.open(ids, salt="origin")
        expected = drafted(origin, [], ids)
        fork = pool.fork(origin, length)
        assert (fork.copy is None) == (length % pool.block_size == 0)
        if fork.copy is not None:
            drafter.model.copy_blocks([fork.copy])
        pool.close(origin)
        assert drafted(fork.table, ids[:length], ids[length:]) == expected
        pool.close(fork.table)
