# SPDX-License-Identifier: Apache-2.0
"""Timing of target and drafter at start-up, so that the first decision has estimates.

It runs dummy steps of growing size, for a few seconds at most, unless an earlier run kept
estimates. Live timings correct them, so they need not include attention to long contexts, sampling
or scheduling.

Engines whose steps wait for each other are not timed. Each would run another number of steps, or
none if its file exists, and the others would wait forever. A pipeline stage would time only itself.
"""

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tp_group

from vllm_hetero_spec.engine.drafting_rank import DraftingRank
from vllm_hetero_spec.engine.pair_file import PairFile
from vllm_hetero_spec.engine.request_limits import LONG_PREFILL
from vllm_hetero_spec.engine.seam.runner import Runner
from vllm_hetero_spec.lookahead.costs import CostModel
from vllm_hetero_spec.lookahead.estimates import Estimates
from vllm_hetero_spec.options import HeteroOptions
from vllm_hetero_spec.paths import cache_folder

logger = logging.getLogger("vllm.hetero_spec")

# Seconds of timing for each model; sizes that would take longer are extrapolated.
BUDGET = 2.0
_REPEATS = 3
Points = list[tuple[int, float]]


def sizes(largest: int) -> Iterator[int]:
    """Yield 1, 2, 3, 4, 6, 8, 12, 16, ... and `largest`."""
    size, found = 1, {largest}
    while size <= largest:
        found |= {size, size + size // 2}
        size *= 2
    yield from sorted(size for size in found if size <= largest)


def time_steps(
    step: Callable[[int], Any], largest: int, agree: Callable[[bool], bool] = bool
) -> Points:
    """Return (size, seconds), the fastest of some runs, by growing size until BUDGET is spent.

    Each repeat runs all sizes, so that a disturbance does not affect all runs of one size. Such a
    size would never be chosen, and so never be corrected. `agree` returns the first rank's value,
    so that ranks that step together stop together.
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
    """Seconds per context token of a drafter forward. `step` is the time of a 1-token forward."""
    read(tokens)
    took = min(_timed(read, tokens) for _ in range(_REPEATS))
    return max(0.0, took - step) / tokens


def _timed(step: Callable[[int], Any], size: int) -> float:
    torch.accelerator.synchronize()
    began = time.perf_counter()
    step(size)
    torch.accelerator.synchronize()
    return time.perf_counter() - began


def pair_file(seam: Runner, config: VllmConfig, options: HeteroOptions) -> PairFile:
    """Return the file of the pair's estimates. `config` is the target's."""
    cache = cache_folder()
    return PairFile(
        None if cache is None else cache / "pairs",
        config.model_config.compute_hash(),
        config.parallel_config.compute_hash(),
        _kernels(config),
        options,
        config.scheduler_config.max_num_seqs,
        _most_rows(seam, config, options),
    )


def _kernels(config: VllmConfig) -> tuple[object, ...]:
    """Return settings that change the target's speed, besides model and parallelism."""
    compilation = config.compilation_config
    return (
        compilation.mode,
        str(compilation.cudagraph_mode),
        compilation.max_cudagraph_capture_size,
        config.use_v2_model_runner,
        config.scheduler_config.async_scheduling,
        config.cache_config.cache_dtype,
        str(config.attention_config.backend),
    )


def known_of_pair(
    file: PairFile,
    seam: Runner,
    drafting: DraftingRank | None,
    config: VllmConfig,
    options: HeteroOptions,
) -> Estimates | None:
    """Return the estimates that an earlier run kept of this pair on this machine, or time it now.

    Every rank of the target has to call it, when the target is warm. None on ranks that do not
    choose draft lengths. Without costs if engines wait for each other (mixture of experts), or if
    there are pipeline stages.
    """
    group = get_tp_group()
    positions = options.num_speculative_tokens
    known = _kept(file, positions, drafting) if group.is_first_rank else None

    def agree(said: bool) -> bool:
        return bool(group.broadcast_object(said, src=0))

    if agree(known is not None):
        if known is not None:
            logger.info(
                "Speculation starts from the estimates of earlier runs of this pair: %s.",
                known.summary(),
            )
        return known
    parallel = config.parallel_config
    waits = config.model_config.is_moe and parallel.data_parallel_size > 1
    if waits or parallel.pipeline_parallel_size > 1:
        if drafting is None or not group.is_first_rank:
            return None
        return drafting.unknown(CostModel())
    began = time.perf_counter()
    target = time_steps(seam.target_forward, _most_rows(seam, config, options), agree)
    if drafting is None:
        return None
    source, alone = drafting.source, options.tensor_parallel == "rank0"
    most = config.scheduler_config.max_num_seqs
    steps = time_steps(source.step, most, bool if alone else agree)
    # As many as outweigh the rest of the forward.
    context = min(LONG_PREFILL, source.max_length, seam.max_num_tokens)
    costs = CostModel(target, steps, catch_up=time_catch_up(source.read, context, steps[0][1]))
    logger.info("Timed target and drafter in %.1f s.", time.perf_counter() - began)
    if not group.is_first_rank:
        return None
    known = drafting.unknown(costs)
    file.write(known)
    return known


def _kept(file: PairFile, positions: int, drafting: DraftingRank | None) -> Estimates | None:
    """Return the kept estimates, if any. Never raises, because the other ranks wait."""
    try:
        return file.read(positions, None if drafting is None else drafting.parts)
    except Exception:
        logger.exception("The estimates of this pair cannot be read; measuring again.")
        return None


def _most_rows(seam: Runner, config: VllmConfig, options: HeteroOptions) -> int:
    """Rows of the largest step without prefill."""
    rows = config.scheduler_config.max_num_seqs * (1 + options.num_speculative_tokens)
    return min(int(rows), seam.max_num_tokens)
