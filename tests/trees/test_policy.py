# SPDX-License-Identifier: Apache-2.0
"""Trees are drafted if they pay; otherwise chains are drafted at the cost of chains."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from simulation import Clock

from vllm_hetero_spec.lookahead.controllers import LookaheadPlan
from vllm_hetero_spec.lookahead.costs import CostModel
from vllm_hetero_spec.lookahead.estimates import Estimates
from vllm_hetero_spec.lookahead.forecast import Load, forecast
from vllm_hetero_spec.lookahead.goodput import Goodput
from vllm_hetero_spec.trees.policy import TreeChoice

GOOD = ([1, 1, 2], [0.3, 0.2, 0.2], [1, 1, 0])  # beside a chain: depths, values, rows fed again
BAD = ([1], [0.02], [1])
PLAIN, STEP, CONTEXT = 0.02, 0.001, 50  # seconds of target and drafter step; tokens
AROUND = 0.0002  # seconds that a round takes in addition to its steps


@dataclass
class Engine:
    """Simulated steps with drafts; some of the rounds search for trees."""

    row: float  # seconds of each row after the first
    width: int = 2  # number of drafter paths; 0 for chains only
    free: bool = False  # as in `TreeChoice`
    tree: float = 0.0002  # seconds to find a tree
    longer: float = 1.1  # drafter step time of a round that searches for trees, relative to others
    around: float = 0.0  # seconds that such a round takes in addition, apart from its steps
    beside: tuple[list[int], list[float], list[int]] = GOOD  # nodes of each tree beside its chain
    batch: int = 2
    plans: list[LookaheadPlan] = field(default_factory=list)  # all so far
    looking: float = 0.0  # seconds spent on trees so far

    def __post_init__(self) -> None:
        target = [(rows, PLAIN + (rows - 1) * self.row) for rows in (1, 2, 8, 64)]
        costs = CostModel(target, [(1, STEP), (64, STEP)], overhead=[(1, AROUND), (64, AROUND)])
        self.clock = Clock()
        known = Estimates.of(costs, 4)
        self.choice = TreeChoice(known, self.width, free=self.free)
        choice = self.choice if self.width else None
        self.controller = Goodput(known, choice=choice, clock=self.clock)
        self._luck = np.random.default_rng(0)

    def run(self, steps: int) -> list[LookaheadPlan]:
        for _ in range(steps):
            self._step()
        return self.plans[-steps:]

    def _step(self) -> None:
        controller, batch, began = self.controller, self.batch, self.clock.now
        plan = controller.plan(batch, [4] * batch, [0] * batch, [False] * batch)
        self.plans.append(plan)
        length, drafted = max(plan.lookahead), sum(map(bool, plan.lookahead))
        tokens = 0
        if length:
            wide = plan.trees.paths > 0
            drafting = STEP * length * (self.longer if wide else 1.0)
            overhead = AROUND + (self.around if wide else 0.0)
            controller.observe_draft(
                drafted, length, drafting, overhead=overhead, longest=length, wide=wide
            )
            self.clock.now += drafting + overhead
            if wide:
                self.looking += drafting + overhead - STEP * length - AROUND
                self.choice.branches.found(drafted, self.tree * drafted)
                for _ in range(drafted):
                    self.choice.branches.add(*self.beside, CONTEXT, False)
                self.clock.now += self.tree * drafted
                self.looking += self.tree * drafted
            for wanted in plan.lookahead:
                if wanted:
                    kept = min(wanted, int(self._luck.geometric(0.3)) - 1)
                    tokens += kept
                    controller.observe_acceptance(wanted, kept, [0.7] * wanted, wanted)
        rows = batch + sum(plan.lookahead)
        seconds = PLAIN + (rows - 1) * self.row
        controller.observe_step(batch, rows, seconds)
        controller.refresh_forecast()
        self.clock.now += seconds
        controller.emitted(batch + tokens, self.clock.now - began)


def test_free_rows_have_trees() -> None:
    plans = Engine(row=0.0).run(200)[20:]
    assert sum(plan.trees.paths == 2 and not plan.trees.looks for plan in plans) > 150


def test_plans_with_expensive_rows_are_those_of_chains() -> None:
    ours, chains = Engine(row=0.008), Engine(row=0.008, width=0)
    assert any(max(plan.lookahead) for plan in ours.run(300))
    chains.run(300)
    assert ours.plans == chains.plans
    assert ours.looking == 0.0


def test_plans_without_room_are_those_of_chains() -> None:
    """Earlier measurements of trees do not matter."""
    ours, chains = Engine(row=0.0), Engine(row=0.0, width=0)
    ours.choice.branches.room = False
    for number in range(40):
        ours.choice.branches.add(*GOOD, CONTEXT, bool(number % 2))
    assert ours.run(300) == chains.run(300)
    ours.choice.branches.room = True
    assert any(plan.trees.paths and not plan.trees.looks for plan in ours.run(100))


def test_the_first_probe_of_an_untimed_drafter_is_a_chain() -> None:
    clock = Clock()
    known = Estimates.of(CostModel([(1, PLAIN), (8, PLAIN)]), 4)
    choice = TreeChoice(known, 2)
    choice.branches.room = True
    controller = Goodput(known, choice=choice, clock=clock)
    clock.now += 1.0
    plan = controller.plan(2, [4] * 2)
    assert plan.probe
    assert any(plan.lookahead)
    assert not plan.trees.paths


@pytest.mark.parametrize("tree", [0.0002, 0.002])
def test_useless_trees_are_searched_for_now_and_then(tree: float) -> None:
    engine = Engine(row=0.0003, tree=tree, beside=BAD)
    plans = engine.run(1500)
    assert all(plan.trees.looks for plan in plans if plan.trees.paths)
    looks = sum(plan.trees.looks for plan in plans)
    assert 3 <= looks <= 0.2 * len(plans)
    assert engine.looking <= 0.005 * engine.clock.now + 3 * engine.batch * tree


def test_tree_rounds_do_not_change_the_cost_of_chains() -> None:
    """Otherwise chains would seem not to pay."""
    engine = Engine(row=0.0003, beside=BAD, longer=1.4, around=0.0004)
    costs = engine.controller.known.costs
    for _ in range(300):
        engine.run(1)
        assert costs.drafting(2, 4) == pytest.approx(AROUND + 4 * STEP, rel=0.01)
    assert sum(plan.trees.looks for plan in engine.plans) > 3


def test_the_policy_follows_a_change() -> None:
    engine = Engine(row=0.0003, beside=BAD)
    engine.run(300)
    engine.beside = GOOD
    engine.run(400)
    assert all(plan.trees.paths and not plan.trees.looks for plan in engine.run(50))
    engine.beside = BAD
    engine.run(200)
    assert sum(plan.trees.paths > 0 for plan in engine.run(100)) < 20


def test_no_trees_if_their_search_takes_too_long() -> None:
    plans = Engine(row=0.0003, tree=0.02).run(600)[20:]
    assert sum(plan.trees.paths > 0 for plan in plans) <= 3


def test_other_paths_are_drafted_if_nearly_free() -> None:
    """A parallel drafter predicts all paths in one forward, so none of them costs a step."""
    paths = []
    for second, third, free in ((1, 1, False), (1, 6, False), (6, 6, False), (6, 6, True)):
        engine = Engine(row=0.0, width=3, free=free)
        costs = engine.controller.known.costs
        for _ in range(9):
            costs.observe_drafting(6, 4, 4 * third * STEP)
            costs.observe_drafting(4, 4, 4 * second * STEP)
            costs.observe_drafting(2, 4, 4 * STEP)
        paths.append({plan.trees.paths for plan in engine.run(60)[30:]} - {0})
    assert paths == [{3}, {2}, {1}, {3}]


def test_nodes_beside_chains_do_not_lower_the_forecast() -> None:
    """The second row is free and later ones are expensive, so few nodes of a tree are kept."""
    target = [(1, PLAIN), (2, PLAIN), (3, 1.1 * PLAIN), (8, 2 * PLAIN), (64, 16 * PLAIN)]
    costs = CostModel(target, [(1, STEP), (64, STEP)], overhead=[(1, AROUND), (64, AROUND)])
    choice = TreeChoice(Estimates.of(costs, 4), width=3)
    load = Load(1, [4], [False], 1.5 / PLAIN)
    chains = choice.forecast(load, 1)
    assert not chains.beside
    choice.plan(-9.0, 1)
    gains = []
    for number, likely in enumerate((0.1, 0.2, 0.4, 0.8)):
        choice.branches.add([1] * 7, [likely, *[0.02] * 6], [1] * 7, CONTEXT, False)
        trees = forecast(Estimates.of(costs, 4), load, choice.branches)
        assert max(trees.rates) > 0.98 * max(chains.rates)
        gains.append(choice.forecast(load, 1).gain)
        assert choice.plan(9.0 * number, 1).looks is (gains[-1] == chains.gain)
    assert gains[0] == chains.gain < gains[-1]
