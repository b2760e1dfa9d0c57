# SPDX-License-Identifier: Apache-2.0
"""What `measure_gpu.py` knows of the drafter's CUDA graphs; nothing else there does."""

from collections.abc import Callable
from typing import Any

# Options of the drafter by mode.
MODES: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "graphs": {"enforce_eager": False},
}
NONE_HERE = "there are no CUDA graphs on this machine"


def facts(drafting: Any) -> dict[str, Any]:
    """What a rank that drafts has captured; empty where it runs eagerly."""
    graphs = getattr(drafting.drafter, "graphs", None)
    return {} if graphs is None else dict(graphs.facts())


def bare_replay(drafting: Any, batch: int) -> Callable[[], Any] | None:
    """One replay of the captured step for so many requests and nothing else; None without one."""
    graphs = getattr(drafting.drafter, "graphs", None)
    return None if graphs is None else graphs.replay_of(batch)
