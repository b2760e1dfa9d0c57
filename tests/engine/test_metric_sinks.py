# SPDX-License-Identifier: Apache-2.0
"""Log lines and metrics of a front end. No engine runs."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_hetero_spec.engine.metrics.counters import DraftStats
from vllm_hetero_spec.engine.metrics.sinks import PREFIX, Exporter


def test_each_reason_for_a_chain_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    stats = DraftStats()
    with caplog.at_level(logging.INFO, "vllm.hetero_spec"):
        for because in ("drawn", "not_worth_it", "drawn", "grammar"):
            stats.keep_chain(because)
    logged = [message.split("(")[1].split(")")[0] for message in caplog.messages]
    assert logged == ["drawn", "grammar"]
    assert stats.as_dict()["chains"] == {"drawn": 2, "not_worth_it": 1, "grammar": 1}


class RecordedMetric:
    """A stand-in for a metric of Ray."""

    def __init__(self, name: str, *_: Any, **__: Any) -> None:
        self.name, self.values = name.removeprefix(PREFIX), list[float]()
        made[self.name] = self

    def labels(self, *_: str) -> "RecordedMetric":
        return self

    def set(self, value: float) -> None:
        self.values.append(value)

    inc = observe = set


made: dict[str, RecordedMetric] = {}


def test_gauges_of_ray_are_set_again_in_each_step() -> None:
    """Ray drops gauges that are not set for some time, and the size of a pool never changes."""
    classes = dict.fromkeys(("_counter_cls", "_gauge_cls", "_histogram_cls"), RecordedMetric)
    logger: Any = SimpleNamespace(**classes, per_engine_labelvalues={0: ["m"]})
    exporter = Exporter(logger, 4)
    for growth in ({"kv_blocks": 9, "kv_blocks_held": 1, "steps": 1}, {"kv_blocks_held": 3}, {}):
        exporter.observe(growth, 0)
    found = {name: metric.values for name, metric in made.items() if metric.values}
    assert found == {"kv_blocks": [9, 9, 9], "kv_blocks_held": [1, 3, 3], "steps": [1]}
