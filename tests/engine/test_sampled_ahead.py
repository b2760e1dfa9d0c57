# SPDX-License-Identifier: Apache-2.0
"""Tests of sampled drafts that the drafter process precomputes (`draft_ahead`).

The output must follow the target's distribution. Two known faults must be detected.
"""

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chain_pair import PROMPT
from drawn_samples import SAMPLES, SETTINGS, WAVE, Law, sample, waiting
from goodness import ALPHA
from harness import engine, metrics_of, patient, process
from vllm import SamplingParams

from vllm_hetero_spec import read_stats
from vllm_hetero_spec.draft.draft import Draft, DraftProbs
from vllm_hetero_spec.draft.sampling import DraftSampling
from vllm_hetero_spec.engine.ahead import client
from vllm_hetero_spec.engine.ahead.messages import RequestUpdate
from vllm_hetero_spec.engine.ahead.sampled_records import SampledRecordDecoder
from vllm_hetero_spec.verify.noise import ACCEPT, DRAFT

pytestmark = [pytest.mark.full, pytest.mark.engine]


@pytest.fixture(scope="module")
def laws(chain_pair: Path) -> dict[str, Law]:
    """The target's distribution under each setting."""
    return {name: Law.of(chain_pair / "target", setting) for name, setting in SETTINGS.items()}


@pytest.fixture(scope="module", params=[("tli", "token"), ("push_forward", "block")], ids="-".join)
def llm(request: pytest.FixtureRequest, chain_pair: Path) -> Iterator[Any]:
    method, verification = request.param
    spec = process(chain_pair / "drafter", 3, method=method, verification=verification)
    # 4 * WAVE drafter rows: enough that each request of a wave has guesses.
    with engine(chain_pair / "target", spec, max_num_seqs=4 * WAVE) as llm:
        yield llm


def test_samples_follow_the_targets_law(
    llm: Any, laws: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers precomputed drafts and drafts that the target waits for."""
    patient(llm, monkeypatch)
    before = read_stats(llm)
    for name, setting in SETTINGS.items():
        found = sample(llm, SAMPLES, setting)
        print(f"\n{name}, foreseen: p {laws[name].p_value(found):.3f}")
        assert laws[name].p_value(found) > ALPHA, name
    waiting(llm, monkeypatch)
    found = sample(llm, SAMPLES, SETTINGS["few"], seeds=SAMPLES)
    print(f"\nfew, waited for: p {laws['few'].p_value(found):.3f}")
    assert laws["few"].p_value(found) > ALPHA
    stats, metrics = read_stats(llm), metrics_of(llm)
    gained = {name: stats[name] - before[name] for name in ("drafts_ahead", "drafts_waited")}
    print(gained, stats["drafts_guessed"], metrics, stats["skipped"])
    assert min(gained.values()) > SAMPLES // 4
    assert stats["drafts_guessed"] > SAMPLES // 20
    assert 0 < metrics["num_accepted_tokens"] < metrics["num_draft_tokens"]
    assert set(stats["skipped"]) <= {"not_guessed", "not_ready", "catching_up"}


def a_tenth_of_the_probability(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: `draft_probs` contain a tenth of the true probabilities."""
    drafts = SampledRecordDecoder.drafts

    def told(self: SampledRecordDecoder, *args: Any) -> list[Draft]:
        made = []
        for draft in drafts(self, *args):
            probs = draft.draft_probs
            less = probs and DraftProbs(0.1 * probs.rows, probs.row_of)
            made.append(draft._replace(draft_probs=less))
        return made

    monkeypatch.setattr(SampledRecordDecoder, "drafts", told)


def numbers_of_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: the drafter samples with the random numbers that verification uses to accept."""

    def drawn(*, draw: DraftSampling | None, **told: Any) -> RequestUpdate:
        draw = draw and replace(draw, seed=draw.seed ^ DRAFT ^ ACCEPT)
        return RequestUpdate(**told, draw=draw)

    monkeypatch.setattr(client, "RequestUpdate", drawn)


def test_wrong_ways_are_caught(
    llm: Any, laws: dict, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Each fault is tested under one rule.

    `block` accepts or rejects whole prefixes, so shared random numbers hardly change its output.
    """
    block = "block" in request.node.name
    wrong = a_tenth_of_the_probability if block else numbers_of_verification
    patient(llm, monkeypatch)
    waiting(llm, monkeypatch)
    wrong(monkeypatch)
    found = sample(llm, 480 if block else 960, SETTINGS["few"], seeds=10_000)
    print(f"\n{wrong.__name__}: p {laws['few'].p_value(found):.2g}")
    assert laws["few"].p_value(found) < ALPHA


@pytest.mark.parametrize("method", ["tli", "hetero"])
def test_a_drafter_that_is_the_target_is_nearly_always_right(
    chain_pair: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rate is below 1 because the drafter samples only from its most likely tokens."""
    target = chain_pair / "target"
    with engine(target, process(target, method=method), max_num_seqs=16) as llm:
        patient(llm, monkeypatch)
        waiting(llm, monkeypatch)
        params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=41, ignore_eos=True)
        llm.generate([PROMPT[start:] for start in range(16)], params, use_tqdm=False)
        metrics, stats = metrics_of(llm), read_stats(llm)
    del llm
    gc.collect()
    assert metrics["num_draft_tokens"] > 400
    assert metrics["num_accepted_tokens"] / metrics["num_draft_tokens"] > 0.97
    assert stats["drafts_ahead"] > 20
