# SPDX-License-Identifier: Apache-2.0
"""Figures of requests and loads, against numbers worked out by hand."""

import pytest

from vllm_hetero_spec.bench.load import Sample, Trace

# Sent at 1 s; 1 token at 3 s, 3 more at 4 s, 2 more at 7 s.
TRACE = Trace([5, 6, 7, 8, 9, 10], "text", 1.0, [3.0, 4.0, 7.0], [1, 3, 2])
AT_ONCE = Trace([5, 6], "text", 0.5, [2.0], [2])


def test_times_of_a_request() -> None:
    assert TRACE.ttft == pytest.approx(2.0)
    assert TRACE.tpot == pytest.approx((7.0 - 3.0) / 5)
    assert TRACE.itl == pytest.approx([1.0, 3.0])


def test_a_request_that_came_at_once_has_no_time_per_later_token() -> None:
    assert AT_ONCE.ttft == pytest.approx(1.5)
    assert AT_ONCE.tpot is None
    assert AT_ONCE.itl == []


def test_figures_of_a_load() -> None:
    sample = Sample([TRACE, AT_ONCE], seconds=4.0, drafts=5, draft_tokens=20, accepted_tokens=7)
    assert sample.tokens == 8
    assert sample.tokens_per_second == pytest.approx(2.0)
    assert sample.acceptance_length == pytest.approx(2.4)


def test_no_drafts_is_no_acceptance_length() -> None:
    assert Sample([TRACE], seconds=1.0).acceptance_length is None
