# SPDX-License-Identifier: Apache-2.0
"""Estimates of acceptance rates: unbiased, calibrated and up to date.

Verification ends at the first rejection, so the tokens after it are not tested.
"""

import json
import math

import numpy as np
import pytest
from simulated_drafts import SimulatedDrafts, Text

from vllm_hetero_spec.lookahead.acceptance import Acceptance, Confidence, Observation
from vllm_hetero_spec.lookahead.costs import rising
from vllm_hetero_spec.lookahead.estimates import DraftSteps

TRUE = np.array([0.9, 0.6, 0.8, 0.4])


def verify(generator: np.random.Generator, rates: np.ndarray, length: int) -> int:
    """Return the number of accepted tokens."""
    for position in range(length):
        if generator.random() >= rates[position]:
            return position
    return length


def learnt(drafts: int, rates: np.ndarray, seed: int = 0, length: int = 4) -> Acceptance:
    """Return what is learnt from drafts without confidences, of all lengths up to `length`."""
    generator = np.random.default_rng(seed)
    acceptance = Acceptance(4)
    for _ in range(drafts):
        wanted = int(generator.integers(1, length + 1))
        found = verify(generator, rates, wanted)
        acceptance.observe(Observation(wanted, found, (), wanted), False)
        acceptance.learn()
    return acceptance


def test_censoring_does_not_bias() -> None:
    """Late positions are tested only after accepted ones, and drafts have all lengths."""
    smooth = np.array([0.9, 0.8, 0.7, 0.65])
    found = np.mean([learnt(480, smooth, seed).rates(False) for seed in range(6)], axis=0)
    assert found == pytest.approx(smooth, abs=0.06)


def test_counting_untested_positions_would_be_caught() -> None:
    """Negative oracle: accepted / drafted is the survival probability, not the acceptance rate."""
    generator = np.random.default_rng(0)
    accepted = [verify(generator, TRUE, 4) for _ in range(2000)]
    naive = np.mean([[a > j for j in range(4)] for a in accepted], axis=0)
    assert naive == pytest.approx(np.cumprod(TRUE), abs=0.03)
    assert (TRUE - naive)[1:].min() > 0.05


@pytest.mark.parametrize("rate", [0.1, 0.9])
def test_untested_positions_are_like_the_one_before(rate: float) -> None:
    rates = learnt(200, np.full(4, rate), length=2).rates(False)
    assert rates == pytest.approx([rate] * 4, abs=0.15)


@pytest.mark.parametrize(("before", "after"), [(0.9, 0.1), (0.1, 0.9)])
def test_rates_follow_a_change(before: float, after: float) -> None:
    """Drafts that differ from their estimate by more than chance make earlier ones count less."""
    generator = np.random.default_rng(3)
    acceptance = Acceptance(4)
    for rate, drafts in ((before, 400), (after, 60)):
        for _ in range(drafts):
            found = verify(generator, np.full(4, rate), 4)
            acceptance.observe(Observation(4, found, (), 4), False)
            acceptance.learn()
        assert acceptance.rates(False)[0] == pytest.approx(rate, abs=0.15)


def test_a_few_rejected_drafts_are_no_change() -> None:
    """Earlier tests count less only after 32 tokens, accepted or expected."""
    acceptance = Acceptance(4)
    for number in range(105):
        acceptance.observe(Observation(4, 4 if number < 100 else 0, (), 4), False)
        acceptance.learn()
    assert acceptance.rates(False)[0] > 0.93


def test_a_sixth_of_the_expected_tokens_is_a_change() -> None:
    acceptance = Acceptance(4)
    for number in range(130):
        acceptance.observe(Observation(4, 4 if number < 100 else number % 2, (), 4), False)
        acceptance.learn()
    assert acceptance.rates(False)[1] < 0.6


def test_after_a_change_earlier_tests_are_a_hint() -> None:
    """They weigh 0.02: the first rate falls from 0.93 to about 0.55 within five drafts."""
    acceptance, rates = Acceptance(4), []
    for number in range(118):
        acceptance.observe(Observation(4, 4 if number < 100 else 0, (), 4), False)
        acceptance.learn()
        rates.append(acceptance.rates(False)[0])
    assert rates[112] > 0.9
    assert rates[117] == pytest.approx(0.55, abs=0.05)


def test_the_position_before_counts_for_three_drafts() -> None:
    acceptance = Acceptance(2)
    acceptance.observe(Observation(1, 1, (0.9,), 1), False)
    acceptance.learn()
    (tested,) = acceptance.survival_of([0.9], False)
    first, second = acceptance.rates(False)
    assert first == pytest.approx((tested + 3 * 0.7) / 4)  # 0.7 before any test
    assert second == pytest.approx(first)


# ----------------------------------------------------------------------------- confidence


class Binned:
    """Alternative to `Confidence`: a monotonic map of bins, each with a discounted count."""

    def __init__(self, bins: int = 12) -> None:
        self._edges = np.linspace(-3.0, 3.0, bins - 1)
        self._tested = np.full(bins, 2.0)  # prior: the rate equals the confidence
        middles = np.concatenate([[-3.5], (self._edges[1:] + self._edges[:-1]) / 2, [3.5]])
        self._accepted = 2.0 / (1.0 + np.exp(-middles))

    def _bin(self, confidences: np.ndarray) -> np.ndarray:
        inside = np.clip(confidences, 1e-6, 1 - 1e-6)
        return np.searchsorted(self._edges, np.log(inside / (1 - inside)))

    def predict(self, confidences: np.ndarray) -> np.ndarray:
        rates = rising((self._accepted / self._tested).tolist(), self._tested.tolist())
        return np.array(rates)[self._bin(confidences)]

    def observe(self, confidences: np.ndarray, accepted: np.ndarray) -> None:
        keep = 0.5 ** (len(confidences) / 256)
        index = self._bin(confidences)
        bins = len(self._tested)
        self._tested = self._tested * keep + np.bincount(index, minlength=bins) + 1e-3
        self._accepted *= keep
        self._accepted += np.bincount(index, weights=accepted, minlength=bins) + 5e-4


def logit(probability: float) -> float:
    return math.log(probability / (1 - probability))


def saved(weights: list[float], learnt: float = 0.0) -> Confidence:
    return Confidence.from_dict({"weights": weights, "learnt": np.diag([learnt] * 4).tolist()})


def test_the_score_bends_at_half_a_logit() -> None:
    chance = saved([0, 1, 0, 0]).chance
    for above in (0.0, 1.0, 2.0):
        confidence = 1 / (1 + math.exp(-(0.5 + above)))
        assert logit(chance(confidence, 0)) == pytest.approx(above)


def test_earlier_tests_weigh_half_after_1024_tokens() -> None:
    confidence = saved([1, 0, 0, 0], learnt=1e6)
    confidence.observe([0.5] * 1024, [0] * 1024, [True] * 1024)
    assert confidence.to_dict()["learnt"][0][0] == pytest.approx(5e5)


def test_a_sure_prediction_can_be_refuted() -> None:
    """One test has a variance of at least 0.1."""
    confidence = saved([1, 0, 0, 0])
    confidence.observe([0.99], [0], [False])
    assert confidence.to_dict()["learnt"][2][2] == pytest.approx(0.1)


def test_a_batch_moves_a_prediction_by_at_most_two_logits() -> None:
    confidence = Confidence()
    before = confidence.chance(0.9, 0)
    confidence.observe([0.9] * 200, [0] * 200, [False] * 200)
    assert logit(before) - logit(confidence.chance(0.9, 0)) == pytest.approx(2.0)


def test_confidences_beyond_six_logits_are_alike() -> None:
    """Confidences above 99.75 %, 6 logits, are alike; those below are not."""
    chance = Confidence().chance
    assert chance(1.0, 0) == pytest.approx(chance(0.9976, 0))
    assert chance(0.99, 0) < chance(1.0, 0)


TEXTS = {
    "calibrated": Text(),
    "sure of itself": Text(0.6, 0.1, 0.5, 0.7, bias=2.0),
    "timid": Text(0.95, 0.6, 0.6, 0.7, bias=-1.5),
    "useless": Text(0.02, 0.01, 0.5, 0.7, bias=4.0),
    "noisy": Text(0.9, 0.3, 0.6, 2.0),
}


def excess_loss(drafts: SimulatedDrafts, predicted: np.ndarray) -> float:
    """Return the mean logarithmic loss minus that of the best possible prediction."""
    p, q = drafts.best_guess.ravel(), np.clip(predicted.ravel(), 1e-4, 1 - 1e-4)
    entropy = p * np.log(q) + (1 - p) * np.log(1 - q) - p * np.log(p) - (1 - p) * np.log(1 - p)
    return float(-entropy.mean())


def losses(text: Text, tests: int, seed: int) -> tuple[float, float]:
    """Return the excess losses of the regression and of the bins after `tests` tests."""
    generator = np.random.default_rng(seed)
    confidence, binned = Confidence(), Binned()
    for _ in range(tests // 4):
        drafts = text.draw(4, 1, generator)
        confidences = drafts.confidence.ravel()
        accepted = generator.random(4) < drafts.accepted.ravel()
        confidence.observe(confidences.tolist(), [0] * 4, accepted.tolist())
        binned.observe(confidences, accepted)
    held_out = text.draw(2000, 1, generator)
    confidences = held_out.confidence.ravel()
    return (
        excess_loss(held_out, confidence.predict(confidences, np.zeros(len(confidences)))),
        excess_loss(held_out, binned.predict(confidences)),
    )


@pytest.mark.parametrize(("tests", "share"), [(8, 0.7), (24, 0.7), (96, 0.8)])
def test_the_regression_is_the_better_map(tests: int, share: float) -> None:
    """With few tests, its mean loss over all texts is much lower than that of bins."""
    found = np.array([losses(text, tests, s) for text in TEXTS.values() for s in range(8)])
    ours, bins = found.mean(0)
    assert ours < share * bins


def test_the_regression_is_no_worse_for_long() -> None:
    """After many tests bins are better, but by less than 0.01."""
    found = np.array([losses(text, 800, s) for text in TEXTS.values() for s in range(4)])
    ours, bins = found.mean(0)
    assert ours < bins + 0.01


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_calibrated_after_some_hundred_tests(text: Text) -> None:
    generator = np.random.default_rng(5)
    confidence = Confidence()
    for _ in range(200):
        drafts = text.draw(4, 1, generator)
        accepted = generator.random(4) < drafts.accepted.ravel()
        confidence.observe(drafts.confidence.ravel().tolist(), [0] * 4, accepted.tolist())
    held_out = text.draw(4000, 1, generator)
    predicted = confidence.predict(held_out.confidence, np.zeros(1))
    assert predicted.mean() == pytest.approx(held_out.accepted.mean(), abs=0.05)
    assert excess_loss(held_out, predicted) < 0.03


def test_rates_depend_on_the_position() -> None:
    """Later tokens are accepted less often than their confidence."""
    generator = np.random.default_rng(6)
    confidence = Confidence()
    for _ in range(400):
        for position, rate in ((0, 0.9), (4, 0.4)):
            confidence.observe([0.8] * 2, [position] * 2, (generator.random(2) < rate).tolist())
    assert confidence.chance(0.8, 0) > 0.8
    assert confidence.chance(0.8, 4) < 0.5


def test_extremes_and_single_tokens() -> None:
    """Confidences of 0 and 1 are valid, and the scalar `chance` equals `predict`."""
    confidence = Confidence()
    for _ in range(100):
        confidence.observe([0.0, 1.0, 1.0], [0, 1, 2], [True, False, True])
    for value in (0.0, 1e-300, 0.3, 1.0 - 1e-16, 1.0):
        for position in (0, 5, 63):
            alone = confidence.chance(value, position)
            assert 0 < alone < 1
            found = confidence.predict(np.array([value]), np.array([position]))
            assert found == pytest.approx(alone, rel=1e-9)
    assert math.isnan(confidence.predict(np.array([np.nan]), np.array([0]))[0])


def test_an_overconfident_drafter_is_detected() -> None:
    """Eight rejections in a row are enough."""
    confidence = Confidence()
    for _ in range(8):
        confidence.observe([0.99], [0], [False])
    assert confidence.chance(0.99, 0) < 0.3


def test_one_batch_of_surprises_does_not_run_away() -> None:
    confidence = Confidence()
    confidence.observe([0.999] * 500, [0] * 500, [False] * 500)
    assert confidence.chance(0.999, 0) > 0.001
    for _ in range(5):
        confidence.observe([0.999] * 500, [0] * 500, [True] * 450 + [False] * 50)
    assert confidence.chance(0.999, 0) == pytest.approx(0.9, abs=0.05)


# ----------------------------------------------------------------------------- steps


@pytest.mark.parametrize(("extra", "each"), [(0.0, 1.0), (1.0, 0.7), (1.0, 2.5), (0.0, 0.4)])
def test_steps_of_a_draft(extra: float, each: float) -> None:
    """A drafter step may yield no target token, or several."""
    steps = DraftSteps()
    assert steps.expected(4) == pytest.approx(4)
    for tokens in (2, 5, 3, 4, 1) * 40:
        steps.observe(tokens, extra + each * tokens)
    for tokens in (1, 3, 5):
        assert steps.expected(tokens) == pytest.approx(extra + each * tokens, rel=0.08)
    assert steps.each == pytest.approx(each, rel=0.08)


def test_steps_of_a_single_length() -> None:
    """If all drafts have one length, its estimate is right, and those of others are plausible."""
    steps = DraftSteps()
    for _ in range(100):
        steps.observe(4, 6)
    assert steps.expected(4) == pytest.approx(6, rel=0.03)
    assert 1 <= steps.expected(1) < steps.expected(8) < 13


def test_steps_without_waiting_cost_nothing() -> None:
    steps = DraftSteps()
    for _ in range(200):
        steps.observe(4, 0)
    assert steps.expected(4) < 0.5
    for _ in range(400):
        steps.observe(4, 6)
    assert steps.expected(4) > 4.5


def test_steps_before_the_first_rounds() -> None:
    """A parallel drafter takes one step for all tokens. Saved steps keep what they began with."""
    steps = DraftSteps(extra=1.0, each=0.0)
    for _ in range(3):
        for tokens in (1, 4, 8):
            assert steps.expected(tokens) == pytest.approx(1.0)
        steps.observe(4, 1)
        steps = DraftSteps.from_dict(json.loads(json.dumps(steps.to_dict())))
    assert DraftSteps(each=0.0).expected(4) == 0.0


def test_what_a_round_counts() -> None:
    """Before any round, the fit has a tenth of a round and four squares. Some 200 rounds count."""
    steps = DraftSteps()
    steps.observe(4, 10)
    assert (steps.expected(0), steps.each) == pytest.approx((4.0, 1.4))
    for _ in range(2000):
        steps.observe(4, 10)
    assert steps.to_dict()["sums"][0] == pytest.approx(200, rel=0.01)
