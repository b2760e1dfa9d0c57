# SPDX-License-Identifier: Apache-2.0
"""The confidences of recent drafts, on which a rule for drafting can be tried without a model.

A rate per position hides that some drafts are good to the end and others lost at once. Recent
drafts keep that: replaying them says what any lookahead, and any rule for stopping, would give.
"""

from collections.abc import Sequence

import numpy as np

from vllm_hetero_spec.lookahead.acceptance import Confidence

_KEPT = 64  # drafts
_ENDED = -1.0  # in the place of a confidence: the drafter had nothing more to propose


class RecentDrafts:
    """A ring of the last drafts.

    Args:
        positions: Longest draft, in target tokens.
    """

    def __init__(self, positions: int) -> None:
        self._ring = np.full((_KEPT, positions), np.nan)
        self._count = 0

    def add(self, confidences: Sequence[float], wanted: int) -> None:
        """Keep one draft.

        Args:
            confidences: One for each token it proposed, in order.
            wanted: Tokens that were asked for; a shorter draft is taken to have ended by itself.
        """
        row = self._ring[self._count % _KEPT]
        row[:] = np.nan
        row[len(confidences) : wanted] = _ENDED
        row[: len(confidences)] = confidences[: len(row)]
        self._count += 1

    def survival(self, confidence: Confidence, rates: np.ndarray) -> np.ndarray:
        """P[accepted up to each position] of recent drafts, [n, positions], n at least 1.

        Args:
            confidence: What it means today.
            rates: Acceptance of positions that a draft did not reach, [positions].
        """
        drafts = self._ring[: min(self._count, _KEPT)]
        if not len(drafts):
            return np.cumprod(rates)[None]
        depth = np.arange(drafts.shape[1])
        told = confidence.predict(drafts, depth)
        ended, unknown = drafts == _ENDED, np.isnan(drafts)
        # Where a draft was not asked for so much, it might have ended as others did.
        before = np.hstack([np.zeros((len(drafts), 1), bool), ended[:, :-1]])
        asked = (~unknown & ~before).sum(0)
        going = 1.0 - (ended & ~before).sum(0) / np.maximum(asked, 1)
        steps = np.where(unknown, rates * going, np.where(ended, 0.0, told))
        return np.cumprod(steps, axis=1)
