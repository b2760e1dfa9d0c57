# SPDX-License-Identifier: Apache-2.0
"""Log lines and metrics of a front end. No engine runs."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_hetero_spec.engine.metrics.counters import DraftStats
from vllm_hetero_spec.engine.metrics.sinks import PREFIX, Exporter


def test_a_kept_chain_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    stats = DraftStats()
    with caplog.at_level(logging.INFO, "vllm.hetero_spec"):
        for because in ("drawn", "not_worth_it", "drawn", "grammar"):
            stats.keep_chain(because)
    assert [message.split("(")[1].split(")")[0] for message in caplog.messages] == [
        "drawn",
        "grammar",
    ]
    assert stats.as_dict()["chains"] == {"drawn": 2, "not_worth_it": 1, "grammar": 1}


class Told:
    """A stand-in for a metric of Ray. It records its values."""

    def __init__(self, name: str, *_: Any, **__: Any) -> None:
        self.name, self.values = name.removeprefix(PREFIX), list[float]()
        made[self.name] = self

    def labels(self, *_: str) -> "Told":
        return self

    def set(self, value: float) -> None:
        self.values.append(value)

    inc = observe = set


made: dict[str, Told] = {}


def test_gauges_of_ray_are_told_again() -> None:
    """Ray drops gauges that are not set for some time, and the size of a pool never changes."""
    logger: Any = SimpleNamespace(
        _counter_cls=Told, _gauge_cls=Told, _histogram_cls=Told, per_engine_labelvalues={0: ["m"]}
    )
    exporter = Exporter(logger, 4)
    for growth in ({"kv_blocks": 9, "kv_blocks_held": 1, "steps": 1}, {"kv_blocks_held": 3}, {}):
        exporter.observe(growth, 0)
    told = {name: metric.values for name, metric in made.items() if metric.values}
    assert told == {"kv_blocks": [9, 9, 9], "kv_blocks_held": [1, 3, 3], "steps": [1]}
