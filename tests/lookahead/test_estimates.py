# SPDX-License-Identifier: Apache-2.0
"""Kept estimates: a later run begins with them, and learns again if the text has changed."""

import json
from typing import Any

import pytest
from simulated_drafts import Text
from simulation import Clock, Machine, Outcome, Phase, calibration, run

from vllm_hetero_spec.lookahead.estimates import Estimates
from vllm_hetero_spec.lookahead.goodput import Goodput
from vllm_hetero_spec.trees.values import TREE_PARTS, TreeValues

LONGEST = 8
GOOD, FAIR, USELESS = Text(0.95, 0.5), Text(0.9, 0.3, 0.5), Text(0.02, 0.01, 0.5)
TARGETS = {"gpu": lambda rows: max(0.030, 0.0015 * rows), "cpu": lambda rows: 0.020 + 0.005 * rows}


def machine(target: str) -> Machine:
    step = 0.08 * TARGETS[target](1)
    return Machine(TARGETS[target], lambda batch: step * (1 + 0.01 * batch), noise=0.05)


def calibrated(on: Machine) -> Estimates:
    return Estimates.of(calibration(on), LONGEST)


def kept(known: Estimates) -> Estimates:
    """Return the estimates as a later run reads them."""
    return Estimates.from_dict(json.loads(json.dumps(known.to_dict())), LONGEST, TREE_PARTS)


def serve(known: Estimates, phase: Phase, seed: int = 0) -> tuple[Outcome, Goodput]:
    clock = Clock()
    controller = Goodput(known, clock=clock)
    return run(controller, clock, [phase], limit=LONGEST, seed=seed), controller


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("text", [GOOD, FAIR, USELESS], ids=["good", "fair", "useless"])
def test_a_later_run_begins_with_the_last_lookahead(target: str, text: Text) -> None:
    on = machine(target)
    for batch in (1, 4, 16):
        known = calibrated(on)
        _, first = serve(known, Phase(batch, 8.0, text, on), seed=batch)
        ended = first.gauges().lookahead
        second = Goodput(kept(known), clock=Clock())
        begins = max(second.plan(batch, [LONGEST] * batch).lookahead)
        assert abs(begins - ended) <= (1 if ended else 0), batch


@pytest.mark.parametrize("batch", [1, 8])
def test_a_short_load_is_served_as_a_long_one(batch: int) -> None:
    """A useless drafter is not used from the first step on. A good one is used at once."""
    on = machine("cpu")
    for text, gains in ((USELESS, False), (GOOD, batch == 1)):
        known = calibrated(on)
        serve(known, Phase(batch, 8.0, text, on))
        short = Phase(batch, 20 * on.target(batch), text, on)
        rates = [serve(kept(known), short, seed)[0] for seed in range(6)]
        if gains:
            assert all(max(run.lookaheads) >= 4 for run in rates)
            assert all(run.lookaheads.get(0, 0) <= 2 for run in rates)
        elif text is USELESS:
            assert all(set(run.lookaheads) == {0} for run in rates)
            assert sum(run.probes for run in rates) <= 6
            assert min(run.speedup for run in rates) > 0.97


def test_other_text_is_learned_again() -> None:
    """New observations outweigh thousands of earlier drafts within seconds."""
    on = machine("gpu")
    for before, after, limit in ((GOOD, USELESS, 3.0), (USELESS, GOOD, 10.0)):
        known = calibrated(on)
        serve(known, Phase(4, 30.0, before, on))
        again = kept(known)
        assert again.acceptance.drafts == known.acceptance.drafts
        ours, controller = serve(again, Phase(4, 15.0, after, on))
        assert controller.regime == ("target alone" if after is USELESS else "drafting")
        assert ours.switches[-1][0] < limit
        assert ours.speedup > 0.95


def test_a_later_run_has_the_same_estimates() -> None:
    on = machine("gpu")
    known = calibrated(on)
    serve(known, Phase(4, 10.0, GOOD, on))
    again = kept(known)
    for random in (False, True):
        expected = pytest.approx(known.acceptance.rates(random), abs=0.001)  # rounded confidences
        assert again.acceptance.rates(random) == expected
    assert again.steps.expected(4) == pytest.approx(known.steps.expected(4))
    assert again.costs.target(4, 12) == pytest.approx(known.costs.target(4, 12), rel=0.01)
    assert len(again.to_dict()["acceptance"]["greedy"]["recent"]) == 256
    assert again.summary().startswith(f"{known.acceptance.drafts} drafts, acceptance 0.8")


def spoilt(path: str, value: Any) -> dict[str, Any]:
    on = machine("gpu")
    known = calibrated(on)
    TreeValues.of(known)  # adds the part "trees"
    serve(known, Phase(1, 1.0, GOOD, on))
    saved: dict[str, Any] = json.loads(json.dumps(known.to_dict()))
    *folders, name = path.split(".")
    place = saved
    for folder in folders:
        place = place[folder]
    place[name] = value
    return saved


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("version", 0),
        ("costs", None),
        ("steps.sums", [1.0]),
        ("steps.sums", [-1.0] * 5),
        ("acceptance", 3),
        ("acceptance.drafts", "many"),
        ("acceptance.random.confidence.weights", [float("inf")] * 4),
        ("acceptance.random.confidence.learnt", [[-1.0] * 4] * 4),
        ("acceptance.greedy.recent", [[0.5]]),
        ("acceptance.greedy.recent", [[7.0] * LONGEST]),
        ("acceptance.greedy.recent", [[7.0] * (LONGEST - 1) + [None]]),
        ("acceptance.greedy.recent", 5),
        ("trees.greedy.weights", [0.0] * 4),
        ("trees.race.information", [[0.0] * 5] * 5),
        ("trees.race.nodes", None),
    ],
)
def test_invalid_data_is_refused(path: str, value: Any) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        Estimates.from_dict(spoilt(path, value), LONGEST, TREE_PARTS)


def test_another_lookahead_is_refused() -> None:
    known = calibrated(machine("gpu"))
    serve(known, Phase(1, 1.0, GOOD, machine("gpu")))
    with pytest.raises(ValueError, match="finite numbers"):
        Estimates.from_dict(known.to_dict(), LONGEST - 1)
