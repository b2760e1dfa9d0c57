# SPDX-License-Identifier: Apache-2.0
"""Engines with parallel drafters. Tests of all drafters cover identity, distributions and KV."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import position_pair
import pytest
import torch
from harness import engine, metrics_of, patient, process, proposer_of, slem
from scenarios import generate, greedy

from vllm_hetero_spec import read_stats
from vllm_hetero_spec.engine.drafter import parallel
from vllm_hetero_spec.engine.drafter.token_picking import PickConfig

pytestmark = pytest.mark.engine

TOKENS = 40
WORDS = [5, 17, 30, 47, 64, 101, 140, 199]  # target tokens of each prompt
LIMITS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "prompts in parts": {"max_num_batched_tokens": 48, "max_num_seqs": 8},
    "preemption": {"num_gpu_blocks_override": 14, "block_size": 32, "max_num_seqs": 8},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return position_pair.build(tmp_path_factory.mktemp("positions"))


def prompts() -> list[str]:
    return [position_pair.text()[: 3 * words] for words in WORDS]


def written(llm: Any, count: int = 1) -> None:
    """Assert that each request gets the text, `count` times."""
    ids = llm.get_tokenizer().encode(position_pair.text(), add_special_tokens=False)
    found = generate(llm, prompts() * count, greedy(max_tokens=TOKENS))
    expected = [ids[words : words + TOKENS] for words in WORDS * count]
    assert list(found.values()) == expected


@pytest.fixture(scope="module", params=LIMITS)
def llm(request: pytest.FixtureRequest, pair: Path) -> Iterator[Any]:
    limits = {"max_model_len": 320} | LIMITS[request.param]
    with engine(pair / "target", slem(pair / "parallel", 8, context=1024), **limits) as llm:
        yield llm


def test_a_perfect_drafter_is_accepted_whole(llm: Any, request: pytest.FixtureRequest) -> None:
    """Each letter of a draft comes from a mask at its own position. Prompts are repeated."""
    written(llm, 2)
    gained, stats = metrics_of(llm), read_stats(llm)
    assert gained["num_accepted_tokens"] == gained["num_draft_tokens"] > 250
    assert gained["num_draft_tokens"] > 5 * gained["num_drafts"]
    assert stats["reused_tokens"] > 0
    assert not {"drafter_error", "nan_logits"} & stats["skipped"].keys()
    if "preemption" in request.node.name:
        assert gained["num_preemptions"] > 0
    if "parts" in request.node.name:
        assert stats["skipped"]["catching_up"] > 0


def test_a_draft_is_one_forward(llm: Any) -> None:
    before, drafter = read_stats(llm), proposer_of(llm).drafting.source.drafter
    rounds, begin = [], drafter.begin
    drafter.begin = lambda rows, control=None: (rounds.append(rows), begin(rows, control))
    written(llm)
    drafter.begin = begin
    stats = read_stats(llm)
    assert stats["forwards"] - before["forwards"] == len(rounds)
    assert stats["drafter_tokens"] - before["drafter_tokens"] > 5 * len(rounds)


def test_a_mask_at_another_position_is_caught(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output stays the same, and drafts are rejected."""
    whole = parallel.with_masks

    def shifted(plan: Any, mask: int) -> Any:
        feed, rows, lengths = whole(plan, mask)
        feed.tokens[1, feed.tokens[0] == mask] += 1
        return feed, rows, lengths

    monkeypatch.setattr(parallel, "with_masks", shifted)
    before = metrics_of(llm)
    written(llm)
    gained = {name: value - before[name] for name, value in metrics_of(llm).items()}
    assert gained["num_accepted_tokens"] < gained["num_draft_tokens"] / 4


def test_drafts_are_made_ahead(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter process drafts while the target verifies. Its drafts are right, too."""
    spec = process(pair / "parallel", 8, context=1024)
    with engine(pair / "target", spec, max_model_len=320) as llm:
        patient(llm, monkeypatch)
        written(llm)
        gained, stats = metrics_of(llm), read_stats(llm)
        monkeypatch.undo()
    assert gained["num_accepted_tokens"] == gained["num_draft_tokens"] > 100
    assert stats["drafts_ahead"] >= gained["num_drafts"] > 0
    assert stats["drafter_tokens"] > 5 * stats["forwards"]


def test_a_mask_of_the_tokenizer_is_never_drafted() -> None:
    rules = PickConfig(vocab_size=4, banned=torch.tensor([2]))
    logits = torch.tensor([[0.0, 5.0, 9.0, 1.0, 20.0]])  # the last row is no token
    found = {
        mask: int(parallel.without_mask(rules, mask).only_real(logits.clone()).argmax())
        for mask in (1, 4)
    }
    assert found == {1: 3, 4: 1}


def test_an_ordinary_drafter_of_the_same_weights(pair: Path) -> None:
    """With `parallel_drafting: false` each token of a draft has a forward of its own."""
    spec = slem(pair / "parallel", 8, context=1024, parallel_drafting=False)
    with engine(pair / "target", spec, max_model_len=320) as llm:
        written(llm)
        gained, stats = metrics_of(llm), read_stats(llm)
    # The last target token of a draft may be incomplete.
    assert gained["num_draft_tokens"] - gained["num_accepted_tokens"] <= gained["num_drafts"]
    assert stats["forwards"] > 10 * gained["num_drafts"] / len(WORDS)
