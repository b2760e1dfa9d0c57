# SPDX-License-Identifier: Apache-2.0
"""Times target and drafter at start-up, so that the first decision is an informed one.

Dummy steps of growing size, for a few seconds at most, where no earlier run kept what it knew. Live
timings correct it, so it need not be exact: attention to long contexts, sampling and scheduling are
not in it. Engines whose every step waits for the others' are not timed: each would take other
numbers of steps, or none where its file is found, and wait for ever. Nor is one in pipeline stages,
each of which would time itself alone.
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
from vllm_hetero_spec.engine.seam.runner import Runner
from vllm_hetero_spec.lookahead.costs import CostModel
from vllm_hetero_spec.lookahead.estimates import Estimates
from vllm_hetero_spec.options import HeteroOptions
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


def _timed(step: Callable[[int], Any], size: int) -> float:
    torch.accelerator.synchronize()
    began = time.perf_counter()
    step(size)
    torch.accelerator.synchronize()
    return time.perf_counter() - began


def pair_file(seam: Runner, config: VllmConfig, options: HeteroOptions) -> PairFile:
    """The file of what is known of a pair.

    Args:
        seam: The target's model runner.
        config: The target's.
        options: The user's.
    """
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
    """What decides how fast the target's steps are, beside its model and where its ranks are."""
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
    """What an earlier run kept of this pair on this machine, or else its costs, timed now.

    Every rank of the target has to call it. None on ranks that do not decide how far to draft.
    Nothing is known at first where engines wait for each other, as those of a mixture of experts,
    or where there are pipeline stages.

    Args:
        file: Where the first rank keeps it.
        seam: The target's model runner, warm.
        drafting: The drafter; None on ranks that do not draft.
        config: The target's.
        options: The user's.
    """
    group = get_tp_group()
    positions = options.num_speculative_tokens
    known = _kept(file, positions) if group.is_first_rank else None

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
        return Estimates.of(CostModel(), positions) if group.is_first_rank else None
    began = time.perf_counter()
    target = time_steps(seam.target_forward, _most_rows(seam, config, options), agree)
    if drafting is None:
        return None
    source, alone = drafting.source, options.tensor_parallel == "rank0"
    most = config.scheduler_config.max_num_seqs
    steps = time_steps(source.step, most, bool if alone else agree)
    context = min(_CONTEXT, source.max_length, seam.max_num_tokens)
    costs = CostModel(target, steps, catch_up=time_catch_up(source.read, context, steps[0][1]))
    logger.info("Timed target and drafter in %.1f s.", time.perf_counter() - began)
    if not group.is_first_rank:
        return None
    known = Estimates.of(costs, positions)
    file.write(known)
    return known


def _kept(file: PairFile, positions: int) -> Estimates | None:
    """What the file holds, if anything; raises nothing, as the other ranks wait to be told."""
    try:
        return file.read(positions)
    except Exception:
        logger.exception("The estimates of this pair cannot be read; measuring again.")
        return None


def _most_rows(seam: Runner, config: VllmConfig, options: HeteroOptions) -> int:
    """Rows of the largest step that only decodes and verifies."""
    rows = config.scheduler_config.max_num_seqs * (1 + options.num_speculative_tokens)
    return min(int(rows), seam.max_num_tokens)
