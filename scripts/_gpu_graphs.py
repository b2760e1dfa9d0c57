# SPDX-License-Identifier: Apache-2.0
"""What `measure_gpu.py` knows of the drafter's CUDA graphs; nothing else there does."""

from collections.abc import Callable
from typing import Any

# Options of the drafter by mode, the fastest last.
MODES: dict[str, dict[str, Any]] = {"eager": {"enforce_eager": True}, "graphs": {}}
NONE_HERE = "there are no CUDA graphs on this machine"


def facts(drafting: Any) -> dict[str, Any]:
    """How many graphs a rank that drafts has, and rounds that began anew for a first token."""
    return {
        "recorded": len(_recordings(drafting)),
        "restarted_rounds": drafting.source.drafter.restarted_rounds,
    }


def bare_replay(drafting: Any, batch: int, width: int = 0) -> Callable[[], None] | None:
    """One replay and nothing else; None where there is no graph of that kind.

    Args:
        drafting: A rank that drafts.
        batch: Requests, at least.
        width: Tokens of each in a graph that catches up; 0 for that of a step.
    """
    found = _recordings(drafting)
    size = min((size for size, of in found if size >= batch and of == width), default=None)
    if size is None:
        return None
    steps, replay = drafting.source.drafter._steps, found[size, width].replay

    def replayed() -> None:
        steps.again()  # else its counter would leave the plan
        replay()

    return replayed


def _recordings(drafting: Any) -> dict[tuple[int, int], Any]:
    """Those of chains, by number of requests and tokens of each, which are 0 for a step."""
    found = getattr(drafting.source.drafter._steps, "_recordings", {})
    return {(size, width): of for (size, width, trees), of in found.items() if not trees}
