# SPDX-License-Identifier: Apache-2.0
"""The replay bench: its texts, costs and world, and the controller in a few cells."""

from collections.abc import Sequence
from typing import Any

import bench
import pytest
from competitors import Oracle
from machines import Machine
from recordings import HERE, LONGEST, Costs, Text
from world import Phase, World

from vllm_hetero_spec.lookahead.controllers import Fixed, LookaheadPlan

MOST_BYTES = 2_000_000  # of a recording
CELLS = "cpu/humaneval/0/4", "cpu/mt_bench/1/8", "cpu/crowd", "h200/humaneval/0/4", "h200/chats"

ROUNDS = [[[2, 0.9, 0.8, 0.3, 0.2], [0, 0.1, 0.4]], [[1, 0.7, 0.6], [3, 0.9, 0.9, 0.9]]]
MACHINE = Machine(
    lambda batch, rows: 0.02 + 0.001 * rows,
    lambda batch: 0.002,
    lambda batch: 0.001,
    (0.0, 1.0),
    0.0,
    ([0.0], [0.0]),
)


def test_rounds_begin_inside_recorded_drafts() -> None:
    text = Text(ROUNDS, random=False)
    assert text.starts == [0, 4]
    assert text.accepted == [2, 1, 0, 0, 1, 0, 5, 4, 3]  # the last three begin the text again
    assert text.drafts[0] == [0.9, 0.8, 0.3] + [0.2] * 5
    assert text.drafts[1] == [0.8, 0.3] + [0.2] * 6
    assert text.drafts[5] == [0.6] * LONGEST  # no token was proposed behind the rejected one
    assert text.drafts[7][:5] == [0.9, 0.9, 0.9, 0.8, 0.3]


def test_costs_are_monotone_medians() -> None:
    costs = Costs([(1, 1.0), (1, 9.0), (1, 2.0), (2, 4.0), (3, 3.0), (6, 8.0)])
    assert [costs(size) for size in (0.5, 1, 2, 3, 4.5, 6, 12)] == [2, 2, 3.5, 3.5, 5.75, 8, 16]


def test_a_fixed_lookahead_takes_the_costs_of_its_rounds() -> None:
    text = Text(ROUNDS, random=False)
    for lookahead in (0, 1, 8):
        at, steps = 0, 1000
        for _ in range(steps):
            at += 1 + min(lookahead, text.accepted[at % 9])
        each = 0.021 + (0.001 + 0.003 * lookahead if lookahead else 0.0)
        world = World(MACHINE, [Phase(1.0, 1, [text])], 60.0)
        whole, late = world.run(Fixed(lookahead))
        assert whole.seconds == pytest.approx(world.now)
        assert late.seconds == pytest.approx(58.0, abs=0.1)
        assert whole.tokens / whole.seconds == pytest.approx(at / (steps * each), rel=0.02)
        assert whole.speed == pytest.approx(whole.tokens * 0.021 / whole.seconds)


class Watched(Fixed):
    """Notes the order of calls."""

    def __init__(self) -> None:
        super().__init__(2)
        self.calls: list[str] = []

    def plan(self, *_: object) -> LookaheadPlan:
        self.calls.append("plan")
        return LookaheadPlan((2, 0))

    def continue_drafting(self, confidences: Sequence[Sequence[float]]) -> list[bool]:
        self.calls.append(f"continue {[len(draft) for draft in confidences]}")
        return [False, True]  # the second request has no draft, which goes on in no case

    def trim(self, confidences: Sequence[Sequence[float]]) -> list[int]:
        self.calls.append(f"trim {[len(draft) for draft in confidences]}")
        return [0, 0]

    def observe_step(self, batch: int, rows: int, seconds: float, again: int = 0) -> None:
        self.calls.append(f"step {batch} {rows}")

    def observe_draft(self, batch: float, steps: float, seconds: float, **more: object) -> None:
        self.calls.append(f"draft {steps:.0f} {more['fed']} {more['longest']}")

    def observe_acceptance(self, verified: int, accepted: int, *more: Any) -> None:
        confidences, wanted, _ = more
        self.calls.append(f"accepted {accepted} of {verified}, {len(confidences)}, {wanted}")

    def emitted(self, tokens: int, seconds: float) -> None:
        self.calls.append(f"emitted {tokens}")


def test_calls_have_the_order_of_an_engine() -> None:
    controller = Watched()
    phases = [Phase(1.0, 2, [Text(ROUNDS, random=False)])]
    World(MACHINE, phases, 0.07).run(controller)
    first = ["plan", "continue [1, 0]", "trim [1, 0]"]
    second = ["emitted 2", "plan", "continue [1, 0]"]
    learned = ["draft 1 0 1", "accepted 0 of 0, 1, 0", "step 2 2"]
    assert controller.calls[:10] == [*first, *second, *learned, "trim [1, 0]"]


def test_the_oracle_is_at_least_as_fast_as_the_best_fixed_lookahead() -> None:
    phases = [Phase(1.0, 3, [Text(ROUNDS, random=False)])]
    fixed = [World(MACHINE, phases, 20.0).run(Fixed(k))[0].speed for k in range(LONGEST + 1)]
    world = World(MACHINE, phases, 20.0)
    assert world.run(Oracle(world, {}, max(fixed)))[0].speed > max(fixed)


def test_recordings_are_small() -> None:
    sizes = [file.stat().st_size for file in HERE.glob("*.json")]
    assert sizes
    assert max(sizes) < MOST_BYTES


@pytest.mark.parametrize("name", CELLS)
def test_goodput_in_a_cell(name: str) -> None:
    assert bench.run_cell(name, ["goodput"])["goodput share"] > 0.97


@pytest.mark.full
def test_goodput_in_all_cells() -> None:
    shares = [bench.run_cell(name, ["goodput"])["goodput share"] for name in bench.names()]
    assert min(shares) > 0.85  # 0.88 on an H200 with 32 sampled requests
    assert sum(shares) / len(shares) > 0.99  # 1.00
