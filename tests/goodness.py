# SPDX-License-Identifier: Apache-2.0
"""Whether samples follow a law, with bounds that hold for any number of samples.

Every statistical test of the suite asks `follows` or `p_value`, and a test of what must be caught
states its power with `missed`: a true law fails in less than one run of 10^8, so that the whole
suite does in less than one of 10^6; a wrong one is missed in less than one of 10^4.
"""

import math
from collections import Counter
from collections.abc import Hashable, Mapping
from typing import Any

ALPHA = 1e-8
MISSED = 1e-4
# Outcomes expected less often share a cell: many rare cells would hide what a wrong rule does.
_EXPECTED = 8
_LEAST = 1e-7  # of the shared cell: laws are known up to rounding


def _cells(law: Mapping[Any, float], samples: int) -> list[Hashable]:
    return [outcome for outcome, p in law.items() if p * samples >= _EXPECTED]


def _shares(shares: Mapping[Any, float], cells: list[Hashable]) -> list[float]:
    """The shares of the cells, and of all else."""
    found = [shares.get(cell, 0.0) for cell in cells]
    return [*found, max(1.0 - sum(found), 0.0)]


def _floored(shares: list[float]) -> list[float]:
    return [*shares[:-1], max(shares[-1], _LEAST)]


def _divergence(p: list[float], q: list[float]) -> float:
    """Kullback-Leibler, in nats."""
    pairs = [(a, b) for a, b in zip(p, q, strict=True) if a > 0]
    return sum(a * math.log(a / b) if b > 0 else math.inf for a, b in pairs)


def _bound(nats: float, freedom: int) -> float:
    """How probable samples are at most whose divergence from their law is `nats` / samples.

    R. Agrawal, Finite-sample concentration of the multinomial in relative entropy (2020).
    """
    if nats <= freedom:
        return 1.0
    return math.exp(-nats + freedom * (1 + math.log(nats / freedom)))


def p_value(found: Counter, law: Mapping[Any, float]) -> float:
    """At most how probable samples are that are as far from the law as these.

    Args:
        found: How often each outcome came.
        law: Probabilities; what they lack to 1 is that of everything else.
    """
    samples = found.total()
    cells = _cells(law, samples)
    shares = {outcome: count / samples for outcome, count in found.items()}
    nats = samples * _divergence(_shares(shares, cells), _floored(_shares(law, cells)))
    return _bound(nats, max(1, len(cells)))


def follows(found: Counter, law: Mapping[Any, float]) -> bool:
    """Whether samples may have come from the law."""
    return p_value(found, law) > ALPHA


def missed(law: Mapping[Any, float], wrong: Mapping[Any, float], samples: int) -> float:
    """At most how probable it is that samples of a wrong law seem to follow the law.

    By Sanov's theorem for convex sets: the empirical laws that pass are a ball about the law, and
    the one of them that is nearest to the wrong law lies on the geometric path between the two.
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
    near, far = 1.0, 0.0  # weights that pass and that do not
    for _ in range(60):
        middle = (near + far) / 2
        near, far = (middle, far) if passes(middle) else (near, middle)
    return math.exp(-samples * _divergence(between(near), other))
