# SPDX-License-Identifier: Apache-2.0
"""What a GPU and its host did during profiles, by torch.profiler and cProfile."""

import cProfile
import pstats
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_HOST = ("cuda_runtime", "cuda_driver")
_MOST = 25  # of the host's functions


def device_use(events: Iterable[Mapping[str, Any]], rounds: int) -> dict[str, Any]:
    """Where the time of a run went.

    Args:
        events: Of a Chrome trace; "ts" and "dur" in microseconds.
        rounds: How many there were.

    Returns:
        Of each round: milliseconds from end to end, share of them in which nothing ran on the
        device, kernels, copies by kind, and what the host launched and waited for. "gpu" is None
        where the trace has no device.
    """
    spans, kernels, copies = [], 0, Counter[str]()
    calls, waited = Counter[str](), 0.0
    for event in events:
        kind, name = event.get("cat"), str(event.get("name"))
        if kind in _ON_DEVICE:
            spans.append((event["ts"], event["ts"] + event["dur"]))
            kernels += kind == "kernel"
            if kind == "gpu_memcpy":
                copies[name] += 1
        elif kind in _HOST and ("Launch" in name or "Synchronize" in name):
            calls[name] += 1
            waited += event["dur"] if "Synchronize" in name else 0.0
    if not spans:
        return {"gpu": None}
    whole = max(end for _, end in spans) - min(start for start, _ in spans)
    return {
        "gpu": {
            "ms": round(whole / 1e3 / rounds, 3),
            "idle": round(1 - _covered(spans) / whole, 4) if whole else 0.0,
            "kernels": round(kernels / rounds, 1),
            "copies": {name: round(count / rounds, 2) for name, count in copies.items()},
            "calls": {name: round(count / rounds, 2) for name, count in calls.items()},
            "waited_ms": round(waited / 1e3 / rounds, 3),
        }
    }


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def host_use(profile: cProfile.Profile, rounds: int) -> dict[str, float]:
    """Milliseconds of each round in the functions that took most, without those they called.

    cProfile makes small functions look dearer than they are.
    """
    found: dict[str, float] = {}
    for (file, line, name), (_, _, own, _, _) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        if name == "rest" or "time.sleep" in name:  # the load's driver, before it begins
            continue
        place = name if line == 0 else f"{Path(file).name}:{line} {name}"
        found[place] = found.get(place, 0.0) + 1e3 * own / rounds
    most = sorted(found, key=lambda place: -found[place])[:_MOST]
    return {place: round(found[place], 3) for place in most}
