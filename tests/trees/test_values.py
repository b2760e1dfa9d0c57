# SPDX-License-Identifier: Apache-2.0
"""Probabilities of children are learned from few nodes, nearly as well as with the true weights."""

import json
from typing import NamedTuple

import numpy as np
import pytest

from vllm_hetero_spec.lookahead.costs import CostModel
from vllm_hetero_spec.lookahead.estimates import Estimates
from vllm_hetero_spec.trees.values import (
    GREEDY_PRIOR,
    RACE_PRIOR,
    TREE_PARTS,
    ChildChances,
    TreeValues,
    greedy_evidence,
    race_evidence,
)


class Nodes(NamedTuple):
    """Children of visited nodes, with `taken` for each child that came next."""

    parent: np.ndarray
    rank: np.ndarray
    depth: np.ndarray
    evidence: np.ndarray
    taken: np.ndarray


def visited(generator: np.random.Generator, count: int, truth: ChildChances | None) -> Nodes:
    """Return nodes with one to five children each.

    The child that comes next is sampled from `truth`, or from the shares if that is None.
    """
    sizes = generator.integers(1, 6, size=count)
    parent = np.arange(count).repeat(sizes)
    rank = np.arange(len(parent)) - (sizes.cumsum() - sizes)[parent]
    shares = np.concatenate(
        [np.sort(generator.dirichlet([0.3] * (size + 1))[:size])[::-1] for size in sizes]
    )
    depth = generator.integers(6, size=count)[parent]
    evidence = greedy_evidence(shares)
    chances = shares if truth is None else truth.shares(parent, rank, depth, evidence)
    passed = np.cumsum(chances) - np.cumsum(chances)[np.cumsum(sizes) - 1][parent]
    passed += np.bincount(parent, chances)[parent]
    drawn = generator.random(count)[parent]
    taken = (passed - chances <= drawn) & (drawn < passed)
    return Nodes(parent, rank, depth, evidence, taken)


def loss(chances: ChildChances, nodes: Nodes) -> float:
    """Return the loss in nats per node."""
    shares = chances.shares(*nodes[:4])
    count = nodes.parent.max() + 1
    none = 1.0 - np.bincount(nodes.parent, shares)
    is_none = np.bincount(nodes.parent, nodes.taken) == 0
    return float(-(np.log(shares[nodes.taken]).sum() + np.log(none[is_none]).sum()) / count)


TRUTHS = [(0.6, -0.5, 0.4, -0.5, -0.3), (1.5, -0.2, -0.5, 1.0, 0.2), (0.3, 0.0, 1.0, -2.0, 0.0)]


@pytest.mark.parametrize("weights", TRUTHS)
@pytest.mark.parametrize("together", [1, 16])
def test_learned_values_are_near_the_truth(weights: tuple[float, ...], together: int) -> None:
    """After 640 nodes the loss is within 0.015 nats of the truth's; the prior's is not."""
    generator, truth = np.random.default_rng(1), ChildChances(weights)
    test = visited(generator, 20_000, truth)
    learnt = ChildChances(GREEDY_PRIOR)
    for _ in range(640 // together):
        learnt.observe(*visited(generator, together, truth))
    assert loss(learnt, test) < loss(truth, test) + 0.015
    assert loss(ChildChances(GREEDY_PRIOR), test) > loss(truth, test) + 0.04


def test_a_change_of_the_text_is_learnt() -> None:
    generator = np.random.default_rng(2)
    learnt = ChildChances(GREEDY_PRIOR)
    for weights in TRUTHS:
        truth = ChildChances(weights)
        for _ in range(150):
            learnt.observe(*visited(generator, 8, truth))
        test = visited(generator, 20_000, truth)
        assert loss(learnt, test) < loss(truth, test) + 0.03


@pytest.mark.parametrize("prior", [GREEDY_PRIOR, RACE_PRIOR])
def test_weights_stay_finite_under_surprises(prior: tuple[float, ...]) -> None:
    """Surprises include certain children that never come next."""
    generator, learnt = np.random.default_rng(3), ChildChances(prior)
    for taken in (True, False) * 20:
        one = visited(generator, 3, None)
        sure = np.full(len(one.parent), 1.0)
        evidence = race_evidence(np.zeros(len(sure)), sure) if prior is RACE_PRIOR else one.evidence
        learnt.observe(*one[:2], one.depth, evidence, (one.rank == 0) & taken)
        shares = learnt.shares(*one[:3], evidence)
        assert np.isfinite(learnt._weights).all()
        assert (shares > 0).all()
        assert (np.bincount(one.parent, shares) < 1).all()
    nothing = np.zeros(0, np.int64)
    learnt.observe(nothing, nothing, nothing, np.zeros((0, 2)), nothing.astype(bool))


def test_restored_values_have_less_weight() -> None:
    """New evidence changes restored values faster than learned ones."""
    generator, values = np.random.default_rng(6), TreeValues.unknown()
    for _ in range(40):
        values.greedy.observe(*visited(generator, 8, ChildChances(TRUTHS[0])))
    again = TreeValues.from_dict(json.loads(json.dumps(values.to_dict())), 64)
    nodes = visited(generator, 50, None)
    for old, new in zip(values, again, strict=True):
        assert new.shares(*nodes[:4]) == pytest.approx(old.shares(*nodes[:4]))
    for _ in range(20):
        news = visited(generator, 8, ChildChances(TRUTHS[1]))
        values.greedy.observe(*news)
        again.greedy.observe(*news)
    test = visited(generator, 5000, ChildChances(TRUTHS[1]))
    assert loss(again.greedy, test) < loss(values.greedy, test)


def test_values_are_part_of_the_estimates_of_a_pair() -> None:
    """An engine without trees stores no tree values; restoring without them gives none."""
    known = Estimates.of(CostModel(), 4)
    assert "trees" not in known.to_dict()
    values = TreeValues.of(known)
    assert TreeValues.of(known) is values
    values.greedy.observe(*visited(np.random.default_rng(7), 8, None))
    saved = json.loads(json.dumps(known.to_dict()))
    again = Estimates.from_dict(saved, 4, TREE_PARTS)
    assert TreeValues.of(again).to_dict() == values.to_dict()
    del saved["trees"]
    assert not Estimates.from_dict(saved, 4, TREE_PARTS).parts


def test_evidence_is_finite() -> None:
    shares = np.array([0.0, 1.0, 0.5])
    assert np.isfinite(greedy_evidence(shares)).all()
    found = race_evidence(np.array([0.0, np.inf, 3.0]), shares)
    assert np.isfinite(found).all()
    assert found[:, 0].tolist() == [0.0, -12.0, -3.0]
