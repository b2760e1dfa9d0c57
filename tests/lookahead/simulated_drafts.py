# SPDX-License-Identifier: Apache-2.0
"""Texts that are not there: how likely each drafted token is accepted, and how sure the drafter is.

`SimulatedDrafts` are drawn beforehand, so that every rule for stopping can be tried exactly.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

_BLOCK = 1024  # drafts that are drawn at a time


class SimulatedDrafts(NamedTuple):
    """Drafts with everything that can happen to them, [drafts, depth] each.

    Attributes:
        accepted: Probability that a token is accepted if all before it were.
        confidence: What the drafter says before it draws the token.
        best_guess: Probability of acceptance given the confidence: the best anyone can know.
    """

    accepted: np.ndarray
    confidence: np.ndarray
    best_guess: np.ndarray


@dataclass(frozen=True)
class Text:
    """Easy and hard tokens mixed, and a drafter that knows only roughly which is which.

    Attributes:
        easy: Acceptance of an easy token.
        hard: Acceptance of a hard one.
        share: Share of easy tokens.
        noise: Standard deviation of the confidence's logit around that of the acceptance.
        bias: Its mean: above 0 the drafter is too sure of itself.
    """

    easy: float = 0.95
    hard: float = 0.35
    share: float = 0.7
    noise: float = 0.7
    bias: float = 0.0

    def draw(self, drafts: int, depth: int, generator: np.random.Generator) -> SimulatedDrafts:
        """Independent drafts."""
        is_easy = generator.random((drafts, depth)) < self.share
        accepted = np.where(is_easy, self.easy, self.hard)
        seen = np.where(is_easy, self._seen(self.easy), self._seen(self.hard))
        seen += self.noise * generator.standard_normal(accepted.shape)
        return SimulatedDrafts(accepted, 1 / (1 + np.exp(-seen)), self._best_guess(seen))

    def _seen(self, rate: float) -> float:
        return math.log(rate / (1 - rate)) + self.bias

    def _best_guess(self, seen: np.ndarray) -> np.ndarray:
        """Bayes' rule: acceptance given the confidence's logit."""
        easy, hard = (
            part * np.exp(-0.5 * ((seen - self._seen(rate)) / self.noise) ** 2)
            for part, rate in ((self.share, self.easy), (1 - self.share, self.hard))
        )
        best_guess: np.ndarray = (easy * self.easy + hard * self.hard) / (easy + hard)
        return best_guess


class DraftStream:
    """The drafts of a text in the order in which `run` meets them: the same for any controller.

    Args:
        text: Where they come from.
        depth: Tokens of each.
        seed: The run's.
    """

    def __init__(self, text: Text, depth: int, seed: int) -> None:
        self._text, self._depth = text, depth
        self._generator = np.random.default_rng([seed, 1])
        self._left = text.draw(0, depth, self._generator)

    def take(self, count: int) -> SimulatedDrafts:
        """The next so many."""
        while len(self._left.accepted) < count:
            more = self._text.draw(_BLOCK, self._depth, self._generator)
            self._left = SimulatedDrafts(*map(np.concatenate, zip(self._left, more, strict=True)))
        taken = SimulatedDrafts(*(part[:count] for part in self._left))
        self._left = SimulatedDrafts(*(part[count:] for part in self._left))
        return taken


def survival_rule(drafts: SimulatedDrafts, threshold: float) -> np.ndarray:
    """Go on while the next token is likely enough to count, given all confidences so far."""
    mean = float(drafts.best_guess.mean())
    return np.cumprod(drafts.best_guess, axis=1) * mean >= threshold


def confidence_rule(drafts: SimulatedDrafts, threshold: float) -> np.ndarray:
    """Go on while the drafter's confidence is high, whatever came before."""
    return drafts.confidence >= threshold
