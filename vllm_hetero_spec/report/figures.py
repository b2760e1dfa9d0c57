# SPDX-License-Identifier: Apache-2.0
"""Medians, ranges and speedups: one definition for all that is measured.

A speedup is a ratio of two runs of the same round, so that its range over rounds says how far a
machine drifted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_hetero_spec.measure.load import Sample


@dataclass(frozen=True)
class Quantiles:
    """Median and tail of pooled latencies, in seconds."""

    median: float
    p90: float
    p99: float


@dataclass(frozen=True)
class Spread:
    """One value per round: median, range and quartiles."""

    median: float
    low: float
    high: float
    quartile1: float
    quartile3: float
    rounds: int


def quantiles(values: Sequence[float]) -> Quantiles | None:
    """Linearly interpolated; None of nothing."""
    if not values:
        return None
    return Quantiles(*(float(x) for x in np.percentile(values, [50, 90, 99])))


def spread(values: Sequence[float]) -> Spread:
    """Of one or more rounds."""
    median, low, high, first, third = (
        float(x) for x in np.percentile(values, [50, 0, 100, 25, 75])
    )
    return Spread(median, low, high, first, third, rounds=len(values))


def speedup(pairs: Sequence[tuple[Sample, Sample]]) -> Spread | None:
    """Ratios of tokens per second.

    Args:
        pairs: (run, reference) of the same round.

    Returns:
        The median of the ratios with their range; None without pairs.
    """
    if not pairs:
        return None
    return spread([run.tokens_per_second / of.tokens_per_second for run, of in pairs])


def error_of_ratio(parts: Sequence[float], wholes: Sequence[float]) -> float | None:
    """Standard error of `sum(parts) / sum(wholes)`, one pair for each independent group.

    Groups are prompts: their numbers vary together, so that a ratio of sums is less certain than
    its total count says. None of fewer than two groups, or where all is zero.
    """
    groups, whole = len(parts), sum(wholes)
    if groups < 2 or not whole:
        return None
    of_all = sum(parts) / whole
    squares = sum((part - of_all * own) ** 2 for part, own in zip(parts, wholes, strict=True))
    return float((groups / (groups - 1) * squares) ** 0.5 / whole)
