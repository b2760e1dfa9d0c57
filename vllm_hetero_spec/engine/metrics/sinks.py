# SPDX-License-Identifier: Apache-2.0
"""Where the drafter's counters end in a front end: Prometheus metrics, and a line in the log."""

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

from vllm_hetero_spec.engine.metrics.counters import REASONS

logger = logging.getLogger("vllm.hetero_spec")

PREFIX = "vllm:hetero_spec_"  # vLLM's reader and its clean-up know metrics by "vllm:"
LABELS = ("model_name", "engine")  # of each of vLLM's own metrics

# What is exported: a field of DraftStats and what it means. Times are those of one step.
COUNTERS = {
    "steps": "Steps in which the drafter was asked for drafts.",
    "off_steps": "Steps for which the controller left every request undrafted.",
    "drafts": "Drafts proposed to the target.",
    "draft_tokens": "Target tokens in proposed drafts.",
    "drafter_tokens": "Tokens the drafter generated for those drafts.",
    "catch_up_tokens": "Context tokens read by the drafter.",
    "reused_tokens": "Context tokens whose drafter KV another request had left.",
    "fuzzy_tokens": "Emitted tokens that only fuzzy (lossy) verification accepted.",
    "fuzzy_variation": "Total variation spent where fuzzy (lossy) verification applied.",
}
LABELLED = {
    "skipped": ("skipped", "reason", "Requests left undrafted in a step."),
    "lengths": ("drafts_by_length", "length", "Proposed drafts by length in target tokens."),
}
SECONDS = {
    "translate_seconds": "Time a step spent translating between the tokenizers.",
    "forward_seconds": "Time a step spent in the drafter's forwards.",
    "propose_seconds": "Time a step spent proposing, translation and forwards included.",
    "verify_seconds": "Time a step spent in the rejection sampler.",
}
GAUGES = {
    "kv_blocks": "Blocks of the drafter's KV pool.",
    "kv_blocks_held": "Blocks of the drafter's KV pool in use after the last step.",
    "lookahead": "Target tokens the controller drafts at present; 0 while the target is alone.",
    "off_fraction": "Share of recent steps for which the controller left every request undrafted.",
    "gain": "Tokens per second foreseen with speculation over those of the target alone.",
    "tokens_per_second": "Tokens per second achieved, as the controller sees it.",
    "drafter_step_seconds": "Estimated time of a drafter step at the present batch.",
    "target_step_seconds": "Estimated time of a plain target step at the present batch.",
}
BY_POSITION = "acceptance"
_BUCKETS = [base / 10**power for power in range(4, -1, -1) for base in (1.0, 2.5, 5.0)]


class Exporter:
    """Our metrics in the registry of a front end.

    Args:
        stat_logger: The PrometheusStatLogger beside whose metrics ours are: same classes of
            metrics (Prometheus' or Ray's), same labels.
        lookahead: The longest draft.
    """

    def __init__(self, stat_logger: Any, lookahead: int) -> None:
        counter = stat_logger._counter_cls
        histogram = stat_logger._histogram_cls
        gauge = stat_logger._gauge_cls
        engines: dict[int, list[Any]] = stat_logger.per_engine_labelvalues
        # Per field and engine, what takes the number; the labelled ones per label value as well.
        self._plain: dict[str, dict[int, Callable[[float], None]]] = {}
        self._labelled: dict[str, dict[int, dict[Any, Callable[[float], None]]]] = {}
        for name, meaning in COUNTERS.items():
            metric = counter(PREFIX + name, meaning, LABELS)
            self._plain[name] = {i: metric.labels(*values).inc for i, values in engines.items()}
        for name, meaning in SECONDS.items():
            metric = histogram(PREFIX + name, meaning, LABELS, buckets=_BUCKETS)
            self._plain[name] = {i: metric.labels(*values).observe for i, values in engines.items()}
        for name, meaning in GAUGES.items():
            metric = gauge(PREFIX + name, meaning, LABELS, multiprocess_mode="mostrecent")
            self._plain[name] = {i: metric.labels(*values).set for i, values in engines.items()}
        expected = {"skipped": REASONS, "lengths": range(1, lookahead + 1)}
        for name, (suffix, label, meaning) in LABELLED.items():
            metric = counter(PREFIX + suffix, meaning, (*LABELS, label))
            self._labelled[name] = {
                i: {key: metric.labels(*values, str(key)).inc for key in expected[name]}
                for i, values in engines.items()
            }

        rates = gauge(
            PREFIX + "acceptance_rate",
            "Rate at which a drafted token is accepted where those before it were.",
            (*LABELS, "position"),
            multiprocess_mode="mostrecent",
        )
        self._labelled[BY_POSITION] = {
            i: {key: rates.labels(*values, str(key)).set for key in range(lookahead)}
            for i, values in engines.items()
        }

    def observe(self, growth: dict[str, Any], engine: int) -> None:
        """Add what one step of one engine counted."""
        for name, value in growth.items():
            if isinstance(value, dict):
                takers = self._labelled[name][engine]
                for key, count in value.items():
                    takers[key](count)
            else:
                self._plain[name][engine](value)


class Log:
    """One line beside vLLM's "SpecDecoding metrics", about the steps since the last one."""

    def __init__(self) -> None:
        self._total = Counter[str]()
        self._skipped = Counter[str]()
        self._pools: dict[int, tuple[int, int]] = {}  # per engine: blocks held, blocks

    def observe(self, growth: dict[str, Any], engine: int) -> None:
        """Add what one step of any engine counted."""
        self._skipped.update(growth.get("skipped", {}))
        self._total.update({name: growth[name] for name in COUNTERS | SECONDS if name in growth})
        held, blocks = self._pools.get(engine, (0, 0))
        self._pools[engine] = (
            growth.get("kv_blocks_held", held),
            growth.get("kv_blocks", blocks),
        )

    def say(self, level: int) -> None:
        """Log the line and start afresh; nothing where there was no step."""
        total = self._total
        steps = total["steps"]
        if not steps:
            return
        held, blocks = map(sum, zip(*self._pools.values(), strict=True))
        reasons = ", ".join(f"{reason} {count}" for reason, count in self._skipped.most_common())
        logger.log(
            level,
            "Drafter metrics: Drafts: %d, Mean draft length: %.2f tokens, "
            "Drafter tokens per target token: %.2f, Translation: %.2f ms/step, "
            "Drafter forwards: %.2f ms/step, Verification: %.2f ms/step, "
            "Drafter KV usage: %.1f%%, Undrafted: %s",
            total["drafts"],
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
