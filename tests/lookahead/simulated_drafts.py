# SPDX-License-Identifier: Apache-2.0
"""Simulated texts: acceptance probability and confidence of each draft token.

`SimulatedDrafts` are sampled in advance, so that all stopping rules are evaluated on the same ones.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

_BLOCK = 1024  # drafts that are sampled at a time


class SimulatedDrafts(NamedTuple):
    """Drafts, as arrays of shape [drafts, depth]."""

    accepted: np.ndarray  # probability that a token is accepted if all tokens before it were
    confidence: np.ndarray  # of the drafter, before it samples the token
    best_guess: np.ndarray  # acceptance probability given the confidence: the best prediction


@dataclass(frozen=True)
class Text:
    """A mixture of easy and hard tokens, and a drafter with a noisy confidence."""

    easy: float = 0.95  # acceptance rate of easy tokens
    hard: float = 0.35  # acceptance rate of hard tokens
    share: float = 0.7  # of easy tokens
    # The logit of the confidence minus that of the acceptance rate: standard deviation, and mean.
    noise: float = 0.7
    bias: float = 0.0  # above 0 the drafter is overconfident

    def draw(self, drafts: int, depth: int, generator: np.random.Generator) -> SimulatedDrafts:
        """Return independent drafts."""
        is_easy = generator.random((drafts, depth)) < self.share
        accepted = np.where(is_easy, self.easy, self.hard)
        seen = np.where(is_easy, self._seen(self.easy), self._seen(self.hard))
        seen += self.noise * generator.standard_normal(accepted.shape)
        return SimulatedDrafts(accepted, 1 / (1 + np.exp(-seen)), self._best_guess(seen))

    def _seen(self, rate: float) -> float:
        return math.log(rate / (1 - rate)) + self.bias

    def _best_guess(self, seen: np.ndarray) -> np.ndarray:
        """Return the acceptance rate given the logit of the confidence, by Bayes' rule."""
        easy, hard = (
            part * np.exp(-0.5 * ((seen - self._seen(rate)) / self.noise) ** 2)
            for part, rate in ((self.share, self.easy), (1 - self.share, self.hard))
        )
        best_guess: np.ndarray = (easy * self.easy + hard * self.hard) / (easy + hard)
        return best_guess


@dataclass(frozen=True)
class WholeDrafts(Text):
    """Drafts are accepted whole or not at all. The drafter's confidence shows which."""

    def draw(self, drafts: int, depth: int, generator: np.random.Generator) -> SimulatedDrafts:
        is_easy = generator.random((drafts, 1)) < self.share
        accepted = np.where(is_easy, self.easy, self.hard) * np.ones((1, depth))
        low, high = np.where(is_easy, 0.75, 0.2), np.where(is_easy, 0.85, 0.6)
        confidence = low + (high - low) * generator.random((drafts, depth))
        return SimulatedDrafts(accepted, confidence, accepted)


class DraftStream:
    """Drafts in the order in which `run` uses them, the same for every controller."""

    def __init__(self, text: Text, depth: int, seed: int) -> None:
        self._text, self._depth = text, depth
        self._generator = np.random.default_rng([seed, 1])
        self._left = text.draw(0, depth, self._generator)

    def take(self, count: int) -> SimulatedDrafts:
        """Return the next `count` drafts."""
        while len(self._left.accepted) < count:
            more = self._text.draw(_BLOCK, self._depth, self._generator)
            self._left = SimulatedDrafts(*map(np.concatenate, zip(self._left, more, strict=True)))
        taken = SimulatedDrafts(*(part[:count] for part in self._left))
        self._left = SimulatedDrafts(*(part[count:] for part in self._left))
        return taken


def survival_rule(drafts: SimulatedDrafts, threshold: float) -> np.ndarray:
    """Continue while the next token is likely enough to be accepted, given all confidences."""
    mean = float(drafts.best_guess.mean())
    return np.cumprod(drafts.best_guess, axis=1) * mean >= threshold


def confidence_rule(drafts: SimulatedDrafts, threshold: float) -> np.ndarray:
    """Continue while the confidence of the last token is high, regardless of earlier tokens."""
    return drafts.confidence >= threshold
