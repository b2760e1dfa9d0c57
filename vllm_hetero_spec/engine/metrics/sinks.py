# SPDX-License-Identifier: Apache-2.0
"""Exports of the drafter's counters in a front end: Prometheus metrics and a log line."""

import logging
from collections import Counter
from typing import TYPE_CHECKING, Any

from prometheus_client import Gauge

from vllm_hetero_spec.engine.metrics.counters import CHAINS, FAULTS, METRICS, REASONS, Counted

if TYPE_CHECKING:
    from vllm.v1.metrics.loggers import PrometheusStatLogger

logger = logging.getLogger("vllm.hetero_spec")

PREFIX = "vllm:hetero_spec_"  # vLLM finds metrics by "vllm:" to read and to remove them
LABELS = ("model_name", "engine")  # as on each of vLLM's own metrics

_BUCKETS = [base / 10**power for power in range(4, -1, -1) for base in (1.0, 2.5, 5.0)]


class Exporter:
    """Our metrics in the registry of a front end.

    Args:
        stat_logger: vLLM's logger. Ours have its metric classes (of Prometheus or of Ray) and
            labels.
        lookahead: Longest draft in target tokens.
    """

    def __init__(self, stat_logger: "PrometheusStatLogger", lookahead: int) -> None:
        counter, gauge = stat_logger._counter_cls, stat_logger._gauge_cls
        histogram = stat_logger._histogram_cls
        engines: dict[int, list[object]] = stat_logger.per_engine_labelvalues
        keys = {
            "reason": REASONS,
            "because": CHAINS,
            "fault": FAULTS,
            "length": range(1, lookahead + 1),
            "position": range(lookahead),
        }
        # By field and engine: the function that takes the value, or one by label value.
        self._takers: dict[str, dict[int, Any]] = {}
        # Ray drops a gauge that is not set for some time, so all are set again in each step.
        self._gauges: dict[int, Counted] | None = None if gauge is Gauge else {}
        for field, metric in METRICS.items():
            labels = (*LABELS, metric.label) if metric.label else LABELS
            name = PREFIX + (metric.shown or field)
            if metric.kind == "counter":
                made, take = counter(name, metric.help, labels), "inc"
            elif metric.kind == "seconds":
                made, take = histogram(name, metric.help, labels, buckets=_BUCKETS), "observe"
            else:
                made = gauge(name, metric.help, labels, multiprocess_mode="mostrecent")
                take = "set"
            self._takers[field] = {
                engine: {
                    key: getattr(made.labels(*of, str(key)), take) for key in keys[metric.label]
                }
                if metric.label
                else getattr(made.labels(*of), take)
                for engine, of in engines.items()
            }

    def observe(self, growth: Counted, engine: int) -> None:
        """Add the changes of one step of one engine."""
        if self._gauges is not None:
            known = self._gauges.setdefault(engine, {})
            known |= {n: value for n, value in growth.items() if METRICS[n].kind == "gauge"}
            growth = growth | known
        for name, value in growth.items():
            take = self._takers[name][engine]
            if isinstance(value, dict):
                for key, count in value.items():
                    take[key](count)
            else:
                take(value)


class Log:
    """One line next to vLLM's "SpecDecoding metrics", about the steps since the last line."""

    def __init__(self) -> None:
        self._total = Counter[str]()
        self._skipped = Counter[str]()
        self._pools: dict[int, tuple[int, int]] = {}  # by engine: blocks in use, blocks

    def observe(self, growth: Counted, engine: int) -> None:
        self._skipped.update(growth.get("skipped", {}))
        self._total.update(
            {n: v for n, v in growth.items() if METRICS[n].kind != "gauge" and not METRICS[n].label}
        )
        held, blocks = self._pools.get(engine, (0, 0))
        self._pools[engine] = growth.get("kv_blocks_held", held), growth.get("kv_blocks", blocks)

    def say(self, level: int) -> None:
        """Log the line and start afresh. No line if there was no step."""
        total = self._total
        steps = total["steps"]
        if not steps:
            return
        held, blocks = map(sum, zip(*self._pools.values(), strict=True))
        reasons = ", ".join(f"{reason} {count}" for reason, count in self._skipped.most_common())
        kinds = ""
        if total["trees"]:
            beside = total["side_tokens_accepted"] / total["trees"]
            kinds = f" (trees: {total['trees']}, {beside:.2f} accepted branch tokens)"
        if total["copies"]:
            each = total["copied_tokens_accepted"] / total["copies"]
            kinds += f" (copies: {total['copies']}, {each:.2f} accepted tokens)"
        logger.log(
            level,
            "Drafter metrics: Drafts: %d%s, Mean draft length: %.2f tokens, "
            "Drafter tokens per target token: %.2f, Translation: %.2f ms/step, "
            "Drafter forwards: %.2f ms/step, Verification: %.2f ms/step, "
            "Drafter KV usage: %.1f%%, Undrafted: %s",
            total["drafts"],
            kinds,
            total["draft_tokens"] / max(total["drafts"], 1),
            total["drafter_tokens"] / max(total["draft_tokens"], 1),
            1e3 * total["translate_seconds"] / steps,
            1e3 * total["forward_seconds"] / steps,
            1e3 * total["verify_seconds"] / steps,
            100 * held / max(blocks, 1),
            reasons or "none",
        )
        total.clear()
        self._skipped.clear()
