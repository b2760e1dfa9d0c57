# SPDX-License-Identifier: Apache-2.0
"""The gain of trees is predicted from earlier trees, minus the cost of their rows."""

import numpy as np
import pytest
from simulation import Clock

from vllm_hetero_spec.lookahead.acceptance import Observation
from vllm_hetero_spec.lookahead.costs import CostModel
from vllm_hetero_spec.lookahead.estimates import Estimates
from vllm_hetero_spec.lookahead.forecast import Forecast, Load, forecast
from vllm_hetero_spec.lookahead.goodput import Goodput
from vllm_hetero_spec.lookahead.step_policy import StepPolicy
from vllm_hetero_spec.options import DEFAULT_TREE_WIDTH
from vllm_hetero_spec.trees.branch_statistics import BranchStatistics
from vllm_hetero_spec.trees.policy import TreeChoice

GREEDY, RANDOM = [False], [True]


def one_tree() -> BranchStatistics:
    """Nodes beside the chain: one after the text, one after that node, and a deep one."""
    branches = BranchStatistics()
    branches.add([1, 2, 3], [0.3, 0.2, 0.1], [1, 0, 3], 100, random=False)
    return branches


def test_nodes_count_by_depth_while_they_pay() -> None:
    branches = one_tree()
    free = [branches.worth(depth, 0.0, GREEDY).tolist() for depth in (1, 2, 3, 4)]
    deep = pytest.approx([0.1, 4.0, 100.0])
    assert free == [[0.3, 2.0, 100.0], [0.2, 1.0, 0.0], deep, [0.0, 0.0, 0.0]]
    dear = [branches.worth(depth, 0.1, GREEDY)[0] for depth in (1, 2, 3)]
    assert dear == [0.3, 0.2, 0.0]  # the deep node feeds three rows again
    assert branches.worth(None, 0.1, GREEDY).tolist() == [0.5, 3.0, 100.0]
    read = branches.worth(None, 0.0, GREEDY, 0.002)  # both side paths cost 0.2 for their context
    assert read.tolist() == [0.5, 3.0, 100.0]


def test_requests_and_trees_are_averaged() -> None:
    branches = one_tree()
    assert branches.worth(1, 0.0, RANDOM).tolist() == [0.0, 0.0, 0.0]
    branches.add([1], [0.1], [1], 300, random=True)
    branches.add([], [], [], 300, random=False)
    found = branches.worth(1, 0.0, GREEDY + RANDOM)
    assert found == pytest.approx([(0.15 + 0.1) / 2, (1.0 + 2.0) / 2, (50 + 300) / 2])


def foreseen(branches: BranchStatistics | None, target: list[tuple[float, float]]) -> Forecast:
    known = Estimates.of(CostModel(target, [(1, 0.001)]), 4)
    return forecast(known, Load(1, [4], GREEDY, 30.0), branches)


def test_nodes_beside_the_chain_raise_the_forecast() -> None:
    free = [(1, 0.03), (64, 0.03)]
    chains, trees = foreseen(None, free), foreseen(one_tree(), free)
    assert all(np.array(trees.rates) > chains.rates)
    assert trees.gain > 1.1 * chains.gain
    assert foreseen(BranchStatistics(), free)._replace(beside=[]) == chains


def test_a_drafter_that_pays_with_trees_alone_is_kept() -> None:
    """The chain is rarely right, but the nodes beside it are, and rows are free."""
    regimes = []
    for beside in (False, True):
        costs = CostModel([(1, 0.03), (64, 0.03)], [(1, 0.02)], overhead=[(1, 0.0005)])
        known = Estimates.of(costs, 4)
        choice = TreeChoice(known, DEFAULT_TREE_WIDTH)
        clock = Clock()
        controller = Goodput(known, choice=choice, clock=clock)
        for _ in range(80):
            clock.now += 0.05
            plan = controller.plan(1, [4])
            (length,) = plan.lookahead
            if length:
                controller.observe_draft(1, length, 0.02 * length)
                controller.observe_acceptance(length, 0, [0.3] * length, length)
                if beside:
                    choice.branches.add([1, 2], [0.7, 0.6], [1, 0], 50, False)
            controller.observe_step(1, 1 + length, 0.03)
            controller.emitted(1, 0.03 + 0.02 * length)
        regimes.append(controller.off)
    assert regimes == [True, False]


def test_seconds_of_a_tree() -> None:
    """Trees that were found but not trimmed count only the time to find them."""
    branches = one_tree()
    assert branches.seconds == 0.0
    for trimmed in (True, True, False, False):
        branches.found(4, 0.004)
        branches.found(0, 0.002)
        if trimmed:
            branches.trimmed(4, 0.008)
    assert branches.seconds == pytest.approx(0.0015 + 0.002)


@pytest.mark.parametrize("early", [False, True])
def test_nodes_beside_a_chain_make_it_longer(early: bool) -> None:
    branches = BranchStatistics()
    branches.add([1, 2, 3, 4], [0.4, 0.3, 0.3, 0.2], [0] * 4, 50, random=False)
    costs = CostModel([(1, 0.03), (64, 0.03)], [(1, 0.006), (8, 0.012)])
    known = Estimates.of(costs, 4)
    for _ in range(60):
        known.acceptance.observe(Observation(4, 1, [0.5] * 4, 4), False)
    known.acceptance.learn()
    chains, trees = (
        forecast(known, Load(1, [4], GREEDY, 40.0, early), of) for of in (None, branches)
    )
    assert chains.beside == []
    assert trees.beside == pytest.approx([0.4, 0.3, 0.3, 0.2])
    assert len(trees.rates) == 4
    policies = [
        StepPolicy(known, 40.0, 1, 5, GREEDY, of.beside, paths)
        for of, paths in ((chains, 1), (trees, 1), (trees, 8))
    ]
    goes_on = [policy.continue_drafting([[0.5, 0.5]])[0] for policy in policies]
    assert goes_on == [False, True, False]  # a drafter step of eight paths takes longer
