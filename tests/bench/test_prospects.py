# SPDX-License-Identifier: Apache-2.0
"""Advice about draft trees and `draft_ahead`, from figures given in the tests."""

from dataclasses import replace

import pytest

from vllm_hetero_spec.bench.advise import own_process, prospects, trees
from vllm_hetero_spec.bench.figures import Row, figures_of
from vllm_hetero_spec.bench.load import Sample, Trace
from vllm_hetero_spec.bench.plan import Cell, EngineId


def row_of(engine: EngineId, batch: int, seconds: float, proposing: float | None = None) -> Row:
    """Return a row of 100 tokens; with a drafter, 20 of 50 first draft tokens were accepted."""
    sample = Sample([Trace(list(range(100)), "", 0.0, [1.0, seconds], [1, 99])], seconds)
    if proposing is not None:
        sample = replace(
            sample,
            drafts=50,
            draft_tokens=200,
            accepted_tokens=50,
            accepted_per_position=[20, 20, 10, 0],
            worker={"propose_seconds": proposing},
        )
    return Row(Cell(engine, "prompts", batch, 0.0), figures_of([sample]), None, None, None, None)


ALONE, DRAFTING = EngineId("t", "alone"), EngineId("t", "slem", "d", 4)


@pytest.mark.parametrize(
    ("seconds", "price", "pays"),
    [(100 / 8, "0.0%", True), (125 / 8, "3.6%", True), (100.0, "100.0%", False)],
)
def test_rows_have_a_price_and_a_best_gain(seconds: float, price: str, pays: bool) -> None:
    """A step of batch 8 costs 1, 1.25 or 8 times one of batch 1. A row gains at most 0.3 tokens."""
    row = row_of(DRAFTING, 1, 60.0, 6.0)
    said = trees(row, row_of(ALONE, 1, 100.0), row_of(ALONE, 8, seconds))
    assert f"costs the target {price} of its step" in said
    assert "at most 30.0% more" in said
    assert ("--settings" in said, "cannot pay" in said) == (pays, not pays)


def test_hidden_drafting_is_at_most_free() -> None:
    assert "takes 20.0% of the time" in own_process(row_of(DRAFTING, 1, 60.0, 12.0))
    assert "at most 1.25x" in own_process(row_of(DRAFTING, 1, 60.0, 12.0))
    assert "overlapping it gains nothing" in own_process(row_of(DRAFTING, 1, 60.0, 0.6))
    assert own_process(row_of(ALONE, 1, 60.0)) == ""


def test_measured_features_are_not_proposed() -> None:
    own = [row_of(DRAFTING, size, 60.0, 12.0) for size in (8, 1)]
    rows = [row_of(ALONE, size, 100.0 / size) for size in (8, 1)] + own
    assert len(prospects(rows, own, {})) == 2
    assert prospects(rows, own, {"tree_nodes": 8}) == []
    assert prospects(rows, own, {"draft_ahead": True}) == []
    # With only one batch size the price of a row is unknown.
    assert len(prospects([rows[1], own[1]], own[1:], {})) == 1
