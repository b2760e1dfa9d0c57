# SPDX-License-Identifier: Apache-2.0
"""Shapes of drafts compared by what the target kept of them: the table that is made of counts."""

from measure_trees import Shape, report, row

from vllm_hetero_spec.bench.load import Sample, Trace
from vllm_hetero_spec.engine.metrics.counters import DraftStats


def test_a_line_says_what_was_counted() -> None:
    """Rounds are arrivals, but for the first two; all prompts' together, and prompt by prompt."""
    first, second = DraftStats().as_dict(), DraftStats().as_dict()
    first |= {"drafts": 3, "draft_tokens": 20, "trees": 3, "side_tokens_accepted": 1}
    second |= {"drafts": 1, "draft_tokens": 6, "trees": 0, "side_tokens_accepted": 1}
    samples = [
        # vLLM counts rows that are computed twice with its draft tokens: they are not asked for.
        Sample(traces, 1.0, draft_tokens=60, accepted_tokens=10, worker=counted)
        for traces, counted in (
            ([Trace([1, 2], "", 0.0, [], [1, 1, 2, 4, 3])], first),
            ([Trace([3, 4], "", 0.0, [], [1, 1, 1]), Trace([7], "", 0.0, [], [1])], second),
        )
    ]
    line = row(Shape(6, 8), samples, [[1, 2], [3, 5], [7]])
    shares = ["2.50 ± 0.75", "2.00 ± 1.00"]
    assert line == ["tree of 8, 6 deep", *shares, "6.5", "0.75", "0.50", "2 of 3"]
    table = report("greedy", [line]).splitlines()
    assert [text.count("|") for text in table] == [8, 8, 8]
    assert (str(Shape(4)), str(Shape(0))) == ("chain of 4", "target alone")
