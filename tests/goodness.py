# SPDX-License-Identifier: Apache-2.0
"""Test whether samples follow a distribution, with bounds for any number of samples.

All statistical tests use `follows` or `p_value`. A correct distribution fails less than one test in
10^8, and less than one run of the whole suite in 10^6. A test of a fault computes with `missed`
that at most one run in 10^4 misses it.
"""

import math
from collections import Counter
from collections.abc import Hashable, Mapping
from typing import Any

ALPHA = 1e-8
MISSED = 1e-4
# Outcomes expected less often share one cell, because many rare cells would hide an error.
_EXPECTED = 8
_LEAST = 1e-7  # smallest probability of the shared cell, because of rounding errors


def _cells(law: Mapping[Any, float], samples: int) -> list[Hashable]:
    return [outcome for outcome, p in law.items() if p * samples >= _EXPECTED]


def _shares(shares: Mapping[Any, float], cells: list[Hashable]) -> list[float]:
    """Return the shares of the cells, and the share of all other outcomes."""
    found = [shares.get(cell, 0.0) for cell in cells]
    return [*found, max(1.0 - sum(found), 0.0)]


def _floored(shares: list[float]) -> list[float]:
    return [*shares[:-1], max(shares[-1], _LEAST)]


def _divergence(p: list[float], q: list[float]) -> float:
    """Return the Kullback-Leibler divergence in nats."""
    pairs = [(a, b) for a, b in zip(p, q, strict=True) if a > 0]
    return sum(a * math.log(a / b) if b > 0 else math.inf for a, b in pairs)


def _bound(nats: float, freedom: int) -> float:
    """Bound the probability of samples whose divergence is at least `nats` / samples.

    R. Agrawal, Finite-sample concentration of the multinomial in relative entropy (2020).
    """
    if nats <= freedom:
        return 1.0
    return math.exp(-nats + freedom * (1 + math.log(nats / freedom)))


def p_value(found: Counter, law: Mapping[Any, float]) -> float:
    """Return an upper bound of the p-value: samples at least as far from the distribution.

    `law` has the probability of each outcome; the rest to 1 belongs to all other outcomes.
    """
    samples = found.total()
    cells = _cells(law, samples)
    shares = {outcome: count / samples for outcome, count in found.items()}
    nats = samples * _divergence(_shares(shares, cells), _floored(_shares(law, cells)))
    return _bound(nats, max(1, len(cells)))


def follows(found: Counter, law: Mapping[Any, float]) -> bool:
    """Return True if the samples are compatible with the distribution."""
    return p_value(found, law) > ALPHA


def missed(law: Mapping[Any, float], wrong: Mapping[Any, float], samples: int) -> float:
    """Return an upper bound of the probability that samples of `wrong` pass as `law`.

    By Sanov's theorem for convex sets: the empirical distributions that pass are a ball around
    `law`. The one nearest to `wrong` is on the geometric path between the two.
    """
    cells = _cells(law, samples)
    right, other = _floored(_shares(law, cells)), _shares(wrong, cells)

    def between(weight: float) -> list[float]:
        mixed = [a**weight * b ** (1 - weight) for a, b in zip(right, other, strict=True)]
        total = sum(mixed)
        return [x / total for x in mixed] if total else right

    def passes(weight: float) -> bool:
        nats = samples * _divergence(between(weight), right)
        return _bound(nats, max(1, len(cells))) > ALPHA

    if passes(0.0):
        return 1.0
    near, far = 1.0, 0.0  # a weight that passes, and one that does not
    for _ in range(60):
        middle = (near + far) / 2
        near, far = (middle, far) if passes(middle) else (near, middle)
    return math.exp(-samples * _divergence(between(near), other))
