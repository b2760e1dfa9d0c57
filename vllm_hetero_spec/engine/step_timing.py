# SPDX-License-Identifier: Apache-2.0
"""Times target and drafter at start-up, so that the first decision is an informed one.

Dummy steps of growing size, for a few seconds at most; the result is kept on disk by everything
that it depends on. Live timings correct it, so it need not be exact: attention to long contexts,
sampling and scheduling are not in it.
"""

import hashlib
import json
import logging
import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from vllm import __version__ as vllm_version
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.platforms import current_platform

from vllm_hetero_spec.config import HeteroOptions
from vllm_hetero_spec.engine.drafting_rank import DraftingRank
from vllm_hetero_spec.engine.seam.runner_v1 import RunnerV1
from vllm_hetero_spec.lookahead.costs import CostModel
from vllm_hetero_spec.machine import cpu_name
from vllm_hetero_spec.paths import cache_folder

logger = logging.getLogger("vllm.hetero_spec")

# Seconds that either model may be timed for; sizes that would take longer are extrapolated.
BUDGET = 2.0
_REPEATS = 3
# Context tokens read to learn what one costs: enough to outweigh the rest of the forward.
_CONTEXT = 128
Points = list[tuple[int, float]]


def sizes(largest: int) -> Iterator[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, ... up to the largest, and that itself."""
    size, found = 1, {largest}
    while size <= largest:
        found |= {size, size + size // 2}
        size *= 2
    yield from sorted(size for size in found if size <= largest)


def time_steps(
    step: Callable[[int], Any], largest: int, agree: Callable[[bool], bool] = bool
) -> Points:
    """(size, seconds) of a step, the quickest of some, by growing size until BUDGET is spent.

    All sizes come before any comes again: what disturbs the machine for a while hits one round of
    them, not all of one size, which would never be chosen and so never be put right.

    Args:
        step: Runs one.
        largest: Last size.
        agree: Makes ranks that step together stop together: what the first of them says.
    """
    quickest: dict[int, float] = {}
    spent = 0.0
    for size in sizes(largest):
        step(size)  # the first of its size may compile or allocate
        quickest[size] = _timed(step, size)
        spent += 2 * quickest[size]
        if agree(spent > BUDGET / 2):  # the other half goes to the repeats
            break
    for _ in range(1, _REPEATS):
        for size in quickest:
            quickest[size] = min(quickest[size], _timed(step, size))
    return list(quickest.items())


def time_catch_up(read: Callable[[int], Any], tokens: int, step: float) -> float:
    """Seconds that each context token adds to a forward of the drafter.

    Args:
        read: Reads so many.
        tokens: How many to read at once.
        step: Seconds of a forward of one token.
    """
    read(tokens)
    took = min(_timed(read, tokens) for _ in range(_REPEATS))
    return max(0.0, took - step) / tokens


class CostFile:
    """Costs of a pair on this machine, kept between starts.

    Args:
        folder: Where; None keeps nothing.
        identity: Everything that the costs depend on.
    """

    def __init__(self, folder: Path | None, *identity: Any) -> None:
        key = repr((identity, vllm_version, torch.__version__, machine()))
        name = f"costs-{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
        self._path = None if folder is None else folder / name

    def read(self) -> CostModel | None:
        """What was kept; None where nothing is, or nothing that can be read."""
        if self._path is None or not self._path.is_file():
            return None
        try:
            return CostModel.from_dict(json.loads(self._path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            logger.warning("Costs in %s cannot be read (%s): measured anew.", self._path, error)
            return None

    def write(self, costs: CostModel) -> None:
        """Keep what was measured; a folder that cannot be written to is only noted."""
        if self._path is None:
            return
        partial = self._path.with_suffix(f".{os.getpid()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(costs.to_dict()), encoding="utf-8")
            partial.replace(self._path)
        except OSError as error:
            logger.info("Costs could not be kept in %s: %s.", self._path, error)


def machine() -> tuple[Any, ...]:
    """What tells one machine from another that is faster or slower."""
    return (
        current_platform.get_device_name() if not current_platform.is_cpu() else "cpu",
        platform.machine(),
        cpu_name(),
        os.cpu_count(),
        torch.get_num_threads(),
    )


def _timed(step: Callable[[int], Any], size: int) -> float:
    torch.accelerator.synchronize()
    began = time.perf_counter()
    step(size)
    torch.accelerator.synchronize()
    return time.perf_counter() - began


def time_models(
    seam: RunnerV1, drafting: DraftingRank | None, config: VllmConfig, options: HeteroOptions
) -> CostModel | None:
    """The costs of this pair on this machine, from disk or timed now.

    Every rank of the target has to call it. None on ranks that do not draft.

    Args:
        seam: The target's model runner, warm.
        drafting: The drafter; None on ranks that do not draft.
        config: The target's.
        options: The user's.
    """
    group = get_tp_group()
    most = config.scheduler_config.max_num_seqs
    rows = min(most * (1 + options.num_speculative_tokens), seam.max_num_tokens)
    cache = cache_folder()
    kept = CostFile(
        None if cache is None else cache / "costs",
        config.model_config.compute_hash(),
        config.parallel_config.compute_hash(),
        config.compilation_config.mode,
        options,
        most,
        rows,
    )
    costs = kept.read() if group.is_first_rank else None

    def agree(said: bool) -> bool:
        return bool(group.broadcast_object(said, src=0))

    if agree(costs is not None):
        return costs
    began = time.perf_counter()
    target = time_steps(seam.target_forward, rows, agree)
    if drafting is None:
        return None
    alone = options.tensor_parallel == "rank0"
    steps = time_steps(drafting.step, most, bool if alone else agree)
    context = min(_CONTEXT, drafting.drafter.max_length, seam.max_num_tokens)
    costs = CostModel(target, steps, catch_up=time_catch_up(drafting.read, context, steps[0][1]))
    logger.info("Timed target and drafter in %.1f s.", time.perf_counter() - began)
    if group.is_first_rank:
        kept.write(costs)
    return costs
