# SPDX-License-Identifier: Apache-2.0
"""Machines of the replay: a recorded CPU, and two GPUs by a cost model.

The GPUs run a pair of 8B and 0.5B parameters in bfloat16, with full CUDA graphs. The constants were
measured on one H200; an H100 differs by its bandwidth.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from recordings import LONGEST, Costs, Recording, line

Seconds = Callable[[float], float]

# One H200 and one H100.
_BANDWIDTH = {"h200": 3.78e12, "h100": 2.6e12}  # bytes per second, from steps of 5.15 and 7.1 ms
_FLOPS = 500e12  # per second, of large products in bfloat16
_TARGET = 8.03e9, 0.9e-3, 131e3  # parameters; seconds beside them; bytes of KV per token
_DRAFTER = 24, 0.358e9, 0.136e9  # layers; parameters of these; parameters of the head
_LAUNCH, _PICK = 29.5e-6, 70e-6  # seconds of a layer's kernels and of a token's choice
_ROW = 1.2e-6  # seconds of a row beside its products
_REST, _REST_MORE = 1.8e-3, 0.036e-3  # seconds of a round beside the forwards; each further request
_CONTEXT = 500  # tokens of each request
_UNTIMED = 0.3e-3  # seconds of sampling, which the calibration at start-up does not contain
# Assumed, as no long series of steps of a GPU is recorded.
_NOISE, _OUTLIERS, _OUTLIER = 0.015, 0.005, 0.4  # of logarithms; share; its logarithm


@dataclass(frozen=True)
class Machine:
    """Costs of a pair on a machine, in seconds.

    Attributes:
        target: A target step, by requests and rows.
        drafter: A drafter step, by requests.
        overhead: The rest of a round, by requests.
        steps: Drafter steps of a draft: constant, and for each target token.
        catch_up: A context token that the drafter reads.
        noise: Logarithms of measured over usual seconds, for target steps and for rounds.
        calibration: Costs that an engine times at its start, as arguments of `CostModel`.
        stops_early: True if the drafter calls `continue_drafting` between its steps.
        buckets: Lengths to which all drafts of a step are padded; empty if they are not padded.
    """

    target: Callable[[float, float], float]
    drafter: Seconds
    overhead: Seconds
    steps: tuple[float, float]
    catch_up: float
    noise: tuple[list[float], list[float]]
    calibration: dict[str, Any] = field(default_factory=dict)
    stops_early: bool = True
    buckets: tuple[int, ...] = ()

    def drafter_steps(self, tokens: float) -> float:
        """Mean drafter steps of a round whose longest draft has so many tokens."""
        return self.steps[0] + self.steps[1] * tokens if tokens else 0.0

    def rows(self, lengths: Sequence[int], longest: int) -> int:
        """Rows of a target step for drafts of these lengths, planned with at most `longest`."""
        if not self.buckets:
            return len(lengths) + sum(lengths)
        return len(lengths) * (1 + next(bucket for bucket in self.buckets if bucket >= longest))


def cpu(recording: Recording, temperature: int) -> Machine:
    """Return the machine of a recording. Its noise is the recorded one, in the same order."""
    steps, every = recording.steps[str(temperature)], recording.rounds[str(temperature)]
    # Without rounds that read long contexts, or that drafted nothing.
    rounds = [r for r in every if r[2] and r[5] <= 4 * r[0] + LONGEST]
    plain = Costs((batch, seconds) for batch, rows, seconds in steps if rows == batch)
    verify = Costs((rows, seconds) for batch, rows, seconds in steps if rows > batch)
    drafter = Costs((round(r[0]), r[3] / r[1]) for r in rounds)

    def target(batch: float, rows: float) -> float:
        return plain(batch) if rows <= batch else max(plain(batch), verify(rows))

    noise = [math.log(seconds / target(batch, rows)) for batch, rows, seconds in steps]
    return Machine(
        target,
        drafter,
        overhead=Costs((round(r[0]), r[4]) for r in rounds),
        steps=line([(r[2], r[1]) for r in rounds]),
        catch_up=recording.calibration["catch_up"],
        noise=(noise, [math.log(r[3] / (r[1] * drafter(r[0]))) for r in rounds]),
        calibration=recording.calibration,
    )


def gpu(name: str, temperature: int, buckets: tuple[int, ...] = ()) -> Machine:
    """Return an H200 or H100. Sampled requests have the costs of greedy ones."""
    bandwidth = _BANDWIDTH[name]
    parameters, beside, kv = _TARGET
    layers, body, head = _DRAFTER

    def step(rows: float) -> float:
        memory, compute = 2 * parameters / bandwidth, 2 * parameters * rows / _FLOPS
        return beside + (memory**4 + compute**4) ** 0.25 + _ROW * rows

    def target(batch: float, rows: float) -> float:
        return step(rows) + batch * _CONTEXT * kv / bandwidth

    def drafter(batch: float) -> float:
        products = 2 * (body + head) / bandwidth + 2 * (body + head) * batch / _FLOPS
        return layers * _LAUNCH + products + _PICK

    def overhead(batch: float) -> float:
        return _REST + _REST_MORE * (batch - 1)

    sizes = 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 288
    calibration = {
        "target": [(n, step(n) - _UNTIMED) for n in sizes],
        "drafter": [(n, drafter(n)) for n in sizes if n <= 32],
        "catch_up": 2 * (body + head) / _FLOPS,
    }
    # A device runs the planned steps, one for each target token of a sampled draft.
    steps = 0.0, 1.0 if temperature else 1.04
    return Machine(
        target,
        drafter,
        overhead,
        steps,
        calibration["catch_up"],
        (_noise(_NOISE, 1), _noise(_NOISE, 2)),
        calibration,
        stops_early=False,
        buckets=buckets,
    )


def _noise(spread: float, seed: int) -> list[float]:
    """Return logarithms of measured over usual seconds."""
    generator = random.Random(seed)
    return [
        _OUTLIER if generator.random() < _OUTLIERS else generator.gauss(0.0, spread)
        for _ in range(2000)
    ]


def named(name: str, recording: Recording, temperature: int) -> Machine:
    """Return a machine of `bench.MACHINES`. `h200-async` pads drafts."""
    if name == "cpu":
        return cpu(recording, temperature)
    kind, _, padded = name.partition("-")
    return gpu(kind, temperature, (0, LONGEST // 2, LONGEST) if padded else ())
