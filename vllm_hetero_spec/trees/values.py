# SPDX-License-Identifier: Apache-2.0
"""Models of the probability that the target continues with a child of a node.

They are fitted online to the results of verification. At most one child of a node is next, so
siblings are valued together. All functions take m children as arrays [m]: `parent` (number of the
parent, from 0), `rank` (among its children; 0 is the most likely), `depth` (of the parent) and
`evidence` [m, 2], the features of each child.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from vllm_hetero_spec.lookahead.acceptance import numbers
from vllm_hetero_spec.lookahead.estimates import Estimates, Parts

# Weights of: the two columns of evidence, is-first-child, offset, log of the depth. The greedy
# prior gives a child without siblings the odds of its share.
GREEDY_PRIOR = (1.0, -1.0, 0.0, 0.0, 0.0)
RACE_PRIOR = (1.0, 0.3, 0.3, 0.3, 0.0)
_PRIOR_INFORMATION = np.diag([4.0, 4.0, 4.0, 0.5, 4.0])  # 1 / variance; the offset varies most
_HALF_LIFE = 256  # nodes after which an observation has half its weight
_LARGEST_STEP = 2.0  # logits, the largest change of a prediction by one update
_LEAST_SCORE, _LARGEST_SCORE = -12.0, 6.0  # logits, relative to "no child is next"
_LEAST_SHARE, _LARGEST_LEAD = 1e-5, 12.0  # limits of evidence; beyond them it does not matter
_PART = "trees"  # name in the estimates of a pair
_SAVED_WEIGHT = 64  # nodes that all observations before a restart count for


def greedy_evidence(shares: np.ndarray) -> np.ndarray:
    """Return evidence of a greedy request's children from their shares of the parent's value."""
    return np.stack([_log(shares), _log(1.0 - shares)], 1)


def race_evidence(leads: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Return evidence of children of a race.

    Args:
        leads: Log of the first arrival's lead over each child; 0 for the first, [m].
        shares: Probabilities in the drafter's row, [m].
    """
    return np.stack([-np.minimum(leads, _LARGEST_LEAD), _log(shares)], 1)


class ChildChances:
    """Multinomial logit model with exponential forgetting.

    P[child i is next] = e_i / (1 + sum of all e_j), where log e is linear in five features.
    """

    def __init__(self, prior: Sequence[float]) -> None:
        self._weights = np.array(prior)
        self._information = _PRIOR_INFORMATION.copy()
        self._nodes = 0.0  # discounted number of observed nodes

    def shares(
        self, parent: np.ndarray, rank: np.ndarray, depth: np.ndarray, evidence: np.ndarray
    ) -> np.ndarray:
        """Return P[the child is next | its parent was emitted], [m]."""
        return self._shares(parent, _features(rank, depth, evidence))

    def observe(
        self,
        parent: np.ndarray,
        rank: np.ndarray,
        depth: np.ndarray,
        evidence: np.ndarray,
        taken: np.ndarray,
    ) -> None:
        """Update the weights by one Newton step on the nodes visited in a step.

        Pass all known children of these nodes, also those that were not verified. `taken`, bool
        [m], is True for the next token; at most one per parent.
        """
        if not len(parent):
            return
        features = _features(rank, depth, evidence)
        predicted = self._shares(parent, features)
        # Sum over nodes of the covariance of the next child's features (0 if there is none).
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
        """Return the state as JSON values."""
        return {
            "weights": self._weights.tolist(),
            "information": self._information.tolist(),
            "nodes": self._nodes,
        }

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any], weight: float) -> "ChildChances":
        """Restore `to_dict` with the weight of at most `weight` nodes.

        Raises ValueError if the data are invalid.
        """
        chances = cls(numbers(saved["weights"], (len(GREEDY_PRIOR),)).tolist())
        learnt = numbers(saved["information"], _PRIOR_INFORMATION.shape) - _PRIOR_INFORMATION
        if np.linalg.eigvalsh(learnt)[0] < -1e-6:
            raise ValueError("the saved information matrix is below the prior")
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
    """Models for greedy requests and for requests with races."""

    greedy: ChildChances
    race: ChildChances

    @classmethod
    def unknown(cls) -> "TreeValues":
        """Return models without observations."""
        return cls(ChildChances(GREEDY_PRIOR), ChildChances(RACE_PRIOR))

    @classmethod
    def of(cls, known: Estimates) -> "TreeValues":
        """Return the models among these estimates. New ones become part of them."""
        values: TreeValues = known.parts.setdefault(_PART, cls.unknown())
        return values

    def to_dict(self) -> dict[str, Any]:
        return {"greedy": self.greedy.to_dict(), "race": self.race.to_dict()}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any], weight: float) -> "TreeValues":
        """Restore `to_dict`, each with the weight of at most `weight` nodes.

        Raises ValueError if the data are invalid.
        """
        greedy, race = (ChildChances.from_dict(saved[kind], weight) for kind in ("greedy", "race"))
        return cls(greedy, race)


TREE_PARTS: Parts = {_PART: partial(TreeValues.from_dict, weight=_SAVED_WEIGHT)}


def _features(rank: np.ndarray, depth: np.ndarray, evidence: np.ndarray) -> np.ndarray:
    return np.column_stack([evidence, rank == 0, np.ones(len(rank)), np.log1p(depth)])


def _log(shares: np.ndarray) -> np.ndarray:
    return np.log(np.maximum(shares, _LEAST_SHARE))
