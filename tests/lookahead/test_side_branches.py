# SPDX-License-Identifier: Apache-2.0
"""What trees add is foreseen by replay, at the price of rows."""

import numpy as np
import pytest

from vllm_hetero_spec.lookahead.costs import CostModel
from vllm_hetero_spec.lookahead.estimates import Estimates
from vllm_hetero_spec.lookahead.forecast import Forecast, forecast
from vllm_hetero_spec.lookahead.goodput import Goodput
from vllm_hetero_spec.lookahead.side_branches import SideBranches

GREEDY, RANDOM = [False], [True]


def one_tree() -> SideBranches:
    """Beside the chain a child of the text itself, one behind it, and a deep one."""
    sides = SideBranches()
    sides.add([1, 2, 3], [0.3, 0.2, 0.1], [1, 0, 3], random=False)
    return sides


def test_nodes_count_by_depth_while_they_pay() -> None:
    sides = one_tree()
    free = [sides.worth(depth, 0.0, GREEDY).tolist() for depth in (1, 2, 3, 4)]
    assert free == [[0.3, 2.0], [0.2, 1.0], pytest.approx([0.1, 4.0]), [0.0, 0.0]]
    dear = [sides.worth(depth, 0.1, GREEDY)[0] for depth in (1, 2, 3)]
    assert dear == [0.3, 0.2, 0.0]  # the deep one feeds three rows again
    assert sides.worth(None, 0.1, GREEDY).tolist() == [0.5, 3.0]


def test_kinds_and_trees_are_averaged() -> None:
    sides = one_tree()
    assert sides.worth(1, 0.0, RANDOM).tolist() == [0.0, 0.0]
    sides.add([1], [0.1], [1], random=True)
    sides.add([], [], [], random=False)
    found = sides.worth(1, 0.0, GREEDY + RANDOM)
    assert found == pytest.approx([(0.15 + 0.1) / 2, (1.0 + 2.0) / 2])


def foreseen(sides: SideBranches | None, target: list[tuple[float, float]]) -> Forecast:
    known = Estimates.of(CostModel(target, [(1, 0.001)]), 4)
    return forecast(known, 1, [4], GREEDY, 30.0, False, sides)


def test_what_trees_bring_is_foreseen() -> None:
    free = [(1, 0.03), (64, 0.03)]
    chains, trees = foreseen(None, free), foreseen(one_tree(), free)
    assert all(np.array(trees.rates) > chains.rates)
    assert trees.gain > 1.1 * chains.gain
    assert foreseen(SideBranches(), free) == chains


def test_a_drafter_that_pays_with_trees_alone_is_kept() -> None:
    """Its chain is hardly ever right at once, but what is beside it is, where rows are free."""
    regimes = []
    for beside in (False, True):
        costs = CostModel([(1, 0.03), (64, 0.03)], [(1, 0.02)], overhead=[(1, 0.0005)])
        controller = Goodput(Estimates.of(costs, 4), clock=lambda: 0.0)
        for _ in range(80):
            plan = controller.plan(1, [4])
            (length,) = plan.lookahead
            if length:
                controller.observe_draft(1, length, 0.02 * length)
                controller.observe_acceptance(length, 0, [0.3] * length, length)
                if beside:
                    controller.sides.add([1, 2], [0.7, 0.6], [1, 0], False)
            controller.observe_step(1, 1 + length, 0.03)
            controller.emitted(1, 0.03 + 0.02 * length)
        regimes.append(controller.off)
    assert regimes == [True, False]


def test_trees_that_take_longer_than_they_bring_are_left_alone() -> None:
    """Unknown ones are tried, dear ones again after a while."""
    sides = SideBranches()
    assert sides.pay(1e9, 0.1, GREEDY)
    sides = one_tree()
    assert sides.pay(100.0, 0.1, GREEDY)
    for _ in range(9):
        sides.took(4, 0.004)
        sides.took(0, 0.004)
    assert sides.seconds == pytest.approx(0.002)
    assert sides.pay(90.0, 0.1, GREEDY)
    assert not sides.pay(1000.0, 0.1, GREEDY)
    assert sum(sides.pay(1000.0, 0.1, GREEDY) for _ in range(640)) == 10
    assert not sides.pay(100.0, 0.1, RANDOM)
