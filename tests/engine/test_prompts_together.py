# SPDX-License-Identifier: Apache-2.0
"""Prompts that arrive together: the drafter runs only after the target has read all of them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import engine, metrics_of, proposer_of, slem
from scenarios import generate, greedy

from vllm_hetero_spec import read_stats

pytestmark = [pytest.mark.full, pytest.mark.engine]

REQUESTS, LONG, SHORT = 6, 300, 20
CHUNKS: dict[str, Any] = {"max_num_batched_tokens": 512}  # tokens; six prompts take four steps


@pytest.fixture(scope="module")
def ids(demo_pair: Path, code_prompts: list[str]) -> list[int]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(demo_pair / "target" / "tokenizer.json"))
    return tokenizer.encode("\n".join(code_prompts), add_special_tokens=False).ids


def serve(llm: Any, ids: list[int], length: int) -> Iterator[dict[str, list[int]]]:
    """Yield the outputs of all requests after each step of the engine."""
    for index in range(REQUESTS):
        prompt = {"prompt_token_ids": ids[index * LONG : index * LONG + length]}
        llm.llm_engine.add_request(str(index), prompt, greedy(ignore_eos=True))
    found: dict[str, list[int]] = {str(index): [] for index in range(REQUESTS)}
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            found[output.request_id] = list(output.outputs[0].token_ids)
        yield dict(found)


@pytest.fixture(scope="module")
def alone(demo_pair: Path, ids: list[int]) -> dict[int, dict[str, list[int]]]:
    with engine(demo_pair / "target", None, **CHUNKS) as llm:
        return {length: list(serve(llm, ids, length))[-1] for length in (LONG, SHORT)}


def test_the_drafter_waits_for_all_first_tokens(
    demo_pair: Path, ids: list[int], alone: dict[int, dict[str, list[int]]]
) -> None:
    with engine(demo_pair / "target", slem(demo_pair / "target"), **CHUNKS) as llm:
        drafter = proposer_of(llm).drafting.source.drafter
        before = drafter.forwards  # forwards of calibration and profiling
        steps = [(out, drafter.forwards - before) for out in serve(llm, ids, LONG)]
        waited = [forwards for out, forwards in steps if not all(map(len, out.values()))]
        assert len(waited) >= 2  # the prompts came in chunks
        assert not any(waited)
        first = len(waited)
        assert steps[first][1] == 0  # in the step of the last first tokens
        assert steps[first + 1][1] > 0  # the drafter runs right after it
        assert steps[-1][0] == alone[LONG]
        assert len(steps) < first + 24  # tokens were accepted
        stats = read_stats(llm)
        assert stats["drafts"] >= REQUESTS
        assert stats["skipped"]["catching_up"] >= REQUESTS

        # If no prompt is left to read, short ones are drafted for right after the first tokens.
        before, skipped = drafter.forwards, stats["skipped"]["catching_up"]
        steps = [(out, drafter.forwards - before) for out in serve(llm, ids, SHORT)]
        first = [all(map(len, out.values())) for out, _ in steps].index(True)
        assert steps[first][1] > 0
        assert steps[-1][0] == alone[SHORT]
        assert read_stats(llm)["skipped"]["catching_up"] == skipped

        # All drafts are verified. An ended request has no draft, which would delay the next one.
        made, verified = read_stats(llm)["drafts"], metrics_of(llm)["num_drafts"]
        for index, tokens in alone[SHORT].items():
            start = LONG * int(index)
            prompt = {"prompt_token_ids": ids[start : start + SHORT]}
            end, most = tokens.index(tokens[9]) + 1, 11
            stopped = generate(llm, [prompt], greedy(stop_token_ids=[tokens[9]], ignore_eos=True))
            ended = generate(llm, [prompt], greedy(max_tokens=most, ignore_eos=True))
            assert (stopped["0"], ended["0"]) == (tokens[:end], tokens[:most])
        assert read_stats(llm)["drafts"] - made == metrics_of(llm)["num_drafts"] - verified > 0
