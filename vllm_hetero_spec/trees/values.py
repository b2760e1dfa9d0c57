# SPDX-License-Identifier: Apache-2.0
"""How likely each child of a node is what the target goes on with, learnt while it verifies.

Children of one node exclude each other: one of them is next, or none. So they are valued together,
each against its siblings and the possibility of none. All functions take children as arrays [m]:
the number of their parent, from 0 on; their rank among its children, 0 the likeliest; its depth;
and what is known of each child, `evidence` [m, 2].
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vllm_hetero_spec.lookahead.acceptance import numbers

# The slopes of the two facts that are known, whether it is the first child, an offset, the
# logarithm of the depth. A greedy child alone is taken at its word: for the odds of its share.
GREEDY_PRIOR = (1.0, -1.0, 0.0, 0.0, 0.0)
RACE_PRIOR = (1.0, 0.3, 0.3, 0.3, 0.0)
_PRIOR_INFORMATION = np.diag([4.0, 4.0, 4.0, 0.5, 4.0])  # 1 / variance; the offset varies most
_HALF_LIFE = 256  # nodes until one counts half
_LARGEST_STEP = 2.0  # logits that a prediction may move at once, whatever the surprise
_LEAST_SCORE, _LARGEST_SCORE = -12.0, 6.0  # logits against none of the children
_LEAST_SHARE, _LARGEST_LEAD = 1e-5, 12.0  # beyond them a child is as unlikely as another
_PRIOR_RATES, _PRIOR_WEIGHT = (0.5, 0.15, 0.07, 0.04), 4.0  # by rank, worth so many nodes
_RANKS = 16  # as many as anyone looks at


def greedy_evidence(shares: np.ndarray) -> np.ndarray:
    """What is known of a greedy request's children: their shares of what the drafter may write."""
    return np.stack([_log(shares), _log(1.0 - shares)], 1)


def race_evidence(leads: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """What is known of children that race.

    Args:
        leads: Logarithm of the first arrival's lead over each; 0 for the first, [m].
        shares: Their probabilities under the drafter's row, [m].
    """
    return np.stack([-np.minimum(leads, _LARGEST_LEAD), _log(shares)], 1)


class ChildChances:
    """Five numbers that make probabilities of what is known of children.

    A multinomial logit that forgets old tests: P[child i is next] = e_i / (1 + sum of all e_j),
    where log e is linear in five features.

    Args:
        prior: What it begins with.
    """

    def __init__(self, prior: Sequence[float]) -> None:
        self._weights = np.array(prior)
        self._information = _PRIOR_INFORMATION.copy()
        self._nodes = 0.0  # learnt from, old ones counting less

    def shares(
        self, parent: np.ndarray, rank: np.ndarray, depth: np.ndarray, evidence: np.ndarray
    ) -> np.ndarray:
        """P[the child is next | its parent was emitted], [m]."""
        return self._shares(parent, _features(rank, depth, evidence))

    def observe(
        self,
        parent: np.ndarray,
        rank: np.ndarray,
        depth: np.ndarray,
        evidence: np.ndarray,
        taken: np.ndarray,
    ) -> None:
        """Learn from nodes that were visited together: one step of Newton's method.

        Args:
            parent: As above, of all children that were known there, whether in the tree or not.
            rank: [m].
            depth: [m].
            evidence: [m, 2].
            taken: bool [m], what was next; at most one for each parent.
        """
        if not len(parent):
            return
        features = _features(rank, depth, evidence)
        predicted = self._shares(parent, features)
        # Of each node the covariance of the features of what is next, 0 for none.
        means = np.zeros((parent.max() + 1, features.shape[1]))
        np.add.at(means, parent, predicted[:, None] * features)
        tests = (features * predicted[:, None]).T @ features - means.T @ means
        nodes = len(np.unique(parent))
        keep = 0.5 ** (nodes / _HALF_LIFE)
        self._nodes = self._nodes * keep + nodes
        learnt = (self._information - _PRIOR_INFORMATION) * keep
        self._information = _PRIOR_INFORMATION + learnt + tests
        step = np.linalg.solve(self._information, features.T @ (taken - predicted))
        largest = float(np.abs(features @ step).max())
        self._weights = self._weights + step * min(1.0, _LARGEST_STEP / max(largest, 1e-9))

    def to_dict(self) -> dict[str, Any]:
        """What was learnt, as JSON takes it."""
        return {
            "weights": self._weights.tolist(),
            "information": self._information.tolist(),
            "nodes": self._nodes,
        }

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any], weight: float) -> "ChildChances":
        """What `to_dict` gave, worth so many nodes at most.

        Raises:
            ValueError: It is not that.
        """
        chances = cls(numbers(saved["weights"], (len(GREEDY_PRIOR),)).tolist())
        learnt = numbers(saved["information"], _PRIOR_INFORMATION.shape) - _PRIOR_INFORMATION
        if np.linalg.eigvalsh(learnt)[0] < -1e-6:
            raise ValueError("less is known than before anything was learnt")
        nodes = max(float(numbers(saved["nodes"], ())), 0.0)
        keep = weight / max(nodes, weight)
        chances._nodes = nodes * keep
        chances._information = _PRIOR_INFORMATION + learnt * keep
        return chances

    def _shares(self, parent: np.ndarray, features: np.ndarray) -> np.ndarray:
        scores = np.clip(features @ self._weights, _LEAST_SCORE, _LARGEST_SCORE)
        odds = np.exp(scores)
        return odds / (1.0 + np.bincount(parent, odds)[parent])


class TreeValues(NamedTuple):
    """What is known of the children of trees.

    Attributes:
        greedy: Where the target takes the likeliest token.
        race: Where it races.
    """

    greedy: ChildChances
    race: ChildChances

    @classmethod
    def unknown(cls) -> "TreeValues":
        """Before any tree."""
        return cls(ChildChances(GREEDY_PRIOR), ChildChances(RACE_PRIOR))

    def to_dict(self) -> dict[str, Any]:
        """What was learnt, as JSON takes it."""
        return {"greedy": self.greedy.to_dict(), "race": self.race.to_dict()}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any], weight: float) -> "TreeValues":
        """What `to_dict` gave, each worth so many nodes at most.

        Raises:
            ValueError: It is not that.
        """
        greedy, race = (ChildChances.from_dict(saved[kind], weight) for kind in ("greedy", "race"))
        return cls(greedy, race)


class RankRates:
    """The share of each rank, whatever is known of the child: ERSD's trees, and Sequoia's.

    With these the best tree has always the same shape: that of Algorithm 3 where the probability
    that a path of ranks is accepted is the product of its ranks' rates.

    Args:
        ranks: Children of a node that are told apart.
    """

    def __init__(self, ranks: int) -> None:
        prior = [*_PRIOR_RATES, *[0.0] * ranks][:ranks]
        self._nodes = _PRIOR_WEIGHT
        self._taken = np.array(prior) * _PRIOR_WEIGHT

    def shares(
        self, parent: np.ndarray, rank: np.ndarray, depth: np.ndarray, evidence: np.ndarray
    ) -> np.ndarray:
        """See `ChildChances`."""
        rates = np.append(self._taken / self._nodes, 0.0)
        return rates[np.minimum(rank, len(self._taken))]

    def observe(
        self,
        parent: np.ndarray,
        rank: np.ndarray,
        depth: np.ndarray,
        evidence: np.ndarray,
        taken: np.ndarray,
    ) -> None:
        """See `ChildChances`."""
        nodes = len(np.unique(parent))
        keep = 0.5 ** (nodes / _HALF_LIFE)
        size = len(self._taken)
        self._nodes = self._nodes * keep + nodes
        self._taken = self._taken * keep + np.bincount(rank[taken], minlength=size)[:size]


class RankValues(NamedTuple):
    """What takes the place of `TreeValues` where trees are chosen by rank alone.

    Attributes:
        greedy: Where the target takes the likeliest token.
        race: Where it races.
    """

    greedy: RankRates
    race: RankRates

    @classmethod
    def unknown(cls) -> "RankValues":
        """Before any tree."""
        return cls(RankRates(_RANKS), RankRates(_RANKS))


def _features(rank: np.ndarray, depth: np.ndarray, evidence: np.ndarray) -> np.ndarray:
    return np.column_stack([evidence, rank == 0, np.ones(len(rank)), np.log1p(depth)])


def _log(shares: np.ndarray) -> np.ndarray:
    return np.log(np.maximum(shares, _LEAST_SHARE))
