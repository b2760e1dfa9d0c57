# SPDX-License-Identifier: Apache-2.0
"""Samples with precomputed drafts (`draft_ahead`) follow the target's law; faults are detected."""

import gc
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from chain_pair import PROMPT
from goodness import ALPHA, p_value
from harness import engine, metrics_of, patient, process, proposer_of
from target_law import LENGTH, Ids, Setting, counted, law_of, law_of_third, load
from vllm import SamplingParams

from vllm_hetero_spec import read_stats
from vllm_hetero_spec.draft.draft import Draft, DraftProbs
from vllm_hetero_spec.draft.sampling import DraftSampling
from vllm_hetero_spec.engine.ahead import client
from vllm_hetero_spec.engine.ahead.messages import RequestUpdate
from vllm_hetero_spec.engine.ahead.sampled_records import SampledRecordDecoder
from vllm_hetero_spec.verify.noise import ACCEPT, DRAFT

pytestmark = [pytest.mark.full, pytest.mark.engine]

SAMPLES, WAVE = 640, 16
# Under `few` only few sequences are possible, so each is sampled often.
SETTINGS = {"hot": Setting(1.0), "few": Setting(1.6, top_k=6)}


class Law(NamedTuple):
    """The target's law of the first tokens, and of the third, which is the first drafted one."""

    texts: dict[Ids, float]
    third: dict[int, float]

    @classmethod
    def of(cls, target: Path, setting: Setting) -> "Law":
        """Compute the distributions of a model after `PROMPT`."""
        model, start = load(target, PROMPT)
        third = law_of_third(model, start, setting).tolist()
        return cls(law_of(model, start, setting), dict(enumerate(third)))

    def p_value(self, found: Counter) -> float:
        """Return the smaller one of the p-values of both distributions."""
        third = Counter[int]()
        for ids, count in found.items():
            third[ids[2]] += count
        return min(p_value(found, self.texts), p_value(third, self.third))


def sample(llm: Any, count: int, setting: Setting, *, seeds: int = 0) -> Counter:
    """Return samples of one setting, in batches of `WAVE`. Every third request has its own seed."""
    found = Counter[Ids]()
    for start in range(seeds, seeds + count, WAVE):
        params = [
            SamplingParams(
                temperature=setting.temperature,
                top_k=setting.top_k,
                top_p=setting.top_p,
                seed=None if number % 3 else number,
                max_tokens=LENGTH + 1,
                ignore_eos=True,
            )
            for number in range(start, start + WAVE)
        ]
        outputs = llm.generate([PROMPT] * WAVE, params, use_tqdm=False)
        found += counted(output.outputs[0].token_ids for output in outputs)
    return found


def waiting(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the target wait at most 10 s for each draft that was not precomputed."""
    observer = proposer_of(llm).drafting.observer
    monkeypatch.setattr(observer, "wait", lambda missing, *_: (max(missing.values()), 10.0))


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
    """One fault per rule. `block` judges whole prefixes, so shared random numbers hardly matter."""
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
