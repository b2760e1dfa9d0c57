# SPDX-License-Identifier: Apache-2.0
"""Shapes of drafts compared by what the target kept of them: the table that is made of counts."""

from measure_trees import Shape, report, row

from vllm_hetero_spec.engine.metrics.counters import DraftStats
from vllm_hetero_spec.measure.load import Sample, Trace


def test_a_line_says_what_was_counted() -> None:
    counted = DraftStats().as_dict()
    counted |= {"drafts": 4, "draft_tokens": 26, "trees": 3, "side_tokens_accepted": 2}
    traces = [Trace(ids, "", 0.0, [], []) for ids in ([1, 2], [3, 4])]
    # vLLM counts rows that are computed twice with its draft tokens: they are not asked for.
    sample = Sample(traces, 1.0, draft_tokens=60, accepted_tokens=10, worker=counted)
    line = row(Shape(6, 8), sample, [[1, 2], [3, 5]])
    assert line == ["tree of 8, 6 deep", "3.50", "6.5", "0.75", "0.50", "1 of 2"]
    table = report("greedy", [line]).splitlines()
    assert [text.count("|") for text in table] == [7, 7, 7]
    assert (str(Shape(4)), str(Shape(0))) == ("chain of 4", "target alone")
